"""FedDG-GA against its equations: gaps by hand, shares in NumPy, FedAvg without a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from medfl.methods import load
from medfl.methods.feddgga import adjusted
from tests.support.toy import Toy, bits, linear, sgd, simulate, three_classes


def two_sites() -> Toy:
    """Sites a: f = w^2 / 2, b: f = (w - 4)^2 / 2; rate 0.5, one step a round, w = 1."""
    data = {
        name: (torch.ones(n, 1).double(), torch.full((n,), y).double())
        for name, n, y in (("a", 1, 0.0), ("b", 3, 4.0))
    }
    toy = Toy(data, lambda: linear(1), optimizer=sgd(0.5))
    toy.networks.initial["weight"].fill_(1)
    return toy


def test_two_rounds_by_hand() -> None:
    """Round 1: w_a = 0.5 with the loss 0.125, w_b = 2.5 with 1.125; no gap: w = (0.5 + 2.5) / 2 = 1.5.

    Round 2: the losses of 1.5 are 1.125 and 3.125, so the gaps 1 and 2, 0.5 below and above their mean; d_2 = 0.4 / 2:
    a_a = 0.5 - 0.2, a_b = 0.5 + 0.2. w_a = 0.75, w_b = 2.75: w = 0.3 * 0.75 + 0.7 * 2.75.
    """
    method = load("feddgga", step=0.4, rounds=2)
    first, second = (simulate(method, two_sites(), rounds) for rounds in (1, 2))
    assert first.server["weights"]["weight"].item() == 1.5
    assert first.server["shares"] == {"a": 0.5, "b": 0.5}
    assert second.replies["a"].scalars == {"samples": 1, "gap": 2.0}
    assert second.replies["b"].scalars == {"samples": 3, "gap": 3.0}
    assert second.server["shares"] == pytest.approx({"a": 0.3, "b": 0.7}, abs=1e-15)
    assert second.server["weights"]["weight"].item() == pytest.approx(2.15, abs=1e-12)
    assert method.observed(second.server, second.replies)["weight/b"] == pytest.approx(0.7)


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_those_of_the_equation(seed: int) -> None:
    draws = np.random.default_rng(seed)
    shares, gaps = draws.random(6), draws.normal(size=6)
    a = shares / shares.sum()
    a = np.maximum(0, a + 0.3 * (gaps - gaps.mean()) / np.abs(gaps - gaps.mean()).max())
    names = "abcdef"
    found = adjusted(
        dict(zip(names, shares, strict=True)), dict(zip(names, gaps, strict=True)), 0.3
    )
    np.testing.assert_allclose(list(found.values()), a / a.sum(), rtol=0, atol=1e-15)


def test_shares_without_gaps_and_without_any_weight() -> None:
    assert adjusted({"a": 1.0, "b": 3.0}, {}, 0.5) == {"a": 0.25, "b": 0.75}
    assert adjusted({"a": 0.5, "b": 0.5}, {"a": 3.0, "b": 3.0}, 0.5) == {"a": 0.5, "b": 0.5}
    assert adjusted({"a": 0.0, "b": 0.0}, {}, 0.5) == {"a": 0.5, "b": 0.5}
    # a site that does not know its gap keeps its share but for the sum
    moved = adjusted({"a": 0.4, "b": 0.4, "c": 0.2}, {"a": 1.0, "b": 2.0}, 0.1)
    assert moved == pytest.approx({"a": 0.3, "b": 0.5, "c": 0.2})


def test_a_cohort_keeps_its_part_of_all_weight_and_the_absent_theirs() -> None:
    toy = three_classes()
    method = load("feddgga", rounds=4)
    outcome = simulate(method, toy, 3, [["a", "b", "c"], ["a", "b"], ["a", "b"]])
    shares = outcome.server["shares"]
    assert shares["c"] == pytest.approx(1 / 3)
    assert shares["a"] + shares["b"] == pytest.approx(2 / 3)
    assert shares["a"] != pytest.approx(1 / 3)


def test_without_a_step_it_is_fedavg_bit_for_bit() -> None:
    toy = replace(three_classes(), optimizer=sgd(0.1, momentum=0.9))
    cohorts = [["a", "b"], ["b", "c"], ["a", "b", "c"]]
    neutral = simulate(load("feddgga", step=0, weights="samples"), toy, 3, cohorts)
    average = simulate(load("fedavg"), toy, 3, cohorts)
    assert bits(neutral.server["weights"]) == bits(average.server["weights"])
    assert bits(neutral.replies) == bits(average.replies)
    uniform = simulate(load("feddgga", step=0), toy, 3, cohorts)
    assert bits(uniform.server["weights"]) != bits(average.server["weights"])
