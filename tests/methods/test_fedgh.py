"""FedGH: what travels, the server's training of the header, class means of items and pixels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.methods import load
from medfl.methods._parts.class_heads import logits
from medfl.methods._parts.prototypes import collect
from medfl.networks import build
from medfl.networks.heads import features_and_output
from medfl.training.network_pool import Networks
from medfl.training.site import Site, fit
from tests.support.toy import (
    Toy,
    bits,
    blobs,
    classifier,
    cross_entropy,
    judged,
    sgd,
    shaken,
    simulate,
)

METHOD = load("fedgh")
CLASSES = Task("classification", ("p", "q", "r"))
CPU = torch.device("cpu")


def server(weight: Tensor, bias: Tensor) -> tuple[Toy, dict]:
    """A server whose network is a body of no layers and a header of this form, and its State."""

    def network():
        return nn.Sequential(
            nn.Identity(), nn.Linear(weight.shape[1], len(weight), dtype=weight.dtype)
        )  # noqa: E731

    return Toy({}, network), {"header": {"weight": weight, "bias": bias}}


def replies(means: Mapping[str, Mapping[int, Tensor]]) -> dict[str, Message]:
    return {
        name: Message({"prototypes": {str(c): r for c, r in own.items()}})
        for name, own in means.items()
    }


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The server


def test_a_server_step_by_hand() -> None:
    """phi = 0, so p = (1/2, 1/2). r = (1, 2) of class 0: dW = (p - onehot) r' = (-1/2, 1/2)' (1, 2), db = (-1/2, 1/2).

    With rate 1: W = ((1/2, 1), (-1/2, -1)), b = (1/2, -1/2).
    """
    toy, state = server(torch.zeros(2, 2), torch.zeros(2))
    after = load("fedgh", server_lr=1.0).aggregate(
        toy.host(), state, replies({"a": {0: torch.tensor([1.0, 2])}}), 1
    )
    assert after["header"]["weight"].tolist() == [[0.5, 1], [-0.5, -1]]
    assert after["header"]["bias"].tolist() == [0.5, -0.5]


def test_the_headers_gradient() -> None:
    """The card's check: dW = (p - onehot) r', here the mean of it over all class means of a round, within 1e-12."""
    weight, bias, r = drawn(3, 4), drawn(3, seed=1), drawn(4, 4, seed=2)
    toy, state = server(weight, bias)
    sent = replies({"b": {2: r[3], 0: r[2]}, "a": {1: r[0], 2: r[1]}})
    after = load("fedgh", server_lr=0.3, server_batch_size=0).aggregate(toy.host(), state, sent, 2)
    p = (r @ weight.T + bias).softmax(1)
    gap = p - torch.eye(3, dtype=torch.float64)[[1, 2, 0, 2]]
    torch.testing.assert_close(
        after["header"]["weight"], weight - 0.3 * gap.T @ r / 4, rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        after["header"]["bias"], bias - 0.3 * gap.mean(0), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("epochs", "size"), [(1, 1), (3, 1), (2, 3)])
def test_it_takes_one_step_for_each_batch_of_class_means_in_random_order(
    epochs: int, size: int
) -> None:
    """Plain SGD without momentum; the order is the server's own, not that of the replies."""
    weight, bias, r = drawn(3, 4), drawn(3, seed=1), drawn(5, 4, seed=2)
    sent = {"a": {0: r[0], 1: r[1]}, "b": {0: r[2], 1: r[3], 2: r[4]}}
    label = torch.tensor([0, 1, 0, 1, 2])
    toy, state = server(weight, bias)
    method = load("fedgh", server_lr=0.3, server_epochs=epochs, server_batch_size=size)
    after = method.aggregate(toy.host(4), state, replies(sent), 2)["header"]
    with stream(toy.host(4).seed, "header") as generator:
        for _ in range(epochs):
            for batch in torch.randperm(5, generator=generator).split(size):
                gap = (r[batch] @ weight.T + bias).softmax(1) - torch.eye(3, dtype=torch.float64)[
                    label[batch]
                ]
                weight, bias = (
                    weight - 0.3 * gap.T @ r[batch] / len(batch),
                    bias - 0.3 * gap.mean(0),
                )
    torch.testing.assert_close(after["weight"], weight, rtol=0, atol=1e-12)
    torch.testing.assert_close(after["bias"], bias, rtol=0, atol=1e-12)
    turned = {name: dict(reversed(own.items())) for name, own in reversed(sent.items())}
    assert bits(method.aggregate(toy.host(4), state, replies(turned), 2)["header"]) == bits(after)


def test_eleven_classes_keep_their_order_on_the_wire() -> None:
    """As text "10" comes before "2"."""
    r, (toy, state) = drawn(11, 4, seed=2), server(drawn(11, 4), drawn(11, seed=1))
    sent = replies({"a": dict(enumerate(r))})
    wired = {"a": Message.decode(sent["a"].encode())}
    assert list(wired["a"]["prototypes"]) != list(sent["a"]["prototypes"])
    first, second = (METHOD.aggregate(toy.host(), state, group, 1) for group in (sent, wired))
    assert bits(first) == bits(second)


def test_the_server_step_changes_the_header_and_no_body(classes: Toy) -> None:
    """The card's check. The State given stays, as do the sites' bodies and the pool's initial weights."""
    first, second = (
        simulate(METHOD, classes, 1),
        simulate(METHOD, classes, 2, [["a", "b", "c"], ["b"]]),
    )
    kept = bits([first.states, dict(classes.networks.initial)])
    with classes.networks.scope():
        after = METHOD.aggregate(classes.host(2), first.server, second.replies, 3)
    for name, before in first.server["header"].items():
        assert not torch.equal(after["header"][name], before)
    assert bits([first.states, dict(classes.networks.initial)]) == kept
    assert bits(second.states["a"]) == bits(first.states["a"])
    assert set(after) == {"header"}


def test_rate_zero_keeps_the_header(classes: Toy) -> None:
    outcome = simulate(load("fedgh", server_lr=0.0), classes, 2)
    initial = {
        name.removeprefix("4."): value
        for name, value in classes.initial.items()
        if name.startswith("4.")
    }
    assert bits(outcome.server["header"]) == bits(initial)


# What travels


def test_the_payload_is_class_means_up_and_the_header_down() -> None:
    """The card's check and its numbers: d = 64 and K = 8, own classes x 64 up, (64 + 1) 8 floats = 2,080 B down."""
    data = {
        name: (
            torch.randn(6, 5, generator=torch.Generator().manual_seed(i)),
            torch.tensor(own).repeat(2),
        )
        for i, (name, own) in enumerate({"a": [0, 3, 7], "b": [1, 2, 3]}.items())
    }
    toy = Toy(
        data, lambda: nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 8)), cross_entropy
    )
    outcome = simulate(METHOD, toy, 2)
    for name, (_, y) in data.items():
        reply, down = outcome.replies[name], outcome.down[name]
        assert {group: set(named) for group, named in reply.tensors.items()} == {
            "prototypes": {str(c) for c in set(y.tolist())}
        }
        assert not reply.scalars
        assert sum(t.numel() for t in reply.flat().values()) == 3 * 64
        assert set(down.flat()) == {"header/weight", "header/bias"}
        assert sum(4 * t.numel() for t in down.flat().values()) == 2080
    assert METHOD.personal_names(toy.network()) == set(toy.initial)


def test_replies_are_the_class_means_of_the_trained_body(classes: Toy) -> None:
    """Over items, in evaluation mode: by definition, in float64."""
    outcome = simulate(METHOD, classes, 2)
    for name, (x, y) in classes.data.items():
        model = classes.networks.fresh()
        model.load_state_dict({**classes.initial, **outcome.states[name]["body"]})
        values = features_and_output(model.eval().double(), x.double())[0].detach()
        sent = outcome.replies[name]["prototypes"]
        assert set(sent) == {str(c) for c in set(y.tolist())}
        for c, r in sent.items():
            torch.testing.assert_close(
                r.double(), values[y == int(c)].mean(0), rtol=1e-5, atol=1e-6
            )


# The site


def test_the_first_round_trains_as_local_bit_for_bit(classes: Toy) -> None:
    """Both start from the common weights; only the body is kept."""
    toy = replace(classes, optimizer=sgd(0.1, momentum=0.9, weight_decay=0.01), epochs=2)
    shared, alone = simulate(METHOD, toy), simulate(load("local"), toy)
    for name in toy.names:
        weights = {
            key: value
            for key, value in alone.states[name]["weights"].items()
            if not key.startswith("4.")
        }
        assert bits(shared.states[name]) == bits({"body": weights})


def test_the_next_round_trains_the_own_body_from_the_received_header(classes: Toy) -> None:
    first, second = (simulate(METHOD, classes, rounds) for rounds in (1, 2))
    for name in classes.names:
        header = {f"4.{key}": value for key, value in first.server["header"].items()}
        with classes.networks.scope():
            model = classes.networks.lease({**first.states[name]["body"], **header})
            fit(model, classes.site(name, 2))
            trained = {key: value.clone() for key, value in model.state_dict().items()}
        body = {key: value for key, value in trained.items() if key not in header}
        assert bits(second.states[name]["body"]) == bits(body)
        assert not torch.equal(trained["4.weight"], header["4.weight"]), (
            "the header is trained with the body"
        )


def test_a_site_is_judged_by_its_body_with_the_newest_header(classes: Toy) -> None:
    outcome = simulate(METHOD, classes, 2)
    header = {f"4.{key}": value for key, value in outcome.server["header"].items()}
    for name in classes.names:
        assert bits(judged(METHOD, classes, outcome, name)) == bits(
            {**outcome.states[name]["body"], **header}
        )
    with classes.networks.scope():
        assert METHOD.global_predictor(classes.host(), outcome.server) is None


# Bodies


class Odd(Toy):
    """Site c has another network, whose features are of this length."""

    length = 6

    def site(self, name: str, round_: int = 1) -> Site:
        site = super().site(name, round_)
        return replace(site, networks=self.other) if name == "c" else site

    def __post_init__(self) -> None:
        super().__post_init__()

        def layers():
            return nn.Sequential(
                nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, self.length), nn.Linear(self.length, 3)
            )  # noqa: E731

        self.other = Networks(layers, 0, CPU)


def test_bodies_may_differ_where_features_have_one_length() -> None:
    """The header fits both although its name is another in each."""
    toy = Odd(blobs({"a": 6, "b": 6, "c": 6}), classifier(), cross_entropy)
    method = load("fedgh", bodies="one,other")
    outcome = simulate(method, toy, 2)
    assert set(outcome.states["c"]["body"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    with toy.other.scope():
        network = method.predictor(
            toy.site("c"), outcome.states["c"], Message({"header": outcome.server["header"]})
        )
        assert bits(dict(network[3].state_dict())) == bits(outcome.server["header"])
        assert network(toy.data["c"][0]).shape == (6, 3)


def test_features_of_other_lengths_are_refused() -> None:
    class Longer(Odd):
        length = 4

    toy = Longer(blobs({"a": 6, "b": 6, "c": 6}), classifier(), cross_entropy)
    with pytest.raises(
        InputError,
        match="features of length 4 at c; length 6 at a, b, the server; networks may differ",
    ):
        simulate(load("fedgh", bodies="one,other"), toy, 0)
    short = replies({"c": {0: torch.zeros(4)}})
    with pytest.raises(InputError, match="length 4 at c; length 6 at the server"):
        METHOD.aggregate(toy.host(), simulate(METHOD, toy, 0).server, short, 3)


# Segmentation


def test_class_means_of_pixels_by_hand() -> None:
    """The body doubles the image, so the map is 2 x. Pixels 1, 2 | 3, 4 with mask 0, 1 | 1, 1, and 6, 6 | 6, 6 all 0.

    Class 0: 2 (1 + 4 * 6) / 5 = 10; class 1: 2 (2 + 3 + 4) / 3 = 6; class 2 has no pixel.
    """
    network = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.Conv2d(1, 3, 1))
    nn.init.constant_(network[0].weight, 2)
    x = torch.tensor([[[[1.0, 2], [3, 4]]], [[[6, 6], [6, 6]]]])
    mask = torch.tensor([[[[0, 1], [1, 1]]], [[[0, 0], [0, 0]]]])
    one_hot = nn.functional.one_hot(mask[:, 0], 3).movedim(-1, 1)
    for y in (mask, one_hot):
        shard = Shard.of(Stacked([{}, {}], x, y), range(2))
        for size in (1, 2):
            means, counts = collect(network.train(), shard, size, 3, CPU)
            assert (means.tolist(), counts.tolist()) == ([[10], [6], [0]], [5, 3, 0])
            assert means.dtype == torch.float32
    assert network.training


@pytest.mark.parametrize("dims", [2, 3])
def test_class_means_of_pixels_are_those_of_the_map_before_the_last_convolution(dims: int) -> None:
    network = build("unet8", 1, 2, dims).double()
    x, y = drawn(3, 1, *[16] * dims), (drawn(3, 1, *[16] * dims, seed=1) > 0.5).long()
    shard = Shard.of(Stacked([{}] * 3, x, y), range(3))
    means, counts = collect(network, shard, 2, 2, CPU)
    assert bits(collect(network, shaken(shard), 2, 2, CPU)) == bits((means, counts))
    network.eval()
    with torch.no_grad():
        maps, output = features_and_output(network, x)
    for c in range(2):
        own = torch.stack([channel[y[:, 0] == c].mean() for channel in maps.unbind(1)])
        torch.testing.assert_close(means[c], own, rtol=0, atol=1e-12)
    assert counts.tolist() == [(y == 0).sum(), (y == 1).sum()]
    layer = network.final_conv
    torch.testing.assert_close(
        logits(layer, maps.movedim(1, -1).reshape(-1, 8)), output.movedim(1, -1).reshape(-1, 2)
    )


def test_a_convolution_learns_as_the_linear_layer_of_its_weights() -> None:
    weight, bias, r = drawn(3, 4), drawn(3, seed=1), drawn(3, 4, seed=2)
    toy, state = server(weight, bias)
    flat = METHOD.aggregate(toy.host(), state, replies({"a": dict(enumerate(r))}), 1)["header"]
    toy = Toy({}, lambda: nn.Sequential(nn.Identity(), nn.Conv3d(4, 3, 1, dtype=torch.float64)))
    state = {"header": {"weight": weight[..., None, None, None], "bias": bias}}
    maps = METHOD.aggregate(toy.host(), state, replies({"a": dict(enumerate(r))}), 1)["header"]
    torch.testing.assert_close(maps["weight"][..., 0, 0, 0], flat["weight"], rtol=0, atol=1e-12)
    torch.testing.assert_close(maps["bias"], flat["bias"], rtol=0, atol=1e-12)


# Refusals


@pytest.mark.parametrize(
    ("layer", "task", "text"),
    [
        (nn.Linear(4, 2), CLASSES, "a linear layer with one output for each of the 3 classes"),
        (nn.Conv2d(4, 3, 1), CLASSES, "a linear layer"),
        (nn.Linear(4, 2), Task("segmentation", ("p", "q")), "a convolution of size 1"),
        (nn.Conv2d(4, 2, 3), Task("segmentation", ("p", "q")), "a convolution of size 1"),
        (nn.Conv2d(4, 3, 1), Task("segmentation", ("p", "q")), "a convolution of size 1"),
        (
            nn.Conv3d(4, 1, 1),
            Task("segmentation", ()),
            "one output for each class, the background among them",
        ),
        (nn.ConvTranspose2d(4, 2, 1), Task("segmentation", ("p", "q")), "a convolution of size 1"),
    ],
)
def test_heads_that_cannot_be_trained_on_class_means_are_refused(
    layer: nn.Module, task: Task, text: str
) -> None:
    with pytest.raises(InputError, match=text):
        METHOD.adapt(nn.Sequential(nn.Identity(), layer), task)


def test_heads_that_can_are_left_as_they_are() -> None:
    for network, task in (
        (classifier()(), CLASSES),
        (build("unet8", 1, 4, 3), Task("segmentation", tuple("pqrs"))),
        (build("unet8", 1, 2, 2), Task("segmentation", ())),
    ):
        assert METHOD.adapt(network, task) is network
