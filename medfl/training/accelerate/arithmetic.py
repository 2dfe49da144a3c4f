"""What PyTorch computes on the CPU, with the same bits on every processor.

MKL's vector functions make square roots, arc functions and tangents from the processor's approximate reciprocals, which
Intel and AMD have of other bits, whatever `MKL_CBWR` says; so Adam trained another network on each. A square root that
IEEE 754 rounds has no choice; the others are the C library's. `x ** 0.5` does not pass here: write `torch.sqrt(x)`.

oneDNN's convolutions divide their sums by the sizes of the processor's caches, under a cap too: the gradient of
ResNet-18's kernels from 256 to 512 channels was another with 256 KiB of second cache than with more. Here convolutions
are products of matrices, which MKL promises to be the same under `MKL_CBWR=COMPATIBLE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfl.core import portable
from medfl.core.run import Run
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
    """Inside the block allow TF32 if the run does, and compute portably if it asks for that.

    Raises:
        InputError: it is portable, and this process was not begun for that.
    """
    portable.enable_if_requested(vars(run))
    with tf32(run.tf32), portable_arithmetic(run.portable):
        yield


@contextmanager
def portable_arithmetic(active: bool) -> Iterator[None]:
    """Compute so in this process inside the block, where `active`; blocks may lie in each other."""
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
    """Return the kernels of a function: of a new tensor, in place, and into a given one."""

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
