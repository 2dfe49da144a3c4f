"""pFedMe against its equations, in float64 where they are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medfl.methods import load
from medfl.storage.files import State
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

METHOD = load("pfedme")
BUFFERS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def row(weights: State) -> Tensor:
    return weights["weight"][0]


def by_hand(
    toy: Toy, name: str, w: Tensor, rate: float, lam: float, eta: float, inner: int
) -> tuple[Tensor, Tensor]:
    """Walk a round of full batches: K steps on theta, one on w_i, for each local epoch."""
    a, b = quadratic(*toy.data[name])
    theta = w
    for _ in range(toy.epochs):
        for _ in range(inner):
            theta = theta - rate * (a @ theta - b + lam * (theta - w))
        w = w - eta * lam * (w - theta)
    return theta, w


# A site's round


def test_a_round_by_hand() -> None:
    """f = theta^2 / 2, w = 1, rate 0.5, lambda = 1, K = 2, eta = 0.5, two batches.

    Batch 1: theta = 1 - 0.5 (1 + 0) = 0.5, then 0.5 - 0.5 (0.5 + (0.5 - 1)) = 0.5; w = 1 - 0.5 (1 - 0.5) = 0.75.
    Batch 2, theta from 0.5: 0.5 - 0.5 (0.5 - 0.25) = 0.375, then 0.375 - 0.5 (0.375 + (0.375 - 0.75)) = 0.375;
    w = 0.75 - 0.5 (0.75 - 0.375) = 0.5625.
    """
    data = {"a": (torch.ones(1, 1).double(), torch.zeros(1).double())}
    toy = Toy(data, lambda: nn.Linear(1, 1, bias=False).double(), optimizer=sgd(0.5), epochs=2)
    toy.networks.initial["weight"].fill_(1)
    outcome = simulate(load("pfedme", lam=1.0, inner_steps=2, eta=0.5), toy)
    assert row(outcome.states["a"]["personal"]).item() == 0.375
    assert (
        row(outcome.replies["a"]["weights"]).item()
        == row(outcome.server["weights"]).item()
        == 0.5625
    )


def test_three_rounds_with_the_papers_numbers(lines: Toy) -> None:
    """Theta starts from w in every round; the rate of the run and eta decay."""
    toy = replace(lines, epochs=3, optimizer=sgd(0.05), lr_decay=0.5)
    for rounds in (1, 2, 3):
        outcome = simulate(METHOD, toy, rounds)
        w, decay = row(outcome.history[-2]["weights"]), 0.5 ** (rounds - 1)
        sent = []
        for name in toy.names:
            theta, own = by_hand(toy, name, w, 0.05 * decay, 15, 0.005 * decay, 5)
            close(row(outcome.states[name]["personal"]), theta)
            close(row(outcome.replies[name]["weights"]), own)
            sent.append(own)
        close(row(outcome.server["weights"]), torch.stack(sent).mean(0))


@pytest.mark.parametrize(("lam", "rate"), [(1.0, 0.3), (15.0, 0.05)])
def test_many_inner_steps_reach_the_minimiser_and_w_steps_by_the_envelopes_gradient(
    lines: Toy, lam: float, rate: float
) -> None:
    """theta = (A + lambda I)^-1 (b + lambda w), and (w - w_i) / eta = grad F_i(w) by autograd = lambda (w - theta)."""
    eta, eye = 0.01, torch.eye(3, dtype=torch.float64)
    toy = replace(lines, optimizer=sgd(rate))
    outcome = simulate(load("pfedme", lam=lam, inner_steps=200, eta=eta), toy)
    for name, (x, y) in toy.data.items():
        a, b = quadratic(x, y)
        w = toy.initial["weight"][0].requires_grad_()
        theta = torch.linalg.solve(a + lam * eye, b + lam * w)
        envelope = 0.5 * theta @ a @ theta - b @ theta + 0.5 * lam * (theta - w).square().sum()
        (gradient,) = torch.autograd.grad(envelope, w)
        close(gradient, (lam * (w - theta)).detach())
        close(row(outcome.states[name]["personal"]), theta.detach())
        close(row(outcome.replies[name]["weights"]), (w - eta * gradient).detach())
        assert (theta - w).norm() > 0.01


@pytest.mark.parametrize("epochs", [1, 3])
def test_with_eta_lambda_one_w_is_theta(classes: Toy, epochs: int) -> None:
    outcome = simulate(load("pfedme", lam=4.0, eta=0.25), replace(classes, epochs=epochs))
    for name in classes.names:
        assert bits(dict(outcome.replies[name]["weights"])) == bits(
            outcome.states[name]["personal"]
        )


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_with_one_inner_step_too_it_is_fedavg_bit_for_bit(classes: Toy, settings: dict) -> None:
    """K = 1 and eta lambda = 1: theta = w_i before each step, so nothing pulls."""
    toy = replace(classes, optimizer=sgd(0.1, **settings), epochs=2)
    cohorts = [["a", "b"], ["b", "c"], ["a", "b", "c"]]
    outcome = simulate(
        load("pfedme", lam=4.0, eta=0.25, inner_steps=1, weights="samples"), toy, 3, cohorts
    )
    average = simulate(load("fedavg"), toy, 3, cohorts)
    assert bits(outcome.server) == bits(average.server)
    assert bits(outcome.replies) == bits(average.replies)
    several = simulate(
        load("pfedme", lam=4.0, eta=0.25, inner_steps=2, weights="samples"), toy, 3, cohorts
    )
    assert bits(several.server) != bits(average.server)


def test_without_lambda_w_stays_and_theta_trains_alone(classes: Toy) -> None:
    toy = replace(classes, optimizer=sgd(0.1, momentum=0.9))
    outcome, local = (
        simulate(load("pfedme", lam=0.0, inner_steps=1), toy),
        simulate(load("local"), toy),
    )
    for name in toy.names:
        assert bits(outcome.states[name]["personal"]) == bits(local.states[name]["weights"])
        sent = outcome.replies[name]["weights"]
        assert all(
            bits(sent[key]) == bits(value)
            for key, value in toy.initial.items()
            if key not in BUFFERS
        )


def test_a_strong_pull_leaves_theta_at_w(lines: Toy) -> None:
    toy = replace(lines, epochs=20, optimizer=sgd(1e-3))
    outcome = simulate(load("pfedme", lam=900.0, eta=0.0), toy)
    for name in toy.names:
        assert (row(outcome.states[name]["personal"]) - row(toy.initial)).norm() < 0.01
        assert bits(row(outcome.replies[name]["weights"])) == bits(row(toy.initial))


def test_the_inner_steps_are_on_one_batch(lines: Toy) -> None:
    """Site d: four batches of 6, FedAvg's, three passes each, and the rounds of w_i by hand."""

    def seen(name: str, **options: object) -> tuple[list[Tensor], object]:
        passes: list[Tensor] = []

        def loss(output: Tensor, target: Tensor) -> Tensor:
            passes.append(target)
            return lines.loss(output, target)

        toy = replace(lines, batch_size=6, loss=loss)
        return passes, simulate(load(name, options), toy, cohorts=[["d"]])

    (batches, _), (passes, outcome) = (
        seen("fedavg"),
        seen("pfedme", lam=2.0, inner_steps=3, eta=0.1),
    )
    assert bits(passes) == bits([batch for batch in batches for _ in range(3)])
    assert len({str(bits(batch)) for batch in batches}) == 4
    x, y = lines.data["d"]
    theta = w = row(lines.initial)
    for batch in batches:
        chosen = [int((y == target).nonzero()) for target in batch]
        a, b = quadratic(x[chosen], y[chosen])
        for _ in range(3):
            theta = theta - 0.1 * (a @ theta - b + 2 * (theta - w))
        w = w - 0.2 * (w - theta)
    close(row(outcome.states["d"]["personal"]), theta)
    close(row(outcome.replies["d"]["weights"]), w)


# The server


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0])
def test_the_servers_step(lines: Toy, beta: float, weights: str) -> None:
    method = load("pfedme", beta=beta, weights=weights)
    outcome = simulate(method, lines, 2, [["a", "b", "c", "d"], ["a", "c"]])
    a, c = (row(outcome.replies[name]["weights"]) for name in "ac")
    mean = (a + c) / 2 if weights == "uniform" else (6 * a + 18 * c) / 24
    close(
        row(outcome.server["weights"]),
        (1 - beta) * row(outcome.history[1]["weights"]) + beta * mean,
    )


@pytest.mark.parametrize("beta", [0.0, 1.0, 3.0])
def test_buffers_are_thetas_and_take_the_mean_whatever_beta(classes: Toy, beta: float) -> None:
    outcome = simulate(load("pfedme", beta=beta), classes)
    for key in sorted(BUFFERS):
        sent = [reply["weights"][key] for reply in outcome.replies.values()]
        own = [state["personal"][key] for state in outcome.states.values()]
        assert bits(sent) == bits(own)
        assert len({str(bits(value)) for value in sent}) > 1
        stacked = torch.stack(sent)
        wanted = stacked.max() if key.endswith("tracked") else stacked.mean(0)
        torch.testing.assert_close(outcome.server["weights"][key], wanted)
    moved = bits(outcome.server["weights"]["0.weight"]) != bits(classes.initial["0.weight"])
    assert moved == (beta != 0)


def test_frozen_parameters_stay_and_shared_ones_are_w_under_all_their_names() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.one, self.two, self.head = (
                nn.Linear(8, 8),
                nn.Linear(8, 8),
                nn.Linear(8, 8),
                None,
            )
            self.frozen.requires_grad_(False)
            self.two.weight = self.one.weight
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.two(torch.tanh(self.one(self.frozen(x))))))

    toy = Toy(blobs({"a": 6, "b": 6}), Shared, cross_entropy, sgd(0.05))
    outcome = simulate(load("pfedme", beta=0.5), toy)
    for weights in (
        outcome.server["weights"],
        *(reply["weights"] for reply in outcome.replies.values()),
    ):
        assert (
            bits(weights["one.weight"])
            == bits(weights["two.weight"])
            != bits(toy.initial["one.weight"])
        )
    for reply in outcome.replies.values():
        assert bits(reply["weights"]["frozen.weight"]) == bits(toy.initial["frozen.weight"])
    assert bits(outcome.server["weights"]["frozen.weight"]) == bits(toy.initial["frozen.weight"])


# What stays and what is judged


def test_theta_stays_at_its_site_and_is_what_is_judged(classes: Toy) -> None:
    first, second = (simulate(METHOD, classes, rounds, [["a", "b"], ["b"]]) for rounds in (1, 2))
    assert bits(second.states["a"]) == bits(first.states["a"])
    assert bits(second.states["b"]) != bits(first.states["b"])
    for message in [*second.replies.values(), *second.down.values()]:
        assert set(message.tensors) == {"weights"}
    for name in ("a", "b"):
        personal = second.states[name]["personal"]
        assert bits(judged(METHOD, classes, second, name)) == bits(personal)
        assert bits(personal) != bits(dict(first.replies[name]["weights"]))
    assert bits(judged(METHOD, classes, second, "c")) == bits(second.server["weights"]), (
        "c never took part"
    )
    assert METHOD.judged == "personal"
    with classes.networks.scope():
        network = METHOD.global_predictor(classes.host(), second.server)
        assert bits(dict(network.state_dict())) == bits(second.server["weights"])


def test_the_old_theta_has_no_part_in_the_next_round(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 1)
    down = METHOD.broadcast(classes.host(2), outcome.server, "a")
    results = []
    for state in (outcome.states["a"], {}):
        with classes.networks.scope():
            results.append(bits(list(METHOD.local_update(classes.site("a", 2), state, down))))
    assert results[0] == results[1]


def test_sites_part_from_each_other_and_from_w() -> None:
    """Two sites with opposite labels: each theta serves its own data, w cannot serve both."""
    x, y = blobs({"a": 30})["a"]
    toy = Toy(
        {"a": (x, y), "b": (x, 2 - y)},
        classifier(),
        cross_entropy,
        sgd(0.1),
        epochs=2,
        batch_size=10,
    )
    outcome = simulate(load("pfedme", eta=0.5, lam=0.2), toy, 6)
    own, other, common = [], [], []
    for name in toy.names:
        with toy.networks.scope():
            for losses, weights in (
                (own, outcome.states[name]["personal"]),
                (other, outcome.states["b" if name == "a" else "a"]["personal"]),
                (common, outcome.server["weights"]),
            ):
                x, y = toy.data[name]
                losses.append(cross_entropy(toy.site(name).model(weights)(x), y).item())
    for mine, foreign, shared in zip(own, other, common, strict=True):
        assert mine < shared < foreign


def test_a_site_is_judged_by_theta_or_by_what_follows_it(classes: Toy) -> None:
    theta, follower = (simulate(load("pfedme", judge=name), classes, 2) for name in ("theta", "w"))
    assert bits(theta.server) == bits(follower.server), "what is judged changes no training"
    for name in classes.names:
        sent = bits(dict(theta.replies[name]["weights"]))
        assert bits(judged(load("pfedme", judge="w"), classes, follower, name)) == sent
        assert bits(judged(METHOD, classes, theta, name)) != sent
    assert METHOD.judge == "theta"
