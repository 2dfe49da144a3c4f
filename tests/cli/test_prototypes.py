"""Methods that share prototypes, as a user meets them: sites with one class each, and their single samples."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from medfl import datasets
from medfl.cli import verbs as cli

METHODS = {"fedproto": (), "pfedpm": (), "relation": ("--set", "predict=relation")}


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty grey images of six classes."""
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=16
    )


def run(scans: Path, out: Path, method: str, *arguments: object) -> int:
    name = "pfedpm" if method == "relation" else method
    command = [
        "run",
        "mednist",
        "--data",
        scans,
        "--method",
        name,
        *METHODS.get(method, ()),
        "--out",
        out,
        "--jobs",
        1,
    ]
    size = [
        "--config",
        "network=small_cnn",
        "--config",
        "image_size=16",
        "--rounds",
        2,
        "--local-epochs",
        1,
    ]
    return cli.main([*map(str, [*command, *size, *arguments])])


def finished(out: Path) -> dict:
    """Return the summary after checking that every number of the run is finite."""
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "finished"
    for line in (out / "rounds.jsonl").read_text().splitlines():
        entry = json.loads(line)
        assert math.isfinite(entry["train_loss"])
        assert all(math.isfinite(value) for value in entry["val"].values())
    return summary


@pytest.mark.parametrize("method", ["fedproto", "relation"])
def test_sites_with_one_class_each(scans: Path, tmp_path: Path, method: str) -> None:
    """Every class is at one site only, so that no two sites share a prototype; a site's last batch is of one image.

    In methods/test_contract.py it is shown of all methods that share prototypes.
    """
    assert (
        run(
            scans,
            tmp_path / "run",
            method,
            "--partition",
            "classes:1",
            "--sites",
            6,
            "--batch-size",
            3,
        )
        == 0
    )
    assert finished(tmp_path / "run")["bytes_up"] > 0


@pytest.mark.parametrize("method", ["fedproto", "pfedpm"])
def test_bodies_with_other_features_are_refused_by_site(
    scans: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = (
        "--partition",
        "iid",
        "--sites",
        3,
        "--set",
        "bodies=small_cnn,two_conv",
        "--batch-size",
        4,
    )
    free = ("--set", "feature_size=0") if method == "pfedpm" else ()
    assert run(scans, tmp_path / "run", method, *bodies, *free) == 2
    stdout, stderr = capsys.readouterr()
    last = stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "length 72 at site-1" in last
    assert "site-3" in last
    assert stdout == ""
    assert not (tmp_path / "run").exists()
