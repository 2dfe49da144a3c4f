"""An allow list of system calls (seccomp, by libseccomp): what training needs, and nothing else.

It started from the calls that `strace -f` shows for a run with two worker processes, plus calls of the same kind, since
C libraries differ in which they use. Programs may also start a session (`setsid`); without programs nobody can leave
the worker's process group, which its keeper kills.
"""

from __future__ import annotations

import ctypes.util
import errno
import importlib
import platform
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyseccomp import Arg, SyscallFilter

FILES = """
    access chdir close close_range creat dup dup2 dup3 faccessat faccessat2 fadvise64 fallocate fchdir fdatasync flock
    fstat fstatfs fsync ftruncate getcwd getdents getdents64 lseek link linkat lstat mkdir mkdirat newfstatat open
    openat openat2 pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv rename
    renameat renameat2 rmdir sendfile splice stat statfs statx symlink symlinkat sync_file_range tee truncate umask
    unlink unlinkat write writev copy_file_range memfd_create
"""
MEMORY = """
    brk madvise mbind membarrier mincore mlock mlock2 mmap mprotect mremap msync munlock munmap get_mempolicy
    set_mempolicy
"""
THREADS_AND_CHILDREN = """
    arch_prctl capget exit exit_group fork futex futex_waitv futex_wake futex_wait futex_requeue get_robust_list
    getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getresgid getresuid getrlimit
    getrusage getsid gettid getuid kill restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
    rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity
    sched_getattr sched_getparam sched_getscheduler sched_yield set_robust_list set_tid_address setrlimit
    sigaltstack tgkill tkill vfork wait4 waitid pause
"""
WAITING_AND_TIME = """
    alarm clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2
    epoll_wait eventfd eventfd2 getitimer gettimeofday nanosleep pipe pipe2 poll ppoll pselect6 select setitimer
    signalfd signalfd4 time timer_create timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create
    timerfd_gettime timerfd_settime times
"""
SYSTEM = "getrandom sysinfo uname"
ENDS = "getpeername getsockname getsockopt recvfrom recvmmsg recvmsg setsockopt shutdown"
"""For existing sockets: pairs between a process and its children."""
NETWORK = "bind connect"
LISTENING = "accept accept4 listen"
PROGRAMS = "execve execveat setsid"
RESTRICTING = "capset landlock_add_rule landlock_create_ruleset landlock_restrict_self seccomp"
"""Used by a started program to sandbox itself: they remove rights and give none."""
_RECENT = ("clone3", "cachestat", "map_shadow_stack", "mseal", "fchmodat2", "setxattrat")
"""Calls that C libraries try first: if reported missing, they use an older one, whose arguments can be checked."""

_LIBRARY = "libseccomp.so.2"
_UNIX = 1
_INTERNET = (2, 10)
_TRANSPORT = (0, 6, 17)
"""IPv4 and IPv6; the protocols 0 (default), TCP and UDP: names are resolved over UDP."""
_FAST_OPEN = 0x20000000
"""Flag of a message that connects: Landlock's rule on `connect` does not cover it."""
_NOT_A_CHILD = 0x7E028080
"""Flags of `clone`: new namespaces, in which a process has all rights; a parent other than the caller."""
_CONNECTED = (1, 5)
"""Types of Unix sockets that send only to their other end: a datagram goes where its own header says."""
_FCNTLS = (*range(8), 36, 37, 38, 1030, 1031, 1032, 1033, 1034)
"""Duplicates, flags, record locks, pipe sizes, seals: no signal owner, no leases, no notifications."""
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Is it a terminal, its width; waiting bytes; non-blocking, close-on-exec: none injects input."""
_DRIVER_IOCTLS = (0x4600, 0x0000)
"""Kinds of requests to NVIDIA's driver."""
_PROCESS_SETTINGS = (1, 2, 3, 15, 16, 21, 23, 25, 30, 38, 39, 40, 41, 42, 47, 0x53564D41)
"""What `prctl` may read or set: parent-death signal, names, timer slack, huge pages, names of memory."""


def supported() -> bool:
    """Return whether libseccomp is available; without it there is no filter."""
    try:
        _seccomp()
    except (ImportError, OSError, RuntimeError):
        return False

    return platform.system() == "Linux"


def _seccomp() -> ModuleType:
    """Import pyseccomp, which finds its library by running programs: slow, and refused in a surrounding sandbox."""
    find = ctypes.util.find_library
    ctypes.util.find_library = lambda name: _LIBRARY
    try:
        return importlib.import_module("pyseccomp")
    finally:
        ctypes.util.find_library = find


def enter(sockets: bool, listening: bool, programs: bool) -> None:
    """Permanently filter the system calls of this thread and its children; needs `no_new_privs`.

    Calls that are not on the list fail with EPERM.

    Args:
        sockets: whether internet sockets may be created; other families never.
        listening: whether a socket may listen; Landlock decides on which ports.
        programs: whether programs may be executed.

    Raises:
        OSError: the kernel rejects the filter.
    """
    make_filter(sockets, listening, programs).load()


def make_filter(sockets: bool, listening: bool, programs: bool) -> SyscallFilter:
    """Return the filter of `enter`, not loaded."""
    seccomp = _seccomp()
    calls = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))

    machine = seccomp.system_arch()

    def known(names: Iterable[str]) -> Iterator[str]:
        """Yield the names that exist on this machine and that libseccomp knows."""
        for name in names:
            if seccomp.resolve_syscall(machine, name) >= 0:
                yield name

    def allow(names: str, *conditions: Arg) -> None:
        for name in known(names.split()):
            calls.add_rule(seccomp.ALLOW, name, *conditions)

    for names in (FILES, MEMORY, THREADS_AND_CHILDREN, WAITING_AND_TIME, SYSTEM, ENDS):
        allow(names)

    for name in known(_RECENT):
        calls.add_rule(seccomp.ERRNO(errno.ENOSYS), name)

    # For this process only: 0 is the caller, and no other number is accepted
    itself = seccomp.Arg(0, seccomp.EQ, 0)
    allow("prlimit64 sched_setaffinity", itself)
    allow("clone", seccomp.Arg(0, seccomp.MASKED_EQ, _NOT_A_CHILD, 0))
    for setting in _PROCESS_SETTINGS:
        allow("prctl", seccomp.Arg(0, seccomp.EQ, setting))

    for request in _IOCTLS:
        allow("ioctl", seccomp.Arg(1, seccomp.EQ, request))
    for kind in _DRIVER_IOCTLS:  # Landlock decides for which devices
        allow("ioctl", seccomp.Arg(1, seccomp.MASKED_EQ, 0xFF00, kind))

    for command in _FCNTLS:
        allow("fcntl", seccomp.Arg(1, seccomp.EQ, command))

    for kind in _CONNECTED:
        connected = seccomp.Arg(1, seccomp.MASKED_EQ, 0xF, kind)
        allow("socketpair", seccomp.Arg(0, seccomp.EQ, _UNIX), connected)
    # without an address: to the other end alone
    allow("sendto", seccomp.Arg(4, seccomp.EQ, 0), seccomp.Arg(3, seccomp.MASKED_EQ, _FAST_OPEN, 0))
    allow("sendmsg", seccomp.Arg(2, seccomp.MASKED_EQ, _FAST_OPEN, 0))
    allow("sendmmsg", seccomp.Arg(3, seccomp.MASKED_EQ, _FAST_OPEN, 0))
    if sockets:
        allow(NETWORK)
        for family in _INTERNET:
            for protocol in _TRANSPORT:
                allow(
                    "socket",
                    seccomp.Arg(0, seccomp.EQ, family),
                    seccomp.Arg(2, seccomp.EQ, protocol),
                )

    if listening:
        allow(LISTENING)
    if programs:
        allow(PROGRAMS)
        allow(RESTRICTING)

    return calls
