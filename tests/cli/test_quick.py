"""What can be said without torch or MONAI is said without importing them."""

from __future__ import annotations

import subprocess
import sys

QUICK = (
    (["--help"], 0), (["--version"], 0), (["run", "--help"], 0), (["methods"], 0), (["methods", "fedprox"], 0),
    (["methods", "--json"], 0), (["bundles"], 0), (["bundles", "mednist"], 0), (["bundles", "mednist", "--json"], 0),
    (["methods", "fedporx"], 2), (["bundles", "mednits"], 2), (["run", "mednits"], 2),
    (["run", "mednist", "--rounds", "0"], 2), (["run", "mednist", "--method", "fedporx"], 2),
    (["run", "mednist", "--sites", "0"], 2), (["run", "mednist", "--lr", "nan"], 2), (["rnu"], 2),
    (["predict", "no", "image.png", "--out", "x"], 2),
)  # fmt: skip
PROGRAM = """
import sys
from medfl.cli.verbs import main
code = main(sys.argv[1:])
heavy = sorted({"torch", "monai", "scipy", "nibabel", "pandas"} & set(sys.modules))
assert not heavy, heavy
raise SystemExit(code)
"""


def test_listings_and_plain_refusals_import_neither_torch_nor_monai() -> None:
    for arguments, code in QUICK:
        done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == code, (arguments, done.stderr)
        assert done.stderr.startswith("error: ") == (code == 2), (arguments, done.stderr)
