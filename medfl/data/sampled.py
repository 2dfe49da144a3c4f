"""Items one by one: random transforms of each, and the bundle's own way of making a batch of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from medfl.core.seeding import stream
from medfl.data.prepared import Batch, Item, Prepared, Sample, extras

if TYPE_CHECKING:
    from medfl.data.samples import SampleMaker

_THREADS = 2  # that make samples before they are needed
_AHEAD = 4  # batches that they may be ahead

Collate = Callable[[list[Sample]], Sample]
"""Samples -> batch."""


class Sampled(Prepared):
    """Items of any shape, with random transforms and the bundle's own way of making a batch.

    Args:
        items: data list entries.
        samples: index -> the sample after all transforms.
        collate: samples -> batch.
        unpack: batch -> (inputs, targets).
        in_threads: make samples in threads beside this one, with clones of `samples` that draw from nothing but their
            own state.
    """

    def __init__(
        self,
        items: Sequence[Item],
        samples: SampleMaker,
        collate: Collate,
        unpack: Callable[[Sample], Batch],
        *,
        in_threads: bool = False,
    ) -> None:
        super().__init__(items)
        self.samples = samples
        self.collate = collate
        self.unpack = unpack
        self.in_threads = in_threads
        self._clones: list[SampleMaker] = []

    def deterministic(self, uncropped: bool = False) -> Prepared:
        """Return the same items without random transforms."""
        samples = self.samples.without_draws(uncropped)
        if samples is self.samples:
            return self

        return self._with(samples=samples, _clones=[])

    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        """Yield batches; each item's random transforms are seeded from the generator, or without one by its position.

        The samples of the next batches are made in threads where that is safe.
        """
        yield from map(self.unpack, self._collated(indices, size, generator))

    def cases(self, indices: Tensor) -> Iterator[tuple[Any, Any, Item]]:
        """Yield inputs and targets of each item, a batch of one, and what else is in the batch."""
        for batch in self._collated(indices, 1, None):
            yield *self.unpack(batch), extras(batch)

    def _collated(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Sample]:
        seeds = indices
        if self.samples.has_steps_left and generator is not None:
            seeds = torch.randint(2**31 - 1, (len(indices),), generator=generator)

        pairs = list(zip(indices.tolist(), seeds.tolist(), strict=True))
        work = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        if self.in_threads and len(work) > 1:
            batches = self._in_threads(work)
        else:
            batches = map(self._make, work)

        for batch in batches:
            yield self.collate(batch)

    def _make(self, work: list[tuple[int, int]]) -> list[Sample]:
        """Make one batch's samples in this thread, where transforms may draw from the global generators."""
        batch = []
        for index, seed in work:
            with stream(seed, "sample") if self.samples.has_steps_left else nullcontext():
                batch.append(_made(self.samples, index, seed))

        return batch

    def _in_threads(self, work: list[list[tuple[int, int]]]) -> Iterator[list[Sample]]:
        """Make the batches' samples in threads, a few batches ahead; start no more once the caller stops asking."""
        pool = ThreadPoolExecutor(_THREADS, "medfl-samples")
        pending: deque[Future[list[Sample]]] = deque()
        try:
            for batch in work:
                pending.append(pool.submit(self._make_in_thread, batch))
                if len(pending) > _AHEAD:
                    yield pending.popleft().result()

            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # a fork must find no thread at work

    def _make_in_thread(self, work: list[tuple[int, int]]) -> list[Sample]:
        """Make one batch's samples with transforms that no other thread uses."""
        try:
            clone = self._clones.pop()
        except IndexError:
            clone = self.samples.clone()

        batch = [_made(clone, index, seed) for index, seed in work]
        self._clones.append(clone)
        return batch


def _made(samples: SampleMaker, index: int, seed: int) -> Sample:
    if samples.has_steps_left:
        samples.reseed(seed)

    return samples(index)
