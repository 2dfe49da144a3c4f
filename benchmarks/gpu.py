"""Local steps a second on a GPU: each way of doing them, against the bare PyTorch loop and the time of their kernels.

A method's local training is timed in round 2 (prototypes, histories and the generator are there), as the difference of
a long and a short visit: what a visit costs to begin is not in it. The ways are those of `medfl run`: eager, and
compiled (`--compile`). The bare loop is FedAvg's step in a few lines of PyTorch, on a batch that lies on the GPU. The
floor is the time that the kernels of a step take by themselves, summed by torch.profiler: no way of launching them one
by one is faster. The last rows are a 3D U-Net with FedAvg.

    python benchmarks/gpu.py [--json] [--methods fedavg,fedbm] [--network resnet18] [--batch 8] [--sizes 28,64,128]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from method_cost import CLASSES, Federation, loaded, public_images
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from medfl import methods, networks
from medfl.core.errors import InputError
from medfl.data.prepared import Shard, Stacked
from medfl.training.accelerate.compiled import compile_steps
from medfl.training.local_settings import LocalSettings
from medfl.training.network_pool import Networks
from medfl.training.site import Site, fit

EPOCH = 32
"""Steps of a local epoch; a short visit is one epoch, a long one has those that are timed besides."""
EAGER, COMPILED = "eager", "compiled"
SITE = "site-0"
CUBE, VOLUMES = 64, 2  # voxels a side, images a batch

Visit = Callable[[str, int], object]
"""Trains at a site for so many local epochs."""


class Long(Federation):
    """The federation of `method_cost` with one site, and `EPOCH` steps a local epoch."""

    def site(self, name: str, round_: int, steps: int) -> Site:
        """Return a site that trains for so many local epochs."""
        site = super().site(name, round_, steps)
        return replace(site, train=Shard.of(self.data, [*range(self.batch)] * EPOCH))

    def visit(self, name: str, epochs: int) -> None:
        """Train at a site."""
        with self.networks.scope(), self.large.scope():
            down = self.method.broadcast(self.host(2), self.server, name)
            site = self.site(name, 2, epochs)
            self.method.local_update(site, self.states[name], down)


class Volumes:
    """Sites with random volumes and a 3D U-Net, trained by FedAvg."""

    def __init__(
        self, device: str, cube: int = CUBE, amp: bool = False, channels_last: bool = False
    ) -> None:
        """Draw the volumes of a batch."""
        from monai.losses import DiceCELoss
        from monai.networks.nets import UNet

        generator = torch.Generator().manual_seed(0)
        images = torch.randn(VOLUMES, 1, cube, cube, cube, generator=generator).to(device)
        masks = torch.randint(3, images.shape, generator=generator).float().to(device)
        self.data = Stacked([{"id": str(i)} for i in range(VOLUMES)], images, masks)
        self.loss, self.amp = DiceCELoss(to_onehot_y=True, softmax=True), amp

        def build() -> nn.Module:
            made = UNet(3, 1, 3, (16, 32, 64, 128), (2, 2, 2), num_res_units=2, norm="instance")
            return made.to(memory_format=torch.channels_last_3d) if channels_last else made

        self.networks = Networks(build, 0, torch.device(device))

    def visit(self, name: str, epochs: int) -> None:
        """Train at a site."""
        shard = Shard.of(self.data, [*range(VOLUMES)] * EPOCH)
        settings = LocalSettings(
            epochs,
            VOLUMES,
            lambda network: torch.optim.SGD(network.parameters(), 1e-4, 0.9),
            amp=self.amp,
        )
        site = Site(name, 2, shard, shard, shard, self.loss, settings, self.networks)
        with self.networks.scope():
            fit(site.model(self.networks.initial), site)


@dataclass
class Timer:
    """Times visits done in one way, EAGER or COMPILED."""

    visit: Visit
    way: str

    def seconds(self, epochs: int) -> float:
        """Return the seconds that a visit takes."""
        with compile_steps() if self.way == COMPILED else nullcontext():
            _wait()
            started = time.perf_counter()
            self.visit(SITE, epochs)
            _wait()
            return time.perf_counter() - started

    def step(self, epochs: int) -> float:
        """Return the seconds of one step."""
        short, long = self.seconds(1), self.seconds(1 + epochs)
        return (long - short) / (epochs * EPOCH)

    def kernels(self, epochs: int) -> float:
        """Return the seconds that the kernels of one step take; 0 where there is no GPU."""
        short, long = (self._kernels(visited) for visited in (1, 1 + epochs))
        return (long - short) / (epochs * EPOCH)

    def _kernels(self, epochs: int) -> float:
        if ProfilerActivity.CUDA not in supported_activities() or not torch.cuda.is_available():
            return 0.0
        with profile(activities={ProfilerActivity.CUDA}, acc_events=True) as seen:
            self.seconds(epochs)
        events = [event for event in seen.key_averages() if event.device_type == DeviceType.CUDA]
        return sum(event.self_device_time_total for event in events) / 1e6


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bare(
    network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor, steps: int
) -> float:
    """Return the seconds of a step of a bare PyTorch loop."""
    optimizer = torch.optim.SGD(network.parameters(), 1e-4, 0.9)
    network.train()

    def run(count: int) -> float:
        _wait()
        started = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            loss(network(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        _wait()
        return time.perf_counter() - started

    run(EPOCH)
    return run(steps) / steps


def measure(
    label: str, visit: Visit, way: str, plain: Callable[[int], float], options: argparse.Namespace
) -> dict[str, Any]:
    """Time one way and the bare loop in turn and return the row.

    Args:
        label: what is trained.
        visit: trains at a site.
        way: EAGER or COMPILED.
        plain: steps -> seconds of a step of the bare loop.
        options: of the command line.
    """
    name = f"gpu/{label} {way}"
    timer, epochs = Timer(visit, way), max(1, options.steps // EPOCH)
    begun = time.perf_counter()
    timer.seconds(1)
    timer.seconds(1)
    prepared = time.perf_counter() - begun
    pairs = [(timer.step(epochs), plain(epochs * EPOCH)) for _ in range(options.repeats)]
    made = row(name, pairs, timer.kernels(epochs), options.device)
    return {**made, "refused": "", "seconds_until_it_repeats": prepared}


def row(
    name: str, pairs: Sequence[tuple[float, float]], kernels: float, device: str
) -> dict[str, Any]:
    """Make a row of measurements.

    Args:
        name: of the row.
        pairs: seconds of a step, and of a step of the bare loop, in turn.
        kernels: seconds of a step's kernels, 0 where they were not asked for.
        device: of the network.
    """
    ratios = [plain / step for step, plain in pairs]
    step, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "name": name,
        "ratio": statistics.median(ratios),
        "relative_to": f"the bare PyTorch loop of FedAvg's step, {device}",
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "steps_per_second": 1 / step,
        "steps_per_second_bare": 1 / plain,
        "floor_steps_per_second": 1 / kernels if kernels else None,
        "part_of_the_floor": kernels / step if kernels else None,
    }


def of_method(name: str, size: int, way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one method on images of one size in one way."""
    chosen = argparse.Namespace(**{**vars(options), "size": size})
    extra = {"large": SITE} if name == "fedhelp" else {}
    made = Long(loaded(name, extra), chosen, public=public_images(chosen), sites=[SITE])
    network = Networks(
        partial(networks.build, options.network, 3, CLASSES), 0, torch.device(options.device)
    ).fresh()
    plain = partial(bare, network, nn.functional.cross_entropy, made.data.inputs, made.data.targets)
    label = f"{name} {options.network} {size} pixels batch {options.batch}"
    return measure(label, made.visit, way, plain, options)


def of_volumes(
    way: str, options: argparse.Namespace, cube: int = CUBE, **changes: bool
) -> dict[str, Any]:
    """Measure the 3D U-Net in one way; `amp` and `channels_last` may be changed."""
    sites, plain = Volumes(options.device, cube, **changes), Volumes(options.device, cube)
    loop = partial(bare, plain.networks.fresh(), plain.loss, plain.data.inputs, plain.data.targets)
    label = " ".join([f"fedavg 3D U-Net {cube} voxels batch {VOLUMES}", *sorted(changes)])
    made = measure(label, sites.visit, way, loop, options)
    images = (
        {"images_per_second": VOLUMES * made["steps_per_second"]}
        if "steps_per_second" in made
        else {}
    )
    return {**made, **images}


def rows(options: argparse.Namespace, known: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the rows that are asked for, but for those whose names are known: the quick ways of all sizes first."""
    ways = options.ways.split(",")
    for way in ways:
        for size in numbers(options.sizes):
            for name in options.methods.split(","):
                label = f"gpu/{name} {options.network} {size} pixels batch {options.batch} {way}"
                if label in known:
                    continue
                try:
                    yield of_method(name, size, way, options)
                except InputError as error:  # FedBM's generator makes no images of 28 pixels
                    yield {"name": label, "refused": str(error)}
    for way in ways if options.volumes else []:
        for changes in [{}, {"amp": True}, {"channels_last": True}] if way == EAGER else [{}]:
            label = " ".join([f"gpu/fedavg 3D U-Net {CUBE} voxels batch {VOLUMES}", *changes, way])
            if label not in known:
                yield of_volumes(way, options, **changes)


def numbers(text: str) -> list[int]:
    """Return comma-separated whole numbers."""
    return [int(word) for word in text.split(",") if word]


def told(one: dict[str, Any]) -> str:
    """Return a row as a line."""
    if one["refused"]:
        return f"{one['name']:<60} cannot be had: {one['refused']}"
    floor = one["part_of_the_floor"]
    line = f"{one['name']:<60} {one['steps_per_second']:>9.1f} steps/s, {one['ratio']:.2f} x the bare loop "
    line += f"(min {one['ratio_min']:.2f}, max {one['ratio_max']:.2f})"
    line += f", {floor:.0%} of the floor" if floor is not None else ""
    return line + (
        f", {one['images_per_second']:.1f} images/s" if "images_per_second" in one else ""
    )


def parser() -> argparse.ArgumentParser:
    """Return the arguments."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="print a JSON list of rows")
    made.add_argument(
        "--methods", default="fedavg,fedbm,fedhelp,scaffold,fedmr", help="names, comma-separated"
    )
    made.add_argument("--network", default="resnet18")
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--sizes", default="28,64,128", help="pixels a side, comma-separated")
    made.add_argument(
        "--ways", default=f"{EAGER},{COMPILED}", help="of doing steps, comma-separated"
    )
    made.add_argument(
        "--steps", type=int, default=128, help=f"that are timed, a multiple of {EPOCH}"
    )
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--device", default="cuda")
    made.add_argument(
        "--no-3d", dest="volumes", action="store_false", help="leave the 3D U-Net out"
    )
    return made


def check(options: argparse.Namespace) -> None:
    """Check the arguments.

    Raises:
        InputError: no such method, no whole numbers, too few steps, or no GPU.
    """
    unknown = [name for name in options.methods.split(",") if name not in methods.names()]
    if unknown:
        raise InputError(
            f"--methods {unknown[0]}",
            f"methods are {', '.join(methods.names())}",
            "name some of them",
        )
    if not all(word.isdecimal() and int(word) > 0 for word in options.sizes.split(",")):
        raise InputError(
            f"--sizes {options.sizes}",
            "whole numbers above 0, comma-separated",
            "give for example 28,64",
        )
    if set(options.ways.split(",")) - {EAGER, COMPILED}:
        raise InputError(
            f"--ways {options.ways}", f"{EAGER} and {COMPILED}, comma-separated", "name one or both"
        )
    if options.steps < EPOCH:
        raise InputError(
            f"--steps {options.steps}", f"at least {EPOCH}, those of a local epoch", "give more"
        )
    if not options.device.startswith("cuda") or not torch.cuda.is_available():
        raise InputError(
            f"--device {options.device}, {torch.cuda.device_count()} CUDA devices here",
            "steps are measured on a GPU",
            "run this where there is one",
        )


def main() -> int:
    """Run the benchmark."""
    options = parser().parse_args()
    try:
        check(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    made = []
    for one in rows(options):
        made.append(one)
        if not options.json:
            print(told(one), flush=True)
    if options.json:
        print(json.dumps(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
