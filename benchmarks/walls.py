"""What the two processes cost: seconds more until a command ends, and the time of its rounds against one process.

A bundle that does not ship with medfl is trained with and without walls, in turn. At a site of a FLARE federation a
worker trains behind a pipe: its rounds take turns with those of the same site in one process; the weights of its
network cross the pipe both ways. What a machine does besides only adds, so the least of each kind are compared; where
it does much, the seconds of the processor say more than those of the clock.

    python benchmarks/walls.py [--json] [--repeats 12] [--rounds 1] [--network resnet18]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
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
from medfl.safety.bounds import beyond
from medfl.safety.sandbox import Allowed, Sandbox, devices, python_and_system

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
    """Return the seconds of a whole command, of its shortest round, and of the processor for all of it."""
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
    return seconds, min(rounds_seconds), processor


def commands(made: Path, images: Path, folder: Path, repeats: int, rounds: int) -> dict[str, Any]:
    """Return the difference of starts and ends, and the ratio of rounds, over commands with and without walls in turn.

    Other work on a machine only adds to what a command takes (caches, cores that are shared), so the least of each
    kind are compared; the medians of pairs are there to see how far they are from that.
    """
    kinds: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    command(made, images, folder / "first", rounds)  # writes caches that all others find
    for repeat in range(repeats):
        for walls in (True, False) if repeat % 2 else (False, True):
            out = folder / f"{repeat}-{walls}"
            flags = () if walls else ("--no-sandbox",)
            kinds[walls].append(command(made, images, out, rounds, *flags))

    walled, plain = (np.array(kinds[walls]) for walls in (True, False))
    pairs = np.median(walled - plain, axis=0)
    least = walled.min(axis=0) - plain.min(axis=0)
    return {
        "processor_seconds_more": least[2],
        "processor_seconds_more_in_pairs": pairs[2],
        "processor_seconds": plain.min(axis=0)[2],
        "seconds_more": least[0],
        "seconds_more_in_pairs": pairs[0],
        "round_ratio": walled.min(axis=0)[1] / plain.min(axis=0)[1],
    }


CALLS = {"stat": 130_000, "open and close": 18_000, "read": 34_000, "seek": 43_000, "map": 21_000}
"""Of the kernel by a command of one round, as `strace -fc` counts them: nearly all are Python's imports."""


def _calls() -> float:
    """Make those calls, and return the seconds of the processor."""
    file = __file__
    before = time.process_time()
    for _ in range(CALLS["stat"]):
        os.stat(file)
    for _ in range(CALLS["open and close"]):
        os.close(os.open(file, os.O_RDONLY))

    handle = os.open(file, os.O_RDONLY)
    for _ in range(CALLS["seek"]):
        os.lseek(handle, 0, os.SEEK_SET)
    for _ in range(CALLS["read"]):
        os.read(handle, 1)
    for _ in range(CALLS["map"]):
        mmap.mmap(-1, mmap.PAGESIZE).close()

    return time.process_time() - before


def _in_child(walled: bool, folder: Path) -> tuple[float, float]:
    """Return the seconds of the processor of a child: its start, with or without walls, and its calls."""
    here, there = os.pipe()
    before = time.process_time()
    allowed = Allowed(read=(*python_and_system(), folder), write=(folder, *devices()))
    sandbox = Sandbox(allowed) if walled else None
    child = os.fork()
    if not child:
        forked = time.process_time()
        if sandbox is not None:
            sandbox.enter()
        entered = time.process_time() - forked
        os.write(there, f"{entered} {_calls()}".encode())
        os._exit(0)

    begun = time.process_time() - before
    os.waitpid(child, 0)
    entered, calls = map(float, os.read(here, 100).split())
    os.close(here)
    os.close(there)
    return begun + entered, calls


def parts(folder: Path, repeats: int) -> dict[str, float]:
    """Return what walls add to a command: beginning them, the kernel's look at each call, the keeper's looks.

    Each is short, so that some of its repetitions meet no other work.
    """
    pairs = [(_in_child(True, folder), _in_child(False, folder)) for _ in range(repeats)]
    walled, plain = (np.array([pair[i] for pair in pairs]).min(axis=0) for i in (0, 1))
    before = time.process_time()
    for _ in range(repeats):
        beyond(os.getpgrp())

    return {
        "begin_processor_seconds": walled[0] - plain[0],
        "calls_processor_seconds": walled[1] - plain[1],
        "look_processor_seconds": (time.process_time() - before) / repeats,
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

    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sites}
    for repeat in range(repeats + 1):
        for name, algo in sorted(sites.items(), reverse=repeat % 2 == 1):
            before = time.process_time() + processor_seconds(worker)
            started = time.perf_counter()
            algo.train(exchange_object(weights, {ROUND: repeat + 1, BASE_ROUND: repeat}))
            seconds = time.perf_counter() - started
            processor = time.process_time() + processor_seconds(worker) - before
            taken[name].append((seconds, processor))

    # the first makes networks and caches
    held_rounds, own_rounds = (np.array(taken[name][1:]) for name in ("held", "here"))
    ratios = held_rounds.min(axis=0) / own_rounds.min(axis=0)
    pairs = np.median(held_rounds / own_rounds, axis=0)
    sites["held"].finalize()
    return {
        "worker_start_seconds": begun,
        "worker_start_processor_seconds": begun_processor,
        "round_ratio": ratios[0],
        "round_processor_ratio": ratios[1],
        "round_processor_ratio_in_pairs": pairs[1],
        "round_processor_seconds": own_rounds.min(axis=0)[1],
        "megabytes": sum(tensor.nbytes for tensor in initial.values()) / 1e6,
    }


def main() -> None:
    """Measure, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--network", default="resnet18")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made, images = bundle(folder)
        document = {
            "parts": parts(folder, args.repeats),
            "commands": commands(made, images, folder, args.repeats, args.rounds),
            "site": site(made, images, folder, args.repeats, args.network),
        }

    if args.json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        return

    for part, figures in document.items():
        for key, value in figures.items():
            sys.stdout.write(f"{part:10} {key:31} {value:.3f}\n")


if __name__ == "__main__":
    main()
