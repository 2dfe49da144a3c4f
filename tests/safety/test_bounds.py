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


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Popen's own: `bounds.wait` has waited
def test_a_group_of_too_many_processes_ends_with_all_of_them() -> None:
    leader = group(f"forks({bounds.MOST_PROCESSES + 20}); time.sleep(60)")
    code, reason = bounds.wait(leader)
    assert code == -9
    assert re.fullmatch("it had 2[0-9]{2} processes; at most 256", reason)

    deadline = time.monotonic() + 10  # the kernel takes a moment for each
    while any(bounds._members(leader)) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert not any(bounds._members(leader))


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
