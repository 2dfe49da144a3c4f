"""Seconds from the start of `medfl run` to the end of its first training step; those of listings and `medfl --help`.

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


def seconds(*command: str) -> float:
    """Return what a program of its own takes."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, *command], check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return time.perf_counter() - started


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = datasets.write_phantom("pneumonia", Path(folder) / "data", per_class=60, size=28)

        def run(number: int) -> float:
            out = f"{folder}/run-{number}"
            return seconds("-c", _RUN, "run", "pneumonia", "--data", str(data), "--jobs", "1", "--quiet", "--out", out)

        run(0)
        rows = {
            "startup/first-step": [run(number + 1) for number in range(options.repeats)],
            "startup/import-monai": [seconds("-c", "import monai") for _ in range(options.repeats)],
            **{
                f"startup/{verb.strip('-')}": [seconds("-m", "medfl", verb) for _ in range(options.repeats)]
                for verb in ("--help", "methods", "bundles")
            },
        }
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
        print(f"{row['name']:<24} {row['seconds']:.2f} s (least {row['least']:.2f} s)")


if __name__ == "__main__":
    main()
