"""A process's remaining rights in a sandbox: the kernel's Landlock, with a filter of system calls.

It is entered before anything of a bundle is evaluated, and permanently restricts this process and all its children. It
needs no privileges. Restrictions that an older kernel does not support are skipped, and reported.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from medfl.core import PRIVATE_CACHE, InputError
from medfl.safety import syscall_filter

_CREATE = 444  # landlock_create_ruleset
_ADD = 445  # landlock_add_rule
_RESTRICT = 446  # landlock_restrict_self
_BENEATH = 1  # LANDLOCK_RULE_PATH_BENEATH
_PORT = 2  # LANDLOCK_RULE_NET_PORT
_NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS
_CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3
# rights on files: LANDLOCK_ACCESS_FS_EXECUTE and so on
_EXECUTE = 1
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_FOLDER = 1 << 3
_IOCTL = 1 << 15
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | _IOCTL
# rights on ports: LANDLOCK_ACCESS_NET_BIND_TCP and _CONNECT_TCP
_BIND = 1
_CONNECT = 2
_SINCE = (  # (ABI, rights on files, rights on ports, scopes, what is not refused before)
    (1, (1 << 13) - 1, 0, 0, "everything"),
    (2, 1 << 13, 0, 0, ""),
    (3, 1 << 14, 0, 0, "shortening of files"),
    (4, 0, _BIND | _CONNECT, 0, "TCP connections"),
    (5, _IOCTL, 0, 0, "ioctl of devices"),
    (6, 0, 0, 3, "signals to other processes"),
)
_SYSTEM = """
    /usr /lib /lib64 /bin /sbin /nix/store /proc /sys/bus /sys/class /sys/dev /sys/devices /sys/fs/cgroup
    /sys/kernel/mm /sys/module /etc/ld.so.cache /etc/ld.so.conf /etc/ld.so.conf.d /etc/localtime /etc/timezone
    /etc/ssl/certs /etc/ssl/openssl.cnf /etc/pki/ca-trust /etc/pki/tls/certs /etc/pki/tls/openssl.cnf
    /etc/ca-certificates /etc/resolv.conf /etc/hosts /etc/host.conf /etc/nsswitch.conf /etc/gai.conf /etc/passwd
    /etc/group /etc/fonts /etc/mime.types /etc/os-release /etc/alternatives /etc/nvidia /dev/urandom /dev/random
    /dev/zero
"""

_VARIABLES = re.compile(
    "(PYTHON|MPL)[A-Z]+|(MEDFL|XDG|LC|LD|OMP|KMP|MKL|OPENBLAS|GLIBC|MALLOC|TORCH[A-Z]*|PYTORCH|CUDA|CUBLAS|NVIDIA|ITK"
    "|MONAI)_[A-Z0-9_]+|PATH|HOME|LANG|TZ|TERM|COLUMNS|LINES|NO_COLOR|CC|CXX|CPATH|LIBRARY_PATH|TMPDIR"
    "|HF_HOME|HF_HUB_CACHE|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE"
)
"""Environment variables of a worker: others may contain somebody's keys."""


@dataclass(frozen=True)
class Allowed:
    """What a sandboxed process may do; missing files are skipped.

    Attributes:
        read: files, and folders with their contents.
        write: folders whose contents may be read, written, created, moved and deleted; files; devices.
        connect: TCP ports, on any machine: Landlock cannot restrict addresses.
        bind: TCP ports to listen on.
        programs: files, or folders of them, that may be executed; if empty, none.
    """

    read: tuple[Path, ...] = ()
    write: tuple[Path, ...] = ()
    connect: tuple[int, ...] = ()
    bind: tuple[int, ...] = ()
    programs: tuple[Path, ...] = ()


def abi() -> int:
    """Return the version of the kernel's Landlock, 0 if it is missing or disabled."""
    if sys.platform == "linux":
        # flag 1 asks for the version alone
        version: int = _libc().syscall(_CREATE, None, 0, 1)
        return max(0, version)

    return 0


def lacking() -> str:
    """Return what a sandbox needs but this machine lacks, "" if nothing."""
    if not abi():
        return "a Linux kernel of at least 5.13 with Landlock switched on"
    if not syscall_filter.supported():
        return "the library libseccomp (Debian, Ubuntu: apt install libseccomp2) and the package pyseccomp"

    return ""


def python_and_system() -> tuple[Path, ...]:
    """Return what any run reads: Python with its packages, medfl with its bundles, the system's libraries.

    The folder in which `python -m` was started is not included, unless PYTHONPATH names it.
    """
    package = Path(__file__).resolve().parents[1]
    # the first is the script's own folder
    by_name_of = [*sys.path[1:], *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    paths = (
        *_SYSTEM.split(),
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        *filter(None, by_name_of),
    )
    return (*map(Path, paths), package, package.parent / "bundles")


def devices() -> tuple[Path, ...]:
    """Return the files in /dev that a run writes: the null device, shared memory, NVIDIA's driver."""
    return (Path(os.devnull), Path("/dev/shm"), *Path("/dev").glob("nvidia*"))


def program_files(names: Iterable[str]) -> tuple[Path, ...]:
    """Return the files of programs of these names or paths, of those that exist, and the loader of all programs."""
    files = []
    for name in names:
        if path := shutil.which(name):
            files.append(Path(path).resolve())

    return (
        *files,
        *(path for folder in ("/lib", "/lib64") for path in Path(folder).glob("ld-*.so*")),
    )


def private_folders(folder: Path) -> dict[str, str]:
    """Create folders for this process's auxiliary files; return the variables that name them.

    What other processes would run or load as code must not be in a shared cache.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "tmp").mkdir(exist_ok=True)
    return {
        "MPLCONFIGDIR": f"{folder}/matplotlib",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "CUDA_CACHE_PATH": f"{folder}/cuda",
        "TMPDIR": f"{folder}/tmp",
        PRIVATE_CACHE: str(folder),
        "LOKY_MAX_CPU_COUNT": "1",  # otherwise joblib runs a program to count the cores
    }


def variables() -> dict[str, str]:
    """Return the environment without what no worker needs."""
    return {name: value for name, value in os.environ.items() if _VARIABLES.fullmatch(name)}


def forget_environment() -> None:
    """Take from this process what `variables` leaves out, also where the kernel keeps it (/proc/self/environ)."""
    remaining = variables()
    os.environ.clear()
    # the program's name, in brackets, may have blanks; the 48th and 49th field after it are env_start and env_end
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, numbers[47:49])
    if start:
        ctypes.memset(start, 0, end - start)

    os.environ.update(remaining)


class Sandbox:
    """A sandbox to be entered once, by this process or by a child before it executes something.

    Args:
        allowed: what is still allowed.

    Attributes:
        abi: version of the kernel's Landlock.
        not_refused: what this kernel cannot prevent.

    Raises:
        InputError: the kernel has no Landlock, or libseccomp is not installed.
    """

    def __init__(self, allowed: Allowed) -> None:
        """Give the rules to the kernel; nothing is restricted yet."""
        self.allowed = allowed
        self.abi = abi()
        if missing := lacking():
            raise InputError("a sandbox", missing, "run it there, or without")

        supported = [row for row in _SINCE if row[0] <= self.abi]
        self._files, ports, scopes = map(sum, zip(*(row[1:4] for row in supported), strict=True))
        self.not_refused = [row[4] for row in _SINCE if row[0] > self.abi and row[4]]

        attributes = struct.pack("QQQ", self._files, ports, scopes)
        self._rules = _called(_CREATE, attributes, len(attributes), 0)
        reading = _READ_FILE | _READ_FOLDER
        self._allow(allowed.read, reading)
        self._allow(allowed.write, self._files & ~_EXECUTE)
        self._allow(allowed.programs, reading | _EXECUTE)

        for port in {*allowed.connect, *allowed.bind} if ports else ():
            rights = _CONNECT * (port in allowed.connect) | _BIND * (port in allowed.bind)
            _called(_ADD, self._rules, _PORT, struct.pack("QQ", rights, port), 0)

    def _allow(self, paths: Iterable[Path], rights: int) -> None:
        for path, handle in _opened(paths):
            # the kernel refuses a file the rights that only folders have
            fitting = rights if path.is_dir() else rights & _OF_A_FILE
            # "=": the kernel's structure has no padding
            _called(
                _ADD, self._rules, _BENEATH, struct.pack("=Qi", fitting & self._files, handle), 0
            )

    def enter(self) -> None:
        """Restrict this process and all its future children permanently; InputError if it has other threads."""
        if len(os.listdir("/proc/self/task")) > 1:
            raise InputError(
                "a sandbox in a process with threads",
                "before any is started",
                "enter it at the start",
            )
        if _libc().prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "no_new_privs")

        _called(_RESTRICT, self._rules, 0)
        os.close(self._rules)
        _drop_capabilities()
        allowed = self.allowed
        syscall_filter.enter(
            sockets=bool(allowed.connect or allowed.bind),
            listening=bool(allowed.bind),
            programs=bool(allowed.programs),
        )

    def line(self, folder: Path) -> str:
        """Return the message to the user: the kernel's version and what is allowed; `folder` is the writable one."""
        ports = sorted({*self.allowed.connect, *self.allowed.bind})
        if ports:
            network = f"TCP ports {', '.join(map(str, ports))} only"
        else:
            network = "no network"

        some = sorted({str(path) for path in self.allowed.programs if path.exists()})
        programs = f"programs {', '.join(some)} only" if some else "no programs"
        if self.not_refused:
            lacks = f"; this kernel does not refuse {', '.join(self.not_refused)}"
        else:
            lacks = ""

        return f"Landlock ABI {self.abi}: writes below {folder} only, {network}, {programs}{lacks}"


def _opened(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Yield the existing paths, each with a handle that is closed afterwards."""
    for path in dict.fromkeys(paths):
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue

        try:
            yield path, handle
        finally:
            os.close(handle)


def _drop_capabilities() -> None:
    """Permanently drop root's capabilities other than file access: it may not inspect processes that kept theirs."""
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    if _libc().capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capset")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _called(*arguments: int | bytes) -> int:
    """Make a system call; OSError if it fails."""
    result = _libc().syscall(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return int(result)
