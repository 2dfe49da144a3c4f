"""Ditto: FedAvg, and a personal model at each site."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from medfl.methods import load
from tests.support.toy import (
    Toy,
    bits,
    blobs,
    classifier,
    cross_entropy,
    judged,
    quadratic,
    sgd,
    simulate,
)


def test_two_rounds_by_hand() -> None:
    """One site, x = 1, y = 0, f(w) = w^2 / 2, start 1, rate 0.5, lambda = 1, one step a round.

    Round 1: w^1 = 0.5; v = 1 - 0.5 (1 + 1 (1 - 1)) = 0.5.
    Round 2: received 0.5, w^2 = 0.25; v = 0.5 - 0.5 (0.5 + (0.5 - 0.5)) = 0.25.
    With two steps a round, round 1: w 1, 0.5, 0.25; v 1, 0.5, then 0.5 - 0.5 (0.5 + (0.5 - 1)) = 0.5, since the pull is
    towards the received model 1, not towards the trained one.
    """
    data = {"a": (torch.ones(1, 1).double(), torch.zeros(1).double())}
    toy = Toy(data, lambda: torch.nn.Linear(1, 1, bias=False).double(), optimizer=sgd(0.5))
    toy.networks.initial["weight"].fill_(1)
    for epochs, rounds, w, v in ((1, 1, 0.5, 0.5), (1, 2, 0.25, 0.25), (2, 1, 0.25, 0.5)):
        changed = replace(toy, epochs=epochs)
        changed.networks.initial["weight"].fill_(1)
        outcome = simulate(load("ditto", lam=1.0), changed, rounds)
        assert outcome.server["weights"]["weight"].item() == w
        assert outcome.states["a"]["personal"]["weight"].item() == v


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_lambda_zero_is_local_training_bit_for_bit(classes: Toy, settings: dict) -> None:
    """With BatchNorm, dropout and short batches too: both see the same batches and the same dropout."""
    toy = replace(classes, optimizer=sgd(0.1, **settings), epochs=2)
    ditto, local = load("ditto", lam=0.0), load("local")
    personal, alone = simulate(ditto, toy, 3), simulate(local, toy, 3)
    for name in toy.names:
        assert bits(personal.states[name]["personal"]) == bits(alone.states[name]["weights"])
        assert bits(judged(ditto, toy, personal, name)) == bits(judged(local, toy, alone, name))


@pytest.mark.parametrize("lam", [0.0, 0.5, 2.0])
def test_the_global_model_is_fedavgs_bit_for_bit(classes: Toy, lam: float) -> None:
    toy = replace(classes, optimizer=sgd(0.1, momentum=0.9))
    cohorts = [["a", "b"], ["b", "c"], ["a", "b", "c"]]
    ditto, average = (
        simulate(load("ditto", lam=lam), toy, 3, cohorts),
        simulate(load("fedavg"), toy, 3, cohorts),
    )
    assert bits(ditto.server) == bits(average.server)
    assert bits(ditto.replies) == bits(average.replies)


@pytest.mark.parametrize("lam", [1.0, 2.0])
def test_the_fixed_point_on_a_quadratic(lines: Toy, lam: float) -> None:
    """A v - b + lambda (v - w) = 0, so v = (A + lambda I)^-1 (b + lambda w), w the received model."""
    toy = replace(lines, epochs=150, optimizer=sgd(0.3))
    outcome = simulate(load("ditto", lam=lam), toy)
    received = toy.initial["weight"][0]
    for name, (x, y) in toy.data.items():
        a, b = quadratic(x, y)
        fixed = torch.linalg.solve(a + lam * torch.eye(3, dtype=torch.float64), b + lam * received)
        torch.testing.assert_close(
            outcome.states[name]["personal"]["weight"][0], fixed, rtol=0, atol=1e-12
        )


def test_a_strong_pull_gives_the_received_model(lines: Toy) -> None:
    toy = replace(lines, epochs=50, optimizer=sgd(1e-3))
    outcome = simulate(load("ditto", lam=900.0), toy)
    for state in outcome.states.values():
        assert (state["personal"]["weight"] - toy.initial["weight"]).norm() < 0.01


def test_the_personal_model_trains_only_when_sampled_and_never_leaves(classes: Toy) -> None:
    method = load("ditto")
    first, second = (
        simulate(method, classes, rounds, [["a", "b"], ["b", "c"]]) for rounds in (1, 2)
    )
    assert bits(second.states["a"]) == bits(first.states["a"])
    assert bits(second.states["b"]) != bits(first.states["b"])
    assert all(set(reply.tensors) == {"weights"} for reply in second.replies.values())
    unseen = simulate(method, classes, 1, [["a"]])
    assert bits(judged(method, classes, unseen, "c")) == bits(classes.initial)


def test_buffers_are_two_sets_and_are_not_pulled(classes: Toy) -> None:
    """With rate 0 only the statistics move; the personal ones follow the site's data alone, however strong the pull."""
    toy = replace(classes, optimizer=sgd(0.0))
    outcome, local = simulate(load("ditto", lam=5.0), toy, 3), simulate(load("local"), toy, 3)
    for name in toy.names:
        own = outcome.states[name]["personal"]["1.running_mean"]
        assert bits(own) == bits(local.states[name]["weights"]["1.running_mean"])
        assert not torch.equal(own, outcome.server["weights"]["1.running_mean"])


def test_the_judged_model_is_the_personal_one() -> None:
    method = load("ditto")
    toy = Toy(blobs({"a": 6, "b": 6}), classifier(), cross_entropy)
    outcome = simulate(method, toy, 2)
    assert method.judged == "personal"
    for name in toy.names:
        assert bits(judged(method, toy, outcome, name)) == bits(outcome.states[name]["personal"])
    with toy.networks.scope():
        network = method.global_predictor(toy.host(), outcome.server)
        assert bits(dict(network.state_dict())) == bits(outcome.server["weights"])
