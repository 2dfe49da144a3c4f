"""Values passed between processes of one machine; never read from a network (see `message` for that).

Tensors are pickled as NumPy buffers, large ones placed in memory that both processes share. PyTorch's own way uses a
file handle for each tensor, and thousands of tensors exhaust the handles.
"""

from __future__ import annotations

import io
import mmap
import pickle
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

_ALIGNED = 64
_SMALL = 4096
"""Tensors below this number of bytes are pickled with the rest."""


class SharedBuffer:
    """Memory for the tensors of one packed value, shared with processes forked later.

    One process packs into it, then the other unpacks. Pages that are never written take no memory.

    Args:
        size: bytes; tensors that do not fit are pickled with the rest.
    """

    def __init__(self, size: int) -> None:
        """Reserve the memory; it is freed when no tensor refers to it any more."""
        self.bytes = torch.frombuffer(mmap.mmap(-1, max(size, _ALIGNED)), dtype=torch.uint8)
        self.used = 0

    def put(self, tensor: Tensor) -> tuple[int, torch.dtype, torch.Size] | None:
        """Copy a tensor in and return its location, None if it is small or does not fit."""
        # Rounded up: a view as another dtype must begin at a multiple of its size.
        start = -(-self.used // _ALIGNED) * _ALIGNED
        if tensor.nbytes < _SMALL or start + tensor.nbytes > len(self.bytes):
            return None
        self.used = start + tensor.nbytes
        self.at((start, tensor.dtype, tensor.shape)).copy_(tensor)
        return start, tensor.dtype, tensor.shape

    def at(self, location: tuple[int, torch.dtype, torch.Size]) -> Tensor:
        """Return the tensor at a location, a view of the memory."""
        start, dtype, shape = location
        return self.bytes[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def dump_shared(value: Any, shared: SharedBuffer | None = None) -> bytes:
    """Pickle a value with its CPU tensors as arrays, or in memory that is shared with the reader."""
    buffer = io.BytesIO()
    if shared is not None:
        shared.used = 0
    _Pickler(buffer, shared).dump(value)
    return buffer.getvalue()


def load_shared(data: bytes, shared: SharedBuffer | None = None, *, copy: bool = True) -> Any:
    """Invert `dump_shared`; only for bytes made by a process of this run.

    Without `copy` tensors in shared memory are views of it, valid until the next value is packed.
    """
    return _Unpickler(io.BytesIO(data), shared, copy).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, shared: SharedBuffer | None) -> None:
        super().__init__(file, protocol=5)
        self._shared = shared

    def persistent_id(self, obj: object) -> object:
        if self._shared is None or not _is_plain(obj):
            return None
        return self._shared.put(obj.detach())

    def reducer_override(self, obj: Any) -> Any:
        if not _is_plain(obj):
            return NotImplemented
        plain = obj.detach().cpu().contiguous()
        if plain.dtype == torch.bfloat16:  # NumPy has no such type
            return _from_bits, (plain.view(torch.int16).numpy(),)
        return torch.from_numpy, (plain.numpy(),)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: SharedBuffer | None, copy: bool) -> None:
        super().__init__(file)
        self._shared = shared
        self._copy = copy

    def persistent_load(self, location: Any) -> Tensor:
        assert self._shared is not None, "packed into shared memory, which the reader does not have"
        tensor = self._shared.at(location)
        return tensor.clone() if self._copy else tensor


def _is_plain(obj: object) -> TypeGuard[Tensor]:
    # A subclass, such as MONAI's MetaTensor, has more to it than numbers.
    return type(obj) is Tensor or type(obj) is nn.Parameter


def _from_bits(bits: Any) -> Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)
