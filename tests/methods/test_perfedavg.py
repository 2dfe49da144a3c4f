"""Per-FedAvg against its equations, in float64 where they are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from medfl.core.seeding import stream
from medfl.data.prepared import Shard, Stacked
from medfl.methods import load
from medfl.methods._parts.separate_randomness import SeparateRandomness
from medfl.methods.perfedavg import draw, gradient, hessian_product
from medfl.training.site import Site, snapshot
from tests.support.toy import (
    WHOLE,
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

ORDERS = ("first", "hessian_free")
every_order = pytest.mark.parametrize("order", ORDERS)


def close(left: Tensor, right: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=tolerance)


def smooth() -> nn.Module:
    """A network with second derivatives and BatchNorm, float64."""
    return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def doubled(counts: dict[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (x.double(), y) for name, (x, y) in blobs(counts).items()}


# The step


def test_a_step_by_hand() -> None:
    """f(w) = a (w x - y)^2 / 2 with x = 2, y = 0: f' = 4 w, f'' = 4; w = 1, alpha = 0.125, beta = 0.5.

    w+ = 1 - 0.125 * 4 = 0.5, v = 4 * 0.5 = 2. First order: w = 1 - 0.5 * 2 = 0.
    Hessian-free: d = 2 - 0.125 * 4 * 2 = 1, w = 1 - 0.5 * 1 = 0.5. From w+ it would be -0.5 and 0.
    Judged, after a step of 0.125 * 4 w: 0 and 0.25.
    """
    data = {"a": (torch.full((1, 1), 2.0).double(), torch.zeros(1).double())}
    toy = Toy(data, lambda: nn.Linear(1, 1, bias=False).double(), optimizer=sgd(0.5))
    toy.networks.initial["weight"].fill_(1)
    for order, w, adapted in (("first", 0.0, 0.0), ("hessian_free", 0.5, 0.25)):
        method = load("perfedavg", alpha=0.125, order=order, delta=0.5)
        outcome = simulate(method, toy)
        assert outcome.server["weights"]["weight"].item() == w
        assert judged(method, toy, outcome, "a")["weight"].item() == adapted


@pytest.mark.parametrize("delta", [1e-3, 0.1, 7.0])
def test_the_step_on_a_quadratic(lines: Toy, delta: float) -> None:
    """f = w'Aw/2 - b'w: v = A (w - alpha (A w - b)) - b, and the exact gradient is (I - alpha A) v, whatever delta."""
    alpha, beta = 0.3, 0.1
    for order in ORDERS:
        outcome = simulate(load("perfedavg", alpha=alpha, order=order, delta=delta), lines)
        for name, (x, y) in lines.data.items():
            a, b = quadratic(x, y)
            w = lines.initial["weight"][0]
            v = a @ (w - alpha * (a @ w - b)) - b
            exact = v - alpha * a @ v
            assert (exact - v).norm() > 0.05
            step = exact if order == "hessian_free" else v
            close(outcome.replies[name]["weights"]["weight"][0], w - beta * step)


def test_hessian_free_is_the_gradient_of_the_objective() -> None:
    """By autograd through f(w - alpha grad f(w)), on a network with BatchNorm, all batches being all items."""
    alpha, beta = 0.2, 0.05
    toy = Toy(doubled({"a": 9}), smooth, cross_entropy, sgd(beta))
    x, y = toy.data["a"]
    network = toy.networks.fresh().train()
    start = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}

    def f(weights: dict[str, Tensor]) -> Tensor:
        return cross_entropy(functional_call(network, weights, (x,)), y)

    inner = torch.autograd.grad(f(start), list(start.values()), create_graph=True)
    after = {name: w - alpha * g for (name, w), g in zip(start.items(), inner, strict=True)}
    exact = torch.autograd.grad(f(after), list(start.values()))
    reply = simulate(load("perfedavg", alpha=alpha, order="hessian_free", delta=1e-4), toy).replies[
        "a"
    ]["weights"]
    plain = simulate(load("perfedavg", alpha=alpha), toy).replies["a"]["weights"]
    for (name, w), g in zip(start.items(), exact, strict=True):
        close(reply[name], w.detach() - beta * g, 1e-9)
    assert max((plain[name] - reply[name]).abs().max() for name in start) > 1e-4


@pytest.mark.parametrize("alpha", [0.0, 1e-60])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_without_an_inner_step_it_is_fedavg_bit_for_bit(
    classes: Toy, alpha: float, settings: dict
) -> None:
    """1e-60 is 0 in float32 but takes all passes: they leave batches, dropout, buffers and the optimiser alone."""
    toy = replace(classes, optimizer=sgd(0.1, **settings), epochs=2)
    cohorts = [["a", "b"], ["b", "c"], ["a", "b", "c"]]
    average = simulate(load("fedavg"), toy, 3, cohorts)
    for order in ORDERS:
        method = load("perfedavg", alpha=alpha, order=order, weights="samples", finetune_steps=0)
        outcome = simulate(method, toy, 3, cohorts)
        assert bits([outcome.server, outcome.replies]) == bits([average.server, average.replies])
        assert bits(judged(method, toy, outcome, "a")) == bits(average.server["weights"])


def test_the_rate_decays_and_alpha_does_not(lines: Toy) -> None:
    toy, alpha = replace(lines, lr_decay=0.5), 0.3
    outcome = simulate(load("perfedavg", alpha=alpha), toy, 2)
    w = outcome.history[1]["weights"]["weight"][0]
    for name, (x, y) in toy.data.items():
        a, b = quadratic(x, y)
        v = a @ (w - alpha * (a @ w - b)) - b
        close(outcome.replies[name]["weights"]["weight"][0], w - 0.05 * v)


# Batches


def seen(toy: Toy, method_name: str, **options: object) -> list[frozenset[float]]:
    """The targets of each pass of a round at site d, in order."""
    passes: list[frozenset[float]] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        passes.append(frozenset(target.tolist()))
        return toy.loss(output, target)

    simulate(load(method_name, options), replace(toy, loss=loss), cohorts=[["d"]])
    return passes


def test_a_step_has_three_independent_batches_and_the_outer_ones_are_the_epochs(lines: Toy) -> None:
    """Passes: D, D', D'', D''; site d has 24 items with different targets in batches of 6, twice."""
    toy = replace(lines, batch_size=6, epochs=2)
    outer = seen(toy, "fedavg")
    first = seen(toy, "perfedavg")
    full = seen(toy, "perfedavg", order="hessian_free")
    assert (len(outer), len(first), len(full)) == (8, 16, 32)
    assert first[1::2] == full[1::4] == outer
    assert first[::2] == full[::4]
    assert full[2::4] == full[3::4]
    assert all(len(batch) == 6 for batch in full)
    for one, other in ((full[::4], outer), (full[::4], full[2::4]), (full[2::4], outer)):
        assert all(a != b for a, b in zip(one, other, strict=True))
    for drawn in (full[::4], full[2::4]):
        assert len(set(drawn)) == 8
        assert len(frozenset().union(*drawn)) > 18, "batches from everywhere"


def test_another_round_draws_other_batches(lines: Toy) -> None:
    drawn = []
    for round_ in (1, 2):
        site = replace(lines, batch_size=6).site("d", round_)
        with stream(site.seed, "inner", 1) as generator:
            drawn.append(draw(site, generator)[1])
    assert not torch.equal(*drawn)


# Buffers and dropout


@every_order
@pytest.mark.parametrize("alpha", [0.01, 2.0])
def test_only_the_outer_passes_move_buffers(order: str, alpha: float) -> None:
    """BatchNorm of the input does not depend on the weights: its buffers are FedAvg's, bit for bit; float64."""

    def network() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)).double()

    toy = Toy(doubled({"a": 9, "b": 6}), network, cross_entropy, batch_size=4, epochs=2)
    method = load("perfedavg", alpha=alpha, order=order)
    outcome, average = simulate(method, toy), simulate(load("fedavg"), toy)
    for name in toy.names:
        sent, plain = outcome.replies[name]["weights"], average.replies[name]["weights"]
        for key in ("0.running_mean", "0.running_var", "0.num_batches_tracked"):
            assert bits(sent[key]) == bits(plain[key])
            assert bits(sent[key]) != bits(toy.initial[key])
            assert bits(judged(method, toy, outcome, name)[key]) == bits(
                outcome.server["weights"][key]
            )
        assert bits(sent["1.weight"]) != bits(plain["1.weight"])


def test_both_gradients_of_the_difference_see_the_same_dropout(lines: Toy) -> None:
    """With one mask the loss is a quadratic of that mask: any delta gives the same; with two, noise / delta."""
    toy = replace(
        lines, network=lambda: nn.Sequential(nn.Dropout(0.5), lines.network()), batch_size=6
    )
    site = toy.site("d")
    beside = lambda step: SeparateRandomness(site, "hessian", step, each=2)  # noqa: E731
    v = [torch.ones(1, 3, dtype=torch.float64)]
    with toy.networks.scope():
        model = site.model(toy.initial)
        batch = next(site.train.batches(6))
        products = [
            hessian_product(model, site, v, delta, batch, beside(1))[0] for delta in (1e-4, 1.0)
        ]
        other = hessian_product(model, site, v, 1.0, batch, beside(2))[0]
        assert bits(snapshot(model)) == bits(toy.initial)
    close(*products, 1e-9)
    assert (products[0] - other).norm() > 0.1


def test_gradients_are_in_full_precision(classes: Toy) -> None:
    site = classes.site("a")
    batch = next(site.train.batches(4))
    with classes.networks.scope():
        model = site.model(classes.initial)
        model[3].p = 0.0
        plain = gradient(model, site, batch)
        with torch.autocast("cpu", torch.bfloat16):
            assert bits(list(gradient(model, site, batch))) == bits(list(plain))
        model[3].p = 0.3
    outcome = simulate(load("perfedavg", order="hessian_free"), replace(classes, amp=True), 2)
    assert all(t.isfinite().all() for t in outcome.server["weights"].values())


# Adaptation


def test_a_site_is_judged_after_steps_on_its_training_data(lines: Toy) -> None:
    """w <- w - alpha (A w - b) with A and b of the training items; validation and test items are other ones."""
    alpha = 0.4
    outcome = simulate(load("perfedavg"), lines)
    w = outcome.server["weights"]["weight"][0]
    for name, (x, y) in lines.data.items():
        a, b = quadratic(x, y)
        expected = w.clone()
        for steps in range(4):
            method = load("perfedavg", alpha=alpha, finetune_steps=steps)
            with lines.networks.scope():
                site, down = (
                    elsewhere(lines.site(name)),
                    method.broadcast(lines.host(), outcome.server, name),
                )
                close(method.predictor(site, {}, down).weight.detach()[0], expected)
            expected = expected - alpha * (a @ expected - b)


def elsewhere(site: Site) -> Site:
    """The same site whose validation and test items have nothing to do with the training items."""
    x, y = torch.full((4, 3), 9.0).double(), torch.full((4,), -9.0).double()
    other = Shard.of(Stacked([{"id": f"t{i}"} for i in range(4)], x, y), range(4))
    return replace(site, validate=other, test=other)


def test_each_step_of_the_adaptation_has_a_batch_of_its_own(lines: Toy) -> None:
    """A site that never took part is adapted as well; the batches are the draws, of the run's size."""
    toy = replace(lines, batch_size=6)
    method = load("perfedavg", alpha=0.2, finetune_steps=2)
    outcome = simulate(method, toy, cohorts=[["a"]])
    w, site = outcome.server["weights"]["weight"][0], toy.site("d")
    batches = []
    for step in range(2):
        with stream(site.seed, "finetune", step) as generator:
            x, y = draw(site, generator)
        batches.append(frozenset(y.tolist()))
        a, b = quadratic(x, y)
        w = w - 0.2 * (a @ w - b)
    close(judged(method, toy, outcome, "d")["weight"][0], w)
    assert batches[0] != batches[1]


def test_adaptation_does_not_touch_training(classes: Toy) -> None:
    one, five = (simulate(load("perfedavg", finetune_steps=steps), classes, 2) for steps in (1, 5))
    assert bits([one.server, one.states]) == bits([five.server, five.states])
    assert not any(one.states.values())
    assert load("perfedavg").judged == "personal"


# Sites and server


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_the_mean_is_plain_or_by_samples(lines: Toy, weights: str) -> None:
    outcome = simulate(load("perfedavg", weights=weights), lines, cohorts=[["a", "c"]])
    a, c = (outcome.replies[name]["weights"]["weight"] for name in "ac")
    wanted = (a + c) / 2 if weights == "uniform" else (6 * a + 18 * c) / 24
    close(outcome.server["weights"]["weight"], wanted)
    assert all(
        set(message.tensors) == {"weights"}
        for message in [*outcome.replies.values(), *outcome.down.values()]
    )


@every_order
def test_a_site_of_one_item_with_batch_norm(order: str) -> None:
    toy = Toy(blobs({"a": 1, "b": 5}), classifier(norm=True), cross_entropy, batch_size=4)
    method = load("perfedavg", order=order)
    outcome = simulate(method, toy, 2)
    for name in toy.names:
        assert all(t.isfinite().all() for t in judged(method, toy, outcome, name).values())


def test_frozen_and_unused_parameters_stay() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(torch.tanh(self.frozen(x)))

    toy = Toy(blobs({"a": 6, "b": 6}), Partly, cross_entropy, batch_size=WHOLE)
    outcome = simulate(load("perfedavg", order="hessian_free", alpha=0.5), toy, 2)
    for layer, stays in (("frozen", True), ("unused", True), ("used", False)):
        assert (
            bits(outcome.server["weights"][f"{layer}.weight"])
            == bits(toy.initial[f"{layer}.weight"])
        ) == stays


def test_a_site_adapts_the_global_model_or_its_own(classes: Toy) -> None:
    whole, own = (load("perfedavg", adapted=name, finetune_steps=0) for name in ("global", "own"))
    first, second = simulate(whole, classes, 2), simulate(own, classes, 2, [["a", "b", "c"], ["a"]])
    for name in classes.names:
        assert bits(judged(whole, classes, first, name)) == bits(dict(first.server["weights"]))
    assert bits(judged(own, classes, second, "a")) == bits(dict(second.replies["a"]["weights"]))
    once = simulate(own, classes, 1)
    assert bits(judged(own, classes, second, "b")) == bits(dict(once.replies["b"]["weights"])), (
        "as it was trained last"
    )
    stepped = judged(load("perfedavg", adapted="own"), classes, second, "a")
    assert bits(stepped) != bits(dict(second.replies["a"]["weights"]))
    assert bits(judged(own, classes, simulate(own, classes, 1, [["a"]]), "c")) == bits(
        dict(simulate(own, classes, 1, [["a"]]).server["weights"])
    )
