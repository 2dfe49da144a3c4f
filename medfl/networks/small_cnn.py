"""A small network without normalisation layers, and so without buffers: all averaged tensors are trained ones."""

from __future__ import annotations

from itertools import pairwise

import torch
from monai.networks.layers.factories import Conv, Pool
from torch import Tensor, nn


class SmallCNN(nn.Module):
    """Three times convolution, ReLU, max-pool; global average; linear: (B, in_channels, H, W[, D]) -> (B, num_classes).

    60,506 parameters for grey 2D images and two classes. Each side of the image must have at least 8 pixels.
    """

    def __init__(self, in_channels: int, num_classes: int, spatial_dims: int = 2) -> None:
        """Build the network with PyTorch's initialisation."""
        super().__init__()
        conv = Conv[Conv.CONV, spatial_dims]
        pool = Pool[Pool.MAX, spatial_dims]
        layers = []
        widths = (in_channels, 32, 64, 72)

        for narrow, wide in pairwise(widths):
            layers += [conv(narrow, wide, 3, padding=1), nn.ReLU(inplace=True), pool(2)]

        self.body = nn.Sequential(*layers, Pool[Pool.ADAPTIVEAVG, spatial_dims](1))
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of the images x (B, C, H, W[, D])."""
        logits: Tensor = self.fc(torch.flatten(self.body(x), 1))
        return logits
