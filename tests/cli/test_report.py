"""The verb `medfl report`: which pages it writes, and where."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from tests.support.run_folders import Make, build


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(build, tmp_path)


def report(*arguments: object) -> Any:
    options = cli.parser().parse_args(["report", *map(str, arguments), "--json"])
    return options.verb(options)


def test_each_folder_gets_its_page(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [make("a", rounds=1), make("b", rounds=1, bundle="ham10000")]
    assert report(*folders) == 0
    written = [folder / "report.html" for folder in folders]
    assert json.loads(capsys.readouterr().out) == {"reports": list(map(str, written))}
    assert all(path.is_file() for path in written)


def test_one_page_of_several_leaves_their_folders_alone(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [make("a", rounds=1), make("b", rounds=1, seed=1)]
    page = tmp_path / "pages" / "both.html"
    assert report(*folders, "--out", page) == 0
    assert json.loads(capsys.readouterr().out) == {"reports": [str(page)]}
    assert "2 runs on pneumonia" in page.read_text()
    assert not any((folder / "report.html").exists() for folder in folders)


def test_curves_without_a_scored_round_are_said_and_no_error(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make("a", rounds=2)
    picture = tmp_path / "curves.png"
    rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    without = [json.dumps({**entry, "val": {"loss": 1.0}}) for entry in rounds]
    (folder / "rounds.jsonl").write_text("\n".join(without) + "\n")
    assert report(folder, "--curves", picture) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"reports": [str(folder / "report.html")]}
    assert said.err.strip().endswith(
        "is not drawn: no round has the key metric on its validation images"
    )
    assert not picture.exists()


def test_runs_of_different_bundles_are_one_line(make: Make, tmp_path: Path) -> None:
    folders = [make("a", rounds=1), make("b", rounds=1, bundle="ham10000")]
    with pytest.raises(
        InputError,
        match="runs of different bundles: ham10000 and pneumonia; .*; write a page of each",
    ):
        report(*folders, "--out", tmp_path / "both.html")
    with pytest.raises(
        InputError,
        match="has no run.json; a folder that `medfl run` or `medfl compare` wrote",
    ):
        report(tmp_path)
