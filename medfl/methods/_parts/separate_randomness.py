"""A random stream for one part of each training step, so that the other parts draw the same numbers without it."""

from __future__ import annotations

import random  # noqa: TID251 (its state is looked at, nothing is drawn)
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from medfl.core import stream
from medfl.training import Site


class SeparateRandomness:
    """A context for work beside the training of a network, so that its dropout is the same as without that work.

    The n-th block has the stream (site, purpose, n). Without random draws no stream is needed: the first block shows
    whether there are any, and if not nothing is seeded any more.

    Args:
        site: whose seed is used.
        purpose: name of the streams.
        first: n of the first block.
        each: number of consecutive blocks with the same stream.
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
            # Compared once: states of all generators are large, and the first block is enough.
            before = None if self._done else _generator_states(self._site.device)
            yield
            if before is not None:
                self._silent = _generator_states(self._site.device) == before

        self._done += 1


def _generator_states(device: torch.device) -> list[bytes]:
    """Return the states of all global generators that code on a device may draw from."""
    numbers = np.random.get_state(legacy=False)  # noqa: NPY002 (looked at, nothing is drawn)
    states = [
        repr(random.getstate()).encode(),
        numbers["state"]["key"].tobytes(),
        repr(numbers["state"]["pos"]).encode(),
        torch.default_generator.get_state().numpy().tobytes(),
    ]

    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device).numpy().tobytes())

    return states
