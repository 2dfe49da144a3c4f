"""A round goes on without the sites that fail, while enough reply; and with robust aggregation in spite of bad ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medfl.cli import verbs as cli
from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.core.message_limits import MessageLimits
from medfl.core.run import PartitionRecord
from medfl.methods import load
from medfl.methods.base import sample_shares, weighted_mean
from medfl.runs.launch import federate
from medfl.runtimes.attendance import FailedReply, Tolerance
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.local.workers import Workers
from medfl.runtimes.monai_fl.exchange import Exchange
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.runtimes.tasks import (
    Introduce,
    RoundTask,
    ScoreGlobal,
    ScoreSite,
    Train,
    WorkerTask,
    result_or_failure,
)
from medfl.storage.files import load_state, load_weights
from medfl.storage.run_folder import RunFolder
from tests.support.toy import SECTIONS, ToyBundle, bits, run_record

Spoil = Callable[[Message], Message]


def with_weights(**changes: torch.Tensor | None) -> Spoil:
    def spoil(reply: Message) -> Message:
        weights = {
            **reply["weights"],
            **{name.replace("_", "."): value for name, value in changes.items()},
        }
        return Message(
            {"weights": {n: t for n, t in weights.items() if t is not None}}, reply.scalars
        )

    return spoil


def fails(reply: Message) -> Message:
    raise RunError("site 'y', round 2: no images can be read; the last good round is kept")


BAD: dict[str, tuple[Spoil, str]] = {
    "NaN": (
        with_weights(**{"0_bias": torch.full((6,), torch.nan)}),
        "'weights/0.bias' has NaN or infinite values",
    ),
    "infinite": (
        with_weights(**{"0_bias": torch.full((6,), torch.inf)}),
        "'weights/0.bias' has NaN or infinite",
    ),
    "shape": (
        with_weights(**{"0_bias": torch.zeros(7)}),
        "'weights/0.bias' is (7,) torch.float32; expected (6,)",
    ),
    "dtype": (
        with_weights(**{"0_bias": torch.zeros(6).double()}),
        "'weights/0.bias' is (6,) torch.float64",
    ),
    "name": (with_weights(extra=torch.zeros(1)), "tensor 'weights/extra' must not leave it"),
    "missing": (
        with_weights(**{"0_bias": None}),
        "'weights/0.bias' is missing in its reply (1 such)",
    ),
    "personal": (
        with_weights(**{"4_bias": torch.ones(3)}),
        "tensor 'weights/4.bias' must not leave it",
    ),
    "oversized": (
        lambda reply: Message({**reply.tensors, "more": {"m": torch.zeros(2000)}}, reply.scalars),
        "more than",
    ),
    "no count": (lambda reply: Message(reply.tensors), "lacks the number of training samples"),
    "negative count": (
        lambda reply: Message(reply.tensors, {"samples": -3}),
        "a number of items that cannot be true",
    ),
    "failed": (fails, "round 2: no images can be read"),
}


@dataclasses.dataclass(frozen=True)
class Faulty(type(load("fedper"))):
    """FedPer, some of whose sites send what they should not; it has a State: its head."""

    spoil: Spoil = lambda reply: reply
    sites: tuple[str, ...] = ("y",)
    rounds: tuple[int, ...] = (2,)

    def local_update(self, site, state, down):
        state, reply = super().local_update(site, state, down)
        return state, self.spoil(
            reply
        ) if site.name in self.sites and site.round in self.rounds else reply


def forked(federation: Federation, jobs: int) -> Workers:
    return Workers(federation, 2)


every_runtime = pytest.mark.parametrize(
    "workers", [Workers, forked, Exchange], ids=["alone", "forked", "monai-fl"]
)


@dataclasses.dataclass
class Ran:
    """What a run left."""

    summary: dict[str, Any]
    said: list[str]
    rounds: list[dict[str, Any]]
    out: Path

    def state(self, site: str) -> str:
        return json.loads((self.out / "state" / "manifest.json").read_text())["sites"][site]


def run(
    out: Path,
    made_by: Any,
    workers: Any = Workers,
    tolerance: Tolerance | None = None,
    **changes: Any,
) -> Ran:
    record = run_record(**{"method": "fedper", "eval_every": 0, **changes})
    made = Federation(ToyBundle(), made_by, record)
    made.message_limits = dataclasses.replace(MessageLimits(), size=4000)
    resume, said = (out / "run.json").is_file(), []
    folder = RunFolder.existing(out) if resume else RunFolder.create(out)
    folder.write_run(record, {})
    bearing = tolerance or Tolerance()
    launch = Launch(
        resume=resume, min_replies=bearing.min_replies, deadline=bearing.deadline, say=said.append
    )
    summary = Simulator(Execution(made, folder, launch, bearing.max_share), workers).execute()
    return Ran(
        summary,
        said,
        [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()],
        out,
    )


# A site is left out of a round


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(tmp_path_factory.mktemp("good") / "run", load("fedper"), rounds=2)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *((kind, Workers) for kind in BAD),
        *((kind, other) for other in (forked, Exchange) for kind in ("NaN", "oversized", "failed")),
    ],
)
def test_a_bad_reply_is_left_out_and_said_and_the_round_goes_on(
    tmp_path: Path, good: Ran, kind: str, workers: Any
) -> None:
    """What is wrong with a reply is looked for in one place; a failure comes from each runtime in its own way."""
    spoil, text = BAD[kind]
    method = Faulty(spoil=spoil)
    ran = run(tmp_path / "bad", method, workers, Tolerance(2), rounds=2)
    assert [entry.get("left_out") for entry in ran.rounds] == [
        None,
        {"y": ran.rounds[1]["left_out"]["y"]},
    ]
    why = ran.rounds[1]["left_out"]["y"]
    assert text in why
    assert "last good round" not in why
    assert f"round 2: without site 'y': {why}" in ran.said
    assert ran.said[-1] == "left out of rounds: y in 1 of 2"
    assert ran.summary["left_out"] == {"y": 1}
    assert ran.rounds[1]["cohort"] == ["x", "y", "z"]
    assert {name for name, site in ran.rounds[1]["sites"].items() if "train_loss" in site} == {
        "x",
        "z",
    }
    states = {path.name for path in (ran.out / "state").glob("*site*")}
    assert states == {
        "000001-site-y.safetensors",
        "000002-site-x.safetensors",
        "000002-site-z.safetensors",
    }
    for name in ("x", "z"):  # what the others do is what they do in a good run
        mine, theirs = (load_state(r.out / "state" / r.state(name)) for r in (ran, good))
        assert bits(mine) == bits(theirs)


@pytest.mark.parametrize("kind", ["NaN", "failed"])
def test_the_mean_is_of_those_who_replied(tmp_path: Path, kind: str) -> None:
    taken: list[dict[str, Message]] = []

    class Watched(Faulty):
        def aggregate(self, host, server, replies, num_sites):
            taken.append(dict(replies))
            return super().aggregate(host, server, replies, num_sites)

    ran = run(tmp_path / "run", Watched(spoil=BAD[kind][0]), Workers, Tolerance(2), rounds=2)
    assert [sorted(replies) for replies in taken] == [["x", "y", "z"], ["x", "z"]]
    state = load_state(ran.out / "state" / "000002-server.safetensors")
    expected = weighted_mean(taken[1], "weights", sample_shares(taken[1]))
    assert bits(state["weights"]) == bits(expected)
    losses = {name: ran.rounds[1]["sites"][name]["train_loss"] for name in ("x", "z")}
    assert ran.rounds[1]["train_loss"] == pytest.approx((3 * losses["x"] + 4 * losses["z"]) / 7)


@every_runtime
def test_a_left_out_site_goes_on_from_its_state_of_the_round_before(
    tmp_path: Path, workers: Any
) -> None:
    seen: dict[int, Any] = {}

    class Watched(Faulty):
        def local_update(self, site, state, down):
            if site.name == "y":
                seen[site.round] = bits(state)
            return super().local_update(site, state, down)

    tolerance = Tolerance(2)
    method = Watched(spoil=with_weights(**{"0_bias": torch.full((6,), torch.nan)}))
    run(tmp_path / "run", method, Workers if workers is forked else workers, tolerance, rounds=3)
    assert seen[3] == seen[2] != seen[1]


@pytest.mark.parametrize("workers", [Workers, forked], ids=["alone", "forked"])
def test_by_default_the_first_failure_ends_the_run_which_can_be_resumed(
    tmp_path: Path, workers: Any
) -> None:
    spoil, text = BAD["NaN"]
    with pytest.raises(
        RunError, match=rf"^site 'y': {text}; the last good round is kept$".replace("(", r"\(")
    ):
        run(tmp_path / "run", Faulty(spoil=spoil), workers)
    assert json.loads((tmp_path / "run" / "state" / "manifest.json").read_text())["round"] == 1
    resumed = run(tmp_path / "run", load("fedper"), workers)
    whole = run(tmp_path / "whole", load("fedper"))
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert "left_out" not in resumed.summary
    assert not any("left out" in line for line in resumed.said)


@every_runtime
def test_with_too_few_replies_the_last_good_round_is_kept_and_all_are_named(
    tmp_path: Path, workers: Any
) -> None:
    bad = Faulty(spoil=BAD["shape"][0], sites=("x", "z"), rounds=(3,))
    text = r"^round 3: 2 of 3 sites do not answer, and at least 2 have to \(\w: .*; \w: .*\(7,\).*--resume$"
    with pytest.raises(RunError, match=text) as caught:
        run(tmp_path / "run", bad, workers, Tolerance(2))
    assert "x: 'weights/0.bias'" in str(caught.value)
    assert "z: 'weights/0.bias'" in str(caught.value)
    resumed = run(tmp_path / "run", load("fedper"), workers, Tolerance(2))
    assert (
        resumed.summary["weights_sha256"]
        == run(tmp_path / "whole", load("fedper")).summary["weights_sha256"]
    )


def test_a_resumed_run_remembers_who_was_left_out(tmp_path: Path) -> None:
    method = Faulty(spoil=BAD["NaN"][0], rounds=(1, 2, 4))
    whole = run(tmp_path / "whole", method, Workers, Tolerance(2), rounds=4)
    run(tmp_path / "parts", method, Workers, Tolerance(2), rounds=2)
    parts = run(tmp_path / "parts", method, forked, Tolerance(2), rounds=4)
    assert parts.summary["left_out"] == whole.summary["left_out"] == {"y": 3}
    assert parts.summary["weights_sha256"] == whole.summary["weights_sha256"]


def test_when_nothing_fails_the_minimum_changes_nothing(tmp_path: Path) -> None:
    plain, bearing = (
        run(tmp_path / str(t), load("ditto"), tolerance=t) for t in (None, Tolerance(1))
    )
    assert plain.summary["weights_sha256"] == bearing.summary["weights_sha256"]
    assert plain.summary.keys() == bearing.summary.keys()
    assert plain.rounds[0].keys() == bearing.rounds[0].keys()


# At the start and in scores


def absent_at(fails: Callable[[WorkerTask], bool]) -> Any:
    """Workers some of whose tasks at sites are not answered."""

    class Lossy(Workers):
        def run(self, tasks, sizes=None):
            for index, make in enumerate(tasks):
                task = make()
                yield (
                    index,
                    FailedReply(task.site, "no answer")
                    if fails(task)
                    else task.run(self._federation),
                )

    return Lossy


def silent(task: WorkerTask) -> bool:
    return task == Introduce("y")


@pytest.mark.parametrize("method", ["fedper", "ditto", "scaffold", "proxyfl", "fesem"])
def test_a_site_without_introduction_takes_no_part(tmp_path: Path, method: str) -> None:
    ran = run(
        tmp_path / "run", load(method), absent_at(silent), Tolerance(2), rounds=2, eval_every=1
    )
    assert [entry["cohort"] for entry in ran.rounds] == [["x", "z"], ["x", "z"]]
    assert "introductions: without site 'y': no answer" in ran.said
    assert ran.summary["absent"] == {"y": "no answer"}
    assert ran.said[-1] == "without these sites, which did not introduce themselves: y"
    resumed = run(tmp_path / "run", load(method), Workers, Tolerance(2), rounds=3, eval_every=1)
    assert resumed.rounds[-1]["cohort"] == ["x", "z"]
    assert resumed.summary["absent"] == {"y": "no answer"}


def test_without_enough_introductions_nothing_begins(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match="^introductions: 1 of 3 sites do not answer, and at least 3 have to"
    ):
        run(tmp_path / "few", load("ditto"), absent_at(silent), Tolerance(3))
    with pytest.raises(RunError, match="^site 'y': no answer$"):
        run(tmp_path / "strict", load("ditto"), absent_at(silent))


def test_an_introduction_is_checked(tmp_path: Path) -> None:
    class Odd(type(load("feddyn"))):
        def introduce(self, site):
            return Message({}, {"samples": float("nan") if site.name == "z" else 3.0})

    ran = run(tmp_path / "run", Odd(), Workers, Tolerance(2), rounds=1)
    assert ran.summary["absent"] == {"z": "'scalars/samples' has NaN or infinite values"}


@pytest.mark.parametrize("method", ["fedavg", "ditto", "local"])
def test_scores_are_of_those_who_answer(tmp_path: Path, method: str) -> None:
    def unscored(task: WorkerTask) -> bool:
        return isinstance(task, RoundTask) and not isinstance(task, Train) and task.site == "y"

    asked = {"rounds": 1, "eval_every": 1, "score_trained": True}
    ran = run(tmp_path / "run", load(method), absent_at(unscored), Tolerance(1), **asked)
    assert "scores: without site 'y': no answer" in ran.said
    assert ran.summary["last"]["accuracy"] >= 0
    table = [line.split(",") for line in (ran.out / "sites.csv").read_text().splitlines()]
    column = table[0].index("personal_accuracy")
    assert {row[0]: row[column] != "" for row in table[1:]} == {"x": True, "y": False, "z": True}
    sites = {name.split("/")[0] for name in load_weights(ran.out / "weights.safetensors")}
    assert method == "fedavg" or sites == {"x", "z"} or "y" not in sites
    with pytest.raises(RunError, match="^site 'y': no answer$"):
        run(tmp_path / "strict", load(method), absent_at(unscored), **asked)


def test_somebody_has_to_be_scored(tmp_path: Path) -> None:
    def unscored(task: WorkerTask) -> bool:
        return isinstance(task, ScoreSite)

    with pytest.raises(
        RunError, match="^scores: 3 of 3 sites do not answer, and at least 1 have to"
    ):
        run(
            tmp_path / "run",
            load("ditto"),
            absent_at(unscored),
            Tolerance(1),
            rounds=1,
            eval_every=1,
        )


def test_what_fails_at_the_server_is_nobodys_absence(tmp_path: Path) -> None:
    class Broken(type(load("fedper"))):
        def aggregate(self, host, server, replies, num_sites):
            raise RunError("the server's half fails")

    with pytest.raises(RunError, match="^the server's half fails$"):
        run(tmp_path / "run", Broken(), Workers, Tolerance(1))


# Deadlines


def test_a_deadline_is_handed_to_what_can_hold_to_it(tmp_path: Path) -> None:
    told: list[float | None] = []

    class Timed(Workers):
        def set_deadline(self, seconds):
            told.append(seconds)

    run(tmp_path / "timed", load("fedper"), Timed, Tolerance(deadline=2.5), rounds=1)
    assert told == [2.5]
    with pytest.raises(InputError, match="--deadline 2.5; a runtime whose sites run by themselves"):
        run(tmp_path / "untimed", load("fedper"), Workers, Tolerance(deadline=2.5), rounds=1)


# What is asked for


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"min_replies": 0}, "--min-replies 0; a whole number of at least 1"),
        ({"deadline": 0.0}, "--deadline 0; seconds, above 0"),
        ({"deadline": float("inf")}, "--deadline inf; seconds, above 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        Tolerance(**settings)


def test_more_replies_than_sites_are_refused() -> None:
    made = Federation(ToyBundle(), load("fedavg"), run_record(cohort=0.67))
    Tolerance(2).check(made)
    with pytest.raises(
        InputError, match="--min-replies 3; a round's cohort has 2 sites; ask for 2 or fewer"
    ):
        Tolerance(3).check(made)


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from medfl import datasets

    return datasets.write_phantom(
        "pneumonia", tmp_path_factory.mktemp("data") / "phantom", per_class=20, size=28
    )


COMMON = [
    "--config=network=small_cnn",
    "--config=image_size=28",
    "--partition=iid",
    "--local-epochs=1",
    "--jobs=1",
]


def command(phantom: Path, out: Path, *more: str) -> int:
    return cli.main(
        [
            "run",
            "pneumonia",
            "--data",
            str(phantom),
            *COMMON,
            "--rounds=1",
            "--out",
            str(out),
            *more,
        ]
    )


def test_the_command_line_takes_and_records_them(
    phantom: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(phantom, tmp_path / "plain", "--sites=3", "--cohort=1") == 0
    more = ["--sites=3", "--cohort=1", "--min-replies=2", "--aggregation=trimmed:.34"]
    assert command(phantom, tmp_path / "robust", *more) == 0
    assert "aggregation: trimmed:0.34, every reply counts the same" in capsys.readouterr().err
    plain, robust = (
        json.loads((tmp_path / name / "run.json").read_text()) for name in ("plain", "robust")
    )
    assert (robust["min_replies"], robust["aggregation"]) == (2, "trimmed:0.34")
    assert not {"min_replies", "deadline", "aggregation"} & plain.keys()
    assert plain["run_hash"] != robust["run_hash"]
    again = federate(source=tmp_path / "robust" / "run.json", out=tmp_path / "again", jobs=1)
    assert again["run_hash"] == robust["run_hash"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--min-replies=5"], "--min-replies 5; a round's cohort has 4 sites"),
        (["--deadline=9"], "--deadline 9 with --runtime simulator"),
        (["--deadline=9", "--runtime=monai-fl"], "--deadline 9 with --runtime monai-fl"),
        (
            ["--aggregation=krum:1"],
            "--aggregation krum:1 with 4 sites in a round; krum:1 needs at least 5",
        ),
        (
            ["--aggregation=median", "--method=scaffold"],
            "--aggregation median with method 'scaffold'",
        ),
        (
            ["--aggregation=krum:0", "--min-replies=2"],
            "--min-replies 2 with --aggregation krum:0; krum:0 needs at least 3",
        ),
        (["--aggregation=best"], "--aggregation best; mean, clip:C"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    phantom: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], text: str
) -> None:
    assert command(phantom, tmp_path / "out", "--sites=4", "--cohort=1", *more) == 2
    assert f"error: {text}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_local_reference_of_a_robust_run_has_no_aggregation(
    phantom: Path, tmp_path: Path
) -> None:
    more = ["--sites=3", "--cohort=1", "--aggregation=median", "--min-replies=2", "--with-local"]
    assert command(phantom, tmp_path / "out", *more) == 0
    assert "aggregation" not in json.loads((tmp_path / "out" / "local" / "run.json").read_text())


# Robust aggregation in a run


def nine() -> PartitionRecord:
    sites = {
        f"s{i}": {section: [f"{section}{j}" for j in (i, i + 1, i + 2)] for section in SECTIONS}
        for i in range(9)
    }
    return PartitionRecord("file", 0, (), sites)


@dataclasses.dataclass(frozen=True)
class Poisoned(type(load("fedprox"))):
    """Two of nine sites send their weights with the sign turned, times ten."""

    def local_update(self, site, state, down):
        state, reply = super().local_update(site, state, down)
        if site.name in ("s2", "s7"):
            bad = {n: -10 * t if t.is_floating_point() else t for n, t in reply["weights"].items()}
            bad["1.running_var"] = bad["1.running_var"].abs()
            reply = Message({"weights": bad}, reply.scalars)
        return state, reply


@pytest.mark.parametrize(
    "rule", ["clip:auto", "median", "trimmed:0.25", "krum:2", "multikrum:2", "mean"]
)
def test_two_bad_sites_of_nine_spoil_the_mean_alone(tmp_path: Path, rule: str) -> None:
    settings = {
        "partition": nine(),
        "aggregation": rule,
        "method": "fedprox",
        "rounds": 6,
        "lr": 0.05,
        "lr_decay": 1.0,
    }
    bad = run(tmp_path / "bad", Poisoned(), **settings)
    good = run(tmp_path / "good", load("fedprox"), **settings)
    spoilt = bad.summary["last"]["loss"] - good.summary["last"]["loss"]
    assert spoilt > 1 if rule == "mean" else spoilt < 0.3
    told = [entry.get("observed", {}) for entry in bad.rounds]
    assert all({"clip", "norm/s2", "share/s2"} <= one.keys() for one in told) == (
        rule == "clip:auto"
    )
    assert all(one["norm/s2"] > one["clip"] > 0 and one["share/s2"] == 1 / 9 for one in told if one)


@pytest.mark.parametrize("rule", ["clip:auto", "clip:1.0"])
def test_the_recorded_shares_are_those_of_the_mean(tmp_path: Path, rule: str) -> None:
    """Of 3 and 1 images: 3/4 and 1/4 by samples, 1/2 each where sites count the same."""
    sites = {
        "a": {s: [f"{s}{i}" for i in (0, 1, 2)] for s in SECTIONS},
        "b": {s: [f"{s}3"] for s in SECTIONS},
    }
    settings = {
        "partition": PartitionRecord("file", 0, (), sites),
        "aggregation": rule,
        "rounds": 1,
    }
    for weights, shares in {"samples": (0.75, 0.25), "uniform": (0.5, 0.5)}.items():
        ran = run(tmp_path / weights, load("fedavg"), site_weights=weights, **settings)
        told = ran.rounds[0]["observed"]
        assert (told["share/a"], told["share/b"]) == shares


@pytest.mark.parametrize("rule", ["multikrum:1", "clip:auto"])
def test_law1_robust_runs_depend_neither_on_workers_nor_on_a_resume(
    tmp_path: Path, rule: str
) -> None:
    settings = {"partition": nine(), "aggregation": rule}
    alone = run(tmp_path / "alone", load("fedper"), **settings)
    helped = run(tmp_path / "helped", load("fedper"), forked, **settings)
    exchanged = run(tmp_path / "exchanged", load("fedper"), Exchange, **settings)
    run(tmp_path / "parts", load("fedper"), rounds=1, **settings)
    parts = run(tmp_path / "parts", load("fedper"), **settings)
    assert len({ran.summary["weights_sha256"] for ran in (alone, helped, exchanged, parts)}) == 1


def test_a_robust_rule_is_said_and_hashed() -> None:
    made = Federation(ToyBundle(), load("fedavg"), run_record(aggregation="median"))
    assert made.describe_exchange().endswith(
        "; aggregation: median, every reply counts the same, whatever its number of images"
    )
    clipped = Federation(
        ToyBundle(), load("fedavg"), run_record(aggregation="clip:auto")
    ).describe_exchange()
    assert clipped.endswith(
        "; aggregation: clip:auto, replies count by their images, no change is longer than the bound"
    )
    assert made.run.run_hash != run_record().run_hash == run_record(aggregation="mean").run_hash


def test_train_is_where_a_sites_failure_is_its_absence() -> None:
    def failing() -> None:
        raise RunError("out of room")

    assert result_or_failure(Train("y", 1, None, Message(), Path("y")), failing) == FailedReply(
        "y", "out of room"
    )
    with pytest.raises(RunError, match="out of room"):
        result_or_failure(ScoreGlobal(1, {}, "validate", 0, 1), failing)
