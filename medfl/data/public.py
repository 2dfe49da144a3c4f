"""Public data: images that all sites and the server may share, and the outputs of frozen teachers for them.

The items are those of another bundle, read without augmentation; below, an index 0 .. P-1 refers to one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medfl.core import Task
from medfl.data.prepared import Batch, Shard


@dataclass(frozen=True)
class Public:
    """The public items of a run.

    Attributes:
        name: the bundle that provides them.
        shard: the items, P of them.
        task: kind and classes of their labels.
        answers: each teacher's outputs for all items, memory-mapped: distributions over the classes (P, C) float32,
            or foreground logits (P, H, W) float16.
        depth: number of repetitions of an image along a third axis for 3D networks; 0 leaves it unchanged.
        channels: of the sites' images; 0, or the public images' own number, leaves these unchanged.
    """

    name: str
    shard: Shard
    task: Task
    answers: tuple[Tensor, ...] = ()
    depth: int = 0
    channels: int = 0

    def __len__(self) -> int:
        return len(self.shard)

    def at(self, positions: Tensor) -> Batch:
        """Return inputs (B, C, H, W[, D]) and targets ((B,) or (B, 1, H, W[, D])) of the items at indices (B,)."""
        indices = self.shard.indices[positions]
        x, y = next(self.shard.prepared.batches(indices, max(1, len(indices)), None))
        return (x if self.channels in (0, x.shape[1]) else recoloured(x, self.channels)), y

    def batches(
        self, size: int, generator: torch.Generator | None = None
    ) -> Iterator[tuple[Tensor, Any, Any]]:
        """Yield (indices (B,), inputs, targets): shuffled with a generator, in order without."""
        if generator is None:
            order = torch.arange(len(self))
        else:
            order = torch.randperm(len(self), generator=generator)
        for positions in torch.split(order, size):
            yield (positions, *self.at(positions))

    def answered(self, positions: Tensor) -> Tensor:
        """Return the teachers' outputs (M, B, ...) float32 for the items at indices (B,)."""
        return torch.stack([answer[positions].float() for answer in self.answers])

    def outputs(self, network: nn.Module, x: Tensor) -> Tensor:
        """Return a network's output for inputs x: (B, K) or (B, K, H, W[, D]).

        With a depth, x (B, C, H, W) is repeated to (B, C, H, W, depth) and the output is the mean along that axis.
        """
        if not self.depth:
            output: Tensor = network(x)
            return output
        # the image is repeated along the third axis
        return self.flat(network(x[..., None].expand(*x.shape, self.depth)))

    def flat(self, output: Tensor) -> Tensor:
        """Convert an output for repeated images (B, K, H, W, depth) to one for images, the mean along the last axis."""
        if self.depth and output.ndim > 2:
            return output.mean(-1)

        return output


def recoloured(x: Tensor, channels: int) -> Tensor:
    """Convert images (B, C, H, W[, D]) to another number of channels: luma of RGB, or the grey value repeated.

    For other images the mean of their channels is repeated. The images are already normalised, each channel by its own
    mean and deviation, so this is luma up to a factor and an offset.
    """
    if x.shape[1] == 3:
        weights: tuple[float, ...] = (0.299, 0.587, 0.114)  # ITU-R BT.601
    else:
        weights = (1 / x.shape[1],) * x.shape[1]
    grey = torch.einsum("bc...,c->b...", x, torch.tensor(weights, dtype=x.dtype, device=x.device))[
        :, None
    ]
    return grey.expand(-1, channels, *grey.shape[2:])


def cycle(length: int, generator: torch.Generator) -> Callable[[int], Tensor]:
    """Return a function n -> the next n indices (n,) of an endless pass over 0 .. length-1, reshuffled each time."""
    left = torch.empty(0, dtype=torch.int64)

    def take(count: int) -> Tensor:
        nonlocal left
        while len(left) < count:
            left = torch.cat([left, torch.randperm(length, generator=generator)])

        taken = left[:count]
        left = left[count:]
        return taken

    return take
