"""States over a socket between two processes of one machine, of which one may be hostile."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Mapping

from medfl.core.errors import RunError
from medfl.core.untrusted import JSON_BYTES
from medfl.safety.bounds import most_memory
from medfl.storage.files import State, decode_state, encode_state

_HEAD = struct.Struct("!QQ")
_SHARE = 0.25
"""Of the memory that a worker may use: what comes is held more than once while it is read."""
_PIECE = 1 << 20
_EVERY = 1.0
"""Seconds between two looks after the other process: each reads what the kernel says of every process."""


class Pipe:
    """One end of a socket pair; what comes is data, never code.

    Args:
        end: a connected stream socket.
        wait: called once a second, whether something crosses or not; raises to stop.
    """

    def __init__(self, end: socket.socket, wait: Callable[[], object] = str) -> None:
        """Take the socket over."""
        self._end = end
        self._wait = wait
        self._next = 0.0

    def send(self, state: Mapping[str, object]) -> None:
        """Send a State; OSError if nobody is there."""
        documents = encode_state(state)
        for part in (_HEAD.pack(*map(len, documents)), *documents):
            rest = memoryview(part)
            while rest:
                self._until_ready(select.POLLOUT)
                rest = rest[self._end.send(rest[:_PIECE], socket.MSG_DONTWAIT) :]

    def receive(self) -> State:
        """Return what comes next.

        Raises:
            EOFError: the other process has ended.
            RunError: it is no State, or too large.
        """
        sizes = _HEAD.unpack(self._read(_HEAD.size))
        for size, most in zip(sizes, (JSON_BYTES, int(_SHARE * most_memory())), strict=True):
            if size > most:
                raise RunError(f"a message of {size:,} bytes; at most {most:,}")

        return decode_state(*[self._read(size) for size in sizes])

    def close(self) -> None:
        """Close this end; the other reads the end of it."""
        self._end.close()

    def _read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            self._until_ready(select.POLLIN)
            piece = self._end.recv(min(_PIECE, size - len(content)))
            if not piece:
                raise EOFError("the other process has ended")
            content += piece

        return bytes(content)

    def _until_ready(self, event: int) -> None:
        """Wait for the other process, which may let a byte pass now and then so that this never ends."""
        poll = select.poll()
        poll.register(self._end, event)
        is_ready = False
        while not is_ready:
            is_ready = bool(poll.poll(1000 * _EVERY))
            if time.monotonic() >= self._next:
                self._wait()
                self._next = time.monotonic() + _EVERY
