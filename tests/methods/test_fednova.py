"""FedNova against its equations, in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn

from medfl.methods import load
from medfl.methods._parts.effective_steps import effective_steps
from medfl.training.site import Site
from tests.support.toy import (
    Optimizer,
    Toy,
    adam,
    bits,
    blobs,
    classifier,
    cross_entropy,
    linear,
    quadratic,
    sgd,
    simulate,
)

METHOD, FEDAVG = load("fednova"), load("fedavg")


def close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


@dataclass
class Uneven(Toy):
    """Every site takes its own number of full-batch steps."""

    steps: dict[str, int] = field(default_factory=lambda: {"a": 1, "b": 2, "c": 8, "d": 20})

    def site(self, name: str, round_: int = 1) -> Site:
        site = super().site(name, round_)
        return replace(site, settings=replace(site.settings, epochs=self.steps[name]))


def uneven(lines: Toy, optimizer: Optimizer) -> Uneven:
    return Uneven(lines.data, optimizer=optimizer)


def worth(
    steps: int, optimizer: Optimizer, mu: float = 0.0, lr_decay: float = 1.0, round_: int = 1
) -> float:
    toy = Toy(
        {"a": (torch.ones(1, 3).double(), torch.ones(1).double())},
        optimizer=optimizer,
        lr_decay=lr_decay,
    )
    with toy.networks.scope():
        site = toy.site("a", round_)
        return effective_steps(site, site.model(site.initial_weights), steps, mu)


def test_one_round_by_hand() -> None:
    """Sites a: f = w^2 / 2, one item, one step; b: f = (w - 4)^2 / 2, three items in batches of one, three steps.

    Rate 0.5, w = 1, p = 1/4 and 3/4. w_a = 0.5, d_a = 0.5; w_b = 2.5, 3.25, 3.625, d_b = -2.625 / 3 = -0.875.
    tau_eff = 1/4 + 9/4 = 2.5; w = 1 - 2.5 (0.5 / 4 - 0.875 * 3 / 4) = 2.328125, where FedAvg has 2.84375.
    """
    data = {
        name: (torch.ones(n, 1).double(), torch.full((n,), y).double())
        for name, n, y in (("a", 1, 0.0), ("b", 3, 4.0))
    }
    toy = Toy(data, lambda: linear(1), optimizer=sgd(0.5), batch_size=1)
    toy.networks.initial["weight"].fill_(1)
    outcome = simulate(METHOD, toy)
    assert {name: dict(reply.scalars) for name, reply in outcome.replies.items()} == {
        "a": {"samples": 1, "effective_steps": 1},
        "b": {"samples": 3, "effective_steps": 3},
    }
    close(outcome.server["weights"]["weight"], torch.tensor([[2.328125]]).double())
    assert simulate(FEDAVG, toy).server["weights"]["weight"].item() == 2.84375


@pytest.mark.parametrize(
    "optimizer",
    [sgd(0.1), sgd(0.1, momentum=0.9), sgd(0.1, momentum=0.5, weight_decay=0.01), adam(0.01)],
)
def test_equal_steps_are_fedavg_bit_for_bit(optimizer: Optimizer) -> None:
    """Check 1: 5, 8 and 7 items are two batches of four at most, whatever the optimiser, with BatchNorm and dropout."""
    toy = Toy(
        blobs({"a": 5, "b": 8, "c": 7}),
        classifier(True, 0.3),
        cross_entropy,
        optimizer,
        epochs=3,
        batch_size=4,
    )
    nova, average = simulate(METHOD, toy, 3), simulate(FEDAVG, toy, 3)
    assert bits(nova.server["weights"]) == bits(average.server["weights"])
    uneven_sites = replace(toy, data=blobs({"a": 5, "b": 9}))
    assert bits(simulate(METHOD, uneven_sites).server) != bits(
        simulate(FEDAVG, uneven_sites).server
    )


def test_steps_with_momentum() -> None:
    """Check 2: a = [K - rho (1 - rho^K) / (1 - rho)] / (1 - rho)."""
    assert worth(7, sgd(0.1, momentum=0.9)) == pytest.approx(23.046721, abs=1e-12)
    assert worth(1, sgd(0.1, momentum=0.9)) == worth(1, sgd(0.3, momentum=0.5)) == 1
    assert worth(20, sgd(0.1, momentum=0.5)) == pytest.approx(38.000001907, abs=1e-9)
    for steps, rho in ((3, 0.9), (50, 0.7)):
        closed = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        assert worth(steps, sgd(0.1, momentum=rho)) == pytest.approx(closed, rel=1e-12)


def test_steps_of_other_optimisers() -> None:
    """Plain SGD and Adam: K. Weight decay is part of the gradient. Nesterov: sum of 1 + rho c with c <- rho c + 1."""
    assert worth(9, sgd(0.1)) == worth(9, sgd(0.1, weight_decay=0.3)) == 9
    assert worth(9, adam(0.01)) == pytest.approx(9, abs=1e-6)
    assert worth(2, sgd(0.1, momentum=0.5, nesterov=True)) == pytest.approx(1.5 + 1.75)


def test_steps_with_a_proximal_term() -> None:
    """a = [1 - (1 - eta mu)^K] / (eta mu) for plain SGD, eta the rate of the round: 0.1 * 0.5 in the second."""
    for round_, rate in ((1, 0.1), (2, 0.05)):
        closed = (1 - (1 - rate * 0.8) ** 6) / (rate * 0.8)
        assert worth(6, sgd(0.1), 0.8, lr_decay=0.5, round_=round_) == pytest.approx(
            closed, rel=1e-12
        )


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}])
def test_a_constant_gradient_comes_out_again(settings: dict, mu: float) -> None:
    """Check 3: f = <g, w> at every site and step; (w - w_k) / (eta a_k) = g, so the server moves by eta tau_eff g."""
    g = torch.tensor([1.0, -2, 0.5]).double()
    toy = Uneven(
        {name: (g[None].repeat(2, 1), torch.zeros(2)) for name in ("a", "b")},
        loss=lambda output, target: output.mean(),
        optimizer=sgd(0.1, **settings),
        steps={"a": 3, "b": 8},
    )
    outcome, start = simulate(load("fednova", mu=mu), toy), toy.initial["weight"][0]
    for reply in outcome.replies.values():
        close((start - reply["weights"]["weight"][0]) / (0.1 * reply.scalars["effective_steps"]), g)
    told = [reply.scalars for reply in outcome.replies.values()]
    reach = sum(scalars["steps" if mu else "effective_steps"] for scalars in told) / 2
    close((start - outcome.server["weights"]["weight"][0]) / (0.1 * reach), g)


def test_it_stays_near_the_minimiser_and_fedavg_does_not(lines: Toy) -> None:
    """Check 4: K = 1, 2, 8, 20, p = 0.1, 0.2, 0.3, 0.4; FedAvg goes to the minimiser of sum_k p_k K_k f_k."""
    toy = uneven(lines, sgd(5e-3))
    shares = {name: len(x) / 60 for name, (x, _) in toy.data.items()}
    parts = {name: quadratic(x, y) for name, (x, y) in toy.data.items()}
    a, b = (sum(shares[name] * parts[name][i] for name in shares) for i in (0, 1))
    minimiser = torch.linalg.solve(a, b)
    toy.networks.initial["weight"].copy_(minimiser)
    far = {}
    for name in ("fednova", "fedavg"):
        server = simulate(load(name), toy, 12).server
        far[name] = (server["weights"]["weight"][0] - minimiser).norm().item()
    assert far["fednova"] < 0.03
    assert far["fedavg"] > 0.3


@pytest.mark.parametrize(
    ("optimizer", "mu"), [(sgd(0.05), 0.0), (sgd(0.02, momentum=0.9), 0.0), (sgd(0.05), 0.6)]
)
def test_the_servers_step(lines: Toy, optimizer: Optimizer, mu: float) -> None:
    """w - tau_eff sum_k p_k (w - w_k) / a_k from the replies; with mu tau_eff = sum_k p_k K_k."""
    toy = uneven(lines, optimizer)
    outcome = simulate(load("fednova", mu=mu), toy, 2)
    w = outcome.history[1]["weights"]["weight"]
    shares = {name: len(x) / 60 for name, (x, _) in toy.data.items()}
    a = {name: reply.scalars["effective_steps"] for name, reply in outcome.replies.items()}
    reach = sum(p * (toy.steps[name] if mu else a[name]) for name, p in shares.items())
    step = sum(
        p * (w - outcome.replies[name]["weights"]["weight"]) / a[name] for name, p in shares.items()
    )
    close(outcome.server["weights"]["weight"], w - reach * step)
    assert all(("steps" in reply.scalars) == bool(mu) for reply in outcome.replies.values())


def test_local_training_is_fedprox_bit_for_bit(classes: Toy) -> None:
    toy = replace(classes, optimizer=sgd(0.1, momentum=0.9), epochs=2)
    for mu in (0.0, 0.5):
        nova, prox = simulate(load("fednova", mu=mu), toy), simulate(load("fedprox", mu=mu), toy)
        for name in toy.names:
            assert bits(nova.replies[name]["weights"]) == bits(prox.replies[name]["weights"])


def test_the_servers_momentum(lines: Toy) -> None:
    """v <- 0.5 v + (plain step), w <- w + v: the first step is the plain one, the second half of it longer."""
    toy = uneven(lines, sgd(0.02))
    plain, heavy = (simulate(load("fednova", server_momentum=rho), toy, 2) for rho in (0.0, 0.5))
    first, second = (server["weights"]["weight"] for server in heavy.history[1:])
    close(first, plain.history[1]["weights"]["weight"])
    restarted = replace(toy)
    restarted.networks.initial["weight"].copy_(first)
    plain_step = simulate(METHOD, restarted).server["weights"]["weight"] - first
    close(second - first, plain_step + 0.5 * (first - toy.initial["weight"]))
    assert "velocity" not in plain.server


def test_buffers_are_averaged_by_samples_and_frozen_parameters_stay() -> None:
    def frozen() -> nn.Module:
        network = classifier(norm=True)()
        network[0].requires_grad_(False)
        return network

    toy = Toy(blobs({"a": 4, "b": 12}), frozen, cross_entropy, sgd(0.1), batch_size=4)
    outcome = simulate(METHOD, toy)
    sent = {name: reply["weights"] for name, reply in outcome.replies.items()}
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(
            outcome.server["weights"][name], 0.25 * sent["a"][name] + 0.75 * sent["b"][name]
        )
    assert outcome.server["weights"]["1.num_batches_tracked"] == 3
    torch.testing.assert_close(
        outcome.server["weights"]["0.weight"], toy.initial["0.weight"], rtol=1e-6, atol=0
    )
