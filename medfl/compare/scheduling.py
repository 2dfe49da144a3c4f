"""Which run of a grid starts when: seed after seed, the longest first, as many at once as requested and as fit.

On a GPU each run has an allowance of its memory: the peak of its kind, with a margin. A run of a kind that has not been
measured runs alone on the device, and so does one whose margin does not fit. Unmeasured kinds come first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from medfl.core.gpu_memory import format_gib

Kind = tuple[str, str | None]
"""Runs that take the same time and memory with any seed: a method as it was typed, and a partition."""

MARGIN = 1.1
"""Factor of an allowance over the measured peak."""


class Waiting(Protocol):
    """A run that has not started."""

    @property
    def seed(self) -> int:
        """Its seed."""

    @property
    def kind(self) -> Kind:
        """Its kind."""


R = TypeVar("R", bound=Waiting)


@dataclass(frozen=True)
class Start(Generic[R]):
    """A run that may start now, and take `allowance` bytes of the device (None on a CPU).

    It `measures` where it runs alone because its kind has not been measured.
    """

    run: R
    allowance: int | None = None
    measures: bool = False


class Schedule(Generic[R]):
    """The runs of a grid that are left, and the time and memory of each kind that has been measured."""

    def __init__(self, runs: Sequence[R], at_once: int, memory: int | None = None) -> None:
        """Take the runs, seed after seed, and the bytes of the device that they share, None on a CPU."""
        self.left, self._runs, self._at_once, self._memory = [*runs], runs, at_once, memory
        self._seconds: dict[Kind, float] = {}
        self._peaks: dict[Kind, int] = {}
        self._exceeded: dict[Kind, int] = {}
        self._retried: list[R] = []
        self._last_line = ""

    def learn(self, run: R, seconds: float | None, peak: int | None) -> None:
        """Record the time of a run that is over and, where it was on a device, its peak of memory.

        Of a retried run, which went on from its last round, neither the time counts nor a peak below its allowance of
        before.
        """
        kind = run.kind
        if seconds is not None and run not in self._retried:
            self._seconds[kind] = seconds
        if peak is not None:
            self._peaks[kind] = max(peak, self._peaks.get(kind, 0), self._exceeded.get(kind, 0))

    def start(self, running: Sequence[Start[R]]) -> Start[R] | None:
        """Return the run that may start beside the running ones, and take it from `left`; see `next_start`."""
        start = next_start(
            self.left,
            [other.allowance for other in running],
            seconds=self._seconds,
            peaks=self._peaks,
            memory=self._memory,
            at_once=self._at_once,
            alone=self._retried,
        )
        if start:
            self.left.remove(start.run)
        return start

    def retry(self, start: Start[R]) -> bool:
        """Put a run that ran out of its allowance first, to run alone; return False if it had the whole device.

        Its kind counts as unmeasured again.
        """
        if self._memory is None or start.allowance is None or start.allowance >= self._memory:
            return False
        self._exceeded[start.run.kind] = max(start.allowance, self._exceeded.get(start.run.kind, 0))
        self._peaks.pop(start.run.kind, None)
        self._retried.append(start.run)
        self.left.insert(0, start.run)
        return True

    def messages(self) -> Iterator[str]:
        """Yield a line on how many runs fit on the device, whenever that has changed."""
        if self._memory is None:
            return
        line = describe_memory(self._runs, self.left, self._peaks, self._memory, self._at_once)
        if line and line != self._last_line:
            self._last_line = line
            yield line

    def remaining(self, running: Sequence[tuple[R, float]]) -> float | None:
        """Return the estimated seconds left, None while no run is over; see `remaining`."""
        at_once = self._at_once
        if self._memory is not None:
            at_once = fitting([run.kind for run in self._runs], self._peaks, self._memory, at_once)
        return remaining(self.left, running, self._seconds, at_once)


def allowance(peak: int | None, memory: int) -> int:
    """Return the bytes of a device that a run may take: its kind's peak with a margin, or all where it is unknown."""
    return memory if peak is None else min(memory, math.ceil(MARGIN * peak))


def next_start(
    left: Sequence[R],
    running: Sequence[int | None],
    *,
    seconds: Mapping[Kind, float],
    peaks: Mapping[Kind, int],
    memory: int | None,
    at_once: int,
    alone: Collection[R] = (),
) -> Start[R] | None:
    """Return the run that may start now, None while it has to wait; no other overtakes it, or it might never start.

    Args:
        left: runs that have not started, seed after seed.
        running: the allowances of those that have.
        seconds: kind -> seconds of a run that is over. Of a seed's runs those of unmeasured kinds come first.
        peaks: kind -> bytes of the device.
        memory: bytes of the device that runs share; None on a CPU.
        at_once: most runs at the same time.
        alone: runs that need the device to themselves, whatever their kind's peak.
    """
    if not left or len(running) >= at_once:
        return None

    def order(run: R) -> tuple[bool, float]:
        unmeasured = memory is not None and (run.kind not in peaks or run in alone)
        return unmeasured, seconds.get(run.kind, math.inf)

    run = max((other for other in left if other.seed == left[0].seed), key=order)
    if memory is None:
        return Start(run)
    share = allowance(None if run in alone else peaks.get(run.kind), memory)
    if running and sum(other or 0 for other in running) + share > memory:
        return None
    return Start(run, share, run.kind not in peaks and run not in alone)


def fitting(kinds: Iterable[Kind], peaks: Mapping[Kind, int], memory: int, at_once: int) -> int:
    """Return how many runs, one for each entry of `kinds`, fit on a device together, at least 1."""
    shares = sorted(allowance(peaks.get(kind), memory) for kind in kinds)
    return max(1, min(sum(total <= memory for total in accumulate(shares)), at_once))


def describe_memory(
    runs: Sequence[Waiting], left: Sequence[Waiting], peaks: Mapping[Kind, int], memory: int, at_once: int
) -> str:
    """Return a line on how many runs fit on the device at once, "" where none is left or a kind is unmeasured."""
    if not left or any(run.kind not in peaks for run in left):
        return ""
    kinds = [run.kind for run in runs if run.kind in peaks]
    count = fitting(kinds, peaks, memory, at_once)
    measured = ", ".join(f"{kind_title(kind)} {format_gib(peaks[kind])}" for kind in dict.fromkeys(kinds))
    line = f"peaks: {measured}; up to {count} {'run' if count == 1 else 'runs'} at a time on {format_gib(memory)}"
    large = [kind_title(kind) for kind in dict.fromkeys(kinds) if MARGIN * peaks[kind] > memory]
    return line + (f"; alone, as there is no margin for more: {', '.join(large)}" if large else "")


def kind_title(kind: Kind) -> str:
    """Return the name of a kind for messages."""
    label, partition = kind
    return f"{label} on {partition}" if partition else label


def remaining(
    left: Sequence[Waiting], running: Sequence[tuple[Waiting, float]], seconds: Mapping[Kind, float], at_once: int
) -> float | None:
    """Return about how many seconds a grid will still take, None while no run is over.

    `running` has the seconds since each start, `seconds` those of a run of a measured kind; others count as their mean.
    """
    if not seconds:
        return None
    mean = sum(seconds.values()) / len(seconds)
    rest = [max(0.0, seconds.get(run.kind, mean) - since) for run, since in running]
    whole = [seconds.get(run.kind, mean) for run in left]
    return max([sum(rest + whole) / at_once, *rest])
