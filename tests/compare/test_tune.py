"""`medfl tune`: trials are validated and not tested, the best is tested once, and a kill changes nothing of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import medfl
from medfl import datasets
from medfl.cli import verbs as cli
from medfl.compare import search
from medfl.compare.grid import Grid
from medfl.compare.tune import tune
from medfl.core.errors import InputError, RunError
from medfl.runs.launch import federate
from medfl.runtimes.launch import Launch
from medfl.runtimes.server.scoring import Scoring
from tests.support.programs import python_path

CONFIG = {"network": "small_cnn", "image_size": 16}
SMALL = (
    "--config",
    "network=small_cnn",
    "--config",
    "image_size=16",
    "--sites",
    "2",
    "--rounds",
    "1",
)
GRID = ("--grid", "mu=0.01,1", "--grid", "lr=0.0001,0.01")


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=16
    )


def call(scans: Path, out: Path, *words: str, verb: str = "tune") -> int:
    return cli.main([verb, "mednist", "--data", str(scans), *SMALL, "--out", str(out), *words])


@pytest.fixture(scope="module")
def done(scans: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "fedprox"
    assert call(scans, out, "--method", "fedprox", *GRID, "--jobs", "1") == 0
    return out


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def trials(out: Path) -> dict[str, dict[str, Any]]:
    return {path.parents[1].name: read(path) for path in out.glob("*/*/seed-0/trial.json")}


def test_the_best_validation_figure_wins_and_only_it_is_tested(done: Path) -> None:
    best, found = read(done / "best.json"), trials(done)
    key, figures = best["metric"], [one["best"][best["metric"]] for one in found.values()]
    assert (best["method"], best["trials"], key) == ("fedprox", 4, "balanced_accuracy")
    assert best["validation"] == max(figures) > min(figures)
    assert [one["settings" if "settings" in one else "options"] for one in best["tried"][:2]] == [
        {"mu": "0.01"}, {"mu": "0.01"},
    ]  # fmt: skip
    tested = [path for path in done.rglob("summary.json")]
    assert [path.relative_to(done).parts[0] for path in tested] == ["best"]
    assert not [
        path
        for name in ("predictions.csv", "sites.csv")
        for path in done.glob(f"[!b]*/*/seed-0/{name}")
    ]
    record = read(tested[0].with_name("run.json"))
    assert str(record["options"]["mu"]) == best["settings"]["options"]["mu"]
    assert record["lr"] == best["settings"]["requested"]["lr"]
    winner = next(one for one in found.values() if one["best"][key] == best["validation"])
    assert read(tested[0])["run_hash"] == winner["run_hash"]


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_a_trial_scores_no_test_item_and_can_be_tested_later(
    scans: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"method": method, "data": str(scans), "sites": 2, "rounds": 2}
    whole = federate("mednist", config=CONFIG, requested=asked, out=tmp_path / "whole", jobs=1)
    looked: list[str] = []
    for name, place in (("_global", 1), ("_personal", 2)):
        before = getattr(Scoring, name)

        def seen(self: Any, *given: Any, before: Any = before, place: int = place) -> Any:
            looked.extend([given[place]] if isinstance(given[place], str) else given[place])
            return before(self, *given)

        monkeypatch.setattr(Scoring, name, seen)
    trial = federate(
        "mednist", config=CONFIG, requested=asked, out=tmp_path / "trial", jobs=1, untested=True
    )
    assert set(looked) == {"validate"}
    assert trial["run_hash"] == whole["run_hash"]
    assert not (tmp_path / "trial" / "summary.json").exists()
    later = federate(out=tmp_path / "trial", resume=True, jobs=1)
    assert later["weights_sha256"] == whole["weights_sha256"]
    assert later["last"] == whole["last"]


def test_a_search_that_was_cut_off_goes_on_to_the_same_winner(
    scans: Path, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(done, tmp_path / "cut")
    first, *_, last = sorted(path.parent for path in out.glob("*/*/seed-0/trial.json"))
    shutil.rmtree(out / "best")
    shutil.rmtree(first)
    for name in (
        "best.json",
        last.relative_to(out) / "trial.json",
    ):  # as where it was killed before its end
        (out / name).unlink()
    assert call(scans, out, "--method", "fedprox", *GRID, "--jobs", "1") == 0
    assert "4 runs, 2 of them there already" in capsys.readouterr().err
    assert read(out / "best.json") == read(done / "best.json")
    hashes = [
        read(next(place.glob("best/**/summary.json")))["weights_sha256"] for place in (done, out)
    ]
    assert hashes[0] == hashes[1]
    assert call(scans, out, "--method", "fedprox", "--grid", "mu=0.01,2") == 2
    assert "grid mu=0.01,1 lr=0.0001,0.01" in capsys.readouterr().err


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on_to_the_same_winner(
    scans: Path, done: Path, tmp_path: Path
) -> None:
    out, given = tmp_path / "killed", ("--method", "fedprox", *GRID, "--jobs", "1")
    words = ["tune", "mednist", "--data", str(scans), *SMALL, "--out", str(out), *given, "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-m", "medfl", *words], env={**os.environ, "PYTHONPATH": python_path()}
    )
    while not trials(out):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert not (out / "best.json").exists()
    assert call(scans, out, *given) == 0
    assert read(out / "best.json") == read(done / "best.json")


def test_a_comparison_takes_the_settings_and_says_how_many_trials(
    scans: Path, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--tuned",
        str(done.parent),
        "--methods",
        "fedavg,fedprox",
        "--seeds",
        "0",
        "--jobs",
        "1",
    )
    assert call(scans, tmp_path / "grid", *words, verb="compare") == 0
    best = read(done / "best.json")["settings"]
    label = f"fedprox mu={best['options']['mu']} lr={best['requested']['lr']}"
    assert (
        f"fedavg: settings chosen in 0 trials\n{label}: settings chosen in 4 trials\n"
        in capsys.readouterr().out
    )
    records = [read(path) for path in (tmp_path / "grid").rglob("run.json")]
    lr = {record["method"]: record["lr"] for record in records}
    assert lr["fedprox"] == best["requested"]["lr"]
    assert lr["fedavg"] != lr["fedprox"] or best["requested"]["lr"] == 0.001
    mu = next(record["options"]["mu"] for record in records if record["method"] == "fedprox")
    assert mu == float(best["options"]["mu"])


def test_in_python_it_is_the_same_search(scans: Path, done: Path) -> None:
    asked = {"config": CONFIG, "data": str(scans), "sites": 2, "rounds": 1, "say": str}
    grid = {"mu": [0.01, 1], "lr": [0.0001, 0.01]}
    best = medfl.tune("mednist", "fedprox", grid, out=done, jobs=1, **asked)
    assert best["validation"] == read(done / "best.json")["validation"]
    with pytest.raises(InputError, match="mu=0.01,2"):
        medfl.tune("mednist", "fedprox", {"mu": [0.01, 2]}, out=done, **asked)


def test_some_of_the_combinations_are_drawn_by_the_seed() -> None:
    values = search.parse_grid(["mu=1,2,3", "lr=0.1,0.2,0.3"])
    drawn = [[one.label for one in search.trials("fedprox", values, 4, seed)] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 4
    assert len(search.trials("fedprox", values, None, 0)) == 9


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("{", "tune anew"),
        ({}, "lacks entries"),
        (
            {"method": "fedprox", "trials": 3, "settings": {"options": {"mu": 1}, "requested": {}}},
            "under settings.options",
        ),
        (
            {"method": "stranger.code", "trials": 3, "settings": {"options": {}, "requested": {}}},
            "a file brings no code",
        ),
        (
            {
                "method": "fedprox",
                "trials": 3,
                "settings": {"options": {}, "requested": {"lr": -1}},
            },
            "--lr -1",
        ),
        (
            {
                "method": "fedprox",
                "trials": 3,
                "settings": {"options": {}, "requested": {"seed": 1}},
            },
            "settings.requested",
        ),
    ],
)
def test_what_a_folder_says_is_checked(document: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "best.json").write_text(
        document if isinstance(document, str) else json.dumps(document)
    )
    with pytest.raises(InputError, match=said):
        search.tuned_entries(tmp_path)


def test_no_trial_that_could_be_validated_is_an_error(scans: Path, tmp_path: Path) -> None:
    entries = search.trials("fedprox", {"lr": ("1e30",)}, None, 0)
    asked = {"data": str(scans), "sites": 2, "rounds": 1, "method": "fedprox"}
    grid = Grid("mednist", entries, seeds=(0,), config=CONFIG, requested=asked, search="lr=1e30")
    with pytest.raises(RunError, match="no trial was validated: "):
        tune(grid, Launch(out=tmp_path / "out", jobs=1))
    assert not (tmp_path / "out" / "best.json").exists()
