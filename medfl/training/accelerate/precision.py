"""How a device computes: mixed precision, TF32 only where it is asked for, kernels with their channels last.

TF32 rounds the factors of float32 products to ten bits. PyTorch lets convolutions do so unasked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from medfl.core.errors import RunError
from medfl.training.site import Site

_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
# of the scale of a step's float16 gradients: from 2^16 to below the smallest float16
_HALVINGS = 40


def autocast(site: Site) -> AbstractContextManager[Any]:
    """Return the mixed-precision context of the site's settings (float16 on CUDA, bfloat16 on CPU), or a null one."""
    if not site.settings.amp:
        return nullcontext()
    return torch.autocast(
        site.device.type, torch.float16 if site.device.type == "cuda" else torch.bfloat16
    )


def gradient_scaler(site: Site) -> torch.amp.GradScaler:
    """Return what scales float16 gradients; disabled where the site computes with another precision."""
    return torch.amp.GradScaler("cuda", enabled=site.settings.amp and site.device.type == "cuda")


def backward(
    loss: Tensor,
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    site: Site,
) -> None:
    """Leave finite gradients of the loss in `.grad`: where its scale is too large, half the scale is tried.

    So a hook never reads an infinite gradient, and every batch is trained on: a scaler alone leaves such batches out,
    which for a site of few batches are all of them. A disabled scaler scales nothing.

    Raises:
        RunError: the gradients are not finite at any scale; names the site.
    """
    if not scaler.is_enabled():
        loss.backward()  # type: ignore[no-untyped-call]
        return

    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [
        p for p in parameters if id(p) not in stepped
    ]  # the scaler leaves them, a hook may read them
    for _ in range(_HALVINGS):
        scaler.scale(loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        for gradient in (p.grad for p in others if p.grad is not None):
            gradient.div_(scaler.get_scale())

        scaler.update()
        norms = torch._foreach_norm(
            [p.grad for p in parameters if p.grad is not None], float("inf")
        )
        if torch.stack(norms).isfinite().all():
            return

        for parameter in parameters:
            parameter.grad = None

    raise RunError(
        f"site {site.name!r}, round {site.round}: gradients in float16 are not finite at any scale; "
        "the last good round is kept; run it without --amp, lower the learning rate or look at this site's data"
    )


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
