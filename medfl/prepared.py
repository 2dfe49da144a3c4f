"""Prepared: the items of one section after their deterministic transforms, held once and shared by all sites.

A site's data is a `Shard`, a view of some indices; nothing is copied per site, and deterministic transforms run once
per data set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from medfl.errors import InputError
from medfl.seeding import stream

Item = Mapping[str, Any]
Batch = tuple[Any, Any]
"""Inputs (B, C, H, W[, D]) and targets ((B,) class indices, or (B, C, H, W[, D]) maps)."""

_AHEAD = 32  # batches gathered in one indexing call


@dataclass(frozen=True, eq=False)
class Geometry:
    """Where the pixels of a prepared image lie, and the file's own grid, to which a prediction can be brought back.

    Attributes:
        affine: (4, 4) float64, from index to millimetres; to pixels of the file where it knows no millimetres.
        original_affine: the file's.
        original_shape: the file's (H, W[, D]).
        file: the image's file.
    """

    affine: NDArray[np.float64]
    original_affine: NDArray[np.float64]
    original_shape: tuple[int, ...]
    file: str

    @property
    def spacing(self) -> tuple[float, ...]:
        """Distance between neighbours along each axis of the prepared image."""
        sides = np.linalg.norm(self.affine[:3, : len(self.original_shape)], axis=0)
        return tuple(float(side) for side in sides)


class Prepared(ABC):
    """One section (train, validate or test) of a bundle's data, ready to be batched.

    Attributes:
        geometry: one per item where the transforms keep track of it, else empty.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        """Keep the data list entries; index i below always means `items[i]`."""
        self.items = items
        self.geometry: Sequence[Geometry] = ()

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.items)

    @abstractmethod
    def batches(self, indices: Tensor, size: int, generator: torch.Generator | None) -> Iterator[Batch]:
        """Yield the batches of `indices` in order, the last one possibly smaller.

        Args:
            indices: (N,) int64.
            size: items per batch.
            generator: seeds the random transforms; without one each item always gets the same draw.
        """

    def ids(self, indices: Sequence[int]) -> list[str]:
        """Return the item ids, the position where the data list gives none."""
        return [str(self.items[i].get("id", i)) for i in indices]


class Stacked(Prepared):
    """Items of one shape without random transforms: two tensors, batches are views or single gathers."""

    def __init__(self, items: Sequence[Item], inputs: Tensor, targets: Tensor) -> None:
        """Hold inputs (N, C, H, W[, D]) and targets (N, ...)."""
        super().__init__(items)
        self.inputs, self.targets = inputs, targets

    def batches(self, indices: Tensor, size: int, generator: torch.Generator | None) -> Iterator[Batch]:
        """Yield batches; `generator` is not used, there is nothing random."""
        for chunk in torch.split(indices, size * _AHEAD):
            inputs, targets = self.inputs[chunk], self.targets[chunk]
            yield from zip(torch.split(inputs, size), torch.split(targets, size), strict=True)


class Sampled(Prepared):
    """Items of any shape, with random transforms and the bundle's own way of making a batch.

    Args:
        items: data list entries.
        sample: index -> the sample after all transforms.
        reseed: sets the state of the random transforms; None if there are none.
        collate: samples -> batch.
        unpack: batch -> (inputs, targets).
    """

    def __init__(
        self,
        items: Sequence[Item],
        sample: Callable[[int], Any],
        reseed: Callable[[int], None] | None,
        collate: Callable[[list[Any]], Any],
        unpack: Callable[[Any], Batch],
    ) -> None:
        """Keep the parts."""
        super().__init__(items)
        self.sample, self.reseed, self.collate, self.unpack = sample, reseed, collate, unpack

    def batches(self, indices: Tensor, size: int, generator: torch.Generator | None) -> Iterator[Batch]:
        """Yield batches; random transforms are seeded from the generator, or without one by the item's position."""
        if self.reseed is not None and generator is not None:
            self.reseed(int(torch.randint(2**31 - 1, (), generator=generator)))
        sample = self._same if self.reseed is not None and generator is None else self.sample
        for chunk in torch.split(indices, size):
            yield self.unpack(self.collate([sample(i) for i in chunk.tolist()]))

    def _same(self, index: int) -> Any:
        """Return a sample that does not depend on what was drawn before: what is evaluated is always the same."""
        assert self.reseed is not None
        with stream(0, "sample", index):
            self.reseed(index)
            return self.sample(index)


@dataclass(frozen=True)
class Shard:
    """The items of one site (or of a pooled set) in one section."""

    prepared: Prepared
    indices: Tensor
    """(N,) int64, positions in `prepared`."""

    @classmethod
    def of(cls, prepared: Prepared, indices: Sequence[int]) -> Shard:
        """Make a shard from plain integers."""
        return cls(prepared, torch.as_tensor(list(indices), dtype=torch.int64))

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.indices)

    @property
    def ids(self) -> list[str]:
        """The items' ids."""
        return self.prepared.ids(self.indices.tolist())

    @property
    def labels(self) -> list[int]:
        """The items' class labels, empty where the data list has none."""
        labels = [self.prepared.items[i].get("label") for i in self.indices.tolist()]
        return [int(x) for x in labels if isinstance(x, int)] if all(isinstance(x, int) for x in labels) else []

    def batches(self, size: int, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """Yield batches: shuffled and freshly transformed with a generator, in order and always the same without."""
        order = self.indices
        if not len(order):
            return iter(())
        if generator is not None:
            order = order[torch.randperm(len(order), generator=generator)]
        return self.prepared.batches(order, size, generator)


def check_channels(items: Sequence[Item], images: Sequence[Tensor]) -> None:
    """Compare the channels of images (C, H, W[, D]).

    Raises:
        InputError: two images have different numbers of channels; names both.
    """
    for item, image in zip(items, images, strict=True):
        if len(image) != len(images[0]):
            raise InputError(
                f"image {item.get('id', '?')!r} has {len(image)} channels, "
                f"{items[0].get('id', '?')!r} has {len(images[0])}",
                "all images of a data set have the same number of channels",
                "convert the odd ones, or let the bundle's transforms do it",
            )


def stack(items: Sequence[Item], inputs: Sequence[Tensor], targets: Sequence[Any]) -> Stacked | None:
    """Stack samples into a `Stacked`, or return None where shapes differ.

    Raises:
        InputError: two images have different numbers of channels.
    """
    check_channels(items, inputs)
    values = [torch.as_tensor(target) for target in targets]
    if any(len({value.shape for value in column}) > 1 for column in (inputs, values)):
        return None
    return Stacked(items, torch.stack(list(inputs)), default_collate(list(targets)))
