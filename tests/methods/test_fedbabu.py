"""FedBABU: the head never moves before fine-tuning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from medfl.methods import load
from medfl.training.site import fit, snapshot
from tests.support.toy import Toy, adam, bits, half_square, judged, sgd, simulate

METHOD = load("fedbabu")
HEAD = {"4.weight", "4.bias"}


class Chain(nn.Module):
    """f(x) = head * (body * x), float64."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_one_round_by_hand() -> None:
    """Loss (p t x - y)^2 / 2, x = 1, rate 0.5, body t = 1, head p = 1; a has one item y = 0, b three of y = 3.

    a: body gradient (1 - 0) p = 1, t = 0.5. b: gradient (1 - 3) p = -2, t = 2. Plain mean: t = 1.25; by samples 1.625.
    Fine-tuning a for one epoch from t = 1.25, p = 1: both gradients are of 1.25: t by -0.5 * 1.25 * 1 to 0.625,
    p by -0.5 * 1.25 * 1.25 to 0.21875.
    """
    data = {"a": (torch.ones(1, 1).double(), torch.zeros(1).double()),
            "b": (torch.ones(3, 1).double(), torch.full((3,), 3.0).double())}  # fmt: skip
    toy = Toy(data, Chain, half_square, sgd(0.5))
    for name in ("body.weight", "head.weight"):
        toy.networks.initial[name].fill_(1)
    for weights, value in (("uniform", 1.25), ("samples", 1.625)):
        assert (
            simulate(load("fedbabu", weights=weights), toy).server["weights"]["body.weight"].item()
            == value
        )
    tuned = judged(load("fedbabu", finetune_epochs=1), toy, simulate(METHOD, toy), "a")
    assert (tuned["body.weight"].item(), tuned["head.weight"].item()) == (0.625, 0.21875)


def everything(network: nn.Module) -> torch.optim.Optimizer:
    """An optimiser that does not ask which parameters are to be trained, as those of bundles."""
    return torch.optim.Adam(network.parameters(), 0.01, weight_decay=0.01)


@pytest.mark.parametrize(
    "optimizer", [sgd(0.1, momentum=0.9, weight_decay=0.1), adam(0.01), everything]
)
def test_the_head_is_the_initial_one_everywhere_and_always(classes: Toy, optimizer) -> None:
    """With weight decay too, on networks that were fine-tuned before; and no message has it."""
    toy = replace(classes, optimizer=optimizer)
    judged(METHOD, toy, simulate(METHOD, toy), "a")
    outcome = simulate(METHOD, toy, 3)
    for message in [*outcome.down.values(), *outcome.replies.values()]:
        assert set(message["weights"]) == set(toy.initial) - HEAD
    head = {name: toy.initial[name] for name in HEAD}
    with toy.networks.scope():
        whole = snapshot(METHOD.global_predictor(toy.host(), outcome.server))
    for weights in (whole, *(state["weights"] for state in outcome.states.values())):
        assert bits({name: weights[name] for name in sorted(HEAD)}) == bits(
            {n: head[n] for n in sorted(HEAD)}
        )
    for name in ("0.weight", "1.weight", "1.running_mean"):
        assert bits(whole[name]) != bits(toy.initial[name])


def test_without_fine_tuning_a_site_has_the_global_model(classes: Toy) -> None:
    method = load("fedbabu", finetune_epochs=0)
    outcome = simulate(method, classes, 2)
    with classes.networks.scope():
        whole = snapshot(method.global_predictor(classes.host(), outcome.server))
    for name in classes.names:
        assert bits(judged(method, classes, outcome, name)) == bits(whole)


def test_fine_tuning_is_plain_training_of_the_whole_network(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 2, [["a", "b"]] * 2)
    for name in classes.names:  # also site c, which never took part
        with classes.networks.scope():
            site = classes.site(name)
            model = site.model({**classes.initial, **outcome.server["weights"]})
            fit(model, site.for_epochs(5), purpose="finetune")
            expected = snapshot(model)
        assert bits(judged(METHOD, classes, outcome, name)) == bits(expected)
        assert bits(expected["4.weight"]) != bits(classes.initial["4.weight"])


def test_fine_tuning_does_not_touch_training(classes: Toy) -> None:
    tuned, plain = (
        simulate(METHOD, classes, 2),
        simulate(load("fedbabu", finetune_epochs=0), classes, 2),
    )
    assert bits([tuned.server, tuned.states]) == bits([plain.server, plain.states])


def test_buffers_are_averaged_with_the_body(classes: Toy) -> None:
    outcome = simulate(METHOD, classes)
    means = torch.stack([reply["weights"]["1.running_mean"] for reply in outcome.replies.values()])
    torch.testing.assert_close(outcome.server["weights"]["1.running_mean"], means.mean(0))


def test_a_round_is_fedavgs_on_a_network_with_a_frozen_head(classes: Toy) -> None:
    """Bit for bit; in later rounds FedAvg's averaging rounds the frozen head."""

    def frozen() -> nn.Module:
        network = classes.network()
        network[4].requires_grad_(False)
        return network

    average = simulate(load("fedavg"), replace(classes, network=frozen)).server["weights"]
    body = simulate(load("fedbabu", weights="samples"), classes).server["weights"]
    assert bits(body) == bits({name: average[name] for name in body})
