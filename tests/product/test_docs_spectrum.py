"""docs/results/spectrum.py: the numbers of features by hand, and of a run as its picture has them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from medfl.runs.launch import federate
from tests.support.phantoms import draw_small

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "results_spectrum", ROOT / "docs" / "results" / "spectrum.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_collapsed_classes_by_hand(module: ModuleType) -> None:
    """Each of 60 features an affine image of one scalar: (60^2 - 50 (60/50)^2) / 128; a class of 9 does not count."""
    draw = np.random.default_rng(0)
    values = draw.normal(size=(149, 1)) * draw.uniform(1, 3, size=60) + draw.normal(size=60)
    values[140:] = draw.normal(size=(9, 60))
    labels = np.repeat([0, 1, 2], [80, 60, 9])
    found = module.spread(values, labels)
    assert found["classes"] == pytest.approx(3528 / 128, rel=1e-6)
    assert found["largest"] == pytest.approx(60, rel=1e-6)
    assert 0 < found["batches"] < found["classes"]


@pytest.mark.slow
def test_rows_of_a_comparison(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_small(monkeypatch, pneumonia=100)
    asked = {"data": "phantom", "rounds": 1, "sites": 2, "partition": "iid", "local_epochs": 1}
    for seed in (0, 1):
        folder = tmp_path / "iid" / "fedavg" / f"seed-{seed}"
        given = {**asked, "seed": seed}
        federate(
            "pneumonia",
            requested=given,
            config={"image_size": 28, "network": "small_cnn"},
            out=folder,
            jobs=1,
        )
    found = [module.measured(folder, None) for folder in module.runs([tmp_path])]
    assert [(one["row"], one["seed"]) for one in found] == [("iid: fedavg", 0), ("iid: fedavg", 1)]
    assert module.table(found).splitlines()[-1].startswith("| iid: fedavg | 2 | ")
    assert all(one[name] > 0 for one in found for name in module.NUMBERS)
