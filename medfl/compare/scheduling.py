"""Which run of a grid starts when: seed after seed, the longest first, so many at once as are asked for and fit.

On a GPU each run has an allowance of its memory: what the largest run of its kind took, and a margin. A run of a kind
that nobody has measured has the device to itself, and so has one of which a margin is not to be had. Those come first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from medfl.core.gpu_memory import format_gib

Kind = tuple[str, str | None]
"""What takes the same time and memory with any seed: a method as it was typed, and a partition."""

MARGIN = 1.1
"""By which an allowance is larger than the peak that was measured."""


class Waiting(Protocol):
    """A run that has not begun."""

    @property
    def seed(self) -> int:
        """Its seed."""

    @property
    def kind(self) -> Kind:
        """What it has in common with runs of other seeds."""


R = TypeVar("R", bound=Waiting)


@dataclass(frozen=True)
class Start(Generic[R]):
    """A run that may start now.

    Attributes:
        run: the run.
        allowance: bytes of the device that it may take; None on a CPU.
        measures: whether it has the device to itself because nobody has measured its kind.
    """

    run: R
    allowance: int | None = None
    measures: bool = False


class Schedule(Generic[R]):
    """What is known of a grid while it runs: what is left, how long each kind takes and how much memory.

    Attributes:
        left: runs that have not begun.
    """

    def __init__(self, runs: Sequence[R], at_once: int, memory: int | None = None) -> None:
        """Begin with nothing known.

        Args:
            runs: seed after seed.
            at_once: how many run at the same time at most.
            memory: bytes of the device that they share; None on a CPU.
        """
        self.left, self._runs, self._at_once, self._memory = [*runs], runs, at_once, memory
        self._took: dict[Kind, float] = {}
        self._peaks: dict[Kind, int] = {}
        self._exceeded: dict[Kind, int] = {}
        self._alone: list[R] = []
        self._said = ""

    def learn(self, run: R, seconds: float | None, peak: int | None) -> None:
        """Take in what a run that is over tells: its time, and its bytes of the device where it was on one.

        One that went on from its last round tells of a part of itself: neither its time counts, nor fewer bytes than
        it has exceeded before.
        """
        kind = run.kind
        if seconds is not None and run not in self._alone:
            self._took[kind] = seconds
        if peak is not None:
            self._peaks[kind] = max(peak, self._peaks.get(kind, 0), self._exceeded.get(kind, 0))

    def start(self, running: Sequence[Start[R]]) -> Start[R] | None:
        """Return the run that may start now beside the running ones, and count it as begun; see `next_start`."""
        found = next_start(
            self.left,
            [begun.allowance for begun in running],
            took=self._took,
            peaks=self._peaks,
            memory=self._memory,
            at_once=self._at_once,
            alone=self._alone,
        )
        if found:
            self.left.remove(found.run)
        return found

    def again(self, start: Start[R]) -> bool:
        """Let a run that ran out of its allowance begin once more, alone; False if it had the whole device already.

        Its kind counts as unmeasured until a run tells.
        """
        if self._memory is None or start.allowance is None or start.allowance >= self._memory:
            return False
        self._exceeded[start.run.kind] = max(start.allowance, self._exceeded.get(start.run.kind, 0))
        self._peaks.pop(start.run.kind, None)
        self._alone.append(start.run)
        self.left.insert(0, start.run)
        return True

    def news(self) -> Iterator[str]:
        """Yield how many runs the device takes at once, whenever that is decided anew."""
        if self._memory is None:
            return
        line = described(self._runs, self.left, self._peaks, self._memory, self._at_once)
        if line and line != self._said:
            self._said = line
            yield line

    def remaining(self, running: Sequence[tuple[R, float]]) -> float | None:
        """Return about how many seconds are left, None while nothing is known; see `remaining`."""
        together = self._at_once
        if self._memory is not None:
            together = most([run.kind for run in self._runs], self._peaks, self._memory, together)
        return remaining(self.left, running, self._took, together)


def allowance(peak: int | None, memory: int) -> int:
    """Return how many of a device's bytes a run may take: its kind's peak with a margin; all, where nobody knows it."""
    return memory if peak is None else min(memory, math.ceil(MARGIN * peak))


def next_start(
    left: Sequence[R],
    running: Sequence[int | None],
    *,
    took: Mapping[Kind, float],
    peaks: Mapping[Kind, int],
    memory: int | None,
    at_once: int,
    alone: Collection[R] = (),
) -> Start[R] | None:
    """Return the run that may start now, None while it has to wait: no other overtakes it, lest it never begin.

    Args:
        left: runs that have not begun, seed after seed.
        running: the allowances of those that have.
        took: kind -> seconds of a run that is over. Of a seed's runs those of unknown kinds come first, and tell.
        peaks: kind -> bytes of the device.
        memory: bytes of the device that runs share; None on a CPU.
        at_once: runs at the same time at most.
        alone: runs that have to have the device to themselves, whatever is known of their kind.
    """
    if not left or len(running) >= at_once:
        return None

    def order(run: R) -> tuple[bool, float]:
        unmeasured = memory is not None and (run.kind not in peaks or run in alone)
        return unmeasured, took.get(run.kind, math.inf)

    run = max((one for one in left if one.seed == left[0].seed), key=order)
    if memory is None:
        return Start(run)
    share = allowance(None if run in alone else peaks.get(run.kind), memory)
    if running and sum(taken or 0 for taken in running) + share > memory:
        return None
    return Start(run, share, run.kind not in peaks and run not in alone)


def most(kinds: Iterable[Kind], peaks: Mapping[Kind, int], memory: int, at_once: int) -> int:
    """Return how many runs of these kinds, one of each mention, fit on a device together, at least 1."""
    shares = sorted(allowance(peaks.get(kind), memory) for kind in kinds)
    fitting = sum(taken <= memory for taken in accumulate(shares))
    return max(1, min(fitting, at_once))


def described(
    runs: Sequence[Waiting], left: Sequence[Waiting], peaks: Mapping[Kind, int], memory: int, at_once: int
) -> str:
    """Return a line about how many runs a device takes at once, "" where none is left or one's kind is unmeasured.

    Args:
        runs: all of the grid.
        left: those that have not begun.
        peaks: kind -> bytes of the device.
        memory: bytes of the device that runs share.
        at_once: runs at the same time at most.
    """
    if not left or any(run.kind not in peaks for run in left):
        return ""
    kinds = [run.kind for run in runs if run.kind in peaks]
    count = most(kinds, peaks, memory, at_once)
    told = ", ".join(f"{named(kind)} {format_gib(peaks[kind])}" for kind in dict.fromkeys(kinds))
    line = f"peaks: {told}; up to {count} {'run' if count == 1 else 'runs'} at a time on {format_gib(memory)}"
    large = [named(kind) for kind in dict.fromkeys(kinds) if MARGIN * peaks[kind] > memory]
    return line + (f"; alone, as there is no margin for more: {', '.join(large)}" if large else "")


def named(kind: Kind) -> str:
    """Return what a kind is called in messages."""
    label, partition = kind
    return f"{label} on {partition}" if partition else label


def remaining(
    left: Sequence[Waiting], running: Sequence[tuple[Waiting, float]], took: Mapping[Kind, float], at_once: int
) -> float | None:
    """Return about how many seconds a grid will still take, None while nothing is known.

    Args:
        left: runs that have not begun.
        running: those that have, with the seconds since.
        took: kind of run -> seconds of one that is over; of other kinds their mean is taken.
        at_once: runs at the same time.
    """
    if not took:
        return None
    mean = sum(took.values()) / len(took)
    rest = [max(0.0, took.get(run.kind, mean) - since) for run, since in running]
    whole = [took.get(run.kind, mean) for run in left]
    return max([sum(rest + whole) / at_once, *rest])
