"""Bounds of a process group that its keeper holds, for any user: memory, number of processes, no longer than it.

What the kernel holds for a group, as files in memory and what waits in sockets, is in no process's memory: so the group
ends too where the whole machine has none left, whoever has taken it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOST_PROCESSES = 256
_SHARE = 0.95
_LEFT = 0.02
"""Of the machine's memory, or of the control group's: what a group may use, and what must be left."""
_PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG
_EVERY = 1.0
"""Seconds between two looks."""
_GROUP = Path("/sys/fs/cgroup")


def end_with_parent(number: int) -> None:
    """Have the kernel signal this process when the thread that started it ends; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DIED, number, 0, 0, 0)


def end_group_with_keeper(pipe: int) -> None:
    """Have an external process kill this process's group once nobody holds the other end of a pipe.

    This also works if the keeper was killed, and for any child that refuses to end. Called by a process that leads its
    group, before it opens anything third-party.
    """
    group = os.getpgrp()
    if os.fork():
        return

    os.setsid()
    os.dup2(pipe, 0)
    close_from(1)  # others wait until the open files are closed
    os.read(0, 1)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)

    os._exit(0)


def close_from(first: int) -> None:
    """Close this process's open file descriptors from a number on."""
    for handle in os.listdir("/proc/self/fd"):
        if int(handle) >= first:
            with suppress(OSError):
                os.close(int(handle))


def wait(leader: int) -> tuple[int, str]:
    """Wait for a child that leads a process group; return its exit code, and the limit for which it was killed.

    Everything it has started ends with it, since that cannot leave its group.
    """
    reason = ""
    with os.fdopen(os.pidfd_open(leader), "rb") as ended:
        while not (reason or select.select([ended], [], [], _EVERY)[0]):
            reason = beyond(leader)

    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)

    _, status = os.waitpid(leader, 0)
    return os.waitstatus_to_exitcode(status), reason


def beyond(group: int) -> str:
    """Say which limit a process group exceeds, "" for none; reads /proc, which only Linux has."""
    members = [*_members(group)]
    if len(members) > MOST_PROCESSES:
        return f"it had {len(members)} processes; at most {MOST_PROCESSES}"
    if (threads := sum(map(_threads, members))) > _most_threads():
        return f"it had {threads:,} threads; at most {_most_threads():,}"

    total = total_memory()
    if (left := memory_left()) < _LEFT * total:
        return f"only {left >> 20:,} MiB of the machine's memory were left"

    most = _SHARE * total
    # Pages that processes share are counted for each; to divide them takes the kernel longer
    for name, key in (("status", "RssAnon"), ("smaps_rollup", "Pss")):
        used = sum(_bytes(process / name, key) for process in members)
        if used <= most:
            return ""

    return f"it used {used >> 20:,} MiB of memory; at most {int(most) >> 20:,}"


def _members(group: int) -> Iterator[Path]:
    """Yield a group's processes in /proc, also zombies, whose ids are still taken."""
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            if os.getpgid(int(name)) == group:
                yield Path("/proc", name)


def _bytes(file: Path, key: str) -> int:
    """Return a size from one of the kernel's files, 0 if it has none."""
    with suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) << 10

    return 0


def _threads(process: Path) -> int:
    with suppress(OSError):  # it has ended
        return len(os.listdir(process / "task"))
    return 0


def _most_threads() -> int:
    """Return half of the threads that the kernel has numbers for: who needs one finds one."""
    return int(Path("/proc/sys/kernel/pid_max").read_text()) // 2


def total_memory() -> int:
    """Return the bytes of memory of the machine, or of the control group."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # there is none, or it says "max"
        total = min(total, int((_GROUP / "memory.max").read_text()))

    return total


def memory_left() -> int:
    """Return the bytes that the machine, or the control group, can still give."""
    left = _bytes(Path("/proc/meminfo"), "MemAvailable") + _bytes(Path("/proc/meminfo"), "SwapFree")
    with suppress(OSError, ValueError, LookupError):
        most, used = (int((_GROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        # What is read from files is given back when it is needed, files in memory are not
        counts = dict(map(str.split, (_GROUP / "memory.stat").read_text().splitlines()))
        left = min(left, most - used + int(counts["file"]) - int(counts["shmem"]))

    return left
