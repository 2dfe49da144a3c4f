"""Bounds that a keeper holds for a process group: memory and number of processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

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


def is_gone(leader: int) -> bool:
    """Tell whether a group ends in ten seconds: the kernel takes a moment for each process."""
    deadline = time.monotonic() + 10
    while any(bounds._members(leader)) and time.monotonic() < deadline:
        time.sleep(0.05)

    return not any(bounds._members(leader))


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
    monkeypatch.setattr(bounds, "most_memory", lambda: 500 << 20)
    shared = "x = b'x' * (300 << 20); forks(3); time.sleep(1.5); os._exit(len(x) >> 28)"
    assert bounds.wait(group(shared)) == (1, "")
    apart = "forks(2, lambda: globals().update(x=b'x' * (300 << 20))); time.sleep(60)"
    code, reason = bounds.wait(group(apart))
    assert code == -9
    assert re.fullmatch("it used [5-7][0-9]{2} MiB of memory; at most 500", reason)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_group_within_its_bounds_is_waited_for() -> None:
    assert bounds.wait(group("forks(2); time.sleep(1.5); os._exit(7)")) == (7, "")


def test_the_bound_is_below_what_the_machine_has() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < bounds.most_memory() < total


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
        assert len([*bounds._members(leader)]) == 4
        keeper.kill()
        assert output.read() == ""  # the end of what all of them had open

    keeper.wait()
    assert is_gone(leader)
