"""What a step needs besides its batch, packed with the targets into one tensor."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

_APART = 64  # bytes from one part to the next are a multiple of this, which is where fresh tensors begin


class Parcel:
    """Packs the parts of a batch outside of a step and unpacks them in it.

    A captured step sees two tensors of each batch and of all others what it saw when it was captured. So what is drawn
    for each step anew is drawn in the `feed` of `medfl.training.fit` and comes in with the targets.
    """

    def __init__(self) -> None:
        """Have packed nothing."""
        self._forms: tuple[tuple[Any, ...], ...] = ()

    def pack(self, *parts: Any) -> Any:
        """Return the parts as bytes (N,) uint8, or as a tuple if one is no plain tensor in one piece on their device.

        In a tuple they cannot be captured; in both they have the values and strides that they had.
        """
        device = getattr(parts[0], "device", None)
        if not all(type(part) is Tensor and part.device == device and _whole(part) for part in parts):
            return parts
        self._forms = tuple((part.shape, part.stride(), part.dtype) for part in parts)
        packed = torch.empty(sum(_room(part.shape, part.dtype) for part in parts), dtype=torch.uint8, device=device)
        for place, part in zip(self.unpack(packed), parts, strict=True):
            place.copy_(part)
        return packed

    def unpack(self, packed: Any) -> tuple[Any, ...]:
        """Return the parts that were packed last, as views."""
        if isinstance(packed, tuple):
            return packed
        parts, start = list[Tensor](), 0
        for shape, stride, dtype in self._forms:
            flat = packed[start : start + prod(shape) * dtype.itemsize].view(dtype)
            parts.append(flat.as_strided(shape, stride))
            start += _room(shape, dtype)
        return tuple(parts)


def _whole(part: Tensor) -> bool:
    """Tell whether a tensor lies in memory in one piece, each number once."""
    return part.stride() == torch.empty_like(part, device="meta").stride()


def _room(shape: torch.Size, dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // _APART) * _APART
