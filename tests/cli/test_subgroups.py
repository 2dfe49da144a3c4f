"""The table that `medfl subgroups` prints."""

from __future__ import annotations

from medfl.cli.subgroups import _cell, text
from medfl.runs.subgroups import Estimate, of
from tests.runs.test_subgroups import CLASSES, rows


def test_a_line_a_group_with_intervals_and_what_is_not_told() -> None:
    found = of(
        rows({"east": (9, 9, 9), "north": (20, 15, 12), "south": (2, 2, 2)}), "centre", CLASSES
    )
    lines = text(found)
    assert lines[0].split() == ["centre", "cases", "Accuracy", "Balanced", "accuracy", "AUROC"]
    assert lines[2].split() == ["east", "not", "told", "-", "-", "-"]
    assert lines[3].split()[:2] == ["north", "47"]
    assert lines[4].split() == ["south", "not", "told", "-", "-", "-"]
    assert lines[7].split() == ["AUROC", "north", "all", "of", "these"]
    area = found.groups[1].areas["a"]
    assert lines[9].split()[:2] == ["a", f"{area.value:.3f}"]
    assert any(
        line.startswith(
            "note: not told, fewer than 10 cases, or its count would reveal such a group"
        )
        for line in lines
    )
    assert max(map(len, lines)) <= 100


def test_an_interval_without_width_is_a_dash() -> None:
    assert _cell(Estimate(1.0, 1.0, 1.0)) == "1.000 (–)"
    assert _cell(Estimate(0.5, 0.25, 0.75)) == "0.500 (0.250 to 0.750)"
    assert _cell(Estimate(0.5, 0.25, 0.75, 12)) == "0.500 (0.250 to 0.750, 12 cases)"
    assert _cell(None) == "-"
