"""The network with two convolutions of pFedPM and FedProto, for images of 28 pixels a side (MNIST).

"Personalized federated learning based on feature fusion" (Xing et al., CSCWD 2024), as in FedProto's public code.
Departure: the second pool's output is resized to 4 x 4 by adaptive averaging, which changes nothing for 28 pixels, so
that images of other sizes fit too.
"""

from __future__ import annotations

import torch
from monai.networks.layers.factories import Conv, Dropout, Pool
from torch import Tensor, nn
from torch.nn import functional


class _Decision(nn.Linear):
    """A linear layer with dropout on its input, so that its input, the feature, is complete."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.dropout(x, 0.5, self.training), self.weight, self.bias)


class TwoConv(nn.Module):
    """Two 5x5 convolutions and two linear layers: (B, in_channels, H, W[, D]) -> (B, num_classes); feature (B, 50).

    21,840 parameters for grey images and 10 classes; 19,738 or 23,942 with 18 or 22 channels in the second convolution,
    the others of pFedPM-mh. Each side of the image must have at least 16 pixels.
    """

    def __init__(
        self, in_channels: int, num_classes: int, spatial_dims: int = 2, width: int = 20
    ) -> None:
        """Build the network with PyTorch's initialisation; `width`: channels of the second convolution."""
        super().__init__()
        conv = Conv[Conv.CONV, spatial_dims]
        pool = Pool[Pool.MAX, spatial_dims]
        dropout = Dropout[Dropout.DROPOUT, spatial_dims]
        self.body = nn.Sequential(
            *(conv(in_channels, 10, 5), pool(2), nn.ReLU()),
            *(conv(10, width, 5), dropout(0.5), pool(2), nn.ReLU()),
            # No effect for 28 pixels: (28 - 4) / 2 = 12, (12 - 4) / 2 = 4.
            Pool[Pool.ADAPTIVEAVG, spatial_dims](4),
        )
        self.fc1 = nn.Linear(width * 4**spatial_dims, 50)
        self.fc2 = _Decision(50, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of the images x (B, C, H, W[, D])."""
        logits: Tensor = self.fc2(functional.relu(self.fc1(torch.flatten(self.body(x), 1))))
        return logits
