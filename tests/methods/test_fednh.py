"""FedNH: prototypes as the head, moved by the server alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods._parts.prototypes import collect
from medfl.methods.fednh import CosineHead, spread
from medfl.training.site import snapshot
from tests.support.toy import Toy, bits, blobs, classifier, cross_entropy, sgd, simulate

METHOD = load("fednh")
W = "4.weight"


@pytest.fixture
def toy(classes: Toy) -> Toy:
    return classes.adapted(METHOD)


def head(network: nn.Module) -> CosineHead:
    return next(module for module in network.modules() if isinstance(module, CosineHead))


def reply(toy: Toy, means: list[list[float]], counts: list[int]) -> Message:
    rows = torch.zeros(3, 6)
    rows[:, :2] = torch.tensor(means)
    return Message(
        {"weights": toy.initial, "prototypes": {"means": rows, "counts": torch.tensor(counts)}},
        {"samples": 1},
    )


def test_one_server_step_by_hand(toy: Toy) -> None:
    """rho = 0.6. Class 0: r = (1, 0) three times and (0, 1) once: (3, 1)/4, direction (3, 1)/sqrt(10); W_0 = (0, 1):
    0.6 (0, 1) + 0.4 (3, 1)/sqrt(10) = (0.37947, 0.72649), of norm 0.81963: (0.46298, 0.88637).
    Class 1 has one owner, r = W_1 = (1, 0): it stays. Class 2 nobody has: it keeps its row.
    """
    server = {"weights": toy.initial}
    server["weights"][W] = torch.eye(6)[[1, 0, 5]]
    replies = {
        "a": reply(toy, [[1, 0], [0, 0], [0, 0]], [3, 0, 0]),
        "b": reply(toy, [[0, 1], [1, 0], [0, 0]], [1, 5, 0]),
    }
    after = load("fednh", rho=0.6).aggregate(toy.host(), server, replies, 2)["weights"][W]
    assert after[0].tolist() == pytest.approx([0.46298, 0.88637, 0, 0, 0, 0], abs=1e-5)
    assert after[1].tolist() == pytest.approx([1, 0, 0, 0, 0, 0])
    assert after[2].tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_rows_have_norm_one_after_every_round(toy: Toy, rho: float) -> None:
    """Check 1, 1e-6, with partial participation and absent classes."""
    data = blobs({"a": 9, "b": 5, "c": 4}, labels={"b": (1,), "c": (0, 2)})
    outcome = simulate(
        load("fednh", rho=rho),
        replace(toy, data=data),
        4,
        [["a", "b"], ["b"], ["c"], ["a", "b", "c"]],
    )
    for server in outcome.history:
        torch.testing.assert_close(
            server["weights"][W].norm(dim=1), torch.ones(3), rtol=0, atol=1e-6
        )
    second, first = outcome.history[2]["weights"][W], outcome.history[1]["weights"][W]
    assert bits(second[[0, 2]]) == bits(first[[0, 2]])  # site b alone has class 1 only
    assert not torch.equal(second[1], first[1])


def test_rho_one_never_changes_the_prototypes(toy: Toy) -> None:
    """Check 2, to the bit."""
    outcome = simulate(load("fednh", rho=1.0), toy, 3)
    assert bits(outcome.server["weights"][W]) == bits(toy.initial[W])
    assert bits(simulate(METHOD, toy).server["weights"][W]) != bits(toy.initial[W])


def test_rho_is_a_share() -> None:
    with pytest.raises(InputError, match="rho=1.5 for method 'fednh'; rho is float >= 0 and <= 1"):
        load("fednh", rho=1.5)


def test_prototypes_have_no_gradient(toy: Toy) -> None:
    """Check 3: none after backward, and local training leaves them, with weight decay and momentum too."""
    network = toy.networks.fresh()
    cross_entropy(network(toy.data["a"][0]), toy.data["a"][1]).backward()
    assert head(network).weight.grad is None
    assert head(network).scale.grad is not None
    decaying = replace(toy, optimizer=sgd(0.1, momentum=0.9, weight_decay=0.1))
    for sent in simulate(METHOD, decaying).replies.values():
        assert bits(sent["weights"][W]) == bits(toy.initial[W])
        assert bits(sent["weights"]["0.weight"]) != bits(toy.initial["0.weight"])
        assert bits(sent["weights"]["4.scale"]) != bits(toy.initial["4.scale"])


def test_logits_are_scaled_cosines() -> None:
    """f = (3, 4), W = (1, 0), (0, 1), s = 20: 20 (0.6, 0.8); the length of f does not matter."""
    layer = CosineHead(2, 2, 20.0, True)
    layer.weight.data = torch.eye(2)
    assert layer(torch.tensor([[3.0, 4], [0.3, 0.4]])).tolist() == [pytest.approx([12, 16])] * 2


def test_a_site_sends_the_directions_of_its_class_means(toy: Toy) -> None:
    outcome = simulate(METHOD, toy)
    sent = outcome.replies["b"]
    with toy.networks.scope():
        model = toy.networks.lease(sent["weights"])
        means, counts = collect(
            model, toy.site("b").train, 3, 3, torch.device("cpu"), normalised=True
        )
    torch.testing.assert_close(sent["prototypes"]["means"], means / means.norm(dim=1, keepdim=True))
    assert sent["prototypes"]["counts"].tolist() == counts.tolist() == [2, 2, 2]


def test_the_rest_moves_by_the_servers_rate_towards_the_plain_mean(toy: Toy) -> None:
    for rate in (1.0, 0.5):
        outcome = simulate(load("fednh", server_lr=rate), toy)
        for name in ("0.weight", "1.bias", "4.scale"):
            mean = torch.stack([sent["weights"][name] for sent in outcome.replies.values()]).mean(0)
            expected = toy.initial[name] + rate * (mean - toy.initial[name])
            torch.testing.assert_close(outcome.server["weights"][name], expected)
        mean = torch.stack(
            [sent["weights"]["1.running_mean"] for sent in outcome.replies.values()]
        ).mean(0)
        torch.testing.assert_close(outcome.server["weights"]["1.running_mean"], mean)


def test_options_of_the_scale(classes: Toy) -> None:
    fixed = load("fednh", scale=30.0, learn_scale=False)
    outcome = simulate(fixed, classes.adapted(fixed), 2)
    assert outcome.server["weights"]["4.scale"].item() == pytest.approx(30)
    assert (
        METHOD.adapt(classifier()(), Task("classification", ("p", "q", "r")))[4].scale.item() == 20
    )


def cosines(rows: Tensor) -> Tensor:
    return (rows @ rows.T).fill_diagonal_(-1)


def test_initial_rows() -> None:
    """Orthonormal where they can be; three in the plane are 120 degrees apart; ten in three dimensions keep apart."""
    with stream(0, "test"):
        rows = spread(4, 6)
        torch.testing.assert_close(rows @ rows.T, torch.eye(4), rtol=0, atol=1e-6)
        plane, space = spread(3, 2), spread(10, 3)
    torch.testing.assert_close(plane @ plane.T, 1.5 * torch.eye(3) - 0.5, rtol=0, atol=0.02)
    assert cosines(space).max() < 0.5
    torch.testing.assert_close(space.norm(dim=1), torch.ones(10))


def test_every_network_of_a_run_starts_with_the_same_rows(classes: Toy) -> None:
    first, again, other = (
        classes.adapted(METHOD),
        classes.adapted(METHOD),
        replace(classes, seed=1).adapted(METHOD),
    )
    assert bits(first.initial) == bits(again.initial) == bits(snapshot(first.networks.fresh()))
    assert bits(first.initial[W]) != bits(other.initial[W])
    kept = {name: tensor for name, tensor in classes.initial.items() if not name.startswith("4")}
    assert bits({name: first.initial[name] for name in kept}) == bits(kept)
