"""FedKEMF: mutual learning at the sites, fusion of the knowledge networks at the server."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public
from medfl.methods import load
from medfl.methods._parts.distillation import ensemble
from medfl.training import Networks, Site
from tests.support.toy import (
    Toy,
    adam,
    bits,
    blobs,
    classifier,
    cross_entropy,
    judged,
    public_blobs,
    sgd,
    simulate,
)

METHOD = load("fedkemf")


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def public_of(x: Tensor, y: Tensor | None = None) -> Public:
    labels = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    return Public("made", Shard.of(Stacked([{} for _ in x], x, labels), range(len(x))), Task())


def two_logits(public: Public | None = None) -> Toy:
    """One site with x = 1 of class 0; a network of two weights, which are its logits."""
    data = {"a": (torch.ones(1, 1).double(), torch.tensor([0]))}
    return Toy(
        data, lambda: nn.Linear(1, 2, bias=False).double(), cross_entropy, sgd(1.0), public=public
    )


def column(*values: float) -> dict[str, Tensor]:
    return {"weight": torch.tensor(values, dtype=torch.float64)[:, None]}


def close(given: Tensor, *values: float) -> None:
    torch.testing.assert_close(given, column(*values)["weight"], rtol=0, atol=1e-12)


def doubled(optimizer: Callable) -> Toy:
    """Two sites and public items in double precision, without dropout or norm."""
    data = {name: (x.double(), y) for name, (x, y) in blobs({"a": 10, "b": 5}).items()}
    public = public_of(drawn(10, 8, seed=3))
    return Toy(
        data,
        lambda: classifier()().double(),
        cross_entropy,
        optimizer,
        epochs=2,
        batch_size=4,
        public=public,
    )


def moved(toy: Toy, seed: int, size: float = 0.3) -> dict[str, Tensor]:
    return {
        name: value + size * drawn(*value.shape, seed=seed) for name, value in toy.initial.items()
    }


# The sites


def test_a_mutual_step_by_hand() -> None:
    """phi = (0, ln 3): p = (1/4, 3/4). k = (0, 0): q = (1/2, 1/2). lambda = 1, rate 1.

    Cross-entropy has the gradients (-3/4, 3/4) and (-1/2, 1/2); KL(q || p) has p - q = (-1/4, 1/4) for phi, KL(p || q)
    has (1/4, -1/4) for k. Together (-1, 1) and (-1/4, 1/4).
    """
    toy = two_logits()
    with toy.networks.scope():
        state = {"private": column(0, math.log(3))}
        after, reply = METHOD.local_update(toy.site("a"), state, Message({"weights": column(0, 0)}))
    close(after["private"]["weight"], 1, math.log(3) - 1)
    close(reply["weights"]["weight"], 0.25, -0.25)


def test_identical_networks_have_nothing_to_tell_each_other() -> None:
    """The card's check: both mutual terms are 0, so that both go where either goes alone."""
    toy = doubled(sgd(0.2, momentum=0.9))
    weights = moved(toy, 1)
    found = []
    with toy.networks.scope():
        for lam in (0.0, 1.0, 5.0):
            method = load("fedkemf", lam=lam)
            state, reply = method.local_update(
                toy.site("a"), {"private": weights}, Message({"weights": weights})
            )
            found += [state["private"], reply["weights"]]
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("optimizer", [sgd(0.2, momentum=0.9, weight_decay=0.01), adam(0.01)])
@pytest.mark.parametrize("lam", [1.0, 0.3])
def test_both_models_step_from_the_same_forward_passes(optimizer: Callable, lam: float) -> None:
    """Against two optimisers of two models, each batch passed through both before either steps."""
    toy = doubled(optimizer)
    with toy.networks.scope():
        site = toy.site("a")
        state, down = {"private": toy.initial}, Message({"weights": moved(toy, 1)})
        after, reply = load("fedkemf", lam=lam).local_update(site, state, down)
    phi, k = toy.networks.fresh(), toy.networks.fresh()
    k.load_state_dict(dict(down["weights"]))
    steppers = [optimizer(phi), optimizer(k)]
    with stream(site.seed, "local") as generator:
        for _ in range(2):
            for x, y in site.train.batches(4, generator):
                z, z_k = phi(x), k(x)
                for stepper, own, other in zip(steppers, (z, z_k), (z_k, z), strict=True):
                    p, log_q = other.detach().softmax(1), own.log_softmax(1)
                    stepper.zero_grad()
                    (cross_entropy(own, y) + lam * (p * (p.log() - log_q)).sum(1).mean()).backward()
                for stepper in steppers:
                    stepper.step()
    for network, weights in ((phi, after["private"]), (k, reply["weights"])):
        for name, value in network.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_without_mutual_learning_local_models_are_locals_bit_for_bit(
    classes: Toy, settings: dict
) -> None:
    """With BatchNorm, dropout and short batches too."""
    toy = replace(classes, optimizer=sgd(0.1, **settings), epochs=2)
    off, local = load("fedkemf", lam=0.0), load("local")
    apart, alone = simulate(off, toy, 3), simulate(local, toy, 3)
    for name in toy.names:
        assert bits(apart.states[name]["private"]) == bits(alone.states[name]["weights"])
        assert bits(judged(off, toy, apart, name)) == bits(judged(local, toy, alone, name))
    assert bits(simulate(METHOD, toy, 2).states) != bits(simulate(off, toy, 2).states)


# The server


def aggregated(
    options: dict, toy: Toy, k: dict[str, Tensor], *sites: dict[str, Tensor]
) -> dict[str, Tensor]:
    replies = {f"s{i}": Message({"weights": weights}) for i, weights in enumerate(sites)}
    with toy.networks.scope():
        return load("fedkemf", options).aggregate(toy.host(), {"weights": k}, replies, len(sites))[
            "weights"
        ]


def test_a_fusion_step_by_hand() -> None:
    """One public x = 1. The sites' k_i = (0, ln 3) and (0, 0) say (1/4, 3/4) and (1/2, 1/2), together (3/8, 5/8).

    k = (0, 0) says (1/2, 1/2); the gradient of KL(p~ || q) is q - p~ = (1/8, -1/8). Rate 1: k = (-1/8, 1/8). The mean
    of the logits would say (0.366, 0.634).
    """
    toy = two_logits(public_of(torch.ones(1, 1).double()))
    after = aggregated({"server_lr": 1.0}, toy, column(0, 0), column(0, math.log(3)), column(0, 0))
    close(after["weight"], -0.125, 0.125)


def test_one_site_that_says_what_k_says_changes_nothing() -> None:
    """The card's check; two sites that agree do not either, and one that does not agree does."""
    toy = doubled(sgd(0.1))
    k = moved(toy, 1)
    for sites in ([k], [k, k]):
        after = aggregated({"server_lr": 1.0, "server_epochs": 3}, toy, k, *sites)
        for name, value in after.items():
            torch.testing.assert_close(value, k[name], rtol=0, atol=1e-12)
    assert not torch.allclose(
        aggregated({"server_lr": 1.0}, toy, k, moved(toy, 2))["0.weight"], k["0.weight"]
    )


@pytest.mark.parametrize(("optimizer", "builder"), [("sgd", sgd(0.3)), ("adam", adam(0.3))])
def test_the_ensemble_is_distilled_in_batches_of_public_items(
    optimizer: str, builder: Callable
) -> None:
    """Two passes of three steps, against a loop of its own; the order is drawn from the server's stream."""
    toy = doubled(sgd(0.1))
    k, sites = moved(toy, 1), [moved(toy, seed, 1.0) for seed in (2, 3, 4)]
    options = {
        "server_lr": 0.3,
        "server_epochs": 2,
        "server_batch_size": 4,
        "server_optimizer": optimizer,
    }
    after = aggregated(options, toy, k, *sites)
    student, teachers = toy.networks.fresh(), [toy.networks.fresh() for _ in sites]
    for network, weights in zip((student, *teachers), (k, *sites), strict=True):
        network.load_state_dict(weights)
    stepper = builder(student)
    with stream(toy.host().seed, "local") as generator:
        for _ in range(2):
            for batch in torch.randperm(10, generator=generator).split(4):
                x, _ = toy.public.at(batch)
                p = torch.stack([teacher(x).softmax(1).detach() for teacher in teachers]).mean(0)
                stepper.zero_grad()
                (p * (p.log() - student(x).log_softmax(1))).sum(1).mean().backward()
                stepper.step()
    for name, value in student.state_dict().items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-8)


def test_public_labels_are_not_looked_at(classes: Toy) -> None:
    x, y = classes.public.at(torch.arange(10))
    found = [
        simulate(METHOD, replace(classes, public=public_of(x, labels)), 2) for labels in (y, 3 - y)
    ]
    assert bits([found[0].server, found[0].states]) == bits([found[1].server, found[1].states])


def test_without_a_pass_over_public_items_k_stays(classes: Toy) -> None:
    outcome = simulate(load("fedkemf", server_epochs=0), classes, 2)
    assert bits(outcome.server["weights"]) == bits(classes.initial)
    assert bits(simulate(METHOD, classes, 2).server["weights"]) != bits(classes.initial)


def test_statistics_of_k_come_from_public_batches_or_from_the_sites(classes: Toy) -> None:
    """Three steps of four public items; or the mean of the replies, with k's parameters distilled either way."""
    track, without = (
        load("fedkemf", public_bn=choice, server_batch_size=4) for choice in ("track", "no_track")
    )
    names = ("1.running_mean", "1.running_var")
    outcome = simulate(track, classes, 1)
    weights = outcome.server["weights"]
    assert weights["1.num_batches_tracked"].item() == 3
    for name in names:
        assert not torch.equal(weights[name], classes.initial[name])
    with classes.networks.scope():
        other = without.aggregate(classes.host(), outcome.history[0], outcome.replies, 3)["weights"]
    for name in names:
        mean = torch.stack([outcome.replies[site]["weights"][name] for site in classes.names]).mean(
            0
        )
        torch.testing.assert_close(other[name], mean)
    assert other["1.num_batches_tracked"].item() == 3  # of the site with the most batches
    for name, value in weights.items():
        assert torch.equal(value, other[name]) is ("running" not in name), name


# The ensemble


def test_the_ensemble_is_the_mean_probability() -> None:
    outputs = [drawn(5, 4, seed=seed) for seed in range(3)]
    expected = torch.stack([z.softmax(1) for z in outputs]).mean(0)
    torch.testing.assert_close(ensemble(outputs).softmax(1), expected, rtol=0, atol=1e-12)
    maps = [drawn(2, 3, 4, 5, seed=seed) for seed in range(2)]
    expected = torch.stack([z.softmax(1) for z in maps]).mean(0)
    torch.testing.assert_close(ensemble(maps).softmax(1), expected, rtol=0, atol=1e-12)


def test_the_ensemble_of_single_channels_is_that_of_sigmoids() -> None:
    outputs = [3 * drawn(2, 1, 4, 4, seed=seed) for seed in range(3)]
    expected = torch.stack([z.sigmoid() for z in outputs]).mean(0)
    found = ensemble(outputs)
    assert found.shape == (2, 1, 4, 4)
    torch.testing.assert_close(found.sigmoid(), expected, rtol=0, atol=1e-12)


def test_the_ensemble_of_certain_networks_is_finite() -> None:
    """Half precision too: probabilities of 0 have no logarithm, but are never taken."""
    found = ensemble(
        [torch.tensor([[60000.0, -60000.0]]).half(), torch.tensor([[-60000.0, 60000.0]]).half()]
    )
    assert found.dtype == torch.float32
    assert found.softmax(1).tolist() == [[0.5, 0.5]]


# What travels


class Bodies(Toy):
    """Sites b and c have other local networks; the bundle's own is the knowledge network."""

    def __post_init__(self) -> None:
        super().__post_init__()

        def other():
            return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))  # noqa: E731

        self.other = Networks(other, 1, torch.device("cpu"))

    def site(self, name: str, round_: int = 1) -> Site:
        site = replace(super().site(name, round_), common=self.networks)
        return replace(site, networks=self.other) if name in "bc" else site


def test_local_models_of_any_architecture_learn_and_never_leave() -> None:
    """The card's check with it: what goes up has the bytes of k, and so has what comes down."""
    data = blobs({"a": 9, "b": 6, "c": 11})
    toy = Bodies(data, classifier(norm=True), cross_entropy, batch_size=4, public=public_blobs())
    method = load("fedkemf", bodies="one,other")
    outcome = simulate(method, toy, 3, wire=True)
    size = sum(value.numel() * value.element_size() for value in toy.initial.values())
    for name in toy.names:
        initial, private = (
            toy.initial if name == "a" else dict(toy.other.initial),
            outcome.states[name]["private"],
        )
        for message in (outcome.replies[name], outcome.down[name]):
            sent = message.flat()
            assert set(sent) == {f"weights/{key}" for key in toy.initial}
            assert sum(value.numel() * value.element_size() for value in sent.values()) == size
        assert private.keys() == initial.keys()
        assert bits(private) != bits(initial)
        left = {
            str(bits(value))
            for value in outcome.replies[name]["weights"].values()
            if value.is_floating_point()
        }
        assert not left & {
            str(bits(value)) for value in private.values() if value.is_floating_point()
        }
    assert method.keeps_network({"network": "other"})


def test_sites_are_judged_by_local_models_and_the_server_by_k(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 2)
    for name in classes.names:
        assert bits(judged(METHOD, classes, outcome, name)) == bits(outcome.states[name]["private"])
    with classes.networks.scope():
        network = METHOD.global_predictor(classes.host(), outcome.server)
        assert bits(dict(network.state_dict())) == bits(outcome.server["weights"])


def test_a_run_without_public_data_is_refused(classes: Toy) -> None:
    toy = replace(classes, public=None)
    with pytest.raises(InputError, match="a run without public data"):
        METHOD.check(toy.site("a"))
    with pytest.raises(InputError, match="a run without public data"):
        simulate(METHOD, toy)
