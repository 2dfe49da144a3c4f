"""A local step on the CPU, one thread: eager and compiled.

A site trains with SGD and momentum on batches that come again and again; visits of two lengths are timed in turn, and
their difference is the steps of the longer one: so neither the start of a visit nor the compilation is in it.

    python benchmarks/local_step.py [--json] [--networks small_cnn,resnet18] [--size 28] [--batch 8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext

import torch
from torch import nn

from medfl import networks
from medfl.data.prepared import Shard, Stacked
from medfl.training.accelerate.compiled import compile_steps
from medfl.training.local_settings import LocalSettings
from medfl.training.network_pool import Networks
from medfl.training.site import Site, fit

CLASSES, SHORT = 8, 6
WAYS = ("plain", "compiled")


class Visits:
    """A site that trains one network in each of the ways."""

    def __init__(self, network: str, options: argparse.Namespace) -> None:
        """Draw a batch."""
        generator, size, self.batch = torch.Generator().manual_seed(0), options.size, options.batch
        images = torch.randn(self.batch, 3, size, size, generator=generator)
        labels = torch.randint(CLASSES, (self.batch,), generator=generator)
        self.data = Stacked([{"id": str(i)} for i in range(self.batch)], images, labels)

        def build() -> nn.Module:
            return networks.build(network, 3, CLASSES)

        self.pools = {way: Networks(build, 0, torch.device("cpu")) for way in WAYS}

    def seconds(self, way: str, steps: int) -> float:
        """Return the seconds of a visit."""
        pool, shard = self.pools[way], Shard.of(self.data, [*range(self.batch)] * steps)
        settings = LocalSettings(
            1, self.batch, lambda network: torch.optim.SGD(network.parameters(), 1e-4, 0.9)
        )
        site = Site("a", 0, shard, shard, shard, nn.functional.cross_entropy, settings, pool)
        with pool.scope(), compile_steps() if way == "compiled" else nullcontext():
            model, started = site.model(pool.initial), time.perf_counter()
            fit(model, site)
            return time.perf_counter() - started

    def step(self, way: str, steps: int) -> float:
        """Return the seconds of a step."""
        short = self.seconds(way, SHORT)
        return (self.seconds(way, SHORT + steps) - short) / steps


def measure(network: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Time the ways in turn; a ratio is that of two neighbours."""
    visits = Visits(network, options)
    for way in WAYS:
        visits.seconds(way, SHORT)
    found = [{way: visits.step(way, options.steps) for way in WAYS} for _ in range(options.repeats)]
    rows: list[dict[str, object]] = []
    for way in WAYS:
        ratios = [each[way] / each["plain"] for each in found]
        rows.append(
            {
                "name": f"step/{network}-{options.size}-batch-{options.batch}-{way}",
                "ratio": statistics.median(ratios),
                "relative_to": "the eager step",
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "milliseconds": 1000 * statistics.median(each[way] for each in found),
            }
        )
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--networks", default="small_cnn,resnet18")
    parser.add_argument("--size", type=int, default=28, help="pixels a side")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for network in options.networks.split(",") for row in measure(network, options)]
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"{row['name']:<40} ratio {row['ratio']:.3f} (min {row['ratio_min']:.3f}, max {row['ratio_max']:.3f})  "
            f"{row['milliseconds']:.2f} ms"
        )


if __name__ == "__main__":
    main()
