"""Commands in a process of their own that an audit hook watches; `python -m tests.support.watched` is that process."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.audit import MAY, Watch, unlisted
from tests.support.programs import python_path

ROOT = Path(__file__).parents[2]


def watched(place: Path, *commands: list[str], blank: bool = False) -> dict[str, Any]:
    """Run these in one process; return exit codes, what changed outside of `place`/out, how much of it until the end of
    each, what was imported, what was printed. Figures may be left blank, as in `tests.support.figures`."""
    places = [str(place / "out"), str(place / "cache"), str(place / "tmp"), "/dev/shm"]  # noqa: S108
    for folder in places[1:3]:
        Path(folder).mkdir()
    # matplotlib makes folders in both homes
    homes = dict.fromkeys(("XDG_CACHE_HOME", "XDG_CONFIG_HOME"), places[1])
    environment = {
        **os.environ,
        **homes,
        "TMPDIR": places[2],
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
    }
    environment["TORCHINDUCTOR_CACHE_DIR"] = places[
        1
    ]  # PyTorch sets it in whatever process has compiled something
    asked = json.dumps({"commands": commands, "places": places, "blank": blank})
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.watched", asked],
        capture_output=True, text=True, timeout=1800, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    document |= {"stderr": done.stderr, "told": done.stdout + done.stderr}
    return document


def check(found: dict[str, Any]) -> None:
    errors = [line for line in found["stderr"].splitlines() if line.startswith("error")]
    assert not any(found["codes"]), errors
    assert found["seen"] == []
    assert not unlisted(found["imported"])


def main(commands: list[list[str]], places: list[str], blank: bool) -> None:
    """Run the commands and print what was seen."""
    import pytest

    from medfl.cli import main as medfl
    from tests.support.figures import leave_blank

    if blank:
        leave_blank(pytest.MonkeyPatch())
    for module in (
        "ignite",
        "nibabel",
        "PIL.Image",
        "medfl.runs.launch",
    ):  # whatever imports them may
        importlib.import_module(module)
    warm = ("nvflare", "aiohttp", "medfl.flare")
    for name in [
        name for name in sys.modules if f"{name}.".startswith(tuple(f"{one}." for one in warm))
    ]:
        del sys.modules[
            name
        ]  # the warm process has them; that a command imports them has to be seen
    watch = Watch(may_change=tuple(map(Path, places)), may=MAY)
    before = set(sys.modules)
    codes, until = [], []
    for arguments in commands:
        with watch.on():
            codes.append(medfl(arguments))
        until.append(len(watch.seen))
    imported = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
    document = {"codes": codes, "seen": watch.seen, "until": until, "imported": imported}
    sys.stdout.write(f"\n{json.dumps(document)}\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
