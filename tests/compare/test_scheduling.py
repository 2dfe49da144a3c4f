"""Which run of a grid may start: seed after seed, the longest first, on a GPU as many as fit its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from medfl.compare.scheduling import CostGroup, Schedule, Start, allowance
from medfl.core.gpu_memory import GIB

MEMORY = 100 * GIB


@dataclass(frozen=True)
class Run:
    method: str
    seed: int = 0
    partition: str | None = None

    @property
    def kind(self) -> CostGroup:
        return self.method, self.partition


def kind(method: str) -> CostGroup:
    return method, None


def gib(**sizes: float) -> dict[CostGroup, int]:
    return {kind(method): int(size * GIB) for method, size in sizes.items()}


def on_gpu(
    left: list[Run],
    *running: float,
    peaks: Mapping[CostGroup, int],
    seconds: Mapping[CostGroup, float] | None = None,
    at_once: int = 8,
    alone: tuple[Run, ...] = (),
) -> Start[Run] | None:
    taken = [Start(Run("other"), int(size * GIB)) for size in running]
    return Schedule(left, at_once, MEMORY, {**(seconds or {})}, {**peaks}, [*alone]).start(taken)


def on_cpu(left: list[Run], running: int = 0, seconds: Mapping[CostGroup, float] | None = None) -> Start[Run] | None:
    return Schedule(left, 2, seconds={**(seconds or {})}).start([Start(Run("other"))] * running)


# One after the other


def test_the_longest_run_of_a_seed_comes_first_and_one_of_which_nothing_is_known_before_it() -> None:
    left = [Run(method, seed) for seed in (0, 1) for method in ("fedavg", "scaffold", "fedprox")]
    assert on_cpu(left) == Start(Run("fedavg"))
    seconds = {kind("fedavg"): 5.0, kind("scaffold"): 9.0}
    order = []
    while left:
        start = on_cpu(left, 0, seconds)
        assert start is not None
        assert start.allowance is None
        left.remove(start.run)
        order.append((start.run.method, start.run.seed))
        seconds.setdefault(start.run.kind, 7.0)
    assert order == [
        ("fedprox", 0), ("scaffold", 0), ("fedavg", 0), ("scaffold", 1), ("fedprox", 1), ("fedavg", 1),
    ]  # fmt: skip


def test_on_a_cpu_only_their_number_counts() -> None:
    left = [Run("fedavg"), Run("fedprox")]
    assert on_cpu(left, 1) == Start(Run("fedavg"))
    assert on_cpu(left, 2) is None
    assert on_cpu([]) is None


# On a GPU


def test_an_unmeasured_kind_has_the_device_to_itself() -> None:
    left, peaks = [Run("fedavg"), Run("fedprox")], gib(fedavg=10)
    assert on_gpu(left, peaks=peaks) == Start(Run("fedprox"), MEMORY, measures=True)
    assert on_gpu(left, 11, peaks=peaks) is None, "it waits, and what is known does not overtake it"
    assert on_gpu([Run("fedavg")], 100, peaks=peaks) is None, "nothing starts beside it"


def test_an_unmeasured_kind_comes_before_one_whose_time_alone_is_unknown() -> None:
    left, peaks = [Run("fedavg"), Run("fedprox")], gib(fedavg=10)
    seconds = {kind("fedprox"): 1.0}  # of a run on a CPU
    assert on_gpu(left, peaks=peaks, seconds=seconds) == Start(Run("fedprox"), MEMORY, measures=True)


def test_runs_that_fit_are_under_way_together() -> None:
    left, peaks = [Run("fedavg"), Run("fedprox")], gib(fedavg=40, fedprox=50)
    seconds = {kind("fedavg"): 2.0, kind("fedprox"): 1.0}
    assert on_gpu(left, peaks=peaks, seconds=seconds) == Start(Run("fedavg"), allowance(40 * GIB, MEMORY))
    assert on_gpu(left[1:], 44, peaks=peaks, seconds=seconds) == Start(Run("fedprox"), allowance(50 * GIB, MEMORY))
    assert on_gpu(left[1:], 45.1, peaks=peaks, seconds=seconds) is None
    assert on_gpu(left[1:], 10, 10, peaks=peaks, seconds=seconds, at_once=2) is None, "no more than are asked for"


def test_no_shorter_run_overtakes_one_that_waits_for_memory() -> None:
    peaks, seconds = gib(fedavg=5, fedprox=50), {kind("fedavg"): 1.0, kind("fedprox"): 9.0}
    assert on_gpu([Run("fedavg"), Run("fedprox")], 50, peaks=peaks, seconds=seconds) is None


def test_an_allowance_is_the_peak_with_a_margin() -> None:
    assert allowance(10 * GIB, MEMORY) == 11 * GIB
    assert allowance(None, MEMORY) == MEMORY


@pytest.mark.parametrize("size", [95, 120])
def test_one_too_large_for_its_margin_or_the_device_runs_alone(size: float) -> None:
    peaks = gib(fedavg=size)
    assert on_gpu([Run("fedavg")], peaks=peaks) == Start(Run("fedavg"), MEMORY)
    assert on_gpu([Run("fedavg")], 1, peaks=peaks) is None


def test_a_run_that_has_to_be_alone_is() -> None:
    run, peaks = Run("fedavg"), gib(fedavg=10)
    assert on_gpu([run], 11, peaks=peaks, alone=(run,)) is None
    assert on_gpu([run], peaks=peaks, alone=(run,)) == Start(run, MEMORY)


# What is said


@pytest.mark.parametrize(
    ("peaks", "at_once", "count"),
    [
        (gib(fedavg=10, fedprox=60), 8, 4),  # 3 x 11 + 66
        (gib(fedavg=10, fedprox=61), 8, 3),
        (gib(fedavg=10, fedprox=10), 2, 2),
        ({}, 8, 1),
    ],
)
def test_how_many_fit(peaks: dict[CostGroup, int], at_once: int, count: int) -> None:
    runs = [Run("fedavg", 0), Run("fedavg", 1), Run("fedavg", 2), Run("fedprox")]
    assert Schedule(runs, at_once, MEMORY, peaks=peaks).fitting(MEMORY) == count
    assert Schedule([], at_once, MEMORY).fitting(MEMORY) == 1


def test_peaks_are_told_when_all_are_known() -> None:
    runs = [Run(method, seed) for seed in range(3) for method in ("fedavg", "fedprox")]
    schedule = Schedule(runs, 8, MEMORY, peaks=gib(fedavg=10))
    assert [*schedule.messages()] == []
    schedule.peaks = gib(fedavg=10, fedprox=20.6)
    schedule.left = []
    assert [*schedule.messages()] == []
    schedule.left = runs[2:]
    line = "peaks: fedavg 10.0 GiB, fedprox 20.6 GiB; up to 5 runs at a time on 100.0 GiB"
    assert [*schedule.messages()] == [line]


def test_what_is_too_large_is_told() -> None:
    runs = [Run("fedavg", 0, "iid"), Run("fedavg", 1, "iid")]
    schedule = Schedule(runs, 8, MEMORY, peaks={("fedavg", "iid"): 120 * GIB})
    assert [*schedule.messages()] == [
        "peaks: fedavg on iid 120.0 GiB; up to 1 run at a time on 100.0 GiB; "
        "alone, as there is no margin for more: fedavg on iid"
    ]


def test_the_time_that_is_left_counts_what_runs_and_what_waits() -> None:
    fedavg, scaffold = Run("fedavg"), Run("scaffold")
    assert Schedule([fedavg], 2).remaining([]) is None
    seconds = {fedavg.kind: 10.0, scaffold.kind: 30.0}
    assert Schedule([fedavg, fedavg], 2, seconds=seconds).remaining([(scaffold, 10.0)]) == 20.0  # (10 + 10 + 20) / 2
    no_run_is_shared = Schedule([], 2, seconds=seconds).remaining([(scaffold, 5.0), (fedavg, 50.0)])
    assert no_run_is_shared == 25.0
    assert Schedule([Run("fedprox")], 1, seconds=seconds).remaining([]) == 20.0


# A grid from its beginning to its end


def test_a_grid_on_a_gpu_measures_first_and_packs_then() -> None:
    runs = [Run(method, seed) for seed in (0, 1) for method in ("fedavg", "fedprox")]
    schedule = Schedule(runs, 8, MEMORY)
    for method in ("fedavg", "fedprox"):
        assert [*schedule.messages()] == []
        start = schedule.start([])
        assert start == Start(Run(method), MEMORY, measures=True)
        assert schedule.start([start]) is None
        schedule.learn(start.run, 10.0, 20 * GIB)
    assert len([*schedule.messages()]) == 1
    assert [*schedule.messages()] == [], "told once"
    first = schedule.start([])
    assert first == Start(Run("fedavg", 1), 22 * GIB)
    second = schedule.start([first])
    assert second == Start(Run("fedprox", 1), 22 * GIB)
    assert schedule.left == []
    assert schedule.remaining([(first.run, 4.0), (second.run, 2.0)]) == 8.0


def test_what_was_measured_before_needs_no_probe() -> None:
    schedule = Schedule([Run("fedavg", 1)], 8, MEMORY)
    schedule.learn(Run("fedavg", 0), 10.0, 20 * GIB)
    assert schedule.start([]) == Start(Run("fedavg", 1), 22 * GIB)


def test_the_largest_peak_of_a_kind_counts() -> None:
    schedule = Schedule([Run("fedavg", 2)], 8, MEMORY)
    for peak in (20 * GIB, 10 * GIB, None):
        schedule.learn(Run("fedavg", 0), 10.0, peak)
    assert schedule.start([]) == Start(Run("fedavg", 2), 22 * GIB)


def test_a_run_that_ran_out_of_its_allowance_begins_once_more_alone() -> None:
    runs = [Run("fedavg", seed) for seed in (1, 2, 3)]
    schedule = Schedule(runs, 2, MEMORY)
    schedule.learn(Run("fedavg", 0), 10.0, 20 * GIB)
    short, other = schedule.start([]), None
    assert short is not None
    other = schedule.start([short])
    assert other is not None
    assert schedule.retry(short)
    assert schedule.left[0] == short.run
    schedule.learn(other.run, 10.0, 19 * GIB)  # a run of its kind that got along
    once_more = schedule.start([])
    assert once_more == Start(short.run, MEMORY)
    assert not schedule.retry(once_more), "it had everything"
    schedule.learn(short.run, 1.0, 5 * GIB)  # of its last round alone
    last = schedule.start([])
    assert last == Start(Run("fedavg", 3), allowance(22 * GIB, MEMORY)), "more than what did not suffice"
    assert schedule.remaining([(last.run, 0.0)]) == 10.0, "the time of a part of a run counts for none"


def test_after_a_run_ran_out_its_kind_is_unmeasured() -> None:
    schedule = Schedule([Run("fedavg", 1), Run("fedavg", 2)], 8, MEMORY)
    schedule.learn(Run("fedavg", 0), 10.0, 20 * GIB)
    short = schedule.start([])
    assert short is not None
    assert schedule.retry(short)
    assert schedule.start([Start(Run("fedprox"), GIB)]) is None
    assert schedule.start([]) == Start(short.run, MEMORY)
    assert schedule.start([]) == Start(Run("fedavg", 2), MEMORY, measures=True)


def test_a_grid_on_a_cpu_tells_nothing_of_memory() -> None:
    schedule = Schedule([Run("fedavg"), Run("fedprox"), Run("local")], 2)
    first = schedule.start([])
    assert first == Start(Run("fedavg"))
    second = schedule.start([first])
    assert second == Start(Run("fedprox"))
    assert schedule.start([first, second]) is None
    assert [*schedule.messages()] == []
    assert not schedule.retry(first)
    schedule.learn(first.run, 6.0, None)
    assert schedule.remaining([(second.run, 0.0)]) == 6.0
