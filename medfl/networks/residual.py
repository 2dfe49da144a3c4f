"""Residual networks for small pictures: the ResNets of CIFAR-10, and the wide ones.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2: 3x3 stem of 16 channels, three stages
of 16, 32 and 64 channels, and shortcuts without parameters ("option A"): where a stage halves the size, the shortcut
takes every second pixel and fills the new channels with zeros.

Zagoruyko and Komodakis, "Wide Residual Networks", BMVC 2016, as in the PyTorch code from which FedMR's WRN-28-10 takes
its size: convolutions with bias, the stride in a block's second convolution, final BatchNorm with momentum 0.9.
"""

from __future__ import annotations

import math

import torch
from monai.networks.layers.factories import Conv, Norm, Pool
from torch import Tensor, nn
from torch.nn import functional


class _PlainBlock(nn.Module):
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
        # A 1x1 pool of stride 2 takes every second pixel, rounding odd sizes up as the convolution does.
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
                blocks.append(_PlainBlock(channels, width, spatial_dims))
                channels = width  # only the first block of a stage changes the width

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


class _WideBlock(nn.Module):
    """Pre-activated: normalise, ReLU, convolve, twice, dropout in between; 1x1 shortcut where the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, spatial_dims: int) -> None:
        super().__init__()
        conv = Conv[Conv.CONV, spatial_dims]
        norm = Norm[Norm.BATCH, spatial_dims]
        self.bn1 = norm(channels_in)
        self.conv1 = conv(channels_in, channels_out, 3, padding=1)
        self.dropout = nn.Dropout(0.3)
        self.bn2 = norm(channels_out)
        # The stride is here and not in `conv1`, as in the code that FedMR used.
        self.conv2 = conv(channels_out, channels_out, 3, stride=stride, padding=1)
        # Elsewhere the shortcut is a 1x1 convolution.
        keeps_shape = stride == 1 and channels_in == channels_out

        if keeps_shape:
            self.shortcut = nn.Identity()
        else:
            self.shortcut = conv(channels_in, channels_out, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.conv1(functional.relu(self.bn1(x))))
        y = self.conv2(functional.relu(self.bn2(y)))
        total: Tensor = y + self.shortcut(x)
        return total


class WideResNet(nn.Module):
    """Wide ResNet of `depth` = 6n + 4 layers, `width` times as wide: (B, in_channels, H, W[, D]) -> (B, num_classes).

    With 3 channels and 100 classes, WRN-28-10 has 36,546,980 parameters; its feature has 64 * width entries.
    """

    def __init__(
        self, depth: int, width: int, in_channels: int, num_classes: int, spatial_dims: int = 2
    ) -> None:
        """Build the network; Xavier initialisation of the convolutions, with the gain of a ReLU."""
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth={depth}: a wide ResNet has 6n + 4 layers, n >= 1")

        conv = Conv[Conv.CONV, spatial_dims]
        norm = Norm[Norm.BATCH, spatial_dims]
        self.conv1 = conv(in_channels, 16, 3, padding=1)
        blocks = []
        channels = 16

        for stage, base in enumerate((16, 32, 64)):
            for index in range((depth - 4) // 6):
                blocks.append(
                    _WideBlock(
                        channels, base * width, 2 if stage and not index else 1, spatial_dims
                    )
                )
                channels = base * width

        self.blocks = nn.Sequential(*blocks)
        self.bn1 = norm(channels, momentum=0.9)
        self.avgpool = Pool[Pool.ADAPTIVEAVG, spatial_dims](1)
        self.fc = nn.Linear(channels, num_classes)

        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Conv3d)):
                nn.init.xavier_uniform_(module.weight, gain=math.sqrt(2))
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of the images x (B, C, H, W[, D])."""
        x = functional.relu(self.bn1(self.blocks(self.conv1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits
