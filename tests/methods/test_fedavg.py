"""FedAvg against its equations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from medfl.methods import load
from medfl.methods.base import sample_shares
from medfl.training.site import snapshot
from tests.support.toy import Toy, bits, judged, quadratic, sgd, simulate

METHOD = load("fedavg")


def pooled(toy: Toy) -> dict[str, tuple[float, Tensor, Tensor]]:
    """Return p_k, A_k and b_k of every site."""
    total = sum(len(x) for x, _ in toy.data.values())
    return {name: (len(x) / total, *quadratic(x, y)) for name, (x, y) in toy.data.items()}


def test_one_step_by_hand() -> None:
    """Two sites, one weight, f(w) = (w x - y)^2 / 2, w = 1, rate 0.1, one step each.

    Site a: one item, x = 1, y = 3: gradient (1 - 3) 1 = -2, so w_a = 1.2.
    Site b: three items, all x = 2, y = 0: gradient (2 - 0) 2 = 4, so w_b = 0.6.
    p = (1/4, 3/4): w = 0.3 + 0.45 = 0.75.
    """
    data = {
        "a": (torch.ones(1, 1).double(), torch.tensor([3.0]).double()),
        "b": (torch.full((3, 1), 2.0).double(), torch.zeros(3).double()),
    }
    toy = Toy(data, lambda: torch.nn.Linear(1, 1, bias=False).double(), optimizer=sgd(0.1))
    with torch.no_grad():
        toy.networks.initial["weight"].fill_(1)
    outcome = simulate(METHOD, toy)
    assert outcome.replies["a"]["weights"]["weight"].item() == pytest.approx(1.2, abs=1e-15)
    assert outcome.replies["b"]["weights"]["weight"].item() == pytest.approx(0.6, abs=1e-15)
    assert outcome.server["weights"]["weight"].item() == pytest.approx(0.75, abs=1e-15)


def test_shares_sum_to_one_and_equal_models_are_returned(classes: Toy) -> None:
    outcome = simulate(METHOD, classes)
    assert sum(sample_shares(outcome.replies).values()) == pytest.approx(1, abs=1e-15)
    same = {
        name: replace(reply, tensors=outcome.replies["a"].tensors)
        for name, reply in outcome.replies.items()
    }
    averaged = METHOD.aggregate(classes.host(), outcome.server, same, 3)["weights"]
    for name, tensor in outcome.replies["a"]["weights"].items():
        torch.testing.assert_close(averaged[name], tensor, rtol=1e-6, atol=1e-7)


def test_one_full_step_a_site_is_centralised_descent_and_finds_the_minimiser(lines: Toy) -> None:
    parts = pooled(lines)
    a, b = sum(p * a for p, a, _ in parts.values()), sum(p * b for p, _, b in parts.values())
    outcome = simulate(METHOD, replace(lines, optimizer=sgd(0.3)), rounds=170)
    start, first = lines.initial["weight"][0], outcome.history[1]["weights"]["weight"][0]
    torch.testing.assert_close(first, start - 0.3 * (a @ start - b), rtol=0, atol=1e-15)
    torch.testing.assert_close(
        outcome.server["weights"]["weight"][0], torch.linalg.solve(a, b), rtol=0, atol=1e-13
    )


def test_five_local_steps_drift_to_another_fixed_point(lines: Toy) -> None:
    """K steps of rate e map w to M_k w + (I - M_k) w_k*, M_k = (I - e A_k)^K, w_k* = A_k^-1 b_k.

    Averaging gives the fixed point (I - sum p_k M_k)^-1 sum p_k (I - M_k) w_k*, which is not the minimiser.
    """
    toy = replace(lines, epochs=5, optimizer=sgd(0.3))
    eye = torch.eye(3, dtype=torch.float64)
    a, b, left, right = (
        torch.zeros(shape, dtype=torch.float64) for shape in ((3, 3), 3, (3, 3), 3)
    )
    for p, a_k, b_k in pooled(lines).values():
        map_k = torch.linalg.matrix_power(eye - 0.3 * a_k, 5)
        left, right = (
            left + p * (eye - map_k),
            right + p * (eye - map_k) @ torch.linalg.solve(a_k, b_k),
        )
        a, b = a + p * a_k, b + p * b_k
    fixed, minimiser = torch.linalg.solve(left, right), torch.linalg.solve(a, b)
    reached = simulate(METHOD, toy, rounds=50).server["weights"]["weight"][0]
    torch.testing.assert_close(reached, fixed, rtol=0, atol=1e-12)
    assert (reached - minimiser).norm() > 1e-2


def test_the_order_of_sites_changes_no_bit(classes: Toy) -> None:
    turned = replace(classes, data=dict(reversed(classes.data.items())))
    assert bits(simulate(METHOD, turned, 3).server) == bits(simulate(METHOD, classes, 3).server)


def test_every_reply_is_the_local_training_of_the_received_model(classes: Toy) -> None:
    from medfl.training.site import fit

    outcome = simulate(METHOD, classes, 2)
    for name in classes.names:
        site = classes.site(name, 2)
        model = site.model(outcome.history[1]["weights"])
        fit(model, site)
        assert bits(snapshot(model)) == bits(dict(outcome.replies[name]["weights"]))
        assert outcome.replies[name].scalars == {"samples": len(classes.data[name][0])}


def test_shares_are_those_of_the_participants(lines: Toy) -> None:
    outcome = simulate(METHOD, lines, cohorts=[["a", "c"]])
    a, c = (outcome.replies[name]["weights"]["weight"] for name in ("a", "c"))
    torch.testing.assert_close(
        outcome.server["weights"]["weight"], (6 * a + 18 * c) / 24, rtol=0, atol=1e-15
    )


def test_sites_keep_nothing_and_are_judged_by_the_global_model(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 2)
    assert outcome.states == dict.fromkeys("abc", {})
    assert METHOD.judged == "global"
    with classes.networks.scope():
        network = METHOD.global_predictor(classes.host(), outcome.server)
        assert bits(snapshot(network)) == bits(outcome.server["weights"])
    assert bits(judged(METHOD, classes, outcome, "b")) == bits(outcome.server["weights"])
