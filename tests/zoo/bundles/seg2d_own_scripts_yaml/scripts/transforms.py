"""Transforms of this bundle."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from monai.config import KeysCollection
from monai.transforms import MapTransform


class WindowScand(MapTransform):
    """Map the intensities [low, high] to [0, 1] and clip."""

    def __init__(self, keys: KeysCollection, low: float, high: float) -> None:
        """Remember the window."""
        super().__init__(keys)
        self.low, self.high = low, high

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the item with its scans windowed."""
        item = dict(data)
        for key in self.key_iterator(item):
            item[key] = ((item[key] - self.low) / (self.high - self.low)).clip(0, 1)
        return item
