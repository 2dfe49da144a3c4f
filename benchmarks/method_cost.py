"""Seconds of a local step of each method relative to FedAvg's, on the same network, images and batch.

A method's local training is timed with N and with 2 N steps: the difference is what N steps cost, what is left is the
cost of a round (prototypes, states, copies). It is timed in round 2, when prototypes, histories and the generator are
there. FedAvg is timed before and after each method, on the same sites. For FedBM the last row gives the server's
training of the generator as a part of a round: 5 rounds of 5 sites with 88 steps each (HAM10000 over 10 sites, cohort
0.5, batch 8). FedHelp's rows are of a large site against the same site without proxy, and of a small one against the
same site without public data, whose images are of 32 pixels with two teachers over 100 classes.

    python benchmarks/method_cost.py [--json] [--methods fedmr,moon] [--network resnet18] [--batch 128] [--size 64]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from medfl import methods, networks
from medfl.core.message import Message
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public
from medfl.methods import Method
from medfl.training.local_settings import LocalSettings
from medfl.training.network_pool import Networks
from medfl.training.site import Host, Site

CLASSES, SITES = 8, ("a", "b")
STEPS_OF_A_ROUND, ROUNDS_OF_A_CYCLE = 5 * 88, 5


def embeddings(_: str) -> torch.Tensor:
    """Stand in for a language model: 24 prompts a class, 512 dimensions."""
    generator = torch.Generator().manual_seed(0)
    around = torch.randn(CLASSES, 1, 512, generator=generator)
    return nn.functional.normalize(
        around + 0.3 * torch.randn(CLASSES, 24, 512, generator=generator), dim=2
    )


class Federation:
    """Sites with random images, on which one method is ready for round 2."""

    def __init__(
        self,
        method: Method,
        options: argparse.Namespace,
        large: str = "",
        public: Public | None = None,
        sites: Sequence[str] = SITES,
    ) -> None:
        """Run round 1 with one step a site; the first one has the network `large` where one is named."""
        device = torch.device(options.device)
        self.method = method
        self.task = Task("classification", tuple(f"class {i}" for i in range(CLASSES)), embeddings)
        build = partial(networks.build, options.network, 3, CLASSES)
        self.networks = Networks(lambda: method.adapt(build(), self.task), 0, device)
        self.large = (
            Networks(partial(networks.build, large, 3, CLASSES), 0, device)
            if large
            else self.networks
        )
        self.public, self.sites = public, sites
        generator = torch.Generator().manual_seed(0)
        count = options.batch
        images = torch.randn(count, 3, options.size, options.size, generator=generator)
        labels = torch.randint(CLASSES, (count,), generator=generator)
        items = [{"id": str(i), "label": int(y)} for i, y in enumerate(labels)]
        self.data, self.batch = Stacked(items, images.to(device), labels.to(device)), options.batch
        names = ("central",) if method.pools_data else sites
        with self.networks.scope():
            told = {name: method.introduce(self.site(name, 0, 1)) for name in names}
            self.server = method.init_server(self.host(0), self.networks.initial, told)
        replies: dict[str, Message] = {}
        self.states = {}
        for name in names:
            with self.networks.scope(), self.large.scope():
                down = method.broadcast(self.host(1), self.server, name)
                site = self.site(name, 1, 1)
                self.states[name], replies[name] = method.local_update(
                    site, method.init_site(site), down
                )
        with self.networks.scope():
            self.server = method.aggregate(self.host(1), self.server, replies, len(names))
        self.first = names[0]

    def site(self, name: str, round_: int, steps: int) -> Site:
        """Return a site with one batch and as many local epochs as steps, so that a pass over the data is no step."""
        shard = Shard.of(self.data, range(self.batch))
        settings = LocalSettings(
            steps, self.batch, lambda network: torch.optim.SGD(network.parameters(), 1e-4, 0.9)
        )
        loss = nn.functional.cross_entropy
        pool = self.large if name == self.sites[0] else self.networks
        own = Site(name, round_, shard, shard, shard, loss, settings, pool, round_, self.task)
        return replace(own, common=self.networks, public=self.public)

    def host(self, round_: int) -> Host:
        """Return the server's side."""
        return Host(round_, self.networks, round_, self.task, self.public)

    def seconds(self, steps: int) -> float:
        """Return the seconds of one local training in round 2."""
        with self.networks.scope(), self.large.scope():
            down = self.method.broadcast(self.host(2), self.server, self.first)
            site = self.site(self.first, 2, steps)
            _wait()
            started = time.perf_counter()
            self.method.local_update(site, self.states[self.first], down)
            _wait()
            return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(federation: Federation, steps: int) -> tuple[float, float]:
    """Return seconds a step, and seconds a round that are not steps."""
    short, long = federation.seconds(steps), federation.seconds(2 * steps)
    return (long - short) / steps, max(0.0, 2 * short - long)


def loaded(name: str, chosen: dict[str, Any]) -> Method:
    """Load a method with a generator that is trained before round 1, in one step."""
    early = {"g_start": 0, "g_iterations": 1, "g_batch": 8} if name == "fedbm" else {}
    return methods.load(name, {**early, **chosen})


def compare(name: str, chosen: dict[str, Any], options: argparse.Namespace) -> dict[str, object]:
    """Time one method and FedAvg in turn."""
    public = public_images(options)
    ours, plain = (
        Federation(loaded(name, chosen), options, public=public),
        Federation(methods.load("fedavg"), options),
    )
    label = " ".join([name, *(f"{key}={value}" for key, value in chosen.items())])
    return in_turn(label, ours, plain, "FedAvg", options)


def in_turn(
    label: str, ours: Federation, plain: Federation, relative_to: str, options: argparse.Namespace
) -> dict[str, object]:
    """Time two federations in turn and return the row of the first."""
    measure(plain, 1), measure(ours, 1)
    ratios, steps, rounds = [], [], []
    for _ in range(options.repeats):
        before, _ = measure(plain, options.steps)
        step, rest = measure(ours, options.steps)
        after, _ = measure(plain, options.steps)
        ratios.append(2 * step / (before + after))
        steps.append(step)
        rounds.append(rest)
    return {
        "name": f"method_cost/{label}",
        "ratio": statistics.median(ratios),
        "relative_to": f"a step of {relative_to}, {options.network}, {options.size} pixels, batch {options.batch}, "
        f"{options.device}",
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "seconds_per_step": statistics.median(steps),
        "seconds_per_round_besides": statistics.median(rounds),
    }


def public_images(options: argparse.Namespace) -> Public:
    """Return 256 public images of 32 pixels over 100 classes, with the answers of two teachers."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(100, (256,), generator=generator)
    items = [{"id": str(i), "label": int(y)} for i, y in enumerate(labels)]
    images = torch.randn(256, 3, 32, 32, generator=generator).to(options.device)
    shard = Shard.of(Stacked(items, images, labels.to(options.device)), range(256))
    answers = tuple(torch.randn(256, 100, generator=generator).softmax(1) for _ in range(2))
    return Public("random", shard, Task("classification", tuple(map(str, range(100)))), answers)


def fedhelp_rows(chosen: dict[str, Any], options: argparse.Namespace) -> list[dict[str, object]]:
    """Time a large and a small site of FedHelp, each against itself with its cross-entropy only."""
    public, small = (
        public_images(options),
        argparse.Namespace(**{**vars(options), "network": options.small}),
    )
    large = argparse.Namespace(**{**vars(options), "network": options.large})
    helped = Federation(
        methods.load("fedhelp", {"large": "a", **chosen}), small, options.large, public
    )
    alone = Federation(methods.load("local"), large)
    rows = [in_turn("fedhelp large site", helped, alone, "Local", large)]
    taught = Federation(methods.load("fedhelp", {"large": "b", **chosen}), small, public=public)
    untaught = Federation(methods.load("fedavg"), small)
    return [*rows, in_turn("fedhelp small site", taught, untaught, "FedAvg", small)]


def generator_part(options: argparse.Namespace) -> dict[str, object]:
    """Time one training of FedBM's generator at its defaults against the rounds between two of them."""
    narrow = argparse.Namespace(**{**vars(options), "batch": 8})
    federation = Federation(loaded("fedbm", {}), narrow)
    step, _ = measure(federation, options.steps)
    iterations = options.iterations
    method = replace(federation.method, g_start=1, g_every=1, g_iterations=iterations, g_batch=64)
    replies = {"a": Message({"weights": federation.server["weights"]}, {"samples": 1})}
    _wait()
    started = time.perf_counter()
    with federation.networks.scope():
        method.aggregate(federation.host(1), federation.server, replies, 1)
    _wait()
    training = (time.perf_counter() - started) * 100 / iterations
    rounds = ROUNDS_OF_A_CYCLE * STEPS_OF_A_ROUND * step
    return {
        "name": "method_cost/fedbm generator",
        "ratio": training / (training + rounds),
        "relative_to": f"itself and {ROUNDS_OF_A_CYCLE} rounds of {STEPS_OF_A_ROUND} steps, batch 8 and 16 synthetic",
        "seconds_per_cycle": training,
        "seconds_of_the_rounds": rounds,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--methods", default="", help="names, comma-separated; default: all")
    parser.add_argument(
        "--set", action="append", default=[], metavar="OPTION=VALUE", help="an option of them all"
    )
    parser.add_argument("--network", default="resnet18")
    parser.add_argument("--large", default="resnet110", help="of FedHelp's large site")
    parser.add_argument("--small", default="resnet20", help="of FedHelp's small site and proxy")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="pixels a side")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--iterations", type=int, default=100, help="of FedBM's generator that are timed"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = dict(text.split("=", 1) for text in options.set)
    names = (
        options.methods.split(",")
        if options.methods
        else [n for n in methods.names() if n != "fedavg"]
    )
    rows = [compare(name, chosen, options) for name in names if name != "fedhelp"]
    if "fedhelp" in names:
        rows += fedhelp_rows(chosen, options)
    if "fedbm" in names and not chosen:
        rows.append(generator_part(options))
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        spread = (
            f" (min {row['ratio_min']:.3f}, max {row['ratio_max']:.3f})"
            if "ratio_min" in row
            else ""
        )
        print(f"{row['name']:<34} ratio {row['ratio']:.3f}{spread}")


if __name__ == "__main__":
    main()
