"""Synthetic images on disk: a bright blob on noise, and its label map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np
from numpy.typing import NDArray
from PIL import Image

FloatArray = NDArray[np.float32]
LabelArray = NDArray[np.uint8]


def blob(rng: np.random.Generator, shape: Sequence[int]) -> tuple[FloatArray, LabelArray]:
    """Return an image in about [0, 1] and a label map of the same shape: 1 the rim of an ellipsoid, 2 its core."""
    centre = [rng.uniform(0.4, 0.6) * n for n in shape]
    radius = [rng.uniform(0.25, 0.35) * n for n in shape]
    axes = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
    distance = sum(((axis - c) / r) ** 2 for axis, c, r in zip(axes, centre, radius, strict=True))
    label = (np.asarray(distance) < 1).astype(np.uint8) + (np.asarray(distance) < 0.4).astype(
        np.uint8
    )
    image = 0.2 + 0.3 * label + 0.05 * rng.standard_normal(tuple(shape))
    return image.astype(np.float32), label


def save_nifti(
    path: Path, array: NDArray[np.generic], spacing: Sequence[float] = (1.0, 1.0, 1.0)
) -> None:
    """Write a volume as NIfTI; `spacing` in mm per axis. The first two axes run to the left and to the back (LPS)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    affine = np.diag([-spacing[0], -spacing[1], spacing[2], 1.0])
    nibabel.save(nibabel.Nifti1Image(array, affine), path)


def save_picture(path: Path, image: FloatArray) -> None:
    """Write an image in [0, 1], grey (H, W) or colour (H, W, 3), as an 8-bit picture of the suffix's format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((255 * image.clip(0, 1)).round().astype(np.uint8)).save(path)
