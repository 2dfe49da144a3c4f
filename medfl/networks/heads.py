"""Body and head of any network: the head is its last linear or convolution layer, the feature is the head's input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from medfl.core import InputError

LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
"""Possible heads: linear and convolution layers."""
_COARSER = "deep_supervision_heads."
Head: TypeAlias = nn.Linear | _ConvNd


def head_name(network: nn.Module) -> str:
    """Return the name of the head: the linear or convolution layer that the network registers last.

    Linear layers alone would be wrong for segmentation networks with linear layers inside (UNETR, FlexibleUNet).

    Raises:
        InputError: the network has neither.
    """
    modules = network.named_modules()
    # deep supervision: the outputs of coarser levels are registered after that of full size
    names: list[str] = [
        name for name, module in modules if isinstance(module, LAYERS) and _COARSER not in name
    ]
    if names:
        return names[-1]

    raise InputError(
        f"a {type(network).__name__} without a linear or convolution layer",
        "body and head can be told apart",
        "use a network that ends in such a layer",
    )


def head(network: nn.Module) -> Head:
    """Return the head layer."""
    return cast(Head, network.get_submodule(head_name(network)))


def head_names(network: nn.Module, layers: Sequence[str] = ()) -> frozenset[str]:
    """Return the state-dict names of the head, or of the named layers (`("fc1", "fc2")`) taken as the head.

    Raises:
        InputError: no such layer.
    """
    modules = dict(network.named_modules())
    layers = layers or (head_name(network),)
    for layer in layers:
        if layer not in modules:
            raise InputError(
                f"head layer {layer!r}",
                f"layers are {', '.join(filter(None, modules))[:300]}",
                "name one of them",
            )

    names: set[str] = set()
    for layer in layers:
        names.update(f"{layer}.{name}" for name in modules[layer].state_dict())

    return frozenset(names)


def features_and_output(network: nn.Module, x: Tensor) -> tuple[Tensor, Any]:
    """Run a network once and return the input of its head, (B, d) for a linear one, and its output.

    Both carry gradients; a frozen reference is run under `torch.no_grad` by its caller.
    """
    with entering_head(network) as entering:
        output = network(x)
    return entering[-1], output


@contextmanager
def entering_head(network: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of the head in the forward passes inside the block, one tensor per pass."""
    inputs_of_head = []
    # A hook, since third-party networks have no method that returns their features.
    handle = head(network).register_forward_pre_hook(
        lambda _, inputs: inputs_of_head.append(inputs[0])
    )
    try:
        yield inputs_of_head
    finally:
        handle.remove()


def feature_size(network: nn.Module) -> int:
    """Return d, the number of features entering the head."""
    layer = head(network)
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def frozen(network: nn.Module) -> nn.Module:
    """Put a reference network in evaluation mode and disable its gradients."""
    network.eval()
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    return network


def replace_head(network: nn.Module, layer: nn.Module) -> nn.Module:
    """Replace the head by another layer, in the same network."""
    network.set_submodule(head_name(network), layer)
    return network
