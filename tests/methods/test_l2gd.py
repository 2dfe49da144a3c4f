"""L2GD: personal models that step towards their mean; check numbers are those of the method's card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.methods import load
from tests.support.toy import Toy, bits, judged, quadratic, sgd, simulate

METHOD = load("l2gd")
BUFFERS = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def stacked(weights: list[dict]) -> torch.Tensor:
    return torch.stack([w["weight"].flatten() for w in weights])


def test_two_rounds_by_hand() -> None:
    """f(w) = (w - y)^2 / 2, w = 0, rate 0.5, theta = 0.25; a has y = 0, b has y = 8.

    Round 1: a 0, b 4; m = 2. After the averaging step a = 0.5, b = 3.5, by which they are judged.
    Round 2: a 0.25, b 5.75; m = 3; then 0.9375 and 5.0625.
    """
    data = {
        name: (torch.ones(1, 1).double(), torch.tensor([y]).double())
        for name, y in (("a", 0.0), ("b", 8.0))
    }
    toy = Toy(data, lambda: torch.nn.Linear(1, 1, bias=False).double(), optimizer=sgd(0.5))
    toy.networks.initial["weight"].zero_()
    method = load("l2gd", theta=0.25)
    for rounds, own, mean, mixed in (
        (1, [0, 4], 2, [0.5, 3.5]),
        (2, [0.25, 5.75], 3, [0.9375, 5.0625]),
    ):
        outcome = simulate(method, toy, rounds)
        assert [outcome.states[name]["weights"]["weight"].item() for name in "ab"] == own
        assert outcome.server["weights"]["weight"].item() == mean
        assert [judged(method, toy, outcome, name)["weight"].item() for name in "ab"] == mixed


@pytest.mark.parametrize("theta", [0.1, 0.5, 0.9])
def test_the_averaging_step_keeps_the_mean_and_shrinks_deviations(lines: Toy, theta: float) -> None:
    """Check 1."""
    method = load("l2gd", theta=theta)
    outcome = simulate(method, lines)
    before = stacked([outcome.states[name]["weights"] for name in lines.names])
    after = stacked([judged(method, lines, outcome, name) for name in lines.names])
    torch.testing.assert_close(after.mean(0), before.mean(0), rtol=0, atol=1e-15)
    expected = (1 - theta) * (before - before.mean(0))
    torch.testing.assert_close(after - after.mean(0), expected, rtol=0, atol=1e-15)


def test_a_toss_is_on_average_a_gradient_step(lines: Toy) -> None:
    """Check 2: (1 - p) local step + p averaging step = -alpha/n (grad f_i + lambda (w_i - m)).

    The local step has the rate alpha / (n (1 - p)), the averaging step theta = alpha lambda / (n p).
    """
    p, alpha, lam, n = 0.3, 0.2, 0.7, 4
    start = {
        name: torch.randn(1, 3, generator=torch.Generator().manual_seed(i)).double()
        for i, name in enumerate("abcd")
    }
    mean = torch.stack(list(start.values())).mean(0)
    toy = replace(lines, optimizer=sgd(alpha / (n * (1 - p))))
    method, still = load("l2gd", theta=alpha * lam / (n * p)), load("l2gd", theta=0.0)
    for name, w in start.items():
        with toy.networks.scope():
            site, down = toy.site(name), Message({"weights": {"weight": mean}})
            state = {"weights": {"weight": w}}
            local = still.local_update(site, state, down)[0]["weights"]["weight"]
            averaged = method.predictor(site, state, down).weight.detach()
            a, b = quadratic(*toy.data[name])
            expected = -alpha / n * ((a @ w[0] - b)[None] + lam * (w - mean))
            torch.testing.assert_close(
                (1 - p) * local + p * averaged - w, expected, rtol=0, atol=1e-14
            )


@pytest.mark.parametrize("options", [{}, {"mix_buffers": True}])
def test_without_averaging_it_is_local_bit_for_bit(classes: Toy, options: dict) -> None:
    """Check 3, lambda = 0."""
    toy = replace(classes, optimizer=sgd(0.1, momentum=0.9))
    method, local = load("l2gd", theta=0.0, **options), load("local")
    mixed, alone = simulate(method, toy, 3), simulate(local, toy, 3)
    assert bits(mixed.states) == bits(alone.states)
    for name in toy.names:
        assert bits(judged(method, toy, mixed, name)) == bits(judged(local, toy, alone, name))


def test_a_full_step_makes_all_models_their_mean(classes: Toy) -> None:
    """Check 3, factor 1; statistics stay apart unless they are mixed too."""
    for mix_buffers in (False, True):
        method = load("l2gd", theta=1.0, mix_buffers=mix_buffers)
        outcome = simulate(method, classes, 2)
        weights = [judged(method, classes, outcome, name) for name in classes.names]
        for key, value in outcome.server["weights"].items():
            if value.is_floating_point():
                assert len({str(bits(w[key])) for w in weights} | {str(bits(value))}) == 1
        assert (
            torch.equal(weights[0]["1.running_mean"], weights[1]["1.running_mean"]) == mix_buffers
        )
        assert [w["1.num_batches_tracked"].item() for w in weights] == [
            4,
            4,
            6,
        ]  # own batches; a last one of one item counts not


def test_what_travels(classes: Toy) -> None:
    """Parameters, or all tensors; plainly averaged over those who are there."""
    for mix_buffers, stays in ((False, BUFFERS), (True, set())):
        method = load("l2gd", mix_buffers=mix_buffers)
        outcome = simulate(method, classes, 2, [["a", "b", "c"], ["a", "b"]])
        for message in [*outcome.down.values(), *outcome.replies.values()]:
            assert set(message.tensors) == {"weights"}
            assert set(message["weights"]) == set(classes.initial) - stays
            assert not message.scalars
        means = [outcome.replies[name]["weights"]["0.weight"] for name in "ab"]
        torch.testing.assert_close(outcome.server["weights"]["0.weight"], (means[0] + means[1]) / 2)
    with classes.networks.scope():
        assert METHOD.global_predictor(classes.host(), outcome.server) is None


def test_the_coin(classes: Toy) -> None:
    """Runs of equal tosses: on average 1/p local iterations and 1/(1 - p) averaging steps."""
    method, toy = (
        load("l2gd", coin=0.25, theta=0.5),
        replace(classes, data={"a": classes.data["a"]}, epochs=2),
    )
    tosses = [method.tosses(toy.host(round_)) for round_ in range(1, 2001)]
    for name, expected in (("iterations", 4), ("averagings", 4 / 3)):
        runs = [toss[name] for toss in tosses]
        assert min(runs) == 1
        assert sum(runs) / len(runs) == pytest.approx(expected, rel=0.08)
    outcome = simulate(method, toy, 3)
    sent = outcome.down["a"].scalars
    assert sent == outcome.history[2]["tosses"]
    with toy.networks.scope():
        site = toy.site("a", 3)
        method.local_update(site, simulate(method, toy, 2).states["a"], outcome.down["a"])
    assert (
        site.journal[0].steps == 3 * 2 * sent["iterations"]
    )  # nine items in batches of four, two epochs an iteration
    assert bits(outcome.states) == bits(simulate(method, toy, 3).states)


def test_several_averaging_steps_are_taken_at_once(lines: Toy) -> None:
    """1 - theta to the power of their number is left of a deviation."""
    method = load("l2gd", theta=0.5, coin=0.5)
    outcome = simulate(method, lines)
    outcome.server["tosses"]["averagings"] = 3
    for name in lines.names:
        own, mean = outcome.states[name]["weights"]["weight"], outcome.server["weights"]["weight"]
        torch.testing.assert_close(
            judged(method, lines, outcome, name)["weight"], mean + (own - mean) / 8
        )


@pytest.mark.parametrize("options", [{"theta": 1.5}, {"coin": 1.0}])
def test_bad_input(options: dict) -> None:
    with pytest.raises(InputError, match="theta is 0 to 1, coin at least 0 and below 1"):
        load("l2gd", **options)
