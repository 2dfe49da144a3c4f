"""Seconds a round of `medfl run` against a bare PyTorch loop that does the same arithmetic.

Both train FedAvg with plain SGD, one thread a process, evaluation off; the bare loop is one process, medfl has
`--jobs`. Two dimensions: 10 sites x 60 images of 28x28, batch 8, a classifier. Three: 4 sites x 12 volumes of the
hippocampus bundle's phantom, one patch of 24x40x24 a volume and epoch, batch 4, a U-Net with Dice + cross-entropy. The
bare loop has its batches in memory and no framework at all: it copies weights into one network, trains, copies them out
and averages. A round of medfl is what `federate` takes for one round more, so it includes everything that happens every
round: patches drawn, broadcasts, checks, byte counts, logs, saved state.

    python benchmarks/overhead.py [--json] [--rounds 6] [--repeats 5] [--networks small_cnn,resnet18,unet8]
                                  [--jobs 1,2] [--sites 10] [--images 60] [--size 28]   (the last three: classifiers)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from monai.losses import DiceCELoss
from torch import Tensor, nn

from medfl import datasets, networks
from medfl.runs.launch import federate
from medfl.runtimes.output.pictures import Pictures

SGD = {
    "_target_": "torch.optim.SGD",
    "params": "$@network_def.parameters()",
    "lr": "@learning_rate",
}
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        bundle: shipped bundle whose phantom medfl trains on.
        sites, images, batch: items of each site, and of a step.
        shape: (C, H, W[, D]) of an input.
        classes: outputs of the network.
        loss: the bundle's.
        phantom: arguments of the phantom cohort, large enough.
        config: ids of the bundle that differ from its own.
    """

    bundle: str
    sites: int
    images: int
    batch: int
    shape: tuple[int, ...]
    classes: int
    loss: Callable[[], nn.Module]
    phantom: dict[str, int]
    config: dict[str, Any]

    def network(self, name: str) -> nn.Module:
        """Build the network that medfl builds."""
        return networks.build(name, self.shape[0], self.classes, len(self.shape) - 1)

    def batches(self) -> list[list[Batch]]:
        """Return each site's batches, random numbers of the right shapes."""
        generator = torch.Generator().manual_seed(0)
        maps = (1, *self.shape[1:]) if self.network_makes_maps else ()
        sizes = [self.batch] * (self.images // self.batch) + [self.images % self.batch]
        return [
            [
                (
                    torch.randn(n, *self.shape, generator=generator),
                    torch.randint(self.classes, (n, *maps), generator=generator),
                )
                for n in sizes
                if n
            ]
            for _ in range(self.sites)
        ]

    @property
    def network_makes_maps(self) -> bool:
        """Whether targets are maps of classes."""
        return self.loss is not nn.CrossEntropyLoss


PLANAR = Job(
    "pbc",
    10,
    60,
    8,
    (3, 28, 28),
    8,
    nn.CrossEntropyLoss,
    {"per_class": 120, "size": 28},
    {"image_size": 28},
)
VOLUMES = Job(
    "hippocampus",
    4,
    12,
    4,
    (1, 24, 40, 24),
    3,
    lambda: DiceCELoss(to_onehot_y=True, softmax=True),
    {"per_class": 80},
    {"patch_size": [24, 40, 24]},
)


def job_of(network: str, options: argparse.Namespace) -> Job:
    """Return what a network is timed on."""
    if network in networks.SEGMENTERS:
        return VOLUMES
    size, wanted = options.size, options.sites * options.images
    return replace(
        PLANAR,
        sites=options.sites,
        images=options.images,
        shape=(3, size, size),
        phantom={"per_class": math.ceil(1.2 * wanted / (8 * 0.7)), "size": size},
        config={"image_size": size},
    )


def bare_rounds(network: str, job: Job, sites: list[list[Batch]], rounds: int) -> float:
    """Return the seconds of `rounds` rounds of FedAvg without a framework."""
    model, loss_function = job.network(network), job.loss()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    started = time.perf_counter()
    for _ in range(rounds):
        replies = []
        for batches in sites:
            model.load_state_dict(weights)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for x, y in batches:
                optimizer.zero_grad()
                loss_function(model(x), y).backward()
                optimizer.step()
            replies.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        with torch.no_grad():
            for name, tensor in weights.items():
                if tensor.is_floating_point():
                    tensor.zero_()
                    for reply in replies:
                        tensor.add_(reply[name], alpha=1 / len(sites))
                else:
                    tensor.copy_(replies[0][name])
    return time.perf_counter() - started


def medfl_seconds(
    network: str,
    job: Job,
    data: Path,
    partition: Path,
    rounds: int,
    jobs: int,
    compile_: bool = False,
) -> float:
    """Return the seconds of a whole `federate` call."""
    requested = {
        "data": str(data), "partition": f"file:{partition}", "rounds": rounds, "local_epochs": 1,
        "batch_size": job.batch, "lr": 0.01, "eval_every": 0, "cohort": 1.0, "lr_decay": 1.0, "compile": compile_,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        started = time.perf_counter()
        config = {"network": network, "optimizer": SGD, **job.config}
        federate(job.bundle, config=config, requested=requested, jobs=jobs, out=Path(out) / "run")
        return time.perf_counter() - started


def compare(
    network: str, jobs: int, folder: Path, options: argparse.Namespace
) -> dict[str, object]:
    """Time both in turn and return the median of the pairs' ratios."""
    job, rounds, repeats = job_of(network, options), options.rounds, options.repeats
    data, partition = cohort(job, folder)
    sites = job.batches()
    bare_rounds(network, job, sites, 1)
    medfl_seconds(network, job, data, partition, 1, jobs, options.compile)
    bare, ours, start = [], [], []
    for _ in range(repeats):
        first = bare_rounds(network, job, sites, rounds) / rounds
        short = medfl_seconds(network, job, data, partition, 1, jobs, options.compile)
        ours.append(
            (
                medfl_seconds(network, job, data, partition, 1 + rounds, jobs, options.compile)
                - short
            )
            / rounds
        )
        second = bare_rounds(network, job, sites, rounds) / rounds
        bare.append((first + second) / 2)
        start.append(short - ours[-1])
    ratios = [a / b for a, b in zip(ours, bare, strict=True)]
    name = f"overhead/{network}{'-3d' if job is VOLUMES else f'-{job.shape[1]}'}-{job.sites}-sites-jobs{jobs}"
    name += "-compiled" if options.compile else ""
    return {
        "name": name,
        "ratio": statistics.median(ratios),
        "relative_to": "bare PyTorch loop, same arithmetic, batches in memory",
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "seconds_per_round": statistics.median(ours),
        "bare_seconds_per_round": statistics.median(bare),
        "start_and_end_seconds": statistics.median(start),
    }


def cohort(job: Job, folder: Path) -> tuple[Path, Path]:
    """Draw a phantom and divide as many of its training items as the job takes; return both."""
    data, partition = folder / job.bundle, folder / f"{job.bundle}.csv"
    if not data.exists():
        datasets.write_phantom(job.bundle, data, **job.phantom)
        items = datasets.datalist(job.bundle, data, "train")
        wanted = job.sites * job.images
        assert len(items) >= wanted, (len(items), wanted)
        rows = [
            f"{item['id']},site-{index % job.sites + 1}"
            for index, item in enumerate(items[:wanted])
        ]
        partition.write_text("id,site\n" + "\n".join(rows) + "\n")
    return data, partition


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--networks", default="small_cnn,resnet18,unet8")
    parser.add_argument("--jobs", default="1", help="worker processes, comma-separated")
    parser.add_argument("--compile", action="store_true", help="compile medfl's training steps")
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--images", type=int, default=60, help="of each site")
    parser.add_argument("--size", type=int, default=28, help="pixels a side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    Pictures.finish = lambda *_: None  # type: ignore[method-assign]  # they are drawn once a run, and are no round
    with tempfile.TemporaryDirectory() as folder:
        grid = [
            (name, int(jobs))
            for name in options.networks.split(",")
            for jobs in options.jobs.split(",")
        ]
        table = [compare(name, jobs, Path(folder), options) for name, jobs in grid]
    if options.json:
        print(json.dumps(table))
        return
    for row in table:
        print(
            f"{row['name']:<40} ratio {row['ratio']:.3f} (min {row['ratio_min']:.3f}, max {row['ratio_max']:.3f})  "
            f"{row['seconds_per_round']:.3f} s a round, bare {row['bare_seconds_per_round']:.3f} s, "
            f"start and end {row['start_and_end_seconds']:.1f} s"
        )


if __name__ == "__main__":
    main()
