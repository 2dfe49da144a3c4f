"""FedDC against its equations, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from medfl.core.message import Message
from medfl.methods import load
from medfl.storage.files import State
from tests.support.toy import Outcome, Toy, adam, bits, linear, quadratic, sgd, simulate

ALPHA = 0.5
HALVES = [["a", "c"], ["b", "d"], ["a", "b"], ["c", "d"], ["a", "d"], ["b", "c"]]


def close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def run(toy: Toy, rounds: int, cohorts: list | None = None, **options: object) -> Outcome:
    return simulate(
        load("feddc", **{"alpha": ALPHA, "max_norm": 0.0, **options}), toy, rounds, cohorts
    )


def value(state: State | Message, group: str) -> Tensor:
    return state[group]["weight"][0]


def mean(states: Mapping[str, State], group: str) -> Tensor:
    """The mean over all four sites; one that never took part has 0."""
    return sum(value(state, group) for state in states.values()) / 4


def minimiser(toy: Toy) -> Tensor:
    parts = [quadratic(x, y) for x, y in toy.data.values()]
    return torch.linalg.solve(sum(a for a, _ in parts), sum(b for _, b in parts))


def test_two_rounds_by_hand() -> None:
    """Sites a: f = w^2 / 2 and b: f = (w - 4)^2 / 2, alpha = 1, rate 0.5, one step a round (K eta = 0.5), w = 1.

    Round 1, h = c = 0. a: gradient 1, w_a = 0.5, h_a = -0.5, c_a = 0.5 / 0.5 = 1. b: gradient -3, w_b = 2.5, h_b = 1.5,
    c_b = -3. Server: w = 1.5 + 0.5 = 2, c = (1 - 3) / 2 = -1.
    Round 2. a: gradient 2, penalty w + h_a - 2 = -0.5, c - c_a = -2: w_a = 2 + 0.25, h_a = -0.25,
    c_a = 1 + 1 - 0.5 = 1.5. b: gradient -2, penalty 1.5, c - c_b = 2: w_b = 2 - 0.75, h_b = 0.75,
    c_b = -3 + 1 + 1.5 = -0.5.
    Server: w = 1.75 + 0.25 = 2, the minimiser of both, c = (1.5 - 0.5) / 2 = 0.5.
    """
    data = {
        name: (torch.ones(1, 1).double(), torch.tensor([y]).double())
        for name, y in (("a", 0.0), ("b", 4.0))
    }
    toy = Toy(data, lambda: linear(1), optimizer=sgd(0.5))
    toy.networks.initial["weight"].fill_(1)
    expected = {
        1: ((0.5, 2.5), (-0.5, 1.5), (1, -3), (2, 0.5, -1)),
        2: ((2.25, 1.25), (-0.25, 0.75), (1.5, -0.5), (2, 0.25, 0.5)),
    }
    for rounds, (trained, drift, control, server) in expected.items():
        outcome = run(toy, rounds, alpha=1.0)
        assert tuple(value(outcome.replies[name], "weights").item() for name in "ab") == trained
        assert tuple(value(outcome.states[name], "drift").item() for name in "ab") == drift
        assert tuple(value(outcome.states[name], "control").item() for name in "ab") == control
        assert (
            tuple(value(outcome.server, group).item() for group in ("weights", "drift", "control"))
            == server
        )


@pytest.mark.parametrize("max_norm", [0.0, 1e6])
def test_round_one_is_fedprox_bit_for_bit(classes: Toy, max_norm: float) -> None:
    """Check 1, local training; a norm that is never reached changes nothing."""
    for optimizer in (sgd(0.1), sgd(0.1, momentum=0.9, weight_decay=0.01), adam(0.01)):
        toy = replace(classes, optimizer=optimizer, epochs=2)
        corrected, proximal = (
            run(toy, 1, max_norm=max_norm),
            simulate(load("fedprox", mu=ALPHA), toy),
        )
        for name in toy.names:
            assert bits(corrected.replies[name]["weights"]) == bits(
                proximal.replies[name]["weights"]
            )


def test_round_one_without_penalty_trains_as_fedavg_bit_for_bit(classes: Toy) -> None:
    toy = replace(classes, optimizer=sgd(0.1, momentum=0.9), epochs=2)
    first, average = run(toy, 1, alpha=0.0), simulate(load("fedavg"), toy)
    for name in toy.names:
        assert bits(first.replies[name]["weights"]) == bits(average.replies[name]["weights"])


def test_round_one_goes_twice_the_mean_way(lines: Toy) -> None:
    """Check 1, server: w^1 = 2 mean(w_k) - w^0, the plain mean."""
    outcome = run(replace(lines, epochs=3), 1)
    plain = torch.stack([value(reply, "weights") for reply in outcome.replies.values()]).mean(0)
    close(value(outcome.server, "weights"), 2 * plain - lines.initial["weight"][0])


@pytest.mark.parametrize("cohorts", [None, HALVES])
@pytest.mark.parametrize("control", ["difference", "gradient"])
def test_c_and_the_mean_drift_are_means_over_all_sites(
    lines: Toy, cohorts: list | None, control: str
) -> None:
    """Checks 2 and 3: c = (1/m) sum_k c_k; the mean of h grows by (1/m) sum over participants of w_k - w^t."""
    outcome = run(replace(lines, epochs=3), 5, cohorts, control=control)
    close(value(outcome.server, "control"), mean(outcome.states, "control"))
    close(value(outcome.server, "drift"), mean(outcome.states, "drift"))
    before, after = outcome.history[-2:]
    moved = sum(
        value(reply, "weights") - value(before, "weights") for reply in outcome.replies.values()
    )
    close(value(after, "drift") - value(before, "drift"), moved / 4)
    assert mean(outcome.states, "control").norm() > 1e-3


@pytest.mark.parametrize("cohorts", [None, HALVES * 14])
def test_it_converges_to_the_minimiser_of_the_sum(lines: Toy, cohorts: list | None) -> None:
    """Check 4: five steps a round, also with 2 of 4 sites a round; the drifts cancel."""
    toy = replace(lines, epochs=5, optimizer=sgd(0.3))
    outcome = run(toy, 40 if cohorts is None else 84, cohorts)
    close(value(outcome.server, "weights"), minimiser(toy), 1e-11)
    close(mean(outcome.states, "drift"), torch.zeros(3).double(), 1e-11)
    close(value(outcome.server, "control"), torch.zeros(3).double(), 1e-11)


def test_fedavg_does_not_converge_to_it(lines: Toy) -> None:
    toy = replace(lines, epochs=5, optimizer=sgd(0.3))
    toy.networks.initial["weight"].copy_(minimiser(toy))
    assert (value(simulate(load("fedavg"), toy).server, "weights") - minimiser(toy)).norm() > 1e-2


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_fixed_point(lines: Toy, momentum: float) -> None:
    """At the minimiser w* of the sum, with any h_k of sum 0 and c_k = grad f_k(w*) + alpha h_k, c = (1/m) sum c_k = 0.

    The three terms are grad f_k + alpha (w* + h_k - w*) + 0 - c_k = 0: nothing moves, c_k+ = c_k - 0 - 0.
    """
    toy, method = (
        replace(lines, epochs=4, optimizer=sgd(0.1, momentum=momentum)),
        load("feddc", alpha=ALPHA),
    )
    best = minimiser(toy)
    drifts = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = {"weight": torch.zeros(1, 3).double()}
    down = Message({"weights": {"weight": best[None]}, "control": zero})
    for name, h in zip(toy.names, drifts - drifts.mean(0), strict=True):
        a, b = quadratic(*toy.data[name])
        state = {
            "drift": {"weight": h[None]},
            "control": {"weight": (a @ best - b + ALPHA * h)[None]},
        }
        with toy.networks.scope():
            after, reply = method.local_update(toy.site(name), state, down)
        close(value(reply, "weights"), best)
        close(value(reply, "control"), torch.zeros(3).double())
        for group in ("drift", "control"):
            close(value(after, group), value(state, group))


def test_the_terms_are_terms_of_the_loss(lines: Toy) -> None:
    """Round 2 at a site, with momentum, against f + (alpha/2) ||w + h_k - w^t||^2 + <c - c_k, w> written out."""
    toy = replace(lines, epochs=5, optimizer=sgd(0.05, momentum=0.9))
    first, second = (run(toy, rounds) for rounds in (1, 2))
    received = first.server["weights"]["weight"]
    for name, (x, y) in toy.data.items():
        model = toy.networks.fresh()
        with torch.no_grad():
            model.weight.copy_(received)
        optimizer, state = toy.optimizer(model), first.states[name]
        correction = first.server["control"]["weight"] - state["control"]["weight"]
        for _ in range(5):
            optimizer.zero_grad()
            penalty = (
                ALPHA / 2 * (model.weight + state["drift"]["weight"] - received).square().sum()
            )
            (toy.loss(model(x), y) + penalty + (correction * model.weight).sum()).backward()
            optimizer.step()
        close(second.replies[name]["weights"]["weight"], model.weight.detach())


@pytest.mark.parametrize("control", ["auto", "difference", "gradient"])
def test_plain_descent_gives_the_mean_of_f_and_penalty_gradients(lines: Toy, control: str) -> None:
    """w_k - w^t = -eta sum (grad f + alpha (w + h_k - w^t) + c - c_k), so c_k+ is the mean of the first two terms.

    24 items in batches of 5 are 5 steps, twice, at the rate of round 3: 0.1 * 0.25.
    """
    toy = replace(lines, epochs=2, batch_size=5, lr_decay=0.5)
    before, after = (run(toy, rounds, control=control) for rounds in (2, 3))
    start, state = value(before.server, "weights"), before.states["d"]
    moved = value(after.replies["d"], "weights") - start
    old = value(state, "control") - value(before.server, "control")
    close(value(after.states["d"], "control"), old - moved / (10 * 0.1 * 0.25))
    close(value(after.states["d"], "drift"), value(state, "drift") + moved)


def test_with_momentum_the_steps_are_fednovas(lines: Toy) -> None:
    """Three steps with rho = 0.5 are worth 1 + 1.5 + 1.75 = 4.25; in round 1 c_k+ = (w - w_k) / (4.25 eta)."""
    outcome = run(replace(lines, epochs=3, optimizer=sgd(0.1, momentum=0.5)), 1)
    for name in lines.names:
        moved = lines.initial["weight"][0] - value(outcome.replies[name], "weights")
        close(value(outcome.states[name], "control"), moved / (4.25 * 0.1))


def test_auto_takes_the_gradients_where_the_optimiser_is_not_sgd(lines: Toy) -> None:
    """One step of Adam: the gradient at w^0 (no penalty yet), not the way of 0.01 that it goes in every direction."""
    toy = replace(lines, optimizer=adam(0.01))
    auto, gradient, difference = (
        run(toy, 1, control=how) for how in ("auto", "gradient", "difference")
    )
    assert bits(auto.states) == bits(gradient.states)
    for name in toy.names:
        a, b = quadratic(*toy.data[name])
        close(value(auto.states[name], "control"), a @ toy.initial["weight"][0] - b)
        close(value(difference.states[name], "control").abs(), torch.ones(3).double(), 1e-6)


def test_the_gradient_is_clipped_after_the_terms_are_added(lines: Toy) -> None:
    toy = replace(lines, optimizer=sgd(1.0))
    outcome = run(toy, 2, max_norm=0.05)
    for reply in outcome.replies.values():
        moved = value(reply, "weights") - value(outcome.history[1], "weights")
        assert moved.norm().item() == pytest.approx(0.05, rel=1e-4)


def test_corrections_cover_trainable_parameters_only_and_buffers_follow_fedavg(
    classes: Toy,
) -> None:
    toy = replace(classes, optimizer=sgd(0.0))
    method = load("feddc", control="gradient")  # a rate of 0 has no difference to divide by
    corrected, average = simulate(method, toy, 2), simulate(load("fedavg"), toy, 2)
    trainable = {"0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias"}
    for tree in (corrected.server, *corrected.states.values()):
        assert set(tree["drift"]) == set(tree["control"]) == trainable
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        torch.testing.assert_close(
            corrected.server["weights"][name], average.server["weights"][name]
        )


def test_absent_sites_keep_drift_and_control(lines: Toy) -> None:
    first, second = (run(lines, rounds, [["a", "b"], ["b"]]) for rounds in (1, 2))
    assert bits(second.states["a"]) == bits(first.states["a"])
    for group in ("drift", "control"):
        assert bits(second.states["b"][group]) != bits(first.states["b"][group])
