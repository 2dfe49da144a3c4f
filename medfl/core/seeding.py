"""Derived random streams: the only place that seeds the global generators.

Nobody seeds globally. Each piece of work opens a stream named by its path (round, site, purpose), so neither order
nor number of workers nor a resume can change a number.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *path: str | int) -> int:
    """Return the 63-bit seed of the stream `path` under `seed` (SHA-256, so neighbours are unrelated)."""
    # Including the type: a site called "1" and round 1 have different streams.
    text = "/".join([str(int(seed)), *(f"{type(part).__name__}:{part}" for part in path)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator_of(seed: int, *path: str | int) -> torch.Generator:
    """Return a CPU generator for the stream `path` under `seed`; the global generators stay as they are."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *path))


@contextmanager
def stream(seed: int, *path: str | int) -> Iterator[torch.Generator]:
    """Run a block on its own random stream and restore the global generators afterwards.

    Inside, torch (CPU, and CUDA if it is in use), NumPy and `random` are seeded with `derive(seed, *path)`, for code
    that draws from the global generators (dropout, third-party transforms). The yielded CPU generator has the
    same seed and is used by our own code.
    """
    import numpy as np
    import torch

    value = derive(seed, *path)
    restore = snapshot_rng()
    torch.default_generator.manual_seed(value)

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)

    np.random.seed(value % 2**32)  # NumPy accepts 32 bits only
    random.seed(value)
    try:
        yield torch.Generator().manual_seed(value)
    finally:
        restore()


def snapshot_rng() -> Callable[[], None]:
    """Return a function that restores all global generators to their present state."""
    import numpy as np
    import torch

    cpu_state = torch.default_generator.get_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]

    # A process forked from one that uses CUDA has its generators too, but may not access them.
    cuda_generators = torch.cuda.default_generators if used else ()
    cuda_states = [(generator, generator.get_state()) for generator in cuda_generators]

    def restore() -> None:
        torch.default_generator.set_state(cpu_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        for generator, state in cuda_states:
            generator.set_state(state)

    return restore
