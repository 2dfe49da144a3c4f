"""Bounds of a process group that its keeper holds, for any user: memory, number of processes, no longer than it."""

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
"""Of the machine's memory, or of the control group's."""
_PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG
_EVERY = 1.0
"""Seconds between two looks."""
_GROUP = Path("/sys/fs/cgroup/memory.max")


def end_with_parent(number: int) -> None:
    """Let the kernel send this process a signal when the thread that began it ends; only Linux does so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DIED, number, 0, 0, 0)


def end_group_with_keeper(pipe: int) -> None:
    """Let a process that is outside of it end this process's group when nobody has the other end of a pipe any more.

    Also where the keeper was killed, and whatever has been started and does not want to end. Called by a process that
    leads its group, before it opens anything of others.
    """
    group = os.getpgrp()
    if os.fork():
        return

    os.setsid()
    os.dup2(pipe, 0)
    for handle in os.listdir("/proc/self/fd"):  # others wait for the end of what is open
        if handle != "0":
            with suppress(OSError):
                os.close(int(handle))

    os.read(0, 1)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)

    os._exit(0)


def wait(leader: int) -> tuple[int, str]:
    """Wait for a child that leads a process group; return its exit code, and the bound that it was ended for.

    With it ends all that it has started, which cannot leave its group.
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
    """Say which bound a process group is beyond, "" for none; /proc is read, which Linux alone has."""
    members = [*_members(group)]
    if len(members) > MOST_PROCESSES:
        return f"it had {len(members)} processes; at most {MOST_PROCESSES}"

    most = most_memory()
    # Pages that processes share are counted for each; to divide them takes the kernel longer
    for name, key in (("status", "RssAnon"), ("smaps_rollup", "Pss")):
        used = sum(_bytes(process / name, key) for process in members)
        if used <= most:
            return ""

    return f"it used {used >> 20:,} MiB of memory; at most {int(most) >> 20:,}"


def _members(group: int) -> Iterator[Path]:
    for name in filter(str.isdecimal, os.listdir("/proc")):
        process = Path("/proc", name)
        with suppress(OSError):  # it has ended
            if os.getpgid(int(name)) == group:
                # After the name, which may have any characters
                state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if state != "Z":
                    yield process


def _bytes(file: Path, key: str) -> int:
    """Return a size that one of the kernel's files has, 0 where it has none."""
    with suppress(OSError):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) << 10

    return 0


def most_memory() -> float:
    """Return the bytes that a worker and its children may use together."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # there is none, or it says "max"
        total = min(total, int(_GROUP.read_text()))

    return _SHARE * total
