"""Initial weights of a network's convolutions and linear layers, drawn as PyTorch draws them."""

from __future__ import annotations

from torch import nn

from medfl.core import Config, InputError
from medfl.networks.heads import LAYERS

INIT_WEIGHTS = "init_weights"
"""Name of this choice among the overridden ids of a bundle's configuration."""


def apply_init_weights(network: nn.Module, overrides: Config) -> nn.Module:
    """Return the network, initialised according to `init_weights` in the overrides.

    "monai", the default: by the network's own code, in most of MONAI's networks Kaiming's normal distribution by
    fan-out. "pytorch": by PyTorch's convolutions and linear layers, uniform within 1/sqrt(fan-in).

    Raises:
        InputError: the value is neither.
    """
    by = overrides.get(INIT_WEIGHTS, "monai")
    if by not in ("monai", "pytorch"):
        raise InputError(f"--config {INIT_WEIGHTS}={by}", "monai or pytorch", "choose one of them")

    for layer in network.modules() if by == "pytorch" else ():
        if isinstance(layer, LAYERS):
            # In the order of the modules, from the random stream of the caller.
            layer.reset_parameters()

    return network
