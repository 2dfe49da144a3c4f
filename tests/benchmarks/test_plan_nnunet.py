"""benchmarks/plan_nnunet.py without nnU-Net: what it says then, the folder it lays out, how it reads a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.benchmarks.test_gpu import loaded


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    return loaded("plan_nnunet", monkeypatch)


def test_it_says_why_it_is_skipped(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--images", str(tmp_path), "--masks", str(tmp_path), "--bin", str(tmp_path)]
    assert benchmark.main(given) == 0
    assert capsys.readouterr().out.startswith("skipped: there is no nnUNetv2_plan_experiment")


def test_pictures_are_laid_out_with_classes_from_one(benchmark: Any, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    mask = tmp_path / "b.png"
    Image.new("RGB", (4, 3), (9, 9, 9)).save(image)
    stored = np.zeros((3, 4), np.uint8)
    stored[1, 2] = 255
    Image.fromarray(stored).save(mask)
    folder = tmp_path / "raw"
    benchmark.lay_out([(str(image), str(mask))], {255: "lungs"}, "MRI", folder)
    about = json.loads((folder / "dataset.json").read_text())
    assert about["labels"] == {"background": 0, "lungs": 1}
    assert (about["numTraining"], about["file_ending"]) == (1, ".png")
    with Image.open(folder / "labelsTr" / "case_0000.png") as opened:
        assert np.asarray(opened).tolist() == (stored // 255).tolist()
    with Image.open(folder / "imagesTr" / "case_0000_0000.png") as opened:
        assert opened.mode == "L"


def test_its_plan_is_told_along_the_axes_of_the_file(benchmark: Any) -> None:
    """nnU-Net's first axis is the last of the file."""
    network = {"strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]], "features_per_stage": [32, 64, 128]}
    found = {
        "spacing": [5.0, 1.0, 0.5],
        "median_image_size_in_voxels": [10.0, 200.0, 300.0],
        "patch_size": [8, 96, 128],
        "batch_size": 2,
        "normalization_schemes": ["CTNormalization"],
        "architecture": {"arch_kwargs": network},
        "order": [2, 1, 0],
    }
    row = benchmark.row_of_nnunet(found)
    assert row["spacing"] == [0.5, 1.0, 5.0]
    assert row["patch"] == [128, 96, 8]
    assert row["halved along each axis"] == [2, 2, 1]
    assert (row["levels"], row["batch"]) == (3, 2)
    assert benchmark.written(row["patch"]) == "128 × 96 × 8"
    assert benchmark.written(row["features"]) == "32, 64, 128"
