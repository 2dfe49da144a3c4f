"""Items whose labels nobody is shown: what a site without labels trains on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor

from medfl.data.prepared import Batch, Item, Prepared, Shard


class Unlabelled(Prepared):
    """The images of prepared items; targets of their batches are None, and no record says a class."""

    labelled = False

    def __init__(self, prepared: Prepared) -> None:
        """Hold the items; nothing is copied."""
        super().__init__(_WithoutLabels(prepared.items))
        self.prepared, self.geometry, self.pinned = prepared, prepared.geometry, prepared.pinned

    @property
    def device(self) -> torch.device:
        """Where the images are."""
        return self.prepared.device

    def deterministic(self, whole: bool = False) -> Prepared:
        """Return the same items without random transforms, labels hidden too."""
        return Unlabelled(self.prepared.deterministic(whole))

    def batches(self, indices: Tensor, size: int, generator: torch.Generator | None) -> Iterator[Batch]:
        """Yield inputs with None."""
        return ((x, None) for x, _ in self.prepared.batches(indices, size, generator))


class _WithoutLabels(Sequence[Item]):
    """Records without their labels, made as they are asked for."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return _WithoutLabels(self._items[index])
        record: Mapping[str, Any] = self._items[index]
        return {key: value for key, value in record.items() if key != "label"}


def unlabelled(shard: Shard) -> Shard:
    """Return the same items with their labels hidden."""
    return replace(shard, prepared=Unlabelled(shard.prepared))
