"""Site steps a second on a GPU where several sites are trained at once: each way of packing them, and the eager loop.

Every site trains the network on images of its own by FedAvg's local steps, visits of two lengths, whose difference is
timed: so what a visit costs to begin is not in it. The ways are those of `medfl run --pack N`: one after the other by
captured steps, beside each other as branches of one graph, and grouped, each operation once for all sites. The kernels'
part is the time of the kernels, summed by torch.profiler, over the time that was measured; branches overlap theirs, so
it may be above 1 for them.

    python benchmarks/gpu_packing.py [--json] [--network resnet18] [--batch 8] [--sizes 28,64,128] [--sites 2,4,8,16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from medfl import networks
from medfl.abreast import abreast
from medfl.capturing import allowed
from medfl.errors import InputError
from medfl.prepared import Shard, Stacked
from medfl.site import LocalSettings, Networks, Site
from medfl.together import EAGER, WAYS, Together
from medfl.training import fit

CLASSES, SHORT = 8, 24


class Sites:
    """Sites with a batch of random images each, which comes as often as steps are asked for."""

    def __init__(self, count: int, size: int, options: argparse.Namespace) -> None:
        """Draw the images."""
        device, self.batch, self.count = torch.device(options.device), options.batch, count
        generator = torch.Generator().manual_seed(0)
        self.networks = Networks(partial(networks.build, options.network, 3, CLASSES), 0, device)
        self.data = []
        for _ in range(count):
            images = torch.randn(self.batch, 3, size, size, generator=generator).to(device)
            labels = torch.randint(CLASSES, (self.batch,), generator=generator).to(device)
            self.data.append(Stacked([{"id": str(i)} for i in range(self.batch)], images, labels))

    def visit(self, place: int, steps: int) -> None:
        """Train at one site."""
        shard = Shard.of(self.data[place], [*range(self.batch)] * steps)
        settings = LocalSettings(1, self.batch, lambda network: torch.optim.SGD(network.parameters(), 1e-4, 0.9))
        site = Site(f"site-{place}", place, shard, shard, shard, nn.functional.cross_entropy, settings, self.networks)
        with self.networks.scope():
            fit(site.model(self.networks.initial), site)

    def seconds(self, steps: int, together: Together | None) -> float:
        """Return the seconds of a visit to each, eagerly where nothing does them together."""
        visits = (partial(self.visit, place, steps) for place in range(self.count))
        _wait()
        started = time.perf_counter()
        if together is None:
            for visit in visits:
                visit()
        else:
            with allowed():
                list(abreast(visits, self.count, together))
        _wait()
        return time.perf_counter() - started

    def step(self, steps: int, together: Together | None) -> float:
        """Return the seconds of one step of one site."""
        short, long = self.seconds(SHORT, together), self.seconds(SHORT + steps, together)
        return (long - short) / steps / self.count

    def kernels(self, steps: int, together: Together) -> float:
        """Return the seconds that the kernels of one step of one site take."""
        with profile(activities={ProfilerActivity.CUDA} & supported_activities() or {ProfilerActivity.CPU}) as found:
            self.seconds(steps, together)
        events = [event for event in found.key_averages() if event.device_type == DeviceType.CUDA]
        return sum(event.self_device_time_total for event in events) / 1e6 / steps / self.count


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rows(count: int, size: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all ways for so many sites and images of one size."""
    sites, made = Sites(count, size, options), []
    for way in WAYS:
        together = Together(count, ways=[way])
        sites.seconds(SHORT, together)
        if not together.choices or together.choices[0].way == EAGER:
            told = together.choices[0].refused[way] if together.choices else "its steps are not recorded"
            made.append({"name": _name(count, size, way, options), "refused": told})
            continue
        sites.step(options.steps, None)
        pairs = [(sites.step(options.steps, together), sites.step(options.steps, None)) for _ in range(options.repeats)]
        packed, eager = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = [one / other for other, one in pairs]
        kernels = sites.kernels(options.steps, together)
        made.append(
            {
                "name": _name(count, size, way, options),
                "ratio": statistics.median(ratios),
                "relative_to": f"the eager loop, {options.device}",
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
                "site_steps_per_second": 1 / packed,
                "site_steps_per_second_eager": 1 / eager,
                "kernels_part": kernels / packed if kernels else None,
            }
        )
    return made


def _name(count: int, size: int, way: str, options: argparse.Namespace) -> str:
    return f"pack/{options.network} {size} pixels batch {options.batch}, {count} sites {way}"


def told(row: dict[str, Any]) -> str:
    """Return a row as a line."""
    if "refused" in row:
        return f"{row['name']}: cannot be had: {row['refused']}"
    part = row["kernels_part"]
    line = f"{row['name']:<64} {row['site_steps_per_second']:>9.1f} steps/s, {row['ratio']:.2f} x eager "
    line += f"(min {row['ratio_min']:.2f}, max {row['ratio_max']:.2f})"
    return line + (f", kernels {part:.0%} of the time" if part is not None else "")


def parser() -> argparse.ArgumentParser:
    """Return the arguments."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print a JSON list of rows")
    made.add_argument("--network", default="resnet18")
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--sizes", default="28,64,128", help="pixels a side, comma-separated")
    made.add_argument("--sites", default="2,4,8,16", help="at once, comma-separated")
    made.add_argument("--steps", type=int, default=128, help="that are timed, of each visit")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--device", default="cuda")
    return made


def checked(options: argparse.Namespace) -> list[list[int]]:
    """Return the sizes and the numbers of sites that are asked for.

    Raises:
        InputError: they are no whole numbers above 0, or there is no GPU.
    """
    for flag, words in (("--sizes", options.sizes), ("--sites", options.sites)):
        if not all(word.isdecimal() and int(word) > 0 for word in words.split(",")):
            raise InputError(f"{flag} {words}", "whole numbers above 0, comma-separated", "give for example 4,8")
    if not options.device.startswith("cuda") or not torch.cuda.is_available():
        raise InputError(
            f"--device {options.device}, {torch.cuda.device_count()} CUDA devices here",
            "packed steps are measured on a GPU",
            "run this where there is one",
        )
    return [[int(word) for word in words.split(",")] for words in (options.sizes, options.sites)]


def main() -> int:
    """Run the benchmark."""
    options = parser().parse_args()
    try:
        sizes, counts = checked(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = []
    for size in sizes:
        for count in counts:
            for row in rows(count, size, options):
                found.append(row)
                if not options.json:
                    print(told(row), flush=True)
    if options.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
