"""Commands in a process of their own that an audit hook watches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.audit import MAY, unlisted
from tests.support.programs import python_path

ROOT = Path(__file__).parents[2]

_RUN = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.support.audit import Watch
import torch, monai, ignite, nibabel, PIL.Image, medfl.runs.launch
from medfl.cli import main
if {blank!r}:
    from pytest import MonkeyPatch
    from tests.support.figures import leave_blank
    leave_blank(MonkeyPatch())
watch = Watch(may_change=tuple(map(Path, {places!r})), may={may!r})
before = set(sys.modules)
codes, until = [], []
for arguments in {runs!r}:
    with watch.on():
        codes.append(main(arguments))
    until.append(len(watch.seen))
imported = sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})
print()
print(json.dumps({{"codes": codes, "seen": watch.seen, "until": until, "imported": imported}}), flush=True)
os._exit(0)
"""


def watched(place: Path, *commands: list[str], blank: bool = False) -> dict[str, Any]:
    """Run these in one process; return exit codes, what changed outside of `place`/out, how much of it until the end of
    each, what was imported, what was printed. Figures may be left blank, as in `tests.support.figures`."""
    places = [str(place / "out"), str(place / "cache"), str(place / "tmp"), "/dev/shm"]  # noqa: S108
    for folder in places[1:3]:
        Path(folder).mkdir()
    script = _RUN.format(root=str(ROOT), places=places, runs=list(commands), may=MAY, blank=blank)
    environment = {**os.environ, "XDG_CACHE_HOME": places[1], "TMPDIR": places[2], "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": python_path(), "MPLCONFIGDIR": places[1]}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # PyTorch sets it in whatever process has compiled something
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=1800, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    document |= {"stderr": done.stderr, "told": done.stdout + done.stderr}
    return document


def check(found: dict[str, Any]) -> None:
    errors = [line for line in found["stderr"].splitlines() if line.startswith("error")]
    assert not any(found["codes"]), errors
    assert found["seen"] == []
    assert not unlisted(found["imported"])
