"""Runs that are repeated, or gone on with: their record, their versions, and the Local reference beside them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from medfl import datasets
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.methods.local import Local
from medfl.runs import launch as begun
from medfl.runs.result import load_run
from medfl.storage.files import file_sha256
from tests.storage.test_run_integrity import aged, flipped

SMALL = (
    "--sites", "2", "--partition", "iid", "--local-epochs", "1", "--batch-size", "8", "--jobs", "1", "--quiet",
    "--config", "network=small_cnn", "--config", "image_size=28", "--eval-every", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def chest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "pneumonia", tmp_path_factory.mktemp("chest") / "data", per_class=20, size=28
    )


def command(chest: Path, out: Path, *more: str) -> list[str]:
    return ["run", "pneumonia", "--data", str(chest), *SMALL, "--out", str(out), *more]


@pytest.fixture(scope="module")
def finished(chest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds, with the Local reference."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert cli.main(command(chest, out, "--rounds", "2", "--with-local")) == 0
    return out


def test_a_schedule_that_ends_before_the_rounds_that_are_added_is_told(
    chest: Path, tmp_path: Path
) -> None:
    """FedProc's `rounds` are those that the run was begun with."""
    out, told = tmp_path / "run", list[str]()
    assert cli.main(command(chest, out, "--rounds", "1", "--method", "fedproc")) == 0
    for rounds, notes in ((1, 0), (2, 1)):
        told.clear()
        made = begun.resumed_plan(out, None, {}, {}, {"rounds": rounds}, told.append)
        assert (made.run.rounds, made.run.options["rounds"]) == (rounds, 1)
        said = "note: the schedule of fedproc ends with round 1; it is not stretched over more"
        assert told.count(said) == notes


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def error(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


def content(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def local_columns(path: Path) -> list[dict[str, str]]:
    with (path / "sites.csv").open() as file:
        return [
            {k: v for k, v in row.items() if k.startswith("local_")} for row in csv.DictReader(file)
        ]


# The record


@pytest.mark.parametrize("flag", ["--resume", "--from"])
def test_an_edited_record_is_neither_resumed_nor_repeated(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    (copied / "run.json").write_text(json.dumps({**read(copied / "run.json"), "lr": 0.5}))
    before = content(tmp_path)
    resume = ["--resume", "--out", str(copied), "--rounds", "3"]
    repeat = ["--from", str(copied), "--out", str(tmp_path / "new")]
    assert cli.main(["run", "--quiet", *(resume if flag == "--resume" else repeat)]) == 2
    assert "run.json, whose settings give the run hash" in error(capsys)
    assert content(tmp_path) == before


def test_damage_is_told_before_the_images_are_read(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / "state" / "manifest.json").unlink()
    before = content(copied)
    monkeypatch.setattr(begun, "repeat", lambda *_: pytest.fail("the data were opened"))
    assert cli.main(["run", "--resume", "--out", str(copied), "--quiet"]) == 2
    assert "manifest.json is missing, though rounds are done" in error(capsys)
    assert content(copied) == before


def test_changed_weights_of_the_best_round_do_not_become_the_run_s_own(copied: Path) -> None:
    """A run that goes on writes a new summary, with the hash of the weights that it wrote itself."""
    flipped(copied / "best.safetensors")
    assert cli.main(["run", "--resume", "--out", str(copied), "--quiet"]) == 0
    with pytest.raises(InputError, match=r"best\.safetensors is not as the run wrote it"):
        load_run(copied).network("best")


# Versions


def test_each_resume_records_its_versions_and_a_repetition_has_those_of_here(
    copied: Path,
    chest: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    was = read(copied / "run.json")
    shutil.copy(copied / "run.json", tmp_path / "record.json")
    here = {**was["versions"], "torch": "99.0"}
    monkeypatch.setattr(begun, "versions", lambda: here)
    resume = ["run", "--resume", "--out", str(copied), "--jobs", "1", "--rounds"]
    assert cli.main([*resume, "2"]) == 0
    assert (
        f"the run began with torch {was['versions']['torch']} (here 99.0)"
        in capsys.readouterr().err
    )
    assert cli.main([*command(chest, copied, "--resume"), "--rounds", "3"]) == 0, (
        "other versions are no other setting"
    )
    now = read(copied / "run.json")
    assert now["versions"] == was["versions"], "those of the rounds before"
    assert [(entry["round"], entry["versions"]) for entry in now["resumed"]] == [(2, here)] * 2
    assert now["command"] == was["command"], "what began it"
    assert now["resumed"][0]["command"].startswith("medfl run --resume --out")
    page = (copied / "report.html").read_text()
    assert "torch, from round 3" in page
    assert page.count("# after round 2") == 2
    assert read(copied / "summary.json")["run_hash"] == now["run_hash"]

    assert (
        cli.main(["run", "--from", str(tmp_path / "record.json"), "--out", str(tmp_path / "again")])
        == 0
    )
    assert "the run was recorded with torch" in capsys.readouterr().err
    again = read(tmp_path / "again" / "run.json")
    assert again["versions"] == here
    assert again["run_hash"] != was["run_hash"]
    assert "resumed" not in again


# The Local reference


def test_a_resumed_run_keeps_its_local_reference(copied: Path, finished: Path) -> None:
    before = content(copied / "local")
    assert cli.main(["run", "--resume", "--out", str(copied), "--jobs", "1", "--quiet"]) == 0
    assert local_columns(copied) == local_columns(finished) != [{}, {}]
    assert read(copied / "summary.json")["local"] == read(finished / "summary.json")["local"]
    assert content(copied / "local") == before, "there was nothing to do"


def test_a_resume_reads_each_state_once_to_check_it(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the run and of its Local reference, which both go on."""
    aged(copied)
    read, states = list[Path](), [*copied.rglob("*.safetensors")]
    there = [path for path in states if path.parent.name == "state"]

    def counted(path: Path) -> str:
        read.append(path)
        return file_sha256(path)

    monkeypatch.setattr("medfl.storage.run_integrity.file_sha256", counted)
    assert (
        cli.main(
            ["run", "--out", str(copied), "--resume", "--rounds", "3", "--jobs", "1", "--quiet"]
        )
        == 0
    )
    assert sorted(read) == sorted(there)


def test_more_rounds_are_more_for_the_local_reference_too(
    chest: Path, copied: Path, tmp_path: Path
) -> None:
    assert (
        cli.main(
            ["run", "--resume", "--out", str(copied), "--rounds", "3", "--jobs", "1", "--quiet"]
        )
        == 0
    )
    assert cli.main(command(chest, tmp_path / "whole", "--rounds", "3", "--with-local")) == 0
    assert local_columns(copied) == local_columns(tmp_path / "whole")
    for name in ("summary.json", "local/summary.json"):
        assert (
            read(copied / name)["weights_sha256"]
            == read(tmp_path / "whole" / name)["weights_sha256"]
        )


def test_fewer_rounds_than_the_local_reference_has_are_refused(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copied / "state")  # as if stopped before its first round
    for name in ("rounds.jsonl", "summary.json"):
        (copied / name).unlink()
    before = content(copied)
    assert cli.main(["run", "--resume", "--out", str(copied), "--rounds", "1", "--quiet"]) == 2
    assert (
        "--rounds 1; 2 rounds of the Local reference are done already; ask for at least 2"
        in error(capsys)
    )
    assert content(copied) == before


def test_what_ctrl_c_says_in_the_local_reference_is_true(
    chest: Path,
    finished: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, train = tmp_path / "run", Local.train

    def interrupted(self: Local, model: Any, site: Any, *rest: Any) -> Any:
        if site.round == 2:
            raise KeyboardInterrupt
        return train(self, model, site, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Local, "train", interrupted)
        assert cli.main(command(chest, out, "--rounds", "2", "--with-local")) == 130
    assert "; medfl run --resume --out DIR continues a run" in capsys.readouterr().err
    assert cli.main(["run", "--resume", "--out", str(out), "--jobs", "1", "--quiet"]) == 0
    assert local_columns(out) == local_columns(finished)
    assert (
        read(out / "summary.json")["weights_sha256"]
        == read(finished / "summary.json")["weights_sha256"]
    )
    assert read(out / "run.json")["run_hash"] == read(finished / "run.json")["run_hash"]
