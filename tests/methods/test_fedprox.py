"""FedProx against its equations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from medfl.methods import load
from tests.support.toy import Toy, bits, quadratic, sgd, simulate

FEDAVG = load("fedavg")


def test_one_step_by_hand() -> None:
    """One item x = 1, y = 0, f(w) = w^2 / 2, w^t = 1, rate 0.5, mu = 2, two steps.

    Step 1: gradient 1 + 2 (1 - 1) = 1, w = 0.5. Step 2: 0.5 + 2 (0.5 - 1) = -0.5, w = 0.75.
    With the norm not squared, or mu for mu / 2, step 2 would differ.
    """
    data = {"a": (torch.ones(1, 1).double(), torch.zeros(1).double())}
    toy = Toy(
        data, lambda: torch.nn.Linear(1, 1, bias=False).double(), optimizer=sgd(0.5), epochs=2
    )
    toy.networks.initial["weight"].fill_(1)
    outcome = simulate(load("fedprox", mu=2.0), toy)
    assert outcome.server["weights"]["weight"].item() == 0.75


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "weight_decay": 0.01}]
)
def test_mu_zero_is_fedavg_bit_for_bit(classes: Toy, settings: dict) -> None:
    toy = replace(classes, optimizer=sgd(0.1, **settings), epochs=7)  # 14 to 21 steps a site
    prox, average = simulate(load("fedprox", mu=0.0), toy, 2), simulate(FEDAVG, toy, 2)
    assert bits(prox.server) == bits(average.server)
    assert bits(prox.replies) == bits(average.replies)


def test_the_first_step_of_a_round_has_no_pull(classes: Toy) -> None:
    toy = replace(classes, batch_size=100)
    prox, average = simulate(load("fedprox", mu=10.0), toy), simulate(FEDAVG, toy)
    assert bits(prox.replies) == bits(average.replies)
    longer = replace(toy, epochs=2)
    assert bits(simulate(load("fedprox", mu=10.0), longer).replies) != bits(
        simulate(FEDAVG, longer).replies
    )


def test_a_constant_loss_leaves_the_received_weights(classes: Toy) -> None:
    toy = replace(classes, loss=lambda output, target: 0 * output.sum(), epochs=3)
    outcome = simulate(load("fedprox", mu=5.0), toy)
    for reply in outcome.replies.values():
        for name in ("0.weight", "0.bias", "4.weight"):
            assert bits(reply["weights"][name]) == bits(toy.initial[name])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_fixed_point_on_a_quadratic(lines: Toy, momentum: float) -> None:
    """A w - b + mu (w - w^t) = 0, so w = (A + mu I)^-1 (b + mu w^t) and ||w - w^t|| = ||A w - b|| / mu."""
    mu = 0.8
    toy = replace(lines, epochs=300, optimizer=sgd(0.1, momentum=momentum))
    replies = simulate(load("fedprox", mu=mu), toy).replies
    start = toy.initial["weight"][0]
    for name, (x, y) in toy.data.items():
        a, b = quadratic(x, y)
        w = replies[name]["weights"]["weight"][0]
        fixed = torch.linalg.solve(a + mu * torch.eye(3, dtype=torch.float64), b + mu * start)
        torch.testing.assert_close(w, fixed, rtol=0, atol=1e-12)
        assert (w - start).norm().item() == pytest.approx((a @ w - b).norm().item() / mu, abs=1e-12)


def test_the_pull_is_a_term_of_the_loss(lines: Toy) -> None:
    """With momentum the term must pass through the velocity; written out here as part of the loss, in float64."""
    toy = replace(lines, epochs=6, optimizer=sgd(0.05, momentum=0.9))
    replies = simulate(load("fedprox", mu=0.5), toy).replies
    for name, (x, y) in toy.data.items():
        model = toy.networks.fresh()
        start, optimizer = toy.initial["weight"], toy.optimizer(model)
        for _ in range(6):
            optimizer.zero_grad()
            (toy.loss(model(x), y) + 0.25 * (model.weight - start).square().sum()).backward()
            optimizer.step()
        torch.testing.assert_close(
            replies[name]["weights"]["weight"], model.weight.detach(), rtol=0, atol=1e-13
        )


def test_buffers_are_not_pulled(classes: Toy) -> None:
    """BatchNorm's statistics after one batch are those of FedAvg whatever mu is."""
    toy = replace(classes, batch_size=100)
    strong, average = simulate(load("fedprox", mu=100.0), toy), simulate(FEDAVG, toy)
    assert bits(strong.server["weights"]["1.running_var"]) == bits(
        average.server["weights"]["1.running_var"]
    )


def test_each_round_pulls_towards_what_it_received(lines: Toy) -> None:
    """Round 2 is round 1 of a run that starts where round 1 ended."""
    method, toy = load("fedprox", mu=5.0), replace(lines, epochs=4)
    second = simulate(method, toy, 2)
    restarted = replace(toy)
    restarted.networks.initial["weight"].copy_(second.history[1]["weights"]["weight"])
    again = simulate(method, restarted).server["weights"]["weight"]
    torch.testing.assert_close(again, second.server["weights"]["weight"], rtol=0, atol=1e-13)
    assert (again - second.history[1]["weights"]["weight"]).norm() > 1e-3
