"""A seccomp filter for what Landlock knows nothing of: sockets but TCP, changed permissions, typing into a terminal.

It is classic BPF: a list of instructions that the kernel runs at each system call of this process and its children.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator

_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_RETURN = 0x06
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENT = 16
"""Where a call's first argument begins; each has 8 bytes, of which the lower 4 are compared."""
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | 13
_FOREIGN = 0x40000000
"""The first number of x32, another way into the same calls."""
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS = {
    "x86_64": {
        "socket": 41, "ioctl": 16, "execve": 59, "execveat": 322, "chmod": 90, "fchmod": 91, "fchmodat": 268,
        "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
        "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
    },
    "aarch64": {
        "socket": 198, "ioctl": 29, "execve": 221, "execveat": 281, "fchmod": 52, "fchmodat": 53, "fchown": 55,
        "fchownat": 54, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15,
        "fremovexattr": 16,
    },
}  # fmt: skip
_EVERYWHERE = {
    "io_uring_setup": 425,
    "fchmodat2": 452,
    "setxattrat": 463,
    "removexattrat": 466,
    "file_setattr": 469,
}
_INTERNET = (2, 10)
_TRANSPORT = (0, 6, 17)
"""IPv4 and IPv6; the protocols 0 (the usual one), TCP and UDP: names are looked up over UDP."""
_TYPING = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into the user's terminal."""
_SET_SECCOMP = 22
_FILTER = 2


def supported() -> bool:
    """Return whether the numbers of this machine's system calls are known here."""
    return platform.machine() in _NUMBERS and os.uname().sysname == "Linux"


def enter(sockets: bool, programs: bool) -> None:
    """Filter the system calls of this thread, and of what it starts, for good; needs `no_new_privs`.

    Permissions, owners and extended attributes of files may no longer be changed, and io_uring not be set up, which
    would go around the filter. What is refused fails with EACCES.

    Args:
        sockets: whether sockets of the internet may be made; of no other family in any case.
        programs: whether programs may be executed.

    Raises:
        OSError: the kernel does not take it.
    """
    instructions = b"".join(_instructions(sockets, programs))
    code = ctypes.create_string_buffer(instructions)
    program = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(code))
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_SECCOMP, _FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def _instructions(sockets: bool, programs: bool) -> Iterator[bytes]:
    """Yield the filter: each check refuses at once; only those of sockets are jumped over as a whole."""
    machine = platform.machine()
    numbers = {**_NUMBERS[machine], **_EVERYWHERE}
    socket = numbers.pop("socket")
    ioctl = numbers.pop("ioctl")
    yield from [_load(_ARCHITECTURE), _jump(_EQUAL, _ARCHITECTURES[machine], 1, 0), _refuse()]
    yield from [_load(_NUMBER), _jump(_AT_LEAST, _FOREIGN, 0, 1), _refuse()]

    for name, number in numbers.items():
        if not (programs and name in ("execve", "execveat")):
            yield from [_jump(_EQUAL, number, 0, 1), _refuse()]

    if sockets:
        family = [_load(_ARGUMENT), *_unless(_INTERNET)]
        protocol = [_load(_ARGUMENT + 16), *_unless(_TRANSPORT)]
        checks = [*family, *protocol, _jump(_RETURN, _ALLOW)]
        yield from [_jump(_EQUAL, socket, 0, len(checks)), *checks]
    else:
        yield from [_jump(_EQUAL, socket, 0, 1), _refuse()]

    yield from [_jump(_EQUAL, ioctl, 1, 0), _jump(_RETURN, _ALLOW), _load(_ARGUMENT + 8)]
    for request in _TYPING:
        yield from [_jump(_EQUAL, request, 0, 1), _refuse()]

    yield _jump(_RETURN, _ALLOW)


def _unless(values: tuple[int, ...]) -> list[bytes]:
    """Refuse if the loaded value is none of these."""
    return [
        *(_jump(_EQUAL, value, len(values) - index, 0) for index, value in enumerate(values)),
        _refuse(),
    ]


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", _LOAD, 0, 0, offset)


def _jump(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _refuse() -> bytes:
    return _jump(_RETURN, _REFUSE)
