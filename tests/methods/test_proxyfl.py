"""ProxyFL: the graph, mutual learning of both models, what leaves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.seeding import stream
from medfl.methods import load
from medfl.methods._parts.distillation import divergence
from medfl.methods._parts.mutual_learning import optimizing_each
from medfl.methods.proxyfl import stride
from medfl.training.network_pool import Networks
from medfl.training.site import Site, fit
from tests.support.toy import Toy, adam, bits, blobs, classifier, judged, sgd, simulate

METHOD = load("proxyfl")
FIVE = {name: 6 for name in "abcde"}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The graph


def test_eight_sites_send_one_two_and_four_places_on() -> None:
    """The card's check."""
    assert [stride(round_, 8) for round_ in range(1, 8)] == [1, 2, 4, 1, 2, 4, 1]


@pytest.mark.parametrize("sites", [2, 3, 4, 5, 8, 9, 16, 17])
def test_each_rounds_mixing_matrix_is_a_permutation(sites: int) -> None:
    """The card's check, with the paper's exponents: rows and columns sum to 1, and nobody keeps its own."""
    length = math.floor(math.log2(sites - 1)) + 1
    for round_ in range(1, 2 * length + 2):
        assert stride(round_, sites) == 2 ** ((round_ - 1) % length)
        matrix = torch.zeros(sites, sites)
        for i in range(sites):
            matrix[(i + stride(round_, sites)) % sites, i] += 1
        assert matrix.sum(0).tolist() == matrix.sum(1).tolist() == [1] * sites
        assert not matrix.diagonal().any()


def test_proxies_travel_unchanged_along_the_graph() -> None:
    """Five sites: one place on, then two, then four; L = 3."""
    toy = Toy(blobs(FIVE), classifier(norm=True), cross_entropy, batch_size=3)
    for rounds, places in ((1, 1), (2, 2), (3, 4), (4, 1)):
        outcome = simulate(METHOD, toy, rounds)
        for i, name in enumerate(toy.names):
            target = toy.names[(i + places) % 5]
            down = METHOD.broadcast(toy.host(), outcome.server, target)
            assert bits(down["weights"]) == bits(outcome.replies[name]["weights"])


def test_an_absent_site_keeps_the_proxy_that_waits_for_it() -> None:
    """Of a, c and d, a round's graph has three sites; b and e are passed over."""
    toy = Toy(blobs(FIVE), classifier(), cross_entropy)
    first, second = (
        simulate(METHOD, toy, rounds, [list("abcde"), list("cad")]) for rounds in (1, 2)
    )
    before, after = first.server["proxies"], second.server["proxies"]
    assert set(after) == set("abcde")
    for name in "be":
        assert bits(after[name]) == bits(before[name])
        assert bits(second.states[name]) == bits(first.states[name])
    for source, target in (("a", "d"), ("c", "a"), ("d", "c")):  # round 2: two places on
        assert bits(after[target]) == bits(second.replies[source]["weights"])


def test_a_site_alone_gets_its_own_proxy_back() -> None:
    toy = Toy(blobs({"a": 6}), classifier(), cross_entropy)
    outcome = simulate(METHOD, toy, 2)
    assert stride(1, 1) == 0
    assert bits(outcome.server["proxies"]["a"]) == bits(outcome.replies["a"]["weights"])


# Mutual learning


def test_a_step_by_hand() -> None:
    """x = 1 of class 0, two logits z = w. phi = (0, ln 3): p = (1/4, 3/4). theta = (0, 0): q = (1/2, 1/2). alpha = 1/2.

    Cross-entropy has the gradients p - (1, 0) = (-3/4, 3/4) and q - (1, 0) = (-1/2, 1/2); KL(q || p) has p - q =
    (-1/4, 1/4), KL(p || q) has (1/4, -1/4). Halves: (-1/2, 1/2) for phi, (-1/8, 1/8) for theta; rate 1.
    """
    data = {"a": (torch.ones(1, 1).double(), torch.tensor([0]))}
    toy = Toy(data, lambda: nn.Linear(1, 2, bias=False).double(), cross_entropy, sgd(1.0))
    phi, theta = (torch.tensor(w, dtype=torch.float64)[:, None] for w in ([0, math.log(3)], [0, 0]))
    with toy.networks.scope():
        state, reply = METHOD.local_update(
            toy.site("a"), {"private": {"weight": phi}}, Message({"weights": {"weight": theta}})
        )
    expected = torch.tensor([[0.5], [math.log(3) - 0.5]], dtype=torch.float64)
    torch.testing.assert_close(state["private"]["weight"], expected, rtol=0, atol=1e-12)
    expected = torch.tensor([[0.125], [-0.125]], dtype=torch.float64)
    torch.testing.assert_close(reply["weights"]["weight"], expected, rtol=0, atol=1e-12)


def pair(toy: Toy, seed: int = 1) -> tuple[dict, Message]:
    """A State and a broadcast whose models are not the same."""
    other = {
        name: value + 0.3 * drawn(*value.shape, seed=seed).to(value)
        for name, value in toy.initial.items()
    }
    return {"private": toy.initial}, Message({"weights": other})


@pytest.mark.parametrize("optimizer", [sgd(0.2, momentum=0.9, weight_decay=0.01), adam(0.01)])
@pytest.mark.parametrize("alpha", [0.5, 0.2, 1.0])
def test_both_models_step_from_the_same_forward_passes(optimizer: Callable, alpha: float) -> None:
    """The card's check, against two optimisers of two models, each batch passed through both before either steps."""
    x, y = blobs({"a": 10})["a"]
    toy = Toy(
        {"a": (x.double(), y)},
        lambda: classifier()().double(),
        cross_entropy,
        optimizer,
        epochs=2,
        batch_size=4,
    )
    state, down = pair(toy)
    with toy.networks.scope():
        site = toy.site("a")
        after, reply = load("proxyfl", alpha=alpha).local_update(site, state, down)
    phi, theta = toy.networks.fresh(), toy.networks.fresh()
    theta.load_state_dict(dict(down["weights"]))
    steppers = [optimizer(phi), optimizer(theta)]
    with stream(site.seed, "local") as generator:
        for _ in range(2):
            for x, y in site.train.batches(4, generator):
                z, z_proxy = phi(x), theta(x)
                for stepper, own, other in zip(steppers, (z, z_proxy), (z_proxy, z), strict=True):
                    p, log_q = other.detach().softmax(1), own.log_softmax(1)
                    mutual = (p * (p.log() - log_q)).sum(1).mean()
                    stepper.zero_grad()
                    ((1 - alpha) * cross_entropy(own, y) + alpha * mutual).backward()
                for stepper in steppers:
                    stepper.step()
    for network, weights in ((phi, after["private"]), (theta, reply["weights"])):
        for name, value in network.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10)


def test_each_batch_passes_once_through_each_model() -> None:
    passes: list[int] = []

    class Counted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(id(self))
            return super().forward(x)

    toy = Toy(
        blobs({"a": 10}), lambda: Counted(nn.Linear(8, 3)), cross_entropy, epochs=2, batch_size=4
    )
    simulate(METHOD, toy)
    assert sorted(map(passes.count, {*passes})) == [6, 6]


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_alpha_zero_is_independent_training_bit_for_bit(classes: Toy, settings: dict) -> None:
    """The card's check: private models are Local's, with BatchNorm, dropout and short batches too."""
    toy = replace(classes, optimizer=sgd(0.1, **settings), epochs=2)
    method, local = load("proxyfl", alpha=0.0), load("local")
    apart, alone = simulate(method, toy, 3), simulate(local, toy, 3)
    for name in toy.names:
        assert bits(apart.states[name]["private"]) == bits(alone.states[name]["weights"])
        assert bits(judged(method, toy, apart, name)) == bits(judged(local, toy, alone, name))
    assert bits(simulate(METHOD, toy, 2).states) != bits(simulate(method, toy, 2).states)


def test_alpha_zero_trains_each_proxy_where_it_arrives() -> None:
    """Without dropout bit for bit: in round 1 at its first site, in round 2 at the next."""
    toy = Toy(
        blobs({"a": 9, "b": 6, "c": 11}),
        classifier(norm=True),
        cross_entropy,
        sgd(0.1, momentum=0.9),
        batch_size=4,
    )
    outcome = simulate(load("proxyfl", alpha=0.0), toy, 2)
    for first, second in (("a", "b"), ("b", "c"), ("c", "a")):
        with toy.networks.scope():
            model = toy.networks.lease(toy.initial)
            for round_, name in ((1, first), (2, second)):
                fit(model, toy.site(name, round_))
            assert bits(outcome.replies[second]["weights"]) == bits(dict(model.state_dict()))


def test_each_network_is_optimised_as_alone() -> None:
    """Groups of parameters with rates of their own too."""

    def groups(network: nn.Module) -> torch.optim.Optimizer:
        body, head = network[0].parameters(), network[4].parameters()
        return torch.optim.SGD(
            [{"params": body, "lr": 0.1}, {"params": head, "lr": 0.4, "momentum": 0.5}], 0.2
        )

    toy = Toy(blobs({"a": 9}), classifier(), cross_entropy, groups, batch_size=4)
    method, local = load("proxyfl", alpha=0.0), load("local")
    assert bits(simulate(method, toy).states["a"]["private"]) == bits(
        simulate(local, toy).states["a"]["weights"]
    )
    networks = nn.ModuleList([toy.networks.fresh(), toy.networks.fresh()])
    made = optimizing_each(toy.site("a")).settings.optimizer(networks)
    assert [group["lr"] for group in made.param_groups] == [0.1, 0.4, 0.1, 0.4]
    assert sum(len(group["params"]) for group in made.param_groups) == len(
        list(networks.parameters())
    )


# The divergence


def test_the_divergence_is_its_definition() -> None:
    """Mean over the batch of sum_c p_c log(p_c / q_c), p the teacher's; its gradient is (q - p) / B (1e-12)."""
    student, teacher = drawn(5, 4).requires_grad_(), drawn(5, 4, seed=1).requires_grad_()
    value = divergence(student, teacher)
    p, q = teacher.detach().softmax(1), student.detach().softmax(1)
    torch.testing.assert_close(
        value.detach(), (p * (p / q).log()).sum(1).mean(), rtol=0, atol=1e-12
    )
    value.backward()
    torch.testing.assert_close(student.grad, (q - p) / 5, rtol=0, atol=1e-12)
    assert teacher.grad is None
    assert divergence(teacher, teacher).item() == 0


def test_the_divergence_of_maps_is_the_mean_over_pixels() -> None:
    student, teacher = drawn(2, 3, 4, 5), drawn(2, 3, 4, 5, seed=1)
    pixels = [z.movedim(1, -1).reshape(-1, 3) for z in (student, teacher)]
    torch.testing.assert_close(
        divergence(student, teacher), divergence(*pixels), rtol=0, atol=1e-12
    )


def test_one_channel_is_the_logit_of_a_sigmoid() -> None:
    student, teacher = drawn(2, 1, 4), drawn(2, 1, 4, seed=1)
    p, q = teacher.sigmoid(), student.sigmoid()
    expected = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    torch.testing.assert_close(divergence(student, teacher), expected, rtol=0, atol=1e-12)
    assert divergence(student, teacher).item() > 0


def test_the_divergence_is_exact_with_mixed_precision() -> None:
    student, teacher = 8 * drawn(5, 4).bfloat16(), 8 * drawn(5, 4, seed=1).bfloat16()
    value = divergence(student, teacher)
    assert value.dtype == torch.float32
    torch.testing.assert_close(
        value.double(), divergence(student.double(), teacher.double()), rtol=1e-5, atol=1e-5
    )


# What leaves


class Bodies(Toy):
    """Sites b and c have other private networks; the bundle's own is the proxies'."""

    def __post_init__(self) -> None:
        super().__post_init__()

        def other():
            return nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))  # noqa: E731

        self.other = Networks(other, 1, torch.device("cpu"))

    def site(self, name: str, round_: int = 1) -> Site:
        site = replace(super().site(name, round_), common=self.networks)
        return replace(site, networks=self.other) if name in "bc" else site


def test_private_models_of_any_architecture_learn_and_never_leave() -> None:
    toy = Bodies(
        blobs({"a": 9, "b": 6, "c": 11}), classifier(norm=True), cross_entropy, batch_size=4
    )
    method = load("proxyfl", bodies="one,other")
    outcome = simulate(method, toy, 3, wire=True)
    initial = toy.other.initial
    for name in toy.names:
        reply, private = outcome.replies[name], outcome.states[name]["private"]
        assert set(outcome.states[name]) == {"private"}
        assert set(reply.tensors) == {"weights"}
        assert not reply.scalars
        assert {key: value.shape for key, value in reply["weights"].items()} == {
            key: value.shape for key, value in toy.initial.items()
        }
        assert private.keys() == (toy.initial if name == "a" else initial).keys()
        sent = {
            str(bits(value)) for value in reply["weights"].values() if value.is_floating_point()
        }
        assert not sent & {
            str(bits(value)) for value in private.values() if value.is_floating_point()
        }
    assert bits(outcome.states["b"]["private"]) != bits(dict(initial))


def test_a_site_is_judged_by_its_private_model(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 2)
    for name in classes.names:
        assert bits(judged(METHOD, classes, outcome, name)) == bits(outcome.states[name]["private"])
        assert bits(outcome.states[name]["private"]) != bits(outcome.replies[name]["weights"])
    with classes.networks.scope():
        assert METHOD.global_predictor(classes.host(), outcome.server) is None


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"alpha=1.5 for method 'proxyfl'; alpha is float >= 0 and <= 1"
    ):
        load("proxyfl", alpha=1.5)
