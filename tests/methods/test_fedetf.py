"""FedETF: a fixed simplex as classifier."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods.fedetf import SimplexHead, simplex
from medfl.training.site import snapshot
from tests.support.toy import Toy, bits, classifier, cross_entropy, judged, sgd, simulate

METHOD = load("fedetf")


@pytest.fixture
def toy(classes: Toy) -> Toy:
    return classes.adapted(METHOD)


def head(network: nn.Module) -> SimplexHead:
    return next(module for module in network.modules() if isinstance(module, SimplexHead))


@pytest.mark.parametrize(("dimension", "classes"), [(3, 3), (8, 8), (64, 7), (2, 2)])
def test_the_simplex(dimension: int, classes: int) -> None:
    """Checks 1 and 2: M'M = K/(K-1) (I - 11'/K): 1 on the diagonal, -1/(K-1) beside it; columns sum to 0."""
    with stream(0, "test"):
        m = simplex(dimension, classes)
    assert m.shape == (dimension, classes)
    gram = torch.full((classes, classes), -1 / (classes - 1)).fill_diagonal_(1)
    torch.testing.assert_close(m.T @ m, gram, rtol=0, atol=1e-6)
    torch.testing.assert_close(m.sum(1), torch.zeros(dimension), rtol=0, atol=1e-6)


def test_logits_by_hand() -> None:
    """K = 2: the simplex is +-m. A feature projected on 5 m has unit direction m: logits tau (1, -1)."""
    layer = SimplexHead(2, 2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
        layer.bias.zero_()
        layer.temperature.fill_(3.0)
        assert layer(5 * layer.etf[:, :1].T).tolist() == [pytest.approx([3, -3], rel=1e-6)]


def test_one_step_by_hand() -> None:
    """K = 2, two items of class 0 and one of class 1, projection the identity, all features m (the simplex is +-m).

    Balanced logits (tau + log 1, -tau + log 1/2); with tau = 1 the probability of class 1 is q = 1 / (1 + 2 e^2) =
    0.063379. The mean gradient on tau is (1, -1) . (p - y) averaged: (1 - 2q) - (1/3) = 0.539909; rate 0.1: tau =
    0.946009. The projection does not move: its gradient is across the unit direction, where both logits are flat.
    """
    adapted = Toy(
        {"a": (torch.zeros(3, 2), torch.tensor([0, 0, 1]))}, lambda: nn.Sequential(nn.Linear(2, 2))
    )
    method = load("fedetf")

    def network():
        return method.adapt(nn.Sequential(nn.Linear(2, 2)), Task("classification", ("p", "q")))  # noqa: E731

    m = head(replace(adapted, network=network).networks.fresh()).etf[:, 0]
    toy = Toy({"a": (m.repeat(3, 1), torch.tensor([0, 0, 1]))}, network, cross_entropy, sgd(0.1))
    toy.networks.initial["0.weight"].copy_(torch.eye(2))
    toy.networks.initial["0.bias"].zero_()
    weights = simulate(method, toy).server["weights"]
    assert weights["0.temperature"].item() == pytest.approx(0.946009, abs=1e-6)
    torch.testing.assert_close(weights["0.weight"], torch.eye(2), rtol=0, atol=1e-6)


def test_the_simplex_never_moves_and_is_never_sent(toy: Toy) -> None:
    """Check 3, bit for bit; and all networks of a run have the same one."""
    before = bits(head(toy.networks.fresh()).etf)
    outcome = simulate(METHOD, replace(toy, optimizer=sgd(0.1, momentum=0.9, weight_decay=0.1)), 2)
    for message in [*outcome.down.values(), *outcome.replies.values()]:
        assert set(message["weights"]) == set(toy.initial)
        assert not any("etf" in name for name in message.flat())
    with toy.networks.scope():
        site = toy.site("a")
        model = site.model(outcome.server["weights"])
        METHOD.train(model, site, {}, outcome.down["a"])
        METHOD.predictor(site, {}, outcome.down["a"])
        networks = [
            model,
            toy.networks.fresh(),
            METHOD.global_predictor(toy.host(), outcome.server),
        ]
        assert [bits(head(network).etf) for network in networks] == [before] * 3
    assert bits(head(replace(toy, seed=1).networks.fresh()).etf) != before


def test_body_projection_and_temperature_are_averaged_by_samples(toy: Toy) -> None:
    outcome = simulate(METHOD, toy)
    for name in ("0.weight", "4.weight", "4.temperature", "1.running_mean"):
        parts = [
            n * outcome.replies[s]["weights"][name] for s, n in (("a", 9), ("b", 6), ("c", 11))
        ]
        torch.testing.assert_close(outcome.server["weights"][name], sum(parts) / 26)
    assert outcome.server["weights"]["4.temperature"].item() != 1


def test_without_prior_it_is_fedavg_on_the_adapted_network_bit_for_bit(toy: Toy) -> None:
    plain = simulate(load("fedetf", gamma=0.0), toy, 2)
    assert bits(plain.server) == bits(simulate(load("fedavg"), toy, 2).server)
    uneven = replace(
        toy, data={**toy.data, "a": (toy.data["a"][0], torch.tensor([0] * 7 + [1, 2]))}
    )
    assert bits(simulate(METHOD, uneven).server) != bits(simulate(load("fedavg"), uneven).server)


def test_the_personal_model_has_a_simplex_of_its_own(toy: Toy) -> None:
    outcome = simulate(METHOD, toy, 2)
    down = METHOD.broadcast(toy.host(), outcome.server, "a")
    common = head(toy.networks.fresh()).etf
    with toy.networks.scope():
        site = toy.site("a")
        local = site.model(outcome.server["weights"])
        METHOD.train(local, site, {}, Message(), "finetune")
        tuned = load("fedetf", finetune_rounds=2).predictor(site, {}, down)
        weights, own = snapshot(local), snapshot(tuned)
    assert [report.steps for report in site.journal] == [
        3,
        3,
        9,
        9,
        9,
        9,
    ]  # then 3 epochs of 3 batches a phase
    assert not torch.equal(own.pop("4.etf"), common)
    for name, tensor in own.items():
        moved = name in ("4.weight", "4.bias")
        assert (bits(tensor) == bits(weights[name])) != moved, name
    assert bits(judged(load("fedetf", finetune_rounds=0), toy, outcome, "a")) == bits(
        outcome.server["weights"]
    )


def test_the_phases_alone(toy: Toy) -> None:
    """With one rate 0 only the other part moves."""
    outcome = simulate(METHOD, toy)
    start = METHOD.broadcast(toy.host(), outcome.server, "a")
    common = bits(head(toy.networks.fresh()).etf)
    for rates, simplex_moves in (((0.1, 0.0), True), ((0.0, 0.05), False)):
        method = load(
            "fedetf",
            finetune_rounds=1,
            finetune_simplex_lr=rates[0],
            finetune_projection_lr=rates[1],
        )
        with toy.networks.scope():
            model = method.predictor(toy.site("a"), {}, start)
            local = toy.site("a").model(outcome.server["weights"])
            METHOD.train(local, toy.site("a"), {}, Message(), "finetune")
            assert (bits(head(model).etf) != common) == simplex_moves
            assert (bits(head(model).weight) == bits(head(local).weight)) == simplex_moves


def test_dimension(classes: Toy) -> None:
    wide = load("fedetf", dimension=5)
    toy = classes.adapted(wide)
    assert toy.initial["4.weight"].shape == (5, 6)
    assert judged(wide, toy, simulate(wide, toy, 1), "a")["4.weight"].shape == (5, 6)
    with pytest.raises(InputError, match="dimension=2 .* 3 classes"):
        load("fedetf", dimension=2).adapt(classifier()(), Task("classification", ("p", "q", "r")))
