"""Seconds from the start of `medfl run` to the end of its first training step; of CPU, for listings and refusals.

The images are a drawn cohort that an earlier run has used; each figure is of a process of its own, one thread. MONAI
alone, which every such program imports with torch, is beside it.

    python benchmarks/startup.py [--json] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from medfl import datasets

_RUN = """
import os, sys
from medfl.core.importing import without_gc

with without_gc():
    from torch.optim.optimizer import register_optimizer_step_post_hook

register_optimizer_step_post_hook(lambda *_: os._exit(0))
from medfl.cli import main
main(sys.argv[1:])
os._exit(1)
"""


QUICK = (
    "--help", "methods", "methods fedprox", "bundles", "bundles mednist", "run mednits", "run mednist --rounds 0",
    "run mednist --method fedporx", "run mednist --method fedprox --set mu=-1", "run mednist --partition dirichlett:1",
    "run mednist --device gpuu", "compare mednist --methods fedporx --out x", "predict gone x --out y",
)  # fmt: skip


def seconds(*command: str, code: int = 0) -> float:
    """Return how long a program of its own takes."""
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], capture_output=True, env=environment)
    assert done.returncode == code, done.stderr
    return time.perf_counter() - started


def cpu_seconds(*command: str, code: int = 0) -> float:
    """Return what a program of its own takes of the processor."""
    before = os.times()
    seconds(*command, code=code)
    after = os.times()
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = datasets.write_phantom("pneumonia", Path(folder) / "data", per_class=60, size=28)

        def run(number: int, *program: str) -> float:
            given = [
                "--data",
                str(data),
                "--jobs",
                "1",
                "--rounds",
                "1",
                "--quiet",
                "--out",
                f"{folder}/run-{number}",
            ]
            return seconds(*program, "run", "pneumonia", *given)

        run(0, "-m", "medfl")
        rows = {
            "startup/first-step": [
                run(number + 1, "-c", _RUN) for number in range(options.repeats)
            ],
            "startup/import-monai": [seconds("-c", "import monai") for _ in range(options.repeats)],
        }
        for words in QUICK:
            code = 2 if words.startswith(("run", "compare", "predict")) else 0
            found = [
                cpu_seconds("-m", "medfl", *words.split(), code=code)
                for _ in range(options.repeats)
            ]
            rows[f"startup/cpu: medfl {words}"] = found
    alone = statistics.median(rows["startup/import-monai"])
    table = [
        {
            "name": name,
            "ratio": statistics.median(took) / alone,
            "relative_to": "import monai",
            "seconds": statistics.median(took),
            "least": min(took),
        }
        for name, took in rows.items()
    ]
    if options.json:
        print(json.dumps(table))
        return
    for row in table:
        print(f"{row['name']:<60} {row['seconds']:.2f} s (least {row['least']:.2f} s)")


if __name__ == "__main__":
    main()
