"""Layers of a network that are evaluated, frozen, or given a batch of one sample within a block."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

NORMS: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm)
"""All normalisation layers: `_NormBase` is BatchNorm and InstanceNorm."""


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Run a block with a network in evaluation mode; each layer's own mode is restored at the end."""
    # a method may have frozen some layers' BatchNorm: `network.train()` would unfreeze them
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
    """Train only the named parameters inside the block.

    Args:
        model: the network; its flags are restored when the block ends.
        names: parameter names; one that the bundle froze stays frozen.
        restore_buffers: also restore the buffers of all other layers at the end, so that they are as frozen as the
            parameters. Meanwhile BatchNorm uses the batch: new or missing running statistics can give the features of a
            deep network any scale.
    """
    flags = [(p, p.requires_grad, name in names) for name, p in model.named_parameters()]
    layers = {name.rpartition(".")[0] for name in names}
    values = []
    for name, buffer in model.named_buffers():
        if restore_buffers and name.rpartition(".")[0] not in layers:
            values.append((buffer, buffer.clone()))

    try:
        # never more than before: what a bundle froze stays frozen
        for parameter, flag, trained in flags:
            parameter.requires_grad_(flag and trained)
        yield
    finally:
        for parameter, flag, _ in flags:
            parameter.requires_grad_(flag)
        for buffer, value in values:
            buffer.copy_(value)


@contextmanager
def one_sample_safe(model: nn.Module, x: object) -> Iterator[None]:
    """Accept a batch of one sample: BatchNorm without a second value per channel uses its running statistics."""
    single = isinstance(x, Tensor) and len(x) == 1
    norms = []
    if single:
        norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]

    def choose_mode(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        layer.train(inputs[0].numel() > inputs[0].shape[1])  # a single value has no variance

    handles = [norm.register_forward_pre_hook(choose_mode) for norm in norms]
    try:
        yield
    finally:
        for norm, handle in zip(norms, handles, strict=True):
            handle.remove()
            norm.train()


def split_names(network: nn.Module, types: tuple[type[nn.Module], ...]) -> frozenset[str]:
    """Return the state-dict names that belong to layers of these types (by type: names like `bn` prove nothing)."""
    names: set[str] = set()
    # a state dict has all names of a shared layer, so its duplicates are needed
    for prefix, module in network.named_modules(remove_duplicate=False):
        if isinstance(module, types):
            names.update(f"{prefix}.{name}" if prefix else name for name in module.state_dict())
    return frozenset(names)
