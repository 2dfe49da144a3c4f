"""SCAFFOLD against its equations, in float64 where they are exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from medfl.methods import load
from medfl.storage.files import State
from tests.support.toy import (
    Toy,
    adam,
    bits,
    blobs,
    classifier,
    cross_entropy,
    quadratic,
    sgd,
    simulate,
)

METHOD = load("scaffold")


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def control(state: State) -> Tensor:
    return state["control"]["weight"][0]


def gradients_seen(
    toy: Toy, name: str, start: Tensor, correction: Tensor, rate: float, momentum: float = 0
) -> list[Tensor]:
    """Walk the local steps y <- y - rate (g(y) - c_i + c) by hand (heavy-ball velocity with momentum)."""
    a, b = quadratic(*toy.data[name])
    y, velocity, seen = start, torch.zeros_like(start), []
    for _ in range(toy.epochs):
        seen.append(a @ y - b)
        velocity = momentum * velocity + seen[-1] + correction
        y = y - rate * velocity
    return seen


def test_two_rounds_by_hand() -> None:
    """Sites a: f = w^2 / 2 (x = 1, y = 0) and b: f = (w - 4)^2 / 2 (x = 1, y = 4), rate 0.5, two steps, x = 2.

    Round 1, c = c_i = 0. a: 2 -> 1 -> 0.5, c_a = (2 - 0.5) / (2 * 0.5) = 1.5. b: 2 -> 3 -> 3.5, c_b = -1.5.
    Server: x = 2, c = (1.5 - 1.5) / 2 = 0.
    Round 2. a with correction -1.5 + 0: gradient 2 - 1.5 = 0.5, 1.75; then 1.75 - 1.5 = 0.25, 1.625.
    c_a = 1.5 - 0 + (2 - 1.625) / 1 = 1.875. b mirrors it: 2.375 and -1.875. Server: x = 2, c = 0.
    """
    data = {
        name: (torch.ones(1, 1).double(), torch.tensor([y]).double())
        for name, y in (("a", 0.0), ("b", 4.0))
    }
    toy = Toy(
        data, lambda: torch.nn.Linear(1, 1, bias=False).double(), optimizer=sgd(0.5), epochs=2
    )
    toy.networks.initial["weight"].fill_(2)
    expected = {1: (0.5, 3.5, 1.5, -1.5), 2: (1.625, 2.375, 1.875, -1.875)}
    for rounds, (y_a, y_b, c_a, c_b) in expected.items():
        outcome = simulate(METHOD, toy, rounds)
        assert [outcome.replies[name]["weights"]["weight"].item() for name in "ab"] == [y_a, y_b]
        assert [control(outcome.states[name]).item() for name in "ab"] == [c_a, c_b]
        assert (outcome.server["weights"]["weight"].item(), control(outcome.server).item()) == (
            2,
            0,
        )


@pytest.mark.parametrize("how", ["difference", "gradient"])
def test_one_step_gives_the_gradient_at_the_received_point(lines: Toy, how: str) -> None:
    outcome = simulate(load("scaffold", control=how), lines, 3)
    received = outcome.history[2]["weights"]["weight"][0]
    for name in lines.names:
        a, b = quadratic(*lines.data[name])
        close(control(outcome.states[name]), a @ received - b)


@pytest.mark.parametrize("how", ["auto", "difference", "gradient"])
def test_several_steps_give_the_mean_of_the_gradients_seen(lines: Toy, how: str) -> None:
    toy = replace(lines, epochs=7)
    before, after = (simulate(load("scaffold", control=how), toy, rounds) for rounds in (2, 3))
    for name in toy.names:
        correction = control(before.server) - control(before.states[name])
        seen = gradients_seen(toy, name, before.server["weights"]["weight"][0], correction, 0.1)
        close(control(after.states[name]), torch.stack(seen).mean(0))


@pytest.mark.parametrize("how", ["difference", "gradient"])
def test_the_steps_counted_are_batches_not_epochs(lines: Toy, how: str) -> None:
    """Site d: 24 items in batches of 5 are 5 steps, twice: R = 10, c_i+ = (x - y) / (10 * 0.1) in round 1."""
    outcome = simulate(load("scaffold", control=how), replace(lines, batch_size=5, epochs=2))
    moved = lines.initial["weight"] - outcome.replies["d"]["weights"]["weight"]
    close(control(outcome.states["d"]), moved[0] / (10 * 0.1))


def test_the_learning_rate_of_the_round_is_used(lines: Toy) -> None:
    toy = replace(lines, epochs=3, lr_decay=0.5)
    before, after = (simulate(METHOD, toy, rounds) for rounds in (2, 3))
    correction = control(before.server) - control(before.states["a"])
    seen = gradients_seen(toy, "a", before.server["weights"]["weight"][0], correction, 0.1 * 0.25)
    close(control(after.states["a"]), torch.stack(seen).mean(0))


def test_with_momentum_only_the_stored_gradients_give_their_mean(lines: Toy) -> None:
    toy = replace(lines, epochs=10, optimizer=sgd(0.02, momentum=0.9))
    start = toy.initial["weight"][0]
    mean = torch.stack(
        gradients_seen(toy, "a", start, torch.zeros(3).double(), 0.02, momentum=0.9)
    ).mean(0)
    auto, difference = (
        control(simulate(load("scaffold", control=how), toy).states["a"])
        for how in ("auto", "difference")
    )
    close(auto, mean)
    assert (difference - mean).norm() / mean.norm() > 1


@pytest.mark.parametrize(
    "optimizer", [adam(0.01), sgd(0.1, weight_decay=0.1), sgd(0.1, momentum=0.5)]
)
def test_auto_takes_the_gradients_wherever_option_two_is_not_their_mean(
    lines: Toy, optimizer
) -> None:
    toy = replace(lines, epochs=4, optimizer=optimizer)
    auto, gradient, difference = (
        bits(simulate(load("scaffold", control=how), toy).states)
        for how in ("auto", "gradient", "difference")
    )
    assert auto == gradient != difference


def test_auto_is_option_two_for_plain_descent(lines: Toy) -> None:
    toy = replace(lines, epochs=4)
    assert bits(simulate(METHOD, toy).states) == bits(
        simulate(load("scaffold", control="difference"), toy).states
    )


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_with_full_participation_c_is_the_mean_of_the_c_i(lines: Toy, weights: str) -> None:
    toy = replace(lines, epochs=3)
    for rounds in range(4):
        outcome = simulate(load("scaffold", weights=weights), toy, rounds)
        controls = (
            [control(outcome.states[name]) for name in toy.names]
            if rounds
            else [torch.zeros(3).double()]
        )
        close(control(outcome.server), torch.stack(controls).mean(0))


def test_partial_participation_divides_by_all_sites(lines: Toy) -> None:
    """c is the mean of all c_i, those of absent sites included, whoever took part."""
    toy = replace(lines, epochs=3)
    cohorts = [["a", "c"], ["b"], ["a", "b", "d"], ["c"]]
    for rounds in range(1, 5):
        outcome = simulate(METHOD, toy, rounds, cohorts)
        controls = [control(outcome.states[name]) for name in toy.names if name in outcome.states]
        close(control(outcome.server), torch.stack(controls).sum(0) / 4)
    once = simulate(METHOD, toy, 1, cohorts)
    close(control(once.server), (control(once.states["a"]) + control(once.states["c"])) / 4)


def test_the_weights_are_the_participants_plain_mean_or_by_samples(lines: Toy) -> None:
    def replies_and_mean(**options: str) -> tuple[Mapping[str, Tensor], Tensor]:
        outcome = simulate(load("scaffold", **options), lines, cohorts=[["a", "c"]])
        return {n: r["weights"]["weight"] for n, r in outcome.replies.items()}, outcome.server[
            "weights"
        ]["weight"]

    sent, mean = replies_and_mean()
    close(mean, (sent["a"] + sent["c"]) / 2)
    sent, mean = replies_and_mean(weights="samples")
    close(mean, (6 * sent["a"] + 18 * sent["c"]) / 24)


def test_the_first_round_is_fedavg_bit_for_bit(classes: Toy) -> None:
    for optimizer in (sgd(0.1), sgd(0.1, momentum=0.9), adam(0.01)):
        toy = replace(classes, optimizer=optimizer, epochs=3)
        average = simulate(load("fedavg"), toy)
        first = simulate(load("scaffold", weights="samples"), toy)
        assert bits(first.server["weights"]) == bits(average.server["weights"])
        for name, reply in simulate(METHOD, toy).replies.items():
            assert bits(reply["weights"]) == bits(average.replies[name]["weights"])
        second = simulate(load("scaffold", weights="samples"), toy, 2).server["weights"]
        assert bits(second) != bits(simulate(load("fedavg"), toy, 2).server["weights"])


@pytest.mark.slow
def test_it_removes_the_drift(lines: Toy) -> None:
    """With five local steps it it reaches the minimiser of (1/N) sum f_k; FedAvg stops elsewhere (its tests)."""
    toy = replace(lines, epochs=5)
    parts = [quadratic(x, y) for x, y in toy.data.values()]
    minimiser = torch.linalg.solve(sum(a for a, _ in parts), sum(b for _, b in parts))
    close(simulate(METHOD, toy, 250).server["weights"]["weight"][0], minimiser, 1e-9)


def test_the_servers_step(lines: Toy) -> None:
    """x + eta_g (mean - x): 0 leaves x, 0.5 goes half the way, 1 is the mean; c does not depend on it in round 1."""
    whole = simulate(METHOD, lines)
    start = lines.initial["weight"]
    for step in (0.0, 0.5, 1.5):
        outcome = simulate(load("scaffold", server_lr=step), lines)
        close(
            outcome.server["weights"]["weight"],
            start + step * (whole.server["weights"]["weight"] - start),
        )
        assert bits(outcome.server["control"]) == bits(whole.server["control"])


def test_buffers_take_the_plain_mean_whatever_the_servers_step(classes: Toy) -> None:
    buffers = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    plain, large = simulate(METHOD, classes), simulate(load("scaffold", server_lr=3.0), classes)
    for name in buffers:
        assert bits(large.server["weights"][name]) == bits(plain.server["weights"][name])
        values = torch.stack([reply["weights"][name] for reply in plain.replies.values()])
        expected = values.max() if name.endswith("tracked") else values.mean(0)
        torch.testing.assert_close(plain.server["weights"][name], expected)
    assert bits(large.server["weights"]["0.weight"]) != bits(plain.server["weights"]["0.weight"])


def test_controls_cover_trainable_parameters_only(classes: Toy) -> None:
    def frozen() -> torch.nn.Module:
        network = classifier(norm=True)()
        network[0].requires_grad_(False)
        return network

    toy = replace(classes, network=frozen)
    trainable = {"1.weight", "1.bias", "4.weight", "4.bias"}
    outcome = simulate(METHOD, toy, 2)
    assert set(outcome.server["control"]) == trainable
    assert all(set(state["control"]) == trainable for state in outcome.states.values())
    assert all(set(reply["control"]) == trainable for reply in outcome.replies.values())
    torch.testing.assert_close(
        outcome.server["weights"]["0.weight"], toy.initial["0.weight"], rtol=1e-6, atol=0
    )


def test_a_parameter_without_gradient_has_control_zero() -> None:
    class Unused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    toy = Toy(blobs({"a": 6, "b": 6}), Unused, cross_entropy, sgd(0.1, momentum=0.9))
    outcome = simulate(METHOD, toy, 3)
    assert not outcome.server["control"]["unused.weight"].any()
    assert bits(outcome.server["weights"]["unused.weight"]) == bits(toy.initial["unused.weight"])
    assert outcome.server["control"]["used.weight"].any()


def test_absent_sites_keep_their_control_and_replies_carry_the_change(lines: Toy) -> None:
    first, second = (simulate(METHOD, lines, rounds, [["a", "b"], ["b"]]) for rounds in (1, 2))
    assert bits(second.states["a"]) == bits(first.states["a"])
    change = control(second.states["b"]) - control(first.states["b"])
    close(second.replies["b"]["control"]["weight"][0], change)
    assert change.norm() > 0
