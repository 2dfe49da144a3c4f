"""Whose seconds are whose while a round's training goes on beside the evaluation of the one before."""

from __future__ import annotations

import pytest

from medfl.runtimes.server import dispatch
from medfl.runtimes.server.dispatch import RoundTraining


class Clock:
    """Begins with the training of two sites at 100 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(dispatch.time, "perf_counter", lambda: self.now)
        self.told = 0
        self.training = RoundTraining(3, ["x", "y"], self.tell)

    def tell(self) -> None:
        self.told += 1

    def came(self, at: float) -> None:
        self.now = at
        self.training.count_result()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_an_evaluation_that_ends_before_the_training_costs_nothing(clock: Clock) -> None:
    clock.came(at=104)
    assert clock.training.evaluation_seconds(105) == 0
    assert clock.training.overlap == 5
    clock.came(at=107)
    assert clock.training.overlap == 5, "the rest is counted where it is waited for"
    assert clock.told == 2


def test_an_evaluation_that_goes_on_costs_what_it_lasts_longer(clock: Clock) -> None:
    clock.came(at=104)
    clock.came(at=107)
    assert clock.training.evaluation_seconds(109.5) == 2.5
    assert clock.training.overlap == 7


def test_a_training_that_begins_after_the_evaluation_is_beside_nothing(clock: Clock) -> None:
    clock.came(at=104)
    clock.came(at=107)
    assert (clock.training.started, clock.training.overlap) == (100, 0)
