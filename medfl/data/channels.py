"""Images of sites that lack channels: these are set to zero, and in training further channels may be dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from medfl.core.errors import InputError
from medfl.data.prepared import Batch, Prepared, Wrapped


class Channels(Wrapped):
    """Prepared items whose images lack channels; which ones may differ from item to item.

    They are set to zero after all transforms. The deterministic transforms also see zeros (`incomplete_entries`).
    """

    def __init__(self, prepared: Prepared, present: Tensor, drop: float = 0.0) -> None:
        """Hold the items.

        Args:
            prepared: the items.
            present: (N, C) bool, which channels each has.
            drop: probability that a channel of an item is set to zero where a generator is given; one always stays.
        """
        super().__init__(prepared)
        self.present = present
        self.drop = drop

    def deterministic(self, uncropped: bool = False) -> Prepared:
        """Return the same items without random transforms; none of their channels is dropped."""
        return self._with(prepared=self.prepared.deterministic(uncropped), drop=0.0)

    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        """Yield batches with zeros in the channels that are lacking; what is dropped is drawn on the CPU first."""
        present = self.present[indices]
        if generator is not None and self.drop:
            # Lacking channels never draw the most, which always stays.
            draws = torch.where(present, torch.rand(present.shape, generator=generator), -1.0)
            present = (draws >= self.drop) | (draws == draws.amax(1, keepdim=True))
        batches = self.prepared.batches(indices, size, generator)
        # Not by `yield`: what is dropped is drawn when this is called, before any batch.
        pairs = zip(batches, torch.split(present, size), strict=True)
        return ((_zeroed(x, rows), y) for (x, y), rows in pairs)


def _zeroed(x: Any, present: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or x.ndim < 3 or x.shape[1] != present.shape[1]:
        is_tensor = isinstance(x, Tensor)

        if is_tensor:
            form = f"of shape {tuple(x.shape)}"
        else:
            form = f"that are a {type(x).__name__}"

        raise InputError(
            f"images {form} with --site-channels or --channel-drop",
            f"{present.shape[1]} channels, as the bundle's metadata.json says of its images",
            "correct num_channels there, or leave out --site-channels and --channel-drop",
        )

    return torch.where(present.reshape(*present.shape, *[1] * (x.ndim - 2)).to(x.device), x, 0)
