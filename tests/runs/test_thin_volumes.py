"""Volumes that are thinner than a patch: what is scored is what lies in their files, as in the masks that are saved."""

import csv
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medfl.runs.launch import federate
from medfl.starter import starter


@pytest.mark.slow
def test_scores_are_those_of_the_saved_masks(tmp_path: Path) -> None:
    rng, shape = np.random.default_rng(0), (7, 18, 20)
    grid = np.ogrid[:7, :18, :20]
    for index in range(8):
        centre = [rng.uniform(0.35, 0.65) * side for side in shape]
        inside = (
            sum(((a - c) / (0.3 * s)) ** 2 for a, c, s in zip(grid, centre, shape, strict=True)) < 1
        )
        for folder, values in (
            ("im", (rng.normal(20, 15, shape) + 200 * inside).astype(np.int16)),
            ("lb", inside),
        ):
            (tmp_path / folder).mkdir(exist_ok=True)
            nib.save(
                nib.Nifti1Image(values.astype(np.int16), np.eye(4)),
                tmp_path / folder / f"c{index}.nii.gz",
            )
    bundle = starter.write(
        tmp_path / "thin", starter.survey(tmp_path / "im", masks=tmp_path / "lb")
    )
    federate(
        str(bundle), config={"patch_size": [16, 16, 16]}, out=tmp_path / "run", save_predictions=True,
        requested={"data": str(tmp_path), "sites": 2, "rounds": 1, "lr": 0.01},
    )  # fmt: skip
    with (tmp_path / "run" / "predictions.csv").open() as file:
        rows = {row["id"]: row for row in csv.DictReader(file)}
    masks = sorted((tmp_path / "run" / "predictions").rglob("*.nii.gz"))
    assert len(masks) == len(rows) > 1
    for path in masks:
        ours, theirs = (
            np.asarray(nib.load(p).dataobj) > 0 for p in (path, tmp_path / "lb" / path.name)
        )
        row = rows[path.name.removesuffix(".nii.gz")]
        assert ours.any()
        assert float(row["dice"]) == pytest.approx(
            2 * (ours & theirs).sum() / (ours.sum() + theirs.sum()), rel=1e-5
        )
        assert float(row["pixel_accuracy"]) == pytest.approx((ours == theirs).mean(), rel=1e-5)
