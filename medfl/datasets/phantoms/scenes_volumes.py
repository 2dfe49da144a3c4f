"""Volumes for phantom cohorts: a hippocampus in two parts, a head with its brain, a brain of three tissues.

Every scene takes a generator and a shape (D1, D2, D3), axes to the right, front and top; it returns intensities, floats
from 0 to about 1, and labels, uint8. Intensities overlap between labels, so that thresholds alone do not find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Labels = NDArray[np.uint8]
Shape = tuple[int, int, int]
Point = tuple[float, float, float]
CENTRE: Point = (0.0, 0.0, 0.0)

# Gain, offset, bias field and noise of the scanners of up to three hospitals.
SCANNERS = ((1.0, 0.0, 0.15, 0.03), (0.75, 0.12, 0.45, 0.05), (1.3, 0.05, 0.3, 0.09))


def grid(shape: Shape) -> tuple[Array, Array, Array]:
    """Return the coordinates (x, y, z) of the voxel centres in -1..1, to be broadcast to `shape`."""
    axes = [(np.arange(side) + 0.5) * 2 / side - 1 for side in shape]
    x, y, z = np.meshgrid(*axes, indexing="ij", sparse=True)
    return x, y, z


def noise(rng: np.random.Generator, shape: Shape, cells: int) -> Array:
    """Return smooth noise of `cells` bumps a side, about -1..1."""
    knots = rng.uniform(-1, 1, (cells + 1,) * 3)
    from scipy.ndimage import zoom

    smooth: Array = zoom(knots, [side / (cells + 1) for side in shape], order=1, grid_mode=True, mode="nearest")
    return smooth


def ellipsoid(shape: Shape, radii: Point, centre: Point = CENTRE) -> Array:
    """Return a distance that is 1 on the surface of an ellipsoid; lengths in half sides of the volume."""
    squares = [((axis - at) / radius) ** 2 for axis, at, radius in zip(grid(shape), centre, radii, strict=True)]
    return np.sqrt(squares[0] + squares[1] + squares[2])


def hippocampus(rng: np.random.Generator, shape: Shape) -> tuple[Array, Labels]:
    """Draw a hippocampus: 1 its thick anterior part, 2 its thin, bent posterior part."""
    x, y, z = grid(shape)
    at, size = rng.uniform(-0.12, 0.12, 3), rng.uniform(1.05, 1.35)
    slope, bend = rng.uniform(-0.25, 0.25), rng.uniform(0.2, 0.5)
    middle = (at[0] + slope * y, at[2] + bend * (y - 0.1) ** 2)
    head = ellipsoid(shape, (0.30 * size, 0.30 * size, 0.34 * size), (at[0] + 0.3 * slope, at[1] + 0.3, at[2])) < 1
    width = 0.2 * size * (1 + 0.15 * np.clip(y, -1, 1))
    along = (y - at[1] + 0.15) / (0.5 * size)
    body = ((x - middle[0]) / width) ** 2 + ((z - middle[1]) / width) ** 2 + along**4 < 1
    labels = np.where(head, 1, np.where(body & (y - at[1] < 0.3), 2, 0)).astype(np.uint8)
    image = 0.38 + 0.1 * noise(rng, shape, 5)
    fluid = ellipsoid(shape, (0.2, 0.7, 0.25), (at[0] + 0.5, at[1], at[2] + 0.35)) < 1
    image[fluid] = 0.1
    image[labels > 0] = 0.58 + 0.06 * noise(rng, shape, 6)[labels > 0]
    return np.clip(image + rng.normal(0, 0.035, shape), 0, None), labels


def head(rng: np.random.Generator, shape: Shape, scanner: int = 0) -> tuple[Array, Labels]:
    """Draw a head as the scanner of a hospital shows it: 1 the brain; skull, scalp and neck are background."""
    gain, offset, bias, grain = SCANNERS[scanner % len(SCANNERS)]
    at = (rng.uniform(-0.06, 0.06), rng.uniform(-0.06, 0.06), rng.uniform(0.02, 0.14))
    size = rng.uniform(0.9, 1.05)
    outer = ellipsoid(shape, (0.88 * size, 0.92 * size, 0.86 * size), at) + 0.03 * noise(rng, shape, 4)
    x, y, z = grid(shape)
    neck = (x - at[0]) ** 2 + (y + 0.1) ** 2 < 0.2
    folds = 0.55 + 0.12 * noise(rng, shape, 8)
    image = np.where((outer < 1) | (neck & (z < at[2])), folds + 0.05, 0.0)  # muscle and fat, about as bright as brain
    image = np.where(outer < 0.84, 0.1, image)  # skull
    image = np.where(outer < 0.79, 0.3, image)  # fluid
    brain = outer + 0.035 * noise(rng, shape, 9) < 0.75
    image = np.where(brain, folds, image)
    field = 1 + bias * noise(rng, shape, 2)
    seen = np.where(image > 0, gain * image * field + offset, 0) + np.abs(rng.normal(0, grain, shape))
    return seen, brain.astype(np.uint8)


def brain(rng: np.random.Generator, shape: Shape, age: float) -> tuple[Array, Labels]:
    """Draw a brain without its skull, 0 outside: 1 fluid of the ventricles, 2 grey, 3 white; ventricles grow with age.

    As in the real labels, fluid outside the ventricles is shown but belongs to the background.
    """
    size = rng.uniform(0.94, 1.02)
    outer = ellipsoid(shape, (0.85 * size, 0.92 * size, 0.85 * size)) + 0.05 * noise(rng, shape, 5)
    inner = outer + 0.16 * noise(rng, shape, 7)
    labels = np.where(inner < 0.66, 3, np.where(outer < 0.9, 2, 0)).astype(np.uint8)
    wide = 0.09 * (1 + age / 60) * rng.uniform(0.85, 1.15)
    for side in (-1, 1):
        labels[ellipsoid(shape, (wide, 0.4, 0.2), (side * 1.4 * wide, rng.uniform(-0.08, 0.08), 0.1)) < 1] = 1
    shade = np.array((0.22, 0.28, 0.55, 0.82)) * rng.uniform(0.9, 1.1)
    image = shade[labels] * (1 + 0.12 * noise(rng, shape, 2)) + rng.normal(0, 0.05, shape)
    return np.where(outer < 1, np.clip(image, 0.02, None), 0), labels


def save(path: Path, voxels: NDArray[np.generic], spacing: float | Sequence[float]) -> None:
    """Write a NIfTI file of two, three or, with channels, four axes, making its folder.

    The first axes point to the right, front and top, with `spacing` in mm.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    affine = np.diag([*np.broadcast_to(spacing, 3), 1.0])
    affine[:3, 3] = -affine[:3, :3] @ (np.array([*voxels.shape, 1])[:3] / 2)
    import nibabel as nib

    nib.save(nib.Nifti1Image(voxels, affine), path)  # type: ignore[no-untyped-call]
