"""FedType: uncertainty sets, consensus, both directions of learning, what leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.seeding import derive, stream
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods._parts.distillation import set_loss
from medfl.methods.fedtype import conformal_quantile, consensus, grown, scores, uniform
from medfl.training import Networks, Site, snapshot
from tests.support.toy import Toy, adam, bits, blobs, classifier, judged, sgd, shaken, simulate

METHOD = load("fedtype")
NEUTRAL = load("fedtype", lam_f=0.0, lam_b=0.0)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sets_of(*rows: set[int], classes: int = 5) -> Tensor:
    return torch.tensor([[c in row for c in range(classes)] for row in rows])


# Consensus


def test_the_consensus_by_hand() -> None:
    """The card's checks, equal sets 1 and disjoint ones 0; then #L <= #S: intersection over union, else over #S.

    S = 012, L = 12: 2/3. S = 01, L = 12: 1/3. S = 01, L = 123: 1/2. S = 0, L = 012: 1.
    """
    pairs = [({0, 3}, {0, 3}), ({0, 1}, {2}), ({0}, {1, 2}), ({0, 1, 2}, {1, 2}), ({0, 1}, {1, 2}),
             ({0, 1}, {1, 2, 3}), ({0}, {0, 1, 2})]  # fmt: skip
    found = consensus(*(sets_of(*side) for side in zip(*pairs, strict=True)))
    torch.testing.assert_close(found, torch.tensor([1, 0, 0, 2 / 3, 1 / 3, 1 / 2, 1]))


# The loss over sets


@pytest.mark.parametrize("size", [1, 3, 6])
def test_sets_of_one_size_give_fedhelps_loss(size: int) -> None:
    """The card's check: the proxy's top classes, -sum_(r in Omega) log(e^z[r] / Phi), mean over the batch (1e-12)."""
    z, proxy = drawn(7, 6), drawn(7, 6, seed=1)
    top = proxy.topk(size).indices
    sets = torch.zeros(7, 6, dtype=torch.bool).scatter(1, top, True)
    phi = z.exp().sum(1, keepdim=True)
    expected = -(z.gather(1, top).exp() / phi).log().sum(1).mean()
    torch.testing.assert_close(set_loss(z, sets), expected, rtol=0, atol=1e-12)
    if size == 1:
        torch.testing.assert_close(
            set_loss(z, sets), cross_entropy(z, proxy.argmax(1)), rtol=0, atol=1e-12
        )
    if size == 6:  # K (KL(uniform || p) + log K), whatever the proxy
        apart = (-math.log(6) - z.log_softmax(1)).mean(1)
        torch.testing.assert_close(
            set_loss(z, sets), 6 * (apart + math.log(6)).mean(), rtol=0, atol=1e-12
        )


def test_the_gradient_of_the_loss_over_sets() -> None:
    """(#S p - 1_S) / B, with a set of another size for each sample (1e-12); the public code's loss had none."""
    z = drawn(3, 5).requires_grad_()
    sets = sets_of({1}, {0, 2, 3}, {0, 1, 2, 3, 4})
    set_loss(z, sets).backward()
    expected = (sets.sum(1, keepdim=True) * z.detach().softmax(1) - sets.double()) / 3
    torch.testing.assert_close(z.grad, expected, rtol=0, atol=1e-12)


def test_the_least_loss_over_a_set_of_three() -> None:
    """3 log 3 = 3.295837, where p is uniform on the set."""
    z = torch.tensor([[40.0, 40, 40, 0, 0]], dtype=torch.float64)
    assert set_loss(z, sets_of({0, 1, 2})).item() == pytest.approx(3.295837, abs=1e-6)
    assert set_loss(z + 0.1 * drawn(1, 5), sets_of({0, 1, 2})).item() > 3.2959


# Uncertainty sets


def test_scores_by_hand() -> None:
    """p = (0.2, 0.5, 0.3), ranks 3, 1, 2; k = 1, lambda = 0.1, u: 0.8 + 0.2 u + 0.2; 0.5 u; 0.5 + 0.3 u + 0.1."""
    u = uniform(1, draws()).item()
    z = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).log()
    found = scores(z, uniform(1, draws()), 1, 0.1)[0].tolist()
    assert found == pytest.approx([1 + 0.2 * u, 0.5 * u, 0.6 + 0.3 * u], abs=1e-12)


def test_equal_logits_rank_by_class() -> None:
    """p = 1/4 each: (o - 1 + u) / 4 for rank o."""
    u = uniform(2, draws())
    expected = (torch.arange(4) + u) / 4
    torch.testing.assert_close(scores(torch.zeros(2, 4), u, 5, 1.0), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("k_reg", "lam", "tau"), [(5, 0.5, 0.9), (1, 0.1, 0.8), (0, 0.3, 0.7), (2, 0.4, 0.9)]
)
def test_sets_are_those_of_the_public_code(k_reg: int, lam: float, tau: float) -> None:
    """Its size of a set: the ranks whose cumulated score is at most tau, one more with the probability V."""
    z = 3 * drawn(400, 6)
    u = uniform(400, draws()).numpy()[:, 0]
    p = z.softmax(1).numpy()
    order = np.argsort(-p, axis=1, kind="stable")
    ordered = np.take_along_axis(p, order, 1)
    cumulated, penalties = ordered.cumsum(1), np.cumsum(np.where(np.arange(6) >= k_reg, lam, 0.0))
    base = np.minimum((cumulated + penalties <= tau).sum(1) + 1, 6)
    rows = np.arange(400)
    last = cumulated[rows, base - 1] - ordered[rows, base - 1]
    v = (tau - last - penalties[base - 1]) / ordered[rows, base - 1]
    sizes = base - (u >= v)
    expected = np.zeros_like(p, dtype=bool)
    for row in rows:
        expected[row, order[row, : sizes[row]]] = True
    assert len(np.unique(sizes)) > 1
    assert ((scores(z, uniform(400, draws()), k_reg, lam) <= tau).numpy() == expected).all()


@pytest.mark.parametrize(
    ("n", "coverage", "rank"),
    [
        (9, 0.9, 9),
        (19, 0.9, 18),
        (20, 0.9, 19),
        (99, 0.55, 55),
        (3, 0.9, 3),
        (1, 0.5, 1),
        (5, 0.0, 1),
    ],
)
def test_the_conformal_quantile(n: int, coverage: float, rank: int) -> None:
    values = torch.randperm(n, generator=draws()).double() + 1
    assert conformal_quantile(values, coverage).item() == rank


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_calibrated_sets_cover_that_part_of_the_labels(coverage: float) -> None:
    """Of 3,000 items, within three standard errors; no set is empty, and the most probable class is in it."""
    x, y = blobs({"a": 3000})["a"]
    toy = Toy({"a": (x, y)}, classifier(norm=True, dropout=0.5), cross_entropy, batch_size=250)
    with toy.networks.scope():
        network = toy.site("a").model(toy.initial)
        generator = draws()
        sets = load("fedtype", coverage=coverage, k_reg=1)._sets(
            toy.site("a"), network, 0.1, generator
        )
        assert network.training
        z = network.eval()(x).detach()
        members = sets(z, uniform(len(z), generator))
    covered = members.gather(1, y[:, None]).double().mean().item()
    if coverage == 0.9:
        assert covered == pytest.approx(coverage, abs=3 * (0.09 / 3000) ** 0.5)
    assert covered >= coverage - 3 * (0.25 / 3000) ** 0.5
    assert members.gather(1, z.argmax(1, keepdim=True)).all()
    assert 1 < members.sum(1).double().mean() < 3


def test_sets_are_calibrated_without_random_transforms() -> None:
    toy = Toy(blobs({"a": 40}), network=classifier())
    site, z = toy.site("a"), drawn(50, 3, seed=4)
    moving = replace(site, train=shaken(site.train))
    u = uniform(len(z), draws(6))
    found = [METHOD._sets(one, site.network(), 0.1, draws(5))(z, u) for one in (moving, site)]
    assert torch.equal(*found)
    assert not found[0].all()


def test_lambda_grows_with_the_fall_of_the_accuracy() -> None:
    assert [grown(0.5, fall) for fall in (-0.4, 0.0, 0.2, 1.0)] == [0.5, 0.5, 0.6, 1.0]
    assert grown(1.5, 0.2) == 1.5


# Training


def reference(
    site: Site, method: object, large: nn.Module, proxy: nn.Module, accuracy: float, lam: float
) -> tuple:
    """The two models after a round, by the equations, with plain loops; accuracy and lambda after it."""
    optimizers = [site.settings.optimizer(network) for network in (large, proxy)]

    def calibrated(network: nn.Module, lam: float, generator: torch.Generator) -> Callable:
        network.eval()
        own = []
        for x, y in site.train.batches(site.settings.batch_size):
            rows = scores(network(x), uniform(len(x), generator), method.k_reg, lam)
            own += [row[label] for row, label in zip(rows, y, strict=True)]
        tau = sorted(value.item() for value in own)[
            min(math.ceil((len(own) + 1) * method.coverage), len(own)) - 1
        ]
        network.train()

        def sets(z: Tensor) -> Tensor:
            inside = scores(z, uniform(len(z), generator), method.k_reg, lam) <= tau
            inside[range(len(z)), z.argmax(1)] = True
            return inside

        return sets

    for epoch in range(site.settings.epochs):
        generator = draws(derive(site.seed, "sets", epoch))
        of_proxy, of_large = (
            calibrated(proxy, lam, generator),
            calibrated(large, method.lam_large, generator),
        )
        hits = 0
        for turn in (0, 1):
            with stream(site.seed, f"local {epoch}" if epoch else "local") as order:
                for x, y in site.train.batches(site.settings.batch_size, order):
                    (proxy, large)[turn].eval()
                    z, z_proxy = large(x), proxy(x)
                    loss = cross_entropy((z, z_proxy)[turn], y)
                    if turn == 0:
                        hits += (z.argmax(1) == y).sum().item()
                        sets = of_proxy(z_proxy)
                        kappa = consensus(sets, of_large(z)).mean()
                        loss = loss - method.lam_b * kappa * (z.log_softmax(1) * sets).sum() / len(
                            x
                        )
                    else:
                        p = z.detach().softmax(1)
                        loss = loss + method.lam_f * (
                            p * (p.log() - z_proxy.log_softmax(1))
                        ).sum() / len(x)
                    (proxy, large)[turn].train()
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    loss.backward()
                    optimizers[turn].step()
        before, accuracy = accuracy, hits / len(site.train)
        lam = method.lam_proxy + (1 - method.lam_proxy) * max(0.0, before - accuracy)
    return accuracy, lam


@pytest.mark.parametrize("optimizer", [sgd(0.2, momentum=0.9, weight_decay=0.01), adam(0.02)])
def test_a_round_is_that_of_the_equations(optimizer: Callable) -> None:
    """Two epochs in turn, sets of several sizes, an accuracy that falls from 1; BatchNorm of the frozen model rests."""
    x, y = blobs({"a": 22})["a"]
    network = lambda: classifier(norm=True)().double()  # noqa: E731
    toy = Toy({"a": (x.double(), y)}, network, cross_entropy, optimizer, epochs=2, batch_size=8)
    method = load(
        "fedtype", lam_f=0.7, lam_b=0.6, coverage=0.7, k_reg=0, lam_proxy=0.05, lam_large=0.0
    )
    theta = {
        name: t + 0.2 * drawn(1, *t.shape, seed=3)[0].abs() if t.is_floating_point() else t
        for name, t in toy.initial.items()
    }
    state = {"private": toy.initial, "accuracy": 1.0, "lam": 0.3}
    with toy.networks.scope():
        site = toy.site("a")
        after, reply = method.local_update(site, state, Message({"weights": theta}))
    large, proxy = toy.networks.fresh(), toy.networks.fresh()
    proxy.load_state_dict(theta)
    accuracy, lam = reference(toy.site("a"), method, large, proxy, 1.0, 0.3)
    assert (after["accuracy"], after["lam"]) == pytest.approx((accuracy, lam), abs=1e-12)
    assert accuracy < 1
    for network, weights in ((large, after["private"]), (proxy, reply["weights"])):
        for name, value in snapshot(network).items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-9)
    (report,) = site.journal
    assert report.steps == 2 * 3
    assert reply.scalars == {"samples": 22}


def test_lambda_reaches_the_next_epochs_sets() -> None:
    """With a higher cost of each rank the proxy's sets are smaller, and the large model learns otherwise."""
    toy = Toy(blobs({"a": 22}), classifier(), cross_entropy, batch_size=8)
    method = load("fedtype", k_reg=0, coverage=0.6)
    with toy.networks.scope():
        down, trained = Message({"weights": toy.initial}), []
        for lam in (0.0, 1.0):
            state = {**method.init_site(toy.site("a")), "lam": lam}
            trained.append(method.local_update(toy.site("a"), state, down)[0]["private"])
    assert bits(trained[0]) != bits(trained[1])


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_without_teaching_it_is_local_and_fedavg_bit_for_bit(classes: Toy, settings: dict) -> None:
    """One epoch a round: large models are Local's, proxies and server FedAvg's; each lambda acts on its own model."""
    toy = replace(classes, optimizer=sgd(0.1, **settings))
    cohorts = [["a", "b"], ["b", "c"], ["a", "b", "c"]]
    apart, alone = simulate(NEUTRAL, toy, 3, cohorts), simulate(load("local"), toy, 3, cohorts)
    average = simulate(load("fedavg"), toy, 3, cohorts)
    assert bits(apart.server) == bits(average.server)
    assert bits(apart.replies) == bits(average.replies)
    for name in toy.names:
        assert bits(apart.states[name]["private"]) == bits(alone.states[name]["weights"])
    forward, backward = (
        simulate(load("fedtype", **{other: 0.0}), toy, 1) for other in ("lam_b", "lam_f")
    )
    first = simulate(NEUTRAL, toy, 1)
    for name in toy.names:
        assert bits(forward.states[name]["private"]) == bits(first.states[name]["private"])
        assert bits(forward.replies[name]) != bits(first.replies[name])
        assert bits(backward.states[name]["private"]) != bits(first.states[name]["private"])
        assert bits(backward.replies[name]) == bits(first.replies[name])


# What leaves


class Bodies(Toy):
    """Sites b and c have other large models; the bundle's own network is the proxies'."""

    def __post_init__(self) -> None:
        super().__post_init__()

        def other():
            return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))  # noqa: E731

        self.other = Networks(other, 1, torch.device("cpu"))

    def site(self, name: str, round_: int = 1) -> Site:
        site = replace(super().site(name, round_), common=self.networks)
        return replace(site, networks=self.other) if name in "bc" else site


def test_only_proxies_travel() -> None:
    """The card's check; with FedAvg's server they are averaged although the sites' models differ."""
    toy = Bodies(
        blobs({"a": 9, "b": 6, "c": 11}), classifier(norm=True), cross_entropy, batch_size=4
    )
    outcome = simulate(load("fedtype", bodies="one,other"), toy, 3, wire=True)
    for name in toy.names:
        reply, private = outcome.replies[name], outcome.states[name]["private"]
        assert set(reply.tensors) == {"weights"}
        assert set(reply["weights"]) == set(toy.initial)
        assert private.keys() == (toy.initial if name == "a" else toy.other.initial).keys()
        sent = {
            str(bits(value)) for value in reply["weights"].values() if value.is_floating_point()
        }
        assert not sent & {
            str(bits(value)) for value in private.values() if value.is_floating_point()
        }
    mean = (
        sum(len(toy.data[n][0]) * outcome.replies[n]["weights"]["0.weight"] for n in toy.names) / 26
    )
    torch.testing.assert_close(outcome.server["weights"]["0.weight"], mean)


def test_a_site_is_judged_by_its_large_model_and_the_server_has_the_proxies_mean(
    classes: Toy,
) -> None:
    outcome = simulate(METHOD, classes, 2)
    for name in classes.names:
        assert bits(judged(METHOD, classes, outcome, name)) == bits(outcome.states[name]["private"])
    with classes.networks.scope():
        network = METHOD.global_predictor(classes.host(), outcome.server)
        assert bits(dict(network.state_dict())) == bits(outcome.server["weights"])


# Refusals


def test_bad_input() -> None:
    with pytest.raises(
        InputError, match=r"coverage=1; a part of the labels, 0 to below 1; take 0.9"
    ):
        load("fedtype", coverage=1.0)
    with pytest.raises(InputError, match="each of the 3 classes"):
        METHOD.adapt(nn.Linear(4, 1), Task("classification", ("p", "q", "r")))
