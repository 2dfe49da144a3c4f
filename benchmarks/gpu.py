"""Local steps a second on a GPU, captured and eager, of each method, and how near the captured ones come to the floor.

A method's local training is timed in round 2 (prototypes, histories and the generator are there) on one site, from the
step after which all are replays to the last. Eager is the same without captures. The floor is the time that the kernels
of these steps take by themselves, summed by torch.profiler: no way of launching them is faster. Methods that cannot be
captured run eagerly both times; the row says why. The last row is a 3D U-Net with FedAvg, in images a second.

    python benchmarks/gpu.py [--json] [--methods fedavg,moon] [--network resnet18] [--batch 8] [--sizes 28,64,128]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from method_cost import Federation, loaded, public_images
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from medfl import methods, training
from medfl.capturing import Steps, allowed
from medfl.errors import InputError
from medfl.prepared import Shard, Stacked
from medfl.site import LocalSettings, Networks, Site

SKIPPED = 8
"""Steps of a visit before the clock starts: warm-ups, a capture, and some replays."""

CHOSEN: dict[str, dict[str, Any]] = {"fedhelp": {"large": "a"}}
CUBE, VOLUMES = 64, 2  # voxels a side, images a batch


class Long(Federation):
    """The federation of `method_cost`, with all steps of a visit in one local epoch: the end of one stops the GPU."""

    def site(self, name: str, round_: int, steps: int) -> Site:
        """Return a site whose images come so often that they make `steps` batches."""
        site = super().site(name, round_, 1)
        return replace(site, train=Shard.of(self.data, [*range(self.batch)] * steps))


@dataclass
class Clock:
    """What the visits of one local training took, from the step after `SKIPPED` to the last.

    Attributes:
        steps: how many were timed.
        seconds: what they took.
        kernels: seconds that their kernels took, where these were asked for.
        replayed: how many of all steps were replays.
        eager: why none were.
    """

    profiled: bool = False
    steps: int = 0
    seconds: float = 0.0
    kernels: float = 0.0
    replayed: int = 0
    eager: str = ""

    def __post_init__(self) -> None:
        """Hold no profiler yet."""
        self._profile: Any = None

    def begin(self) -> None:
        """Start."""
        _wait()
        if self.profiled:
            kinds = {ProfilerActivity.CUDA} & supported_activities() or {ProfilerActivity.CPU}
            self._profile = profile(activities=kinds)
            self._profile.start()
        self._started = time.perf_counter()

    def end(self, steps: int) -> None:
        """Stop, after so many steps."""
        _wait()
        self.seconds += time.perf_counter() - self._started
        self.steps += steps
        if self._profile is not None:
            self._profile.stop()
            events = [e for e in self._profile.key_averages() if e.device_type == DeviceType.CUDA]
            self.kernels += sum(event.self_device_time_total for event in events) / 1e6
            self._profile = None


@contextmanager
def timed(clock: Clock) -> Iterator[None]:
    """Let the clock run in all visits inside the block."""

    class Timed(Steps):
        def __init__(self, step: Any, optimizer: Any, device: Any, expected: int, *rest: Any) -> None:
            super().__init__(step, optimizer, device, expected, *rest)
            self.calls, self.expected = 0, expected

        def __call__(self, x: Any, y: Any) -> torch.Tensor:
            if self.calls == SKIPPED:
                clock.begin()
            loss = super().__call__(x, y)
            self.calls += 1
            if self.calls == self.expected > SKIPPED:
                clock.end(self.expected - SKIPPED)
                clock.replayed += self.replayed
                clock.eager = clock.eager or self.eager
            return loss

    training.Steps = Timed  # type: ignore[misc]
    try:
        yield
    finally:
        training.Steps = Steps  # type: ignore[misc]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clocked(federation: Any, steps: int, capture: bool, profiled: bool = False) -> Clock:
    """Train a site in round 2 and return the clock."""
    clock = Clock(profiled)
    with allowed(capture), timed(clock):
        federation.seconds(steps)
    return clock


def measure(label: str, federation: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Time captured and eager steps in turn and return the row."""
    for capture in (True, False):
        clocked(federation, options.steps, capture)
    pairs = [[clocked(federation, options.steps, capture) for capture in (True, False)] for _ in range(options.repeats)]
    floor = clocked(federation, options.steps, True, profiled=True)
    return row(label, pairs, floor, options.device)


def row(label: str, pairs: list[list[Clock]], floor: Clock, device: str) -> dict[str, Any]:
    """Make a row of measurements.

    Args:
        label: what was trained.
        pairs: captured and eager, one after the other.
        floor: captured, with the kernels' time.
        device: of the network.
    """
    captured, eager = ([c.steps / c.seconds for c in column] for column in zip(*pairs, strict=True))
    ratios = [one / other for one, other in zip(captured, eager, strict=True)]
    speed, kernels = statistics.median(captured), floor.kernels / floor.steps
    return {
        "name": f"gpu/{label}",
        "ratio": statistics.median(ratios),
        "relative_to": f"the eager loop, {device}",
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "steps_per_second": speed,
        "steps_per_second_eager": statistics.median(eager),
        "floor_steps_per_second": 1 / kernels if kernels else None,
        "part_of_the_floor": speed * kernels if kernels else None,
        "replayed": pairs[0][0].replayed,
        "eager_because": pairs[0][0].eager,
    }


def of_method(name: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one method on images of one size."""
    chosen = argparse.Namespace(**{**vars(options), "size": size})
    made = Long(loaded(name, CHOSEN.get(name, {})), chosen, public=public_images(chosen))
    return measure(f"{name} {options.network} {size} pixels batch {options.batch}", made, options)


class Volumes:
    """A site with random volumes and a 3D U-Net, trained by FedAvg."""

    def __init__(self, device: str, cube: int = CUBE) -> None:
        """Draw the volumes of a batch."""
        from monai.losses import DiceCELoss
        from monai.networks.nets import UNet

        generator = torch.Generator().manual_seed(0)
        images = torch.randn(VOLUMES, 1, cube, cube, cube, generator=generator).to(device)
        masks = torch.randint(3, images.shape, generator=generator).float().to(device)
        self.data = Stacked([{"id": str(i)} for i in range(VOLUMES)], images, masks)
        self.loss = DiceCELoss(to_onehot_y=True, softmax=True)

        def build() -> nn.Module:
            return UNet(3, 1, 3, (16, 32, 64, 128), (2, 2, 2), num_res_units=2, norm="instance")

        self.networks = Networks(build, 0, torch.device(device))

    def seconds(self, steps: int) -> None:
        """Train for so many steps."""
        shard = Shard.of(self.data, [*range(VOLUMES)] * steps)
        settings = LocalSettings(1, VOLUMES, lambda network: torch.optim.SGD(network.parameters(), 1e-4, 0.9))
        site = Site("a", 2, shard, shard, shard, self.loss, settings, self.networks)
        with self.networks.scope():
            training.fit(site.model(self.networks.initial), site)


def of_volumes(options: argparse.Namespace, cube: int = CUBE) -> dict[str, Any]:
    """Measure the 3D U-Net."""
    made = measure(f"fedavg 3D U-Net {cube} voxels batch {VOLUMES}", Volumes(options.device, cube), options)
    images = {"images_per_second": VOLUMES, "images_per_second_eager": VOLUMES}
    return {**made, **{key: made[key.replace("images", "steps")] * count for key, count in images.items()}}


def told(one: dict[str, Any]) -> str:
    """Return a row as a line."""
    floor = one["part_of_the_floor"]
    line = f"{one['name']:<46} {one['steps_per_second']:>9.1f} steps/s, {one['ratio']:.2f} x eager "
    line += f"(min {one['ratio_min']:.2f}, max {one['ratio_max']:.2f})"
    line += f", {floor:.0%} of the floor" if floor is not None else ""
    line += f", {one['images_per_second']:.1f} images/s" if "images_per_second" in one else ""
    return line + (f"; not captured: {one['eager_because']}" if one["eager_because"] else "")


def parser() -> argparse.ArgumentParser:
    """Return the arguments."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print a JSON list of rows")
    made.add_argument("--methods", default="", help="names, comma-separated; default: all")
    made.add_argument("--network", default="resnet18")
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--sizes", default="28,64,128", help="pixels a side, comma-separated")
    made.add_argument("--steps", type=int, default=200, help="of a visit")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--device", default="cuda")
    made.add_argument("--no-3d", dest="volumes", action="store_false", help="leave the 3D U-Net out")
    return made


def checked(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the methods and sizes that are asked for.

    Raises:
        InputError: no such method or size, too few steps, or no GPU.
    """
    names = options.methods.split(",") if options.methods else methods.names()
    unknown = [name for name in names if name not in methods.names()]
    if unknown:
        raise InputError(f"--methods {unknown[0]}", f"methods are {', '.join(methods.names())}", "name some of them")
    sizes = options.sizes.split(",")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise InputError(f"--sizes {options.sizes}", "numbers of pixels, comma-separated", "give for example 28,64")
    if options.steps < 5 * SKIPPED:
        raise InputError(f"--steps {options.steps}", f"at least {5 * SKIPPED}: the first are not timed", "give more")
    if not options.device.startswith("cuda") or not torch.cuda.is_available():
        raise InputError(
            f"--device {options.device}, {torch.cuda.device_count()} CUDA devices here",
            "captured steps are measured on a GPU",
            "run this where there is one",
        )
    return [(name, int(size)) for size in sizes for name in names]


def main() -> int:
    """Run the benchmark."""
    options = parser().parse_args()
    try:
        asked = checked(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = []
    for name, size in asked:
        rows.append(of_method(name, size, options))
        if not options.json:
            print(told(rows[-1]), flush=True)
    if options.volumes:
        rows.append(of_volumes(options))
        if not options.json:
            print(told(rows[-1]))
    if options.json:
        print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
