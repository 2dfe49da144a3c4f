"""A bundle's random transforms as steps on whole batches, on the device that holds the batch, if all support this.

Each step receives uniform random numbers, one row per item, and derives from them what MONAI draws: whether an item
changes, which way, and by how much. The distributions are MONAI's; the numbers differ, as MONAI draws them from a NumPy
generator. For the same parameters a step's result equals MONAI's bit for bit on the CPU, except for the last bits of an
interpolation.

`Affine`'s parameters are independent of whether it is applied. MONAI's own are too, except for the first draw after
`set_random_state`, which gives the transform and its parts the same seed: the first parameter is then a function of
the number that decided.

The following have no batch step, and are applied item by item: crops by positive and negative labels (several samples
per item, found from each mask), random sizes, interpolations other than bilinear and nearest, MONAI's lazy resampling,
and all transforms not named here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from monai import transforms as mt
from monai.networks.layers import AffineTransform
from monai.transforms import AffineGrid
from monai.transforms.utils import create_grid, create_rotate, create_translate, map_spatial_axes
from monai.utils import fall_back_tuple
from torch import Tensor
from torch.nn.functional import grid_sample

from medfl.core import Document

Shape = tuple[int, ...]
"""(H, W[, D])."""
Rows = Tensor | Sequence[Tensor]
"""Images or masks of a batch: stacked, or one by one if their sizes differ."""


def _uniform(draws: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * draws


def _changed(rows: Tensor, chosen: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return rows (B, C, ...) with those at the chosen indices changed."""
    if not len(chosen):
        return rows

    positions = chosen.to(rows.device)
    return rows.index_copy_(0, positions, change(rows.index_select(0, positions)))


@dataclass(frozen=True)
class _Random:
    """A transform that is applied to each item with probability `prob`."""

    keys: tuple[str, ...]
    prob: float

    def _chosen(self, draws: Tensor) -> Tensor:
        """Return the indices of the items that are changed: an item's first number decides."""
        return torch.where(draws[:, 0] < self.prob)[0]


@dataclass(frozen=True)
class Flip(_Random):
    """RandFlipd: with `prob`, mirror along `dims` of (B, C, ...)."""

    dims: tuple[int, ...]
    num_draws: ClassVar[int] = 1

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Tensor:
        """Flip the chosen items."""
        return _changed(rows, self._chosen(draws), lambda part: part.flip(self.dims))


@dataclass(frozen=True)
class Rotate90(_Random):
    """RandRotate90d: with `prob`, turn 1..max_k times by 90 degrees, uniformly, in the plane of `dims`."""

    max_k: int
    dims: tuple[int, int]
    num_draws: ClassVar[int] = 2

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Tensor:
        """Turn the chosen items."""
        chosen = self._chosen(draws)
        times = (draws[chosen, 1] * self.max_k).long() + 1
        for k in range(1, self.max_k + 1):
            rows = _changed(rows, chosen[times == k], partial(torch.rot90, k=k, dims=self.dims))

        return rows


@dataclass(frozen=True)
class Crop:
    """RandSpatialCropd: a patch of `size` at a uniformly random place, from items that may differ in size.

    With `centred` it is CenterSpatialCropd, which needs no numbers.
    """

    keys: tuple[str, ...]
    size: Shape
    centred: bool = False

    @property
    def num_draws(self) -> int:
        """One number per axis."""
        return 0 if self.centred else len(self.size)

    def __call__(self, key: str, rows: Rows, draws: Tensor) -> Tensor:
        """Cut out the patches."""
        patches = []
        for row, drawn in zip(rows, draws.tolist(), strict=True):
            place = [slice(None)]
            for axis, size in enumerate(self.size):
                side = row.shape[1 + axis]
                if self.centred:
                    corner = side // 2 - size // 2  # as MONAI rounds
                else:
                    corner = int(drawn[axis] * (side - size + 1))
                place.append(slice(corner, corner + size))

            patches.append(row[tuple(place)])

        return torch.stack(patches)


@dataclass(frozen=True)
class Intensity(_Random):
    """RandScaleIntensityd, RandShiftIntensityd: with `prob`, multiply by 1 + f or add f, f uniform in [low, high).

    Attributes:
        num_factors: factors f per item: 1 for all channels, or one per channel.
        shift: add instead of multiply.
    """

    low: float
    high: float
    num_factors: int
    shift: bool

    @property
    def num_draws(self) -> int:
        """One number to decide, and one per f."""
        return 1 + self.num_factors

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Tensor:
        """Change the chosen items."""
        chosen = self._chosen(draws)
        f = _uniform(draws[chosen, 1:], self.low, self.high)
        if self.shift:
            return _changed(rows, chosen, lambda part: part + _for_channels(f, part))
        return _changed(rows, chosen, lambda part: part * _for_channels(1 + f, part))


def _for_channels(numbers: Tensor, rows: Tensor) -> Tensor:
    """Return numbers (B, 1 or C) in the dtype of rows (B, C, ...), shaped (B, 1 or C, 1, ...) for broadcasting."""
    return numbers.to(rows).view(*numbers.shape, *[1] * (rows.ndim - 2))


@dataclass(frozen=True)
class Noise(_Random):
    """RandGaussianNoised: with `prob`, add normal noise with deviation `std`, or uniform in [0, std).

    An item's noise comes from a CPU generator seeded by its second number, so it is the same on any device.
    """

    mean: float
    std: float
    sampled: bool
    num_draws: ClassVar[int] = 3

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Tensor:
        """Add noise to the chosen items."""
        chosen = self._chosen(draws)
        if self.sampled:
            deviations = _uniform(draws[chosen, 2], 0.0, self.std)
        else:
            deviations = torch.full((len(chosen),), self.std)

        def add(part: Tensor) -> Tensor:
            fields = []
            for number in draws[chosen, 1].tolist():
                # A float64 below 1 has 53 random bits, all of which seed the noise.
                generator = torch.Generator().manual_seed(int(number * 2**53))
                fields.append(torch.randn(part.shape[1:], generator=generator))

            noise = self.mean + torch.stack(fields) * _for_channels(
                deviations[:, None], fields[0][None]
            )
            return part + noise.to(part)

        return _changed(rows, chosen, add)


@dataclass(frozen=True)
class _Resampled(_Random, ABC):
    """A transform that resamples with a matrix per item; the result is float32, applied or not.

    Attributes:
        ranges: (low, high) of each parameter of a matrix.
        modes: key -> mode, padding mode and whether corners are aligned.
    """

    ranges: Sequence[tuple[float, float]]
    modes: Mapping[str, tuple[str, str, bool]]

    @property
    def num_draws(self) -> int:
        """One number to decide, and one per parameter."""
        return 1 + len(self.ranges)

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Tensor:
        """Resample the chosen items."""
        chosen = self._chosen(draws)
        shape = tuple(rows.shape[2:])

        def resample(part: Tensor) -> Tensor:
            matrices = torch.stack([self.matrix(row, shape) for row in draws[chosen, 1:]])
            return self._resample(part, matrices.to(part.device), *self.modes[key])

        return _changed(rows.float(), chosen, resample)

    def matrix(self, draws: Tensor, shape: Shape) -> Tensor:
        """Return the homogeneous matrix (d + 1, d + 1) of one item's numbers."""
        pairs = zip(self.ranges, draws.tolist(), strict=True)
        parameters = [low + (high - low) * draw for (low, high), draw in pairs]
        return torch.as_tensor(self._matrix(parameters, shape))

    @abstractmethod
    def _matrix(self, parameters: Sequence[float], shape: Shape) -> Any:
        """Return MONAI's matrix of these parameters for images of size `shape`, in voxels from the centre."""

    @abstractmethod
    def _resample(
        self, part: Tensor, matrices: Tensor, mode: str, padding: str, corners: bool
    ) -> Tensor:
        """Resample images (B, C, sides) by matrices (B, d + 1, d + 1); modes are those of `grid_sample`."""


@dataclass(frozen=True)
class Affine(_Resampled):
    """RandAffined: with `prob`, resample at coordinates moved by rotation, shear, translation and scale.

    As in MONAI the coordinates are float32, the interpolation float64.

    Attributes:
        names: argument of `AffineGrid` for each parameter.
    """

    names: Sequence[str]

    def _resample(
        self, part: Tensor, matrices: Tensor, mode: str, padding: str, corners: bool
    ) -> Tensor:
        shape = part.shape[2:]
        # (d + 1, H, W[, D]), homogeneous
        grid = torch.as_tensor(create_grid(shape, device=part.device, backend="torch")).float()
        # (B, d, pixels)
        coordinates = (matrices.float() @ grid.flatten(1))[:, : len(shape)].double()
        # From pixels relative to the centre to -1..1, which grid_sample places at the outer edges of the pixels.
        scale = 2.0 / torch.tensor(shape, dtype=torch.float64, device=part.device).clamp(min=2)
        # grid_sample takes the last axis first.
        positions = (coordinates * scale[:, None]).flip(1).transpose(1, 2)
        positions = positions.reshape(len(part), *shape, len(shape))
        return grid_sample(part.double(), positions, mode, padding, align_corners=corners).float()

    def _matrix(self, parameters: Sequence[float], shape: Shape) -> Any:
        arguments: Document = {}
        for name, value in zip(self.names, parameters, strict=True):
            # MONAI draws the difference of a scale from 1.
            arguments.setdefault(name, []).append(value + (name == "scale_params"))

        return AffineGrid(**arguments, lazy=True)(shape)[1]


@dataclass(frozen=True)
class Rotate(_Resampled):
    """RandRotated: with `prob`, rotate by one angle per axis (one for images, three for volumes), keeping the size."""

    def _resample(
        self, part: Tensor, matrices: Tensor, mode: str, padding: str, corners: bool
    ) -> Tensor:
        resample = AffineTransform(
            normalized=False,
            mode=mode,
            padding_mode=padding,
            align_corners=corners,
            reverse_indexing=True,
        )
        rotated: Tensor = resample(part, matrices.to(part), spatial_size=part.shape[2:])
        return rotated

    def _matrix(self, parameters: Sequence[float], shape: Shape) -> Any:
        middle = (np.array(shape) - 1) / 2  # centre of rotation
        to_middle = create_translate(len(shape), middle.tolist())
        turn = create_rotate(len(shape), parameters)
        return to_middle @ turn @ create_translate(len(shape), (-middle).tolist())


Step = Flip | Rotate90 | Crop | Intensity | Noise | Affine | Rotate
"""One transform of a batch.

`keys` are the parts (image, label) that it changes, `num_draws` the number of uniform numbers it needs per item.
"""


# From MONAI's transforms to steps

Transform = Any
"""A transform of MONAI, which is untyped."""

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
        """Number of uniform numbers that the steps need per item."""
        return sum(step.num_draws for step in self.steps)

    def deterministic(self, uncropped: bool) -> BatchRecipe:
        """Return the steps without randomness: centre crops, or no step at all if `uncropped`."""
        if uncropped:
            crops: tuple[Step, ...] = ()
        else:
            crops = tuple(
                replace(step, centred=True) for step in self.steps if isinstance(step, Crop)
            )
        return BatchRecipe(crops, self.masks)

    def __call__(self, inputs: Any, targets: Any, draws: Tensor) -> tuple[Any, Any]:
        """Return transformed inputs and targets; may modify its arguments.

        Args:
            inputs: images (B, C, H, W[, D]).
            targets: class indices (B,), or masks shaped like the images.
            draws: (B, num_draws) float64, uniform in [0, 1).
        """
        rows = {"image": inputs, "label": targets}
        drawn = torch.split(draws, [step.num_draws for step in self.steps], dim=1)
        for step, numbers in zip(self.steps, drawn, strict=True):
            for key in step.keys:
                # Only crops accept items of different sizes.
                column = rows[key] if isinstance(step, Crop) else _stacked(rows[key])
                rows[key] = step(key, column, numbers)

        return _stacked(rows["image"]), _stacked(rows["label"]) if self.masks else rows["label"]


def _stacked(rows: Rows) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.stack(list(rows))


@dataclass(frozen=True)
class _Arriving:
    """Input of a step: images of these sizes, their channels and dtype, and which keys have pixels."""

    shapes: frozenset[Shape]
    channels: int
    dtype: torch.dtype
    keys: tuple[str, ...]

    @property
    def uniform(self) -> bool:
        """Whether all have the same size."""
        return len(self.shapes) == 1

    @property
    def shape(self) -> Shape:
        """One of the sizes; the common size if they agree."""
        return next(iter(self.shapes))


def recipe(
    compose: mt.Compose,
    first: int,
    shapes: frozenset[Shape],
    channels: int,
    dtype: torch.dtype,
    masks: bool,
) -> BatchRecipe | None:
    """Return the transforms from index `first` on as batch steps, None if one of them has no batch step.

    Args:
        compose: the flattened chain.
        first: index of its first random transform.
        shapes: all sizes (H, W[, D]) of the images, and of their masks.
        channels: of all images.
        dtype: of all images.
        masks: whether labels are masks; other labels pass unchanged.
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
            # Malformed arguments: applied item by item, the error names the item.
            return None

        if step is None:
            return None

        steps.append(step)
        arriving = _after(step, arriving)

    if arriving is None or not arriving.uniform or not arriving.shape:
        return None

    return BatchRecipe(tuple(steps), masks)


def _changes_nothing(transform: Transform, keys: Sequence[str]) -> bool:
    """Tell whether a transform only converts its input to tensors, which it already is."""
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
    """Return the input of the next step; None if images and masks would no longer have the same size."""
    if not isinstance(step, Crop):
        return arriving
    if set(step.keys) != set(arriving.keys) and arriving.shapes != {step.size}:
        return None
    return replace(arriving, shapes=frozenset([step.size]))


def _flip(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    return Flip(keys, transform.prob, _dims(transform.flipper.spatial_axis, len(arriving.shape)))


def _rotate90(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    dims = _dims(transform.spatial_axes, len(arriving.shape))
    # a quarter turn exchanges the sides, which have to be equal
    if (
        transform.max_k < 1
        or len(dims) != 2
        or arriving.shape[dims[0] - 2] != arriving.shape[dims[1] - 2]
    ):
        return None
    return Rotate90(keys, transform.prob, int(transform.max_k), (dims[0], dims[1]))


def _dims(axes: Any, dimensions: int) -> tuple[int, ...]:
    """Return spatial axes as axes of (B, C, ...)."""
    # MONAI counts from the channels on, a batch has an axis before them
    return tuple(int(axis) + 1 for axis in map_spatial_axes(dimensions + 1, axes))


def _crop(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    cropper = transform.cropper
    if cropper.random_size or not cropper.random_center:
        return None

    # MONAI's crop is never larger than its image, so sizes may still differ after it.
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

    number = arriving.channels if scaler.channel_wise else 1
    low, high = scaler.factors
    return Intensity(keys, transform.prob, low, high, number, shift=False)


def _shift(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    shifter = transform.shifter
    if not _is_intensity(keys, arriving) or {*transform.factor_key} != {None}:
        return None

    number = arriving.channels if shifter.channel_wise else 1
    low, high = shifter.offsets
    return Intensity(keys, transform.prob, low, high, number, shift=True)


def _noise(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    noise = transform.rand_gaussian_noise
    if not _is_intensity(keys, arriving, noise.dtype):
        return None
    return Noise(keys, transform.prob, float(noise.mean), float(noise.std), bool(noise.sample_std))


def _affine(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    affine = transform.rand_affine
    grid = affine.rand_affine_grid
    modes = _modes(transform, keys, arriving, [False] * len(keys))
    keeps_size = tuple(fall_back_tuple(affine.spatial_size, arriving.shape)) == arriving.shape
    if modes is None or not keeps_size or grid.device is not None:
        return None

    names = []
    ranges = []
    for name in ("rotate", "shear", "translate", "scale"):
        for bounds in getattr(grid, f"{name}_range"):
            if bounds is not None:
                # A single number r stands for -r to r.
                low, high = np.broadcast_to(bounds, 2).tolist()
                is_single = np.ndim(bounds) == 0
                ranges.append((-high if is_single else low, high))
                names.append(f"{name}_params")

    return Affine(keys, transform.prob, ranges, modes, names)


def _rotate(transform: Transform, keys: tuple[str, ...], arriving: _Arriving) -> Step | None:
    inner = transform.rand_rotate
    modes = _modes(transform, keys, arriving, transform.align_corners)
    if (
        modes is None
        or not inner.keep_size
        or not {*transform.dtype} <= {np.float32, torch.float32}
    ):
        return None

    # Images rotate in their plane only.
    ranges = [inner.range_x, inner.range_y, inner.range_z][: 1 if len(arriving.shape) == 2 else 3]
    return Rotate(keys, transform.prob, ranges, modes)


def _modes(
    transform: Transform, keys: tuple[str, ...], arriving: _Arriving, corners: Sequence[bool]
) -> dict[str, tuple[str, str, bool]] | None:
    """Return key -> how it is resampled, None if this is not supported."""
    modes = {}
    for key, mode, padding, aligned in zip(
        keys, transform.mode, transform.padding_mode, corners, strict=True
    ):
        modes[key] = (str(mode), str(padding), bool(aligned))
        if mode not in _MODES or padding not in _PADDINGS or arriving.dtype != torch.float32:
            return None

    return modes


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
