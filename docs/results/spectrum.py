"""Whether features have collapsed to few directions: FedMR's Table 7 of the runs below folders, from their weights.

    python docs/results/spectrum.py grids/fedmr [--data DIR] [--json]

Of a run's last global model, on all test images in evaluation mode: the 50 largest eigenvalues of the covariance of
the features that the head gets, each standardised, and 1/128 of the sum of squared differences from their mean.

    classes     that of each class by itself, as in the intra-class loss, the mean over the classes of 10 images or more
    batches     that of batches of 128 images of all classes, drawn without replacement, the mean over the batches
    largest     the largest eigenvalue of a class, the mean over the same classes

The paper says neither whose features they are nor of which images, only "batch 128"; so there are both. A line is a
row of the comparison, mean and standard deviation (divisor n - 1) over its seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from medfl import load_run
from medfl.methods._parts.prototypes import features
from medfl.report.model_plots import eigenvalues, imbalance
from medfl.runs.plan import repeat
from medfl.runtimes.federation import Federation

BATCH, LEAST = 128, 10
NUMBERS = ("classes", "batches", "largest")


def spread(values: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return the numbers of features (N, d) with classes (N,)."""
    found = [
        eigenvalues(values[labels == c]) for c in np.unique(labels) if (labels == c).sum() >= LEAST
    ]
    order = np.random.default_rng(0).permutation(len(values))
    parts = [order[i : i + BATCH] for i in range(0, len(order) - BATCH + 1, BATCH)] or [order]
    return {
        "classes": float(np.mean([imbalance(one) for one in found])),
        "batches": float(np.mean([imbalance(eigenvalues(values[part])) for part in parts])),
        "largest": float(np.mean([one[0] for one in found])),
    }


def measured(folder: Path, data: str | None) -> dict[str, Any]:
    """Return a run's numbers, and which row and seed of a comparison it is.

    Args:
        folder: of the run.
        data: its images, where they lie elsewhere than then.
    """
    result = load_run(folder)
    plan = repeat(result.run, data)
    test = Federation(plan.bundle, plan.method, plan.run).pooled("test")
    pairs = [*features(result.network(), test, BATCH, torch.device("cpu"))]
    values, labels = (torch.cat(part).float().numpy() for part in zip(*pairs, strict=True))
    row = f"{unquote(folder.parent.parent.name)}: {unquote(folder.parent.name)}"
    return {"folder": str(folder), "row": row, "seed": result.run.seed, **spread(values, labels)}


def runs(folders: list[Path]) -> Iterator[Path]:
    """Yield the folders of finished runs, Local references of other runs not among them."""
    for folder in folders:
        yield from (
            file.parent
            for file in sorted(folder.rglob("summary.json"))
            if file.parent.name != "local"
        )


def table(found: list[dict[str, Any]]) -> str:
    """Return a markdown table: a line a row, mean and standard deviation over the seeds."""
    lines = [f"| row | seeds | {' | '.join(NUMBERS)} |", "|---" * (2 + len(NUMBERS)) + "|"]
    for row in dict.fromkeys(one["row"] for one in found):
        same = [one for one in found if one["row"] == row]
        cells = []
        for name in NUMBERS:
            values = [one[name] for one in same]
            cells.append(
                f"{mean(values):.4g}" + (f" ± {stdev(values):.2g}" if len(values) > 1 else "")
            )
        lines.append(f"| {row} | {len(same)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="runs, or folders that hold some")
    parser.add_argument(
        "--data", help="the images, if they lie elsewhere than when the runs were made"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list, an entry a run")
    options = parser.parse_args()
    found = [measured(folder, options.data) for folder in runs(options.folders)]
    sys.stdout.write((json.dumps(found, indent=1) if options.json else table(found)) + "\n")


if __name__ == "__main__":
    main()
