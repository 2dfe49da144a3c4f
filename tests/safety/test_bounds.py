"""Bounds that a keeper holds for a process group: memory and number of processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from medfl.safety import bounds

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")


def group(work: Callable[[], object]) -> int:
    """Return the leader of a new process group that does some work, then waits."""
    leader = os.fork()
    if not leader:
        os.setpgid(0, 0)
        work()
        time.sleep(60)
        os._exit(0)

    return leader


def forks(count: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(count):
            if not os.fork():
                time.sleep(60)
                os._exit(0)

    return work


def test_a_group_of_too_many_processes_ends_with_all_of_them() -> None:
    leader = group(forks(bounds.MOST_PROCESSES + 20))
    code, reason = bounds.wait(leader)
    assert code == -9
    assert reason.startswith("it had 2")
    assert reason.endswith(" processes; at most 256")
    deadline = time.monotonic() + 10  # the kernel takes a moment for each
    while bounds.beyond(leader) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert not any(bounds._members(leader))


def test_a_group_of_too_much_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its processes have together counts; what they share counts once."""
    monkeypatch.setattr(bounds, "most_memory", lambda: 1000 << 20)
    shared = b"x" * (400 << 20)

    def share() -> None:
        forks(3)()
        time.sleep(1.5)
        os._exit(len(shared) >> 28)

    def take() -> None:
        os.fork()
        kept.append(b"x" * (700 << 20))

    kept: list[bytes] = []
    assert bounds.wait(group(share)) == (1, "")
    code, reason = bounds.wait(group(take))
    assert code == -9
    assert reason.startswith("it used 1,")
    assert reason.endswith(" MiB of memory; at most 1,000")


def test_a_group_within_its_bounds_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    leader = os.fork()
    if not leader:
        os.setpgid(0, 0)
        forks(2)()
        time.sleep(1.5)
        os._exit(7)

    assert bounds.wait(leader) == (7, "")


def test_the_bound_is_below_what_the_machine_has() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < bounds.most_memory() < total
