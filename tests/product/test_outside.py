"""What a whole run does outside of its run folder, seen by an audit hook: nothing, whatever bundle the gate accepts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from medfl.bundle.files import shipped_folders
from tests.zoo.build import ZOO

ROOT = Path(__file__).parents[2]
PUBLIC = Path(os.environ.get("MEDFL_DATA", ROOT.parent / "shared" / "data")).parent / "zoo"

_RUN = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support.audit import Watch
import torch, monai, ignite, nibabel, PIL.Image, medfl.runs.launch
from medfl.cli import main
watch = Watch(may_change=tuple(map(Path, {places!r})), may={may!r})
before = set(sys.modules)
with watch.on():
    code = main({arguments!r})
imported = sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})
print()
print(json.dumps({{"code": code, "seen": watch.seen, "imported": imported}}))
"""

MAY = ("ctypes.dlopen", "os.putenv", "pickle.find_class")
"""Libraries that PyTorch loads, its environment, and what worker processes of one run hand to each other."""
LISTED = {
    "importlib_metadata",
    "medfl",
    "monai",
    "torch",
    "numpy",
    "ignite",
    "scipy",
    "sklearn",
    "matplotlib",
    "PIL",
    "nibabel",
    "pandas",
    "skimage",
    "tqdm",
    "safetensors",
    "yaml",
    "joblib",
    "threadpoolctl",
    "SimpleITK",
    "itk",
    "pydicom",
    "torchvision",
}
"""Libraries that a run may import while it goes on; Python's own modules beside them."""


def outside(place: Path, *arguments: str) -> dict[str, Any]:
    """Run `medfl run` in a process of its own; return its exit code, what changed outside and what was imported."""
    places = [str(place / "out"), str(place / "cache"), str(place / "tmp"), "/dev/shm"]  # noqa: S108
    for folder in places[1:3]:
        Path(folder).mkdir()
    whole = ["run", *arguments, "--out", places[0], "--rounds", "1", "--jobs", "2", "--device", "cpu"]
    script = _RUN.format(root=str(ROOT), places=places, arguments=whole, may=MAY)
    environment = {**os.environ, "XDG_CACHE_HOME": places[1], "TMPDIR": places[2], "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "MPLCONFIGDIR": places[1]}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    document["stderr"] = done.stderr
    return document


def check(found: dict[str, Any]) -> None:
    assert found["code"] == 0, found["stderr"][-2000:]
    assert found["seen"] == []
    unknown = set(found["imported"]) - LISTED - set(sys.stdlib_module_names)
    assert not {name for name in unknown if not name.startswith("_")}, unknown


def test_an_accepted_bundle_of_the_zoo_s_kind_changes_nothing_outside(tmp_path: Path) -> None:
    bundle = ZOO["seg2d_csv_flat"](tmp_path / "zoo")
    config = [part for key, value in bundle.overrides.items() for part in ("--config", f"{key}={value}")]
    check(outside(tmp_path, str(bundle.path), "--sites", "2", "--partition", "iid", *config))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in ("seg2d_csv_flat", "seg2d_own_scripts_yaml")])
def test_no_accepted_bundle_changes_anything_outside(name: str, tmp_path: Path) -> None:
    bundle = ZOO[name](tmp_path / "zoo")
    config = [part for key, value in bundle.overrides.items() for part in ("--config", f"{key}={value}")]
    check(outside(tmp_path, str(bundle.path), "--sites", "2", "--partition", "iid", *config))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mednist", "lung_cxr", "hippocampus"])
def test_no_shipped_bundle_changes_anything_outside(name: str, tmp_path: Path) -> None:
    assert name in shipped_folders()
    check(outside(tmp_path, name, "--data", "phantom", "--local-epochs", "1", "--sites", "2", "--partition", "iid"))


def test_the_watch_sees_what_a_trusted_bundle_does(tmp_path: Path) -> None:
    """The control: what no gate would let pass is seen."""
    bundle = ZOO["cls2d_glob_yaml"](tmp_path / "zoo")
    file = bundle.path / "configs" / "train.yaml"
    mark = tmp_path / "mark"
    text = file.read_text()
    line = next(line for line in text.splitlines() if line.startswith("learning_rate:"))
    value = line.partition(":")[2].strip()
    file.write_text(text.replace(line, f"learning_rate: \"$__import__('pathlib').Path('{mark}').touch() or {value}\""))
    config = [part for key, value in bundle.overrides.items() for part in ("--config", f"{key}={value}")]
    found = outside(tmp_path, str(bundle.path), "--sites", "2", "--partition", "iid", "--trust", *config)
    assert any(str(mark) in seen for seen in found["seen"])
