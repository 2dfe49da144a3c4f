"""PyTorch's arithmetic on the CPU, with the same bits on every processor.

MKL's vector functions compute square roots, arc functions and tangents from the processor's approximate reciprocals,
which differ in their bits between Intel and AMD, whatever `MKL_CBWR` says; so Adam trained a different network on each.
A square root rounded by IEEE 754 is unique; the others come from the C library. `x ** 0.5` is not covered: write
`torch.sqrt(x)`.

oneDNN's convolutions split their sums by the processor's cache sizes, even with an instruction-set cap: the gradient of
ResNet-18's kernels from 256 to 512 channels was different with 256 KiB of L2 cache than with more. Here convolutions
are matrix products, which MKL guarantees to be reproducible under `MKL_CBWR=COMPATIBLE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfl.core import Run, portable
from medfl.training.accelerate.precision import tf32

_FUNCTIONS = {
    "sqrt": np.sqrt,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "tan": np.tan,
}
_inside = False


@contextmanager
def run_precision(run: Run) -> Iterator[None]:
    """Inside the block allow TF32 if the run does, and compute portably if it requests that.

    Raises:
        InputError: it is portable, and this process was not started for that.
    """
    portable.enable_if_requested(vars(run))
    with tf32(run.tf32), portable_arithmetic(run.portable):
        yield


@contextmanager
def portable_arithmetic(active: bool) -> Iterator[None]:
    """Use portable arithmetic in this process inside the block, if `active`; blocks may be nested."""
    global _inside
    if not active or _inside:
        yield
        return

    _inside = True
    library = _registered()
    onednn = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)

    try:
        with torch.backends.nnpack.flags(enabled=False):
            yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        library._destroy()
        _inside = False


def _registered() -> Any:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, function in _FUNCTIONS.items():
        for kernel, implementation in zip(
            (name, f"{name}_", f"{name}.out"), _kernels(function), strict=True
        ):
            library.impl(kernel, implementation, "CPU")  # type: ignore[no-untyped-call]
    return library


def _kernels(function: Callable[..., Any]) -> tuple[Callable[..., Tensor], ...]:
    """Return the variants of a function: returning a new tensor, in place, and writing to a given one."""

    def new(x: Tensor) -> Tensor:
        if x.is_floating_point() or x.is_complex():
            dtype = x.dtype
        else:
            dtype = torch.get_default_dtype()

        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        with torch._C.DisableTorchFunctionSubclass(), np.errstate(all="ignore"):
            return torch.from_numpy(np.asarray(function(x.detach().to(wide).numpy()))).to(dtype)

    def into(x: Tensor, *, out: Tensor) -> Tensor:
        result = new(x)
        return out.resize_(result.shape).copy_(result)

    return new, lambda x: x.copy_(new(x)), into
