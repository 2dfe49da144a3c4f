"""Weights of five small portable runs, as the processors gave them that had these versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.programs import ROOT, python_path

RECORD = json.loads((Path(__file__).parents[1] / "support" / "portable_runs.json").read_text())
OTHERWISE = {
    "OMP_NUM_THREADS": "2", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_CPU_ISA_HINTS": "PREFER_YMM",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "MKL_DISABLE_FAST_MM": "1", "LRU_CACHE_CAPACITY": "1",
}  # fmt: skip
"""Settings of the libraries beside the caps, which must not change a bit."""


def trained(folder: Path, **variables: str) -> Mapping[str, str]:
    """Train in a process with these variables; return the SHA-256 of each run's weights."""
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "XDG_CACHE_HOME": str(folder / "cache"),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.portable_runs", str(folder)],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    parts = dict(line.split("\t", 1) for line in lines if "\t" in line)
    names = ("model name", "cpu family", "model", "stepping", "cache size", "flags")
    return "; ".join(
        f"{name} {parts[name].strip(chr(9) + ' :')}" for name in names if name in parts
    )


@pytest.mark.slow
def test_weights_are_those_of_other_processors(tmp_path: Path) -> None:
    found = {"libc": " ".join(platform.libc_ver()), "machine": platform.machine()}
    found |= {
        name: version(name).partition("+")[0] for name in RECORD["versions"] if name not in found
    }
    recorded = {**RECORD["versions"], "torch": found["torch"]}
    if found != recorded or found["torch"] not in RECORD["versions"]["torch"]:
        pytest.skip(f"the weights were recorded with {RECORD['versions']}, here are {found}")
    assert trained(tmp_path, **OTHERWISE) == RECORD["sha256"], (
        f"this processor gives other bits: {_processor()}"
    )
