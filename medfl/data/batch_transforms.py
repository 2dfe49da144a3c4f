"""MONAI's random transforms for a whole batch at once, on the device where the batch is.

Each step takes uniform numbers from outside, a row an item, and turns them into what MONAI draws: whether, which, how
much. The distribution is MONAI's; the numbers are not, as MONAI draws them from a NumPy generator. What a step does
with given parameters is what MONAI does, bit for bit on the CPU but for the last bits of an interpolation.

Not here, and so done item by item: crops by positive and negative labels (several samples an item, found from each
mask), random sizes, other interpolations than bilinear and nearest, MONAI's lazy resampling, and all other transforms.
RandAffined's parameters are independent of whether it is applied. MONAI's own are too, except for the first draw after
`set_random_state`, which gives the transform and its parts the same seed: the first parameter is then a function of
the number that decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from monai.networks.layers import AffineTransform
from monai.transforms import (
    AffineGrid,
    Compose,
    EnsureTyped,
    RandAffined,
    RandFlipd,
    RandGaussianNoised,
    RandRotate90d,
    RandRotated,
    RandScaleIntensityd,
    RandShiftIntensityd,
    RandSpatialCropd,
    ToTensord,
)
from monai.transforms.utils import create_grid, create_rotate, create_translate, map_spatial_axes
from monai.utils import fall_back_tuple
from torch import Tensor
from torch.nn.functional import grid_sample

from medfl.data.byte_codes import Coded, Column, plain, stacked

Shape = tuple[int, ...]
"""(H, W[, D])."""

_KEYS = ("image", "label")
_MODES = ("bilinear", "nearest")
_PADDINGS = ("zeros", "border", "reflection")


class Step(Protocol):
    """One transform of a batch.

    Attributes:
        keys: what it changes.
        width: uniform numbers that it needs for an item.
        places: whether it only takes numbers to other places, which it may then do with their codes.
    """

    places: ClassVar[bool]

    @property
    def keys(self) -> tuple[str, ...]:
        """What it changes."""

    @property
    def width(self) -> int:
        """Uniform numbers that it needs for an item."""

    def __call__(self, key: str, rows: Any, draws: Tensor) -> Any:
        """Return the rows of a key transformed by draws (B, width), float64 in [0, 1)."""


@dataclass(frozen=True)
class BatchRecipe:
    """Steps in their order.

    Attributes:
        steps: what to do.
        masks: whether labels are masks.
    """

    steps: tuple[Step, ...]
    masks: bool

    @property
    def width(self) -> int:
        """Uniform numbers for an item."""
        return sum(step.width for step in self.steps)

    def still(self, whole: bool) -> BatchRecipe:
        """Return the steps that are left where nothing is drawn: crops, of the middle, or with `whole` none."""
        crops = () if whole else tuple(replace(step, middle=True) for step in self.steps if isinstance(step, Crop))
        return BatchRecipe(crops, self.masks)

    def __call__(self, inputs: Any, targets: Any, draws: Tensor) -> tuple[Any, Any]:
        """Return inputs and targets transformed; it may write into what it is given."""
        rows: dict[str, Any] = {"image": inputs, "label": targets}
        drawn = torch.split(draws, [step.width for step in self.steps], dim=1)
        for step, numbers in zip(self.steps, drawn, strict=True):
            for key in step.keys:
                given = rows[key] if isinstance(step, Crop) else _together(rows[key])
                rows[key] = step(key, given if step.places else plain(given), numbers)
        return plain(_together(rows["image"])), plain(_together(rows["label"])) if self.masks else rows["label"]


def _together(rows: Any) -> Column:
    return rows if isinstance(rows, Tensor | Coded) else stacked(rows, share=False)


def _chosen(draws: Tensor, prob: float) -> Tensor:
    """Return the positions of the items that a step applies to: the first number decides."""
    return torch.where(draws[:, 0] < prob)[0]


def _between(draws: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * draws


def _changed(rows: Column, where: Tensor, change: Callable[[Tensor], Tensor]) -> Column:
    """Return rows (B, C, ...) with those at `where` changed."""
    if not len(where):
        return rows

    def move(values: Tensor) -> Tensor:
        at = where.to(values.device)
        return values.index_copy_(0, at, change(values.index_select(0, at)))

    return rows.moved(move) if isinstance(rows, Coded) else move(rows)


@dataclass(frozen=True)
class Flip:
    """RandFlipd: with `prob`, mirror along `dims` of (B, C, ...)."""

    keys: tuple[str, ...]
    prob: float
    dims: tuple[int, ...]
    places: ClassVar[bool] = True
    width: ClassVar[int] = 1

    def __call__(self, key: str, rows: Column, draws: Tensor) -> Column:
        """Flip the chosen."""
        return _changed(rows, _chosen(draws, self.prob), lambda part: part.flip(self.dims))


@dataclass(frozen=True)
class Rotate90:
    """RandRotate90d: with `prob`, turn 1..max_k times by 90 degrees, each as likely, in the plane of `dims`."""

    keys: tuple[str, ...]
    prob: float
    most: int
    dims: tuple[int, int]
    places: ClassVar[bool] = True
    width: ClassVar[int] = 2

    def __call__(self, key: str, rows: Column, draws: Tensor) -> Column:
        """Turn the chosen."""
        where = _chosen(draws, self.prob)
        times = (draws[where, 1] * self.most).long() + 1
        for k in range(1, self.most + 1):
            rows = _changed(rows, where[times == k], lambda part, k=k: torch.rot90(part, k, self.dims))  # type: ignore[misc]
        return rows


@dataclass(frozen=True)
class Crop:
    """RandSpatialCropd: a patch of `size`, each place as likely, from items that may differ in size.

    With `middle` it is CenterSpatialCropd, which needs no numbers.
    """

    keys: tuple[str, ...]
    size: Shape
    middle: bool = False
    places: ClassVar[bool] = True

    @property
    def width(self) -> int:
        """One number an axis."""
        return 0 if self.middle else len(self.size)

    def __call__(self, key: str, rows: Any, draws: Tensor) -> Column:
        """Cut the patches out."""
        if isinstance(rows, Coded):
            return rows.moved(lambda codes: self._cut(codes, draws))
        if isinstance(rows, Tensor):
            return self._cut(rows, draws)
        parts: list[Tensor | Coded] = []
        for row, drawn in zip(rows, draws, strict=True):
            one = drawn[None]
            if isinstance(row, Coded):
                parts.append(row.moved(lambda codes, one=one: self._cut(codes, one)))  # type: ignore[misc]
            else:
                parts.append(self._cut(row[None], one)[0])
        return stacked(parts, share=False)

    def _cut(self, values: Tensor, draws: Tensor) -> Tensor:
        sides = list(zip(values.shape[2:], self.size, strict=True))
        if self.middle:
            corners = [[n // 2 - s // 2 for n, s in sides]] * len(values)
        else:
            corners = (draws * torch.tensor([n - s + 1 for n, s in sides])).long().tolist()
        patches = []
        for row, corner in zip(values, corners, strict=True):
            patches.append(row[(slice(None), *(slice(c, c + s) for c, s in zip(corner, self.size, strict=True)))])
        return torch.stack(patches)


@dataclass(frozen=True)
class Scale:
    """RandScaleIntensityd: with `prob`, multiply by 1 + f, f uniform in [low, high), for all channels or each."""

    keys: tuple[str, ...]
    prob: float
    low: float
    high: float
    factors: int
    places: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """One more than factors."""
        return 1 + self.factors

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Column:
        """Scale the chosen."""
        where = _chosen(draws, self.prob)
        factors = 1 + _between(draws[where, 1:], self.low, self.high)
        return _changed(rows, where, lambda part: part * _beside(factors, part))


@dataclass(frozen=True)
class Shift:
    """RandShiftIntensityd: with `prob`, add f, uniform in [low, high), for all channels or each."""

    keys: tuple[str, ...]
    prob: float
    low: float
    high: float
    offsets: int
    places: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """One more than offsets."""
        return 1 + self.offsets

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Column:
        """Shift the chosen."""
        where = _chosen(draws, self.prob)
        offsets = _between(draws[where, 1:], self.low, self.high)
        return _changed(rows, where, lambda part: part + _beside(offsets, part))


def _beside(numbers: Tensor, rows: Tensor) -> Tensor:
    """Return numbers (B, 1 or C) in the type of rows (B, C, ...) and so shaped that both can be multiplied."""
    return numbers.to(rows).view(*numbers.shape, *[1] * (rows.ndim - 2))


@dataclass(frozen=True)
class Noise:
    """RandGaussianNoised: with `prob`, add normal noise, its deviation `std` or uniform in [0, std).

    An item's noise comes from a CPU generator that its second number seeds, the same on any device.
    """

    keys: tuple[str, ...]
    prob: float
    mean: float
    std: float
    sampled: bool
    places: ClassVar[bool] = False
    width: ClassVar[int] = 3

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Column:
        """Add noise to the chosen."""
        where = _chosen(draws, self.prob)
        deviations = _between(draws[where, 2], 0.0, self.std) if self.sampled else torch.full((len(where),), self.std)

        def add(part: Tensor) -> Tensor:
            fields = []
            for number in draws[where, 1].tolist():
                generator = torch.Generator().manual_seed(int(number * 2**53))
                fields.append(torch.randn(part.shape[1:], generator=generator))
            noise = self.mean + torch.stack(fields) * _beside(deviations[:, None], fields[0][None])
            return part + noise.to(part)

        return _changed(rows, where, add)


@dataclass(frozen=True)
class Affine:
    """RandAffined: with `prob`, resample at coordinates that rotation, shear, translation and scale have moved.

    As in MONAI the coordinates are float32, the interpolation float64, the result float32, applied or not.

    Attributes:
        ranges: (low, high) of each parameter, by the names of `AffineGrid`'s arguments.
        ways: key -> mode and padding mode of `grid_sample`.
    """

    keys: tuple[str, ...]
    prob: float
    ranges: Mapping[str, Sequence[tuple[float, float]]]
    ways: Mapping[str, tuple[str, str]]
    places: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """One more than parameters."""
        return 1 + sum(map(len, self.ranges.values()))

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Column:
        """Resample the chosen."""
        where, (mode, padding) = _chosen(draws, self.prob), self.ways[key]
        shape = tuple(rows.shape[2:])

        def resample(part: Tensor) -> Tensor:
            matrices = torch.stack([self.matrix(row, shape) for row in draws[where, 1:]]).to(part.device)
            grid = torch.as_tensor(create_grid(shape, device=part.device, backend="torch"), dtype=torch.float32)
            moved = (matrices @ grid.flatten(1))[:, : len(shape)].double()
            sides = torch.tensor([2.0 / max(2, side) for side in shape], dtype=torch.float64, device=part.device)
            places = (moved * sides[:, None]).flip(1).transpose(1, 2).reshape(len(part), *shape, len(shape))
            return grid_sample(part.double(), places, mode, padding, align_corners=False).float()

        return _changed(rows.float(), where, resample)

    def matrix(self, draws: Tensor, shape: Shape) -> Tensor:
        """Return the homogeneous matrix (d + 1, d + 1) of one item's parameters."""
        given: dict[str, Any] = {}
        numbers = iter(draws.tolist())
        for name, ranges in self.ranges.items():
            added = 1.0 if name == "scale_params" else 0.0
            given[name] = [low + (high - low) * next(numbers) + added for low, high in ranges]
        _, matrix = AffineGrid(**given, lazy=True)(shape)
        return torch.as_tensor(matrix, dtype=torch.float32)


@dataclass(frozen=True)
class Rotate:
    """RandRotated: with `prob`, rotate by an angle an axis, keeping the size; the result is float32, applied or not.

    Attributes:
        ranges: (low, high) in radians: one for images, three for volumes.
        ways: key -> mode, padding mode and whether corners are aligned.
    """

    keys: tuple[str, ...]
    prob: float
    ranges: Sequence[tuple[float, float]]
    ways: Mapping[str, tuple[str, str, bool]]
    places: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """One more than angles."""
        return 1 + len(self.ranges)

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Column:
        """Rotate the chosen."""
        where, (mode, padding, corners) = _chosen(draws, self.prob), self.ways[key]
        shape = tuple(rows.shape[2:])

        def rotate(part: Tensor) -> Tensor:
            matrices = np.stack([self.matrix(row, shape) for row in draws[where, 1:]])
            resample = AffineTransform(
                normalized=False, mode=mode, padding_mode=padding, align_corners=corners, reverse_indexing=True
            )
            made: Tensor = resample(part, torch.from_numpy(matrices).to(part), spatial_size=shape)
            return made

        return _changed(rows.float(), where, rotate)

    def matrix(self, draws: Tensor, shape: Shape) -> Any:
        """Return the homogeneous matrix (d + 1, d + 1) of one item's angles about the image's middle."""
        angles = [low + (high - low) * u for (low, high), u in zip(self.ranges, draws.tolist(), strict=True)]
        middle = [(side - 1) / 2 for side in shape]
        there, back = (create_translate(len(shape), [sign * m for m in middle]) for sign in (1, -1))
        return there @ create_rotate(len(shape), angles) @ back


# From MONAI's transforms


@dataclass(frozen=True)
class _Look:
    """What a step may rely on: the sizes that come to it, channels, and which keys have pixels."""

    shapes: frozenset[Shape]
    channels: int
    dtype: torch.dtype
    keys: tuple[str, ...]

    @property
    def shape(self) -> Shape | None:
        """The one size, None where there are several."""
        return next(iter(self.shapes)) if len(self.shapes) == 1 else None

    @property
    def dimensions(self) -> int:
        """Number of spatial axes."""
        return len(next(iter(self.shapes)))


def recipe(
    compose: Compose, first: int, shapes: frozenset[Shape], channels: int, dtype: torch.dtype, masks: bool
) -> BatchRecipe | None:
    """Return the transforms from position `first` on as steps for batches, None where one of them has no such form.

    Args:
        compose: the flattened chain.
        first: position of its first random transform.
        shapes: all sizes (H, W[, D]) of the images, and of their masks.
        channels: of all images.
        dtype: of all images.
        masks: whether labels are masks; else they are passed on as they are.
    """
    usual = compose.map_items is True and not (compose.unpack_items or compose.log_stats or compose.overrides)
    if not usual or compose.lazy or len({len(shape) for shape in shapes}) != 1:
        return None
    look: _Look | None = _Look(shapes, channels, dtype, _KEYS if masks else _KEYS[:1])
    steps: list[Step] = []
    for transform in compose.transforms[first:]:
        if look is None or getattr(transform, "lazy", False):
            return None
        if _changes_nothing(transform, look.keys):
            continue
        make = _STEPS.get(type(transform))
        keys = tuple(dict.fromkeys(getattr(transform, "keys", ())))
        if make is None or len(keys) < len(transform.keys) or not set(keys) <= set(look.keys):
            return None
        try:
            step = make(transform, keys, look)
        except (TypeError, ValueError):  # malformed arguments: item by item the error names the item
            return None
        if step is None:
            return None
        steps.append(step)
        look = _after(step, look)
    if look is None or look.shape is None or not look.dimensions:
        return None
    return BatchRecipe(tuple(steps), masks)


def _changes_nothing(transform: Any, keys: Sequence[str]) -> bool:
    """Tell whether a transform only makes tensors of what are tensors already."""
    if type(transform) not in (EnsureTyped, ToTensord) or not set(transform.keys) <= set(keys):
        return False
    if type(transform) is ToTensord:
        converter = transform.converter
        return converter.dtype is None and converter.device is None
    converter = transform.converter
    return (
        converter.data_type == "tensor"
        and converter.device is None
        and converter.dtype is None
        and all(dtype is None for dtype in transform.dtype)
    )


def _after(step: Step, look: _Look) -> _Look | None:
    """Return what the next step finds; None where images and masks would no longer have one size."""
    if not isinstance(step, Crop):
        return look
    if set(step.keys) != set(look.keys) and look.shape != step.size:
        return None
    return _Look(frozenset([step.size]), look.channels, look.dtype, look.keys)


def _flip(transform: Any, keys: tuple[str, ...], look: _Look) -> Step | None:
    if look.shape is None:
        return None
    return Flip(keys, transform.prob, _dims(transform.flipper.spatial_axis, look.dimensions))


def _rotate90(transform: Any, keys: tuple[str, ...], look: _Look) -> Step | None:
    if look.shape is None or transform.max_k < 1:
        return None
    dims = _dims(transform.spatial_axes, look.dimensions)
    if len(dims) != 2 or look.shape[dims[0] - 2] != look.shape[dims[1] - 2]:
        return None
    return Rotate90(keys, transform.prob, int(transform.max_k), (dims[0], dims[1]))


def _dims(axes: Any, dimensions: int) -> tuple[int, ...]:
    """Return spatial axes as axes of (B, C, ...)."""
    return tuple(int(axis) + 1 for axis in map_spatial_axes(dimensions + 1, axes))


def _crop(transform: Any, keys: tuple[str, ...], look: _Look) -> Step | None:
    cropper = transform.cropper
    if cropper.random_size or not cropper.random_center:
        return None
    sizes = {
        tuple(min(int(r), side) for r, side in zip(fall_back_tuple(cropper.roi_size, shape), shape, strict=True))
        for shape in look.shapes
    }
    return Crop(keys, next(iter(sizes))) if len(sizes) == 1 else None


def _is_intensity(keys: tuple[str, ...], look: _Look, dtype: Any = np.float32) -> bool:
    usual = look.shape is not None and look.dtype == torch.float32 and keys == _KEYS[:1]
    return usual and dtype in (np.float32, torch.float32)


def _scale(transform: Any, keys: tuple[str, ...], look: _Look) -> Step | None:
    scaler = transform.scaler
    if not _is_intensity(keys, look, scaler.dtype):
        return None
    low, high = scaler.factors
    return Scale(keys, transform.prob, low, high, look.channels if scaler.channel_wise else 1)


def _shift(transform: Any, keys: tuple[str, ...], look: _Look) -> Step | None:
    shifter = transform.shifter
    if not _is_intensity(keys, look) or any(key is not None for key in transform.factor_key):
        return None
    low, high = shifter.offsets
    return Shift(keys, transform.prob, low, high, look.channels if shifter.channel_wise else 1)


def _noise(transform: Any, keys: tuple[str, ...], look: _Look) -> Step | None:
    noise = transform.rand_gaussian_noise
    if not _is_intensity(keys, look, noise.dtype):
        return None
    return Noise(keys, transform.prob, float(noise.mean), float(noise.std), bool(noise.sample_std))


def _affine(transform: Any, keys: tuple[str, ...], look: _Look) -> Step | None:
    affine, grid = transform.rand_affine, transform.rand_affine.rand_affine_grid
    ways = {key: (str(m), str(p)) for key, m, p in zip(keys, transform.mode, transform.padding_mode, strict=True)}
    fits = look.shape is not None and tuple(fall_back_tuple(affine.spatial_size, look.shape)) == look.shape
    if not fits or grid.device is not None or look.dtype != torch.float32 or not _known(ways.values()):
        return None
    ranges = {
        f"{name}_params": [
            (float(r[0]), float(r[1])) if isinstance(r, Sequence | np.ndarray) else (-float(r), float(r))
            for r in getattr(grid, f"{name}_range")
            if r is not None
        ]
        for name in ("rotate", "shear", "translate", "scale")
    }
    return Affine(keys, transform.prob, ranges, ways)


def _rotate(transform: Any, keys: tuple[str, ...], look: _Look) -> Step | None:
    inner = transform.rand_rotate
    options = zip(keys, transform.mode, transform.padding_mode, transform.align_corners, strict=True)
    ways = {key: (str(mode), str(padding), bool(corners)) for key, mode, padding, corners in options}
    usual = inner.keep_size and all(dtype in (np.float32, torch.float32) for dtype in transform.dtype)
    if look.shape is None or not usual or look.dtype != torch.float32 or not _known(ways.values()):
        return None
    ranges = [inner.range_x] if look.dimensions == 2 else [inner.range_x, inner.range_y, inner.range_z]
    return Rotate(keys, transform.prob, [(float(low), float(high)) for low, high in ranges], ways)


def _known(ways: Any) -> bool:
    return all(way[0] in _MODES and way[1] in _PADDINGS for way in ways)


_STEPS: dict[type, Callable[[Any, tuple[str, ...], _Look], Step | None]] = {
    RandFlipd: _flip,
    RandRotate90d: _rotate90,
    RandSpatialCropd: _crop,
    RandScaleIntensityd: _scale,
    RandShiftIntensityd: _shift,
    RandGaussianNoised: _noise,
    RandAffined: _affine,
    RandRotated: _rotate,
}
"""By exact type: a subclass may do something else."""
