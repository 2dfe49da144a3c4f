"""Items whose labels nobody is shown: what a site without labels trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from medfl.data.prepared import Batch, Item, Prepared, Shard, Wrapped


class LabelsHidden(Wrapped):
    """The images of prepared items; targets of their batches are None, and no record says a class."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self.items = _WithoutLabels(prepared.items)
        self.extras_of = None
        self.labelled = False

    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        """Yield inputs with None."""
        return ((x, None) for x, _ in self.prepared.batches(indices, size, generator))


class _WithoutLabels(Sequence[Item]):
    """Records without their labels, made as they are asked for."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _WithoutLabels(self._items[index])
        return {key: value for key, value in self._items[index].items() if key != "label"}


def unlabelled(shard: Shard) -> Shard:
    """Return the same items with their labels hidden."""
    return replace(shard, prepared=LabelsHidden(shard.prepared))
