"""NVIDIA FLARE's simulator on planned bundles: deep supervision, kept components and sites' own spacings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from medfl.cli import verbs as cli
from medfl.runs import launch
from tests.flare.test_parity import left
from tests.problem.test_largest_component import discs
from tests.runtimes.test_site_spacing import ASKED, bundle, folder

__all__ = ["bundle", "folder"]
pytestmark = pytest.mark.flare


def both(bundle: Path, data: Path, out: Path, **settings: Any) -> dict[str, Any]:
    """Return what a run on FLARE leaves, which is what the simulator leaves."""
    requested = {**ASKED, "data": str(data), **settings}
    for runtime in ("simulator", "flare"):
        launch.federate(
            str(bundle), requested=requested, out=out / runtime, jobs=1, runtime=runtime
        )

    found = left(out / "flare")
    assert found == left(out / "simulator")
    return found


def test_law1_levels_and_components_are_the_same(tmp_path: Path) -> None:
    data = tmp_path / "data"
    planned = tmp_path / "planned"
    discs(data)
    where = ["--images", str(data / "images"), "--masks", str(data / "masks"), "--memory", "0.5"]
    assert cli.main(["plan", *where, "--sites", "2", "--out", str(planned)]) == 0
    assert "deep_supr_num: 1" in (planned / "configs/train.yaml").read_text()
    settings = {"partition": "iid", "rounds": 2, "local_epochs": 2, "batch_size": 2}
    found = both(planned, data, tmp_path, **settings)
    decided = found["summary"]["last"]["classes"]["structure"]
    assert decided["largest_component"] == 1
    assert decided["validation_dice_largest"] > decided["validation_dice"]


def test_law1_spacings_of_the_sites_own_are_the_same(
    bundle: Path, folder: Path, tmp_path: Path
) -> None:
    both(bundle, folder, tmp_path)
    recorded = json.loads((tmp_path / "flare/run.json").read_text())
    assert recorded["site_spacing"].startswith("site-1=1.")
