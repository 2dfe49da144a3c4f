"""What the two processes cost: seconds more until a command ends, and the time of its rounds against one process.

A bundle that does not ship with medfl is trained with and without walls, in turn; each pair has its difference. At a
site of a FLARE federation a worker trains behind a pipe: its rounds are measured beside those of the same site in one
process; the weights of its network cross the pipe both ways. Machines drift, so only what is paired counts, and
where they do other work, seconds of the processor more than those of the clock.

    python benchmarks/walls.py [--json] [--repeats 5] [--rounds 6] [--network resnet18]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from medfl.cli import main as medfl
from medfl.core.run import Run
from medfl.flare.offer import offer
from medfl.flare.site_config import SiteConfig, accepted_run, open_site
from medfl.flare.site_sandbox import held_site
from medfl.policy.policy import Policy
from medfl.runtimes.monai_fl.client import BASE_ROUND, ROUND, MedflClientAlgo, exchange_object

SIDE = 64
IMAGES = 200


def bundle(folder: Path) -> tuple[Path, Path]:
    """Write images of two classes, and what `medfl new` makes of them; return bundle and images."""
    draws = np.random.default_rng(0)
    images = folder / "images"
    for name, least in (("dark", 0), ("bright", 100)):
        (images / name).mkdir(parents=True)
        for i in range(IMAGES):
            pixels = draws.integers(least, least + 150, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(images / name / f"{i}.png")

    made = folder / "own"
    assert medfl(["new", str(made), "--images", str(images)]) == 0
    return made, images


def command(
    made: Path, images: Path, out: Path, rounds: int, *flags: str
) -> tuple[float, float, float]:
    """Return the seconds of a whole command, of its median round, and of the processor for all of it."""
    words = ["run", str(made), "--data", str(images), "--out", str(out), "--rounds", str(rounds)]
    words += ["--sites", "2", "--jobs", "1", *flags]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "medfl", *words],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    lines = (out / "rounds.jsonl").read_text().splitlines()
    rounds_seconds = [json.loads(line)["seconds"] for line in lines]
    return seconds, statistics.median(rounds_seconds), processor


def commands(made: Path, images: Path, folder: Path, repeats: int, rounds: int) -> dict[str, Any]:
    """Return the difference of starts and the ratio of rounds, each the median of pairs."""
    more = []
    processor = []
    ratios = []
    for repeat in range(repeats):
        walled = command(made, images, folder / f"walled-{repeat}", rounds)
        plain = command(made, images, folder / f"plain-{repeat}", rounds, "--no-sandbox")
        ratios.append(walled[1] / plain[1])
        processor.append(walled[2] - plain[2])
        more.append(walled[0] - plain[0] - rounds * (walled[1] - plain[1]))

    return {
        "seconds_more": statistics.median(more),
        "processor_seconds_more": statistics.median(processor),
        "round_ratio": statistics.median(ratios),
    }


def processor_seconds(process: int) -> float:
    """Return the seconds of the processor that a process's threads have used."""
    spent = [
        int(path.read_text().split()[0])
        for path in Path(f"/proc/{process}/task").glob("*/schedstat")
    ]
    return sum(spent) / 1e9


def site(made: Path, images: Path, folder: Path, repeats: int, network: str) -> dict[str, Any]:
    """Return what a held site's rounds take against those of a site in this process."""
    torch.set_num_threads(1)
    requested = {"rounds": 1, "local_epochs": 1, "batch_size": 16}
    name = "network_name"
    run = offer(
        str(made), ["a", "b"], config={name: network}, requested=requested, data=str(images)
    )
    (folder / "site").mkdir()
    config = SiteConfig(
        bundle=str(made), folder=str(folder / "site"), data=str(images), permits=(name,)
    )
    accepted: Run = accepted_run(run, "a", config)
    federation = open_site(run, "a", config)
    started = time.perf_counter()
    held = held_site(accepted, "a", config, folder, Policy(), str)
    begun = time.perf_counter() - started
    assert held._worker._process is not None
    worker = held._worker._process.pid
    begun_processor = processor_seconds(worker)

    initial = federation.networks.initial
    weights = {f"weights/{name}": tensor for name, tensor in initial.items()}
    sites = {"here": MedflClientAlgo(federation, "a"), "held": MedflClientAlgo(lambda: held, "a")}
    for algo in sites.values():
        algo.initialize()

    ratios = []
    processor_ratios = []
    for repeat in range(repeats + 1):
        taken = {}
        processor = {}
        for name, algo in sites.items():
            before = time.process_time() + processor_seconds(worker)
            started = time.perf_counter()
            algo.train(exchange_object(weights, {ROUND: repeat + 1, BASE_ROUND: repeat}))
            taken[name] = time.perf_counter() - started
            processor[name] = time.process_time() + processor_seconds(worker) - before

        if repeat:  # the first makes networks and caches
            ratios.append(taken["held"] / taken["here"])
            processor_ratios.append(processor["held"] / processor["here"])

    sites["held"].finalize()
    return {
        "worker_start_seconds": begun,
        "worker_start_processor_seconds": begun_processor,
        "round_ratio": statistics.median(ratios),
        "round_processor_ratio": statistics.median(processor_ratios),
        "round_processor_seconds": processor["here"],
        "megabytes": sum(tensor.nbytes for tensor in initial.values()) / 1e6,
    }


def main() -> None:
    """Measure, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--network", default="resnet18")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made, images = bundle(folder)
        document = {
            "commands": commands(made, images, folder, args.repeats, args.rounds),
            "site": site(made, images, folder, args.repeats, args.network),
        }

    if args.json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        return

    for part, figures in document.items():
        for key, value in figures.items():
            sys.stdout.write(f"{part:10} {key:22} {value:.3f}\n")


if __name__ == "__main__":
    main()
