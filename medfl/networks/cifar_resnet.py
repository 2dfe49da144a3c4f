"""The CIFAR-10 ResNets of He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2.

3x3 stem of 16 channels, three stages of 16, 32 and 64 channels, and shortcuts without parameters ("option A"): where a
stage halves the size, the shortcut takes every second pixel and fills the new channels with zeros.
"""

from __future__ import annotations

import torch
from monai.networks.layers.factories import Conv, Norm, Pool
from torch import Tensor, nn
from torch.nn import functional


class _Block(nn.Module):
    """Two 3x3 convolutions, and a shortcut without parameters around them."""

    def __init__(self, channels_in: int, channels_out: int, spatial_dims: int) -> None:
        super().__init__()
        conv = Conv[Conv.CONV, spatial_dims]
        norm = Norm[Norm.BATCH, spatial_dims]
        pool = Pool[Pool.AVG, spatial_dims]
        stride = channels_out // channels_in
        self.conv1 = conv(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm(channels_out)
        self.conv2 = conv(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = norm(channels_out)
        # A 1x1 pool of stride 2 is every second pixel, rounding odd sizes up as the convolution does.
        self.subsample = pool(1, stride=stride) if stride > 1 else nn.Identity()
        # Option A: zeros for the new channels, behind the old ones.
        self.padding = [0, 0] * spatial_dims + [0, channels_out - channels_in]

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return functional.relu(y + functional.pad(self.subsample(x), self.padding))


class CifarResNet(nn.Module):
    """ResNet of `depth` = 6n + 2 layers for images of any size: (B, in_channels, H, W[, D]) -> (B, num_classes).

    With 3 channels and 8 classes, depth 20 has 269,592 parameters and depth 110 has 1,727,832.
    """

    def __init__(
        self, depth: int, in_channels: int, num_classes: int, spatial_dims: int = 2
    ) -> None:
        """Build the network; He initialisation of the convolutions."""
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth={depth}: a CIFAR ResNet has 6n + 2 layers, n >= 1")

        conv = Conv[Conv.CONV, spatial_dims]
        norm = Norm[Norm.BATCH, spatial_dims]
        self.conv1 = conv(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = norm(16)
        stages = []
        channels = 16

        for width in (16, 32, 64):
            blocks = []
            for _ in range((depth - 2) // 6):  # n: a block has two of the 6n + 2 layers
                blocks.append(_Block(channels, width, spatial_dims))
                channels = width  # the first block of a stage alone changes the width

            stages.append(nn.Sequential(*blocks))

        self.stages = nn.Sequential(*stages)
        self.avgpool = Pool[Pool.ADAPTIVEAVG, spatial_dims](1)
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Conv3d)):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of the images x (B, C, H, W[, D])."""
        x = self.stages(functional.relu(self.bn1(self.conv1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits
