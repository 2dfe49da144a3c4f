"""Visits abreast: one at a time, in an order that the tasks decide, each with its own random numbers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from medfl.core.seeding import stream
from medfl.training.accelerate.interleave import Cancelled, current_visit, interleave


def meeting(name: str, times: int, log: list[str]) -> str:
    visit = current_visit()
    assert visit is not None
    for number in range(times):
        log.append(f"{name}{number}")
        visit.wait_for(f"{name}{number}")
    log.append(f"{name} ends")
    return name


def test_all_that_wait_are_served_together_and_others_take_the_place_of_who_has_ended() -> None:
    log: list[str] = []
    met: list[list[str]] = []
    tasks = (partial(meeting, name, times, log) for name, times in (("a", 1), ("b", 3), ("c", 2), ("d", 0)))
    results = list(interleave(tasks, 2, lambda requests: met.append(list(requests))))
    assert results == ["a", "b", "c", "d"]
    assert met == [["a0", "b0"], ["b1", "c0"], ["b2", "c1"]]
    assert log == ["a0", "b0", "a ends", "b1", "c0", "b2", "c1", "b ends", "c ends", "d ends"]


def test_tasks_are_taken_when_there_is_room() -> None:
    taken: list[int] = []

    def tasks() -> Any:
        for number in range(5):
            taken.append(number)
            yield partial(meeting, str(number), 1, [])

    results = interleave(tasks(), 2, lambda requests: None)
    next(results)
    assert len(taken) == 2
    assert len(list(results)) == 4


def test_there_is_no_visit_outside() -> None:
    assert current_visit() is None
    assert list(interleave(iter([lambda: current_visit() is not None]), 1, lambda requests: None)) == [True]
    assert current_visit() is None


def test_each_visit_draws_what_it_draws_alone_and_nothing_of_others() -> None:
    def draws(name: str, meet: Callable[[], None]) -> list[float]:
        found = []
        with stream(3, name):
            for _ in range(4):
                found += [float(torch.rand(())), float(np.random.rand()), random.random()]  # noqa: NPY002, TID251
                meet()
        return found

    def visiting(name: str) -> list[float]:
        visit = current_visit()
        assert visit is not None
        return draws(name, partial(visit.wait_for, name))

    def disturbing(requests: Sequence[str]) -> None:
        torch.rand(7)

    alone = [draws(name, lambda: None) for name in "abc"]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    assert list(interleave((partial(visiting, name) for name in "abc"), 3, lambda requests: None)) == alone
    assert torch.equal(torch.rand(3), expected)
    assert list(interleave((partial(visiting, name) for name in "abc"), 2, disturbing)) == alone


def test_context_variables_are_those_of_the_caller_and_stay_with_the_visit() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="none")
    variable.set("outer")

    def visiting(name: str) -> list[str]:
        visit, before = current_visit(), variable.get()
        assert visit is not None
        variable.set(name)
        visit.wait_for(name)
        return [before, variable.get()]

    made = list(interleave((partial(visiting, name) for name in "ab"), 2, lambda requests: None))
    assert made == [["outer", "a"], ["outer", "b"]]
    assert variable.get() == "outer"


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_an_error_ends_all_visits(error: BaseException) -> None:
    log: list[str] = []
    left: list[BaseException] = []

    def waiting() -> None:
        try:
            meeting("a", 3, log)
        except BaseException as ended:
            left.append(ended)
            raise

    def failing() -> None:
        raise error

    before = threading.active_count()
    with pytest.raises(type(error)):
        list(interleave(iter([waiting, failing]), 2, lambda requests: None))
    assert [type(ended) for ended in left] == [Cancelled]
    assert threading.active_count() == before


def test_an_error_of_what_is_done_together_ends_all_visits() -> None:
    def together(requests: Sequence[Any]) -> None:
        raise RuntimeError("out of memory")

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="out of memory"):
        list(interleave((partial(meeting, name, 2, []) for name in "abc"), 2, together))
    assert threading.active_count() == before


def test_visits_end_when_nobody_wants_the_rest() -> None:
    before = threading.active_count()
    results = interleave((partial(meeting, name, times, []) for name, times in (("a", 1), ("b", 9))), 2, lambda r: None)
    assert next(results) == "a"
    results.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
