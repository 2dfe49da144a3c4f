"""Try the wheel with the lowest and the highest versions that pyproject.toml permits, in an environment each.

    python tools/compat.py UV WHEEL [--only lowest|highest] [--torch-cpu]

Each row: install, train a phantom run of MedNIST by FedAvg away from the checkout, run the tests in TESTS. What was
found stands, with its date, in docs/compatibility.md between the marks.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
ROWS = {"lowest": ("3.10", "lowest-direct"), "highest": ("3.13", "highest")}
TESTS = ("tests/core", "tests/bundle/test_bundle.py", "tests/policy/test_inspection.py")
SHOWN = ("torch", "monai", "numpy")
MARKS = re.compile(r"(?<=<!-- compat -->\n).*?(?=<!-- /compat -->)", re.DOTALL)
RUN = ("run", "mednist", "--data", "phantom", "--method", "fedavg", "--rounds", "1", "--out", "run")


def tried(uv: str, wheel: Path, python: str, resolution: str, cpu: bool) -> list[str]:
    """Return a row of the table: versions, and what the run and the tests said."""
    with tempfile.TemporaryDirectory(prefix="medfl-compat-") as place:
        folder = Path(place)
        quiet = {
            "env": {**os.environ, "OMP_NUM_THREADS": "1"},
            "text": True,
            "capture_output": True,
        }
        subprocess.run([uv, "venv", "--quiet", "--python", python, str(folder / "env")], check=True)
        within = ["--quiet", "--python", str(folder / "env" / "bin" / "python")]
        build = ["--torch-backend", "cpu"] if cpu else []
        install = [uv, "pip", "install", "--compile-bytecode", *within]
        subprocess.run(
            [*install, *build, "--resolution", resolution, "-r", "pyproject.toml"],
            cwd=ROOT,
            check=True,
        )
        subprocess.run([*install, "--no-deps", str(wheel)], check=True)
        subprocess.run([*install, "pytest", "hypothesis"], check=True)
        listed = subprocess.run([uv, "pip", "freeze", *within], check=True, **quiet).stdout
        versions = [re.search(rf"^{name}==(\S+)$", listed, re.MULTILINE)[1] for name in SHOWN]  # type: ignore[index]
        run = subprocess.run([folder / "env" / "bin" / "medfl", *RUN], cwd=folder, **quiet)
        says = ["-m", "pytest", "-q", "-o", "filterwarnings=", "-p", "no:cacheprovider", *TESTS]
        tests = subprocess.run([folder / "env" / "bin" / "python", *says], cwd=ROOT, **quiet)
        closing = tests.stdout.strip().splitlines()[-1].split(" in ")[0]
        for failed in (
            (run.stdout + run.stderr) if run.returncode else "",
            tests.stdout if tests.returncode else "",
        ):
            print(failed[-3000:], file=sys.stderr, end="")
        return [python, *versions, "trained" if run.returncode == 0 else "FAILED", closing]


def main() -> int:
    """Try the rows and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("uv")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", choices=ROWS)
    parser.add_argument(
        "--torch-cpu", action="store_true", help="take PyTorch's CPU builds from its own index"
    )
    options = parser.parse_args()
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    rows = dict(re.findall(r"^\| (lowest|highest) (\|.*)$", PAGE.read_text(), re.MULTILINE))
    for name in [options.only] if options.only else ROWS:
        found = tried(options.uv, options.wheel.resolve(), *ROWS[name], options.torch_cpu)
        rows[name] = "| " + " | ".join([*found, today]) + " |"
        print(name, rows[name], flush=True)
    head = (
        f"| versions | Python | {' | '.join(SHOWN)} | phantom run | tests | tried |\n"
        + "|---" * 8
        + "|\n"
    )
    table = (
        "\n" + head + "".join(f"| {name} {rows[name]}\n" for name in ROWS if name in rows) + "\n"
    )
    PAGE.write_text(MARKS.sub(lambda _: table, PAGE.read_text()))
    return 1 if "FAILED" in table or "failed" in table else 0


if __name__ == "__main__":
    sys.exit(main())
