"""Several steps of training on each batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from medfl.data import Batch, Prepared, Shard
from medfl.data.prepared import Wrapped
from medfl.training import Site


class Repeated(Wrapped):
    """Prepared items whose batches are repeated several times in a row, with identical tensors."""

    def __init__(self, prepared: Prepared, times: int) -> None:
        super().__init__(prepared)
        self.times = times

    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        """Yield each batch `times` times."""
        for batch in self.prepared.batches(indices, size, generator):
            for _ in range(self.times):
                yield batch


def repeating(site: Site, times: int) -> Site:
    """Return the same site with each training batch repeated: several steps of `fit` per batch."""
    return replace(site, train=Shard(Repeated(site.train.prepared, times), site.train.indices))
