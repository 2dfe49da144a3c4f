"""The network of this bundle: it ends in a sigmoid, so predictions are probabilities."""

from __future__ import annotations

import torch
from torch import nn


class TinySegmenter(nn.Module):
    """Three convolutions and a sigmoid: (B, 1, H, W) to (B, 1, H, W) in [0, 1]."""

    def __init__(self, width: int = 4) -> None:
        """Make the layers with `width` channels."""
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the foreground probability of each pixel."""
        return torch.sigmoid(self.head(self.body(x)))
