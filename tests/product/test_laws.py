"""The laws of the contract that a run must keep, shown on whole runs of a shipped bundle."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medfl import datasets
from medfl.core.errors import InputError, RunError
from medfl.runs.launch import federate
from medfl.storage import files

ROUNDS = 3


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "pneumonia", tmp_path_factory.mktemp("data") / "phantom", per_class=15, size=28
    )


def run(phantom: Path, out: Path, method: str = "scaffold", **changes: object) -> dict[str, object]:
    """Run a small federation; `resume` runs give only what a user would type again."""
    jobs, resume, options = (
        changes.pop(name, default)
        for name, default in (("jobs", 1), ("resume", False), ("options", {}))
    )
    requested = {
        "method": method, "data": str(phantom), "sites": 3, "partition": "iid", "cohort": 0.67, "rounds": ROUNDS,
        "local_epochs": 1, "batch_size": 4, "lr": 0.01, **changes,
    }  # fmt: skip
    return federate(
        "pneumonia",
        options=options,
        config={"network": "small_cnn", "image_size": 28},
        requested=requested,
        out=out,
        jobs=jobs,
        resume=resume,
    )


@pytest.fixture(scope="module")
def reference(phantom: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return run(phantom, tmp_path_factory.mktemp("runs") / "reference")


def _files(out: Path) -> dict[str, object]:
    """What must be the same however a run was cut: metrics of each round, and the tables."""
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in entry.items() if not k.startswith("seconds")} for entry in rounds]
    return {
        "rounds": timeless,
        **{name: (out / name).read_text() for name in ("sites.csv", "predictions.csv")},
    }


# Law 1: same run_hash, same weights


def test_law1_a_rerun_gives_the_same_weights(
    phantom: Path, reference: dict[str, object], tmp_path: Path
) -> None:
    again = run(phantom, tmp_path / "again")
    assert again["run_hash"] == reference["run_hash"]
    assert again["weights_sha256"] == reference["weights_sha256"]
    assert _files(tmp_path / "again") == _files(Path(str(reference["folder"])))


def test_law1_another_seed_gives_other_weights(
    phantom: Path, reference: dict[str, object], tmp_path: Path
) -> None:
    other = run(phantom, tmp_path / "other", seed=1)
    assert other["run_hash"] != reference["run_hash"]
    assert other["weights_sha256"] != reference["weights_sha256"]


@pytest.mark.parametrize(("method", "most"), [("scaffold", 3), ("ditto", 2)])
def test_law1_the_number_of_workers_changes_nothing(
    phantom: Path, tmp_path: Path, method: str, most: int
) -> None:
    places = [tmp_path / f"jobs{jobs}" for jobs in range(1, most + 1)]
    results = [run(phantom, place, method, jobs=1 + i, rounds=2) for i, place in enumerate(places)]
    assert len({result["weights_sha256"] for result in results}) == 1
    assert all(_files(place) == _files(places[0]) for place in places)


def test_law1_a_recorded_run_repeats(
    phantom: Path, reference: dict[str, object], tmp_path: Path
) -> None:
    record = Path(str(reference["folder"])) / "run.json"
    again = federate(source=record, out=tmp_path / "again", jobs=1)
    assert (again["run_hash"], again["weights_sha256"]) == (
        reference["run_hash"],
        reference["weights_sha256"],
    )


def test_law1_more_rounds_asked_for_later(
    phantom: Path, reference: dict[str, object], tmp_path: Path
) -> None:
    run(phantom, tmp_path / "run", rounds=2)
    longer = federate(out=tmp_path / "run", resume=True, requested={"rounds": ROUNDS}, jobs=1)
    assert (longer["run_hash"], longer["weights_sha256"]) == (
        reference["run_hash"],
        reference["weights_sha256"],
    )
    assert _files(tmp_path / "run") == _files(Path(str(reference["folder"])))


def _child(phantom: Path, out: Path, jobs: int) -> None:
    os.setpgid(0, 0)
    run(phantom, out, jobs=jobs, resume=(out / "run.json").exists())


def _start(phantom: Path, out: Path, jobs: int) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=_child, args=(phantom, out, jobs))
    process.start()
    return process


@pytest.mark.slow
def test_law1_kill_at_ten_random_moments_and_resume(
    phantom: Path, reference: dict[str, object], tmp_path: Path
) -> None:
    generator, kills, chains = random.Random(7), 0, 0
    started = time.monotonic()
    _child_duration = None
    while kills < 10:
        out = tmp_path / f"chain{chains}"
        chains += 1
        for _ in range(12):
            began = time.monotonic()
            process = _start(phantom, out, jobs=1 + chains % 2)
            if _child_duration is None:
                process.join(120)
                _child_duration = time.monotonic() - began
                break
            process.join(generator.uniform(0.05, 1.1) * _child_duration)
            if not process.is_alive():
                break
            os.kill(process.pid, signal.SIGKILL)
            process.join(30)
            kills += 1
            if (out / "run.json").exists():
                continue
        process = _start(phantom, out, jobs=1)
        process.join(120)
        assert process.exitcode == 0
        summary = json.loads((out / "summary.json").read_text())
        assert summary["weights_sha256"] == reference["weights_sha256"]
        assert _files(out) == _files(Path(str(reference["folder"])))
        assert time.monotonic() - started < 300
    assert kills >= 10


@pytest.mark.parametrize(
    ("when", "writes"),
    [("before", (1,)), ("half", (3, 12)), ("after", (3,))]
    + [
        pytest.param(when, writes, marks=pytest.mark.slow)
        for when, writes in (("before", (2, 6, 11)), ("half", (2, 5, 6, 11)), ("after", (6,)))
    ],
)
def test_law1_kill_inside_any_write(
    phantom: Path, reference: dict[str, object], tmp_path: Path, when: str, writes: tuple[int, ...]
) -> None:
    """Die at the n-th atomic write, before it, with half of the temporary file written, or right after the rename."""

    def die(at: int, out: Path) -> None:
        os.setpgid(0, 0)
        real, count = files.atomic_replace, 0

        @contextmanager
        def replacing(path: Path, size: int) -> Iterator[Path]:
            nonlocal count
            count += 1
            mine = count
            if mine == at and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            with real(path, size) as temporary:
                yield temporary
                if mine == at and when == "half":
                    os.truncate(temporary, temporary.stat().st_size // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
            if mine == at:
                os.kill(os.getpid(), signal.SIGKILL)

        files.atomic_replace = replacing
        run(phantom, out, resume=(out / "run.json").exists())

    context = multiprocessing.get_context("fork")
    for at in writes:
        out = tmp_path / f"{when}{at}"
        process = context.Process(target=die, args=(at, out))
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, f"the run makes fewer than {at} writes"
        process = _start(phantom, out, jobs=1)
        process.join(60)
        assert process.exitcode == 0
        assert (
            json.loads((out / "summary.json").read_text())["weights_sha256"]
            == reference["weights_sha256"]
        )


# Law 2: neutral settings reduce to FedAvg


def test_law2_neutral_settings_are_fedavg(phantom: Path, tmp_path: Path) -> None:
    fedavg = run(phantom, tmp_path / "fedavg", "fedavg", rounds=2)
    fedprox = run(phantom, tmp_path / "fedprox", "fedprox", options={"mu": 0.0}, rounds=2)
    ditto = run(phantom, tmp_path / "ditto", "ditto", rounds=2)
    # small_cnn has no BatchNorm
    fedbn = run(phantom, tmp_path / "fedbn", "fedbn", rounds=2)
    assert (
        fedavg["weights_sha256"]
        == fedprox["weights_sha256"]
        == ditto["weights_sha256"]
        == fedbn["weights_sha256"]
    )
    assert (
        run(phantom, tmp_path / "mu", "fedprox", options={"mu": 1.0}, rounds=2)["weights_sha256"]
        != fedavg["weights_sha256"]
    )


def test_law2_ditto_without_pull_is_local(phantom: Path, tmp_path: Path) -> None:
    run(phantom, tmp_path / "ditto", "ditto", options={"lam": 0.0}, rounds=2)
    run(phantom, tmp_path / "local", "local", rounds=2)
    ditto, local = (
        (tmp_path / name / "predictions.csv").read_text() for name in ("ditto", "local")
    )
    assert ditto == local


# Law 3: what leaves is printed and enforced


def test_law3_what_leaves_is_said_and_enforced(
    phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    requested = {
        "method": "fedbn",
        "data": str(phantom),
        "sites": 2,
        "partition": "iid",
        "rounds": 1,
        "local_epochs": 1,
    }
    config = {"network": "resnet20", "image_size": 28}
    federate(
        "pneumonia",
        config=config,
        requested=requested,
        out=tmp_path / "ok",
        jobs=1,
        say=said.append,
    )
    assert (
        "21 tensors leave each site, 95 stay" in said
    )  # 19 convolutions and fc's two; 19 BatchNorm layers of 5 tensors

    from medfl.methods.fedbn import FedBN

    def leak(self, site, state, down):  # noqa: ANN001, ANN202
        state, reply = super(FedBN, self).local_update(site, state, down)
        return state, type(reply)(
            {"weights": {**reply["weights"], **state["weights"]}}, reply.scalars
        )

    monkeypatch.setattr(FedBN, "local_update", leak)
    with pytest.raises(RunError, match=r"site 'site-1': tensor 'weights/.*' must not leave it"):
        federate("pneumonia", config=config, requested=requested, out=tmp_path / "leak", jobs=1)


# Law 5: real or phantom is stated everywhere


def test_law5_phantom_is_stated_everywhere(reference: dict[str, object]) -> None:
    out = Path(str(reference["folder"]))
    assert reference["data_source"] == "phantom"
    assert json.loads((out / "run.json").read_text())["data"]["source"] == "phantom"
    assert json.loads((out / "summary.json").read_text())["data_source"] == "phantom"
    assert "phantom" in (out / "report.html").read_text().lower()


# Failures


def test_a_disk_that_fills_up_keeps_the_last_round(
    phantom: Path, reference: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = os.replace, tmp_path / "run"

    def full(source: object, target: object) -> None:
        if "000003-server" in str(target):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        RunError, match=r"no space left on the disk; what was saved before is intact"
    ):
        run(phantom, out)
    monkeypatch.setattr(os, "replace", real)
    assert json.loads((out / "state" / "manifest.json").read_text())["round"] == 2
    assert run(phantom, out, resume=True)["weights_sha256"] == reference["weights_sha256"]


def test_nan_loss_names_site_round_and_step_and_keeps_the_last_round(
    phantom: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        RunError, match=r"site 'site-\d', round \d+: the training loss is (nan|inf) at step \d+"
    ):
        run(phantom, tmp_path / "run", "fedavg", lr=1e30)


def test_resume_with_other_settings_names_the_difference(phantom: Path, tmp_path: Path) -> None:
    run(phantom, tmp_path / "run", rounds=1)
    with pytest.raises(InputError, match=r"batch_size: 2 was 4"):
        run(phantom, tmp_path / "run", rounds=2, batch_size=2, resume=True)
    with pytest.raises(InputError, match="exists and is not empty"):
        run(phantom, tmp_path / "run", rounds=1)
