"""Several steps of training on each batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from medfl.data.prepared import Batch, Prepared, Shard, Wrapped
from medfl.training import Site


class Repeated(Wrapped):
    """Prepared items each batch of which comes several times in a row, the very same tensors."""

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
    """Return the same site with each training batch several times in a row: several steps of `fit` a batch."""
    return replace(site, train=Shard(Repeated(site.train.prepared, times), site.train.indices))
