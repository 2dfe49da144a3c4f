"""Seconds that scoring segmented test items takes, by what `--metrics` asks for.

Volumes of many structures with smooth borders, predictions that are other such volumes; relative to the surfaces of one
structure after the other, each by MONAI's `get_edge_surface_distance`, as up to 0.6.0.

    python benchmarks/mask_metrics.py [--json] [--classes 105] [--volumes 10] [--side 32]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from monai.metrics.utils import get_edge_surface_distance
from scipy import ndimage
from torch import Tensor

from medfl.evaluation.mask_metrics import scores, surface_metrics_of

ASKED = ("all", "hd95_1", "dice")
SPACING, TOLERANCE = (1.0, 1.0, 1.0), 1.0


def volume(seed: int, options: argparse.Namespace) -> Tensor:
    """Return a label map (side, side, side)."""
    noise = (
        np.random.default_rng(seed)
        .normal(size=(options.classes, *[options.side] * 3))
        .astype(np.float32)
    )
    return torch.from_numpy(ndimage.gaussian_filter(noise, (0, 2, 2, 2)).argmax(0).astype(np.uint8))


def one_by_one(prediction: Tensor, reference: Tensor, names: list[str]) -> tuple[float, float]:
    """Return HD95 and surface Dice by MONAI's functions, and compute Dice as medfl does."""
    scores(prediction, reference, names, SPACING, TOLERANCE)
    values = []
    for c in range(1, len(names)):
        pair = prediction == c, reference == c
        if not (pair[0].any() and pair[1].any()):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, distances, _ = get_edge_surface_distance(
                *pair, spacing=list(SPACING), symmetric=True
            )
        near = sum(int((distance <= TOLERANCE).sum()) for distance in distances)
        values.append(
            (
                max(float(torch.quantile(d, 0.95)) for d in distances),
                near / sum(len(distance) for distance in distances),
            )
        )
    hd95, surface = np.mean(values, axis=0).tolist()
    return hd95, surface


def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    """Time the ways in turn; a ratio is that of two neighbours."""
    names = [str(c) for c in range(options.classes)]
    pairs = [(volume(2 * i, options), volume(2 * i + 1, options)) for i in range(options.volumes)]

    def seconds(score: Callable[[Tensor, Tensor], object]) -> float:
        started = time.perf_counter()
        for pair in pairs:
            score(*pair)
        return time.perf_counter() - started

    rows: list[dict[str, object]] = []
    for text in ASKED:
        distances = surface_metrics_of(text, names)
        found = [
            (
                seconds(
                    lambda p, r, d=distances: scores(
                        p, r, names, SPACING, TOLERANCE, surface_metrics=d
                    )
                ),
                seconds(lambda p, r: one_by_one(p, r, names)),
            )
            for _ in range(options.repeats)
        ]
        ratios = [ours / theirs for ours, theirs in found]
        rows.append(
            {
                "name": f"scoring/{options.volumes}x{options.side}^3-{options.classes}-classes-{text}",
                "ratio": statistics.median(ratios),
                "relative_to": "one structure after the other by MONAI's get_edge_surface_distance",
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "seconds": statistics.median(ours for ours, _ in found),
            }
        )
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--classes", type=int, default=105, help="with the background")
    parser.add_argument("--volumes", type=int, default=10)
    parser.add_argument("--side", type=int, default=32, help="voxels a side")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options)
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"{row['name']:<44} ratio {row['ratio']:.4f} (min {row['ratio_min']:.4f}, max {row['ratio_max']:.4f})  "
            f"{row['seconds']:.2f} s"
        )


if __name__ == "__main__":
    main()
