"""FedLoRA: each rule of sharing by hand on a 3 x 3 matrix, the local step, ranks, bytes and the base."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.methods import load, site_networks
from medfl.runtimes.federation import Federation
from medfl.runtimes.step import _trained, site_step
from medfl.storage.files import State
from tests.support.toy import (
    Toy,
    ToyBundle,
    bits,
    blobs,
    classifier,
    cross_entropy,
    run_record,
    sgd,
    simulate,
)

A, B = "0.weight.lora_A.{}", "0.weight.lora_B.{}"
SHARES = ("both", "a", "b", "stack", "svd")


def close(actual: Tensor, expected: Any) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected).to(actual), rtol=0, atol=1e-12)


def square() -> Toy:
    """Two sites with one and three items, a 3 x 3 matrix and a head, all in float64."""
    data = {
        name: (torch.ones(n, 3).double(), torch.zeros(n).double())
        for name, n in (("a", 1), ("b", 3))
    }

    def network():
        return nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False)).double()  # noqa: E731

    return Toy(data, network, optimizer=sgd(0.1))


def replied(samples: int, rank: int, a: list | None, b: list | None) -> Message:
    """A reply with the rows of A and of B's transpose."""
    factors = {A.format(rank): a, B.format(rank): b}
    made = {name: torch.tensor(rows).double() for name, rows in factors.items() if rows is not None}
    made = {name: t.T.contiguous() if "_B" in name else t for name, t in made.items()}
    return Message(
        {"weights": {"1.weight": torch.zeros(1, 3).double()}, "adapters": made},
        {"samples": samples},
    )


def aggregated(
    toy: Toy, replies: dict[str, Message], server: State | None = None, **options: Any
) -> State:
    method = load("fedlora", options)
    with toy.networks.scope():
        server = server or method.init_server(toy.host(0), toy.networks.initial, {})
        return method.aggregate(toy.host(), server, replies, 2)


ONE, OTHER = [[1.0, 0, 2]], [[3.0, 4, 0]]
"""A of site a, and B (as a row); b has them the other way round. p = 1/4, 3/4."""
MEAN_A, MEAN_B = [[2.5, 3, 0.5]], [[1.5, 1, 1.5]]
PRODUCT = [[3.0, 3, 1.5], [1, 0, 2], [4.5, 6, 0]]
"""1/4 (3, 4, 0)' (1, 0, 2) + 3/4 (1, 0, 2)' (3, 4, 0)."""


def test_both_a_and_b_average_what_they_share() -> None:
    toy, pairs = square(), {"a": (1, ONE, OTHER), "b": (3, OTHER, ONE)}
    for share, has in (("both", (1, 1)), ("a", (1, 0)), ("b", (0, 1))):
        replies = {
            s: replied(n, 1, a if has[0] else None, b if has[1] else None)
            for s, (n, a, b) in pairs.items()
        }
        found = aggregated(toy, replies, rank=1, share=share)["adapters"]
        assert found.keys() == {
            name.format(1) for name, sent in zip((A, B), has, strict=True) if sent
        }
        for name, mean in ((A.format(1), MEAN_A), (B.format(1), torch.tensor(MEAN_B).T)):
            if name in found:
                close(found[name], mean)


def test_stack_adds_the_mean_of_the_products_to_the_base_round_by_round() -> None:
    toy, replies = square(), {"a": replied(1, 1, ONE, OTHER), "b": replied(3, 1, OTHER, ONE)}
    once = aggregated(toy, replies, rank=1, alpha=2, share="stack")
    close(once["delta"]["0.weight.delta"], 2 * torch.tensor(PRODUCT))
    twice = aggregated(toy, replies, once, rank=1, alpha=2, share="stack")
    close(twice["delta"]["0.weight.delta"], 4 * torch.tensor(PRODUCT))


def test_svd_keeps_the_best_product_of_its_rank() -> None:
    """diag(0, 6) of 1/4 (0, 0, 8)'(0, 0, 3) and diag(3/4 * 4 * 1): of rank 1 the larger is left, of rank 2 both."""
    toy = square()
    replies = {
        "a": replied(1, 1, [[0.0, 0, 3]], [[0.0, 0, 8]]),
        "b": replied(3, 1, [[1.0, 0, 0]], [[4.0, 0, 0]]),
    }
    found = aggregated(toy, replies, rank=1, share="svd")["adapters"]
    close(found[A.format(1)], [[0.0, 0, 1]])
    close(found[B.format(1)], [[0.0], [0], [6]])
    wide = {"a": replied(1, 2, [[0.0, 0, 3], [0, 0, 0]], [[0.0, 0, 8], [0, 0, 0]]),
            "b": replied(3, 2, [[1.0, 0, 0], [0, 0, 0]], [[4.0, 0, 0], [0, 0, 0]])}  # fmt: skip
    found = aggregated(toy, wide, rank=2, share="svd")["adapters"]
    close(found[B.format(2)] @ found[A.format(2)], torch.diag(torch.tensor([3.0, 0, 6])))


def test_svd_at_full_rank_averages_the_whole_update() -> None:
    toy = square()
    outcome = simulate(load("fedlora", rank=3, alpha=1.5, share="svd"), toy, 3)
    start = outcome.history[-2]["adapters"]
    sent = {
        s: r["adapters"][B.format(3)] @ r["adapters"][A.format(3)]
        for s, r in outcome.replies.items()
    }
    assert (sent["a"] - start[B.format(3)] @ start[A.format(3)]).norm() > 1e-3
    found = outcome.server["adapters"]
    close(found[B.format(3)] @ found[A.format(3)], sent["a"] / 4 + 3 * sent["b"] / 4)


@pytest.mark.parametrize("share", SHARES)
def test_a_local_step_is_that_of_the_sum_written_out(share: str) -> None:
    """One step of rate 0.1 on A, B and the head of (W0 + s B A) x; with `b` A stays."""
    toy, method = square(), load("fedlora", rank=2, alpha=3, share=share)
    outcome = simulate(method, toy, 3)
    before, base = outcome.history[2], toy.initial["0.weight"]
    with toy.networks.scope():
        site, found = toy.site("b", 3), method.matrices(toy.networks.fresh())
        state = simulate(method, toy, 2).states["b"]
        a, b = (
            t.clone().requires_grad_()
            for t in method.pairs(site, state, outcome.down["b"], found, 2)["0.weight"]
        )
    head = before["weights"]["1.weight"].clone().requires_grad_()
    whole = base + before["delta"]["0.weight.delta"] if share == "stack" else base
    x, y = toy.data["b"]
    toy.loss((x @ (whole + 1.5 * b @ a).T) @ head.T, y).backward()
    sent = {**outcome.replies["b"]["adapters"], **outcome.states["b"].get("adapters", {})}
    close(sent[B.format(2)], b.detach() - 0.1 * b.grad)
    close(outcome.replies["b"]["weights"]["1.weight"], head.detach() - 0.1 * head.grad)
    if share != "b":
        close(sent[A.format(2)], a.detach() - 0.1 * a.grad)
    assert (A.format(2) in outcome.replies["b"]["adapters"]) == (share != "b")
    assert (B.format(2) in outcome.replies["b"]["adapters"]) == (share != "a")
    assert (outcome.states["b"] == {}) == (share != "a")


def test_a_site_of_a_smaller_rank_has_and_sends_the_first_rows() -> None:
    toy = square()
    for share in ("both", "svd", "stack", "a", "b"):
        method = load("fedlora", rank=3, ranks="a=1", share=share)
        outcome = simulate(method, toy, 3)
        shapes = {
            s: {n: tuple(t.shape) for n, t in r["adapters"].items()}
            for s, r in outcome.replies.items()
        }
        wanted = {A.format(1): (1, 3), B.format(1): (3, 1)}
        assert shapes["a"].items() <= wanted.items()
        assert all("_A.3" in name or "_B.3" in name for name in shapes["b"])
    server = aggregated(toy, {"a": replied(1, 1, ONE, OTHER), "b": replied(3, 3, [*ONE] * 3, [*ONE] * 3)},
                        rank=3, ranks="a=1")  # fmt: skip
    close(server["adapters"][A.format(3)], [[1.0, 0, 2], [0.75, 0, 1.5], [0.75, 0, 1.5]])


@pytest.mark.parametrize("share", SHARES)
def test_bytes_up_are_the_factors_and_the_head(share: str) -> None:
    """8 x 6 of rank 2: 2 * (8 + 6) numbers; the head 3 * 6 + 3; four bytes each, the number of items eight."""
    toy = Toy(blobs({"a": 9, "b": 6}), classifier(norm=True), cross_entropy, sgd(0.1), batch_size=4)
    outcome = simulate(load("fedlora", rank=2, share=share), toy, 2, wire=True)
    factors = {"a": 2 * 8, "b": 2 * 6}.get(share, 2 * (8 + 6))
    for reply in outcome.replies.values():
        data = reply.encode()
        assert reply.num_bytes == len(data)
        assert len(data) - 8 - int.from_bytes(data[:8], "little") == 4 * (factors + 21) + 8
    base = toy.initial.keys() - {"4.weight", "4.bias"}
    lasting = [
        t
        for group in (outcome.server, *outcome.states.values())
        for t in group.get("adapters", {}).values()
    ]
    assert all(
        tensor.is_contiguous() for tensor in lasting
    )  # as read from a file: a product's bits depend on it
    for message in [*outcome.down.values(), *outcome.replies.values()]:
        assert not base & {name for group in message.tensors.values() for name in group}


@pytest.mark.parametrize("share", ["both", "svd", "stack", "b"])
def test_a_reply_is_scored_as_it_was_trained(share: str) -> None:
    """As if the server had sent it to everybody: the network of the site is the global one of this reply alone."""
    method = load("fedlora", rank=2, ranks="x=1", share=share)
    federation = Federation(ToyBundle(), method, run_record(method="fedlora"))  # type: ignore[arg-type]
    with federation.scope():
        server = method.init_server(federation.host(0), federation.networks.initial, {})
        down = method.broadcast(federation.host(1), server, "x")
    result = site_step(federation, 1, "x", None, down, ("validate",))
    with federation.scope():
        site = federation.site("x", 1)
        trained = _trained(federation, site, {}, down, result.reply).state_dict()
        alone = method.aggregate(federation.host(1), server, {"x": result.reply}, 3)
        wanted = method.global_predictor(federation.host(1), alone).state_dict()  # type: ignore[union-attr]
        torch.testing.assert_close(dict(trained), dict(wanted), rtol=0, atol=1e-6)
        assert bits(dict(trained)) != bits(dict(federation.networks.initial))
    assert len(result.cases["validate"]) == 3


# What is refused


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"layers": "attn.qkv"}, r"layers=attn\.qkv.*layers that fit are 0; name some"),
        ({"layers": "4"}, r"layers=4.*layers that fit are 0"),  # the head is trained whole
        (
            {"layers": ","},
            r"layers=: no layer of the network that fits; layers that fit are 0; name some",
        ),
        ({"full": "head,"}, r"full=: no layer of the network that fits"),
        ({"layers": "6"}, r"name some, all of a kind \(linear, conv\), or none"),
        (
            {"full": "6"},
            r"full=6.*layers that fit are 0, 1, 4.*all of a kind \(head, norm\), or none",
        ),
        (
            {"rank": 7},
            r"rank=7 for 0\.weight, which is 6 x 8; a rank is at most the smaller side, 6",
        ),
        ({"ranks": "a=7"}, r"rank=7 for 0\.weight"),
        ({"layers": "none", "full": "none"}, "at least one layer is trained"),
    ],
)
def test_options_that_fit_no_layer_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        load("fedlora", options).adapt(classifier(norm=True)(), None)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_the_largest_rank_and_no_adapters_beside_a_whole_layer_are_allowed() -> None:
    for options in ({"rank": 6}, {"layers": "none", "full": "head"}):
        load("fedlora", options).adapt(classifier(norm=True)(), None)  # type: ignore[arg-type]


def test_a_layer_that_is_called_head_is_the_head_that_full_names() -> None:
    network = nn.Sequential(OrderedDict(head=nn.Linear(3, 3), last=nn.Linear(3, 2)))
    assert load("fedlora", full="head").whole(network) == {"head.weight", "head.bias"}
    assert load("fedlora", full="last").whole(network) == {"last.weight", "last.bias"}


def test_the_defaults() -> None:
    method = load("fedlora")
    assert (method.rank, method.alpha) == (4, 4.0)
    assert load("fedlora", alpha=0.0).alpha == 0


def test_ranks_are_of_sites_that_are_there() -> None:
    for ranks in ("a=0", "a", "a=1,a=2"):
        with pytest.raises(
            InputError,
            match=f"ranks={ranks}; ranks is SITE=RANK,... with ranks from 1, each site once",
        ):
            load("fedlora", ranks=ranks)
    with pytest.raises(InputError, match="there is no site 'd'.*the sites are a, b"):
        site_networks(load("fedlora", ranks="d=2"), ["a", "b"])
    assert set(site_networks(load("fedlora", ranks="d=2"), ["a"])) == {"a"}  # it is planned alone


def test_a_site_with_another_base_does_not_train() -> None:
    toy, other = square(), Toy(square().data, square().network, seed=1)
    down = simulate(load("fedlora", rank=1), toy).down["a"]
    with (
        other.networks.scope(),
        pytest.raises(RunError, match="site 'a': its base .* is not the server's"),
    ):
        load("fedlora", rank=1).local_update(other.site("a"), {}, down)


def test_a_reply_of_other_factors_is_refused() -> None:
    for rank, a, b in ((1, ONE, None), (1, [[1.0, 2]], OTHER), (2, [*ONE] * 2, [*ONE] * 2)):
        with pytest.raises(RunError, match="adapters/0.weight"):
            aggregated(square(), {"a": replied(1, rank, a, b)}, rank=1)
