"""Each structure's figures in the table of a run, its page, and in a cross-validation's."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path

import pytest

from medfl.report import RunFiles, folds, result_table
from tests.support.run_folders import Make, build, render

COLUMNS = ["id", "site", "dice", "dice_liver", "dice_tumour", "hd95_liver", "hd95_tumour"]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(build, tmp_path)


def segmented(
    make: Make, name: str, tumours: list[float | str], classes: dict[str, dict[str, float | None]]
) -> Path:
    """A run whose cases all have a liver of Dice 0.5 and HD95 2, and a tumour of these, "" where they have none."""
    folder = make(name, rounds=1, sites=["site-1"], task="segmentation", key_metric="dice")
    run = json.loads((folder / "run.json").read_text()) | {"classes": [], "site_class_counts": {}}
    (folder / "run.json").write_text(json.dumps(run))
    for file in ("summary.json", "rounds.jsonl", "sites.csv"):
        (folder / file).write_text((folder / file).read_text().replace("balanced_accuracy", "dice"))
    summary = json.loads((folder / "summary.json").read_text())
    own = {"dice_liver": 0.5, "dice_tumour": 0.25, "dice_tumour_cases": 2.0}
    summary["last"] |= {"classes": classes, **own}
    summary["global"]["last"] |= {"classes": classes, **own}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [
        [f"{name}-{i}", "site-1", 0.5, 0.5, one, 2, 4 if one != "" else ""]
        for i, one in enumerate(tumours)
    ]
    with (folder / "predictions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return folder


def test_a_run_tells_each_structure_and_how_many_cases_have_it(make: Make) -> None:
    classes = {
        "liver": {"dice": 0.5, "hd95": 2.0, "cases": 10}, "tumour": {"dice": 0.25, "hd95": 4.0, "cases": 2},
        "cyst": {"dice": None, "hd95": None, "cases": 0},
    }  # fmt: skip
    folder = segmented(make, "run", [0.1, 0.4, *[""] * 8], classes)
    lines = result_table(folder).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("structure, global last"))
    assert lines[start].split() == [
        "structure,",
        "global",
        "last",
        "with",
        "it",
        "Dice",
        "HD95",
        "(mm",
        "or",
        "pixels)",
    ]
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["liver", "10", "0.500", "2.000"],
        ["tumour", "2", "0.250", "4.000"],
        ["cyst", "0", "no", "test", "case", "has", "it"],
    ]
    assert lines[start + 4] == "each structure's figures are of the cases whose reference has it"
    assert "dice_tumour" not in "\n".join(lines)
    assert not any("tumour" in name for name in RunFiles(folder).metric_names())
    _, page = render(folder)
    words = " ".join(page.text.split())
    assert "tumour20.250each: 0.100 · 0.4004.000each: 4.000 · 4.000" in words
    assert "liver100.500–2.000–" in words, "ten equal cases: no interval has a width"
    assert "cyst0no test case has it" in words


def test_of_many_structures_the_table_has_the_worst(make: Make) -> None:
    classes = {f"organ {i}": {"dice": i / 20, "cases": 10} for i in range(20)}
    lines = result_table(segmented(make, "run", [0.5], classes)).splitlines()
    listed = [line.split()[1] for line in lines if line.startswith("organ ")]
    assert listed == [str(i) for i in range(12)]
    assert "… 8 more structures are in summary.json" in lines


def test_a_cross_validation_joins_folds_of_which_one_has_no_tumour(
    make: Make, tmp_path: Path
) -> None:
    names: dict[str, dict[str, float | None]] = {
        name: {"dice": 0.5, "cases": 2} for name in ("liver", "tumour")
    }
    for name, tumours in (("fold-1", ["", ""]), ("fold-2", [0.2, 0.4, ""])):
        segmented(make, name, tumours, names)
    record = {
        "folds": 2, "bundle": "b", "options": {}, "config": {}, "requested": {}, "settings": {}, "images": ["x", "y"],
        "command": "medfl run",
    }  # fmt: skip
    (tmp_path / folds.FOLDS).write_text(json.dumps(record))
    found = folds.write(tmp_path)
    expected = {
        "liver": {"dice": 0.5, "hd95": 2.0, "cases": 5},
        "tumour": {"dice": 0.3, "hd95": 4.0, "cases": 2},
    }
    stored = json.loads((tmp_path / "summary.json").read_text())["last"]["classes"]
    assert found.structures["tumour"] == pytest.approx(expected["tumour"])
    assert stored == found.structures
    assert stored["liver"] == expected["liver"]
    assert "structure, pooled" in found.text()
    assert "tumour" in (tmp_path / "report.html").read_text()
