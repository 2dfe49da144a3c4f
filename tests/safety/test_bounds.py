"""Bounds that a keeper holds for a process group: memory and number of processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from medfl.safety import bounds

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")


FORKS = """
def forks(count, work=lambda: None):
    for _ in range(count):
        if not os.fork():
            work()
            time.sleep(60)
            os._exit(0)
"""


def group(program: str) -> int:
    """Return the leader of a new process group, a small Python that runs a program."""
    text = f"import os, time\n{FORKS}\n{program}"
    return subprocess.Popen([sys.executable, "-S", "-c", text], start_new_session=True).pid


def living(leader: int) -> list[Path]:
    """Return the group's processes in /proc, without zombies."""
    found = []
    for process in bounds._members(leader):
        with suppress(OSError):  # it has ended
            state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if state != "Z":
                found.append(process)

    return found


def is_gone(leader: int) -> bool:
    """Tell whether a group ends in ten seconds: the kernel takes a moment for each process."""
    deadline = time.monotonic() + 10
    while living(leader) and time.monotonic() < deadline:
        time.sleep(0.05)

    return not living(leader)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Popen's own: `bounds.wait` has waited
def test_a_group_of_too_many_processes_ends_with_all_of_them() -> None:
    leader = group(f"forks({bounds.MOST_PROCESSES + 20}); time.sleep(60)")
    code, reason = bounds.wait(leader)
    assert code == -9
    assert re.fullmatch("it had 2[0-9]{2} processes; at most 256", reason)

    assert is_gone(leader)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_group_of_too_much_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its processes have together counts; what they share counts once."""
    monkeypatch.setattr(bounds, "total_memory", lambda: (500 << 20) / 0.95)
    shared = "x = b'x' * (300 << 20); forks(3); time.sleep(1.5); os._exit(len(x) >> 28)"
    assert bounds.wait(group(shared)) == (1, "")
    apart = "forks(2, lambda: globals().update(x=b'x' * (300 << 20))); time.sleep(60)"
    code, reason = bounds.wait(group(apart))
    assert code == -9
    assert re.fullmatch("it used [5-7][0-9]{2} MiB of memory; at most 500", reason)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_group_within_its_bounds_is_waited_for() -> None:
    assert bounds.wait(group("forks(2); time.sleep(1.5); os._exit(7)")) == (7, "")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_group_ends_where_the_machine_has_no_memory_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has it: what waits in sockets, and files in memory, are in no process's."""
    monkeypatch.setattr(bounds, "total_memory", lambda: 1000 << 20)
    monkeypatch.setattr(bounds, "memory_left", lambda: 19 << 20)
    code, reason = bounds.wait(group("time.sleep(60)"))
    assert (code, reason) == (-9, "only 19 MiB of the machine's memory were left")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_group_of_too_many_threads_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "_most_threads", lambda: 100)
    text = "import threading; [threading.Thread(target=time.sleep, args=(60,)).start() for _ in range(110)]"
    assert bounds.wait(group(text)) == (-9, "it had 111 threads; at most 100")


def test_bounds_are_those_of_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 0 < bounds.memory_left() <= bounds.total_memory()
    monkeypatch.setattr(bounds, "_GROUP", tmp_path)
    for name, text in (
        ("max", "1000"),
        ("current", "700"),
        ("stat", "anon 1\nfile 300\nshmem 50\n"),
    ):
        (tmp_path / f"memory.{name}").write_text(text)
    assert (bounds.total_memory(), bounds.memory_left()) == (1000, 550)


KEPT = r"""
import os, signal, sys, time
from medfl.safety.bounds import end_group_with_keeper

end, keeper = os.pipe()
worker = os.fork()
if not worker:
    os.setpgid(0, 0)
    os.close(keeper)
    end_group_with_keeper(end)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.fork()
    os.fork()
    os.write(1, f"{os.getpgrp()}\n".encode())
    time.sleep(60)
os.waitpid(worker, 0)
"""


def test_what_a_worker_has_started_ends_with_a_keeper_that_is_killed() -> None:
    keeper = subprocess.Popen([sys.executable, "-c", KEPT], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    with keeper.stdout as output:
        (leader,) = {int(output.readline()) for _ in range(4)}
        # What ends the group is one of its members until it has a session of its own
        deadline = time.monotonic() + 60
        while len(living(leader)) != 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)

        keeper.kill()
        assert output.read() == ""  # the end of what all of them had open

    keeper.wait()
    assert is_gone(leader)
