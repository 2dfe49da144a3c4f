"""MONAI's random transforms for a whole batch at once, on the device that holds the batch.

Each step is given uniform random numbers, one row per item, and derives from them what MONAI draws: whether an item
changes, which way, and by how much. The distributions are MONAI's; the numbers differ, as MONAI draws them from a NumPy
generator. For the same parameters a step's result equals MONAI's bit for bit on the CPU, except for the last bits of an
interpolation.

`Affine`'s parameters are independent of whether it is applied. MONAI's own are too, except for the first draw after
`set_random_state`, which gives the transform and its parts the same seed: the first parameter is then a function of
the number that decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from monai.networks.layers import AffineTransform
from monai.transforms import AffineGrid
from monai.transforms.utils import create_grid, create_rotate, create_translate
from torch import Tensor
from torch.nn.functional import grid_sample

from medfl.data.byte_codes import Coded, Column, Rows, stacked

Shape = tuple[int, ...]
"""(H, W[, D])."""


def _uniform(draws: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * draws


def _changed(rows: Column, chosen: Tensor, change: Callable[[Tensor], Tensor]) -> Column:
    """Return rows (B, C, ...) with those at the chosen positions changed."""
    if not len(chosen):
        return rows

    def apply(values: Tensor) -> Tensor:
        positions = chosen.to(values.device)
        return values.index_copy_(0, positions, change(values.index_select(0, positions)))

    if isinstance(rows, Coded):
        return rows.rearranged(apply)

    return apply(rows)


@dataclass(frozen=True)
class _Random:
    """A transform that is applied to each item with probability `prob`."""

    keys: tuple[str, ...]
    prob: float
    keeps_values: ClassVar[bool] = False

    def _chosen(self, draws: Tensor) -> Tensor:
        """Return the positions of the items that are changed: an item's first number decides."""
        return torch.where(draws[:, 0] < self.prob)[0]


@dataclass(frozen=True)
class Flip(_Random):
    """RandFlipd: with `prob`, mirror along `dims` of (B, C, ...)."""

    dims: tuple[int, ...]
    keeps_values: ClassVar[bool] = True
    num_draws: ClassVar[int] = 1

    def __call__(self, key: str, rows: Column, draws: Tensor) -> Column:
        """Flip the chosen items."""
        return _changed(rows, self._chosen(draws), lambda part: part.flip(self.dims))


@dataclass(frozen=True)
class Rotate90(_Random):
    """RandRotate90d: with `prob`, turn 1..max_k times by 90 degrees, each as likely, in the plane of `dims`."""

    max_k: int
    dims: tuple[int, int]
    keeps_values: ClassVar[bool] = True
    num_draws: ClassVar[int] = 2

    def __call__(self, key: str, rows: Column, draws: Tensor) -> Column:
        """Turn the chosen items."""
        chosen = self._chosen(draws)
        times = (draws[chosen, 1] * self.max_k).long() + 1
        for k in range(1, self.max_k + 1):
            rows = _changed(rows, chosen[times == k], partial(torch.rot90, k=k, dims=self.dims))

        return rows


@dataclass(frozen=True)
class Crop:
    """RandSpatialCropd: a patch of `size`, each place as likely, from items that may differ in size.

    With `centred` it is CenterSpatialCropd, which needs no numbers.
    """

    keys: tuple[str, ...]
    size: Shape
    centred: bool = False
    keeps_values: ClassVar[bool] = True

    @property
    def num_draws(self) -> int:
        """One number for each axis."""
        return 0 if self.centred else len(self.size)

    def __call__(self, key: str, rows: Rows, draws: Tensor) -> Column:
        """Cut the patches out."""
        if isinstance(rows, Tensor):
            return self._cut(rows, draws)
        if isinstance(rows, Coded):
            return rows.rearranged(lambda codes: self._cut(codes, draws))

        patches = []
        for row, drawn in zip(rows, draws, strict=True):
            # A coded item is a batch of one already.
            if isinstance(row, Coded):
                patches.append(self(key, row, drawn[None]))
            else:
                patches.append(self._cut(row[None], drawn[None])[0])

        return stacked(patches, share=False)

    def _cut(self, values: Tensor, draws: Tensor) -> Tensor:
        sides = list(zip(values.shape[2:], self.size, strict=True))
        if self.centred:
            # The middle as MONAI rounds it.
            corners = [[n // 2 - s // 2 for n, s in sides]] * len(values)
        else:
            corners = (draws * torch.tensor([n - s + 1 for n, s in sides])).long().tolist()

        patches = []
        for row, corner in zip(values, corners, strict=True):
            place = [slice(c, c + s) for c, s in zip(corner, self.size, strict=True)]
            patches.append(row[(slice(None), *place)])

        return torch.stack(patches)


@dataclass(frozen=True)
class Intensity(_Random):
    """RandScaleIntensityd, RandShiftIntensityd: with `prob`, multiply by 1 + f or add f, f uniform in [low, high).

    Attributes:
        num_factors: how many f an item has: 1 for all channels, or one for each.
        shift: add instead of multiply.
    """

    low: float
    high: float
    num_factors: int
    shift: bool

    @property
    def num_draws(self) -> int:
        """One number to decide, and one for each f."""
        return 1 + self.num_factors

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Column:
        """Change the chosen items."""
        chosen = self._chosen(draws)
        f = _uniform(draws[chosen, 1:], self.low, self.high)
        if self.shift:
            return _changed(rows, chosen, lambda part: part + _for_channels(f, part))
        return _changed(rows, chosen, lambda part: part * _for_channels(1 + f, part))


def _for_channels(numbers: Tensor, rows: Tensor) -> Tensor:
    """Return numbers (B, 1 or C) in the type of rows (B, C, ...), shaped (B, 1 or C, 1, ...) to be broadcast."""
    return numbers.to(rows).view(*numbers.shape, *[1] * (rows.ndim - 2))


@dataclass(frozen=True)
class Noise(_Random):
    """RandGaussianNoised: with `prob`, add normal noise, its deviation `std` or uniform in [0, std).

    An item's noise comes from a CPU generator that its second number seeds, the same on any device.
    """

    mean: float
    std: float
    sampled: bool
    num_draws: ClassVar[int] = 3

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Column:
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
class Affine(_Random):
    """RandAffined: with `prob`, resample at coordinates that rotation, shear, translation and scale have moved.

    As in MONAI the coordinates are float32, the interpolation float64, the result float32, applied or not.

    Attributes:
        ranges: (low, high) of each parameter, by the names of `AffineGrid`'s arguments.
        modes: key -> mode and padding mode of `grid_sample`.
    """

    ranges: Mapping[str, Sequence[tuple[float, float]]]
    modes: Mapping[str, tuple[str, str]]

    @property
    def num_draws(self) -> int:
        """One number to decide, and one for each parameter."""
        return 1 + sum(map(len, self.ranges.values()))

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Column:
        """Resample the chosen items."""
        chosen = self._chosen(draws)
        (mode, padding) = self.modes[key]
        shape = tuple(rows.shape[2:])

        def resample(part: Tensor) -> Tensor:
            matrices = torch.stack([self.matrix(row, shape) for row in draws[chosen, 1:]]).to(
                part.device
            )
            grid = torch.as_tensor(
                create_grid(shape, device=part.device, backend="torch"), dtype=torch.float32
            )
            coordinates = (matrices @ grid.flatten(1))[:, : len(shape)].double()
            # From pixels about the middle to -1..1, where grid_sample has the outer edges of the pixels.
            scale = torch.tensor(
                [2.0 / max(2, side) for side in shape], dtype=torch.float64, device=part.device
            )
            # grid_sample takes the last axis first.
            positions = (
                (coordinates * scale[:, None])
                .flip(1)
                .transpose(1, 2)
                .reshape(len(part), *shape, len(shape))
            )
            return grid_sample(part.double(), positions, mode, padding, align_corners=False).float()

        return _changed(rows.float(), chosen, resample)

    def matrix(self, draws: Tensor, shape: Shape) -> Tensor:
        """Return the homogeneous matrix (d + 1, d + 1) of one item's parameters."""
        parameters: dict[str, Any] = {}
        numbers = iter(draws.tolist())
        for name, ranges in self.ranges.items():
            # MONAI draws by how much a scale differs from 1.
            added = 1.0 if name == "scale_params" else 0.0
            parameters[name] = [low + (high - low) * next(numbers) + added for low, high in ranges]

        _, matrix = AffineGrid(**parameters, lazy=True)(shape)
        return torch.as_tensor(matrix, dtype=torch.float32)


@dataclass(frozen=True)
class Rotate(_Random):
    """RandRotated: with `prob`, rotate by an angle an axis, keeping the size; the result is float32, applied or not.

    Attributes:
        ranges: (low, high) in radians: one for images, three for volumes.
        modes: key -> mode, padding mode and whether corners are aligned.
    """

    ranges: Sequence[tuple[float, float]]
    modes: Mapping[str, tuple[str, str, bool]]

    @property
    def num_draws(self) -> int:
        """One number to decide, and one for each angle."""
        return 1 + len(self.ranges)

    def __call__(self, key: str, rows: Tensor, draws: Tensor) -> Column:
        """Rotate the chosen items."""
        chosen = self._chosen(draws)
        (mode, padding, corners) = self.modes[key]
        shape = tuple(rows.shape[2:])

        def rotate(part: Tensor) -> Tensor:
            matrices = np.stack([self.matrix(row, shape) for row in draws[chosen, 1:]])
            resample = AffineTransform(
                normalized=False,
                mode=mode,
                padding_mode=padding,
                align_corners=corners,
                reverse_indexing=True,
            )
            rotated: Tensor = resample(
                part, torch.from_numpy(matrices).to(part), spatial_size=shape
            )
            return rotated

        return _changed(rows.float(), chosen, rotate)

    def matrix(self, draws: Tensor, shape: Shape) -> Any:
        """Return the homogeneous matrix (d + 1, d + 1) of one item's angles about the image's middle."""
        bounds = zip(self.ranges, draws.tolist(), strict=True)
        angles = [low + (high - low) * draw for (low, high), draw in bounds]
        middle = [(side - 1) / 2 for side in shape]
        to_middle = create_translate(len(shape), middle)
        from_middle = create_translate(len(shape), [-place for place in middle])
        return to_middle @ create_rotate(len(shape), angles) @ from_middle


Step = Flip | Rotate90 | Crop | Intensity | Noise | Affine | Rotate
"""One transform of a batch.

`keys` are what it changes of image and label, `num_draws` is how many uniform numbers it needs for an item,
`keeps_values` whether it only takes numbers to other places, which it may then do with their codes.
"""
