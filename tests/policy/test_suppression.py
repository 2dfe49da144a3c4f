"""Counts that may be told: nothing follows from what is told, and noise is what it says."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from medfl.policy.suppression import add_noise, geometric, hidden_bins, suppress_counts
from tests.policy.test_gate import repeated


def test_cells_below_the_least_count_are_not_told() -> None:
    told, total = suppress_counts({"a": 40, "b": 9, "c": 0, "d": 4, "e": 50}, 10)
    assert told == {
        "a": 40,
        "b": None,
        "c": None,
        "d": None,
        "e": 50,
    }  # 13 together: each may be anything below 10
    assert total == 103


def test_one_small_cell_takes_the_next_others_with_it() -> None:
    """b = 3 of 63 would be 63 - 60. With a = 40 hidden too, all that is known is a + b = 43."""
    assert suppress_counts({"a": 40, "b": 3, "c": 20}, 10)[0] == {"a": None, "b": None, "c": 20}


def test_the_others_are_not_chosen_by_their_size() -> None:
    """Were the smallest other one hidden, a = 9 would follow: of 29 together c has at most b's 20."""
    assert suppress_counts({"a": 9, "b": 20, "c": 20}, 10)[0] == {"a": None, "b": None, "c": 20}
    assert suppress_counts({"a": 1, "b": 28, "c": 20}, 10)[0] == {"a": None, "b": None, "c": 20}


def test_tables_without_small_cells_are_told_as_they_are_and_small_totals_are_not() -> None:
    assert suppress_counts({"a": 10, "b": 30}, 10) == ({"a": 10, "b": 30}, 40)
    assert suppress_counts({"a": 4, "b": 5}, 10) == ({"a": None, "b": None}, None)
    assert suppress_counts({"a": 0, "b": 5}, 0) == ({"a": 0, "b": 5}, 5)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("cells", "least", "most"),
    [(1, 3, 9), (2, 2, 12), (2, 4, 18), (3, 2, 12), (3, 3, 15), (4, 2, 9), (4, 3, 12)],
)
def test_all_values_below_the_least_stay_possible_to_who_knows_all_that_is_told_and_the_rule(
    cells: int, least: int, most: int, first: int
) -> None:
    """By trying all tables, of cells from `first`: those with the same told cells and total may be the true one."""
    names = "abcd"[:cells]
    possible: dict[Any, list[tuple[int, ...]]] = defaultdict(list)
    for table in itertools.product(range(first, most + 1), repeat=cells):
        if sum(table) <= most:  # then all tables of the same total are tried
            told, total = suppress_counts(dict(zip(names, table, strict=True)), least)
            assert all(
                count is None or (count >= least and count == table[i])
                for i, count in enumerate(told.values())
            )
            beside = (
                sum(table) if first == 0 and sum(table) >= least else total
            )  # as the number of images is told
            possible[beside, tuple(told.values())].append(table)
    looked = 0
    for (total, told_cells), tables in possible.items():
        for i, count in enumerate(told_cells):
            small = {table[i] for table in tables if table[i] < least}
            if count is None and small:
                assert small == set(range(first, least)), (total, told_cells, names[i])
                looked += 1
    assert looked > 0


def test_bins_of_few_images_hide_one_of_more_with_them() -> None:
    assert hidden_bins([0, 12, 30], 10) == [True, True, False]
    assert hidden_bins([12, 3, 2, 30], 10) == [True, True, True, False]
    assert hidden_bins([12, 30], 10) == [False, False]
    assert hidden_bins([1, 2], 10) == [True, True]


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
    one, other = add_noise(counts, 0.1), add_noise(counts, 0.1)
    assert one.keys() == counts.keys()
    assert one != other
    assert len(set(one.values())) > 10
    assert all(float(value).is_integer() for value in one.values())
