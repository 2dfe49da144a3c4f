"""FedROD: two heads, and which loss reaches which of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from medfl.methods import load
from medfl.methods._parts.prototypes import class_prior
from medfl.training.site import snapshot
from tests.support.toy import Toy, bits, blobs, classifier, cross_entropy, judged, sgd, simulate

METHOD, ZERO = load("fedrod"), load("fedrod", personal_start="zero")
PERSONAL = {"4.personal.weight", "4.personal.bias"}


@pytest.fixture
def toy(classes: Toy) -> Toy:
    return classes.adapted(METHOD)


class Identity(nn.Module):
    """Feature x (B, 1), a head of three classes without bias, float64."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 3, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def test_one_step_by_hand() -> None:
    """One class has three items, one has one, one has none: n = (3, 1, 0). Feature 1, head 0, rate 1, one batch of all.

    Generic: z + log n has probabilities (3/4, 1/4, 0), the mean one-hot label is (3/4, 1/4, 0): gradient 0, g stays 0.
    Personal: z_g + h = 0 has probabilities 1/3: gradient 1/3 - (3/4, 1/4, 0), h = (5/12, -1/12, -1/3).
    """
    data = {"a": (torch.ones(4, 1).double(), torch.tensor([0, 0, 1, 0]))}
    toy = Toy(data, Identity, cross_entropy, sgd(1.0)).adapted(METHOD)
    toy.networks.initial["head.weight"].zero_()
    outcome = simulate(ZERO, toy)
    torch.testing.assert_close(
        outcome.server["weights"]["head.weight"][:, 0], torch.zeros(3).double(), rtol=0, atol=1e-7
    )
    h = outcome.states["a"]["weights"]["head.personal.weight"][:, 0].tolist()
    assert h == pytest.approx([5 / 12, -1 / 12, -1 / 3], abs=1e-15)


def test_balanced_softmax_is_its_formula() -> None:
    """Check 1: -log(n_y e^(z_y) / sum_c n_c e^(z_c)); with gamma, n^gamma."""
    z, y = (
        torch.randn(5, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 3, 1, 1, 0]),
    )
    n = torch.tensor([7, 2, 0, 30])
    for gamma in (1.0, 0.5):
        weight = n.double().clamp(min=1e-12) ** gamma
        exponential = weight * z.double().exp()
        expected = -(exponential[range(5), y] / exponential.sum(1)).log().mean()
        got = cross_entropy(z + class_prior(n, gamma), y)
        assert got.item() == pytest.approx(expected.item(), rel=1e-6)
    assert class_prior(n)[2].item() == pytest.approx(math.log(1e-12 / 30))


def test_equal_counts_are_plain_cross_entropy() -> None:
    """Check 2, exactly."""
    assert not class_prior(torch.tensor([7, 7, 7])).any()
    data = blobs({"a": 9, "b": 6})  # three of each class, two of each
    toy = Toy(data, classifier(norm=True), cross_entropy, sgd(0.1), batch_size=4).adapted(METHOD)
    plain = simulate(load("fedrod", gamma=0.0), toy, 3)
    assert bits(simulate(METHOD, toy, 3).server) == bits(plain.server)


def test_the_personal_step_reaches_the_personal_head_only(toy: Toy) -> None:
    """Check 3: with an optimiser of the personal head alone everything else is bit-identical."""

    def only_personal(network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [p for name, p in network.named_parameters() if name in PERSONAL], 0.1
        )

    outcome = simulate(METHOD, replace(toy, optimizer=only_personal))
    for name in toy.names:
        for key, tensor in outcome.replies[name]["weights"].items():
            assert "running" in key or "tracked" in key or bits(tensor) == bits(toy.initial[key])
        assert all(tensor.any() for tensor in outcome.states[name]["weights"].values())
    for method in (METHOD, ZERO):
        kept = simulate(method, replace(toy, optimizer=sgd(0.0))).states["a"]["weights"]
        for name, tensor in kept.items():
            start = toy.initial[name.replace("personal.", "")]
            assert torch.equal(tensor, start if method is METHOD else torch.zeros_like(start))


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_without_prior_body_and_generic_head_are_fedavgs_bit_for_bit(
    classes: Toy, settings: dict
) -> None:
    method, plain = (
        load("fedrod", gamma=0.0),
        replace(classes, optimizer=sgd(0.1, **settings), epochs=2),
    )
    toy = plain.adapted(method)
    assert {name: bits(t) for name, t in toy.initial.items() if name not in PERSONAL} == bits(
        plain.initial
    )
    assert bits(simulate(method, toy, 3).server) == bits(simulate(load("fedavg"), plain, 3).server)


def test_the_generic_head_follows_the_prior_and_the_personal_one_the_site() -> None:
    """A site with 15 of 16 random items in class 0: its personal model says so, its generic one does not."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    toy = Toy(
        {"a": (x, torch.tensor([0] * 15 + [1]))}, classifier(), cross_entropy, sgd(0.1), epochs=100
    )
    toy = toy.adapted(METHOD)
    outcome = simulate(METHOD, toy)
    with toy.networks.scope():
        personal = METHOD.predictor(
            toy.site("a"), outcome.states["a"], METHOD.broadcast(toy.host(), outcome.server, "a")
        )
        generic = METHOD.global_predictor(toy.host(), outcome.server)
        p, g = (network.eval()(x).softmax(1).mean(0) for network in (personal, generic))
    assert p[0] > 0.85 > 0.75 > g[0]


def test_predictions(toy: Toy) -> None:
    """Personal z_g + h(f), global z_g; a site that never took part has h = 0."""
    outcome = simulate(ZERO, toy, 2, [["a", "b"]] * 2)
    x = toy.data["c"][0]
    with toy.networks.scope():
        whole = METHOD.global_predictor(toy.host(), outcome.server).eval()
        personal = {}
        for name in toy.names:
            site, down = toy.site(name), METHOD.broadcast(toy.host(), outcome.server, name)
            personal[name] = ZERO.predictor(
                site, outcome.states.get(name) or ZERO.init_site(site), down
            ).eval()
        feature = whole[:4](x)
        generic = nn.functional.linear(
            feature, outcome.server["weights"]["4.weight"], outcome.server["weights"]["4.bias"]
        )
        assert torch.equal(whole(x), generic)
        assert torch.equal(personal["c"](x), generic)
        h = outcome.states["a"]["weights"]
        expected = generic + nn.functional.linear(
            feature, h["4.personal.weight"], h["4.personal.bias"]
        )
        torch.testing.assert_close(personal["a"](x), expected)
        assert bits(snapshot(whole)["4.personal.weight"]) == bits(torch.zeros(3, 6))


def test_the_personal_head_stays(toy: Toy) -> None:
    assert METHOD.personal_names(toy.networks.fresh()) == PERSONAL
    first, second = (simulate(METHOD, toy, rounds, [["a", "b"], ["b"]]) for rounds in (1, 2))
    assert set(first.states["a"]["weights"]) == PERSONAL
    assert bits(second.states["a"]) == bits(first.states["a"])
    assert bits(judged(METHOD, toy, second, "a")["4.weight"]) == bits(
        second.server["weights"]["4.weight"]
    )
