"""Prototypes shared beside another method (FedMR's Table 8): what is added, and that nothing else changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message, is_finite
from medfl.core.task import Task
from medfl.methods import (
    Method,
    load,
    method_class,
    names,
    options_of,
    prototype_options,
    values_of,
)
from medfl.methods._parts.prototype_sharing import SharesPrototypes, Sharing, WithPrototypes
from medfl.methods.fedprox import FedProx
from medfl.storage.files import load_state, save_state
from tests.support.toy import Toy, bits, blobs, classifier, cross_entropy, sgd, simulate

TAKERS = ["feddc", "feddyn", "fednova", "fedprox", "moon"]
every_taker = pytest.mark.parametrize("name", TAKERS)


@pytest.fixture
def toy() -> Toy:
    """Three sites, none with all classes; BatchNorm, dropout and momentum."""
    data = blobs({"a": 18, "b": 9, "c": 13}, labels={"a": (0, 1), "b": (1,), "c": (0, 2)})
    return Toy(
        data,
        classifier(norm=True, dropout=0.3),
        cross_entropy,
        sgd(0.1, momentum=0.9),
        batch_size=8,
    )


# How it is switched on


def test_the_methods_of_table_8_take_prototypes() -> None:
    assert [name for name in names() if prototype_options(method_class(name))] == TAKERS


@every_taker
def test_the_option_wraps_the_method(name: str) -> None:
    cls = method_class(name)
    plain, shared = load(name), load(name, {"prototypes": "true", "mu2": "0.5", "lite": "10"})
    assert isinstance(plain, cls)
    assert shared == WithPrototypes(plain, Sharing(prototypes=True, mu2=0.5, lite=10))
    assert (shared.judged, shared.pools_data, shared.tasks) == (
        cls.judged,
        cls.pools_data,
        ("classification",),
    )
    assert load(name, prototypes=False) == plain


@every_taker
def test_the_options_are_flat_and_build_the_same_method(name: str) -> None:
    plain, shared = load(name), load(name, prototypes=True, inter_scope="present")
    assert values_of(plain) == dataclasses.asdict(plain), (
        "a run without prototypes records what it did before"
    )
    own = {entry["name"] for entry in options_of(method_class(name))}
    added = [entry["name"] for entry in prototype_options(method_class(name))]
    assert own.isdisjoint(added)
    assert list(values_of(shared)) == [*values_of(plain), *added]
    assert load(name, values_of(shared)) == shared
    for entry in prototype_options(method_class(name)):
        assert entry["help"].strip()
        assert load(name, {entry["name"]: str(entry["default"])}) == plain
        with pytest.raises(InputError, match=entry["name"]):
            load(name, {entry["name"]: object()})


def test_bad_options_are_told_in_one_line() -> None:
    with pytest.raises(
        InputError,
        match="mu2=0.5 for method 'fedprox' without prototypes; mu2 belongs to prototypes=true",
    ):
        load("fedprox", mu2=0.5)
    with pytest.raises(
        InputError,
        match="its options are: inter_scope, lite, margin, mu, mu2, one_hot, prototypes,",
    ):
        load("fedprox", tau=1)
    with pytest.raises(InputError, match="its options are: none"):
        load("fedavg", prototypes=True)
    with pytest.raises(InputError, match="share_prototypes=2"):
        load("fedprox", prototypes=True, share_prototypes=2)
    assert not prototype_options(method_class("fedavg"))


def test_every_hook_is_the_inner_methods() -> None:
    hooks = {
        name for name, value in vars(Method).items() if callable(value) and not name.startswith("_")
    }
    own = vars(WithPrototypes).keys() | vars(SharesPrototypes).keys()
    assert hooks - {"synthetic"} <= own, "synthetic: no method that takes prototypes makes images"


# What it reduces to


@every_taker
@pytest.mark.parametrize("options", [{"prototypes": False}, {"prototypes": True, "mu2": 0}])
def test_without_prototypes_it_is_the_method_bit_for_bit(
    name: str, options: dict, toy: Toy
) -> None:
    plain, neutral = simulate(load(name), toy, 3), simulate(load(name, options), toy, 3)
    assert bits(vars(neutral)) == bits(vars(plain))


def test_around_fedavg_it_is_fedmr_bit_for_bit(toy: Toy) -> None:
    """FedProx without its term is FedAvg, FedMR without its intra-class loss FedAvg with prototypes."""
    for options in (
        {"mu2": 0.5},
        {"mu2": 1, "lite": 3, "inter_scope": "present", "share_prototypes": 0.5},
    ):
        prox = simulate(load("fedprox", options, mu=0, prototypes=True), toy, 3)
        fedmr = simulate(load("fedmr", options, mu1=0), toy, 3)
        assert bits(vars(prox)) == bits(vars(fedmr))


# What it adds


@every_taker
def test_prototypes_travel_beside_what_the_method_sends(name: str, toy: Toy) -> None:
    plain, shared = simulate(load(name), toy, 3), simulate(load(name, prototypes=True), toy, 3)
    assert bits(shared.server["weights"]) != bits(plain.server["weights"])
    assert set(shared.server) - set(plain.server) == {"prototypes"}
    for site in toy.names:
        assert set(shared.down[site].tensors) - set(plain.down[site].tensors) == {"prototypes"}
        assert set(shared.replies[site].tensors) - set(plain.replies[site].tensors) == {
            "prototypes",
            "counts",
        }
        assert set(shared.states[site]) == set(plain.states[site])
    first = simulate(load(name, prototypes=True), toy)
    assert bits(first.server["weights"]) == bits(simulate(load(name), toy).server["weights"]), (
        "round 1 has none"
    )
    assert set(first.server["prototypes"]) == {"0", "1", "2"}


@every_taker
def test_the_trained_weights_give_the_prototypes(name: str, toy: Toy) -> None:
    """The reply has the weights as the site trained them, in evaluation mode they give its class means."""
    replies = simulate(load(name, prototypes=True), toy, 2).replies
    for site, reply in replies.items():
        network = toy.networks.fresh()
        network.load_state_dict(reply["weights"])
        x, y = toy.data[site]
        values = network.eval()[:4](x)
        for c, mean in reply["prototypes"].items():
            torch.testing.assert_close(mean, values[y == int(c)].mean(0).detach())
            assert reply["counts"][c].item() == (y == int(c)).sum()


def test_a_step_has_both_terms() -> None:
    """FedDyn, one step from g_k = 0 and w = w^t: the gradient is the loss's and mu2 times the margin's, then clipped.

    Feature s x, s = 1, no other loss, rate 0.5. a: (4, 0), (0, 0) of class 0, b: (5, 0) of class 1; as for FedMR the
    margin's gradient at a is 4 in round 2, times mu2 = 0.5 is 2; clipped to 1, s = 0.5.
    """

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.head = nn.Parameter(torch.ones(())), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.scale * x)

    data = {
        "a": (torch.tensor([[4.0, 0], [0, 0]]), torch.tensor([0, 0])),
        "b": (torch.tensor([[5.0, 0]]), torch.tensor([1])),
    }
    toy = Toy(data, Scaled, lambda output, target: 0 * output.sum(), sgd(0.5))
    for max_norm, expected in ((0, 0.0), (1, 0.5)):
        method = load("feddyn", prototypes=True, mu2=0.5, max_norm=max_norm)
        reply = simulate(method, toy, 2).replies["a"]
        assert reply["weights"]["scale"].item() == pytest.approx(expected, abs=1e-5)


# What every method keeps


@every_taker
def test_states_and_messages_survive_files_and_the_wire(
    name: str, toy: Toy, tmp_path: Path
) -> None:
    method = load(name, prototypes=True, share_prototypes=0.7)
    outcome, wired = simulate(method, toy, 3), simulate(method, toy, 3, wire=True)
    assert bits([wired.server, wired.states]) == bits([outcome.server, outcome.states])
    for index, state in enumerate([outcome.server, *outcome.states.values()]):
        save_state(tmp_path / str(index), state)
        assert bits(load_state(tmp_path / str(index))) == bits(state)
    turned = dict(reversed(outcome.replies.items()))
    assert bits(method.aggregate(toy.host(3), outcome.history[2], turned, 3)) == bits(
        outcome.server
    )
    for message in outcome.replies.values():
        assert message.num_bytes == len(message.encode())


@every_taker
def test_sites_may_be_absent_and_have_one_sample(name: str) -> None:
    data = blobs({"a": 1, "b": 5, "c": 9}, labels={"b": (0, 2), "c": (1,)})
    toy = Toy(data, classifier(norm=True), cross_entropy, sgd(0.1), batch_size=4)
    outcome = simulate(
        load(name, prototypes=True, mu2=1), toy, 4, [["a"], ["c", "b"], ["b"], ["a", "b", "c"]]
    )
    assert all(
        is_finite(tensor) for reply in outcome.replies.values() for tensor in reply.flat().values()
    )


def test_moon_with_its_projection(toy: Toy) -> None:
    """Its head is a deeper one then; prototypes are of what enters the last layer."""
    method = load("moon", projection=True, prototypes=True)
    outcome = simulate(method, toy.adapted(method), 3)
    assert {len(value) for value in outcome.server["prototypes"].values()} == {256}


def test_a_network_without_one_output_a_class_is_refused() -> None:
    with pytest.raises(InputError, match="one output for each of the 3 classes"):
        load("fedprox", prototypes=True).adapt(
            nn.Linear(8, 2), Task("classification", ("p", "q", "r"))
        )


def test_features_of_another_size_name_the_sites(toy: Toy) -> None:
    method = load("feddyn", prototypes=True)
    outcome = simulate(method, toy)
    reply = outcome.replies["b"]
    groups = {
        **reply.tensors,
        "prototypes": {"1": torch.zeros(5)},
        "counts": {"1": torch.tensor(9)},
    }
    replies = {**outcome.replies, "b": Message(groups, reply.scalars)}
    with pytest.raises(InputError, match="length 5 at b; length 6 at a, c"):
        method.aggregate(toy.host(), outcome.history[0], replies, 3)


def test_it_is_a_value() -> None:
    assert load("fedprox", prototypes=True).inner == FedProx()
    assert hash(load("fedprox", prototypes=True)) == hash(load("fedprox", prototypes=True))
