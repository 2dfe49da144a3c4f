"""What a whole run does outside of its run folder, seen by an audit hook: nothing, whatever bundle the gate accepts.

The bundles of the public zoo are watched where they train, in zoo/test_published.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from medfl.bundle.files import read, shipped_folders
from medfl.datasets import write_phantom
from tests.support.audit import MAY, unlisted
from tests.support.programs import python_path
from tests.zoo.build import ZOO

ROOT = Path(__file__).parents[2]
REAL = Path(os.environ.get("MEDFL_DATA", ROOT.parent / "shared" / "data")) / "montgomery_jsrt_demo"
SHORT = ["--rounds", "1", "--jobs", "2", "--device", "cpu", "--sites", "2", "--partition", "iid"]

_RUN = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support.audit import Watch
import torch, monai, ignite, nibabel, PIL.Image, medfl.runs.launch
from medfl.cli import main
watch = Watch(may_change=tuple(map(Path, {places!r})), may={may!r})
before = set(sys.modules)
codes, until = [], []
for arguments in {runs!r}:
    with watch.on():
        codes.append(main(arguments))
    until.append(len(watch.seen))
imported = sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})
print()
print(json.dumps({{"codes": codes, "seen": watch.seen, "until": until, "imported": imported}}))
"""


def outside(place: Path, *runs: list[str]) -> dict[str, Any]:
    """As `watched`, of `medfl run` with each of these."""
    return watched(place, *(["run", *given, "--out", f"{place}/out/{n}", *SHORT] for n, given in enumerate(runs)))


def watched(place: Path, *commands: list[str]) -> dict[str, Any]:
    """Run these in one process; return exit codes, what changed outside of `place`/out, how much of it until the end of
    each, what was imported."""
    places = [str(place / "out"), str(place / "cache"), str(place / "tmp"), "/dev/shm"]  # noqa: S108
    for folder in places[1:3]:
        Path(folder).mkdir()
    script = _RUN.format(root=str(ROOT), places=places, runs=list(commands), may=MAY)
    environment = {**os.environ, "XDG_CACHE_HOME": places[1], "TMPDIR": places[2], "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": python_path(), "MPLCONFIGDIR": places[1]}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # PyTorch sets it in whatever process has compiled something
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    document["stderr"] = done.stderr
    return document


def check(found: dict[str, Any]) -> None:
    errors = [line for line in found["stderr"].splitlines() if line.startswith("error")]
    assert not any(found["codes"]), errors
    assert found["seen"] == []
    assert not unlisted(found["imported"])


def settings(config: Mapping[str, str]) -> list[str]:
    return [part for key, value in config.items() for part in ("--config", f"{key}={value}")]


def after(run: Path, *images: Path) -> list[list[str]]:
    """The verbs that follow a run; each writes where it was told."""
    out, given = run.parent, [*map(str, images)]
    return [
        ["report", str(run)],
        ["export", str(run), "--out", f"{out}/exported"],
        ["site", "inspect", f"{out}/exported"],
        ["predict", str(run), *given, "--out", f"{out}/predicted"],
        ["predict", f"{out}/exported", *given, "--out", f"{out}/predicted again"],
    ]


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason=f"no chest X-rays in {REAL}")
def test_nothing_of_a_clinician_s_day_on_real_images_changes_anything_outside(tmp_path: Path) -> None:
    new, run = tmp_path / "out" / "lungs", tmp_path / "out" / "run"
    write = ["new", str(new), "--images", str(REAL / "images"), "--masks", str(REAL / "masks"), "--size", "32"]
    train = ["run", str(new), "--data", str(REAL), "--config", "network=unet8", "--out", str(run), *SHORT]
    images = sorted((REAL / "images").iterdir())[:2]
    check(watched(tmp_path, write, ["site", "inspect", str(new)], train, *after(run, *images)))


@pytest.mark.slow
def test_no_accepted_bundle_changes_anything_outside_nor_do_report_export_inspection_and_prediction(
    tmp_path: Path,
) -> None:
    names = [name for name in ZOO if name not in ("seg2d_csv_flat", "seg2d_own_scripts_yaml")]
    bundles = {name: ZOO[name](tmp_path / name) for name in names}
    runs = [
        ["run", str(bundle.path), *settings(bundle.overrides), "--out", f"{tmp_path}/out/{name}", *SHORT]
        for name, bundle in bundles.items()
    ]
    images = sorted((tmp_path / "cls2d_glob_yaml").rglob("*.jpeg"))[:2]
    inspected = ["site", "inspect", str(bundles["cls2d_glob_yaml"].path)]
    check(watched(tmp_path, inspected, *runs, *after(tmp_path / "out" / "cls2d_glob_yaml", *images)[:4]))


@pytest.mark.slow
def test_no_shipped_bundle_changes_anything_outside(tmp_path: Path) -> None:
    """Every one of them, with a small network and small pictures: what is watched is what a configuration does."""
    runs = []
    for name, root in shipped_folders().items():
        training = read(root / "configs" / "train.yaml")
        small = {"network_name": "unet8" if training["network_name"].startswith("unet") else "small_cnn"}
        small |= {} if "patch_size" in training else {"image_size": "32"}
        size = None if "patch_size" in training else 32
        drawn = write_phantom(name, tmp_path / "drawn" / name, per_class=10, size=size)
        runs.append([name, "--data", str(drawn), "--local-epochs", "1", *settings(small)])
    check(outside(tmp_path, *runs))


def test_an_accepted_bundle_changes_nothing_outside_and_the_watch_sees_what_a_trusted_one_does(tmp_path: Path) -> None:
    """The second run is the control: what no gate would let pass is seen."""
    accepted, trusted = ZOO["seg2d_csv_flat"](tmp_path / "zoo"), ZOO["cls2d_glob_yaml"](tmp_path / "other")
    file = trusted.path / "configs" / "train.yaml"
    mark = tmp_path / "mark"
    text = file.read_text()
    line = next(line for line in text.splitlines() if line.startswith("learning_rate:"))
    value = line.partition(":")[2].strip()
    file.write_text(text.replace(line, f"learning_rate: \"$__import__('pathlib').Path('{mark}').touch() or {value}\""))
    runs = [[str(bundle.path), *settings(bundle.overrides)] for bundle in (accepted, trusted)]
    found = outside(tmp_path, runs[0], [*runs[1], "--trust"])
    assert any(str(mark) in seen for seen in found["seen"])
    check({**found, "codes": found["codes"][:1], "seen": found["seen"][: found["until"][0]]})
