"""A random stream for one part of each training step, so that the other parts draw the same numbers without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from medfl.core.seeding import stream
from medfl.training import Site
from medfl.training.accelerate.replayable import generator_states


class SeparateRandomness:
    """A context for what goes on beside the training of a network, so that its dropout is that of one alone.

    The n-th block has the stream (site, purpose, n). What draws nothing needs none: the first block shows whether it
    does, and if not nothing is seeded any more, which a captured step could not repeat.

    Args:
        site: whose seed it is.
        purpose: name of the streams.
        first: n of the first block.
        each: so many blocks in a row have the same stream.
    """

    def __init__(self, site: Site, purpose: str, first: int = 0, each: int = 1) -> None:
        self._site = site
        self._purpose = purpose
        self._first = first
        self._each = each
        self._done = 0
        self._silent = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run a block."""
        if self._silent:
            yield
            return

        with stream(self._site.seed, self._purpose, self._first + self._done // self._each):
            before = None if self._done else generator_states(self._site.device)
            yield
            if before is not None:
                self._silent = generator_states(self._site.device) == before

        self._done += 1
