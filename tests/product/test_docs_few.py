"""docs/results/few.py: lesions are taken and cut off whole, the same ones each time."""

from __future__ import annotations

import csv
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "docs" / "results" / "few.py"


def few(monkeypatch: pytest.MonkeyPatch, *given: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(FILE), *map(str, given)])
    runpy.run_path(str(FILE), run_name="__main__")


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "labels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_lesions_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "ham10000"
    source.mkdir()
    (source / "images_a.zip").write_bytes(b"")
    rows = [
        f"i{n},l{n // 3},{'mel' if n < 40 else 'nv'},{'far' if n > 80 else 'near'}"
        for n in range(90)
    ]
    (source / "labels.csv").write_text("\n".join(["image_id,lesion_id,dx,centre", *rows]) + "\n")
    few(monkeypatch, source, tmp_path / "some", "--most", "30")
    assert Counter(row["dx"] for row in table(tmp_path / "some")) == {"mel": 30, "nv": 30}
    assert (tmp_path / "some" / "images_a.zip").resolve() == (source / "images_a.zip").resolve()
    few(monkeypatch, source, tmp_path / "near", "--most", "90", "--without", "far")
    assert {row["centre"] for row in table(tmp_path / "near")} == {"near"}
    assert len(table(tmp_path / "near")) == 81

    few(monkeypatch, source, tmp_path / "cut", "--most", "30", "--every", "3")
    public, private = (table(tmp_path / "cut" / name) for name in ("public", "private"))
    assert {row["lesion_id"] for row in public} & {row["lesion_id"] for row in private} == set()
    assert 5 < len(public) < 35
    assert sorted(row["image_id"] for row in [*public, *private]) == sorted(
        row["image_id"] for row in table(tmp_path / "some")
    )


def test_something_has_to_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="2"):
        few(monkeypatch, tmp_path, tmp_path / "out")
