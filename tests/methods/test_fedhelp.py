"""FedHelp: the card's checks, by hand where a number is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, one_hot

from medfl import methods
from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.methods._parts.distillation import divergence, set_loss
from medfl.methods._parts.public import untracked
from medfl.methods.fedhelp import FedHelp, top_set
from medfl.methods.fedhelp.lesson import (
    Contribution,
    Lesson,
    distributions,
    divergence_from,
    mixture,
)
from medfl.networks import build
from medfl.runs.public_data import plan_public
from medfl.training.network_pool import Networks
from medfl.training.site import snapshot
from tests.support.options import numbers
from tests.support.toy import Toy, adam, bits, blobs, classifier, public_blobs, sgd, simulate

LARGE = ("a",)


def toy(**changes: object) -> Toy:
    """Site a is large, b and c are small; public items of four classes with two teachers."""
    made = Toy(
        blobs({"a": 12, "b": 8, "c": 6}), classifier(norm=True), cross_entropy, sgd(0.1), batch_size=4,
        public=public_blobs(),
    )  # fmt: skip
    return replace(made, **changes)


def fedhelp(**options: object) -> FedHelp:
    return methods.load("fedhelp", {"large": "a", **options})


def logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Eq. 5 and 6: what the proxy gives back


@pytest.mark.parametrize("shape", [(4, 5), (2, 5, 3, 4), (2, 5, 2, 3, 2)])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_the_backward_loss_is_the_sum_over_the_top_classes(
    shape: tuple[int, ...], size: int
) -> None:
    z, z_proxy = logits(*shape), logits(*shape, seed=1)
    loss = set_loss(z, top_set(z_proxy, size))
    log_p = log_softmax(z, 1)
    best = z_proxy.topk(size, dim=1).indices
    torch.testing.assert_close(loss, -log_p.gather(1, best).sum(1).mean(), rtol=0, atol=1e-10)
    if size == 1:
        torch.testing.assert_close(loss, cross_entropy(z, z_proxy.argmax(1)), rtol=0, atol=1e-10)
    if size == 5:  # K (KL(uniform || p) + log K): the proxy has no say
        uniform = torch.full_like(z, 1 / 5)
        divergence_ = (uniform * (uniform.log() - log_p)).sum(1).mean()
        torch.testing.assert_close(loss, 5 * (divergence_ + math.log(5)), rtol=0, atol=1e-10)


def test_its_gradient_reaches_the_large_network_only() -> None:
    """d/dz = (|Omega| p - 1_Omega) / B for each sample."""
    z, z_proxy = logits(4, 6).requires_grad_(), logits(4, 6, seed=1).requires_grad_()
    sets = top_set(z_proxy, 3)
    set_loss(z, sets).backward()
    torch.testing.assert_close(
        z.grad, (3 * z.detach().softmax(1) - sets.double()) / 4, rtol=0, atol=1e-10
    )
    assert z_proxy.grad is None


def test_it_sees_the_proxys_order_only_and_is_bounded() -> None:
    """Any increasing transform of z~ and any shift of z change nothing; the least value is |Omega| log |Omega|."""
    z, z_proxy = logits(4, 6), logits(4, 6, seed=1)
    loss = set_loss(z, top_set(z_proxy, 3))
    assert set_loss(z + 5, top_set((3 * z_proxy + 1).exp(), 3)) == pytest.approx(
        float(loss), abs=1e-10
    )
    assert 3 * math.log(3) == pytest.approx(3.295837, abs=1e-6)
    assert loss > 3 * math.log(3)
    free = z.clone().requires_grad_()
    optimizer = torch.optim.SGD([free], 1.0)
    for _ in range(2000):
        optimizer.zero_grad()
        set_loss(free, top_set(z_proxy, 3)).backward()
        optimizer.step()
    inside = free.detach().softmax(1)[top_set(z_proxy, 3)]
    torch.testing.assert_close(inside, torch.full_like(inside, 1 / 3), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("label", "best"), [(0, [0.75, 0.125, 0.125, 0, 0]), (4, [0.125, 0.125, 0.125, 0, 0.625])]
)
def test_with_labels_it_smooths_over_the_top_classes(label: int, best: list[float]) -> None:
    """L + 0.2 <-KD = 1.6 H(t*, p), t* = (onehot(y) + 0.2 1_Omega) / 1.6 with |Omega| = 3."""
    sets = torch.tensor([[True, True, True, False, False]])
    y = torch.tensor([label])
    z = logits(1, 5).requires_grad_()
    target = (one_hot(y, 5) + 0.2 * sets) / 1.6
    total = cross_entropy(z, y) + 0.2 * set_loss(z, sets)
    torch.testing.assert_close(total, -1.6 * (target * log_softmax(z, 1)).sum(), rtol=0, atol=1e-10)
    optimizer = torch.optim.SGD([z], 0.5)
    for _ in range(2000):
        optimizer.zero_grad()
        (cross_entropy(z, y) + 0.2 * set_loss(z, sets)).backward()
        optimizer.step()
    torch.testing.assert_close(
        z.detach().softmax(1)[0], torch.tensor(best, dtype=torch.float64), rtol=0, atol=1e-3
    )


def test_equal_logits_are_ranked_by_class() -> None:
    assert top_set(torch.zeros(1, 5), 2).tolist() == [[True, True, False, False, False]]


# Eq. 4: what the large network gives


def test_the_forward_divergence_trains_the_proxy_only() -> None:
    z, z_proxy = logits(4, 6).requires_grad_(), logits(4, 6, seed=1).requires_grad_()
    divergence(z_proxy, z).backward()
    assert z.grad is None
    expected = (z_proxy.detach().softmax(1) - z.detach().softmax(1)) / 4
    torch.testing.assert_close(z_proxy.grad, expected, rtol=0, atol=1e-10)


def test_one_joint_step_is_two_separate_ones() -> None:
    """On G, the large network and the proxy step as each would on its own half, bit for bit."""
    federation = toy(batch_size=100)
    method = fedhelp()
    site = federation.site("a")
    state = method.init_site(site)
    down = Message({"weights": federation.initial})
    other = federation.networks.fresh("another")
    state = {**state, "weights": snapshot(other)}
    after, reply = method.local_update(site, state, down)
    large, proxy = federation.networks.fresh(), federation.networks.fresh()
    large.load_state_dict(state["weights"])
    proxy.load_state_dict(federation.initial)
    x, y = federation.data["a"]
    order = next(iter(site.train.batches(100, generator_of(site))))
    x, y = order
    z, z_proxy = large(x), proxy(x)
    (cross_entropy(z, y) + 0.2 * set_loss(z, top_set(z_proxy, 2))).backward()
    divergence(z_proxy, z).backward()
    for network, weights in ((large, after["weights"]), (proxy, reply["weights"])):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
        assert bits(snapshot(network)) == bits(dict(weights))


def generator_of(site: object, purpose: str = "local") -> torch.Generator:
    from medfl.core.seeding import stream

    with stream(site.seed, purpose) as generator:
        return generator


def test_in_turns_by_hand() -> None:
    """Two epochs of one batch: a large step beside the proxy in evaluation mode, then a step of the proxy beside the
    large network as it is now; each optimiser goes on with its momentum.
    """
    federation = toy(batch_size=100, epochs=2, optimizer=sgd(0.1, momentum=0.9))
    method, site = fedhelp(schedule="alternate"), federation.site("a")
    state = {**method.init_site(site), "weights": snapshot(federation.networks.fresh("another"))}
    after, reply = method.local_update(site, state, Message({"weights": federation.initial}))
    large, proxy = federation.networks.fresh(), federation.networks.fresh()
    large.load_state_dict(state["weights"])
    proxy.load_state_dict(federation.initial)
    steps = [torch.optim.SGD(network.parameters(), 0.1, momentum=0.9) for network in (large, proxy)]
    losses = []
    for purpose in ("local", "local 1"):
        x, y = next(iter(site.train.batches(100, generator_of(site, purpose))))
        for turn, network in enumerate((large, proxy)):
            large.train(turn == 0)
            proxy.train(turn == 1)
            z, z_proxy = large(x), proxy(x)
            parts = (
                cross_entropy(z, y) + 0.2 * set_loss(z, top_set(z_proxy, 2)),
                divergence(z_proxy, z),
            )
            network.zero_grad()
            parts[turn].backward()
            steps[turn].step()
            losses.append(parts[turn].item())
    assert bits(snapshot(large)) == bits(dict(after["weights"]))
    assert bits(snapshot(proxy)) == bits(dict(reply["weights"]))
    assert site.journal[-1].steps == 2
    assert site.journal[-1].loss == pytest.approx(
        (losses[0] + losses[2]) / 2
    )  # the large network's


@pytest.mark.parametrize("warm", [1.0, 2.0])
def test_both_divergences_at_a_temperature(warm: float) -> None:
    """T^2 KL(softmax(teacher / T) || softmax(student / T))."""
    z, z_proxy, y = logits(4, 5), logits(4, 5, seed=1), torch.tensor([0, 1, 2, 4])

    def warmed(student: Tensor, teacher: Tensor) -> Tensor:
        p, q = (value.div(warm).softmax(1) for value in (teacher, student))
        return warm**2 * (p * (p / q).log()).sum(1).mean()

    method = fedhelp(temperature=warm, lambda_f=3, backward="symmetric", proxy_ce=0.7)
    forward = 3 * warmed(z_proxy, z) + 0.7 * cross_entropy(z_proxy, y)
    torch.testing.assert_close(
        method._proxy_loss(cross_entropy, z, z_proxy, y), forward, rtol=0, atol=1e-10
    )
    back = cross_entropy(z, y) + 0.2 * warmed(z, z_proxy)
    torch.testing.assert_close(
        method._large_loss(cross_entropy, z, z_proxy, y), back, rtol=0, atol=1e-10
    )


def test_labels_alone_may_teach_the_proxy() -> None:
    z, z_proxy, y = logits(4, 5), logits(4, 5, seed=1), torch.tensor([0, 1, 2, 4])
    found = fedhelp(lambda_f=0, proxy_ce=0.5)._proxy_loss(cross_entropy, z, z_proxy, y)
    torch.testing.assert_close(found, 0.5 * cross_entropy(z_proxy, y), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "top", "size"),
    [
        ((2, 3), 0, 2),
        ((2, 4), 0, 3),
        ((2, 8), 0, 3),
        ((2, 2), 0, 1),
        ((2, 8), 5, 5),
        ((2, 3, 4, 4), 0, 1),
    ],
)
def test_omega_is_a_part_of_the_classes(shape: tuple[int, ...], top: int, size: int) -> None:
    assert fedhelp(top=top)._size(torch.zeros(shape)) == size


@pytest.mark.parametrize("top", [3, 4])
def test_an_omega_of_all_classes_is_refused(top: int) -> None:
    with pytest.raises(InputError, match=f"top={top} with 3 classes; .*take fewer"):
        toy().adapted(fedhelp(top=top)).networks.fresh()
    toy().adapted(fedhelp(top=2)).networks.fresh()


def test_without_the_forward_part_the_proxy_stays_as_it_came() -> None:
    """FedHelp_b: its parameters and its running statistics."""
    federation = toy()
    outcome = simulate(fedhelp(lambda_f=0), federation)
    assert bits(dict(outcome.replies["a"]["weights"])) == bits(federation.initial)
    assert bits(outcome.states["a"]["weights"]) != bits(federation.initial)


def test_without_the_backward_part_the_large_network_trains_alone() -> None:
    """FedHelp_f: as Local does, bit for bit."""
    federation = toy()
    helped = simulate(fedhelp(lambda_b=0), federation, 2)
    alone = simulate(methods.load("local"), federation, 2)
    assert bits(helped.states["a"]["weights"]) == bits(alone.states["a"]["weights"])
    assert bits(simulate(fedhelp(), federation, 2).states["a"]["weights"]) != bits(
        alone.states["a"]["weights"]
    )


def test_the_variants_of_the_large_sites_differ() -> None:
    seen = set()
    variants = (
        {},
        {"backward": "symmetric"},
        {"schedule": "alternate"},
        {"proxy_ce": 1},
        {"top": 1},
        {"temperature": 2},
    )
    for options in variants:
        outcome = simulate(fedhelp(**options), toy(epochs=2), 1)
        seen.add(
            str(bits(outcome.states["a"]["weights"]))
            + str(bits(dict(outcome.replies["a"]["weights"])))
        )
    assert len(seen) == len(variants)


def test_in_turns_with_nothing_to_learn_the_proxy_stays() -> None:
    federation = toy(epochs=2)
    outcome = simulate(fedhelp(schedule="alternate", lambda_f=0), federation)
    assert bits(dict(outcome.replies["a"]["weights"])) == bits(federation.initial)


def test_large_sites_never_touch_public_data() -> None:
    method = fedhelp()
    site = replace(toy().site("a"), public=None)
    state, reply = method.local_update(
        site, method.init_site(site), Message({"weights": site.initial_weights})
    )
    assert set(state) == {"weights"}
    assert set(reply.tensors) == {"weights"}


# Eq. 1: the teachers' mixture


def test_shares_sum_to_one_and_start_equal() -> None:
    contribution = Contribution("table", Contribution.start("table", 5, 3, 2), 3, 0.01)
    alpha = contribution.alpha(torch.tensor([0, 4]), torch.zeros(2, 2))
    torch.testing.assert_close(alpha, torch.full((3, 2), 1 / 3))


@pytest.mark.parametrize(("rule", "teachers"), [("uniform", 3), ("table", 1), ("gate", 1)])
def test_shares_that_nothing_can_teach_are_equal_and_stay(rule: str, teachers: int) -> None:
    contribution = Contribution(rule, Contribution.start(rule, 5, teachers, 2), teachers, 0.5)
    answers, log_q = (
        logits(teachers, 2, 4).softmax(2).float(),
        log_softmax(logits(2, 4, seed=5).float(), 1),
    )
    for _ in range(2):
        t = contribution.mix(
            torch.tensor([0, 4]), torch.zeros(2, 2), answers, log_q, torch.zeros(2).long()
        )
        torch.testing.assert_close(t, answers.mean(0))
    assert contribution.state == {}


def test_the_gradient_of_the_shares_is_the_cards() -> None:
    """d KL / d a_m = alpha_m (g_m - sum_n alpha_n g_n), g_m = sum_c T_m(c) (log t(c) - log q(c)); rows sum to 0."""
    answers = logits(3, 1, 4).softmax(2)
    log_q = log_softmax(logits(1, 4, seed=5), 1)
    a = logits(1, 3, seed=6).requires_grad_()
    t = mixture(a.softmax(1).T, answers)
    divergence_from(t, log_q).sum().backward()
    alpha = a.detach().softmax(1)[0]
    g = (answers[:, 0] * (t.detach().log() - log_q)).sum(1)
    torch.testing.assert_close(a.grad[0], alpha * (g - (alpha * g).sum()), rtol=0, atol=1e-10)
    assert float(a.grad.sum()) == pytest.approx(0, abs=1e-12)


def test_teachers_that_agree_leave_the_shares_alone() -> None:
    one = logits(1, 2, 4).softmax(2).float()
    contribution = Contribution("table", {"table": torch.tensor([[0.3, -0.2], [0.0, 1.0]])}, 2, 0.5)
    log_q = log_softmax(logits(2, 4, seed=5).float(), 1)
    before = contribution.alpha(torch.arange(2), torch.zeros(2, 1)).detach()
    contribution.mix(
        torch.arange(2),
        torch.zeros(2, 1),
        one.repeat(2, 1, 1),
        log_q,
        torch.zeros(2, dtype=torch.int64),
    )
    t = mixture(contribution.alpha(torch.arange(2), torch.zeros(2, 1)), one.repeat(2, 1, 1))
    divergence_from(t, log_q).sum().backward()
    torch.testing.assert_close(
        contribution.values["table"].grad.to_dense(), torch.zeros(2, 2), rtol=0, atol=1e-6
    )
    assert before.shape == (2, 2)
    assert Contribution.start("table", 5, 1, 2) == {}, "one teacher has nothing to learn"


def test_saturated_teachers_give_numbers() -> None:
    """One-hot answers have zeros, whose logarithm is none."""
    answers = torch.stack(
        [one_hot(torch.tensor([0, 1]), 4), one_hot(torch.tensor([0, 2]), 4)]
    ).float()
    contribution = Contribution("table", Contribution.start("table", 2, 2, 1), 2, 0.1)
    t = contribution.mix(
        torch.arange(2),
        torch.zeros(2, 1),
        answers,
        log_softmax(torch.randn(2, 4), 1),
        torch.tensor([0, 1]),
    )
    assert t.isfinite().all()
    assert divergence_from(t, torch.full((2, 4), -1.0)).isfinite().all()
    assert contribution.state["table"].isfinite().all()
    outcome = simulate(
        fedhelp(),
        toy(public=replace(public_blobs(), answers=(torch.eye(4)[torch.arange(10) % 4],) * 2)),
    )
    assert all(tensor.isfinite().all() for tensor in outcome.states["b"]["weights"].values())


def test_the_literal_rule_follows_the_teacher_that_agrees_with_the_student() -> None:
    """Student = teacher 1: alpha_1 > 0.98 (a defect of the rule, which the card reports); on labels the other wins."""
    answers = torch.tensor([[[0.7, 0.2, 0.1]], [[0.1, 0.1, 0.8]]])
    log_q, y = answers[0].log(), torch.tensor([2])
    found = {}
    for rule in ("table", "ce", "gate"):
        contribution = Contribution(rule, Contribution.start(rule, 1, 2, 1), 2, 0.1)
        for _ in range(300):
            contribution.mix(torch.tensor([0]), torch.ones(1, 1), answers, log_q, y)
        found[rule] = float(contribution.alpha(torch.tensor([0]), torch.ones(1, 1)).detach()[0, 0])
    assert found["table"] > 0.98
    assert found["gate"] > 0.98
    assert found["ce"] < 0.02


def test_only_the_rows_of_a_batch_move() -> None:
    contribution = Contribution("table", Contribution.start("table", 6, 2, 1), 2, 0.1)
    answers = logits(2, 2, 3).softmax(2).float()
    for _ in range(3):
        contribution.mix(
            torch.tensor([1, 4]),
            torch.zeros(2, 1),
            answers,
            log_softmax(torch.randn(2, 3), 1),
            torch.zeros(2).long(),
        )
    moved = contribution.state["table"].abs().sum(1) > 0
    assert moved.tolist() == [False, True, False, False, True, False]


def test_a_foreground_logit_is_a_distribution_over_two_classes() -> None:
    """softmax([0, l])[1] = sigma(l)."""
    ell = torch.linspace(-9, 9, 7)[None, None]
    both = distributions(ell, True)
    torch.testing.assert_close(both, torch.stack([torch.zeros_like(ell), ell], 2).softmax(2))


# Eq. 1-3: the small site


def lesson(federation: Toy, **options: object) -> tuple[Lesson, nn.Module]:
    method, site = fedhelp(**options), federation.site("b")
    network = site.model(federation.initial)
    return Lesson(method, site, method.init_site(site), network), network


def items(federation: Toy) -> list[Tensor]:
    return lesson(federation)[0].items(federation.site("b"))(4)


def test_the_public_loss_leaves_the_private_head_alone_and_moves_the_body() -> None:
    federation = toy()
    one, network = lesson(federation)
    one.loss(*items(toy())).backward()
    phi, first = network[4], network[0]
    assert phi.weight.grad is None
    assert phi.bias.grad is None
    assert first.weight.grad.abs().sum() > 0
    assert one.head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("public_bn", "moves"), [("no_track", False), ("shared", True), ("separate", False)]
)
def test_public_batches_and_running_statistics(public_bn: str, moves: bool) -> None:
    one, network = lesson(toy(), public_bn=public_bn)
    before = bits(dict(network.named_buffers()))
    one.loss(*items(toy())).backward()
    assert (bits(dict(network.named_buffers())) != before) is moves
    assert network[1].track_running_stats
    if public_bn == "separate":
        assert network[1].weight.grad is None
        assert one.state["public_norm"]["1.running_mean"].abs().sum() > 0


def test_untracked_layers_still_go_by_the_batch() -> None:
    layer, x = nn.BatchNorm1d(3), torch.randn(8, 3) * 5 + 2
    with untracked(layer):
        out = layer(x)
    torch.testing.assert_close(out.mean(0), torch.zeros(3), rtol=0, atol=1e-6)
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("warm", [1.0, 2.0])
def test_the_public_loss_by_hand(warm: float) -> None:
    """CE(z^, y_p) + 0.1 T^2 KL(t || q), t the mean of two teachers before alpha has moved, all at temperature T.

    A distribution at temperature T is its T-th root, normalised.
    """
    federation = toy()
    one, network = lesson(federation, temperature=warm)
    twin, other = lesson(federation, temperature=warm)
    x, y, positions, _ = items(federation)
    with untracked(other):
        features = other[:4](x)
    z = twin.head(features)
    answers = federation.public.answered(positions) ** (1 / warm)
    t = (answers / answers.sum(2, keepdim=True)).mean(0)
    expected = (
        cross_entropy(z, y)
        + 0.1 * warm**2 * (t * (t.log() - log_softmax(z / warm, 1))).sum(1).mean()
    )
    torch.testing.assert_close(one.loss(*items(federation)), expected, rtol=0, atol=1e-6)


def test_without_public_data_a_small_site_is_fedavgs() -> None:
    federation = toy()
    method, plain = fedhelp(lambda_j=0), methods.load("fedavg")
    for name in ("b", "c"):
        site = federation.site(name)
        down = Message({"weights": federation.initial})
        state, reply = method.local_update(site, method.init_site(site), down)
        _, expected = plain.local_update(federation.site(name), {}, down)
        assert bits(reply) == bits(expected)
        assert bits(state["weights"]) == bits(dict(reply["weights"]))


def test_the_summed_loss_weighs_the_public_part_by_p_over_k() -> None:
    """10 public items, 8 of site b: lambda_J = 0.2 as a sum is 0.25 as a mean."""
    summed = simulate(fedhelp(loss_reduction="sum", lambda_j=0.2), toy())
    meant = simulate(fedhelp(lambda_j=0.25), toy())
    for name, value in summed.states["b"]["weights"].items():
        torch.testing.assert_close(value, meant.states["b"]["weights"][name])
    assert bits(summed.states["c"]["weights"]) != bits(meant.states["c"]["weights"])


def test_a_full_pass_takes_every_public_item_once_an_epoch() -> None:
    federation = toy(epochs=2)
    taken: list[int] = []
    whole = federation.public.at

    class Seen(type(federation.public)):
        def at(self, positions: Tensor):
            taken.extend(positions.tolist())
            return whole(positions)

    public = Seen(**federation.public.__dict__)
    method, site = fedhelp(public_schedule="full"), replace(federation.site("c"), public=public)
    method.local_update(site, method.init_site(site), Message({"weights": federation.initial}))
    assert sorted(taken) == sorted([*range(10)] * 2)


def test_psi_and_alpha_stay_and_continue() -> None:
    outcome = simulate(fedhelp(), toy(optimizer=adam(0.01)), 2)
    for reply in outcome.replies.values():
        assert set(reply.tensors) == {"weights"}
        assert set(reply["weights"]) == set(toy().initial)
    state = outcome.states["b"]
    assert set(state) == {"weights", "public_head", "alpha"}
    assert state["alpha"]["table"].shape == (10, 2)
    assert state["alpha"]["table"].abs().sum() > 0
    assert state["public_head"]["weight"].shape == (4, 6)


# Who is large, and what travels


def test_the_large_sites_get_the_large_network() -> None:
    method = methods.load("fedhelp", large="a, c", large_network="resnet32")
    assert method.site_networks(["a", "b", "c"]) == {
        "a": {"network": "resnet32"},
        "b": {},
        "c": {"network": "resnet32"},
    }
    wide = methods.load("fedhelp", large="b", large_network="width=64")
    assert wide.site_networks(["a", "b"]) == {"a": {}, "b": {"width": 64}}


@pytest.mark.parametrize("network", ["", ",", "resnet20,,"])
def test_a_wrong_large_network_is_an_error_of_this_option(network: str) -> None:
    method = methods.load("fedhelp", large="a", large_network=network or "=resnet20")
    with pytest.raises(InputError, match="large_network is VALUE") as failed:
        method.site_networks(["a", "b"])
    assert "bodies" not in str(failed.value)


@pytest.mark.parametrize(
    ("large", "said"),
    [
        ("", "no large site"),
        ("auto", "no large site"),
        ("a,b", "no small site"),
        ("a,z", "'z'; sites are a, b"),
    ],
)
def test_a_wrong_list_of_large_sites_is_one_line(large: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        methods.load("fedhelp", large=large).site_networks(["a", "b"])


@pytest.mark.parametrize(
    ("sizes", "large"),
    [
        ({"a": 5, "b": 90, "c": 30, "d": 7}, "b,c"),
        ({"a": 5, "b": 90, "c": 30}, "b"),
        ({"a": 5, "b": 5}, "a"),
        ({"a": 5}, ""),
    ],
)
def test_the_larger_half_is_large_unless_it_is_named(sizes: dict[str, int], large: str) -> None:
    method = methods.settled(methods.load("fedhelp"), sizes)
    assert methods.values_of(method)["large"] == large
    assert methods.settled(fedhelp(large="a"), sizes) == fedhelp(large="a")
    assert methods.settled(methods.load("fedprox"), sizes) == methods.load("fedprox")


def test_without_public_data_it_says_what_to_do() -> None:
    site = replace(toy().site("b"), public=None)
    with pytest.raises(InputError, match="--set public=BUNDLE"):
        fedhelp().check(site)
    fedhelp(lambda_j=0).check(site)


@pytest.mark.parametrize(
    ("options", "uses"),
    [({}, (True, True)), ({"lambda_r": 0}, (True, False)), ({"lambda_j": 0}, (False, False))],
)
def test_what_has_no_weight_is_not_asked_for(
    options: dict[str, float], uses: tuple[bool, bool]
) -> None:
    """Neither public data nor teachers have to be at hand."""
    method = fedhelp(**options)
    assert (method.uses_public, method.uses_teachers) == uses
    given = {
        **methods.values_of(method),
        "public": "mnist:phantom",
        "public_items": 3,
        "teachers": "nobody",
    }
    if uses[1]:
        with pytest.raises(InputError, match="'nobody'"):
            plan_public(method, given, Bundle("mnist"), "cpu", say=str)
        return
    found = plan_public(method, given, Bundle("mnist"), "cpu", say=str)
    assert (found is not None, found is not None and found.teachers == ()) == (uses[0], uses[0])
    if not uses[0]:
        assert plan_public(method, {**given, "public": ""}, Bundle("mnist"), "cpu", say=str) is None


def test_what_travels_is_resnet20() -> None:
    """K = 8: 269,592 parameters and 1,376 floats of BatchNorm, 19 counters of 8 bytes; 84.40 % less than ResNet-110."""
    small, large = build("resnet20", 3, 8), build("resnet110", 3, 8)
    federation = Toy(
        {
            "a": (torch.randn(4, 3, 16, 16), torch.arange(4)),
            "b": (torch.randn(4, 3, 16, 16), torch.arange(4)),
        }
    )
    federation.networks = Networks(lambda: build("resnet20", 3, 8), 0, torch.device("cpu"))
    federation = replace(
        federation, network=lambda: build("resnet20", 3, 8), loss=cross_entropy, optimizer=sgd(0.1)
    )
    method = fedhelp(lambda_j=0)
    pool = Networks(lambda: build("resnet110", 3, 8), 0, torch.device("cpu"))
    site = replace(federation.site("a"), networks=pool, common=federation.networks)
    state, reply = method.local_update(
        site, method.init_site(site), Message({"weights": federation.initial})
    )
    sent = reply["weights"]
    assert set(sent) == set(small.state_dict())
    parameters = sum(p.numel() for p in small.parameters())
    assert parameters == 269_592
    floats = sum(t.numel() for t in sent.values() if t.is_floating_point())
    assert (floats - parameters, 4 * floats) == (1_376, 1_083_872)
    assert sum(t.numel() * 8 for t in sent.values() if not t.is_floating_point()) == 152
    assert set(state["weights"]) == set(large.state_dict())
    cut = 1 - parameters / sum(p.numel() for p in large.parameters())
    assert round(100 * cut, 2) == 84.40


def test_a_learned_share_leaves_one_half() -> None:
    """An item is visited about once a round: after 20 rounds the teacher that agrees with the student counts most."""
    state, answers = (
        Contribution.start("table", 4, 2, 3),
        torch.tensor([[[0.9, 0.1]], [[0.1, 0.9]]]),
    )
    for _ in range(20):
        contribution = Contribution("table", state, 2, methods.load("fedhelp").lr_alpha)
        contribution.mix(
            torch.tensor([2]), torch.zeros(1, 3), answers, answers[0].log(), torch.tensor([0])
        )
        state = contribution.state
    shares = state["table"].softmax(1)[:, 0]
    assert shares[2] > 0.9
    assert shares[[0, 1, 3]].tolist() == [0.5] * 3


def test_the_printed_defaults() -> None:
    """Sections 4.1.2 and 5.2; Omega has 3 classes, 1 of two."""
    method = methods.load("fedhelp")
    assert numbers("fedhelp") == {
        "lambda_j": (0.2, 0.0), "lambda_f": (1.0, 0.0), "lambda_b": (0.2, 0.0), "top": (0, 0), "proxy_ce": (0.0, 0.0),
        "lambda_r": (0.1, 0.0), "lr_alpha": (0.1, 0.0), "temperature": (1.0, 0.01), "public_items": (0, 0),
        "public_size": (0, 0), "beta_0": (10.0, 0.0), "sigma": (5.0, 0.01), "inside": (False,),
    }  # fmt: skip
    assert [method._size(torch.zeros(1, classes)) for classes in (8, 4, 3, 2)] == [3, 3, 2, 1]
    assert method._size(torch.zeros(1, 4, 5, 5)) == 1


def test_the_fed_isic_sites_count_by_their_images() -> None:
    """9930, 3163, 2690, 655, 351, 180 images; site i sends the initial weights times 10^i."""
    counts = {"0": 9930, "1": 3163, "2": 2690, "3": 655, "4": 351, "5": 180}
    shares = (0.58516, 0.18639, 0.15852, 0.03860, 0.02068, 0.01061)
    weights = {name: t.double() for name, t in toy().initial.items() if t.is_floating_point()}
    replies = {
        name: Message(
            {"weights": {key: t * 10 ** int(name) for key, t in weights.items()}}, {"samples": n}
        )
        for name, n in counts.items()
    }
    merged = fedhelp().aggregate(toy().host(), {"weights": weights}, replies, 6)["weights"]
    factor = sum(share * 10**i for i, share in enumerate(shares))
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, weights[name] * factor, rtol=1e-3, atol=0)


def test_communication_leaves_large_networks_untouched() -> None:
    federation = toy()
    two = simulate(fedhelp(), federation, 2, cohorts=[["a", "b", "c"], ["b", "c"]])
    one = simulate(fedhelp(), federation, 1)
    assert bits(two.states["a"]) == bits(one.states["a"])
