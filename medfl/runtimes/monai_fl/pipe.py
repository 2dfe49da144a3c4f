"""States over a socket between two processes of one machine, one of which may be hostile."""

from __future__ import annotations

import json
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from medfl.core import JSON_BYTES, JSON_VALUES, RunError, matches_type, printable, read_plain
from medfl.runtimes.message_rules import Form
from medfl.safety.bounds import total_memory
from medfl.storage import State
from medfl.storage.files import join_state, split_state

_HEAD = struct.Struct("!QQ")  # bytes of the tree, and of the tensors' forms
_SHARE = 0.25
"""Of the memory that there is: what comes is held more than once while it is read."""
_PIECE = 1 << 20
_EVERY = 1.0
"""Seconds between two checks of the other process: each reads the kernel's data on every process."""
_KINDS = {
    str(dtype): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
    )
}
"""Types of the tensors in a State's file."""


class Pipe:
    """One end of a socket pair; what arrives is data, never code.

    The structure of a State and the forms of its tensors are sent as JSON, then the raw bytes of the tensors.

    Args:
        end: a connected stream socket.
        wait: called once a second, whether data arrive or not; raises to stop.
    """

    def __init__(self, end: socket.socket, wait: Callable[[], object] = str) -> None:
        """Take ownership of the socket."""
        self._end = end
        self._wait = wait
        self._next = 0.0

    def send(self, state: Mapping[str, object]) -> None:
        """Send a State; OSError if the other end is closed."""
        tree, tensors = split_state(state)
        forms = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        documents = [tree.encode(), json.dumps(forms_state(forms)).encode()]
        head = _HEAD.pack(*map(len, documents))
        parts: list[bytes | memoryview] = [head, *documents, *map(_bytes_of, tensors.values())]
        for part in parts:
            rest = memoryview(part)
            while rest:
                self._until_ready(select.POLLOUT)
                rest = rest[self._end.send(rest[:_PIECE], socket.MSG_DONTWAIT) :]

    def receive(self) -> State:
        """Return the next State.

        Raises:
            EOFError: the other process has ended.
            RunError: it is not a State, or too large.
        """
        sizes = _HEAD.unpack(self._read(_HEAD.size))
        # before memory of that size is taken
        _require_at_most(JSON_BYTES, max(sizes))
        tree, described = map(self._read, sizes)
        with _reading():
            forms = read_forms(
                read_plain(described.decode(), is_json=True, nodes=JSON_VALUES, depth=4)
            )
            total = sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms.values())
            _require_at_most(int(_SHARE * total_memory()), total)
            tensors = {}
            for key, (shape, dtype) in forms.items():
                tensors[key] = torch.empty(shape, dtype=dtype)

        for tensor in tensors.values():
            self._fill(_bytes_of(tensor))

        with _reading():
            return join_state(tree.decode(), tensors)

    def close(self) -> None:
        """Close this end; the other end reads end-of-file."""
        self._end.close()

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        self._fill(memoryview(content))
        return content

    def _fill(self, rest: memoryview) -> None:
        while rest:
            self._until_ready(select.POLLIN)
            count = self._end.recv_into(rest[:_PIECE])
            if not count:
                raise EOFError("the other process has ended")
            rest = rest[count:]

    def _until_ready(self, event: int) -> None:
        """Wait for the other process, which could prolong this forever by sending a byte now and then."""
        poll = select.poll()
        poll.register(self._end, event)
        is_ready = False
        while not is_ready:
            is_ready = bool(poll.poll(1000 * _EVERY))
            if time.monotonic() >= self._next:
                self._wait()
                self._next = time.monotonic() + _EVERY


def forms_state(forms: Mapping[str, Form]) -> list[list[object]]:
    """Return names, shapes and types as they are sent through a pipe."""
    return [[name, list(shape), str(dtype)] for name, (shape, dtype) in forms.items()]


def read_forms(values: Any) -> dict[str, Form]:
    """Invert `forms_state`; RunError for any other input."""
    forms = {}
    for value in values:
        if len(value) != 3 or not (isinstance(value[0], str) and matches_type(value[1], list[int])):
            raise RunError("a worker speaks of tensors without names and shapes")

        name, shape = value[:2]
        kind = str(value[2])
        if kind not in _KINDS or min(shape, default=0) < 0:
            raise RunError(f"a worker speaks of a tensor of the type {printable(kind, 40)}")

        forms[name] = (torch.Size(shape), _KINDS[kind])

    return forms


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    # by bytes: NumPy has no bfloat16
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a different type for each kind of damage
        reason = printable(error, 200)
        raise RunError(f"cannot read what came through a pipe: {reason}") from error


def _require_at_most(most: int, size: int) -> None:
    if size > most:
        raise RunError(f"a message of {size:,} bytes; at most {most:,}")
