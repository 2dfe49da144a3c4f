"""FedProc against its equations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods._parts.prototypes import collect
from medfl.methods.fedproc import prototype_loss
from tests.support.toy import Toy, adam, bits, blobs, classifier, cross_entropy, sgd, simulate

METHOD, FEDAVG = load("fedproc"), load("fedavg")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Turning(nn.Module):
    """Feature (x_0, x_1 + t x_0) and a linear layer; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.t, self.head = (
            nn.Parameter(torch.zeros((), dtype=torch.float64)),
            nn.Linear(2, 3, dtype=torch.float64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.stack([x[:, 0], x[:, 1] + self.t * x[:, 0]], 1))


# The loss


def test_orthonormal_prototypes() -> None:
    """Check 2: at the own one of ten, log(e / (e + 9)) is -log(1 + 9 e^-1); with temperature 0.5 9 e^-2."""
    every = torch.ones(10, dtype=torch.bool)
    prototypes = torch.eye(10).double()
    labels = torch.tensor([3, 7])
    loss = prototype_loss(prototypes[labels], labels, prototypes, every, 1.0)
    assert loss.item() == pytest.approx(1.46115, abs=5e-6)
    loss = prototype_loss(prototypes[labels], labels, prototypes, every, 0.5)
    assert loss.item() == pytest.approx(math.log1p(9 * math.exp(-2)), abs=1e-12)


def test_a_single_known_class_gives_zero() -> None:
    """Check 3; its items have nothing to tell apart, the others no prototype. No gradient, no NaN."""
    z, known = drawn(5, 4).requires_grad_(), torch.tensor([False, True, False])
    for labels in (torch.ones(5).long(), torch.tensor([0, 1, 2, 1, 0]), torch.zeros(5).long()):
        loss = prototype_loss(z, labels, drawn(3, 4, seed=1), known, 1.0)
        (gradient,) = torch.autograd.grad(loss, z)
        assert loss.item() == 0
        assert not gradient.any()


def test_only_directions_count() -> None:
    """Check 4, of features and of prototypes."""
    z, labels, prototypes = drawn(6, 4), torch.tensor([0, 1, 2, 1, 0, 2]), drawn(3, 4, seed=1)
    every = torch.ones(3, dtype=torch.bool)
    loss = prototype_loss(z, labels, prototypes, every, 0.5)
    scaled = prototype_loss(torch.arange(1, 7)[:, None] * z, labels, 5 * prototypes, every, 0.5)
    torch.testing.assert_close(scaled, loss, rtol=0, atol=1e-12)


def test_unknown_classes_are_no_rivals_and_their_items_count_as_zero() -> None:
    """Two of three items are known: the mean over all three is two thirds of theirs, over the classes 0 and 2."""
    z, prototypes, known = drawn(3, 4), drawn(3, 4, seed=1), torch.tensor([True, False, True])
    loss = prototype_loss(z, torch.tensor([0, 1, 2]), prototypes, known, 1.0)
    two = torch.ones(2, dtype=torch.bool)
    alone = prototype_loss(z[[0, 2]], torch.tensor([0, 1]), prototypes[[0, 2]], two, 1.0)
    torch.testing.assert_close(loss, alone * 2 / 3, rtol=0, atol=1e-12)


# The schedule


def test_alpha_falls_from_one_in_round_one_to_zero_in_the_last() -> None:
    """1 - t / (T - 1), t = round - 1."""
    assert [load("fedproc", rounds=5).alpha_at(round_) for round_ in range(1, 8)] == [
        1,
        0.75,
        0.5,
        0.25,
        0,
        0,
        0,
    ]
    assert load("fedproc", rounds=5, alpha=0.5).alpha_at(2) == 0.375
    assert load("fedproc", rounds=1).alpha_at(1) == 1
    assert [load("fedproc", rounds=5).alpha_at(round_) for round_ in (1, 4)] == [
        1,
        1 - 3 / 4,
    ]  # T = 4 by 1 - t / T


def test_alpha_above_one_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"alpha=1\.5 for method 'fedproc'; alpha is float >= 0 and <= 1"
    ):
        load("fedproc", alpha=1.5)


# Training


@pytest.mark.parametrize("alpha", [1.0, 0.4])
def test_one_step_by_hand(alpha: float) -> None:
    """Item (1, 0) of class 0, feature (1, t), t = 0; g_0 = (0, 1), g_1 = (1, 0), none for class 2; tau = 0.5.

    s_0 = t / sqrt(1 + t^2) and s_1 = 1 / sqrt(1 + t^2): 0 and 1, with derivatives 1 and 0. The loss log(1 + e^(2 (s_1 -
    s_0))) has the derivative -2 sigma(2). The site's loss, 5 t here, counts 1 - alpha_2 = 1 - 3/4 alpha.
    """
    data = {"a": (torch.tensor([[1.0, 0]]).double(), torch.tensor([0]))}
    toy = Toy(data, Turning, lambda output, target: 5 * output[:, 0].mean(), sgd(0.1))
    toy.networks.initial["head.weight"].copy_(torch.tensor([[0.0, 1], [0, 0], [0, 0]]))
    prototypes = {
        "means": torch.tensor([[0.0, 1], [1, 0], [0, 0]]).double(),
        "counts": torch.tensor([1, 1, 0]),
    }
    method = load("fedproc", alpha=alpha, rounds=5, tau=0.5)
    with toy.networks.scope():
        down = Message({"weights": toy.initial, "prototypes": prototypes})
        _, reply = method.local_update(toy.site("a", 2), {}, down)
    share = 0.75 * alpha
    expected = -0.1 * (share * -2 / (1 + math.exp(-2)) + (1 - share) * 5)
    assert reply["weights"]["t"].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("optimizer", [sgd(0.1, momentum=0.9, weight_decay=0.01), adam(0.01)])
def test_alpha_zero_is_fedavg_bit_for_bit(classes: Toy, optimizer) -> None:
    """Check 1; also after the last round of the schedule."""
    toy = replace(classes, optimizer=optimizer, epochs=2)
    average = simulate(FEDAVG, toy, 3)
    for options in ({"alpha": 0.0}, {"rounds": 2}):
        outcome = simulate(load("fedproc", **options), toy, 3)
        assert bits(outcome.server["weights"]) == bits(average.server["weights"])
        assert all(
            bits(outcome.replies[n]["weights"]) == bits(average.replies[n]["weights"])
            for n in toy.names
        )
    assert bits(simulate(METHOD, toy, 3).server["weights"]) != bits(average.server["weights"])


def test_round_one_without_prototypes_is_fedavg_bit_for_bit(classes: Toy) -> None:
    outcome, average = simulate(METHOD, classes), simulate(FEDAVG, classes)
    assert bits(outcome.server["weights"]) == bits(average.server["weights"])
    assert not outcome.down["a"]["prototypes"]["counts"].any()


# The prototypes


def replies(
    toy: Toy, counts: dict[str, list[int]], values: dict[str, list[float]]
) -> dict[str, Message]:
    made = {}
    for name in counts:
        prototypes = {
            "means": torch.tensor(values[name])[:, None].repeat(1, 6),
            "counts": torch.tensor(counts[name]),
        }
        made[name] = Message({"weights": toy.initial, "prototypes": prototypes}, {"samples": 1})
    return made


def test_the_server_averages_over_owners_and_keeps_what_nobody_sent(classes: Toy) -> None:
    """Class 0: (1 + 5) / 2 = 3, by counts 3 and 1 (3 * 1 + 5) / 4 = 2. Class 1: b alone. Class 2: nobody, stays 9."""
    old = {"means": torch.full((3, 6), 9.0), "counts": torch.tensor([0, 0, 4])}
    values = {"a": [1.0, 0, 0], "b": [5.0, 7, 0]}
    for counts, expected in (
        ({"a": [1, 0, 0], "b": [1, 1, 0]}, [3, 7, 9]),
        ({"a": [3, 0, 0], "b": [1, 1, 0]}, [2, 7, 9]),
    ):
        with classes.networks.scope():
            server = {"weights": classes.initial, "prototypes": old}
            server = METHOD.aggregate(classes.host(), server, replies(classes, counts, values), 2)
        means = server["prototypes"]["means"]
        assert means.tolist() == [[value] * 6 for value in expected]
        assert (server["prototypes"]["counts"] > 0).all()


@pytest.mark.parametrize("average", ["uniform", "samples"])
def test_replies_are_the_trained_models_class_means(average: str) -> None:
    """Plain means need no counts, so a site tells who owns a class and not how often it occurs."""
    data = blobs({"a": 9, "b": 4}, labels={"b": (0, 2)})
    toy = Toy(data, classifier(norm=True, dropout=0.3), cross_entropy, sgd(0.1), batch_size=4)
    outcome = simulate(load("fedproc", average=average), toy, 2)
    for name in toy.names:
        sent = outcome.replies[name]["prototypes"]
        with toy.networks.scope():
            model = toy.networks.lease(outcome.replies[name]["weights"])
            means, counts = collect(model, toy.site(name).train, 4, 3, torch.device("cpu"))
        assert bits(sent["means"]) == bits(means)
        assert torch.equal(sent["counts"], counts if average == "samples" else (counts > 0).long())
    assert outcome.replies["b"]["prototypes"]["counts"].tolist() == (
        [2, 0, 2] if average == "samples" else [1, 0, 1]
    )


def test_absent_owners_leave_their_prototype() -> None:
    toy = Toy(
        blobs({"a": 4, "b": 4}, labels={"a": (0,), "b": (1,)}),
        classifier(),
        cross_entropy,
        sgd(0.1),
    )
    outcome = simulate(METHOD, toy, 2, [["a", "b"], ["b"]])
    first, second = (server["prototypes"]["means"] for server in outcome.history[1:])
    assert bits(first[0]) == bits(second[0])
    assert bits(first[1]) != bits(second[1])
    assert not second[2].any()


def test_a_network_with_another_number_of_outputs_is_refused() -> None:
    with pytest.raises(InputError, match="each of the 3 classes"):
        METHOD.adapt(nn.Linear(4, 1), Task("classification", ("p", "q", "r")))
