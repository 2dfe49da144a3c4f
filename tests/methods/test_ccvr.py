"""CCVR: FedAvg with a head retrained on pooled class Gaussians."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medfl.core.message import Message
from medfl.methods import load
from medfl.methods._parts.prototypes import Gaussians, pool
from medfl.methods.ccvr import CCVR
from medfl.training.site import snapshot
from tests.support.toy import Toy, bits, blobs, classifier, cross_entropy, simulate

METHOD, FEDAVG = load("ccvr"), load("fedavg")
HEAD = {"4.weight", "4.bias"}


def pooled_features(toy: Toy, weights: dict) -> tuple[Tensor, Tensor]:
    """Features of everybody's items under a model in evaluation mode."""
    network = toy.networks.fresh()
    network.load_state_dict(weights)
    x, y = (torch.cat(column) for column in zip(*toy.data.values(), strict=True))
    with torch.no_grad():
        return network.eval()[:4](x), y


def test_one_calibration_by_hand() -> None:
    """Two classes at 1 and -1 without spread, feature x, head 0, one step of all four virtual features, rate 1.

    All probabilities are 1/2: gradient on the weights (mean over items of (p - y) x): class 0: (1/2)(-1/2 * 1) +
    (1/2)(1/2 * -1) = -1/2, class 1: +1/2; on the biases 0. So the head becomes (1/2, -1/2).
    """
    x, y = torch.tensor([[1.0], [1], [-1], [-1]]), torch.tensor([0, 0, 1, 1])
    network = lambda: nn.Sequential(nn.Identity(), nn.Linear(1, 2))  # noqa: E731
    toy = Toy({"a": (x[:3], y[:3]), "b": (x[3:], y[3:])}, network, cross_entropy)
    for tensor in toy.networks.initial.values():
        tensor.zero_()
    method = load("ccvr", virtual=2, calibration_epochs=1, calibration_lr=1.0)
    calibrated = simulate(method, toy).server["calibrated"]
    torch.testing.assert_close(calibrated["1.weight"], torch.tensor([[0.5], [-0.5]]))
    torch.testing.assert_close(calibrated["1.bias"], torch.zeros(2))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_heads_momentum(momentum: float) -> None:
    """Two steps: the second gradient is -sigmoid(-1) on class 0, the velocity has the first one's -1/2 besides."""
    x, y = torch.tensor([[1.0], [1], [-1], [-1]]), torch.tensor([0, 0, 1, 1])
    toy = Toy({"a": (x, y)}, lambda: nn.Sequential(nn.Identity(), nn.Linear(1, 2)), cross_entropy)
    for tensor in toy.networks.initial.values():
        tensor.zero_()
    options = {
        "virtual": 2,
        "calibration_epochs": 2,
        "calibration_lr": 1.0,
        "calibration_momentum": momentum,
    }
    calibrated = simulate(load("ccvr", options), toy).server["calibrated"]
    second = torch.sigmoid(torch.tensor(-1.0)).item()
    assert calibrated["1.weight"][0].item() == pytest.approx(
        0.5 + second + momentum * 0.5, abs=1e-5
    )
    assert load("ccvr").calibration_momentum == 0.9


def test_the_pooled_statistics_are_those_of_all_features_together() -> None:
    """Check 1, 1e-12 in float64 over the messages of unequal sites, one of a single item."""
    data = {n: (x.double(), y) for n, (x, y) in blobs({"a": 1, "b": 8, "c": 11, "d": 20}).items()}
    toy = Toy(data, lambda: classifier()().double(), cross_entropy)
    outcome = simulate(METHOD, toy)
    whole = pool([Gaussians(**outcome.replies[name]["statistics"]) for name in toy.names])
    features, labels = pooled_features(toy, toy.initial)
    for c in range(3):
        own = features[labels == c]
        assert whole.counts[c] == len(own)
        torch.testing.assert_close(whole.means[c], own.mean(0), rtol=0, atol=1e-12)
        torch.testing.assert_close(whole.covariances[c], torch.cov(own.T), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rounds", [1, 3])
def test_only_the_head_of_the_received_model_changes(classes: Toy, rounds: int) -> None:
    """Check 2: body, statistics and counters are w^(t-1)'s, bit for bit."""
    outcome = simulate(METHOD, classes, rounds)
    before = outcome.history[rounds - 1]["weights"]
    with classes.networks.scope():
        judged = snapshot(METHOD.global_predictor(classes.host(rounds), outcome.server))
    for name, tensor in judged.items():
        assert (bits(tensor) == bits(before[name])) == (name not in HEAD), name


def test_the_order_of_sites_is_no_matter(classes: Toy) -> None:
    """Check 3."""
    outcome = simulate(METHOD, classes, 2)
    turned = dict(reversed(outcome.replies.items()))
    assert bits(METHOD.aggregate(classes.host(2), outcome.history[1], turned, 3)) == bits(
        outcome.server
    )


def test_training_is_fedavgs_bit_for_bit(classes: Toy) -> None:
    ours, average = simulate(METHOD, classes, 3), simulate(FEDAVG, classes, 3)
    assert bits(ours.server["weights"]) == bits(average.server["weights"])
    for name, reply in ours.replies.items():
        assert bits(reply["weights"]) == bits(average.replies[name]["weights"])
    still = simulate(load("ccvr", calibration_epochs=0), classes, 3)
    assert bits(still.server["calibrated"]) == bits(average.history[2]["weights"])


def test_the_size_of_the_statistics() -> None:
    """K (d^2 + d + 1) numbers; with d = 64 and K = 8 that is 133 kB."""
    network = lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))  # noqa: E731
    outcome = simulate(METHOD, Toy(blobs({"a": 24}), network, cross_entropy))
    sent = outcome.replies["a"]["statistics"]
    assert sum(tensor.numel() for tensor in sent.values()) == 8 * (64**2 + 64 + 1)
    assert sum(tensor.numel() * tensor.element_size() for tensor in sent.values()) == 133_152


def test_statistics_travel_every_so_many_rounds(classes: Toy) -> None:
    method = load("ccvr", calibrate_every=2)
    kinds = [
        {"statistics" in r for r in simulate(method, classes, rounds).replies.values()}
        for rounds in (1, 2, 3)
    ]
    assert kinds == [{False}, {True}, {False}]
    first, second, third = (simulate(method, classes, rounds).server for rounds in (1, 2, 3))
    assert "calibrated" not in first
    assert bits(third["calibrated"]) == bits(second["calibrated"])
    assert bits(second["calibrated"]) == bits(simulate(METHOD, classes, 2).server["calibrated"])
    with classes.networks.scope():
        plain = METHOD.global_predictor(classes.host(1), first)
        assert bits(dict(plain.state_dict())) == bits(first["weights"])


def test_a_class_with_fewer_than_two_items_is_skipped(classes: Toy) -> None:
    """Nothing drawn for it; with no class at all the head stays."""
    drawn: list[int] = []

    class Seen(Gaussians):
        def sample(self, label: int, number: int, generator: torch.Generator) -> Tensor:
            drawn.append(label)
            return super().sample(label, number, generator)

    means, covariances = torch.zeros(3, 6), torch.zeros(3, 6, 6)
    method = CCVR()
    method._calibrated(
        classes.host(), classes.initial, Seen(torch.tensor([5, 1, 2]), means, covariances)
    )
    assert drawn == [0, 2]
    none = method._calibrated(
        classes.host(), classes.initial, Seen(torch.tensor([1, 0, 1]), means, covariances)
    )
    assert bits(none) == bits(classes.initial)


def test_calibration_repairs_a_biased_head() -> None:
    """Two sites, each short of a class; the received head always says class 2: calibrated it tells all three apart."""
    toy = Toy(
        blobs({"a": 60, "b": 60}, labels={"a": (0, 1), "b": (1, 2)}), classifier(), cross_entropy
    )
    biased = {**toy.initial, "4.bias": torch.tensor([-5.0, -5.0, 5.0])}
    method = load("ccvr", calibration_epochs=40, calibration_lr=0.05)
    replies = {}
    for name in toy.names:
        with toy.networks.scope():
            site = replace(toy.site(name))
            _, replies[name] = method.local_update(site, {}, Message({"weights": biased}))
    server = method.aggregate(toy.host(), {"weights": biased}, replies, 2)
    features, labels = pooled_features(toy, biased)

    def accuracy(weights: dict) -> float:
        logits = nn.functional.linear(features, weights["4.weight"], weights["4.bias"])
        return (logits.argmax(1) == labels).double().mean().item()

    assert accuracy(biased) < 0.4
    assert accuracy(server["calibrated"]) > 0.6
