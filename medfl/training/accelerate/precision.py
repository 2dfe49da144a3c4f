"""How a device computes: TF32 only on request, kernels in channels-last layout.

TF32 rounds the factors of float32 products to ten bits. PyTorch enables it for convolutions by default.
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


# A forked process has no threads but believes in OpenMP's, and would wait for them forever
os.register_at_fork(before=_end_openmp_threads)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Use this number of threads inside the block; sums over several may differ in the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 on CUDA devices inside a block, for both convolutions and matrix products.

    The settings are process-wide; they are restored when the block ends, and have no effect on a CPU.
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
    """Convert a network's kernels (O, I, H, W[, D]) to channels-last layout, in place; values stay."""
    for parameter in network.parameters():
        if parameter.ndim in _LAYOUTS:
            parameter.data = parameter.data.contiguous(memory_format=_LAYOUTS[parameter.ndim])
    return network
