"""States over a socket between two processes of one machine, of which one may be hostile."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Mapping

from medfl.core.errors import RunError
from medfl.storage.files import State, decode_state, encode_state

_HEAD = struct.Struct("!QQ")
_LARGEST = 1 << 34
"""Bytes of one document: a State of more is none that a site has."""
_PIECE = 1 << 20


class Pipe:
    """One end of a socket pair; what comes is data, never code.

    Args:
        end: a connected stream socket.
        wait: called four times a second while nothing comes; raises to stop waiting.
    """

    def __init__(self, end: socket.socket, wait: Callable[[], object] = str) -> None:
        """Take the socket over."""
        self._end = end
        self._wait = wait

    def send(self, state: Mapping[str, object]) -> None:
        """Send a State; OSError if nobody is there."""
        documents = encode_state(state)
        self._end.sendall(_HEAD.pack(*map(len, documents)))
        for document in documents:
            self._end.sendall(document)

    def receive(self) -> State:
        """Return what comes next.

        Raises:
            EOFError: the other process has ended.
            RunError: it is no State, or too large.
        """
        sizes = _HEAD.unpack(self._read(_HEAD.size))
        if max(sizes) > _LARGEST:
            raise RunError(f"a message of {max(sizes):,} bytes; at most {_LARGEST:,}")

        return decode_state(*[self._read(size) for size in sizes])

    def close(self) -> None:
        """Close this end; the other reads the end of it."""
        self._end.close()

    def _read(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            while not select.select([self._end], [], [], 0.25)[0]:
                self._wait()

            piece = self._end.recv(min(_PIECE, size - len(content)))
            if not piece:
                raise EOFError("the other process has ended")
            content += piece

        return bytes(content)
