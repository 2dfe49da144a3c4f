"""benchmarks/lying_sites.py runs every rule of its table, on phantom images of six sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.test_gpu import loaded


@pytest.mark.slow
def test_each_rule_gives_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module: Any = loaded("lying_sites", monkeypatch)
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
    monkeypatch.setattr(module, "ATTACKS", ("count",))
    monkeypatch.setattr(module, "RULES", ("mean", "clip:auto", "krum:1"))
    given = [
        "--bundles",
        "ham10000",
        "--data",
        "phantom",
        "--liars",
        "1",
        "--rounds",
        "1",
        "--seeds",
        "3",
    ]
    options = module.parser().parse_args(given)
    found = list(module.rows(tmp_path, options))
    assert [(row["rule"], row["liars"]) for row in found] == [
        (rule, n) for rule in module.RULES for n in (0, 1)
    ]
    assert all(row["balanced_accuracy"] > 0 for row in found)
    assert found[0]["ratio"] == 1
    assert not list(tmp_path.glob("*.failed"))
    page = module.table(found).splitlines()
    assert page[0] == "| ham10000 | nobody lies | 1 count |"
    assert [line.split(" | ")[0] for line in page[2:]] == [f"| {rule}" for rule in module.RULES]
    again = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert list(module.rows(tmp_path, options)) == found
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")} == again
