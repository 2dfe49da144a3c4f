"""The random transforms of a data set without their draws: for what is measured on training items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monai import transforms as mt


def without_draws(transforms: Sequence[Any], *, uncropped: bool) -> list[Any]:
    """Return transforms that draw nothing: what has a probability never happens, a random crop is the middle one.

    Others that draw (somebody's own functions, choices between transforms) stay; their draws are those of the item's
    position.

    Args:
        transforms: MONAI's or anybody's; their probabilities are changed in place.
        uncropped: leave random crops out instead.
    """
    without: list[Any] = []
    for transform in transforms:
        crop = _middle(transform) if isinstance(transform, mt.RandomizableTrait) else None
        if crop is not None:
            without += [] if uncropped else [crop]
            continue
        if isinstance(transform, mt.RandomizableTransform):
            transform.prob = 0.0  # it keeps what it does in any case: types, and sizes that are asked for
        without.append(transform)
    return without


def _middle(transform: Any) -> Any:
    """Return the crop of the same size around the middle, None for what is no crop of a known size."""
    if not any("Crop" in kind.__name__ and kind.__module__.startswith("monai.") for kind in type(transform).__mro__):
        return None
    cropper = transform
    while hasattr(cropper, "cropper"):
        cropper = cropper.cropper
    for name, array, mapped in (
        ("roi_scale", mt.CenterScaleCrop, mt.CenterScaleCropd),
        ("roi_size", mt.CenterSpatialCrop, mt.CenterSpatialCropd),
        ("spatial_size", mt.CenterSpatialCrop, mt.CenterSpatialCropd),
    ):
        size = getattr(cropper, name, None)
        if size is not None and isinstance(transform, mt.MapTransform):
            return mapped(transform.keys, size, allow_missing_keys=transform.allow_missing_keys)
        if size is not None:
            return array(size)
    return None
