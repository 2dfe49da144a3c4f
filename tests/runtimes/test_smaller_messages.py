"""Smaller messages between the sites and the server of a federation: what each end has, keeps and counts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medfl import datasets
from medfl.cli import verbs as cli
from medfl.core.compression import Compression
from medfl.core.errors import InputError, RunError
from medfl.core.message import Message, is_finite
from medfl.methods import load
from medfl.methods.fedavg import FedAvg
from medfl.runs.launch import federate
from medfl.runtimes.federation import Federation
from medfl.runtimes.step import (
    UNSENT,
    StepResult,
    copy_site_weights,
    introduce,
    score_site,
    score_site_on_all,
    site_step,
)
from medfl.storage.files import State, load_state, save_state
from tests.support.toy import ToyBundle, bits, public_blobs, run_record

FORMS = ("float16", "bfloat16", "int8", "topk:0.1")
every_form = pytest.mark.parametrize("form", FORMS)


class Wide(ToyBundle):
    """Layers large enough to be made smaller: of 9 tensors the two matrices, 64 x 8 and 3 x 64 numbers."""

    def __init__(self, width: int = 64) -> None:
        def network() -> nn.Module:
            return nn.Sequential(
                nn.Linear(8, width),
                nn.BatchNorm1d(width),
                nn.ReLU(),
                nn.Dropout(0.2),
                nn.Linear(width, 3),
            )

        super().__init__(network=network)

    def variant(self, config: Mapping[str, object]) -> Wide:  # type: ignore[override]
        return Wide(int(config["width"]))  # type: ignore[call-overload]


def federation(
    messages: str, method: str | FedAvg = "fedavg", options: dict | None = None, **changes
) -> Federation:
    made = load(method, options or {}) if isinstance(method, str) else method
    record = run_record(messages=messages, **changes)
    return Federation(Wide(), made, record, public=public_blobs(40))


@dataclasses.dataclass
class Played:
    """What two rounds leave."""

    server: State
    states: dict[str, State | None]
    results: dict[str, StepResult]
    sent: dict[str, Message]


def play(made: Federation, rounds: int = 2, before: Played | None = None, first: int = 1) -> Played:
    """Go through rounds with all sites, as a runtime does."""
    method, names = made.method, made.participants
    if before is None:
        introductions = {name: introduce(made, name) for name in names}
        with made.scope():
            server = method.init_server(made.host(0), made.networks.initial, introductions)
        before = Played(server, dict.fromkeys(names), {}, {})
    now = dataclasses.replace(before, states=dict(before.states))
    for round_ in range(first, first + rounds):
        with made.scope():
            now.sent = {
                name: method.broadcast(made.host(round_), now.server, name) for name in names
            }
        now.results = {
            name: site_step(made, round_, name, now.states[name], now.sent[name]) for name in names
        }
        now.states = {name: now.results[name].state or None for name in names}
        with made.scope():
            replies = {name: result.reply for name, result in now.results.items()}
            now.server = method.aggregate(made.host(round_), now.server, replies, len(names))
    return now


def finite(tree: object) -> bool:
    if isinstance(tree, torch.Tensor):
        return is_finite(tree)
    return all(map(finite, tree.values())) if isinstance(tree, dict) else True


# What is said, and what is exact


def test_the_form_is_said_with_what_it_applies_to() -> None:
    plain = "9 tensors leave each site, 0 stay"
    both = "replies and broadcasts"
    assert federation("lossless").describe_exchange() == plain
    assert (
        federation("int8").describe_exchange()
        == f"{plain}; {both}: int8, 2 tensors of the network; 7 lossless"
    )
    assert (
        federation("topk:0.1").describe_exchange()
        == f"{plain}; replies: topk:0.1, 2 tensors of the network; 7 lossless"
    )
    policy = federation("float16", "fedproto").describe_exchange()
    plain = "0 tensors of the network leave each site, 9 stay; besides them leave: prototypes"
    assert policy == f"{plain}; {both}: float16, 0 tensors of the network; 0 lossless"


def test_biases_and_what_normalises_are_exact_in_every_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = federation("int8").compression.exact
    norm = {
        f"1.{name}"
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert exact == {"0.bias", "4.bias", *norm}

    other = ToyBundle(network=lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)))
    monkeypatch.setattr(Wide, "variant", lambda *_: other)
    assert {"0.weight", "1.bias"} < federation(
        "int8", "fedproto", {"bodies": "width=5,6,7"}
    ).compression.exact


def test_a_record_with_an_unknown_form_is_refused() -> None:
    with pytest.raises(InputError, match="--messages zip; lossless, float16"):
        federation("zip")


# Lossless


def test_lossless_is_what_the_method_says_bit_for_bit() -> None:
    made = federation("lossless", "scaffold")
    played = play(made, 1)
    down, result = played.sent["y"], played.results["y"]
    site = made.site("y", 1)
    with made.scope():
        state, reply = made.method.local_update(site, made.method.init_site(site), down)
    assert bits([state, reply]) == bits([result.state, result.reply])
    assert (result.bytes_up, result.bytes_down) == (reply.num_bytes, down.num_bytes)


# Every form with methods of each kind


@pytest.fixture(scope="module")
def lossless() -> dict[str, Any]:
    """Method -> what was played with lossless messages, which all forms are compared with."""
    return {}


@every_form
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavg", {}), ("scaffold", {}), ("fedbn", {}), ("ditto", {}), ("fedproto", {}), ("fedmd", {}), ("fedsm", {}),
        ("ccvr", {}), ("fedhelp", {"large": "x", "large_network": "width=80"}),
    ],
)  # fmt: skip
def test_methods_do_not_notice(
    form: str, method: str, options: dict, lossless: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds: replies have the form of lossless ones, cost no more bytes, and everything stays finite and near."""
    played = play(made := federation(form, method, options))
    if method not in lossless:
        lossless[method] = play(federation("lossless", method, options))
    plain = lossless[method]
    for name, result in played.results.items():
        wanted = plain.results[name]
        assert {k: (t.shape, t.dtype) for k, t in result.reply.flat().items()} == {
            k: (t.shape, t.dtype) for k, t in wanted.reply.flat().items()
        }
        assert result.bytes_up <= wanted.bytes_up
        assert result.bytes_down <= wanted.bytes_down
        assert {*result.state} - {UNSENT} == {*wanted.state}
    assert finite(played.server)
    assert finite(played.states)
    weights = {n: t for n, t in played.server.get("weights", {}).items() if t.is_floating_point()}
    for name, tensor in weights.items():
        distance = (tensor - plain.server["weights"][name]).norm() / (
            1 + plain.server["weights"][name].norm()
        )
        assert distance < 0.25, name
    with made.scope():
        for name in made.participants:
            cases = score_site(made, 3, name, played.states[name], played.sent[name], ("test",))[
                "test"
            ]
            assert len(cases)


@pytest.mark.parametrize(("method", "group"), [("fedavg", "weights"), ("fedproto", "prototypes")])
def test_both_directions_are_made_smaller_and_counted(method: str, group: str) -> None:
    """In float16 matrices of 704 numbers save 1,408 bytes; 3 prototypes of 64 numbers save 384.

    The longer name of the group takes some of it back.
    """
    large, small = play(federation("lossless", method)), play(federation("float16", method))
    saved = {"weights": 1408, "prototypes": 384}[group]
    for name, result in small.results.items():
        for way in ("bytes_up", "bytes_down"):
            assert saved - 3 * 30 < getattr(large.results[name], way) - getattr(result, way) < saved
        assert group in result.reply


def test_top_k_leaves_broadcasts_alone() -> None:
    large, small = play(federation("lossless")), play(federation("topk:0.1"))
    assert small.results["x"].bytes_down == large.results["x"].bytes_down
    assert small.results["x"].bytes_up < large.results["x"].bytes_up - 1000


def test_the_site_trains_from_the_broadcast_as_it_arrived() -> None:
    seen: list[Message] = []

    class Listening(FedAvg):
        def local_update(self, site, state, down):
            seen.append(down)
            return super().local_update(site, state, down)

    made = federation("bfloat16", Listening())
    sent = play(made, 1).sent["x"]["weights"]
    arrived = seen[0]["weights"]
    assert bits(arrived["0.weight"]) == bits(sent["0.weight"].bfloat16().float())
    assert bits(arrived["0.weight"]) != bits(sent["0.weight"])
    assert bits(arrived["1.running_var"]) == bits(sent["1.running_var"])
    result = copy_site_weights(made, 1, "x", None, Message({"weights": sent}))
    assert bits(result["0.weight"]) == bits(
        arrived["0.weight"]
    )  # what a site is judged by arrived there too


def test_the_server_adds_a_sites_change_to_the_weights_as_they_were_before_the_broadcast() -> None:
    made = federation("float16")
    played = play(made, 1)
    w = played.sent["x"]["weights"]
    v = {name: t.half().float() if name in ("0.weight", "4.weight") else t for name, t in w.items()}
    with made.scope():
        _, reply = made.method.local_update(made.site("x", 1), {}, Message({"weights": v}))
    for name in ("0.weight", "4.weight"):
        expected = w[name] + (reply["weights"][name] - v[name]).half().float()
        assert bits(played.results["x"].reply["weights"][name]) == bits(expected)
    assert bits(played.results["x"].reply["weights"]["0.bias"]) == bits(reply["weights"]["0.bias"])


# Randomness


def test_rounding_differs_between_sites_rounds_and_seeds_and_repeats() -> None:
    made, other = federation("int8"), federation("int8", seed=1)
    sent = Message({"weights": dict(made.networks.initial)})

    def arrived(federated: Federation, round_: int, name: str) -> object:
        return bits(copy_site_weights(federated, round_, name, None, sent)["0.weight"])

    found = [
        arrived(made, 1, "x"),
        arrived(made, 1, "y"),
        arrived(made, 2, "x"),
        arrived(other, 1, "x"),
    ]
    assert len(set(found)) == 4
    assert arrived(federation("int8"), 1, "x") == found[0]


def test_what_is_judged_before_and_after_is_deterministic() -> None:
    made = federation("int8", "ditto")
    played = play(made, 1)
    scores = [
        score_site_on_all(made, 1, "x", played.states["x"], played.sent["x"]) for _ in range(2)
    ]
    assert bits(scores[0].values) == bits(scores[1].values)


# Error feedback


def test_error_feedback_is_kept_apart_from_the_methods_state() -> None:
    seen: list[State] = []

    class Watching(type(load("scaffold"))):
        def local_update(self, site, state, down):
            seen.append(state)
            return super().local_update(site, state, down)

        def predictor(self, site, state, down):
            seen.append(state)
            return super().predictor(site, state, down)

    made = federation("topk:0.1", Watching())
    played = play(made, 2)
    score_site(made, 2, "x", played.states["x"], played.sent["x"], ("test",))
    assert len(seen) == 7
    assert all({*state} == {"control"} for state in seen)
    assert {*played.states["x"]} == {"control", UNSENT}
    assert {n: t.shape for n, t in played.states["x"][UNSENT].items()} == {
        "0.weight": (64, 8),
        "4.weight": (3, 64),
    }
    assert not any(UNSENT in key or "@" in key for key in played.results["x"].reply.flat())


def test_a_site_without_another_state_starts_as_it_did_without_error_feedback() -> None:
    """FedAvg's sites keep nothing of their own; a method is asked for a first State whenever there is none."""
    calls: list[int] = []

    class Asked(FedAvg):
        def init_site(self, site):
            calls.append(site.round)
            return {}

    for form in ("lossless", "topk:0.1"):
        play(federation(form, Asked()), 3)
    assert calls == [1, 1, 1, 2, 2, 2, 3, 3, 3] * 2


def test_a_reply_and_the_error_feedback_add_up_to_the_change() -> None:
    """Round 1, e = 0: what the server adds to its weights and what the site keeps are w_k - w together."""
    made = federation("topk:0.1")
    played = play(made, 1)
    down, result = played.sent["x"], played.results["x"]
    site = made.site("x", 1)
    with made.scope():
        _, reply = made.method.local_update(site, {}, down)
    for name, unsent in result.state[UNSENT].items():
        arrived, w = result.reply["weights"][name], down["weights"][name]
        torch.testing.assert_close(arrived + unsent, reply["weights"][name], rtol=0, atol=1e-6)
        assert 0 < (arrived != w).sum() + (unsent != 0).sum() <= w.numel()
    sent = sum(
        int((result.reply["weights"][n] != down["weights"][n]).sum()) for n in result.state[UNSENT]
    )
    assert (
        60 <= sent <= 70
    )  # a tenth of 704; fewer where the weight is too large to show the change
    assert bits(result.reply["weights"]["1.running_var"]) == bits(reply["weights"]["1.running_var"])


def test_error_feedback_survives_a_save_and_counts(tmp_path: Path) -> None:
    made = federation("topk:0.1")
    whole, first = play(made, 3), play(made, 1)
    for name, state in first.states.items():
        save_state(tmp_path / name, state)
        first.states[name] = load_state(tmp_path / name)
    assert bits(play(made, 2, first, 2).server) == bits(whole.server)
    forgetful = dataclasses.replace(first, states=dict.fromkeys(first.states))
    assert bits(play(made, 2, forgetful, 2).server) != bits(whole.server)


# What is refused


@every_form
def test_what_is_personal_does_not_leave_in_a_smaller_form_either(form: str) -> None:
    class Leaky(type(load("fedbn"))):
        def local_update(self, site, state, down):
            state, reply = super().local_update(site, state, down)
            return state, Message(
                {"weights": {**reply["weights"], **state["weights"]}}, reply.scalars
            )

    with pytest.raises(RunError, match=r"site 'x': tensor 'weights/1\.\w+' must not leave it"):
        play(federation(form, Leaky()))


@pytest.mark.parametrize(
    ("form", "label", "value", "text"),
    [
        (
            "topk:0.1",
            "weights@topk@float32/indices",
            torch.full((70,), 2**30, dtype=torch.int32),
            "not ascending",
        ),
        ("int8", "weights@scales@float32/scales", torch.full((4,), torch.nan), "NaN or infinite"),
        (
            "int8",
            "weights@int8@float32/1.running_var",
            torch.ones(64, dtype=torch.int8),
            r"expected \(5,\)",
        ),
        (
            "int8",
            "weights@int8@float32/0.weight",
            torch.ones(16, 32, dtype=torch.int8),
            r"is \(16, 32\) torch.float32",
        ),
        (
            "float16",
            "weights@float16@float32/secret",
            torch.ones(3).half(),
            "tensor 'weights/secret' must not leave",
        ),
    ],
)
def test_a_message_changed_on_its_way_is_refused_by_the_server(
    form: str, label: str, value: torch.Tensor, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Compression.decompress_reply

    def tamper(self: Compression, wire: Message, sent: Message, sender: str) -> Message:
        return opened(self, Message.from_flat({**wire.flat(), label: value}), sent, sender)

    monkeypatch.setattr(Compression, "decompress_reply", tamper)
    with pytest.raises(RunError, match=f"^site 'x': .*{text}"):
        play(federation(form), 1)


def test_training_that_ends_in_nan_is_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FedAvg):
        def local_update(self, site, state, down):
            state, reply = super().local_update(site, state, down)
            bad = {**reply["weights"], "0.weight": torch.full((64, 8), torch.nan)}
            return state, Message({"weights": bad}, reply.scalars)

    with pytest.raises(
        RunError,
        match="site 'x': 'weights/0.weight' has NaN or infinite values; the last good round",
    ):
        play(federation("int8", Broken()), 1)


# Whole runs


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "pneumonia", tmp_path_factory.mktemp("data") / "phantom", per_class=20, size=28
    )


def run(
    phantom: Path,
    out: Path,
    messages: str | None,
    *,
    jobs: int = 1,
    rounds: int = 2,
    resume: bool = False,
) -> dict:
    requested = {
        "method": "scaffold", "data": str(phantom), "sites": 3, "partition": "iid", "rounds": rounds, "cohort": 0.67,
        "local_epochs": 1, "batch_size": 8, "lr": 0.01, **({"messages": messages} if messages else {}),
    }  # fmt: skip
    config = {"network": "small_cnn", "image_size": 28}
    return federate(
        "pneumonia", config=config, requested=requested, out=out, jobs=jobs, resume=resume
    )


def test_the_command_line_takes_a_form() -> None:
    given = cli.parser().parse_args(["run", "pneumonia", "--messages", "topk:0.01"])
    assert given.messages == "topk:0.01"
    assert cli.parser().parse_args(["run", "pneumonia"]).messages is None


@pytest.mark.parametrize("form", ["int8", "topk:0.05"])
def test_law1_smaller_messages_depend_neither_on_workers_nor_on_a_resume(
    form: str, phantom: Path, tmp_path: Path
) -> None:
    alone, helped = (
        run(phantom, tmp_path / f"jobs{jobs}", form, jobs=jobs, rounds=2) for jobs in (1, 2)
    )
    run(phantom, tmp_path / "cut", form, rounds=1)
    resumed = run(phantom, tmp_path / "cut", None, rounds=2, resume=True)
    assert alone["weights_sha256"] == helped["weights_sha256"] == resumed["weights_sha256"]
    assert alone["run_hash"] == helped["run_hash"] == resumed["run_hash"]
    assert alone["bytes_up"] == helped["bytes_up"] == resumed["bytes_up"]
    again = federate(source=tmp_path / "jobs1" / "run.json", out=tmp_path / "again", jobs=1)
    assert again["weights_sha256"] == alone["weights_sha256"]
    with pytest.raises(
        InputError, match=f'--resume with other settings: messages: "float16" was "{form}"'
    ):
        run(phantom, tmp_path / "cut", "float16", rounds=2, resume=True)


def test_a_run_says_what_it_sends(phantom: Path, tmp_path: Path) -> None:
    plain, said = (
        run(phantom, tmp_path / "plain", None),
        run(phantom, tmp_path / "said", "lossless"),
    )
    small = run(phantom, tmp_path / "small", "int8")
    assert plain["run_hash"] == said["run_hash"] != small["run_hash"]
    assert "messages" not in json.loads((tmp_path / "said" / "run.json").read_text())
    assert json.loads((tmp_path / "small" / "run.json").read_text())["messages"] == "int8"
    assert small["bytes_up"] < 0.6 * plain["bytes_up"]
    assert small["bytes_down"] < 0.6 * plain["bytes_down"]
