"""Layers of a network that for the length of a block are evaluated, frozen, or given a batch of one sample."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

NORMS: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm)
"""All normalisation layers: `_NormBase` is BatchNorm and InstanceNorm."""


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Run a block with a network in evaluation mode; each layer's own mode is put back at the end."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def train_only(
    model: nn.Module, names: Collection[str], *, restore_buffers: bool = False
) -> Iterator[None]:
    """Train nothing but the named parameters inside the block.

    Args:
        model: the network; its flags are put back when the block ends.
        names: parameter names; one that the bundle froze stays frozen.
        restore_buffers: put the buffers of all other layers back at the end too, so that they are as frozen as the
            parameters. BatchNorm goes by the batch meanwhile: running statistics that are young, or none yet, can give
            the features of a deep network any scale.
    """
    flags = [(p, p.requires_grad, name in names) for name, p in model.named_parameters()]
    layers = {name.rpartition(".")[0] for name in names}
    frozen_buffers = [
        b
        for name, b in model.named_buffers()
        if restore_buffers and name.rpartition(".")[0] not in layers
    ]
    values = [(buffer, buffer.clone()) for buffer in frozen_buffers]

    try:
        for parameter, flag, trained in flags:
            parameter.requires_grad_(flag and trained)
        yield
    finally:
        for parameter, flag, _ in flags:
            parameter.requires_grad_(flag)
        for buffer, value in values:
            buffer.copy_(value)


@contextmanager
def one_sample_safe(model: nn.Module, x: Any) -> Iterator[None]:
    """Let a batch of one sample pass: BatchNorm without a second value per channel uses its running statistics."""
    single = isinstance(x, Tensor) and len(x) == 1
    if single:
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    else:
        norms = []

    def choose_mode(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        layer.train(inputs[0].numel() > inputs[0].shape[1])  # one value has no variance

    handles = [norm.register_forward_pre_hook(choose_mode) for norm in norms]
    try:
        yield
    finally:
        for norm, handle in zip(norms, handles, strict=True):
            handle.remove()
            norm.train()


def split_names(network: nn.Module, types: tuple[type[nn.Module], ...]) -> frozenset[str]:
    """Return the state-dict names that belong to layers of these types (by type: names such as `bn` prove nothing)."""
    names: set[str] = set()
    # a state dict has all names of a shared layer, so its duplicates are wanted
    for prefix, module in network.named_modules(remove_duplicate=False):
        if isinstance(module, types):
            names.update(f"{prefix}.{name}" if prefix else name for name in module.state_dict())
    return frozenset(names)
