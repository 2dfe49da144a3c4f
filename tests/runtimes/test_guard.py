"""A site with rules for what leaves and an audit log, driven by hosts of MONAI FL."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from monai.fl.utils.constants import ExtraItems, FlStatistics
from monai.fl.utils.exchange_object import ExchangeObject

from medfl import datasets
from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.data.source import Source
from medfl.policy.audit import verify
from medfl.policy.inspection import inspect
from medfl.policy.policy import Outbound, Policy
from medfl.runs import launch
from medfl.runtimes.monai_fl.client import MedflClientAlgo
from medfl.runtimes.step import score_site, score_site_on_all
from tests.runtimes import test_task_kinds as task_kinds
from tests.runtimes.test_monai_fl import averaging, broadcast, federation, said, started
from tests.runtimes.test_smaller_messages import Wide
from tests.runtimes.test_task_kinds import KINDS
from tests.support.toy import ToyBundle, bits

pytest.importorskip("dp_accounting")

NOISY = Outbound(clip=1.0, noise=8.0)
NUMBERS = (FlStatistics.NUM_EXECUTED_ITERATIONS, FlStatistics.DATA_COUNT)


def site(made: Any, **settings: Any) -> MedflClientAlgo:
    algo = MedflClientAlgo(made, "x", **settings)
    algo.initialize({ExtraItems.CLIENT_NAME: "x"})
    return algo


def change(reply: ExchangeObject, down: ExchangeObject) -> float:
    """L2 norm of the change of the floating weights."""
    moved = [
        reply.weights[k].double() - t.double()
        for k, t in down.weights.items()
        if t.is_floating_point()
    ]
    return math.sqrt(sum(float(part.square().sum()) for part in moved))


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedper"])
def test_law1_without_rules_and_with_rules_that_hold_nothing_changes(
    method: str, tmp_path: Path
) -> None:
    made = federation(method)
    plain = started(made)["x"]
    wide = Outbound(keys=("*",), max_bytes=10**9, clip=1e9)
    watched = [
        site(made, outbound=rules, audit=tmp_path / "log") for rules in (None, Outbound(), wide)
    ]
    for round_ in (1, 2):
        plain.train(broadcast(made, "x", round_))
        for each in watched:
            each.train(broadcast(made, "x", round_))
            assert bits(each.get_weights().weights) == bits(plain.get_weights().weights)
            assert each.get_weights().statistics == plain.get_weights().statistics
            assert bits(each.states.newest(round_)) == bits(plain.states.newest(round_))


@pytest.mark.parametrize("host", ["medfl", "averaging"])
def test_what_leaves_is_clipped_for_both_kinds_of_host(host: str) -> None:
    made = federation(bundle=ToyBundle(norm=False))
    free, clipped = site(made, host=host), site(made, host=host, outbound=Outbound(clip=0.01))
    data = said(free.get_weights().weights) if host == "averaging" else broadcast(made, "x")
    for each in (free, clipped):
        each.train(data)
    assert change(free.get_weights(), data) > 0.02
    assert change(clipped.get_weights(), data) == pytest.approx(0.01, rel=1e-4)


def test_rounds_with_noise_are_told_counted_and_end_with_the_budget(tmp_path: Path) -> None:
    made, spoken = federation(bundle=ToyBundle(norm=False)), []
    first = site(made, outbound=NOISY, folder=tmp_path, say=spoken.append)
    first.get_weights()
    first.train(broadcast(made, "x", 1))
    told = first.get_weights().statistics
    assert set(told) == set(NUMBERS)  # the training loss stays
    epsilon = first.summary["privacy"]["epsilon"]
    assert spoken == [f"site 'x', round 1: 1 reply: epsilon {epsilon:.3g} at delta 1e-05 for all training images of "
                      "this site replaced by as many others (the number of images is sent exactly)"]  # fmt: skip
    budget = Outbound(clip=1.0, noise=8.0, epsilon=1.6 * epsilon)
    second = site(
        made, outbound=budget, folder=tmp_path
    )  # started again: the account is in the folder
    assert second.summary["privacy"]["replies"] == 1
    second.train(broadcast(made, "x", 2))
    assert epsilon < second.summary["privacy"]["epsilon"] <= budget.epsilon
    before = second.states.last
    with pytest.raises(
        RunError, match=r"site 'x': its outbound policy refuses: the budget is epsilon"
    ):
        second.train(broadcast(made, "x", 3))
    assert (second.states.last, second.summary["privacy"]["replies"]) == (before, 2)
    with pytest.raises(RunError, match="nothing to send"):
        second.get_weights()


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_of_findings_and_of_numbers_are_counted_likewise(kind: str, tmp_path: Path) -> None:
    made = task_kinds.federation("fedavg", kind)
    first = site(made, outbound=NOISY, folder=tmp_path)
    first.train(broadcast(made, "x", 1))
    plain = site(made, outbound=Outbound(clip=1.0))
    plain.train(broadcast(made, "x", 1))
    assert bits(first.get_weights().weights) != bits(plain.get_weights().weights)
    account = first.summary["privacy"]
    assert (account["replies"], account["epsilon"] > 0) == (1, True)

    budget = replace(NOISY, epsilon=1.05 * account["epsilon"])
    second = site(made, outbound=budget, folder=tmp_path)
    with pytest.raises(RunError, match="its outbound policy refuses: the budget is epsilon"):
        second.train(broadcast(made, "x", 2))


def test_a_repeated_round_draws_new_noise_and_counts_again() -> None:
    made = federation(bundle=ToyBundle(norm=False))
    noisy = site(made, outbound=NOISY)
    replies = []
    for _ in range(2):
        noisy.train(broadcast(made, "x", 1))
        replies.append(bits(noisy.get_weights().weights))
    assert replies[0] != replies[1]
    assert noisy.summary["privacy"]["replies"] == 2


def test_a_round_that_fails_counts_as_one_that_was_told() -> None:
    """That the numbers were not finite is something about the images; the server sees that the round failed."""
    made = federation(bundle=ToyBundle(norm=False))
    noisy = site(made, outbound=NOISY)
    data = broadcast(made, "x", 1)
    data.weights["weights/0.weight"] = torch.full((6, 8), 1e38)
    with pytest.raises(RunError, match="the training loss is|NaN or infinite values"):
        noisy.train(data)
    assert noisy.summary["privacy"]["replies"] == 1
    budget = Outbound(clip=1.0, noise=8.0, epsilon=1.01 * noisy.summary["privacy"]["epsilon"])
    strict = site(made, outbound=budget)
    with pytest.raises(RunError, match="the training loss is|NaN or infinite values"):
        strict.train(data)
    with pytest.raises(RunError, match="its outbound policy refuses: the budget is epsilon"):
        strict.train(broadcast(made, "x", 1))


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("scaffold", ["control/*"]),
        ("fednova", ["scalars/"]),
        ("fedmr", ["counts/*", "prototypes/*"]),
        ("ditto", []),
    ],
)
def test_what_a_method_sends_without_noise_is_named(method: str, names: list[str]) -> None:
    made = federation(method, bundle=ToyBundle(norm=False))
    noisy = site(made, outbound=NOISY)
    noisy.get_weights()
    noisy.train(broadcast(made, "x", 1))
    words = noisy.summary["privacy"]["words"]
    assert ("no formal privacy" in words) == bool(names)
    assert all(name in words for name in names), words


def test_noise_goes_through_smaller_messages_too() -> None:
    """Rounded to int8 after clipping and noise; the account sees the reply before, so its words do not change."""
    made = federation(bundle=Wide(), messages="int8")
    noisy = site(made, outbound=NOISY)
    noisy.train(broadcast(made, "x", 1))
    reply = noisy.get_weights()
    assert any("@int8" in name for name in reply.weights)
    assert "no formal privacy" not in noisy.summary["privacy"]["words"]


def test_a_reply_with_other_keys_or_more_bytes_is_refused_and_changes_nothing(
    tmp_path: Path,
) -> None:
    made = federation("scaffold")
    for rules, says in (
        (Outbound(keys=("weights", "scalars")), "'control/.*' is not among its keys"),
        (Outbound(max_bytes=100), "more than max_bytes 100"),
    ):
        log = tmp_path / f"{rules.max_bytes}"
        strict = site(made, outbound=rules, audit=log)
        with pytest.raises(RunError, match=says):
            strict.train(broadcast(made, "x", 1))
        assert (strict.states.last, strict.summary["privacy"]["replies"]) == (0, 0)
        with pytest.raises(RunError, match="nothing to send"):
            strict.get_weights()
        came, refused = verify(log).entries
        assert (came["direction"], refused["direction"], refused["round"]) == ("came", "refused", 1)
        assert "outbound policy refuses" in refused["reason"]


def test_scores_leave_as_metrics_and_only_if_they_may(tmp_path: Path) -> None:
    made = federation(bundle=ToyBundle(norm=False))
    some = site(made, outbound=Outbound(keys=("metrics/validate",)), audit=tmp_path / "log")
    with pytest.raises(RunError, match="'metrics/validate/accuracy' is not among its keys"):
        some.evaluate(broadcast(made, "x"))
    noisy = site(made, outbound=NOISY, audit=tmp_path / "other")
    told = noisy.evaluate(broadcast(made, "x"), {"section": "test"}).metrics
    entry = verify(tmp_path / "other").entries[-1]
    assert (entry["kind"], entry["direction"]) == ("evaluate", "left")
    assert entry["numbers"] == pytest.approx(
        {f"test/{name}": value for name, value in told.items()}
    )
    assert (
        "metrics/test/accuracy" in entry["privacy"]
    )  # nothing shows that these are no training images
    noisy.visit(score_site, broadcast(made, "x"), ("train",))
    assert "metrics/train/accuracy" in noisy.summary["privacy"]["uncovered"]
    with pytest.raises(RunError, match="refuses: score_site_on_all, which shows cases"):
        noisy.visit(score_site_on_all, broadcast(made, "x"))


class Filed(ToyBundle):
    """Its items lie in files, each of a patient of its own; `changed`: what the first validation item has instead."""

    def __init__(self, folder: Path, **changed: Any) -> None:
        super().__init__(norm=False)
        vars(self).update(folder=folder, changed=changed)

    def _entry(self, section: str, index: int) -> dict[str, Any]:
        entry = {
            "image": str(self.folder / f"{section}-{index}.png"),
            "group": f"{section}-{index}",
        }
        Path(entry["image"]).write_text(entry["group"])
        return {**entry, **(self.changed if section == "validate" and index == 0 else {})}

    def section(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(source=Source([self._entry(name, index) for index in range(12)]))

    def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Any:
        prepared = super().prepared(section)
        groups = [self._entry(section, index).get("group") for index in range(12)]
        prepared.items = [
            {**item, "group": group} for item, group in zip(prepared.items, groups, strict=True)
        ]
        return prepared


def test_each_answer_about_images_kept_out_of_training_is_counted_and_bounded(
    tmp_path: Path,
) -> None:
    """Whoever asks with weights made for it learns of these images with each answer."""
    made = federation(bundle=Filed(tmp_path))
    asked = site(made, outbound=replace(NOISY, epsilon=8.0, answers=2), folder=tmp_path / "account")
    for count in (1, 2):
        asked.evaluate(broadcast(made, "x"))
        privacy = asked.summary["privacy"]
        assert (privacy["answers"], privacy["uncovered"], privacy["epsilon"]) == (count, {}, 0.0)
    assert "kept out of training, answered without noise: 2" in privacy["words"]
    again = site(made, outbound=replace(NOISY, epsilon=8.0, answers=2), folder=tmp_path / "account")
    with pytest.raises(
        RunError, match="it has answered 2 questions about images that are kept out of training"
    ):
        again.evaluate(broadcast(made, "x"))
    free = site(made)
    free.evaluate(broadcast(made, "x"))
    assert free.summary["privacy"] is None


@pytest.mark.parametrize(
    "why", ["the same file", "a copy", "a patient of both", "no patient", "no file"]
)
def test_validation_images_count_as_training_images_unless_they_are_shown_to_be_others(
    why: str, tmp_path: Path
) -> None:
    """Site 'x' has the items 0, 3, ...: a bundle that validates on training images asks for their exact loss."""
    (tmp_path / "copy.png").write_text("train-0")
    changed: dict[str, Any] = {
        "the same file": {"image": str(tmp_path / "train-0.png")},
        "a copy": {"image": str(tmp_path / "copy.png")},
        "a patient of both": {"group": "train-0"},
        "no patient": {"group": ""},
        "no file": {"image": None},
    }[why]
    made = federation(bundle=Filed(tmp_path, **changed))
    noisy = site(made, outbound=NOISY)
    noisy.evaluate(broadcast(made, "x"))
    assert noisy.summary["privacy"]["uncovered"]["metrics/validate/loss"] == 1
    with pytest.raises(RunError, match="would leave without noise, and epsilon is a budget"):
        site(made, outbound=replace(NOISY, epsilon=8.0)).evaluate(broadcast(made, "x"))


def test_scores_of_a_personal_model_are_not_covered(tmp_path: Path) -> None:
    made = federation("fedper", bundle=Filed(tmp_path))
    noisy = site(made, outbound=NOISY)
    noisy.evaluate(broadcast(made, "x"))
    assert noisy.summary["privacy"]["uncovered"] == {}
    noisy.train(broadcast(made, "x", 1))
    noisy.evaluate(broadcast(made, "x"))
    assert "metrics/validate/accuracy" in noisy.summary["privacy"]["uncovered"]


class Ranged(ToyBundle):
    """A bundle that says what its network's inputs are."""

    metadata: dict[str, Any] = {
        "network_data_format": {"inputs": {"image": {"value_range": [-2, 2]}}}
    }


def test_the_bins_are_the_site_s_where_small_counts_are_not_told(tmp_path: Path) -> None:
    """The difference of two histograms whose bins differ by little is of few images."""
    strict = site(
        federation(bundle=Ranged()), outbound=Outbound(min_count=3), audit=tmp_path / "log"
    )
    for number, ends in ((4, [-2, 2]), (32, [-2, 2.001]), (33, [-2, 2])):
        with pytest.raises(InputError, match="with min_count 32 bins from -2 to 2"):
            strict.get_data_stats({FlStatistics.HIST_BINS: number, FlStatistics.HIST_RANGE: ends})
    assert [entry["direction"] for entry in verify(tmp_path / "log").entries] == ["refused"] * 3
    strict.get_data_stats()


def test_statistics_keep_the_least_count_of_the_policy(tmp_path: Path) -> None:
    """Site x has three items of each section, one of each class."""
    made = federation(bundle=Ranged())
    asked = {FlStatistics.HIST_BINS: 32, FlStatistics.HIST_RANGE: [-2, 2]}
    told = (
        site(made, outbound=Outbound(min_count=3), audit=tmp_path / "log")
        .get_data_stats(asked)
        .statistics
    )
    assert told["train"]["data_count"] == 3
    assert told["train"]["class_counts"] == {"p": None, "q": None, "r": None}
    assert told["total_data"]["class_counts"] == {"p": None, "q": None, "r": None}
    nothing = site(made, outbound=Outbound(min_count=4)).get_data_stats(asked).statistics
    assert {part: about["data_count"] for part, about in nothing.items()} == dict.fromkeys(nothing)
    assert all(about["data_stats"] == {} for about in nothing.values())
    everything = started(made)["x"].get_data_stats(asked).statistics
    assert everything["train"]["class_counts"] == {"p": 1, "q": 1, "r": 1}
    for here, all_ in zip(
        told["train"]["data_stats"]["image_histogram"],
        everything["train"]["data_stats"]["image_histogram"],
        strict=True,
    ):
        assert here["counts"].count(None) != 1
        assert all(
            mine in (None, theirs)
            for mine, theirs in zip(here["counts"], all_["counts"], strict=True)
        )
    entry = verify(tmp_path / "log").entries[-1]
    assert entry["kind"] == "statistics"
    assert entry["sha256"] == hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


@pytest.mark.parametrize("host", ["medfl", "averaging"])
def test_the_log_has_all_that_came_and_left_with_its_hash(host: str, tmp_path: Path) -> None:
    made = federation()
    logged = site(made, host=host, audit=tmp_path / "log")
    first = logged.get_weights()
    data = said(first.weights) if host == "averaging" else broadcast(made, "x", 1)
    logged.train(data)
    reply = logged.get_weights()
    assert logged.get_weights() is reply  # asked for twice, it is the same and left once

    def digest(weights: Any) -> str:
        message = (
            Message({"weights": weights}) if host == "averaging" else Message.from_flat(weights)
        )
        return hashlib.sha256(message.encode()).hexdigest()

    introduced, came, left = verify(tmp_path / "log").entries
    assert [e["kind"] for e in (introduced, came, left)] == ["introduce", "train", "train"]
    assert [e["direction"] for e in (introduced, came, left)] == ["left", "came", "left"]
    assert [e["round"] for e in (introduced, came, left)] == [0, 1, 1]
    assert [e["sha256"] for e in (introduced, came, left)] == [
        digest(w) for w in (first.weights, data.weights, reply.weights)
    ]
    assert left["numbers"]["data_count"] == 3
    assert left["groups"]["weights"]["norm"] == pytest.approx(
        math.sqrt(
            sum(
                float(t.double().square().sum())
                for k, t in reply.weights.items()
                if "scalars/" not in k
            )
        ),
        rel=1e-5,
    )


def test_a_bad_message_stands_in_the_log_as_refused(tmp_path: Path) -> None:
    made = federation()
    logged = site(made, audit=tmp_path / "log")
    data = broadcast(made, "x")
    data.weights["weights/0.bias"] = torch.full((6,), math.nan)
    with pytest.raises(RunError):
        logged.train(data)
    (entry,) = verify(tmp_path / "log").entries
    assert entry["direction"] == "refused"
    assert "'weights/0.bias' has NaN" in entry["reason"]


def test_nothing_leaves_when_the_log_cannot_be_written(tmp_path: Path) -> None:
    made = federation()
    logged = site(made, audit=tmp_path / "log")
    (tmp_path / "log").unlink()
    (tmp_path / "log").mkdir()
    with pytest.raises(RunError, match="nothing leaves that is not in it"):
        logged.get_weights()


def test_hosts_of_monai_fl_drive_sites_with_rules(tmp_path: Path) -> None:
    """Three rounds of a host that averages and knows nothing of medfl, with two sites that clip and log."""
    made = federation()
    sites = {
        name: MedflClientAlgo(
            made, name, host="averaging", outbound=Outbound(clip=0.5), audit=tmp_path / name
        )
        for name in ("x", "y")
    }
    for name, each in sites.items():
        each.initialize({ExtraItems.CLIENT_NAME: name})
    weights = averaging(sites, 3)
    assert all(
        math.isfinite(float(each.evaluate(said(weights)).metrics["loss"]))
        for each in sites.values()
    )
    for name, each in sites.items():
        each.finalize()
        found = verify(tmp_path / name)
        assert found.problems == ()
        assert [
            e["round"] for e in found.entries if e["kind"] == "train" and e["direction"] == "left"
        ] == [1, 2, 3]


def test_a_policy_file_holds_for_a_site_of_a_host(tmp_path: Path) -> None:
    data = datasets.write_phantom("mednist", tmp_path / "data", per_class=10, size=16)
    folder = inspect(launch.shipped_folders()["mednist"]).folder
    pinned = inspect(folder).policy(Policy())
    policy = tmp_path / "policy.yaml"
    policy.write_text(pinned.text() + "outbound: {clip: 0.001, keys: [weights, told]}\n")
    settings = {"data": str(data), "local_epochs": 1, "lr": 0.01}
    config = {"network": "small_cnn", "image_size": 16}
    algo = launch.site_algo(
        "mednist",
        "clinic",
        config=config,
        requested=settings,
        host="averaging",
        policy=policy,
        audit=tmp_path / "log",
    )
    algo.initialize()
    start = algo.get_weights()
    algo.train(said(start.weights))
    assert change(algo.get_weights(), start) == pytest.approx(0.001, rel=1e-3)
    assert len(verify(tmp_path / "log").entries) == 3
    policy.write_text(policy.read_text().replace(pinned.files["LICENSE"], "f" * 64))
    with pytest.raises(InputError, match=r"bundle 'mednist' is refused: LICENSE: its sha256 is"):
        launch.site_algo("mednist", "clinic", requested=settings, policy=policy)


def test_a_message_with_thousands_of_numbers_is_refused_before_it_is_described(
    tmp_path: Path,
) -> None:
    made = federation()
    logged = site(made, audit=tmp_path / "log")
    data = broadcast(made, "x")
    data.weights |= {f"scalars/{i}": torch.tensor(1.0) for i in range(2000)}
    with pytest.raises(RunError, match="it has 2000 numbers; at most 1024"):
        logged.train(data)
    assert [entry["direction"] for entry in verify(tmp_path / "log").entries] == ["refused"]


def test_the_number_of_a_section_s_items_is_checked_and_logged_where_it_is_told(
    tmp_path: Path,
) -> None:
    made = federation(bundle=ToyBundle(norm=False))
    some = site(made, outbound=Outbound(keys=("metrics/validate/[!c]*",)), audit=tmp_path / "log")
    with pytest.raises(RunError, match="'metrics/validate/cases' is not among its keys"):
        some.visit(score_site, broadcast(made, "x"), ("validate",))
    some.evaluate(broadcast(made, "x"))
    every = site(made, audit=tmp_path / "other")
    every.visit(score_site, broadcast(made, "x"), ("validate",))
    assert verify(tmp_path / "other").entries[-1]["numbers"]["validate/cases"] == 3


def test_the_clip_bounds_what_leaves_with_error_feedback_too() -> None:
    """The largest tenth leaves; what is left adds up over rounds, and was added after the clip."""
    made = federation(bundle=Wide(), messages="topk:0.1")
    clipped = site(made, outbound=Outbound(clip=0.01))
    free = site(made)
    for round_ in range(1, 6):
        down = broadcast(made, "x", round_)
        norms = []
        for each in (clipped, free):
            each.train(down)
            wire = Message.from_flat(each.get_weights().weights)
            received = Message.from_flat(down.weights)
            reply = made.compression.decompress_reply(wire, received, "x")["weights"]
            moved = [
                reply[n].double() - t.double()
                for n, t in received["weights"].items()
                if t.is_floating_point()
            ]
            norms.append(math.sqrt(sum(float(part.square().sum()) for part in moved)))
        assert 0 < norms[0] <= 0.01 * (1 + 1e-5)
        assert norms[1] > 0.02
