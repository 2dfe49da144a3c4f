"""How many bytes the TCP sockets of some processes have taken in: theirs alone, whatever else the machine is doing.

Linux keeps the count for each socket (`tcpi_bytes_received` of `struct tcp_info`, linux/tcp.h). A socket of another
process of the same user is reached with `pidfd_getfd(2)`, Linux 5.6.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress

_PIDFD_GETFD = 438  # the same on all architectures
_RECEIVED = 128  # where tcpi_bytes_received stands
_INFO = 256


class Received:
    """Bytes by socket; one that has been closed counts with what it had when it was last looked at."""

    def __init__(self) -> None:
        """Begin with none."""
        self._by_socket: dict[str, int] = {}
        self._libc = ctypes.CDLL(None, use_errno=True)

    @property
    def total(self) -> int:
        """All bytes so far; what one of the processes sends another counts once."""
        return sum(self._by_socket.values())

    def look(self, pids: Iterable[int]) -> int:
        """Look at the sockets of these processes, and return the total."""
        for pid in pids:
            with suppress(OSError):  # it has ended
                held = os.pidfd_open(pid)
                try:
                    self._by_socket |= dict(self._sockets(pid, held))
                finally:
                    os.close(held)
        return self.total

    def _sockets(self, pid: int, held: int) -> Iterator[tuple[str, int]]:
        folder = f"/proc/{pid}/fd"
        for number in os.listdir(folder):
            with suppress(OSError):  # it has been closed, or is no TCP socket
                name = os.readlink(f"{folder}/{number}")
                if not name.startswith("socket:"):
                    continue
                copy = self._libc.syscall(_PIDFD_GETFD, held, int(number), 0)
                if copy < 0:
                    raise OSError(ctypes.get_errno(), "pidfd_getfd")
                with socket.socket(fileno=copy) as one:
                    if one.type == socket.SOCK_STREAM and one.family in (
                        socket.AF_INET,
                        socket.AF_INET6,
                    ):
                        told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO)
                        yield name, struct.unpack_from("=Q", told, _RECEIVED)[0]
