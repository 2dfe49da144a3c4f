"""Memory of a GPU that several processes share: what is free, an allowance for each process, and its peak.

A process that has initialised CUDA cannot fork others that use it, so a process that forks runs queries the device with
`in_forked_process` and within `without_cuda_init`. PyTorch's allocator counts tensors alone; what the CUDA context and
library kernels take cannot be measured while several processes run, so each is allowed `CONTEXT_BYTES` for them.
"""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from medfl.core.errors import InputError, RunError

T = TypeVar("T")

GIB = 2**30
CONTEXT_BYTES = GIB
"""Bytes of a device allowed for a process's CUDA context, kernels of libraries and captured graphs."""
OUT_OF_MEMORY_EXIT = 3
"""Exit code of a process that ran out of a device's memory."""
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_OUT_OF_MEMORY = re.compile(r"CUDA out of memory|CUDA error: out of memory|(CUBLAS|CUDNN|CUSOLVER)_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Gpu:
    """A CUDA device: its name ("cuda" or "cuda:1"), its bytes in all, and those that processes may share."""

    name: str
    total: int
    free: int

    @classmethod
    def query(cls, name: str) -> Gpu:
        """Return a device with the memory that other programs leave free; errors are those of `in_forked_process`."""
        free, total = in_forked_process(partial(torch.cuda.mem_get_info, _index(name)))
        return cls(name, total, free)

    def limit_process(self, allowance: int) -> int:
        """Limit this process to an allowance, and return the bytes of it that its tensors may take.

        Beyond these torch raises `OutOfMemoryError`. A process that may take all free memory needs no part of it for
        its context, which existed when the free memory was measured.
        """
        tensors = allowance if allowance >= self.free else max(0, allowance - CONTEXT_BYTES)
        torch.cuda.set_per_process_memory_fraction(min(1.0, tensors / self.total), _index(self.name))
        return tensors


def peak_memory(device: str) -> dict[str, int]:
    """Return {"peak_device_bytes": this process's peak on a CUDA device}, {} on a CPU.

    It is the allocator's largest reservation plus `CONTEXT_BYTES`.
    """
    if torch.device(device).type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {"peak_device_bytes": int(torch.cuda.max_memory_reserved(_index(device))) + CONTEXT_BYTES}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a CUDA device without free memory caused an error, in the allocator or in a library."""
    cause: BaseException | None = error
    while cause is not None:
        # an error of a site reaches the server as text
        if isinstance(cause, torch.OutOfMemoryError) or _OUT_OF_MEMORY.search(str(cause)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def format_gib(number: float) -> str:
    """Return bytes as text in GiB."""
    return f"{number / GIB:.1f} GiB"


def in_forked_process(function: Callable[[], T]) -> T:
    """Return a function's result, computed in a forked process so that CUDA is not initialised in this one.

    Raises:
        InputError: this process has used CUDA, so its forks cannot use it.
        RunError: the process ended without an answer.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(function, sender), daemon=True)
    process.start()
    sender.close()
    answer: T
    try:
        answer, error = receiver.recv()
    except EOFError:
        process.join()
        raise RunError(f"the process that asked for the CUDA devices ended with {process.exitcode}") from None
    process.join()
    if error is not None:
        raise error
    return answer


def _answer(function: Callable[[], object], link: Connection) -> None:
    try:
        if torch.cuda._is_in_bad_fork():
            raise InputError(
                "a comparison on a GPU from a process that has used CUDA",
                "its runs are forked, and CUDA works in no process that is forked after its first use",
                "begin it in a new process, as medfl compare does",
            )
        link.send((function(), None))
    except InputError as error:
        link.send((None, error))
    except Exception as error:  # whatever the driver says
        link.send((None, RunError(f"the CUDA devices cannot be asked: {type(error).__name__}: {error}")))


@contextmanager
def without_cuda_init() -> Iterator[None]:
    """Let `torch.cuda.is_available`, which bundles' expressions call, ask NVML and so leave CUDA uninitialised."""
    before = os.environ.get(_NVML)
    os.environ[_NVML] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NVML]
        else:
            os.environ[_NVML] = before


def _index(device: str) -> int:
    """Return the index of a CUDA device; "cuda" alone is the first, as in a process that has chosen no other."""
    return torch.device(device).index or 0
