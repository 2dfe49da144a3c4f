"""Every bundle of the zoo trains centrally with plain MONAI, and its record is true."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.bundle import ConfigWorkflow
from monai.utils import set_determinism

from medfl.core.seeding import stream
from tests.support.programs import python_path

from .broken import BROKEN
from .build import ZOO
from .record import SOURCES, ZooBundle

# What these engines and readers warn about is theirs; here only MONAI runs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Contain what a bundle does to the process: seeds, cuDNN flags, imports, working folder, files left open."""
    with monkeypatch.context() as patch:
        for name in [*sys.modules]:
            if name.split(".")[0] == "scripts":  # of another bundle, which another test left
                patch.delitem(sys.modules, name)
        before = set(sys.modules)
        with stream(0, "zoo"):
            yield monkeypatch
            set_determinism(None)
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "scripts":
                del sys.modules[name]
    gc.collect()


def workflow_in(
    bundle: ZooBundle, patch: pytest.MonkeyPatch, *more: str, **overrides: Any
) -> ConfigWorkflow:
    """Return MONAI's own workflow of the bundle, not initialized, run from inside the bundle's folder."""
    patch.chdir(bundle.path)
    patch.syspath_prepend(str(bundle.path))
    return ConfigWorkflow(
        config_file=[bundle.config, *more],
        meta_file="configs/metadata.json",
        logging_file=False,
        workflow_type="train",
        run_id=bundle.run_id,
        **bundle.overrides,
        **overrides,
    )


@pytest.mark.parametrize("name", list(ZOO))
def test_trains_and_record_is_true(name: str, tmp_path: Path, plain: pytest.MonkeyPatch) -> None:
    """Two epochs through `initialize`, `run` and `finalize`: counts, steps, side effects and metric are as recorded.

    Before, one validation batch goes in with the recorded channels and comes out with the recorded outputs.
    """
    bundle = ZOO[name](tmp_path)
    assert not any(path.exists() for path in bundle.side_effects)
    workflow = workflow_in(bundle, plain)
    workflow.initialize()
    trainer = workflow.parser.get_parsed_content(bundle.trainer)
    evaluator = workflow.parser.get_parsed_content(bundle.evaluator)
    image, _ = evaluator.prepare_batch(next(iter(evaluator.data_loader)), torch.device("cpu"))
    with torch.no_grad():
        prediction = evaluator.inferer(image, evaluator.network.eval())
    assert image.shape[1] == bundle.in_channels
    assert image.ndim == bundle.dims + 2
    assert prediction.shape[1] == bundle.outputs

    before = {key: value.clone() for key, value in trainer.network.state_dict().items()}
    workflow.run()
    workflow.finalize()

    assert len(trainer.data_loader.dataset) == bundle.train
    assert len(evaluator.data_loader.dataset) == bundle.validate
    assert trainer.state.epoch == 2
    assert trainer.state.iteration == 2 * bundle.steps
    assert type(trainer.loss_function).__name__ == bundle.loss
    assert type(trainer.optimizer).__name__ == bundle.optimizer
    assert evaluator.state.key_metric_name == bundle.key_metric
    assert math.isfinite(evaluator.state.metrics[bundle.key_metric])
    assert any(
        not torch.equal(before[key], value) for key, value in trainer.network.state_dict().items()
    )
    assert any(path.exists() for path in bundle.side_effects)
    assert list(bundle.path.rglob("model.pt"))


def test_evaluate_config_reads_the_test_list(tmp_path: Path, plain: pytest.MonkeyPatch) -> None:
    """`evaluate.json` on top of the training configuration replaces the validation items by the test items."""
    bundle = ZOO["cls3d_partition_json"](tmp_path)
    workflow = workflow_in(bundle, plain, "configs/evaluate.json")
    workflow.initialize()
    assert len(workflow.parser.get_parsed_content("validate#dataset")) == bundle.test
    workflow.finalize()


@pytest.mark.parametrize("name", list(ZOO))
def test_building_twice_writes_the_same_bytes(name: str, tmp_path: Path) -> None:
    """The data are seeded; only compressed files carry their own time stamps."""
    first, second = ZOO[name](tmp_path / "1"), ZOO[name](tmp_path / "2")
    files = sorted(
        path.relative_to(tmp_path / "1") for path in (tmp_path / "1").rglob("*") if path.is_file()
    )
    assert files == sorted(
        path.relative_to(tmp_path / "2") for path in (tmp_path / "2").rglob("*") if path.is_file()
    )
    for path in files:
        if path.suffix not in {".gz", ".npz"}:
            assert (tmp_path / "1" / path).read_bytes() == (tmp_path / "2" / path).read_bytes()
    assert (first.path / "LICENSE").is_file()
    assert first.idioms == second.idioms


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_bundles_break(name: str, tmp_path: Path, plain: pytest.MonkeyPatch) -> None:
    """Plain MONAI cannot train them either."""
    broken = BROKEN[name](tmp_path)
    plain.chdir(broken.path)
    with pytest.raises(Exception) as caught:  # noqa: PT011 (every library below raises its own)
        ConfigWorkflow(
            config_file=broken.config,
            meta_file="configs/metadata.json",
            logging_file=False,
            workflow_type="train",
            run_id=broken.run_id,
        ).run()
    root: BaseException = caught.value
    while root.__cause__ is not None:
        root = root.__cause__
    assert broken.monai in str(root)


def test_every_configuration_has_a_builder() -> None:
    """No bundle lies in the folder unused, and the table in the README names each."""
    readme = (Path(__file__).parent / "README.md").read_text()
    assert {path.name for path in SOURCES.iterdir() if path.is_dir()} == set(ZOO)
    assert [name for name in (*ZOO, *BROKEN) if f"`{name}`" not in readme] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cls2d_glob_yaml", "seg2d_own_scripts_yaml"])
def test_command_line(name: str, tmp_path: Path) -> None:
    """`python -m monai.bundle run` trains it from inside its folder, as the workflow above does each."""
    bundle = ZOO[name](tmp_path)
    command = [
        sys.executable,
        "-m",
        "monai.bundle",
        "run",
        bundle.run_id,
        "--config_file",
        bundle.config,
    ]
    command += [part for key, value in bundle.overrides.items() for part in (f"--{key}", value)]
    done = subprocess.run(
        command, cwd=bundle.path, capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "PYTHONPATH": python_path()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(bundle.path.rglob("model.pt"))
    assert json.loads((bundle.path / "configs" / "metadata.json").read_text())["version"] == "0.1.0"
