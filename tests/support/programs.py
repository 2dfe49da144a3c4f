"""Where the programs that tests start find medfl, and what they do without.

MONAI imports transformers and mlflow wherever they are installed, which is a fourth of the time that a program needs to
start; the optional packages' own tests are in the tests' process.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAN = Path(__file__).parent / "lean"


def python_path(*folders: Path | str) -> str:
    """Return a PYTHONPATH with this checkout, folders and what was in it before."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(map(str, filter(None, [LEAN, ROOT, *folders, *before]))))
