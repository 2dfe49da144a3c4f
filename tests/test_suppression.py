"""Counts that may be told: nothing follows from what is told, and noise is what it says."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medfl.partner.suppression import geometric, noised, told_counts
from tests.test_leaving import repeated


def test_cells_below_the_least_count_are_not_told() -> None:
    told, total = told_counts({"a": 40, "b": 9, "c": 0, "d": 50}, 10)
    assert told == {"a": 40, "b": None, "c": None, "d": 50}  # b + c = 9: both may be anything below 10
    assert total == 99


def test_one_small_cell_takes_the_smallest_others_with_it() -> None:
    """b = 3 of 63 would be 63 - 60. With c = 20 hidden too, all that is known is b + c = 23, c at least 10: b below 14,
    so b may be anything below 10.
    """
    assert told_counts({"a": 40, "b": 3, "c": 20}, 10)[0] == {"a": 40, "b": None, "c": None}


def test_tables_without_small_cells_are_told_as_they_are_and_small_totals_are_not() -> None:
    assert told_counts({"a": 10, "b": 30}, 10) == ({"a": 10, "b": 30}, 40)
    assert told_counts({"a": 4, "b": 5}, 10) == ({"a": None, "b": None}, None)
    assert told_counts({"a": 0, "b": 5}, 0) == ({"a": 0, "b": 5}, 5)


def possible(told: dict[str, int | None], total: int, small: set[str], least: int) -> dict[str, set[int]]:
    """All values of the small cells that fit what is told, to somebody who knows which cells are small."""
    hidden = [name for name, count in told.items() if count is None]
    rest = total - sum(count for count in told.values() if count is not None)
    ranges = [range(least) if name in small else range(least, rest + 1) for name in hidden]
    fits = [values for values in itertools.product(*ranges) if sum(values) == rest]
    return {name: {values[i] for values in fits} for i, name in enumerate(hidden) if name in small}


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(2, 4))
def test_nothing_follows_from_the_total_but_that_small_cells_are_small(counts: list[int], least: int) -> None:
    """By trying all values. Where all cells are hidden that is not always so: the total itself is then all there is."""
    named = {str(i): count for i, count in enumerate(counts)}
    told, total = told_counts(named, least)
    small = {name for name, count in named.items() if count < least}
    assert all(told[name] is None for name in small)
    assert all(count is None or count == named[name] for name, count in told.items())
    if total is not None and any(count is not None for count in told.values()):
        for values in possible(told, total, small, least).values():
            assert values == set(range(least))


def test_noise_is_the_geometric_mechanism() -> None:
    """P(n) = (1 - q) / (1 + q) q^|n| with q = exp(-epsilon): variance 2 q / (1 - q)^2."""
    epsilon, count = 0.7, 200_000
    drawn = np.array(geometric(count, epsilon, repeated(2)))
    q = math.exp(-epsilon)
    for n in range(-3, 4):
        assert np.mean(drawn == n) == pytest.approx((1 - q) / (1 + q) * q ** abs(n), abs=0.004)
    assert drawn.mean() == pytest.approx(0, abs=0.02)
    assert drawn.var() == pytest.approx(2 * q / (1 - q) ** 2, rel=0.03)


def test_noise_is_whole_independent_and_never_the_same_twice() -> None:
    counts = {str(i): 100 for i in range(50)}
    one, other = noised(counts, 0.1), noised(counts, 0.1)
    assert one.keys() == counts.keys()
    assert one != other
    assert len(set(one.values())) > 10
    assert all(float(value).is_integer() for value in one.values())
