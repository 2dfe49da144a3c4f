"""Which run of a grid starts when: seed after seed, the longest first, as many at once as requested and as fit.

On a GPU each run has an allowance of its memory: the peak of its kind, with a margin. A run of a kind that has not been
measured runs alone on the device, and so does one whose margin does not fit. Unmeasured kinds come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from medfl.core.gpu_memory import format_gib

CostGroup = tuple[str, str | None]
"""Runs that take the same time and memory with any seed: a method as it was typed, and a partition."""

MARGIN = 1.1
"""Factor of an allowance over the measured peak."""


class Waiting(Protocol):
    """A run that has not started."""

    @property
    def seed(self) -> int:
        """Its seed."""

    @property
    def kind(self) -> CostGroup:
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


@dataclass
class Schedule(Generic[R]):
    """The runs of a grid that are left, and the time and memory of each kind that has been measured.

    Attributes:
        runs: seed after seed; `left` are those that have not started.
        at_once: most runs at the same time.
        memory: bytes of the device that runs share; None on a CPU.
        seconds: kind -> seconds of a run that is over.
        peaks: kind -> bytes of the device.
        retried: runs that need the device to themselves, whatever their kind's peak.
    """

    runs: Sequence[R]
    at_once: int
    memory: int | None = None
    seconds: dict[CostGroup, float] = field(default_factory=dict)
    peaks: dict[CostGroup, int] = field(default_factory=dict)
    retried: list[R] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start with all runs left."""
        self.left = [*self.runs]
        self._exceeded: dict[CostGroup, int] = {}
        self._last_line = ""

    def learn(self, run: R, seconds: float | None, peak: int | None) -> None:
        """Record the time of a run that is over and, where it was on a device, its peak of memory.

        Of a retried run, which went on from its last round, neither the time counts nor a peak below its allowance of
        before.
        """
        kind = run.kind
        if seconds is not None and run not in self.retried:
            self.seconds[kind] = seconds
        if peak is not None:
            self.peaks[kind] = max(peak, self.peaks.get(kind, 0), self._exceeded.get(kind, 0))

    def start(self, running: Sequence[Start[R]]) -> Start[R] | None:
        """Return the run that may start beside the running ones, and take it from `left`; None while it has to wait.

        Of a seed's runs those of unmeasured kinds come first. No other overtakes one that waits: it might never start.
        """
        if not self.left or len(running) >= self.at_once:
            return None

        def order(run: R) -> tuple[bool, float]:
            unmeasured = self.memory is not None and (run.kind not in self.peaks or run in self.retried)
            return unmeasured, self.seconds.get(run.kind, math.inf)

        run = max((other for other in self.left if other.seed == self.left[0].seed), key=order)
        start = Start(run)
        if self.memory is not None:
            share = allowance(None if run in self.retried else self.peaks.get(run.kind), self.memory)
            if running and sum(other.allowance or 0 for other in running) + share > self.memory:
                return None
            start = Start(run, share, run.kind not in self.peaks and run not in self.retried)
        self.left.remove(run)
        return start

    def retry(self, start: Start[R]) -> bool:
        """Put a run that ran out of its allowance first, to run alone; return False if it had the whole device.

        Its kind counts as unmeasured again.
        """
        if self.memory is None or start.allowance is None or start.allowance >= self.memory:
            return False
        self._exceeded[start.run.kind] = max(start.allowance, self._exceeded.get(start.run.kind, 0))
        self.peaks.pop(start.run.kind, None)
        self.retried.append(start.run)
        self.left.insert(0, start.run)
        return True

    def messages(self) -> Iterator[str]:
        """Yield a line on how many runs fit on the device, whenever it has changed and all kinds left are measured."""
        if self.memory is None or not self.left or any(run.kind not in self.peaks for run in self.left):
            return
        kinds = dict.fromkeys(run.kind for run in self.runs if run.kind in self.peaks)
        count = self.fitting(self.memory)
        measured = ", ".join(f"{kind_title(kind)} {format_gib(self.peaks[kind])}" for kind in kinds)
        line = f"peaks: {measured}; up to {count} run{'s' * (count != 1)} at a time on {format_gib(self.memory)}"
        if large := [kind_title(kind) for kind in kinds if MARGIN * self.peaks[kind] > self.memory]:
            line += f"; alone, as there is no margin for more: {', '.join(large)}"
        if line != self._last_line:
            self._last_line = line
            yield line

    def fitting(self, memory: int) -> int:
        """Return how many of the runs fit on a device together, at least 1."""
        shares = sorted(allowance(self.peaks.get(run.kind), memory) for run in self.runs)
        return max(1, min(sum(total <= memory for total in accumulate(shares)), self.at_once))

    def remaining(self, running: Sequence[tuple[R, float]]) -> float | None:
        """Return about how many seconds the grid will still take, None while no run is over.

        `running` has the seconds since each start; runs of a kind of which none is over count as the others' mean.
        """
        if not self.seconds:
            return None
        at_once = self.at_once if self.memory is None else self.fitting(self.memory)
        mean = sum(self.seconds.values()) / len(self.seconds)
        rest = [max(0.0, self.seconds.get(run.kind, mean) - since) for run, since in running]
        whole = [self.seconds.get(run.kind, mean) for run in self.left]
        return max([sum(rest + whole) / at_once, *rest])


def allowance(peak: int | None, memory: int) -> int:
    """Return the bytes of a device that a run may take: its kind's peak with a margin, or all where it is unknown."""
    return memory if peak is None else min(memory, math.ceil(MARGIN * peak))


def kind_title(kind: CostGroup) -> str:
    """Return the name of a kind for messages."""
    label, partition = kind
    return f"{label} on {partition}" if partition else label
