"""Laws 1 to 3 on volumes: patches drawn at random, BatchNorm, sliding windows, prepared samples on disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from medfl import datasets
from medfl.core.errors import InputError, RunError
from medfl.core.message import Message
from medfl.methods.fedbn import FedBN
from medfl.runs.launch import federate

ROUNDS = 2


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "phantom"
    return datasets.write_phantom("hippocampus", folder, per_class=10, size=24)


def run(phantom: Path, out: Path, method: str = "fedavg", **changes: object) -> dict[str, object]:
    jobs, resume, options, said, runtime = (
        changes.pop(name, default)
        for name, default in (
            ("jobs", 1), ("resume", False), ("options", {}), ("say", str), ("runtime", "simulator"),
        )
    )  # fmt: skip
    requested = {
        "method": method, "data": str(phantom), "sites": 2, "partition": "size", "rounds": ROUNDS, "local_epochs": 1,
        "batch_size": 2, "lr": 0.01, "eval_every": 2, **changes,
    }  # fmt: skip
    config = {"network": "unet8", "patch_size": [16, 16, 16]}
    return federate(
        "hippocampus",
        options=options,
        config=config,
        requested=requested,
        out=out,
        jobs=jobs,
        resume=resume,
        say=said,
        runtime=runtime,
    )


@pytest.fixture(scope="module")
def reference(phantom: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return run(phantom, tmp_path_factory.mktemp("runs") / "reference")


def _tables(out: Path) -> tuple[str, str]:
    return (out / "sites.csv").read_text(), (out / "predictions.csv").read_text()


def test_a_segmentation_says_what_the_contract_lists(reference: dict[str, object]) -> None:
    metrics = {"dice", "hd95", "surface_dice", "pixel_accuracy"}
    for when in ("last", "best"):
        assert metrics <= set(reference[when])
        assert all(0 <= reference[when][name] <= 1 for name in metrics - {"hd95"})
    out = Path(str(reference["folder"]))
    header, *rows = (out / "predictions.csv").read_text().splitlines()
    assert metrics | {"dice_anterior", "dice_posterior"} <= set(header.split(","))
    assert len(rows) == reference_counts(out)["test"]
    first = json.loads((out / "rounds.jsonl").read_text().splitlines()[1])
    assert {"dice", "pixel_accuracy", "loss"} <= set(first["val"])
    assert "hd95" not in first["val"], "distances are for test images"


def reference_counts(out: Path) -> dict[str, int]:
    return json.loads((out / "run.json").read_text())["data"]["counts"]


def test_what_is_scored_by_changes_no_weight(
    phantom: Path, reference: dict[str, object], tmp_path: Path
) -> None:
    few = run(phantom, tmp_path / "few", metrics="hd95_anterior")
    assert few["run_hash"] == reference["run_hash"]
    assert few["weights_sha256"] == reference["weights_sha256"]
    header, *rows = (tmp_path / "few" / "predictions.csv").read_text().splitlines()
    whole = (Path(str(reference["folder"])) / "predictions.csv").read_text().splitlines()[0]
    assert set(whole.split(",")) - set(header.split(",")) == {
        "hd95", "surface_dice", "hd95_posterior", "surface_dice_anterior", "surface_dice_posterior"
    }  # fmt: skip
    assert all(
        float(dict(zip(header.split(","), row.split(","), strict=True))["hd95_anterior"]) >= 0
        for row in rows
    )
    assert set(few["units"]) == {"hd95_anterior"}
    with pytest.raises(InputError, match="metrics"):
        run(phantom, tmp_path / "few", metrics="dice", rounds=ROUNDS + 1, resume=True)
    with pytest.raises(InputError, match="--metrics hd95_hippocampus; .*hd95_anterior"):
        run(phantom, tmp_path / "none", metrics="hd95_hippocampus")


@pytest.mark.slow
def test_law1_rerun_workers_and_disk_cache_change_nothing(
    phantom: Path, reference: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = {"workers": run(phantom, tmp_path / "workers", jobs=2)}
    monkeypatch.setenv("MEDFL_MEMORY", "1e-6")
    runs["disk"] = run(phantom, tmp_path / "disk")
    made = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "cache" / "medfl" / "prepared").iterdir()
    }
    assert len(made) == sum(reference_counts(tmp_path / "disk").values())
    runs["found again"] = run(phantom, tmp_path / "again", jobs=2)
    assert {path: path.stat().st_mtime_ns for path in made} == made
    for name, found in runs.items():
        assert found["run_hash"] == reference["run_hash"], name
        assert found["weights_sha256"] == reference["weights_sha256"], name
        assert _tables(Path(str(found["folder"]))) == _tables(Path(str(reference["folder"]))), name


@pytest.mark.slow
def test_law1_kill_and_resume(phantom: Path, reference: dict[str, object], tmp_path: Path) -> None:
    def child() -> None:
        os.setpgid(0, 0)
        run(phantom, out, resume=(out / "run.json").exists())

    context, draws, out, kills = (
        multiprocessing.get_context("fork"),
        random.Random(3),
        tmp_path / "run",
        0,
    )
    began = time.monotonic()
    while kills < 4:
        process = context.Process(target=child)
        process.start()
        process.join(
            draws.uniform(0.3, 2.0) if kills else 120 if (out / "run.json").exists() else 0.8
        )
        if not process.is_alive():
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join(30)
        kills += 1
        assert time.monotonic() - began < 120
    process = context.Process(target=child)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert kills
    assert (
        json.loads((out / "summary.json").read_text())["weights_sha256"]
        == reference["weights_sha256"]
    )
    assert _tables(out) == _tables(Path(str(reference["folder"])))


def test_law2_neutral_settings_are_fedavg(
    phantom: Path, reference: dict[str, object], tmp_path: Path
) -> None:
    prox = run(phantom, tmp_path / "prox", "fedprox", options={"mu": 0.0})
    ditto = run(phantom, tmp_path / "ditto", "ditto")
    assert prox["weights_sha256"] == ditto["weights_sha256"] == reference["weights_sha256"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "neutral"),
    [("feddg", {"probability": 0}), ("feddgga", {"step": 0, "weights": "samples"})],
)
def test_methods_for_unseen_hospitals_on_two_runtimes_and_neutral(
    phantom: Path,
    reference: dict[str, object],
    tmp_path: Path,
    method: str,
    neutral: dict[str, object],
) -> None:
    # the sites have fewer images than FedDG takes a mean of
    options = {"least": 1} if method == "feddg" else {}
    first = run(phantom, tmp_path / "simulator", method, options=options)
    other = run(phantom, tmp_path / "monai-fl", method, options=options, runtime="monai-fl")
    assert first["weights_sha256"] == other["weights_sha256"] != reference["weights_sha256"]
    same = run(phantom, tmp_path / "neutral", method, options=neutral)
    assert same["weights_sha256"] == reference["weights_sha256"]


def test_law3_norms_of_fedbn_stay_by_type(
    phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MONAI's U-Net names its norms `adn.N`: 18 of 5 tensors stay, 18 + 4 + 1 convolutions with bias leave."""
    said: list[str] = []
    run(phantom, tmp_path / "ok", "fedbn", rounds=1, say=said.append)
    assert "46 tensors leave each site, 90 stay" in said

    def leak(self: FedBN, site: object, state: dict, down: Message) -> tuple[dict, Message]:
        state, reply = super(FedBN, self).local_update(site, state, down)
        return state, Message({"weights": {**reply["weights"], **state["weights"]}}, reply.scalars)

    monkeypatch.setattr(FedBN, "local_update", leak)
    with pytest.raises(
        RunError, match=r"site 'site-1': tensor 'weights/.*adn\.N.*' must not leave it"
    ):
        run(phantom, tmp_path / "leak", "fedbn", rounds=1)


@pytest.mark.parametrize("method", ["fedproto", "fedbm", "ccvr", "fedrod"])
def test_methods_for_classes_refuse_masks_in_one_line(
    phantom: Path, tmp_path: Path, method: str
) -> None:
    with pytest.raises(
        InputError,
        match=f"method '{method}' on bundle 'hippocampus', a segmentation task; it supports",
    ):
        run(phantom, tmp_path / "run", method)
    assert not (tmp_path / "run").exists()
