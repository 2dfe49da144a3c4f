"""FedMR; numbers in brackets are the checks of the method's card (its losses: see test_manifold)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message, is_finite
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods._parts.prototypes import collect
from medfl.networks.heads import features_and_output
from medfl.training.site import snapshot
from tests.support.options import numbers
from tests.support.toy import (
    WHOLE,
    Outcome,
    Toy,
    bits,
    blobs,
    classifier,
    cross_entropy,
    sgd,
    simulate,
)

METHOD, FEDAVG = load("fedmr"), load("fedavg")
DISJOINT = {"a": (0, 1), "b": (1,), "c": (0, 2)}
"""Partially class-disjoint sites."""


@pytest.fixture
def toy() -> Toy:
    """Three sites, none with all classes; BatchNorm, dropout, momentum, several batches, the last one short."""
    data = blobs({"a": 18, "b": 9, "c": 13}, labels=DISJOINT)
    return Toy(
        data,
        classifier(norm=True, dropout=0.3),
        cross_entropy,
        sgd(0.1, momentum=0.9),
        2,
        batch_size=8,
    )


class Smooth(nn.Module):
    """8 -> 6 tanh features -> 3, float64: no feature is ever dead."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Linear(8, 6, dtype=torch.float64),
            nn.Linear(6, 3, dtype=torch.float64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.double()).tanh())


class Scaled(nn.Module):
    """Feature s x; the head has no say where the loss is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(())), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * x)


def by_class(group: dict[str, Tensor]) -> dict[str, list[float]]:
    return {c: value.tolist() for c, value in group.items()}


def weights(outcome: Outcome) -> dict[str, Tensor]:
    return bits(outcome.server["weights"])


# The steps


def test_two_rounds_of_the_inter_class_loss_by_hand() -> None:
    """Feature s x, s = 1, rate 0.5, mu2 = 0.25. a: (4, 0) and (0, 0) of class 0; b: (5, 0) of class 1.

    Round 1: no prototypes, nothing moves. g_0 = (2, 0), g_1 = (5, 0).
    Round 2, a: (4s, 0) costs |4s - 2| - |4s - 5| = 1 at s = 1, derivative 4 + 4 = 8; (0, 0) costs nothing: 2 < 5. The
    mean over the class halves it, one class and one other class: the loss falls by 0.25 * 4 = 1, s = 0.5.
    b: lies on g_1, costs nothing, s = 1. Server: s = (2 * 0.5 + 1)/3; g_0 = (1, 0), g_1 = (5, 0).
    """
    data = {
        "a": (torch.tensor([[4.0, 0], [0, 0]]), torch.tensor([0, 0])),
        "b": (torch.tensor([[5.0, 0]]), torch.tensor([1])),
    }
    toy = Toy(data, Scaled, lambda output, target: 0 * output.sum(), sgd(0.5))
    first, second = (simulate(load("fedmr", mu1=0, mu2=0.25), toy, rounds) for rounds in (1, 2))
    assert by_class(first.server["prototypes"]) == {"0": [2, 0], "1": [5, 0]}
    assert first.server["weights"]["scale"].item() == 1
    assert [second.replies[name]["weights"]["scale"].item() for name in "ab"] == [0.5, 1]
    assert second.server["weights"]["scale"].item() == pytest.approx(2 / 3)
    assert by_class(second.server["prototypes"]) == {"0": [1, 0], "1": [5, 0]}


@pytest.mark.parametrize(
    ("scale", "factor"), [("paper", 1.0), ("mean_offdiag", 1.0), ("released", 11**2 / 12)]
)
def test_one_step_of_the_intra_class_loss(scale: str, factor: float) -> None:
    """mu1 / (d (d - 1)) times the mean over classes of ||M||_F^2, written with torch.corrcoef; 12 of each class."""
    toy = Toy(blobs({"a": 36}), Smooth, cross_entropy, sgd(0.5))
    method = load("fedmr", mu1=0.3, mu2=0, intra_scale=scale)
    reply = simulate(method, toy).replies["a"]["weights"]
    x, y = toy.data["a"]
    model = toy.networks.fresh()
    z, output = features_and_output(model, x)
    squares = [torch.corrcoef(z[y == c].T).square().sum() for c in range(3)]
    (cross_entropy(output, y) + 0.3 * factor * sum(squares) / 3 / (6 * 5)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            reply[name], parameter.detach() - 0.5 * parameter.grad, rtol=0, atol=1e-6
        )
    plain = simulate(FEDAVG, toy).replies["a"]["weights"]
    assert (reply["body.weight"] - plain["body.weight"]).norm() > 1e-4


@pytest.mark.parametrize("sizes", [(12, 12, 12), (14, 3, 1)])
def test_auto_is_the_released_codes_loss(sizes: tuple[int, ...]) -> None:
    """0.01 sum_c (n_c - 1)^2 m_c / sum_c n_c over classes of two or more, m_c the mean squared correlation.

    Derived in NumPy, the step by differences; with n of each class it is mu1 = 0.01 (n - 1)^2 / n.
    """
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    x = blobs({"a": len(labels)})["a"][0]
    toy = Toy({"a": (x, labels)}, Smooth, lambda output, target: 0 * output.sum(), sgd(1.0))
    sent = simulate(load("fedmr", mu1="auto", mu2=0), toy).replies["a"]["weights"]
    start = {
        name: value.detach().numpy() for name, value in toy.networks.fresh().named_parameters()
    }

    def loss(weight: np.ndarray) -> float:
        z = np.tanh(x.double().numpy() @ weight.T + start["body.bias"])
        total = used = 0.0
        for c in range(3):
            own = z[labels.numpy() == c]
            if len(own) >= 2:
                used += len(own)
                squares = np.corrcoef(own.T) ** 2
                total += (len(own) - 1) ** 2 * (squares.sum() - np.trace(squares)) / (6 * 5)
        return 0.01 * total / used

    weight = start["body.weight"]
    for at in ((0, 0), (3, 7), (5, 2)):
        step = np.zeros_like(weight)
        step[at] = 1e-5
        slope = (loss(weight + step) - loss(weight - step)) / 2e-5
        assert (weight - sent["body.weight"].numpy())[at] == pytest.approx(slope, rel=1e-4)
    n = sizes[0]
    if sizes == (n, n, n):
        same = load("fedmr", mu1=str(0.01 * (n - 1) ** 2 / n), mu2=0)
        torch.testing.assert_close(
            simulate(same, toy).replies["a"]["weights"]["body.weight"], sent["body.weight"],
            rtol=0, atol=1e-8,
        )  # fmt: skip


def test_mu1_is_a_number_or_auto() -> None:
    assert load("fedmr", mu1="0.5").mu1 == 0.5
    for value in ("free", "-1", "nan"):
        with pytest.raises(InputError, match="mu1"):
            load("fedmr", mu1=value)


# What it reduces to


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.01}])
def test_without_both_losses_it_is_fedavg_bit_for_bit(toy: Toy, settings: dict) -> None:
    """[15] Statistics of BatchNorm included."""
    toy = replace(toy, optimizer=sgd(0.1, **settings))
    neither, average = simulate(load("fedmr", mu1=0, mu2=0), toy, 3), simulate(FEDAVG, toy, 3)
    assert bits([neither.server, neither.replies, neither.down]) == bits(
        [average.server, average.replies, average.down]
    )
    assert weights(simulate(METHOD, toy, 3)) != weights(average)


def test_without_mu2_no_message_has_prototypes(toy: Toy) -> None:
    """[15] "Intra only"."""
    outcome = simulate(load("fedmr", mu2=0), toy, 3)
    for message in [*outcome.down.values(), *outcome.replies.values()]:
        assert set(message.tensors) == {"weights"}
    assert set(outcome.server) == {"weights"}


def test_the_first_round_has_no_prototypes(toy: Toy) -> None:
    """Its weights are those of the intra-class loss alone; nothing is sent down."""
    both, intra = simulate(METHOD, toy), simulate(load("fedmr", mu2=0), toy)
    assert weights(both) == weights(intra)
    assert all(
        "prototypes" not in Message.decode(message.encode()) for message in both.down.values()
    )
    assert weights(simulate(METHOD, toy, 2)) != weights(simulate(load("fedmr", mu2=0), toy, 2))


# Prototypes


def test_prototypes_are_the_means_of_all_features(toy: Toy) -> None:
    """[13] sum_k p_k^c g_k^c is the class mean over all sites; without steps they share one network."""
    toy = replace(toy, network=Smooth, optimizer=sgd(0.0))
    server = simulate(load("fedmr", mu1=0), toy).server
    network = toy.networks.fresh()
    means, _ = collect(network, toy.site("central").train, 7, 3, torch.device("cpu"))
    assert list(server["prototypes"]) == ["0", "1", "2"]
    for c, value in server["prototypes"].items():
        torch.testing.assert_close(value, means[int(c)], rtol=0, atol=1e-12)


def test_a_class_is_weighed_by_its_samples_at_the_sites_that_send_it(toy: Toy) -> None:
    """[13] (3 * 1 + 1 * 5)/4 = 2; the shares of the sites' samples have no say."""
    sent = simulate(METHOD, toy).replies["a"]["weights"]

    def reply(value: float, count: int) -> Message:
        groups = {
            "prototypes": {"1": torch.full((6,), value)},
            "counts": {"1": torch.tensor(count)},
        }
        return Message({"weights": sent, **groups}, {"samples": 100 // count})

    replies = {
        "a": reply(1.0, 3),
        "b": reply(5.0, 1),
        "c": Message({"weights": sent}, {"samples": 7}),
    }
    old = {"0": torch.arange(6.0), "1": torch.zeros(6)}
    server = {"weights": sent, "prototypes": old}
    for stale, expected in (
        ("keep", {"0": old["0"], "1": torch.full((6,), 2.0)}),
        ("drop", {"1": torch.full((6,), 2.0)}),
    ):
        after = load("fedmr", stale=stale).aggregate(toy.host(), server, replies, 3)
        assert bits(after["prototypes"]) == bits(expected)


def test_prototypes_are_taken_from_the_trained_weights_in_evaluation_mode(toy: Toy) -> None:
    outcome = simulate(METHOD, toy, 2)
    for name in toy.names:
        network = toy.networks.fresh()
        network.load_state_dict(outcome.replies[name]["weights"])
        means, counts = collect(network, toy.site(name).train, 8, 3, torch.device("cpu"))
        sent = outcome.replies[name]["prototypes"]
        assert bits(sent) == bits({str(c): means[c] for c in DISJOINT[name]})
        assert {c: int(n) for c, n in outcome.replies[name]["counts"].items()} == {
            str(c): int(counts[c]) for c in DISJOINT[name]
        }


def test_what_travels(toy: Toy) -> None:
    """[14] Up |w| + |C_k| d floats and |C_k| integers, down |w| + C d floats, on the encoded messages."""
    outcome, average = simulate(METHOD, toy, 2, wire=True), simulate(FEDAVG, toy, 2)

    def numbers(message: Message, besides: Message) -> tuple[int, int]:
        """Floats and integers that a message has more than FedAvg's."""
        both = [Message.decode(m.encode()).flat().values() for m in (message, besides)]
        floats, integers = (
            [sum(t.numel() for t in tensors if t.is_floating_point() == kind) for tensors in both]
            for kind in (True, False)
        )
        return floats[0] - floats[1], integers[0] - integers[1]

    for name in toy.names:
        own = len(DISJOINT[name])
        assert numbers(outcome.replies[name], average.replies[name]) == (own * 6, own)
        assert numbers(outcome.down[name], average.down[name]) == (3 * 6, 0)
        assert outcome.replies[name].num_bytes == len(outcome.replies[name].encode())


# Partial sharing


@pytest.mark.parametrize(("share", "number"), [(0.5, 3), (0.8, 5), (0.01, 1)])
def test_only_a_part_of_the_sites_sends_prototypes(share: float, number: int) -> None:
    """Drawn once: the same sites in every round; all receive what there is."""
    toy = Toy(blobs(dict.fromkeys("abcdef", 6)), classifier(), cross_entropy, sgd(0.1))
    method = load("fedmr", share_prototypes=share)
    senders = set()
    for rounds in (1, 2, 3):
        outcome = simulate(method, toy, rounds, wire=True)
        senders.add(tuple(name for name, reply in outcome.replies.items() if "prototypes" in reply))
        assert all(
            bits(message.tensors) == bits(outcome.down["a"].tensors)
            for message in outcome.down.values()
        )
    (chosen,) = senders
    assert len(chosen) == number
    assert all(("counts" in reply) == (name in chosen) for name, reply in outcome.replies.items())
    others = {
        tuple(simulate(method, replace(toy, seed=seed)).server["sharing"]) for seed in range(9)
    }
    assert len(others) > 1
    everyone = simulate(METHOD, toy, 2)
    assert "sharing" not in everyone.server
    assert all(set(message.scalars) == set() for message in everyone.down.values())


def test_a_class_that_no_site_shares_is_left_out() -> None:
    """Only a site without class 2 sends: no sample of it is pulled or pushed, and nothing is NaN."""
    data = blobs({"a": 6, "b": 6}, labels={"a": (0, 1), "b": (2,)})
    toy = next(
        toy
        for seed in range(20)
        if simulate(
            load("fedmr", share_prototypes=0.5),
            toy := Toy(data, Smooth, cross_entropy, sgd(0.1), seed=seed),
        ).server["sharing"]
        == ["a"]
    )
    options = {
        "mu1": 0,
        "margin": False,
        "share_prototypes": 0.5,
    }  # without margin every sample of a counts
    inter, plain = (simulate(load("fedmr", options, mu2=mu2), toy, 2) for mu2 in (5.0, 0.0))
    assert set(inter.server["prototypes"]) == {"0", "1"}
    assert bits(inter.replies["b"]["weights"]) == bits(plain.replies["b"]["weights"])
    assert bits(inter.replies["a"]["weights"]) != bits(plain.replies["a"]["weights"])
    assert all(is_finite(tensor) for tensor in inter.server["weights"].values())


# Options


@pytest.mark.parametrize(
    "options",
    [
        {"mu1": 0.0}, {"mu1": 0.2}, {"mu2": 0.2}, {"inter_scope": "present"}, {"margin": False}, {"std": "biased"},
        {"min_count": 3}, {"intra_scale": "released"}, {"lite": 2}, {"share_prototypes": 0.5}, {"one_hot": True},
    ],
)  # fmt: skip
def test_each_option_does_something(toy: Toy, options: dict) -> None:
    assert weights(simulate(load("fedmr", options), toy, 3)) != weights(simulate(METHOD, toy, 3))


def test_a_stale_prototype_is_kept_or_dropped(toy: Toy) -> None:
    """Class 2 is at c alone, absent in round 2."""
    cohorts = [["a", "b", "c"], ["a", "b"]]
    kept, dropped = (
        simulate(load("fedmr", stale=stale), toy, 2, cohorts) for stale in ("keep", "drop")
    )
    assert (set(kept.server["prototypes"]), set(dropped.server["prototypes"])) == (
        {"0", "1", "2"},
        {"0", "1"},
    )
    assert bits(kept.server["prototypes"]["2"]) == bits(kept.history[1]["prototypes"]["2"])


def test_a_site_with_one_class_is_pushed_only_by_the_prototypes_of_all(toy: Toy) -> None:
    """b has class 1 alone: eq. 4 as printed leaves it out."""
    intra, whole, present = (
        bits(simulate(load("fedmr", options), toy, 2).replies["b"]["weights"])
        for options in ({"mu2": 0}, {}, {"inter_scope": "present"})
    )
    assert present == intra
    assert whole != intra


class Watched:
    """Cross-entropy that keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.seen.append((output.detach().clone(), target))
        return cross_entropy(output, target)


def test_lite_moves_neither_batches_nor_dropout(toy: Toy) -> None:
    """With as many samples as a batch has it is the whole loss bit for bit; with fewer the draws are its own."""
    whole = simulate(METHOD, toy, 3)
    assert weights(simulate(load("fedmr", lite=8), toy, 3)) == weights(whole)
    saw = []
    for lite in (0, 3):
        loss = Watched()
        watched = replace(toy, loss=loss)
        method = load("fedmr", lite=lite)
        down = method.broadcast(watched.host(2), whole.history[1], "a")
        with watched.networks.scope():
            method.local_update(watched.site("a", 2), {}, down)
        saw.append(loss.seen)
    assert bits([target for _, target in saw[0]]) == bits([target for _, target in saw[1]])
    assert bits(saw[0][0]) == bits(saw[1][0]), "dropout of the first step"
    assert bits(saw[0][-1]) != bits(saw[1][-1])


def test_lite_draws_anew_in_every_step() -> None:
    """Two samples of one class, rate 0: of lite = 1 each is drawn in some of 20 steps."""
    data = {"a": (torch.tensor([[1.0, 0], [0, 3]]), torch.tensor([0, 0]))}
    toy = Toy(data, Scaled, cross_entropy, sgd(0.0), epochs=20)
    method, table = (
        load("fedmr", mu1=0, mu2=1, lite=1),
        {"0": torch.zeros(2), "1": torch.full((2,), 1.0)},
    )
    site = toy.site("a")
    model = site.model(toy.initial)
    pushed = method.sharing.pushed(site, Message({"prototypes": table}), model).penalty
    values = {round(float(pushed(toy.data["a"][0], toy.data["a"][1])), 6) for _ in range(20)}
    first, second = 0.0, 3 - 5**0.5  # ||(1, 0)|| - ||(0, -1)|| = 0 and ||(0, 3)|| - ||(-1, 2)||
    assert values == {first, round(second, 6)}


def test_one_hot_prototypes_come_from_the_server(toy: Toy) -> None:
    outcome = simulate(load("fedmr", one_hot=True), toy, 2)
    for message in outcome.down.values():
        assert bits(message["prototypes"]) == bits({str(c): torch.eye(3, 6)[c] for c in range(3)})
    assert all(set(reply.tensors) == {"weights"} for reply in outcome.replies.values())


# Bad input


@pytest.mark.parametrize("share", ["0", "1.5", "-1", "nan"])
def test_a_part_of_the_sites_is_above_0_and_at_most_1(share: str) -> None:
    with pytest.raises(InputError, match="share_prototypes"):
        load("fedmr", share_prototypes=share)


def test_the_head_has_one_output_a_class_and_one_hot_prototypes_fit() -> None:
    task = Task("classification", ("p", "q", "r"))
    with pytest.raises(InputError, match="one output for each of the 3 classes"):
        METHOD.adapt(nn.Sequential(nn.Linear(8, 2)), task)
    with pytest.raises(InputError, match="2 features and 3 classes"):
        load("fedmr", one_hot=True).adapt(nn.Sequential(nn.Linear(2, 3)), task)


def test_features_of_another_size_name_the_sites(toy: Toy) -> None:
    """At the server, and at a site whose network differs from the others'."""
    outcome = simulate(METHOD, toy, 1)
    replies = dict(outcome.replies)
    for name in ("b", "c"):
        groups = {
            **replies[name].tensors,
            "prototypes": {"1": torch.zeros(5)},
            "counts": {"1": torch.tensor(4)},
        }
        replies[name] = Message(groups, replies[name].scalars)
    with pytest.raises(InputError, match="length 5 at b, c; length 6 at a"):
        METHOD.aggregate(toy.host(), outcome.history[0], replies, 3)
    down = Message(
        {
            **METHOD.broadcast(toy.host(2), outcome.server, "b").tensors,
            "prototypes": {"0": torch.zeros(9)},
        }
    )
    with (
        pytest.raises(InputError, match="length 6 at b; length 9 at the server"),
        toy.networks.scope(),
    ):
        METHOD.local_update(toy.site("b", 2), {}, down)


def test_eight_rounds_of_hard_data_stay_finite() -> None:
    """[15] A site with one class, one with one sample, batches with single samples of a class, and of one sample."""
    data = blobs({"a": 1, "b": 5, "c": 13}, labels={"b": (2,), "c": (0, 1, 2)})
    toy = Toy(
        data,
        classifier(norm=True, dropout=0.3),
        cross_entropy,
        sgd(0.1, momentum=0.9),
        2,
        batch_size=4,
    )
    outcome = simulate(load("fedmr", mu1=1, mu2=1), toy, 8)
    assert all(
        is_finite(tensor) for reply in outcome.replies.values() for tensor in reply.flat().values()
    )


def test_mixed_precision(toy: Toy) -> None:
    """The losses see bfloat16 features and are computed in float32."""
    outcome = simulate(METHOD, replace(toy, amp=True), 2)
    assert all(is_finite(tensor) for tensor in outcome.server["weights"].values())


# The motivation


def test_averaging_two_class_optima_turns_the_head() -> None:
    """[16] Sites with two of three classes each have opposite rows, along (1, -sqrt 3)/2, (1, sqrt 3)/2 and (0, 1).

    Their mean has the rows (1/3, 0) and (-1/6, +-(sqrt 3 + 2)/6): 45 degrees off (-sqrt 3/2, 1/2).
    """
    root = 3**0.5
    pairs = {"a": (0, 1, (0.5, -root / 2)), "b": (0, 2, (0.5, root / 2)), "c": (1, 2, (0.0, 1.0))}
    toy = Toy(
        blobs(dict.fromkeys(pairs, 3)),
        lambda: nn.Linear(2, 3, bias=False).double(),
        cross_entropy,
        batch_size=WHOLE,
    )
    replies = {}
    for name, (i, j, row) in pairs.items():
        head = torch.zeros(3, 2).double()
        head[i], head[j] = (
            torch.tensor(row, dtype=torch.float64),
            -torch.tensor(row, dtype=torch.float64),
        )
        replies[name] = Message({"weights": {"weight": head}}, {"samples": 10})
    server = METHOD.init_server(toy.host(0), snapshot(toy.networks.fresh()), {})
    mean = METHOD.aggregate(toy.host(), server, replies, 3)["weights"]["weight"]
    expected = torch.tensor(
        [[1 / 3, 0], [-1 / 6, (root + 2) / 6], [-1 / 6, -(root + 2) / 6]], dtype=torch.float64
    )
    torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)
    angle = torch.rad2deg(
        torch.acos(torch.cosine_similarity(mean[1], torch.tensor([-root / 2, 0.5]).double(), dim=0))
    )
    assert angle.item() == pytest.approx(45.0)


def test_the_cards_defaults_and_limits() -> None:
    assert numbers("fedmr") == {
        "mu1": (0.1, 0.0), "mu2": (0.1, 0.0), "margin": (True,), "min_count": (2, 2), "lite": (0, 0),
        "share_prototypes": (1.0, 0.0), "one_hot": (False,),
    }  # fmt: skip
