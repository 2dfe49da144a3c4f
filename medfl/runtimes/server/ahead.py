"""The training of a round, which may begin before the round before has been evaluated, and whose seconds are whose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from medfl.runtimes.step import StepResult


class Training:
    """A round's training, from its beginning.

    Args:
        round_: which round.
        cohort: the sites that train.
        told: called whenever a site's answer has come.

    Attributes:
        answers: what training gives at each site, and whether there is a new State.
        left_out: the reason of each site without a reply.
        began: when, in seconds of `time.perf_counter`.
        beside: seconds of it that went by while the round before was evaluated; 0 where it had been already.
    """

    answers: Iterator[tuple[str, tuple[StepResult, bool]]]

    def __init__(self, round_: int, cohort: list[str], told: Callable[[], Any]) -> None:
        """Begin the clock."""
        self.round, self.cohort = round_, cohort
        self.left_out: dict[str, str] = {}
        self.began, self.beside = time.perf_counter(), 0.0
        self._told, self._open, self._last = told, len(cohort), 0.0

    def came(self) -> None:
        """Note that a site's answer has come."""
        self._open -= 1
        self._last = time.perf_counter()
        self._told()

    def rest(self, ended: float) -> float:
        """Divide the time from the beginning until the round before has been evaluated, so that none counts twice.

        What goes by until the last answer has come is this training's (`beside`).

        Args:
            ended: when the evaluation ended.

        Returns:
            The seconds that it went on after that.
        """
        self.beside = (ended if self._open else self._last) - self.began
        return ended - self.began - self.beside
