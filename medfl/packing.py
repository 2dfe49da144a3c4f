"""Bytes between the processes of one machine; never read from a network (see `message` for that).

Tensors travel as NumPy buffers. PyTorch's own way, a file handle each, runs out of handles with thousands of tensors.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn


def pack(value: Any) -> bytes:
    """Pickle a value with its CPU tensors as arrays."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Invert `pack`; only for bytes that a process of this run made."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor and type(obj) is not nn.Parameter:
            return NotImplemented
        plain = obj.detach().cpu().contiguous()
        if plain.dtype == torch.bfloat16:  # NumPy has no such type
            return _from_bits, (plain.view(torch.int16).numpy(),)
        return torch.from_numpy, (plain.numpy(),)


def _from_bits(bits: Any) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)
