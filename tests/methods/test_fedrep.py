"""FedRep: bodies are shared, heads are not, and only one of them moves at a time."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

from medfl.core.errors import InputError
from medfl.methods import load
from medfl.training.layers import train_only
from medfl.training.site import fit, merged, snapshot
from tests.support.toy import Toy, bits, classifier, half_square, judged, sgd, simulate

HEAD = {"4.weight", "4.bias"}


class Chain(nn.Module):
    """f(x) = head * (body * x), float64."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def part(weights: dict, head: bool) -> dict:
    return {name: tensor for name, tensor in weights.items() if (name in HEAD) == head}


def test_one_round_by_hand() -> None:
    """Loss (p t x - y)^2 / 2, x = 1, rate 0.5, body t = 1, head p = 1; a has y = 0, b has y = 3; E_h = E_b = 1.

    a: head gradient (1 - 0) t = 1, p = 0.5; then body gradient (0.5 - 0) p = 0.25, t = 0.875.
    b: head gradient (1 - 3) 1 = -2, p = 2; then body gradient (2 - 3) 2 = -2, t = 2.
    Server: t = (0.875 + 2) / 2 = 1.4375; the heads stay 0.5 and 2.
    """
    data = {
        name: (torch.ones(1, 1).double(), torch.tensor([y]).double())
        for name, y in (("a", 0.0), ("b", 3.0))
    }
    toy = Toy(data, Chain, half_square, sgd(0.5))
    for name in ("body.weight", "head.weight"):
        toy.networks.initial[name].fill_(1)
    outcome = simulate(load("fedrep", head_epochs=1), toy)
    assert outcome.server["weights"]["body.weight"].item() == 1.4375
    assert [outcome.states[name]["weights"]["head.weight"].item() for name in "ab"] == [0.5, 2]


def everything(network: nn.Module) -> torch.optim.Optimizer:
    """An optimiser that does not ask which parameters are to be trained, as those of bundles."""
    return torch.optim.SGD(network.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize(
    "optimizer", [sgd(0.1), sgd(0.1, momentum=0.9, weight_decay=0.01), everything]
)
def test_one_part_moves_at_a_time(classes: Toy, optimizer) -> None:
    """Check 1: the head phase alone leaves the body, its statistics too; the body phase alone leaves the head."""
    toy = replace(classes, optimizer=optimizer)
    head = simulate(load("fedrep", head_epochs=3), replace(toy, epochs=0))
    both = simulate(load("fedrep", head_epochs=3), replace(toy, epochs=2))
    for name in toy.names:
        assert bits(head.replies[name]["weights"]) == bits(part(toy.initial, head=False))
        assert bits(both.states[name]["weights"]) == bits(head.states[name]["weights"])
        assert bits(both.states[name]["weights"]) != bits(part(toy.initial, head=True))
        for key, tensor in both.replies[name]["weights"].items():
            assert key == "0.bias" or bits(tensor) != bits(
                toy.initial[key]
            )  # BatchNorm takes the bias away


def test_without_body_epochs_the_body_never_changes(classes: Toy) -> None:
    """Check 2; not to the bit, since averaging equal weights rounds."""
    outcome = simulate(load("fedrep"), replace(classes, epochs=0), 3)
    for name, tensor in outcome.server["weights"].items():
        torch.testing.assert_close(tensor, classes.initial[name])


def test_without_head_epochs_it_trains_bodies_as_fedbabu(classes: Toy) -> None:
    """Check 3: the head stays at its initial value and the body is FedBABU's, averaged by samples, bit for bit."""
    rep = simulate(load("fedrep", head_epochs=0), classes, 3)
    babu = simulate(load("fedbabu", weights="samples"), classes, 3)
    assert bits(rep.server) == bits(babu.server)
    for state in rep.states.values():
        assert bits(state["weights"]) == bits(part(classes.initial, head=True))


def test_the_head_is_in_no_message(classes: Toy) -> None:
    """Check 4."""
    outcome = simulate(load("fedrep"), classes, 2)
    for message in [*outcome.down.values(), *outcome.replies.values()]:
        assert set(message.tensors) == {"weights"}
        assert set(message["weights"]) == set(classes.initial) - HEAD


def test_steps(classes: Toy) -> None:
    """E_h = 2, then the run's 3 local epochs; site b has two batches."""
    method, toy = load("fedrep", head_epochs=2), replace(classes, epochs=3)
    with toy.networks.scope():
        site = toy.site("b")
        method.local_update(site, method.init_site(site), simulate(method, toy).down["b"])
    assert [report.steps for report in site.journal] == [4, 6]


def test_a_site_is_judged_by_the_newest_body_with_its_head_fitted(classes: Toy) -> None:
    method = load("fedrep", finetune_epochs=4)
    outcome = simulate(method, classes, 2, [["a", "b"], ["b", "c"]])
    plain = judged(load("fedrep", finetune_epochs=0), classes, outcome, "a")
    assert bits(part(plain, head=True)) == bits(outcome.states["a"]["weights"])
    tuned = judged(method, classes, outcome, "a")
    for weights in (plain, tuned):
        assert bits(part(weights, head=False)) == bits(outcome.server["weights"])
    with classes.networks.scope():  # plain training of a network whose body the bundle froze
        site = classes.site("a")
        model = site.model(merged(outcome.server["weights"], outcome.states["a"]["weights"]))
        model[:4].requires_grad_(False)
        fit(model, site.for_epochs(4), purpose="finetune")
        assert bits(part(tuned, head=True)) == bits(part(snapshot(model), head=True))
    assert bits(tuned) != bits(plain)


def test_heads_of_absent_sites_stay(classes: Toy) -> None:
    first, second = (
        simulate(load("fedrep"), classes, rounds, [["a", "b"], ["b"]]) for rounds in (1, 2)
    )
    assert bits(second.states["a"]) == bits(first.states["a"])
    assert bits(second.states["b"]) != bits(first.states["b"])


def test_head_layers() -> None:
    network = classifier(norm=True)()
    assert load("fedrep").personal_names(network) == HEAD
    assert load("fedrep", head_layers="0, 4").personal_names(network) == {
        *HEAD,
        "0.weight",
        "0.bias",
    }
    with pytest.raises(InputError, match="'fc'"):
        load("fedrep", head_layers="fc").personal_names(network)


def test_only_puts_everything_back() -> None:
    """Flags and frozen buffers, after an error too; what the bundle froze stays frozen inside."""
    network = nn.Sequential(nn.BatchNorm1d(8), classifier(norm=True)())
    network[1][0].bias.requires_grad_(False)
    before, flags = snapshot(network), [p.requires_grad for p in network.parameters()]
    for still in (True, False):
        with (
            suppress(KeyError),
            train_only(network, {"1.0.weight", "1.0.bias", "1.1.weight"}, restore_buffers=still),
        ):
            assert [name for name, p in network.named_parameters() if p.requires_grad] == [
                "1.0.weight",
                "1.1.weight",
            ]
            network(torch.rand(4, 8))
            raise KeyError
        changed = {
            name for name, tensor in snapshot(network).items() if bits(tensor) != bits(before[name])
        }
        assert {name.rpartition(".")[0] for name in changed} == ({"1.1"} if still else {"0", "1.1"})
    assert [p.requires_grad for p in network.parameters()] == flags
