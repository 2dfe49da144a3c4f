"""Grids of runs: what is missing is run, what failed is told, and a run of a grid is the run it would be alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import medfl
from medfl import datasets
from medfl.bundle.files import shipped_folders
from medfl.cli import verbs as cli
from medfl.compare import checks, grid
from medfl.compare.search import Entry
from medfl.core.errors import InputError
from tests.support.programs import python_path

SMALL = (
    "--config", "network=small_cnn", "--config", "image_size=16", "--sites", "3", "--rounds", "2",
    "--local-epochs", "1", "--batch-size", "8",
)  # fmt: skip


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=16
    )


def compare(scans: Path, out: Path, *arguments: str) -> int:
    return cli.main(
        ["compare", "mednist", "--data", str(scans), "--out", str(out), *SMALL, *arguments]
    )


def summary(out: Path, method: str, seed: int, partition: str = "iid") -> dict:
    return json.loads((out / partition / method / f"seed-{seed}" / "summary.json").read_text())


def test_a_grid_runs_resumes_and_writes_tables(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, grid = (
        tmp_path / "grid",
        ("--methods", "fedavg,local", "--partition", "iid", "--seeds", "0,1"),
    )
    assert compare(scans, out, *grid) == 0
    told = capsys.readouterr()
    assert "4 runs, 0 of them there already" in told.err
    assert told.err.count("done: ") == 4
    assert told.out.splitlines()[-1] == "PHANTOM data, drawn by a program: mednist"
    for name in ("results.csv", "tables.md", "tables.tex", "compare.json", "curves.png"):
        assert (out / name).stat().st_size > 0
    assert len((out / "results.csv").read_text().splitlines()) == 5

    # the same run as alone, bit for bit
    alone = [
        "run",
        "mednist",
        "--data",
        str(scans),
        "--out",
        str(tmp_path / "alone"),
        *SMALL,
        "--partition",
        "iid",
    ]
    assert cli.main([*alone, "--method", "fedavg", "--seed", "1"]) == 0
    mine, theirs = (
        summary(out, "fedavg", 1),
        json.loads((tmp_path / "alone" / "summary.json").read_text()),
    )
    assert (mine["run_hash"], mine["weights_sha256"]) == (
        theirs["run_hash"],
        theirs["weights_sha256"],
    )
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
    assert compare(scans, out, *grid, "--lr", "0.5", "--set", "mu=1") == 2
    assert (
        f"--out {out} with lr 0.5, --set mu 1; the comparison there has lr not set"
        in capsys.readouterr().err
    )
    for name in ("tables.md", "tables.tex"):
        assert (out / name).read_text().count("PHANTOM data, drawn by a program: mednist") == 4, (
            "at every table"
        )


def test_what_has_changed_since_is_told_before_anything_runs(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "data", tmp_path / "grid"
    shutil.copytree(scans, data)
    grid = ("--methods", "fedavg", "--partition", "iid", "--rounds", "1")
    assert compare(data, out, *grid, "--seeds", "0") == 0
    record = out / "iid" / "fedavg" / "seed-0" / "run.json"
    run, before = json.loads(record.read_text()), record.read_text()
    record.write_text(json.dumps({**run, "bundle_sha256": "0" * 64}))
    assert compare(data, out, *grid, "--seeds", "0,1") == 2
    assert "error: bundle " in capsys.readouterr().err
    record.write_text(before)
    (data / "PHANTOM.json").unlink()  # now they are real, as far as can be told
    assert compare(data, out, *grid, "--seeds", "0,1") == 2
    assert f"error: images real, and phantom in {record.parent}; " in capsys.readouterr().err
    assert not record.parent.with_name("seed-1").exists()


@pytest.mark.parametrize("place", ["seed-1", "seed-1-log.txt", "", "pipe"])
def test_nothing_is_written_by_way_of_a_link_in_a_comparison_s_folder(
    scans: Path, tmp_path: Path, place: str
) -> None:
    """Of a folder that somebody has sent, to be gone on with."""
    out, precious = tmp_path / "grid", tmp_path / "precious"
    precious.mkdir()
    methods = out / "iid" / "fedavg"
    if not place:
        out.mkdir()
        (out / "iid").symlink_to(precious)
    else:
        methods.mkdir(parents=True)
        if place == "pipe":
            os.mkfifo(methods / "seed-1-log.txt")
        else:
            (methods / place).symlink_to(precious / "new")

    (out / "compare.json").write_text("{}")
    cell = grid.Cell(None, "iid", 1, methods / "seed-1", False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is a link or a pipe"):
        checks.check_places(out, (cell.folder, cell.beside("log")))

    assert list(precious.iterdir()) == []


def test_a_comparison_that_goes_on_looks_where_it_writes(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, precious = tmp_path / "grid", tmp_path / "precious.txt"
    precious.write_text("as it was")
    arguments = ("--methods", "fedavg", "--partition", "iid", "--rounds", "1", "--seeds")
    assert compare(scans, out, *arguments, "0") == 0
    (out / "iid" / "fedavg" / "seed-1-log.txt").symlink_to(precious)
    assert compare(scans, out, *arguments, "0,1") == 2
    assert "seed-1-log.txt is a link or a pipe" in capsys.readouterr().err
    assert precious.read_text() == "as it was"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--against", "fedpox"),
            "--against fedpox; methods are fedavg, fedprox; did you mean fedprox? ",
        ),
        (("--against", "scaffold"), "--against scaffold; methods are fedavg, fedprox; choose one"),
        (
            ("--target", "fedavgg"),
            "--target fedavgg; a number, or one of fedavg, fedprox; did you mean fedavg? ",
        ),
        (("--target", "nan"), "--target nan; a number"),
    ],
)
def test_what_tables_cannot_be_made_against_is_refused_before_any_run(
    scans: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    told: str,
) -> None:
    out = tmp_path / "grid"
    assert compare(scans, out, "--methods", "fedavg,fedprox", "--seeds", "0", *flags) == 2
    assert f"error: {told}" in capsys.readouterr().err
    assert not out.exists()


def test_variants_of_a_method_are_known_by_their_labels(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the tables name them: with the options in which they differ."""
    variants = ("--method", "fedprox mu=0.1", "--method", "fedprox mu=0.5", "--seeds", "0")
    assert compare(scans, tmp_path / "grid", *variants, "--against", "fedprox") == 2
    assert "methods are fedprox mu=0.1, fedprox mu=0.5;" in capsys.readouterr().err
    assert (
        compare(scans, tmp_path / "grid", *variants, "--rounds", "1", "--against", "fedprox mu=0.5")
        == 0
    )


@pytest.mark.parametrize(
    ("name", "told"), [("file", "file exists and is not empty"), ("file/below", "cannot be made")]
)
def test_out_that_is_no_folder(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    (tmp_path / "file").write_text("dear")
    assert compare(scans, tmp_path / name, "--methods", "fedavg", "--seeds", "0") == 2
    assert told in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "dear"


def test_every_setting_of_a_grid_reaches_its_runs(scans: Path, tmp_path: Path) -> None:
    settings = {
        "sites": 3,
        "rounds": 1,
        "local_epochs": 1,
        "batch_size": 8,
        "aggregation": "median",
        "messages": "int8",
    }
    config = {"network": "small_cnn", "image_size": 16}
    medfl.compare(
        "mednist", ["fedavg"], out=tmp_path, seeds=(0,), partitions=("iid",), config=config, data=scans, say=str,
        jobs=1, **settings,
    )  # fmt: skip
    run = json.loads((tmp_path / "iid" / "fedavg" / "seed-0" / "run.json").read_text())
    assert {name: run[name] for name in ("rounds", "aggregation", "messages")} == {
        name: settings[name] for name in ("rounds", "aggregation", "messages")
    }


@pytest.mark.slow
def test_a_killed_grid_leaves_no_run_behind_and_goes_on(scans: Path, tmp_path: Path) -> None:
    """SIGKILL cannot be caught, so the runs themselves notice that nobody waits for them."""
    out = tmp_path / "grid"
    arguments = [
        "compare",
        "mednist",
        "--data",
        str(scans),
        "--out",
        str(out),
        *SMALL,
        "--rounds",
        "40",
        "--quiet",
    ]
    arguments += [
        "--methods",
        "fedavg,fedprox",
        "--partition",
        "iid",
        "--seeds",
        "0",
        "--jobs",
        "2",
    ]
    started = subprocess.Popen(
        [sys.executable, "-m", "medfl", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": python_path(),
            "MEDFL_TESTS_WARM": "/nowhere",
        },  # its own children are counted
    )
    folders = [out / "iid" / method / "seed-0" for method in ("fedavg", "fedprox")]
    _until(lambda: all((path / "rounds.jsonl").is_file() for path in folders))
    runs = [
        int(pid)
        for pid in Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    ]
    assert len(runs) >= 2
    started.kill()
    started.wait()
    _until(lambda: not any(_works(pid) for pid in runs))
    assert not any((path / "summary.json").is_file() for path in folders)
    assert cli.main(arguments) == 0
    assert all(json.loads((path / "summary.json").read_text())["rounds"] == 40 for path in folders)


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _works(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_that_fails_stops_no_other(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert (
        cli.main(
            ["compare", "mednist", "--data", str(scans), "--out", str(out), *SMALL, *grid, "--json"]
        )
        == 1
    )
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
    scans: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
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


@pytest.mark.slow
def test_a_program_with_threads_compares_a_bundle_that_is_not_shipped(tmp_path: Path) -> None:
    """Its first step is tried before the runs are forked: with several threads of OpenMP these once hung."""
    bundle = tmp_path / "foreign"
    shutil.copytree(shipped_folders()["mednist"], bundle, ignore=shutil.ignore_patterns("models"))
    data = datasets.write_phantom("mednist", tmp_path / "data", per_class=10, size=16)
    command = [
        sys.executable, "-m", "medfl", "compare", str(bundle), f"--data={data}", "--methods=fedavg,local",
        "--seeds=0", "--sites=2", "--rounds=1", "--config=image_size=16", "--out=grid", "--jobs=2",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "grid" / "tables.md").is_file()
