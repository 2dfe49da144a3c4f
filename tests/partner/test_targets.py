"""`medfl data check`, `site check` and `site stats` of findings and numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medfl.bundle.bundle import Bundle
from medfl.cli import verbs as cli
from medfl.core.errors import InputError
from medfl.partner.case_findings import Findings
from medfl.partner.scanning import scan, sections
from medfl.partner.statistics import UNRECORDED, StatisticsOptions, gather, text
from medfl.runtimes.monai_fl.data_stats import Bins
from medfl.starter import starter
from tests.policy.test_gate import repeated
from tests.starter.test_findings_and_numbers import COUNT, drawn

BINS = Bins(4, -2, 2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn(tmp_path_factory.mktemp("drawn") / "data")


@pytest.fixture(scope="module")
def folders(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    tables = {"multilabel": "findings.csv", "regression": "sizes.csv"}
    return {
        task: starter.write(
            folder / task, starter.survey(data / "images", labels=data / name), size=24
        )
        for task, name in tables.items()
    }


def opened(folder: Path, data: Path) -> Bundle:
    return Bundle(str(folder), {"dataset_dir": str(data)})


def targets(bundle: Bundle, section: str) -> Any:
    return np.array([item["target"] for item in bundle.items(section)], np.float64)


def lines(bundle: Bundle) -> list[str]:
    found = Findings(bundle)
    for section in sections(bundle):
        for item in scan(bundle, section):
            found.add(item)

    return [f"{line.level}: {line.text}" for line in found.lines() if line.topic == "labels"]


def test_data_check_counts_findings_and_numbers(
    folders: dict[str, Path], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(["data", "check", str(folders["multilabel"]), "--data", str(data), "--json"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert (document["images"], document["classes"]) == (COUNT, ["cases"])
    assert document["counts"]["train"].keys() == {"a", "b"}
    assert {
        "bar: 30 present, 30 absent, 0 unknown",
        "spot: 18 present, 36 absent, 6 unknown",
    } <= set(document["notes"])
    assert "30 patients, each in one section" in document["notes"]
    assert (
        cli.main(["data", "check", str(folders["regression"]), "--data", str(data), "--json"]) == 0
    )
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "radius_mm: 60 known, mean 5.95, sd 1.732, 3 to 8.9" in notes


def test_site_check_says_what_is_known(folders: dict[str, Path], data: Path) -> None:
    assert lines(opened(folders["multilabel"], data)) == [
        "ok: bar: 30 present, 30 absent, 0 unknown", "ok: spot: 18 present, 36 absent, 6 unknown"
    ]  # fmt: skip
    assert lines(opened(folders["regression"], data)) == [
        "ok: radius_mm: 60 known, mean 5.95, sd 1.732, 3 to 8.9"
    ]


def elsewhere(data: Path, folder: Path, name: str, change: Any) -> Path:
    """Return the images with another site's table."""
    folder.mkdir()
    (folder / "images").symlink_to(data / "images")
    head, *rows = (data / name).read_text().splitlines()
    (folder / name).write_text("\n".join([head, *(change(row) for row in rows)]) + "\n")
    return folder


def test_site_check_names_what_is_odd(folders: dict[str, Path], data: Path, tmp_path: Path) -> None:
    def without_bar(row: str) -> str:
        cells = row.split(",")
        return ",".join([*cells[:3], "0", cells[4]])

    def in_micron(row: str) -> str:
        cells = row.split(",")
        value = 1000 * float(cells[3]) * (100 if cells[0] == "07" else 1)
        return ",".join([*cells[:3], f"{value:.0f}"])

    site = elsewhere(data, tmp_path / "a", "findings.csv", without_bar)
    assert "warning: no image has 'bar'" in lines(opened(folders["multilabel"], site))
    said = lines(
        opened(folders["regression"], elsewhere(data, tmp_path / "b", "sizes.csv", in_micron))
    )
    assert any(
        line.startswith("warning: the median of radius_mm is 6050, in the bundle it is ")
        for line in said
    )
    assert "warning: radius_mm unlike the others: 07.png" in said


def test_all_unknown_at_a_site_is_refused(
    folders: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    def unknown(row: str) -> str:
        return ",".join([*row.split(",")[:3], "", ""])

    site = elsewhere(data, tmp_path / "a", "findings.csv", unknown)
    with pytest.raises(InputError, match="nothing is known of any image"):
        opened(folders["multilabel"], site).items("train")


@pytest.mark.parametrize("least", [0, 10])
def test_statistics_of_findings(folders: dict[str, Path], data: Path, least: int) -> None:
    bundle = opened(folders["multilabel"], data)
    document = gather(bundle, "", StatisticsOptions(BINS, min_count=least))
    for section, part in document["sections"].items():
        table = targets(bundle, section)
        if len(table) < least:
            assert part["images"] is None
            continue

        for k, name in enumerate(bundle.classes):
            cells = part["tables"][f"finding {name}"]
            true = {
                "present": int((table[:, k] == 1).sum()),
                "absent": int((table[:, k] == 0).sum()),
            }
            if unknown := int(np.isnan(table[:, k]).sum()):
                true[UNRECORDED] = unknown

            assert cells.keys() == true.keys()
            if not least:
                assert cells == true
            assert all(
                count is None or count == true[cell] >= least for cell, count in cells.items()
            )

    if least:
        assert document["sections"]["train"]["tables"]["finding spot"][UNRECORDED] is None

    assert any("finding spot" in line for line in text(document))


def test_statistics_of_numbers(folders: dict[str, Path], data: Path) -> None:
    bundle = opened(folders["regression"], data)
    part = gather(bundle, "", StatisticsOptions(BINS, min_count=0))["sections"]["train"]
    table = targets(bundle, "train")
    assert part["numbers"] == {
        "radius_mm": {"mean": float(f"{table.mean():.4g}"), "sd": float(f"{table.std():.4g}")}
    }
    cells = part["tables"]["number radius_mm"]
    assert sum(cells.values()) == len(table)
    mean, sd = table.mean(), table.std()
    expected = np.histogram(
        table, [-math.inf, *(float(f"{mean + sd * k:.4g}") for k in (-2, -1, 0, 1, 2)), math.inf]
    )[0]
    assert [*cells.values()] == [*expected]

    hidden = gather(bundle, "", StatisticsOptions(BINS, min_count=11))["sections"]
    assert hidden["validate"] == {"images": None, "tables": {}, "intensity": None}
    assert all(
        count is None or count >= 11
        for count in hidden["train"]["tables"]["number radius_mm"].values()
    )
    assert "mean" in "".join(text(gather(bundle, "", StatisticsOptions(BINS, min_count=10))))


@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_with_noise_nothing_but_preset_cells_is_told(
    task: str, folders: dict[str, Path], data: Path
) -> None:
    bundle = opened(folders[task], data)
    options = StatisticsOptions(BINS, min_count=0, epsilon=0.5, entropy=repeated(0))
    part = gather(bundle, "", options)["sections"]["train"]
    exact = gather(bundle, "", StatisticsOptions(BINS, min_count=0))["sections"]["train"]
    assert "numbers" not in part
    names = [name for name in part["tables"] if name.startswith(("finding", "number"))]
    assert len(names) == len(bundle.classes)
    for name in names:
        noisy = part["tables"][name]
        assert noisy.keys() == exact["tables"][name].keys() | {UNRECORDED}
        assert noisy != exact["tables"][name]
