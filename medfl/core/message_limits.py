"""MessageLimits: the maximum size of a received message, checked before anything is allocated for it.

A message arrives either as a safetensors document, whose header is checked here before the library reads it, or as
named tensors restored by a transport. Both have the same limits and raise the same error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfl.core.arrays import Array
from medfl.core.errors import RunError
from medfl.core.untrusted import Refused, unique, visible

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPES = frozenset(_TYPES.values())
_ENTRY = {"dtype", "shape", "data_offsets"}
_FACTOR = 8  # times the largest network
_FLOOR = 2**28  # bytes that every run may send


@dataclass(frozen=True)
class MessageLimits:
    """The largest accepted message; far above what any method sends.

    Attributes:
        size: bytes of all tensors together.
        header: bytes of a document's header.
        tensors: number of tensors, numbers included; methods send less than a tenth of these counts.
        name: characters of a tensor's name, including its group's.
        dimensions: of a tensor.
    """

    size: int = _FLOOR
    header: int = 2**24
    tensors: int = 8192
    name: int = 512
    dimensions: int = 8

    @classmethod
    def for_networks(cls, *networks: Mapping[str, Tensor]) -> MessageLimits:
        """Return the limits of a run: eight times its largest network, and at least 256 MiB.

        Methods send up to four tensors for each of the network's, plus prototypes, images or scores, which dominate the
        messages of a small network.
        """
        size = 0
        most = 0
        for network in networks:
            size = max(size, sum(tensor.nbytes for tensor in network.values()))
            most = max(most, len(network))

        return cls(size=max(_FLOOR, _FACTOR * size), tensors=max(cls.tensors, _FACTOR * most))

    # A document

    def check_document(self, data: bytes, sender: str) -> None:
        """Check the header of a safetensors document; the rest is not read.

        Raises:
            RunError: it is not such a document, its header contradicts its size, or it exceeds a limit; names the
                sender.
        """
        try:
            self._check_header(data)
        except (Refused, ValueError, RecursionError) as error:
            prefix = f"{sender}: " if sender else ""
            reason = " ".join(str(error).split())[:300]
            raise RunError(
                f"{prefix}a received message of {len(data)} bytes is not taken: {reason}"
            ) from error

    def _check_header(self, data: bytes) -> None:
        # A document: 8 bytes for the length of the header, the header in JSON, the tensors without gaps.
        length = int.from_bytes(data[:8], "little")
        room = len(data) - 8
        _require(room >= 0, "it is shorter than the length of a header")
        _require(length <= room, f"its header claims {length} bytes; {room} are there")
        _require(length <= self.header, f"its header has {length} bytes; at most {self.header}")
        _require(
            room - length <= self.size,
            f"its tensors have {room - length} bytes; at most {self.size}",
        )
        entries = json.loads(
            data[8 : 8 + length].decode(),
            object_pairs_hook=unique(self.header),
        )
        _require(isinstance(entries, dict), "its header is no mapping")
        self._check_counts(entries)
        end = 0
        # A gap could smuggle anything past every check, and an overlap would put one number in two tensors.
        for start, stop in sorted(self._span(name, entry) for name, entry in entries.items()):
            _require(
                start == end, f"its tensors overlap, or leave a gap, at byte {min(start, end)}"
            )
            end = stop

        _require(end == room - length, f"its tensors claim {end} bytes; {room - length} are there")

    def _check_counts(self, named: Collection[object]) -> None:
        """Check how many tensors and numbers there are, before anything is made of one."""
        _require(len(named) <= self.tensors, f"it has {len(named)} tensors; at most {self.tensors}")
        numbers = sum(str(name).startswith("scalars/") for name in named)
        _require(numbers <= 1024, f"it has {numbers} numbers; at most 1024")

    def _span(self, name: str, entry: object) -> tuple[int, int]:
        """Return the start and end of a tensor, after checking its name, dtype and shape."""
        self._check_name(name)
        group, slash, _ = name.partition("/")
        _require(bool(group and slash), f"{name!r} is not named group/name")
        if not isinstance(entry, dict) or entry.keys() != _ENTRY:
            raise ValueError(f"{name!r} is not described as a tensor")

        kind = entry["dtype"]
        shape = entry["shape"]
        offsets = entry["data_offsets"]
        _require(
            isinstance(kind, str) and kind in _TYPES, f"{name!r} has the type {str(kind)[:40]!r}"
        )
        _require(
            _are_sizes(shape) and len(shape) <= self.dimensions,
            f"{name!r} has the shape {str(shape)[:80]}",
        )
        _require(_are_sizes(offsets) and len(offsets) == 2, f"{name!r} lies at {str(offsets)[:80]}")
        size = math.prod(shape) * _TYPES[kind].itemsize
        start, stop = offsets
        _require(
            stop - start == size, f"{name!r} has {size:,} bytes by its shape, and {stop - start:,}"
        )
        _require(
            group != "scalars" or math.prod(shape) == 1, f"{name!r} is {shape}; expected one number"
        )

        return start, stop

    def _check_name(self, name: str) -> None:
        _require(
            len(name) <= self.name,
            f"a name of {len(name)} characters, {name[:40]!r}…; at most {self.name}",
        )
        # Errors name tensors, and appear in the receiver's logs
        _require(
            visible(name) == name and "\n" not in name,
            f"{name!r} is no name, it would steer a terminal",
        )

    # Restored tensors

    def checked(self, named: Mapping[Any, Any], sender: str) -> dict[str, Tensor]:
        """Return received tensors, NumPy arrays and numbers as dense real tensors, each on its own device.

        Raises:
            RunError: a value is none of these, or they exceed a limit; names the sender.
        """
        try:
            self._check_counts(named)
            left = self.size
            tensors = {}
            for name, arrived in named.items():
                value = _plain(arrived)
                _require(isinstance(name, str), f"the name {str(name)[:40]!r} is no text")
                self._check_name(name)
                left -= _size(name, value)
                _require(left >= 0, f"its tensors have more than {self.size} bytes")
                _require(value.ndim <= self.dimensions, f"{name!r} has {value.ndim} dimensions")
                tensors[name] = _tensor(name, value)
        except ValueError as error:
            raise RunError(f"{sender}: {error}") from error
        except Exception as error:  # a sender's own class may fail in any way
            raise RunError(f"{sender}: reading it raises {type(error).__name__}") from error

        return tensors


def _plain(value: object) -> Any:
    """Return a tensor without its class, which may say anything about it."""
    if not isinstance(value, Tensor) or type(value) is Tensor:
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(value, Tensor)


def _size(name: str, value: Any) -> int:
    """Return the bytes of a value as a tensor, after checking its type."""
    if isinstance(value, np.ndarray | np.number):
        # Objects, strings and structured arrays have other kinds.
        _require(value.dtype.kind in "fiub", f"{name!r} has the type {value.dtype}")
    else:
        # A sparse or quantised tensor may claim a shape far larger than its data.
        dense = (
            isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized
        ) and not value.is_nested
        _require(
            dense and not value.is_meta,
            f"{name!r} is a {type(value).__name__}; expected a dense tensor or an array",
        )

    return int(value.nbytes)


def _tensor(name: str, value: Tensor | Array) -> Tensor:
    if isinstance(value, Tensor):
        # raises where the storage was freed or shortened: to read such a tensor ends the process
        tensor = value.detach().as_strided(value.shape, value.stride())
    else:
        # Tensors do not support some NumPy types, nor the other byte order.
        try:
            tensor = torch.as_tensor(np.array(value))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name!r}: {error}") from error

    _require(tensor.dtype in _DTYPES, f"{name!r} has the type {tensor.dtype}")
    check_bools(name, tensor)
    return tensor


def check_bools(name: str, tensor: Tensor) -> None:
    """Raise a ValueError for booleans with bytes other than 0 and 1, which operators read inconsistently."""
    if tensor.dtype is torch.bool and tensor.numel():
        _require(
            int(tensor.view(torch.uint8).max()) <= 1, f"{name!r} has a truth value besides 0 and 1"
        )


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _are_sizes(values: Any) -> bool:
    # True is an int to isinstance; PyTorch counts in signed 64-bit integers.
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 2**63 for n in values)
