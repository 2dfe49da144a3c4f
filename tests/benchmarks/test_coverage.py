"""benchmarks/coverage.py: on real scores the promise holds at sites alike; pooled fails where they are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medfl.cli.verbs import main
from tests.benchmarks.test_gpu import loaded
from tests.support.paths import SHARED

HAM10000 = SHARED / "data" / "ham10000"


@pytest.mark.slow
@pytest.mark.skipif(not HAM10000.is_dir(), reason="needs the images of ../shared/data")
def test_four_hospitals(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    partition = "centre:rosendahl=300/300,vidir_modern=300/300,vidir_molemax=300/300"
    run = ["run", "ham10000", "--data", str(HAM10000), "--partition", partition, "--rounds", "4"]
    small = ["--config", "network=small_cnn", "--config", "image_size=32"]
    assert main([*run, *small, "--out", str(out), "--quiet"]) == 0
    capsys.readouterr()
    module: Any = loaded("coverage", monkeypatch)
    assert module.main([str(out), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 * 4 * 3
    for row in rows:
        if row["sites"] == "alike" or row["way"] == "alone":
            assert row["reached"] >= 0.9 - 3 * row["error"], row["name"]

    below = [row["site"] for row in rows if row["way"] == "pooled" and row["below"]]
    assert below
    reached = {(row["site"], row["way"]): row["reached"] for row in rows[:12]}
    for site in below:
        assert reached[site, "pooled"] < reached[site, "shrunken"]
