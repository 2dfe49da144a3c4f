"""The training of a round, which may start before the previous round has been evaluated, and how its time counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from medfl.runtimes.step import StepResult


class RoundTraining:
    """The training of one round, from its start.

    Attributes:
        results: the result of each site, and whether it has a new State.
        left_out: the reason of each site without a reply.
        started: when, in seconds of `time.perf_counter`.
        overlap: seconds of it that the evaluation of the previous round took too; 0 where that had ended before.
    """

    results: Iterator[tuple[str, tuple[StepResult, bool]]]

    def __init__(self, round_: int, cohort: list[str], on_result: Callable[[], object]) -> None:
        self.round = round_
        self.cohort = cohort
        self.left_out: dict[str, str] = {}
        self.started = time.perf_counter()
        self.overlap = 0.0
        self._on_result = on_result
        self._open = len(cohort)
        self._last = 0.0

    def count_result(self) -> None:
        """Note that a site's result has come."""
        self._open -= 1
        self._last = time.perf_counter()
        self._on_result()

    def evaluation_seconds(self, ended: float) -> float:
        """Return how long the previous round's evaluation, which has `ended`, went on after the last result.

        The time before that is this training's (`overlap`), so that none counts twice.
        """
        # results that are still open: this training goes on, so all of the evaluation lies within it
        self.overlap = (ended if self._open else self._last) - self.started
        return ended - self.started - self.overlap
