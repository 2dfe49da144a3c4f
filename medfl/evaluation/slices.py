"""The planes in which a case is shown: a picture as it is, a volume cut through the middle of its structures.

Volumes are shown in radiological convention: the patient's right on the left, anterior and superior at the top, and in
sagittal planes anterior on the left. Sides are labelled only if the header gives the orientation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import nibabel as nib
import numpy as np
from monai.transforms import Compose, NormalizeIntensityd, ScaleIntensityRanged

from medfl.core import Array
from medfl.data import Geometry
from medfl.evaluation.save_masks import is_picture

_WINDOW = 0.5, 99.5  # percentiles of an image that map to black and white
_ROUNDING = 1e-3  # by how much interpolation may take colours outside 0..1
_CUTS = (("axial", 2, "R"), ("coronal", 1, "R"), ("sagittal", 0, "A"))
"""Name, axis of the cut (of R, A, S), and the side shown on the left."""


@dataclass(frozen=True, eq=False)
class Plane:
    """One plane of a case, first row at the top.

    Attributes:
        name: of the plane, "" for a picture.
        image: (H, W) or (H, W, 3) in 0 to 1.
        reference, prediction: (H, W) class indices.
        size: height and width in the unit of the image's spacing.
        left: letter of the patient's side shown on the left, "" if unknown.
    """

    name: str
    image: Array
    reference: Array
    prediction: Array
    size: tuple[float, float]
    left: str = ""


def planes(
    image: Array, reference: Array, prediction: Array, geometry: Geometry | None
) -> list[Plane]:
    """Return the single plane of a picture, or the axial, coronal and sagittal planes of a volume.

    A volume is cut at the medians of the reference's foreground voxels, or of the prediction's if the reference is
    empty, or in the middle if both are.

    Args:
        image: (C, H, W[, D]); three channels of a picture are colours, else the first is shown. Colours in 0 to 1 are
            shown as they are, other values windowed, all channels alike.
        reference: (H, W[, D]) class indices.
        prediction: (H, W[, D]) class indices.
        geometry: None if unknown; a picture is then taken as (W, H), as MONAI reads it.
    """
    spacing = geometry.spacing if geometry else (1.0,) * reference.ndim
    if reference.ndim == 2:
        coloured = len(image) == 3
        if coloured and image.min() >= -_ROUNDING and image.max() <= 1 + _ROUNDING:
            shown = image.clip(0, 1)
        else:
            shown = _windowed(image if coloured else image[:1])

        picture = np.moveaxis(shown, 0, 2)  # channels last
        if geometry is None or not is_picture(geometry):  # columns come first: transpose
            picture = picture.swapaxes(0, 1)
            reference = reference.swapaxes(0, 1)
            prediction = prediction.swapaxes(0, 1)
            spacing = spacing[::-1]

        height = reference.shape[0] * spacing[0]
        width = reference.shape[1] * spacing[1]
        if not coloured:
            picture = picture[..., 0]

        return [Plane("", picture, reference, prediction, (height, width))]

    volumes = [_windowed(image[:1])[0], reference, prediction]
    affine = geometry.affine if geometry else np.full((4, 4), np.nan)
    oriented = bool(np.isfinite(affine).all())
    if oriented:
        order = nib.orientations.io_orientation(affine)  # type: ignore[no-untyped-call]
        volumes = [nib.orientations.apply_orientation(volume, order) for volume in volumes]  # type: ignore[no-untyped-call]
        # Axes are now right, anterior, superior; the spacing follows them.
        spacing = tuple(spacing[list(order[:, 0]).index(axis)] for axis in range(3))

    at = _middle(*volumes[1:])
    cuts = []
    for name, axis, left in _CUTS:
        cuts.append(_cut(volumes, axis, at, spacing, name, left if oriented else ""))

    return cuts


def true_colours(image: Array, steps: Sequence[Any]) -> Array:
    """Undo the given intensity steps (shift and scale per channel): return the colour picture (3, H, W) in 0 to 1.

    Other images, and pictures whose channels were each scaled by their own range, are returned unchanged.
    """
    if image.ndim != 3 or len(image) != 3:
        return image

    undone = image
    transforms = Compose([*steps]).flatten().transforms  # type: ignore[no-untyped-call]
    for step in reversed(transforms):
        if "image" not in getattr(step, "keys", ()):
            continue

        if isinstance(step, NormalizeIntensityd):
            by = step.normalizer
            if by.subtrahend is None or by.divisor is None:
                return image

            divisor = np.asarray(by.divisor, float).reshape(-1, 1, 1)
            subtrahend = np.asarray(by.subtrahend, float).reshape(-1, 1, 1)
            undone = undone * divisor + subtrahend
        elif isinstance(step, ScaleIntensityRanged):
            low = step.scaler.b_min
            high = step.scaler.b_max
            if low is None or high is None:
                return undone

            return (undone - low) / (high - low)

    return undone


def unit(geometry: Geometry | None) -> str:
    """Return the unit of an image's spacing: "mm", or "pixels" if no header gives it."""
    if geometry is None or is_picture(geometry):
        return "pixels"

    return "mm"


def _cut(
    volumes: Sequence[Array],
    axis: int,
    at: Sequence[int],
    spacing: Sequence[float],
    name: str,
    left: str,
) -> Plane:
    across, up = sorted({0, 1, 2} - {axis})
    # R, A and S grow with the index: after flipping, the patient's right is on the left and superior is up.
    image, reference, prediction = (np.flip(volume.take(at[axis], axis)).T for volume in volumes)
    height, width = reference.shape
    return Plane(
        name, image, reference, prediction, (height * spacing[up], width * spacing[across]), left
    )


def _middle(reference: Array, prediction: Array) -> list[int]:
    mask = reference > 0
    if not mask.any():
        mask = prediction > 0
    if not mask.any():
        mask = np.ones_like(reference, dtype=bool)

    return [int(np.percentile(where, 50, method="lower")) for where in np.nonzero(mask)]


def _windowed(image: Array) -> Array:
    low, high = np.percentile(image, _WINDOW)
    scaled: Array = ((image - low) / max(float(high - low), 1e-12)).clip(0, 1)
    return scaled
