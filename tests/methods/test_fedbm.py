"""FedBM as a method: reductions, messages, schedule, states, bad input; numbers are the checks of the method's card.

The generator at work is in test_fedbm_generator, its losses are in networks/test_generator; the mathematics of the
classifier is in test_text_classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.core.task import Task
from medfl.methods import load
from medfl.methods._parts.text_classifier import TextGaussians, embeddings_of
from medfl.methods.fedbm import FedBM
from medfl.networks import build
from medfl.networks.generator import Generator
from medfl.networks.heads import head
from medfl.runtimes.federation import Federation
from medfl.storage.files import State, load_state, save_state
from medfl.training.site import Host
from tests.support.grey_squares import EMBEDDINGS, federation, images, quick, run
from tests.support.options import numbers
from tests.support.toy import Toy, ToyBundle, adam, bits, cross_entropy, run_record, sgd, simulate

# Reductions


def test_without_generator_it_is_diagonal_fedcb_bit_for_bit(classes: Toy) -> None:
    """Check 17; and so is every round before the generator's first training, in which others do not matter."""
    diagonal = load("fedcb", covariance="diag")
    reference = run(diagonal, 3)
    off = run(quick(generator=False), 3)
    assert bits([off.server["weights"], off.replies]) == bits(
        [reference.server["weights"], reference.replies]
    )
    later = run(quick(g_start=3), 3)
    assert bits([later.server["weights"], later.replies]) == bits(
        [reference.server["weights"], reference.replies]
    )
    assert later.server["version"] == 1
    vectors = load("fedbm", generator=False)
    ours, theirs = (
        simulate(m, classes.adapted(m), 2).server["weights"] for m in (vectors, diagonal)
    )
    assert bits(ours) == bits(theirs)


def test_the_default_schedule_leaves_five_rounds_to_real_images() -> None:
    """Check 15: no synthetic sample in rounds 1 to 5, which are diagonal FedCB's bit for bit; the first in round 6."""
    ours = run(load("fedbm", normalise="half", g_iterations=1, g_batch=2), 6)
    reference = run(load("fedcb", covariance="diag"), 6)
    same = [
        bits(one["weights"]) == bits(other["weights"])
        for one, other in zip(ours.history, reference.history, strict=True)
    ]
    assert same == [True] * 6 + [False], "the initial weights, then rounds 1 to 6"
    assert [server["version"] for server in ours.history] == [0] * 5 + [1, 1]


def test_a_trainable_head_without_generator_is_fedavg_bit_for_bit() -> None:
    ours, average = run(quick(classifier="trainable", generator=False), 3), run(load("fedavg"), 3)
    assert bits([ours.server["weights"], ours.replies]) == bits(
        [average.server["weights"], average.replies]
    )


def test_synthetic_images_change_training_from_the_round_after() -> None:
    reference = run(load("fedcb", covariance="diag"), 2)
    mixed = run(quick(), 2)
    assert bits(mixed.history[1]["weights"]) == bits(reference.history[1]["weights"])
    assert bits(mixed.server["weights"]) != bits(reference.server["weights"])


# Messages and schedule


def test_messages() -> None:
    """E once; the generator only where the site's copy is stale; weights each round; replies as FedAvg's."""
    sent: list[dict[str, list[object]]] = [{} for _ in range(6)]

    class Heard(FedBM):
        def broadcast(self, host: Host, server: State, site_name: str) -> Message:
            told = super().broadcast(host, server, site_name)
            groups: list[object] = sorted(set(told.tensors) - {"weights"})
            version = [int(told.scalars["version"])] if told.scalars else []
            sent[host.round - 1][site_name] = groups + version
            return told

        def aggregate(
            self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int
        ) -> State:
            for reply in replies.values():
                assert (set(reply.tensors), set(reply.scalars)) == ({"weights"}, {"samples"})
            return super().aggregate(host, server, replies, num_sites)

    method = Heard(**vars(quick(g_every=2, g_start=2)))  # trained after rounds 2 and 4
    cohorts = [["a"], ["a", "b"], ["a"], ["a", "c"], ["a", "b"], ["c"]]
    outcome = run(method, 6, cohorts)
    assert sent == [
        {"a": ["text"]},
        {"a": [], "b": ["text"]},
        {"a": ["generator", 1]},
        {"a": [], "c": ["generator", "text", 1]},
        {"a": ["generator", 2], "b": ["generator", 2]},
        {"c": ["generator", 2]},
    ]
    assert {name: state.get("version") for name, state in outcome.states.items()} == {
        "a": 2,
        "b": 2,
        "c": 2,
    }
    assert outcome.server["informed"] == {"a": 2, "b": 2, "c": 2}


def test_every_message_is_the_cards_table() -> None:
    """Section 9, checks 14 and 16 of FedCB's card: ResNet-18, K = 8, M = 28, D = 512, images of 3 x 128 x 128.

    W_fe each way 4 (11,176,512 + 513 D + 9,600) + 20 * 8 = 45,795,232 bytes; once E, 4 K M D = 458,752; the generator
    19,036,980 where the copy is stale, with its version and three sides; up N_c besides. Encoded, the header is added.
    """
    embeddings = nn.functional.normalize(
        torch.randn(8, 28, 512, generator=torch.Generator().manual_seed(0)), dim=2
    )
    task, method = Task("classification", tuple("abcdefgh"), lambda plm: embeddings), load("fedbm")
    toy = Toy(
        images({"a": 2}, 32, 3),
        lambda: method.adapt(build("resnet18", 3, 8), task),
        cross_entropy,
        sgd(0.01),
    )
    with toy.networks.scope():
        site = toy.site("a")
        server = method.init_server(toy.host(), toy.networks.initial, {"a": method.introduce(site)})
        first = method.broadcast(toy.host(), server, "a")
        state, reply = method.local_update(site, {}, first)
        server = method.aggregate(replace(toy.host(), round=1), server, {"a": reply}, 1)
        later = method.broadcast(toy.host(), server, "a")
        server |= {
            "version": 1,
            "generator": Generator(512, 3, 128, 128).state_dict(),
            "image": [3, 128, 128],
        }
        stale = method.broadcast(toy.host(), server, "a")
    w_fe = 4 * (11_176_512 + 513 * 512 + 9_600) + 20 * 8
    assert w_fe == 45_795_232
    for message, groups, scalars in (
        (first, {"weights": w_fe, "text": 4 * 8 * 28 * 512}, {}),
        (later, {"weights": w_fe}, {}),
        (
            stale,
            {"weights": w_fe, "generator": 19_036_980},
            {"version": 1, "channels": 3, "height": 128, "width": 128},
        ),
        (reply, {"weights": w_fe}, {"samples": 2}),
    ):
        sizes = {
            group: sum(t.numel() * t.element_size() for t in tensors.values())
            for group, tensors in message.tensors.items()
        }
        assert (sizes, dict(message.scalars)) == (groups, scalars)
        encoded = message.encode()
        header = int.from_bytes(encoded[:8], "little")
        assert (
            message.num_bytes
            == len(encoded)
            == 8 + header + sum(groups.values()) + 8 * len(scalars)
        )
        assert header < 0.001 * len(encoded)
    assert set(state) == {"embeddings"}


def test_schedule() -> None:
    """Check 15: R = 200, cycle 5: 40 trainings, of which 39 are of use; version in round r is floor((r - 1) / 5)."""
    trained: list[int] = []

    class Recording(FedBM):
        def _train_generator(self, host, server, draws):
            trained.append(host.round)
            return {"x": torch.zeros(1)}

    def versions(method: FedBM, rounds: int) -> list[int]:
        trained.clear()
        toy = federation(method)
        with toy.networks.scope():
            introductions = {name: method.introduce(toy.site(name, 0)) for name in toy.names}
            server = method.init_server(toy.host(0), toy.networks.initial, introductions)
        seen = []
        for round_ in range(1, rounds + 1):
            seen.append(server["version"])
            with toy.networks.scope():
                host = replace(toy.host(), round=round_)
                replies = {"a": Message({"weights": server["weights"]}, {"samples": 1})}
                server = method.aggregate(host, server, replies, 3)
        return seen

    assert versions(Recording(), 200) == [(r - 1) // 5 for r in range(1, 201)]
    assert trained == list(range(5, 201, 5))
    assert len([r for r in trained if r < 200]) == 39
    assert versions(Recording(g_every=1, g_start=0), 3) == [1, 2, 3]
    assert trained == [0, 1, 2, 3]
    assert versions(Recording(g_every=3, g_start=2), 6) == [0, 0, 1, 1, 1, 2]


# The classifier


def test_the_classifier_is_diagonal_and_frozen() -> None:
    """Check 9."""
    method = quick()
    toy = federation(method)
    outcome = simulate(method, toy, 2)
    with toy.networks.scope():
        model = method.global_predictor(toy.host(), outcome.server)
        wanted = TextGaussians.of(EMBEDDINGS, 12.5, "diag")
        assert bits([head(model).mean, head(model).spread]) == bits([wanted.mean, wanted.spread])
        assert wanted.spread.shape == (3, 12)
        assert bits(embeddings_of(model)) == bits(EMBEDDINGS)
        kept = {id(t) for t in (embeddings_of(model), head(model).mean, head(model).spread)}
        assert not kept & {
            id(p) for group in toy.optimizer(model).param_groups for p in group["params"]
        }
        assert {n for n, _ in model.named_parameters()} == set(toy.initial) - {
            n for n in toy.initial if "running" in n or "num_batches" in n
        }
    assert all(bits(state["embeddings"]) == bits(EMBEDDINGS) for state in outcome.states.values())
    assert all(set(reply["weights"]) == set(toy.initial) for reply in outcome.replies.values())


def test_aggregation() -> None:
    """Check 18: (100, 300) gives (0.25, 0.75), statistics included."""
    method = quick(generator=False)
    toy = federation(method)

    def reply(value: float, samples: int) -> Message:
        return Message(
            {"weights": {k: torch.full_like(t, value) for k, t in toy.initial.items()}},
            {"samples": samples},
        )

    server = simulate(method, toy, 0).server
    with toy.networks.scope():
        after = method.aggregate(
            toy.host(), server, {"b": reply(5.0, 300), "a": reply(1.0, 100)}, 3
        )
    assert all(
        set(after["weights"][k].flatten().tolist()) == {4.0}
        for k in ("0.weight", "1.running_var", "5.bias")
    )


def test_sites_outside_the_cohort_have_no_influence() -> None:
    """Check 18, with the generator: the data of a site that is never selected change nothing."""
    method, cohorts = quick(), [["a", "b"], ["b"], ["a"]]
    toy = federation(method)
    other = replace(toy, data={**toy.data, "c": toy.data["b"]})
    ours, theirs = (simulate(method, one, 3, cohorts) for one in (toy, other))
    assert bits([ours.server, ours.states]) == bits([theirs.server, theirs.states])
    assert "c" not in ours.server["informed"]


# States, wire and repetition, with the generator on (the contract tests run without images)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"pool_per_round": True, "g_start": 0, "g_every": 2}, marks=pytest.mark.slow),
    ],
)
def test_it_repeats_over_the_wire_and_continues_from_files(options: dict, tmp_path: Path) -> None:
    method = quick(**options)
    toy = federation(method, optimizer=adam(0.01), lr_decay=0.9, epochs=2)
    reference = simulate(method, toy, 3)
    wired = simulate(method, replace(toy), 3, wire=True)
    assert bits([wired.server, wired.states]) == bits([reference.server, reference.states])
    assert [one["version"] for one in reference.history] == (
        [1, 1, 2, 2] if options else [0, 1, 2, 3]
    )
    for message in [*reference.down.values(), *reference.replies.values()]:
        assert message.num_bytes == len(message.encode())
    two = simulate(method, toy, 2)
    save_state(tmp_path / "server", two.server)
    states, replies = {}, {}
    server = load_state(tmp_path / "server")
    fresh = replace(toy)
    for name in toy.names:
        save_state(tmp_path / name, two.states[name])
        with fresh.networks.scope():
            down = method.broadcast(fresh.host(3), server, name)
            states[name], replies[name] = method.local_update(
                fresh.site(name, 3), load_state(tmp_path / name), down
            )
    with fresh.networks.scope():
        turned = dict(reversed(replies.items()))
        assert bits(method.aggregate(fresh.host(3), server, turned, 3)) == bits(reference.server)
    assert bits(states) == bits(reference.states)


def test_it_changes_nothing_that_it_is_given() -> None:
    method = quick()
    toy = federation(method, optimizer=adam(0.01))
    two, three = simulate(method, toy, 2), simulate(method, toy, 3)
    kept = bits([two.server, two.states, dict(toy.networks.initial)])
    for name in toy.names:
        with toy.networks.scope():
            down = method.broadcast(toy.host(3), two.server, name)
            state, reply = method.local_update(toy.site(name, 3), two.states[name], down)
            assert bits([state, reply]) == bits([three.states[name], three.replies[name]])
            method.predictor(toy.site(name, 3), two.states[name], down)
    with toy.networks.scope():
        method.aggregate(toy.host(3), two.server, three.replies, 3)
    assert bits([two.server, two.states, dict(toy.networks.initial)]) == kept


def test_one_sample_and_an_empty_site_are_fine() -> None:
    method = quick()
    toy = replace(federation(method), data=images({"a": 1, "b": 5}))
    outcome = simulate(method, toy, 2)
    assert all(torch.isfinite(t).all() for t in outcome.server["weights"].values())
    site = toy.site("a")
    empty = replace(site, train=replace(site.train, indices=site.train.indices[:0]))
    assert not method.introduce(empty).scalars


# Bad input


def test_bad_input(classes: Toy) -> None:
    method = load("fedbm")
    with pytest.raises(
        InputError, match=r"site 'a' has items of shape \(8,\); .*; set generator=false"
    ):
        simulate(method, classes.adapted(method), 1)
    toy = federation(method)
    for size, text in (
        (28, "images of 28 x 28 pixels; .* image_size=32"),
        (8, "images of 8 x 8 pixels"),
    ):
        with pytest.raises(InputError, match=text):
            simulate(method, replace(toy, data=images({"a": 4, "b": 4}, size)), 1)
    told = {
        name: Message(scalars={"channels": 1, "height": n, "width": n})
        for name, n in (("a", 16), ("b", 32))
    }
    with pytest.raises(
        InputError, match=r"site 'b' has images of shape \[1, 32, 32\], site 'a' of \[1, 16, 16\]"
    ):
        method.init_server(toy.host(), toy.networks.initial, told)
    with pytest.raises(InputError, match=r"has items of shape \(8,\)"):
        Federation(ToyBundle(), method, run_record(method="fedbm"))
    for size in (28, 8):
        with pytest.raises(InputError, match="multiples of 16"):
            method.check(replace(toy, data=images({"a": 4}, size)).site("a"))
    toy = replace(toy, data=unit({"a": 4}))
    quick().check(toy.site("a"))
    with pytest.raises(InputError, match="images without transforms; .* normalise=MEAN/SD"):
        load("fedbm").check(toy.site("a"))
    with pytest.raises(
        InputError, match=r"normalise=0.485,0.456,0.406/0.229,.* for images of 1 channel; .* for 3"
    ):
        load("fedbm", normalise="imagenet").check(toy.site("a"))
    quick(normalise="none").check(toy.site("a"))
    colours = replace(toy, data=unit({"a": 4}, channels=3)).site("a")
    load("fedbm", normalise="imagenet").check(colours)
    for text in ("quarter", "0.5", "0.5/0", "0.5,0.5/0.5", "/", "nan/1", "0.5/0.5/0.5"):
        with pytest.raises(
            InputError, match=f"normalise={text}; read, imagenet, half, none or MEAN/SD"
        ):
            load("fedbm", normalise=text)
    for options, text in (
        ({"prompt_fraction": 2}, "prompt_fraction=2;"),
        ({"tau": 0}, "tau=0; .* above 0"),
    ):
        with pytest.raises(InputError, match=text):
            load("fedbm", options)
    with pytest.raises(InputError, match="no site has a training image"):
        method.init_server(toy.host(), toy.networks.initial, {"a": Message()})
    assert method.tasks == ("classification",)


def unit(counts: dict[str, int], **form: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {name: (x.clamp(0, 1), y) for name, (x, y) in images(counts, **form).items()}


def test_images_that_the_constants_do_not_bring_back_are_refused() -> None:
    """Of (x - 0.5) / 0.25 a site's pixels are -2 to 2: imagenet's constants would make -0.5 to 1 of them."""
    ramp = torch.linspace(-2, 2, 256).view(1, 1, 16, 16).repeat(4, 1, 1, 1)
    site = replace(federation(quick()), data={"a": (ramp, torch.zeros(4).long())}).site("a")
    quick(normalise="0.5/0.25").check(site)
    with pytest.raises(
        InputError, match=r"normalise=0.5/0.5 for images that it brings back to -0.5..1.5; pictures"
    ):
        quick(normalise="half").check(site)
    known = replace(site, task=replace(site.task, intensities=lambda: ((0.5,), (0.25,))))
    read = quick(normalise="read")
    read.check(known)
    source = read._source(known.task, torch.eye(12).reshape(3, 4, 12), torch.Generator())
    assert source.augmentation.normalised(
        torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
    ).flatten().tolist() == [-2, 2]


# What a site takes of a server


def received(method: FedBM) -> tuple[Toy, Message]:
    """The broadcast of a round in which site b gets all there is."""
    toy = federation(method)
    with toy.networks.scope():
        introductions = {name: method.introduce(toy.site(name, 0)) for name in toy.names}
        server = method.init_server(toy.host(0), toy.networks.initial, introductions)
        return toy, method.broadcast(toy.host(), server, "b")


def changed(
    message: Message, group: str, tensors: dict[str, torch.Tensor], **scalars: float
) -> Message:
    groups = {**message.tensors, group: {**message.tensors[group], **tensors}}
    return Message(groups, {**message.scalars, **scalars})


@pytest.mark.parametrize(
    ("group", "change", "scalars", "said"),
    [
        ("text", lambda e: {"embeddings": e["embeddings"][:, :1]}, {}, "text embeddings are"),
        (
            "text",
            lambda e: {"embeddings": e["embeddings"].long()},
            {},
            "text embeddings are .*int64; expected",
        ),
        ("generator", lambda g: {"linear.bias": g["linear.bias"][:-1]}, {}, "'linear.bias' of"),
        (
            "generator",
            lambda g: {"linear.bias": g["linear.bias"].double()},
            {},
            "'linear.bias' of .*float64",
        ),
        ("generator", lambda g: {"more": torch.zeros(1)}, {}, "'more'"),
        ("generator", lambda g: {}, {"height": 4096.0}, "height 4096, not "),
        ("generator", lambda g: {}, {"width": -16.0}, "width -16"),
        ("generator", lambda g: {}, {"version": 0.5}, "version 0.5"),
        ("generator", lambda g: {}, {"version": -3.0}, "version -3"),
    ],
)
def test_what_does_not_fit_the_site_is_refused(
    group: str, change, scalars: dict[str, float], said: str
) -> None:
    method = quick(g_start=0)
    toy, down = received(method)
    bad = changed(down, group, change(down[group]), **scalars)
    with toy.networks.scope(), pytest.raises(RunError, match=said) as caught:
        method.local_update(toy.site("b"), method.init_site(toy.site("b")), bad)
    assert caught.value.safe_to_send
    state, _ = method.local_update(
        toy.site("b"), {}, Message(down.tensors, {**down.scalars, "more": 1.0})
    )
    assert set(state) == {"embeddings", "generator", "version", "channels", "height", "width"}
    without = Message(
        down.tensors, {name: value for name, value in down.scalars.items() if name != "version"}
    )
    with toy.networks.scope(), pytest.raises(RunError, match="version -1"):
        method.local_update(toy.site("b"), method.init_site(toy.site("b")), without)


def test_the_cards_defaults_and_limits() -> None:
    assert numbers("fedbm") == {
        "generator": (True,), "synthetic_batch": (16, 1), "pool_per_round": (False,), "g_every": (5, 1),
        "g_start": (5, 0), "g_iterations": (100, 1), "g_batch": (64, 1), "g_lr": (3e-4, 0.0),
        "lambda_div": (1.0, 0.0), "lambda_dis": (0.1, 0.0),
        "tau": (12.5, 0.0), "prompt_fraction": (1.0, 0.0), "renormalise_mean": (False,), "raw_test_logits": (False,),
    }  # fmt: skip


def test_text_is_asked_for_by_head_or_generator() -> None:
    for classifier, generator, wanted in (
        ("trainable", True, "minilm"), ("text_mean", False, "minilm"), ("trainable", False, "")
    ):  # fmt: skip
        assert load("fedbm", classifier=classifier, generator=generator).language_model == wanted
