"""Items one by one: random transforms of each, and the bundle's own way of making a batch of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medfl.core.seeding import stream
from medfl.data.prepared import Batch, Item, Prepared, Sample, extras

_THREADS = 2  # that make samples before they are needed
_AHEAD = 4  # batches that they may be ahead

Collate = Callable[[list[Sample]], Sample]
"""Samples -> batch."""
SampleFunctions = tuple[Callable[[int], Sample], Callable[[int], None] | None]
"""index -> the sample after all transforms; what sets the state of the random ones, None if there are none."""


class Sampled(Prepared):
    """Items of any shape, with random transforms and the bundle's own way of making a batch.

    Args:
        items: data list entries.
        sample: index -> the sample after all transforms.
        reseed: sets the state of the random transforms; None if there are none.
        collate: samples -> batch.
        unpack: batch -> (inputs, targets).
        clone: makes another `sample` and `reseed`, of the same numbers, for a thread beside this one; they draw from
            nothing but their own state. None keeps the work in this thread.
        without_draws: uncropped -> `sample` and `reseed` of `deterministic`; None where they are these.
    """

    def __init__(
        self,
        items: Sequence[Item],
        sample: Callable[[int], Sample],
        reseed: Callable[[int], None] | None,
        collate: Collate,
        unpack: Callable[[Sample], Batch],
        clone: Callable[[], SampleFunctions] | None = None,
        without_draws: Callable[[bool], SampleFunctions] | None = None,
    ) -> None:
        super().__init__(items)
        self.sample = sample
        self.reseed = reseed
        self.collate = collate
        self.unpack = unpack
        self.clone = clone
        self._without_draws = without_draws
        self._clones: list[SampleFunctions] = []

    def deterministic(self, uncropped: bool = False) -> Prepared:
        """Return the same items without random transforms."""
        if self._without_draws is None:
            return self

        clone = partial(self._without_draws, uncropped)
        sample, reseed = clone()
        return self._with(
            sample=sample,
            reseed=reseed,
            clone=clone if self.clone else None,
            _without_draws=None,
            _clones=[],
        )

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
        if self.reseed is not None and generator is not None:
            seeds = torch.randint(2**31 - 1, (len(indices),), generator=generator)

        pairs = list(zip(indices.tolist(), seeds.tolist(), strict=True))
        work = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        if self.clone is not None and len(work) > 1:
            batches = self._in_threads(work)
        else:
            batches = map(self._make, work)

        for samples in batches:
            yield self.collate(samples)

    def _make(
        self, work: list[tuple[int, int]], clone: SampleFunctions | None = None
    ) -> list[Sample]:
        """Make one batch's samples, with a clone in a thread beside this one."""
        sample, reseed = clone or (self.sample, self.reseed)
        samples = []
        for index, seed in work:
            # Only in this thread transforms may draw from the global generators.
            with nullcontext() if clone or reseed is None else stream(seed, "sample"):
                if reseed is not None:
                    reseed(seed)
                samples.append(sample(index))

        return samples

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
        assert self.clone is not None
        try:
            clone = self._clones.pop()
        except IndexError:
            clone = self.clone()

        samples = self._make(work, clone)
        self._clones.append(clone)
        return samples
