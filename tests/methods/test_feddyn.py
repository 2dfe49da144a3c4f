"""FedDyn against its equations, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.methods import load
from medfl.training.site import Site
from tests.support.toy import Outcome, Toy, bits, linear, quadratic, sgd, simulate

HALVES = [["a", "c"], ["b", "d"], ["a", "b"], ["c", "d"], ["a", "d"], ["b", "c"]]


def close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


class Newton(torch.optim.Optimizer):
    """One step goes to the minimiser of a quadratic with this inverse Hessian."""

    def __init__(self, network: nn.Module, inverse: Tensor) -> None:
        super().__init__(list(network.parameters()), {"lr": 1.0})
        self.inverse = inverse

    @torch.no_grad()
    def step(self) -> None:
        weight = self.param_groups[0]["params"][0]
        weight -= weight.grad @ self.inverse


class Exact(Toy):
    """Every site solves its local problem exactly."""

    alpha = 0.5

    def site(self, name: str, round_: int = 1) -> Site:
        site = super().site(name, round_)
        a, _ = quadratic(*self.data[name])
        inverse = torch.linalg.inv(a + self.alpha * torch.eye(len(a), dtype=a.dtype))
        return replace(
            site,
            settings=replace(site.settings, optimizer=lambda network: Newton(network, inverse)),
        )


def g(state: dict, alpha: float = Exact.alpha) -> Tensor:
    """g_k of a site, or h of the server."""
    return -alpha * state["history"]["weight"][0]


@pytest.fixture
def exact(lines: Toy) -> Toy:
    return Exact(lines.data)


def run(toy: Toy, rounds: int, cohorts: list | None = None, **options: object) -> Outcome:
    return simulate(
        load("feddyn", alpha=Exact.alpha, max_norm=0.0, **options), toy, rounds, cohorts
    )


def test_two_rounds_by_hand() -> None:
    """Sites a: f = w^2 / 2 and b: f = (w - 4)^2 / 2, alpha = 1, rate 0.5, one step a round (it is exact), w = 1.

    Round 1, g = 0. a: gradient 1, w_a = 0.5, g_a = -(0.5 - 1) = 0.5. b: gradient -3, w_b = 2.5, g_b = -1.5.
    h = -(1/2)(-0.5 + 1.5) = -0.5; w = 1.5 + 0.5 = 2.
    Round 2. a: gradient 2 - 0.5 + 0 = 1.5, w_a = 1.25, g_a = 0.5 - (1.25 - 2) = 1.25.
    b: gradient -2 + 1.5 = -0.5, w_b = 2.25, g_b = -1.5 - 0.25 = -1.75.
    h = -0.5 - (1/2)(-0.75 + 0.25) = -0.25; w = 1.75 + 0.25 = 2, the minimiser of both.
    """
    data = {
        name: (torch.ones(1, 1).double(), torch.tensor([y]).double())
        for name, y in (("a", 0.0), ("b", 4.0))
    }
    toy = Toy(data, lambda: linear(1), optimizer=sgd(0.5))
    toy.networks.initial["weight"].fill_(1)
    expected = {1: (0.5, 2.5, 0.5, -1.5, -0.5, 2.0), 2: (1.25, 2.25, 1.25, -1.75, -0.25, 2.0)}
    for rounds, (w_a, w_b, g_a, g_b, h, w) in expected.items():
        outcome = simulate(load("feddyn", alpha=1.0), toy, rounds)
        assert [outcome.replies[name]["weights"]["weight"].item() for name in "ab"] == [w_a, w_b]
        assert [g(outcome.states[name], 1.0).item() for name in "ab"] == [g_a, g_b]
        assert (g(outcome.server, 1.0).item(), outcome.server["weights"]["weight"].item()) == (h, w)


@pytest.mark.parametrize("cohorts", [None, HALVES])
def test_h_is_the_mean_of_all_g(lines: Toy, cohorts: list | None) -> None:
    """Check 1, with several inexact steps, whoever takes part: h = (1/m) sum_k g_k."""
    for rounds in (1, 3, 6):
        outcome = run(replace(lines, epochs=3), rounds, cohorts)
        total = sum(g(state) for state in outcome.states.values())
        close(g(outcome.server), total / 4, 1e-8)


def test_at_an_exact_minimiser_the_gradient_is_the_new_g(exact: Toy) -> None:
    """Check 2."""
    for rounds in (1, 2, 5):
        outcome = run(exact, rounds)
        for name in exact.names:
            a, b = quadratic(*exact.data[name])
            close(
                a @ outcome.replies[name]["weights"]["weight"][0] - b, g(outcome.states[name]), 1e-9
            )


def test_round_one_goes_twice_the_mean_way(lines: Toy) -> None:
    """Check 3: w^1 = 2 mean(w_k) - w^0, the plain mean."""
    outcome = run(replace(lines, epochs=3), 1)
    mean = torch.stack([reply["weights"]["weight"] for reply in outcome.replies.values()]).mean(0)
    close(outcome.server["weights"]["weight"], 2 * mean - lines.initial["weight"])


@pytest.mark.parametrize("cohorts", [None, HALVES * 60])
def test_it_converges_to_the_minimiser_of_the_sum(exact: Toy, cohorts: list | None) -> None:
    """Check 4: error below 1e-12, also with 2 of 4 sites a round; h and the sum of the g_k vanish."""
    parts = [quadratic(x, y) for x, y in exact.data.values()]
    minimiser = torch.linalg.solve(sum(a for a, _ in parts), sum(b for _, b in parts))
    outcome = run(exact, 150 if cohorts is None else 360, cohorts)
    close(outcome.server["weights"]["weight"][0], minimiser)
    close(g(outcome.server), torch.zeros(3).double())
    close(sum(g(state) for state in outcome.states.values()), torch.zeros(3).double())


def test_the_penalty_is_squared_and_passes_through_momentum(lines: Toy) -> None:
    """Round 2 at a site against the loss f - <g, w> + (alpha/2) ||w - w^t||^2 written out."""
    toy = replace(lines, epochs=5, optimizer=sgd(0.05, momentum=0.9))
    first, second = (run(toy, rounds) for rounds in (1, 2))
    received = first.server["weights"]["weight"]
    for name, (x, y) in toy.data.items():
        model = toy.networks.fresh()
        with torch.no_grad():
            model.weight.copy_(received)
        optimizer = toy.optimizer(model)
        for _ in range(5):
            optimizer.zero_grad()
            loss = toy.loss(model(x), y) - (g(first.states[name]) * model.weight).sum()
            (loss + Exact.alpha / 2 * (model.weight - received).square().sum()).backward()
            optimizer.step()
        close(second.replies[name]["weights"]["weight"], model.weight.detach())


def test_the_gradient_is_clipped_after_the_terms_are_added(lines: Toy) -> None:
    toy = replace(lines, optimizer=sgd(1.0))
    outcome = simulate(load("feddyn", max_norm=0.25), toy)
    for reply in outcome.replies.values():
        assert (reply["weights"]["weight"] - toy.initial["weight"]).norm().item() == pytest.approx(
            0.25, rel=1e-4
        )
    small = replace(lines, optimizer=sgd(0.01))
    assert bits(simulate(load("feddyn"), small).server) == bits(
        simulate(load("feddyn", max_norm=0.0), small).server
    )


def test_alpha_by_size() -> None:
    """n = 6 and 18: mean 12, so alpha is doubled at a and 2/3 at b; equal sizes change nothing."""
    data = {
        name: (torch.ones(n, 1).double(), torch.zeros(n).double())
        for name, n in (("a", 6), ("b", 18))
    }
    toy = Toy(data, lambda: linear(1), optimizer=sgd(0.5), epochs=2)
    toy.networks.initial["weight"].fill_(1)
    outcome = simulate(load("feddyn", alpha=0.3, alpha_scaling="by_size"), toy)
    for name, alpha in (("a", 0.6), ("b", 0.2)):  # 1 -> 0.5 -> 0.5 - 0.5 (0.5 + alpha (0.5 - 1))
        assert outcome.replies[name]["weights"]["weight"].item() == pytest.approx(
            0.25 + 0.25 * alpha, abs=1e-15
        )
    same = replace(toy, data={"a": data["a"], "b": data["a"]})
    plain, scaled = (
        simulate(load("feddyn", alpha_scaling=how), same, 2) for how in ("none", "by_size")
    )
    assert bits(plain.server["weights"]) == bits(scaled.server["weights"])


def test_the_model_judged(lines: Toy) -> None:
    outcome = run(lines, 3)
    mean = torch.stack([reply["weights"]["weight"] for reply in outcome.replies.values()]).mean(0)
    with lines.networks.scope():
        corrected, smooth = (
            load("feddyn", evaluate=how).global_predictor(lines.host(3), outcome.server)
            for how in ("corrected", "mean")
        )
        assert bits(corrected.weight) == bits(outcome.server["weights"]["weight"])
        close(smooth.weight.detach(), mean)


def test_corrections_cover_trainable_parameters_only_and_buffers_follow_fedavg(
    classes: Toy,
) -> None:
    toy = replace(classes, optimizer=sgd(0.0))
    dyn, average = simulate(load("feddyn"), toy, 2), simulate(load("fedavg"), toy, 2)
    assert set(dyn.server["history"]) == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "4.weight",
        "4.bias",
    }
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        torch.testing.assert_close(dyn.server["weights"][name], average.server["weights"][name])


def test_absent_sites_keep_g(lines: Toy) -> None:
    first, second = (run(lines, rounds, [["a", "b"], ["b"]]) for rounds in (1, 2))
    assert bits(second.states["a"]) == bits(first.states["a"])
    assert bits(second.states["b"]) != bits(first.states["b"])


def test_alpha_is_above_zero() -> None:
    with pytest.raises(InputError, match="alpha"):
        load("feddyn", alpha=0.0)
