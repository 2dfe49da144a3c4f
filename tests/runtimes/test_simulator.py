"""The simulator with many sites: what it holds, what it leaves, and that none of it is seen in the results."""

from __future__ import annotations

import csv
import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medfl.core.run import PartitionRecord
from medfl.methods import load
from medfl.runtimes import profiling, spilled_replies
from medfl.runtimes.federation import Federation
from medfl.runtimes.launch import Launch
from medfl.runtimes.registry import Execution
from medfl.runtimes.server import scoring
from medfl.runtimes.simulator import Simulator
from medfl.runtimes.tasks import RoundTask, ScoreSite, ScoreSiteOnAll, TrainToScore
from medfl.storage.files import load_weights
from medfl.storage.run_folder import RunFolder
from tests.support.sweeps import mostly_slow
from tests.support.toy import ToyBundle, bits, run_record


def divided(sites: int) -> PartitionRecord:
    """Sites of one to five of the twelve training items; the first twelve have a validation and a test item each."""
    held = {
        f"s{i}": {
            "train": [f"train{(i + j) % 12}" for j in range(1 + i % 5)],
            "validate": [f"validate{i}"] * (i < 12),
            "test": [f"test{i}"] * (i < 12),
        }
        for i in range(sites)
    }
    return PartitionRecord("file", 0, (), held)


def tasks_run(kind: type[RoundTask], monkeypatch: pytest.MonkeyPatch) -> list[RoundTask]:
    """Collect the tasks of a kind that are run in this process."""
    tasks, run = list[RoundTask](), kind.run

    def noted(task: RoundTask, federation: Federation) -> Any:
        tasks.append(task)
        return run(task, federation)

    monkeypatch.setattr(kind, "run", noted)
    return tasks


def simulate(
    out: Path,
    method: str = "scaffold",
    bundle: ToyBundle | None = None,
    *,
    jobs: int = 1,
    profile: bool = False,
    options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Run, or continue, 3 rounds with 4 of 20 sites."""
    resume = (out / "run.json").is_file()
    settings = {"partition": divided(20), "cohort": 0.2, **changes}
    record = run_record(method=method, **settings)
    folder = RunFolder.existing(out) if resume else RunFolder.create(out)
    folder.write_run(record, {})
    federation = Federation(bundle or ToyBundle(), load(method, options), record)
    return Simulator(
        Execution(federation, folder, Launch(resume=resume, jobs=jobs, profile=profile))
    ).execute()


def left(out: Path) -> dict[str, Any]:
    """What must not depend on how a run was executed."""
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in entry.items() if not k.startswith("seconds")} for entry in rounds]
    tables = {name: (out / name).read_text() for name in ("sites.csv", "predictions.csv")}
    return {
        "rounds": timeless,
        "weights": bits(load_weights(out / "weights.safetensors")),
        **tables,
    }


@pytest.mark.parametrize("method", mostly_slow(["scaffold", "ditto", "fedproto"], ["ditto"]))
def test_neither_jobs_nor_the_budget_nor_the_profile_is_seen_in_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    simulate(tmp_path / "plain", method)
    for jobs in (1, 3):
        monkeypatch.setattr(spilled_replies, "BUDGET", 0)
        simulate(tmp_path / f"filed{jobs}", method, jobs=jobs, profile=jobs == 3)
        assert left(tmp_path / f"filed{jobs}") == left(tmp_path / "plain")


def test_a_resumed_run_goes_on_with_the_states_on_disk(tmp_path: Path) -> None:
    simulate(tmp_path / "whole", rounds=4)
    simulate(tmp_path / "parts", rounds=2)
    before = json.loads((tmp_path / "parts" / "state" / "manifest.json").read_text())["sites"]
    simulate(tmp_path / "parts", rounds=4, jobs=2)
    after = json.loads((tmp_path / "parts" / "state" / "manifest.json").read_text())["sites"]
    assert left(tmp_path / "parts") == left(tmp_path / "whole")
    assert before.keys() < after.keys()
    files = {path.name for path in (tmp_path / "parts" / "state").glob("*site*")}
    assert files == set(after.values())


def alive() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.layout is torch.strided]
    found = {t.untyped_storage().data_ptr(): t.nbytes for t in tensors}
    return sum(found.values())


class Wide(ToyBundle):
    """A network of 10,752 numbers, so that one State more is seen."""

    def __init__(self) -> None:
        super().__init__(
            network=lambda: nn.Sequential(nn.Linear(8, 896), nn.ReLU(), nn.Linear(896, 3))
        )


@pytest.mark.parametrize("method", ["scaffold", "ditto"])
def test_memory_does_not_grow_with_the_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """8 of 10 sites and 8 of 100, six rounds: what the tensors of this process hold when a round is committed.

    A site costs the positions of its items, 5 + 1 + 1 numbers of 8 bytes at most. A State of either method is
    43 kB, and of 100 sites at least 30 have been trained in the end.
    """
    held: dict[int, list[int]] = {10: [], 100: []}
    commit = RunFolder.commit
    gc.freeze()  # what other tests have left is not gone through at each commit
    for sites, found in held.items():

        def counted(folder: RunFolder, *arguments: Any, into: list[int] = found) -> None:
            commit(folder, *arguments)
            into.append(alive())

        monkeypatch.setattr(RunFolder, "commit", counted)
        out = tmp_path / str(sites)
        simulate(
            out, method, Wide(), partition=divided(sites), cohort=8 / sites, rounds=6, eval_every=0
        )
        assert len(list((out / "state").glob("*site*"))) >= (30 if sites == 100 else 8)
    few, many = held.values()
    assert max(many[:5]) - max(few[:5]) <= 90 * 7 * 8 + 40_000
    assert many[4] <= many[0] + 40_000, "nor with the rounds"


def test_a_round_without_evaluation_tells_of_its_cohort_only(tmp_path: Path) -> None:
    simulate(tmp_path / "run", eval_every=2)
    first, second, _ = left(tmp_path / "run")["rounds"]
    assert list(first["sites"]) == first["cohort"]
    assert len(first["cohort"]) == 4
    tested = {f"s{i}" for i in range(12)}
    assert set(second["sites"]) == tested | set(second["cohort"])


def test_without_evaluations_only_the_last_cohort_is_trained_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = tasks_run(TrainToScore, monkeypatch)
    unasked = simulate(tmp_path / "unasked", "fedavg")
    assert (unasked["personal"], unasked.get("personal_model")) == (None, None)
    assert not tasks
    simulate(tmp_path / "off", "fedavg", eval_every=0, score_trained=True)
    cohort = left(tmp_path / "off")["rounds"][-1]["cohort"]
    assert [task.site for task in tasks] == [name for name in cohort if int(name[1:]) < 12]
    tasks.clear()
    simulate(tmp_path / "on", "fedavg", score_trained=True)
    assert [task.site for task in tasks] == [f"s{i}" for i in range(12)]


def test_patience_ends_a_run_and_a_resumed_one_stays_ended(tmp_path: Path) -> None:
    """At a rate of nearly 0 no round is better than the first: the third is the last of ten."""
    still = {"lr": 1e-12, "lr_decay": 1.0, "rounds": 10}
    ended = simulate(tmp_path / "patient", "fedavg", patience=2, **still)
    assert (ended["rounds"], ended["status"]) == (3, "stopped")
    assert "has not become better than" in ended["stopped"]
    assert len(left(tmp_path / "patient")["rounds"]) == 3
    plain = simulate(tmp_path / "plain", "fedavg", **{**still, "rounds": 3})
    assert plain["weights_sha256"] == ended["weights_sha256"]


@pytest.mark.parametrize(
    ("method", "options", "own"),
    [
        ("fedsm", {}, True),
        ("fedetf", {"finetune_rounds": 1}, True),
        ("fedetf", {"finetune_rounds": 0}, False),
    ],
)
def test_a_site_of_a_globally_judged_method_is_scored_by_its_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, options: dict[str, Any], own: bool
) -> None:
    """By its `predictor` where that is one, else, where asked for, by the global model after more local training."""
    scored, trained = (tasks_run(kind, monkeypatch) for kind in (ScoreSite, TrainToScore))
    summary = simulate(tmp_path / "run", method, options=options, score_trained=True)
    used, unused = (scored, trained) if own else (trained, scored)
    assert [(task.site, task.round) for task in used] == [
        (f"s{i}", 3 if own else 4) for i in range(12)
    ]
    assert not unused
    rows = list(csv.DictReader((tmp_path / "run" / "sites.csv").read_text().splitlines()))
    assert all(row["personal_accuracy"] for row in rows[:12])
    assert summary["judged"] == "global"
    assert summary["personal"]["last"]["round"] == 3


def test_a_fine_tuned_models_options_are_seen_in_the_personal_scores_alone(tmp_path: Path) -> None:
    runs = [
        simulate(
            tmp_path / f"{rate:g}",
            "fedetf",
            options={"finetune_rounds": 1, "finetune_projection_lr": rate},
        )
        for rate in (0.05, 5.0)
    ]
    assert runs[0]["weights_sha256"] == runs[1]["weights_sha256"]
    assert runs[0]["global"] == runs[1]["global"]
    assert runs[0]["personal"] != runs[1]["personal"]


def test_of_many_sites_some_models_are_scored_on_everybodys_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of 20 at equal distances: s0, s4, s8, s12, s16."""
    tasks = tasks_run(ScoreSiteOnAll, monkeypatch)
    monkeypatch.setattr(scoring, "_MAX_SCORED", 5)
    summary = simulate(tmp_path / "run", "local")
    assert [task.site for task in tasks] == ["s0", "s4", "s8", "s12", "s16"]
    assert summary["site_models"]["mean"].keys() >= {"round", "accuracy"}


def test_the_profile_names_rounds_sites_and_parts(tmp_path: Path) -> None:
    out = tmp_path / "run"
    simulate(out, profile=True)
    events = json.loads((out / "profile.json").read_text())["traceEvents"]
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    names = {span["name"] for span in spans}
    cohorts = {name for entry in left(out)["rounds"] for name in entry["cohort"]}
    assert {f"round {number}" for number in (1, 2, 3)} < names
    assert {f"site {name}" for name in cohorts} < names
    assert set(profiling.PARTS) - {profiling.OPTIMISER} < names, "every part takes some time here"
    assert "Optimizer.step#SGD.step" in names

    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    for entry in rounds:
        (span,) = [span for span in spans if span["name"] == f"round {entry['round']}"]
        # the record is written before the round is committed
        assert entry["seconds"] <= span["dur"] / 1e6
