"""How a device computes: TF32 only where it is asked for, kernels with their channels last.

TF32 rounds the factors of float32 products to ten bits. PyTorch lets convolutions do so unasked.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _end_openmp_threads() -> None:
    for library in Path(torch.__file__).parent.glob("lib/lib[gi]omp*"):
        ctypes.CDLL(str(library)).omp_pause_resource_all(2)  # hard: ended, until they are needed


# A forked process has no threads but believes in OpenMP's, and would wait for them for ever
os.register_at_fork(before=_end_openmp_threads)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads inside the block; sums of several may differ in the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 on CUDA devices inside a block, in convolutions and in matrix products alike.

    The settings are the process's; they are put back when the block ends, and mean nothing on a CPU.
    """
    backends: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = allowed
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


def with_channels_last(network: nn.Module) -> nn.Module:
    """Lay a network's kernels (O, I, H, W[, D]) out in memory with their channels last, in place; values stay."""
    for parameter in network.parameters():
        if parameter.ndim in _LAYOUTS:
            parameter.data = parameter.data.contiguous(memory_format=_LAYOUTS[parameter.ndim])
    return network
