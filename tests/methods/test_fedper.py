"""FedPer: one body for all, a head for each; check numbers are those of the method's card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from medfl.core.errors import InputError
from medfl.core.task import Task
from medfl.methods import load
from medfl.networks import build
from medfl.training.site import merged
from tests.support.toy import Toy, bits, classifier, half_square, judged, sgd, simulate

METHOD = load("fedper")
HEAD = {"4.weight", "4.bias"}


class Chain(nn.Module):
    """f(x) = head * (body * x), float64."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_two_rounds_by_hand() -> None:
    """Loss (p t x - y)^2 / 2, x = 1, rate 0.5, body t = 1, head p = 1; a has y = 0 once, b has y = 3 three times.

    Round 1: both parts move by the gradient at the start. a: error 1, t = 1 - 0.5 = 0.5, p = 0.5.
    b: error -2, t = 2, p = 2. By samples t = (0.5 + 3 * 2) / 4 = 1.625.
    Round 2, a: error 1.625 * 0.5 = 0.8125, t = 1.625 - 0.5 * 0.8125 * 0.5 = 1.421875, p = 0.5 - 0.5 * 0.8125 * 1.625 =
    -0.16015625. b: error 3.25 - 3 = 0.25, t = 1.625 - 0.25 = 1.375, p = 2 - 0.5 * 0.25 * 1.625 = 1.796875.
    """
    data = {
        name: (torch.ones(n, 1).double(), torch.full((n,), y).double())
        for name, n, y in (("a", 1, 0.0), ("b", 3, 3.0))
    }
    toy = Toy(data, Chain, half_square, sgd(0.5))
    for name in ("body.weight", "head.weight"):
        toy.networks.initial[name].fill_(1)
    first, second = simulate(METHOD, toy), simulate(METHOD, toy, 2)
    assert first.server["weights"]["body.weight"].item() == 1.625
    assert [first.states[name]["weights"]["head.weight"].item() for name in "ab"] == [0.5, 2]
    assert second.server["weights"]["body.weight"].item() == (1.421875 + 3 * 1.375) / 4
    assert [second.states[name]["weights"]["head.weight"].item() for name in "ab"] == [
        -0.16015625,
        1.796875,
    ]


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_an_empty_head_is_fedavg_and_an_empty_body_local_bit_for_bit(
    classes: Toy, settings: dict
) -> None:
    """Check 1; layer 2 is a ReLU."""
    toy = replace(classes, optimizer=sgd(0.1, **settings))
    shared, average = (
        simulate(load("fedper", head_layers="2"), toy, 3),
        simulate(load("fedavg"), toy, 3),
    )
    assert bits(shared.server) == bits(average.server)
    method, local = load("fedper", head_layers="0, 1, 4"), load("local")
    kept, alone = simulate(method, toy, 3), simulate(local, toy, 3)
    for name in toy.names:
        assert bits(judged(method, toy, kept, name)) == bits(judged(local, toy, alone, name))


def test_without_a_body_nothing_crosses_a_wire(classes: Toy) -> None:
    """A group without tensors is not encoded."""
    method = load("fedper", head_layers="0, 1, 4")
    kept, sent = simulate(method, classes, 2), simulate(method, classes, 2, wire=True)
    assert "weights" not in sent.replies["a"]
    assert bits(kept.states) == bits(sent.states)
    assert bits(judged(method, classes, sent, "b")) == bits(judged(method, classes, kept, "b"))


def test_heads_stay_and_those_of_absent_sites_do_not_change(classes: Toy) -> None:
    """Check 2."""
    first, second = (simulate(METHOD, classes, rounds, [["a", "b"], ["b"]]) for rounds in (1, 2))
    assert bits(second.states["a"]) == bits(first.states["a"])
    assert bits(second.states["b"]) != bits(first.states["b"])
    for message in [*second.down.values(), *second.replies.values()]:
        assert set(message["weights"]) == set(classes.initial) - HEAD
    newest = second.server["weights"]
    assert bits(judged(METHOD, classes, second, "a")) == bits(
        merged(newest, first.states["a"]["weights"])
    )
    initial = {name: classes.initial[name] for name in HEAD}
    assert bits(judged(METHOD, classes, second, "c")) == bits(merged(newest, initial))
    means = torch.stack([reply["weights"]["1.running_mean"] for reply in first.replies.values()])
    torch.testing.assert_close(
        first.server["weights"]["1.running_mean"], (9 * means[0] + 6 * means[1]) / 15
    )


def test_the_papers_numbers_of_parameters() -> None:
    """Check 3: with both linear layers of the MNIST network personal, 20 sites send 20 (260 + 5,020)."""
    network = nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.Conv2d(10, 20, 5),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Linear(50, 10),
    )
    personal = load("fedper", head_layers="3,5").personal_names(network)
    assert (
        20 * sum(t.numel() for name, t in network.state_dict().items() if name not in personal)
        == 105600
    )
    assert METHOD.personal_names(network) == {"5.weight", "5.bias"}
    shipped = build("two_conv", 1, 10)
    personal = METHOD.personal_names(shipped)
    assert personal == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert (
        20 * sum(t.numel() for name, t in shipped.state_dict().items() if name not in personal)
        == 105600
    )
    assert load("fedper", head_layers="fc2").personal_names(shipped) == {"fc2.weight", "fc2.bias"}


@pytest.mark.parametrize("name", ["fedrep", "fedbabu"])
def test_a_part_without_anything_to_train_is_named(name: str) -> None:
    frozen, task = classifier()(), Task("classification", ("p", "q", "r"))
    frozen[0].requires_grad_(False)
    said = f"method '{name}' on a Sequential with the head 4: its body has nothing to train; it trains a part"
    with pytest.raises(InputError, match=said):
        load(name).adapt(frozen, task)
    with pytest.raises(InputError, match="with the head 0,4: its body has nothing to train"):
        load(name, head_layers="0,4").adapt(classifier()(), task)
    headless = classifier()()
    headless[4].requires_grad_(False)
    options = {"head_epochs": 0, "finetune_epochs": 0} if name == "fedrep" else {}
    assert load(name, options).adapt(headless, task) is headless
    if name == "fedrep":
        with pytest.raises(InputError, match="with the head 4: its head has nothing to train"):
            load(name).adapt(headless, task)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu"])
def test_a_layer_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(InputError, match="head layer 'fc'"):
        load(name, head_layers="fc").personal_names(classifier()())
