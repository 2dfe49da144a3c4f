"""Grids of runs: what is missing is run, what failed is told, and a run of a grid is the run it would be alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from medfl import cli, datasets
from medfl.compare import Cell, Entry, _next, remaining
from medfl.errors import InputError

SMALL = (
    "--config", "network=small_cnn", "--config", "image_size=16", "--sites", "3", "--rounds", "2",
    "--local-epochs", "1", "--batch-size", "8",
)  # fmt: skip


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom("mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=16)


def compare(scans: Path, out: Path, *arguments: str) -> int:
    return cli.main(["compare", "mednist", "--data", str(scans), "--out", str(out), *SMALL, *arguments])


def summary(out: Path, method: str, seed: int, partition: str = "iid") -> dict:
    return json.loads((out / partition / method / f"seed-{seed}" / "summary.json").read_text())


def test_a_grid_runs_resumes_and_writes_tables(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, grid = tmp_path / "grid", ("--methods", "fedavg,local", "--partition", "iid", "--seeds", "0,1")
    assert compare(scans, out, *grid) == 0
    told = capsys.readouterr()
    assert "4 runs, 0 of them there already" in told.err
    assert told.err.count("done: ") == 4
    assert told.out.splitlines()[-1] == "PHANTOM data, drawn by a program: mednist"
    for name in ("results.csv", "tables.md", "tables.tex", "compare.json", "curves.png"):
        assert (out / name).stat().st_size > 0
    assert len((out / "results.csv").read_text().splitlines()) == 5

    # the same run as alone, bit for bit
    alone = ["run", "mednist", "--data", str(scans), "--out", str(tmp_path / "alone"), *SMALL, "--partition", "iid"]
    assert cli.main([*alone, "--method", "fedavg", "--seed", "1"]) == 0
    mine, theirs = summary(out, "fedavg", 1), json.loads((tmp_path / "alone" / "summary.json").read_text())
    assert (mine["run_hash"], mine["weights_sha256"]) == (theirs["run_hash"], theirs["weights_sha256"])
    capsys.readouterr()

    # again with one run gone and a method more: only these are run
    shutil.rmtree(out / "iid" / "local" / "seed-1")
    kept = (out / "iid" / "fedavg" / "seed-0" / "summary.json").stat().st_mtime_ns
    assert compare(scans, out, *grid, "--method", "fedprox mu=0.5", "--against", "local") == 0
    told = capsys.readouterr()
    assert "6 runs, 3 of them there already" in told.err
    assert (out / "iid" / "fedavg" / "seed-0" / "summary.json").stat().st_mtime_ns == kept
    assert "| fedprox" in told.out
    assert "| fedavg   | local" in told.out

    # other settings belong into another folder
    assert compare(scans, out, *grid, "--lr", "0.5") == 2
    assert "requested" in capsys.readouterr().err


def test_a_run_that_fails_stops_no_other(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "grid"
    grid = ("--methods", "fedprox,fedavg", "--partition", "iid", "--seeds", "0", "--jobs", "2")
    assert compare(scans, out, "--methods", "local", "--partition", "iid", "--seeds", "0") == 0
    broken = out / "iid" / "fedprox" / "seed-0"
    broken.mkdir(parents=True)
    (broken / "run.json").write_text("{")
    assert compare(scans, out, *grid) == 1
    told = capsys.readouterr()
    assert "done: fedavg on iid, seed 0" in told.err
    assert "FAILED: fedprox on iid, seed 0: " in told.err
    assert "run.json" in told.err
    assert "| fedavg" in told.out
    assert "FAILED: fedprox on iid" in told.out
    assert "fedprox" not in (out / "results.csv").read_text()
    assert cli.main(["compare", "mednist", "--data", str(scans), "--out", str(out), *SMALL, *grid, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert list(document["failed"]) == ["fedprox on iid, seed 0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no methods"),
        (("--methods", "nosuch"), "method 'nosuch'"),
        (("--methods", "fedavg", "--seeds", "a"), "--seeds a; whole numbers, as 0,1,2"),
        (("--method", "fedprox mu"), "'mu' in method 'fedprox mu'; NAME OPTION=VALUE ..."),
        (("--method", "fedprox nu=1"), "option 'nu' of method 'fedprox'"),
        (("--methods", "fedavg", "--partition", "dirichlet"), "dirichlet"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    scans: Path, tmp_path: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(scans, tmp_path / "grid", *arguments) == 2
    (last,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in last
    assert not (tmp_path / "grid").exists()


def test_a_folder_with_something_else_is_refused(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert compare(scans, tmp_path, "--methods", "fedavg") == 2
    assert "a new folder, or one of an earlier comparison" in capsys.readouterr().err


def test_an_entry_reads_options_as_a_shell_does() -> None:
    entry = Entry.read("fedhelp large='a, b' top=1")
    assert (entry.method, entry.options) == ("fedhelp", {"large": "a, b", "top": "1"})
    with pytest.raises(InputError, match="NAME OPTION=VALUE"):
        Entry.read("fedhelp large='a")


def cell(out: Path, method: str, seed: int) -> Cell:
    return Cell(Entry.read(method), None, seed, out / method / str(seed))


def test_the_longest_run_of_a_seed_comes_first_and_one_of_which_nothing_is_known_before_it(tmp_path: Path) -> None:
    left = [cell(tmp_path, method, seed) for seed in (0, 1) for method in ("fedavg", "scaffold", "fedprox")]
    assert _next(left, {}).entry.method == "fedavg"
    took = {("fedavg", None): 5.0, ("scaffold", None): 9.0}
    order = []
    while left:
        chosen = _next(left, took)
        left.remove(chosen)
        order.append((chosen.entry.method, chosen.seed))
        took.setdefault(chosen.kind, 7.0)
    assert order == [
        ("fedprox", 0), ("scaffold", 0), ("fedavg", 0), ("scaffold", 1), ("fedprox", 1), ("fedavg", 1),
    ]  # fmt: skip


def test_the_time_that_is_left_counts_what_runs_and_what_waits(tmp_path: Path) -> None:
    fedavg, scaffold = cell(tmp_path, "fedavg", 0), cell(tmp_path, "scaffold", 0)
    assert remaining([fedavg], [], {}, 2) is None
    took = {fedavg.kind: 10.0, scaffold.kind: 30.0}
    assert remaining([fedavg, fedavg], [(scaffold, 10.0)], took, 2) == 20.0  # (10 + 10 + 20) / 2
    assert remaining([], [(scaffold, 5.0), (fedavg, 50.0)], took, 2) == 25.0  # no run is shared between workers
    unknown = cell(tmp_path, "fedprox", 0)
    assert remaining([unknown], [], took, 1) == 20.0
