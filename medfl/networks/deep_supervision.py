"""Deep supervision: in training MONAI's DynUNet returns the outputs of several levels stacked, (B, levels, C, ...).

All but the loss look at one output, (B, C, ...), that of full size; it carries the stack to the loss.
"""

from __future__ import annotations

from typing import Any

import torch
from monai.networks.nets.dynunet import DynUNet
from torch import Tensor, nn

_STACK = "outputs_of_levels"


class FullSizeDynUNet(DynUNet):
    """A DynUNet that returns its output of full size in training too."""

    # Not `forward`, which --compile traces. PyTorch declares `__call__` as a value, which mypy lets no method override.
    def __call__(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return logits (B, C, ...), which carry those of all levels in training mode."""
        outputs: Tensor = super().__call__(x)
        if not self.training:
            return outputs

        # DynUNet keeps them here with their graph, of which there are no copies
        self.heads[:] = [torch.zeros(1)] * len(self.heads)
        return carrying(outputs)


def with_full_size(network: nn.Module) -> nn.Module:
    """Let each DynUNet with deep supervision in a network return its output of full size, in place."""
    for module in network.modules():
        if type(module) is DynUNet and module.deep_supervision:
            module.__class__ = FullSizeDynUNet

    return network


def carrying(stack: Tensor) -> Tensor:
    """Return the first of the stacked outputs (B, levels, C, ...), which carries all of them to the loss."""
    first = stack[:, 0]
    setattr(first, _STACK, stack)

    return first


def carried(output: object) -> Any:
    """Return the stacked outputs (B, levels, C, ...) that an output carries, or itself if it carries none."""
    return getattr(output, _STACK, output)
