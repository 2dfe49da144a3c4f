"""Where the programs that tests start find medfl, and what they do without.

MONAI imports transformers and mlflow wherever they are installed, which is a fourth of the time that a program needs to
start; the optional packages' own tests are in the tests' process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAN = Path(__file__).parent / "lean"


def python_path(*folders: Path | str) -> str:
    """Return a PYTHONPATH with this checkout, folders and what was in it before."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(map(str, filter(None, [LEAN, ROOT, *folders, *before]))))


@contextmanager
def warm_process() -> Iterator[str]:
    """Keep a process that programs are forked of (`lean/warm_start.py`); yield what MEDFL_TESTS_WARM has to be.

    It is ready as soon as there is a file of this name.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder, "warm")
        environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [sys.executable, str(LEAN / "warm_start.py"), str(address)],
            stdin=subprocess.PIPE,
            env=environment,
        ) as process:
            yield str(address)
            process.communicate()
