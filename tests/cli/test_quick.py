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
    runs = [
        (
            arguments,
            code,
            subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stdout=-1, stderr=-1, text=True),
        )
        for arguments, code in QUICK
    ]
    for arguments, code, process in runs:
        _, said = process.communicate(timeout=120)
        assert process.returncode == code, (arguments, said)
        assert said.startswith("error: ") == (code == 2), (arguments, said)
