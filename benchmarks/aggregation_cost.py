"""Seconds of the server's robust rules relative to the weighted mean, on the same replies, one thread.

python benchmarks/aggregation_cost.py [--json] [--numbers 2000000] [--repeats 5] [--replies 10,50]

The replies are random numbers in memory; what a rule costs beyond time is in `medfl/runtimes/server/robust.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from medfl.core.message import Message
from medfl.methods.base import sample_shares, weighted_mean
from medfl.runtimes.server.robust import Aggregation

RULES = ("clip:auto", "median", "trimmed:0.2", "krum:2", "multikrum:2")


def seconds(action: Callable[[], object]) -> float:
    """Return how long one call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def compare(rule: str, count: int, numbers: int, repeats: int) -> dict[str, object]:
    """Time a rule and the mean in turn and return the median of the pairs' ratios."""
    generator = torch.Generator().manual_seed(0)
    replies = {
        f"site-{i:03d}": Message(
            {"weights": {"w": torch.randn(numbers, generator=generator)}},
            {"samples": float(10 + i)},
        )
        for i in range(count)
    }
    robust, before = Aggregation.parse(rule), {"w": torch.zeros(numbers)}
    ratios, took = [], []
    for _ in range(repeats):
        mean = seconds(lambda: weighted_mean(replies, "weights", sample_shares(replies)))
        took.append(seconds(lambda: robust.combined(replies, "weights", before)))
        ratios.append(took[-1] / mean)
    return {
        "name": f"aggregation/{rule}-{count}-replies",
        "ratio": statistics.median(ratios),
        "relative_to": "weighted mean in float64 of the same replies",
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "seconds": statistics.median(took),
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--numbers", type=int, default=2_000_000, help="of each reply")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--replies", default="10,50", help="numbers of replies, comma-separated")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = [int(count) for count in options.replies.split(",")]
    table = [
        compare(rule, count, options.numbers, options.repeats) for count in counts for rule in RULES
    ]
    if options.json:
        print(json.dumps(table))
        return
    for row in table:
        print(
            f"{row['name']:<36} ratio {row['ratio']:.1f} (min {row['ratio_min']:.1f}, max {row['ratio_max']:.1f})  "
            f"{row['seconds']:.2f} s"
        )


if __name__ == "__main__":
    main()
