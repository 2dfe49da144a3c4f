"""Convert a bundle's random transforms into steps for whole batches (`medfl.data.batch_steps`), where all have one.

Without a batch step, and so applied item by item, are crops by positive and negative labels (several samples per item,
found from each mask), random sizes, interpolations other than bilinear and nearest, MONAI's lazy resampling, and all
transforms that are not named here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from monai import transforms as mt
from monai.transforms.utils import map_spatial_axes
from monai.utils import fall_back_tuple
from torch import Tensor

from medfl.data.batch_steps import (
    Affine,
    Crop,
    Flip,
    Intensity,
    Noise,
    Rotate,
    Rotate90,
    Shape,
    Step,
)
from medfl.data.byte_codes import Coded, Column, Rows, plain, stacked

Transform = Any
"""One of MONAI, which is untyped."""

_KEYS = ("image", "label")
_MODES = ("bilinear", "nearest")
_PADDINGS = ("zeros", "border", "reflection")


@dataclass(frozen=True)
class BatchRecipe:
    """Steps in their order; `masks`: whether labels are masks."""

    steps: tuple[Step, ...]
    masks: bool

    @property
    def num_draws(self) -> int:
        """How many uniform numbers the steps need for an item."""
        return sum(step.num_draws for step in self.steps)

    def deterministic(self, uncropped: bool) -> BatchRecipe:
        """Return the steps without random draws: crops of the middle, or no step at all if `uncropped`."""
        if uncropped:
            crops: tuple[Step, ...] = ()
        else:
            crops = tuple(
                replace(step, centred=True) for step in self.steps if isinstance(step, Crop)
            )
        return BatchRecipe(crops, self.masks)

    def __call__(self, inputs: Any, targets: Any, draws: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets transformed; it may write into what it is given.

        Args:
            inputs: images (B, C, H, W[, D]).
            targets: class indices (B,), or masks as the images.
            draws: (B, num_draws) float64, uniform in [0, 1).
        """
        rows = {"image": inputs, "label": targets}
        drawn = torch.split(draws, [step.num_draws for step in self.steps], dim=1)
        for step, numbers in zip(self.steps, drawn, strict=True):
            for key in step.keys:
                # Crops alone take items that differ in size.
                column: Any = rows[key] if isinstance(step, Crop) else _as_column(rows[key])
                rows[key] = step(key, column if step.keeps_values else plain(column), numbers)

        masks = plain(_as_column(rows["label"])) if self.masks else rows["label"]
        return plain(_as_column(rows["image"])), masks


def _as_column(rows: Rows) -> Column:
    if isinstance(rows, Tensor | Coded):
        return rows

    return stacked(rows, share=False)


@dataclass(frozen=True)
class _Arriving:
    """What arrives at a step: images of these sizes, their channels and type, and which keys have pixels."""

    shapes: frozenset[Shape]
    channels: int
    dtype: torch.dtype
    keys: tuple[str, ...]

    @property
    def uniform(self) -> bool:
        """Whether they have one size."""
        return len(self.shapes) == 1

    @property
    def shape(self) -> Shape:
        """One of the sizes; the size if they agree."""
        return next(iter(self.shapes))


def recipe(
    compose: mt.Compose,
    first: int,
    shapes: frozenset[Shape],
    channels: int,
    dtype: torch.dtype,
    masks: bool,
) -> BatchRecipe | None:
    """Return the transforms from position `first` on as batch steps, or None if one of them has no batch step.

    Args:
        compose: the flattened chain.
        first: position of its first random transform.
        shapes: all sizes (H, W[, D]) of the images, and of their masks.
        channels: of all images.
        dtype: of all images.
        masks: whether labels are masks; else they are passed on as they are.
    """
    plain_chain = compose.map_items is True and not (
        compose.unpack_items or compose.log_stats or compose.overrides
    )
    if not plain_chain or compose.lazy or len(set(map(len, shapes))) != 1:
        return None

    arriving: _Arriving | None = _Arriving(shapes, channels, dtype, _KEYS if masks else _KEYS[:1])
    steps = []
    for transform in compose.transforms[first:]:
        if arriving is None or getattr(transform, "lazy", False):
            return None
        if _changes_nothing(transform, arriving.keys):
            continue

        convert = _CONVERTERS.get(type(transform))
        keys = tuple(dict.fromkeys(getattr(transform, "keys", ())))
        if (
            convert is None
            or len(keys) < len(transform.keys)
            or not set(keys) <= set(arriving.keys)
        ):
            return None
        if not arriving.uniform and convert is not _crop:
            return None

        try:
            step = convert(transform, keys, arriving)
        except (TypeError, ValueError):
            # Malformed arguments: item by item the error names the item.
            return None

        if step is None:
            return None

        steps.append(step)
        arriving = _after(step, arriving)

    if arriving is None or not arriving.uniform or not arriving.shape:
        return None

    return BatchRecipe(tuple(steps), masks)


def _changes_nothing(transform: Transform, keys: Sequence[str]) -> bool:
    """Tell whether a transform only converts to tensors, which its input already is."""
    if type(transform) not in (mt.EnsureTyped, mt.ToTensord) or not set(transform.keys) <= set(
        keys
    ):
        return False

    converter = transform.converter
    if converter.dtype is not None or converter.device is not None:
        return False

    return type(transform) is mt.ToTensord or (
        converter.data_type == "tensor" and all(dtype is None for dtype in transform.dtype)
    )


def _after(step: Step, arriving: _Arriving) -> _Arriving | None:
    """Return what arrives at the next step; None where images and masks would no longer have one size."""
    if not isinstance(step, Crop):
        return arriving
    if set(step.keys) != set(arriving.keys) and arriving.shapes != {step.size}:
        return None
    return replace(arriving, shapes=frozenset([step.size]))


def _flip(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    return Flip(keys, transform.prob, _dims(transform.flipper.spatial_axis, len(arriving.shape)))


def _rotate90(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    dims = _dims(transform.spatial_axes, len(arriving.shape))
    if (
        transform.max_k < 1
        or len(dims) != 2
        or arriving.shape[dims[0] - 2] != arriving.shape[dims[1] - 2]
    ):
        return None
    return Rotate90(keys, transform.prob, int(transform.max_k), (dims[0], dims[1]))


def _dims(axes: Any, dimensions: int) -> tuple[int, ...]:
    """Return spatial axes as axes of (B, C, ...)."""
    return tuple(int(axis) + 1 for axis in map_spatial_axes(dimensions + 1, axes))


def _crop(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    cropper = transform.cropper
    if cropper.random_size or not cropper.random_center:
        return None

    # MONAI's crop is never larger than its image, so that sizes may differ after it too.
    sizes = set()
    for shape in arriving.shapes:
        sizes.add(tuple(map(min, fall_back_tuple(cropper.roi_size, shape), shape)))

    return Crop(keys, tuple(map(int, sizes.pop()))) if len(sizes) == 1 else None


def _is_intensity(keys: tuple[str, ...], arriving: _Arriving, dtype: Any = np.float32) -> bool:
    return (
        arriving.dtype == torch.float32
        and keys == _KEYS[:1]
        and dtype in (np.float32, torch.float32)
    )


def _scale(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    scaler = transform.scaler
    if not _is_intensity(keys, arriving, scaler.dtype):
        return None
    low, high = scaler.factors
    num_factors = arriving.channels if scaler.channel_wise else 1
    return Intensity(keys, transform.prob, low, high, num_factors, shift=False)


def _shift(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    shifter = transform.shifter
    if not _is_intensity(keys, arriving) or any(key is not None for key in transform.factor_key):
        return None
    low, high = shifter.offsets
    num_factors = arriving.channels if shifter.channel_wise else 1
    return Intensity(keys, transform.prob, low, high, num_factors, shift=True)


def _noise(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    noise = transform.rand_gaussian_noise
    if not _is_intensity(keys, arriving, noise.dtype):
        return None
    return Noise(keys, transform.prob, float(noise.mean), float(noise.std), bool(noise.sample_std))


def _affine(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    affine = transform.rand_affine
    grid = transform.rand_affine.rand_affine_grid
    options = zip(transform.mode, transform.padding_mode, strict=True)
    modes = {
        key: (str(mode), str(padding)) for key, (mode, padding) in zip(keys, options, strict=True)
    }
    keeps_size = tuple(fall_back_tuple(affine.spatial_size, arriving.shape)) == arriving.shape

    if (
        not keeps_size
        or grid.device is not None
        or arriving.dtype != torch.float32
        or not _are_offered(modes.values())
    ):
        return None

    ranges: dict[str, list[tuple[float, float]]] = {}
    for name in ("rotate", "shear", "translate", "scale"):
        ranges[f"{name}_params"] = []
        for bounds in getattr(grid, f"{name}_range"):
            # A single number r stands for -r to r.
            if isinstance(bounds, Sequence | np.ndarray):
                ranges[f"{name}_params"].append((float(bounds[0]), float(bounds[1])))
            elif bounds is not None:
                ranges[f"{name}_params"].append((-float(bounds), float(bounds)))

    return Affine(keys, transform.prob, ranges, modes)


def _rotate(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    inner = transform.rand_rotate
    options = zip(
        keys, transform.mode, transform.padding_mode, transform.align_corners, strict=True
    )
    modes = {
        key: (str(mode), str(padding), bool(corners)) for key, mode, padding, corners in options
    }
    keeps = inner.keep_size and all(
        dtype in (np.float32, torch.float32) for dtype in transform.dtype
    )

    if not keeps or arriving.dtype != torch.float32 or not _are_offered(modes.values()):
        return None

    # Images are turned in their plane alone.
    axes = len(arriving.shape)
    ranges = [inner.range_x, inner.range_y, inner.range_z][: 1 if axes == 2 else 3]
    return Rotate(keys, transform.prob, [(float(low), float(high)) for low, high in ranges], modes)


def _are_offered(modes: Iterable[tuple[object, ...]]) -> bool:
    return all(mode in _MODES and padding in _PADDINGS for mode, padding, *_ in modes)


_CONVERTERS: dict[type, Callable[[Transform, tuple[str, ...], _Arriving], Step | None]] = {
    mt.RandFlipd: _flip,
    mt.RandRotate90d: _rotate90,
    mt.RandSpatialCropd: _crop,
    mt.RandScaleIntensityd: _scale,
    mt.RandShiftIntensityd: _shift,
    mt.RandGaussianNoised: _noise,
    mt.RandAffined: _affine,
    mt.RandRotated: _rotate,
}
"""By exact type: a subclass may do something else."""
