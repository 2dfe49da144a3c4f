"""Prepared: the items of one section after their deterministic transforms, held once and shared by all sites.

A site's data is a `Shard`, a view of some indices; nothing is copied per site, and deterministic transforms run once per data set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medfl.errors import InputError

Item = Mapping[str, Any]
Batch = tuple[Any, Any]
"""Inputs (B, C, H, W[, D]) and targets ((B,) class indices, or (B, C, H, W[, D]) maps)."""

_AHEAD = 32  # batches gathered in one indexing call


class Prepared(ABC):
    """One section (train, validate or test) of a bundle's data, ready to be batched."""

    def __init__(self, items: Sequence[Item]) -> None:
        """Keep the data list entries; index i below always means `items[i]`."""
        self.items = items

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.items)

    @abstractmethod
    def batches(self, indices: Tensor, size: int, generator: torch.Generator | None) -> Iterator[Batch]:
        """Yield the batches of `indices` in order, the last one possibly smaller.

        Args:
            indices: (N,) int64.
            size: items per batch.
            generator: source of the random transforms' seed; without one they are not applied.
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
        for chunk in indices.split(size * _AHEAD):
            yield from zip(self.inputs[chunk].split(size), self.targets[chunk].split(size), strict=True)


class Sampled(Prepared):
    """Items of any shape, with random transforms and the bundle's own way of making a batch.

    Args:
        items: data list entries.
        sample: index -> the sample after the deterministic transforms.
        augment: random transforms (a `monai.transforms.Compose`), or None.
        collate: samples -> batch dictionary.
        unpack: batch dictionary -> (inputs, targets).
    """

    def __init__(
        self,
        items: Sequence[Item],
        sample: Callable[[int], Any],
        augment: Any | None,
        collate: Callable[[list[Any]], Any],
        unpack: Callable[[Any], Batch],
    ) -> None:
        """Keep the parts."""
        super().__init__(items)
        self.sample, self.augment, self.collate, self.unpack = sample, augment, collate, unpack

    def batches(self, indices: Tensor, size: int, generator: torch.Generator | None) -> Iterator[Batch]:
        """Yield batches; with a generator the random transforms are seeded from it and applied."""
        augment = self.augment if generator is not None else None
        if augment is not None:
            augment.set_random_state(seed=int(torch.randint(2**31 - 1, (), generator=generator)))
        for chunk in indices.split(size):
            samples = [self.sample(i) for i in chunk.tolist()]
            yield self.unpack(self.collate([augment(s) for s in samples] if augment is not None else samples))


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
        """Yield batches: shuffled and randomly transformed with a generator, in order and plain without."""
        order = self.indices
        if generator is not None:
            order = order[torch.randperm(len(order), generator=generator)]
        return self.prepared.batches(order, size, generator)


def stack(items: Sequence[Item], inputs: Sequence[Tensor], targets: Sequence[Any]) -> Stacked | None:
    """Stack samples into a `Stacked`, or return None where their spatial shapes differ.

    Raises:
        InputError: two images have different numbers of channels.
    """
    first = inputs[0]
    for item, image in zip(items, inputs, strict=True):
        if image.shape[0] != first.shape[0]:
            raise InputError(
                f"image {item.get('id', '?')!r} has {image.shape[0]} channels, {items[0].get('id', '?')!r} has {first.shape[0]}",
                "all images of a data set have the same number of channels",
                "convert the odd ones, or set convert: true in the bundle's reader",
            )
    if any(image.shape != first.shape for image in inputs):
        return None
    values = [torch.as_tensor(target) for target in targets]
    if any(value.shape != values[0].shape for value in values):
        return None
    return Stacked(items, torch.stack(list(inputs)), torch.stack(values))
