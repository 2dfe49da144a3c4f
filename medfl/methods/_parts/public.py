"""Shared code of the methods that learn from public data; `extras.PublicData` declares their options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfl.core import InputError
from medfl.data import Batch, Prepared, Public, Shard
from medfl.methods._parts.extras import PublicData
from medfl.methods.base import Method
from medfl.training import Host, Site


@dataclass(frozen=True)
class PublicMethod(PublicData, Method):
    """A method that requires public data."""

    def check(self, site: Site) -> None:
        """Raise InputError if the run has no public data."""
        public_data(site)


def public_data(owner: Site | Host) -> Public:
    """Return the public data of a site or of the server.

    Raises:
        InputError: there are none.
    """
    if owner.public is None:
        raise InputError(
            "a run without public data",
            "this method learns from some",
            "add --set public=BUNDLE[:DIR]",
        )
    return owner.public


class Scored(Prepared):
    """Public items with scores in place of their targets.

    Args:
        public: the items.
        positions: (N,), indices of the items used.
        scores: (N, ...), one per item; None keeps the targets.
        least: a last batch with fewer items is merged into the previous one.
    """

    def __init__(
        self, public: Public, positions: Tensor, scores: Tensor | None = None, least: int = 1
    ) -> None:
        self.positions = positions.cpu()  # they come from a State, which may be on a GPU
        super().__init__(
            [public.shard.prepared.items[i] for i in public.shard.indices[self.positions].tolist()]
        )
        self.public = public
        self.scores = scores
        self.least = least

    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        """Yield batches. `generator` is unused: public items are read without random transforms."""
        chunks = list(torch.split(indices, size))
        if len(chunks) > 1 and len(chunks[-1]) < self.least:
            # a loss over the batch, such as FCCL's standard deviation, is undefined for one item
            chunks[-2:] = [torch.cat(chunks[-2:])]
        for chunk in chunks:
            x, y = self.public.at(self.positions[chunk])
            yield x, y if self.scores is None else self.scores[chunk.to(self.scores.device)]


def on_public(
    site: Site,
    public: Public,
    positions: Tensor,
    scores: Tensor | None,
    epochs: int,
    size: int,
    least: int = 1,
) -> Site:
    """Return a site that trains on public items instead of its own; the arguments are those of `Scored`.

    It has its own journal, since the site's reports training on its private data.
    """
    settings = replace(site.settings, epochs=epochs, batch_size=size)
    shard = Shard.of(Scored(public, positions, scores, least), range(len(positions)))
    return replace(site, train=shard, settings=settings, journal=[], penalty=None)


@contextmanager
def untracked(network: nn.Module, active: bool = True) -> Iterator[None]:
    """Run a network in training mode without moving BatchNorm's running statistics or counters."""
    layers = []
    for module in network.modules() if active else ():
        # Layers that never tracked are left alone, also at the end.
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            module.track_running_stats = False
            layers.append(module)

    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
