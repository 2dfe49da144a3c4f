"""docs/results/smaller.py: blocks have their mean, masks their most frequent value, and voxels stay where they are."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

FILE = Path(__file__).resolve().parents[2] / "docs" / "results" / "smaller.py"


def test_a_block_becomes_a_voxel_at_its_middle(tmp_path: Path) -> None:
    module = runpy.run_path(str(FILE))
    affine = np.diag([1.0, 1.0, 2.0, 1.0])
    voxels = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    source = tmp_path / "a.nii.gz"
    nib.save(nib.Nifti1Image(voxels, affine), source)
    module["write"](source, tmp_path / "b.nii.gz", 2, is_mask=False)
    made: Any = nib.load(tmp_path / "b.nii.gz")
    assert made.get_fdata().tolist() == [[[8.5, 10.5]]]  # the third row is left over
    assert (made.affine @ [0, 0, 0, 1]).tolist() == [0.5, 0.5, 1.0, 1.0]
    assert np.diag(made.affine).tolist() == [2.0, 2.0, 4.0, 1.0]


def test_a_mask_has_the_most_frequent_value() -> None:
    module = runpy.run_path(str(FILE))
    mask = np.array([[0, 2, 1, 1], [2, 2, 0, 0]])
    assert module["smaller"](mask, 2, is_mask=True).tolist() == [[2, 0]]  # of equals the lowest
