"""What a run says and leaves where it has more sites than can be listed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.core.run import PartitionRecord
from medfl.runs import launch
from medfl.runs.launch import federate


def division(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> str:
    """What is said of sites of these sizes, where at most three are listed."""
    monkeypatch.setattr(launch, "LISTED", 3)
    sites = {
        f"s{i}": {"train": ["x"] * size, "validate": [], "test": []} for i, size in enumerate(sizes)
    }
    record = PartitionRecord("iid", 7, ("2 test images belong to no site",), sites)
    plan = SimpleNamespace(
        run=SimpleNamespace(partition=record), partition=None, sections={}, counted=()
    )
    monkeypatch.setattr(launch, "partition_table", lambda *_: "the table")
    return launch._division(plan)  # type: ignore[arg-type]


def test_few_sites_are_a_table_and_many_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert division([1, 2, 3], monkeypatch) == "the table"
    assert division([5, 1, 2, 9], monkeypatch).splitlines() == [
        "partition iid, seed 7: 4 sites, 1 to 9 training images each, median 5; all are in run.json",
        "note: 2 test images belong to no site",
    ]


def test_a_run_with_hundreds_of_sites_ends_with_its_report(tmp_path: Path) -> None:
    data = datasets.write_phantom("pneumonia", tmp_path / "data", per_class=160, size=28)
    said: list[str] = []
    requested = {
        "data": str(data), "sites": 210, "partition": "iid", "rounds": 2, "cohort": 0.02, "local_epochs": 1,
        "batch_size": 8, "lr": 0.01, "eval_every": 0,
    }  # fmt: skip
    config = {"network": "small_cnn", "image_size": 28}
    out = tmp_path / "run"
    federate("pneumonia", config=config, requested=requested, out=out, jobs=1, say=said.append)
    division = "partition iid, seed 0: 210 sites, 1 to 2 training images each, median 1; all are in run.json"
    assert any(line.startswith(division) for line in said)
    assert not (out / "partition.png").exists()
    assert (out / "report.html").stat().st_size > 0
    assert len((out / "sites.csv").read_text().splitlines()) == 211
    first, last = (json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines())
    assert list(first["sites"]) == first["cohort"]
    assert len(last["cohort"]) == 4


def test_a_run_reads_its_bundle_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is new, resumed or repeated; its images are given to the bundle that is open already."""
    opened, init = list[str](), Bundle.__init__

    def counted(bundle: Bundle, name: str, *rest: Any, **named: Any) -> None:
        opened.append(name)
        init(bundle, name, *rest, **named)

    monkeypatch.setattr(Bundle, "__init__", counted)
    config = {"network": "small_cnn", "image_size": 16}
    requested = {
        "data": "phantom",
        "sites": 2,
        "partition": "iid",
        "rounds": 1,
        "batch_size": 16,
        "eval_every": 0,
    }
    requested |= {"local_epochs": 1}
    federate("pneumonia", config=config, requested=requested, out=tmp_path / "a", jobs=1)
    assert opened == ["pneumonia"]
    federate(out=tmp_path / "a", resume=True, requested={"rounds": 2}, jobs=1)
    federate(source=tmp_path / "a", out=tmp_path / "b", jobs=1)
    assert opened == ["pneumonia"] * 3
