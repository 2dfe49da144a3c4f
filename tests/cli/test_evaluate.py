"""`medfl evaluate`: a finished model examined at sites, and hospitals that only test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medfl import datasets
from medfl.cli.verbs import main
from medfl.storage.files import load_weights, save_weights


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scans") / "data"
    datasets.write_phantom("mednist", folder, per_class=24, size=24)
    return folder


@pytest.fixture(scope="module")
def trained(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "trained"
    arguments = ["run", "mednist", "--data", str(scans), "--sites", "2", "--partition", "iid"]
    assert main([*arguments, "--rounds", "1", "--out", str(out), "--quiet"]) == 0
    return out


def summary_of(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())


def evaluate(*arguments: object) -> int:
    return main(["evaluate", *map(str, arguments), "--quiet"])


def test_a_run_examined_where_it_trained_has_the_scores_of_its_end(
    trained: Path, scans: Path, tmp_path: Path
) -> None:
    out = tmp_path / "examined"
    sites = ("--sites", 2, "--partition", "iid")
    assert evaluate(trained, "--data", scans, *sites, "--out", out) == 0
    expected, examined = summary_of(trained), summary_of(out)
    assert examined["rounds"] == 0
    assert examined["bytes_up"] == examined["bytes_down"] == 0
    assert examined["weights_sha256"] == expected["weights_sha256"]
    assert {**examined["last"], "round": 1} == expected["last"]
    assert examined["sites"] == expected["sites"]
    assert (out / "predictions.csv").read_text() == (trained / "predictions.csv").read_text()
    page = (out / "report.html").read_text()
    assert "Examination of a finished model" in page
    assert "trained for" not in page


def test_a_file_of_weights_needs_its_bundle(
    trained: Path, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "model.safetensors"
    save_weights(weights, load_weights(trained / "weights.safetensors"))
    assert evaluate(weights, "--data", scans, "--out", tmp_path / "a") == 2
    assert "a bundle says which network they are of" in capsys.readouterr().err

    out = tmp_path / "b"
    assert evaluate(weights, "mednist", "--data", scans, "--sites", 1, "--out", out) == 0
    assert summary_of(out)["weights_sha256"] == summary_of(trained)["weights_sha256"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nowhere",), "nowhere is not there"),
        (("TRAINED", "kvasir_v2"), "network"),
    ],
)
def test_what_cannot_be_examined(
    arguments: tuple[str, ...], told: str, trained: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    named = [str(trained) if text == "TRAINED" else text for text in arguments]
    assert evaluate(*named, "--data", "phantom", "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out" / "run.json").exists()


def test_no_rounds_without_weights_are_refused(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["run", "mednist", "--data", str(scans), "--rounds", "0", "--out", str(out)]) == 2
    assert "--rounds 0; at least 1, or 0 to examine the weights" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_hospital_that_only_tests(method: str, scans: Path, tmp_path: Path) -> None:
    """The global model is scored there; its images train nothing, and it has no model of its own."""
    out = tmp_path / "run"
    arguments = ["run", "mednist", "--data", str(scans), "--method", method, "--rounds", "1"]
    partition = ["--partition", "counts:30/5,0/all"]
    assert main([*arguments, *partition, "--out", str(out), "--quiet"]) == 0
    lines = (out / "sites.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert rows[1]["train"] == "0"
    assert float(rows[1]["received_accuracy"]) >= 0
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert rounds[0]["cohort"] == ["site-1"]
    if method == "ditto":
        assert rows[1]["personal_accuracy"] == ""
