"""Replies of many sites in bounded memory: tensors beyond a budget wait in a file and are read one at a time.

The location of a tensor changes none of its bits, so the budget does not change a result.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medfl.core import Message, Weights, byte_count, map_values
from medfl.data import free_ram
from medfl.storage import writing

BUDGET: int | None = None
"""Bytes of one round's replies that stay in memory; None: an eighth of free memory, at most `_MAX_BUDGET`."""
_MAX_BUDGET = 2 * 2**30


class TensorStore:
    """Tensors kept in memory while they fit, then in an unnamed file that vanishes with the process.

    Args:
        folder: a place with enough space.
    """

    def __init__(self, folder: Path) -> None:
        self.held = 0
        self._folder = folder
        self._budget = min(_MAX_BUDGET, free_ram() // 8)
        if BUDGET is not None:
            self._budget = BUDGET

        self._file: Any = None

    def keep(self, tensors: Weights) -> Weights:
        """Return the same tensors, to be used instead of the given ones.

        Raises:
            RunError: the disk is full.
        """
        size = byte_count(tensors)
        if self.held + size <= self._budget:
            self.held += size
            return tensors
        return _TensorsOnDisk(self, map_values(self._write, tensors))

    def read(self, extent: _Extent) -> Tensor:
        """Return a tensor from the file in new memory."""
        return self.part(extent, 0, extent.shape.numel()).reshape(extent.shape)

    def part(self, extent: _Extent, start: int, stop: int) -> Tensor:
        """Return the numbers start..stop of a tensor in the file."""
        if start == stop:
            return torch.empty(0, dtype=extent.dtype, device=extent.device)
        data = bytearray((stop - start) * extent.dtype.itemsize)
        self._file.seek(extent.offset + start * extent.dtype.itemsize)
        self._file.readinto(data)
        return torch.frombuffer(data, dtype=extent.dtype).to(extent.device)

    def _write(self, tensor: Tensor) -> _Extent:
        # as bytes: NumPy has no bfloat16
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        with writing(self._folder):
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (open for as long as the store)

            # reads have moved the position
            offset = self._file.seek(0, 2)
            self._file.write(data)
            self._file.flush()

        return _Extent(offset, tensor.shape, tensor.dtype, tensor.device)

    def __del__(self) -> None:
        """Release the file."""
        if getattr(self, "_file", None) is not None:
            with suppress(OSError):
                self._file.close()


class _Extent(NamedTuple):
    """Position of a tensor in the file, and its form."""

    offset: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class _ByName(Mapping[str, Tensor]):
    """Named tensors, each read on access."""

    _stored: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class _TensorsOnDisk(_ByName):
    """Named tensors in a store's file; each access reads one again."""

    def __init__(self, store: TensorStore, extents: Mapping[str, _Extent]) -> None:
        self._store = store
        self._stored = extents

    def __getitem__(self, name: str) -> Tensor:
        return self._store.read(self._stored[name])

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Return the numbers start..stop of a tensor, reading no others."""
        return self._store.part(self._stored[name], start, stop)


class Replies(Mapping[str, Message]):
    """Messages of sites as `Method.aggregate` takes them: those that have arrived, in the sites' order."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names = names
        self._store = TensorStore(folder)
        self._messages: dict[str, Message] = {}

    def add(self, name: str, message: Message) -> None:
        """Take a site's message."""
        groups = map_values(self._store.keep, message.tensors)
        self._messages[name] = Message(groups, message.scalars)

    def __getitem__(self, name: str) -> Message:
        return self._messages[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._messages)

    def __len__(self) -> int:
        return len(self._messages)


class SitesWeights(_ByName):
    """The weights of each site's own model under `<site>/<tensor>`."""

    def __init__(self, folder: Path) -> None:
        self._store = TensorStore(folder)
        self._stored: dict[str, tuple[Weights, str]] = {}

    def add(self, name: str, weights: Weights) -> None:
        """Add a site's weights."""
        stored = self._store.keep(weights)
        self._stored |= {f"{name}/{key}": (stored, key) for key in stored}

    def __getitem__(self, name: str) -> Tensor:
        stored, key = self._stored[name]
        return stored[key]
