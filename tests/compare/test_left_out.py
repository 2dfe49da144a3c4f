"""`medfl compare --leave-out`: hospitals that nobody trained for."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from medfl import datasets
from medfl.cli.verbs import main
from medfl.compare import left_out
from medfl.compare.side_by_side import write_grid_page
from medfl.core.errors import InputError
from medfl.report import formatting
from medfl.report.run_files import RunFiles

SMALL = ("--config", "image_size=16", "--config", "network_name=small_cnn", "--rounds", "1")


@pytest.fixture(scope="module")
def skin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("skin") / "data"
    return datasets.write_phantom("ham10000", folder, per_class=30, size=16)


@pytest.mark.slow
def test_the_table_has_what_the_runs_have(skin: Path, tmp_path: Path) -> None:
    out = tmp_path / "grid"
    arguments = ["compare", "ham10000", "--data", str(skin), "--methods", "fedavg,local", *SMALL]
    assert main([*arguments, "--leave-out", "rosendahl", "--seeds", "0", "--out", str(out)]) == 0
    (row,) = csv.DictReader((out / "left_out.csv").read_text().splitlines())
    assert (row["hospital"], row["method"]) == ("rosendahl", "fedavg")
    values = {}
    for path in out.glob("*/*/seed-0"):
        run = RunFiles(path)
        model = "personal" if run.method == "local" else "received"
        values[run.partition, run.method] = run.site_values(model, run.key).get("rosendahl")

    assert len(values) == 3, "no hospital's own model is trained for a partition without it"
    assert float(row["left_out"]) == values["centre:rosendahl=0/all", "fedavg"]
    assert float(row["took_part"]) == values["centre", "fedavg"]
    assert float(row["own"]) == values["centre", "local"]
    assert float(row["took_part_low"]) <= float(row["took_part"]) <= float(row["took_part_high"])
    text = (out / "left_out.md").read_text()
    assert "| rosendahl |" in text
    assert "add the method local" not in text
    page = write_grid_page(out).read_text()
    assert "Hospitals left out" in page
    (line,) = re.findall("<tr><td>rosendahl.*?</tr>", page)
    for name in ("left_out", "took_part", "own"):
        assert formatting.number(float(row[name])) in line


@pytest.mark.slow
def test_a_personal_method_has_an_interval_where_it_trained_nothing(
    skin: Path, tmp_path: Path
) -> None:
    out = tmp_path / "grid"
    arguments = ["compare", "ham10000", "--data", str(skin), "--methods", "fedper,ditto", *SMALL]
    assert main([*arguments, "--leave-out", "rosendahl", "--seeds", "0", "--out", str(out)]) == 0
    rows = {
        row["method"]: row
        for row in csv.DictReader((out / "left_out.csv").read_text().splitlines())
    }
    for name in ("fedper", "ditto"):
        low, value, high = (float(rows[name][f"left_out{end}"]) for end in ("_low", "", "_high"))
        assert low <= value <= high

    text = (out / "left_out.md").read_text()
    assert "Its own model: add the method local." in text
    assert "Left out of fedper: what the server sends, with initial values" in text
    assert "Left out of ditto: the global model, for want of one of its own." in text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--leave-out", "berlin"], "no training image is of centre 'berlin'; the centres are"),
        (["--leave-out", "each"], "--leave-out each of one run; "),
        (["--leave-out", "rosendahl", "--sites", "3"], "--leave-out with --sites"),
        (["--leave-out", "rosendahl", "--partition", "iid"], "--leave-out with --partition"),
    ],
)
def test_what_a_run_cannot_leave_out(
    flags: list[str], told: str, skin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "ham10000", "--data", str(skin), *SMALL, *flags, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1
    assert not out.exists()


def test_a_run_without_a_hospital_examines_there(skin: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--leave-out", "rosendahl", "--out", str(out), "--quiet"]
    assert main(["run", "ham10000", "--data", str(skin), *SMALL, *flags]) == 0
    run = RunFiles(out)
    assert run.partition == "centre:rosendahl=0/all"
    assert run.size("rosendahl", "train") == 0
    assert "rosendahl" in run.site_values("received", run.key)
    assert "rosendahl" not in run.rounds[0]["cohort"]

    held = json.loads((out / "run.json").read_text())["partition"]["sites"]
    validates = {site: len(ids["validate"]) for site, ids in held.items() if ids["validate"]}
    assert "rosendahl" not in validates
    (line,) = run.rounds
    right = 0.0
    for site, number in validates.items():
        right += number * line["sites"][site]["received"]["accuracy"]

    told = "a hospital that was left out chooses no round"
    assert line["val"]["accuracy"] == pytest.approx(right / sum(validates.values())), told


def test_everybody_and_one_without_each(skin: Path) -> None:
    found = left_out.partitions("ham10000", "each", data=str(skin))
    assert found[0] == "centre"
    assert len(found) == 5
    assert "centre:rosendahl=0/all" in found


@pytest.mark.parametrize(
    ("bundle", "wanted", "told"),
    [
        ("ham10000", "rosendal", "--leave-out rosendal; the centres are .*rosendahl"),
        ("pneumonia", "each", "--leave-out each of one centre"),
    ],
)
def test_a_centre_that_nobody_has(bundle: str, wanted: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        left_out.partitions(bundle, wanted, data="phantom")


def test_one_of_two_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "ham10000", "--data", "phantom", "--methods", "fedavg"]
    both = ["--leave-out", "each", "--partition", "iid", "--out", str(tmp_path / "grid")]
    assert main([*arguments, *both]) == 2
    assert "--leave-out with --partition" in capsys.readouterr().err


def test_the_advice_on_local_is_given_where_no_hospital_has_a_model_of_its_own() -> None:
    """A hospital without test images has none, whichever methods were compared."""
    untested = left_out.LeftOut("north", "fedavg", 0, None, None, None, "")
    own = left_out.LeftOut("south", "fedavg", 9, None, None, left_out.Score(0.5, None), "")
    advice = "Its own model: add the method local."
    assert advice in left_out.notes([untested])
    assert advice not in left_out.notes([untested, own])


def test_why_a_hospital_has_no_score_is_said() -> None:
    score = left_out.Score(0.5, None)
    scored = left_out.LeftOut("south", "fedavg", 40, score, score, score, "")
    unscored = left_out.LeftOut("north", "fedavg", 12, None, None, None, "")
    assert not any(note.startswith("–: ") for note in left_out.notes([scored]))
    assert any(note.startswith("–: ") for note in left_out.notes([scored, unscored]))
