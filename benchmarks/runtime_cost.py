"""Seconds a round, memory of each process and bytes on the wire of the runtimes, against the simulator's.

FedAvg with plain SGD, one thread a process, no evaluation: resnet18 on 2 sites x 60 images of 28x28, and a 3D U-Net on
4 sites x 12 volumes of the hippocampus bundle's phantom (the jobs of `overhead.py`). Each runtime runs as a program of
its own: medfl's simulator in one process, MONAI FL's ClientAlgo in one process, and FLARE's simulator with a process
for the server and one for each site. Seconds are the median of the rounds after the first, as rounds.jsonl has them;
with FLARE the sites work at the same time, so with a core for each a round may take less than the simulator's. Memory
is the largest resident size of any process of its kind. Bytes on the wire are what the TCP sockets of the federation's
own processes took in between the first and the last round, FLARE's own talk among them, over the encoded messages of
these rounds; other traffic does not count.

    pip install 'medfl-monai[flare]'
    python benchmarks/runtime_cost.py [--json] [--rounds 6] [--networks resnet18,unet8] [--runtimes ...] [--images 60]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from overhead import SGD, cohort, job_of
from sockets import Received

from medfl.runs.launch import federate

SITES, IMAGES, SIZE = 2, 60, 28
RUNTIMES = ("simulator", "monai-fl", "flare")
LOOK_EVERY = 1.0
"""Seconds between two looks at the sockets in a round; one that closes in between is missed by what came since."""


def run_one(task: dict[str, Any]) -> None:
    """Run a federation; this is the program that is measured."""
    federate(
        task["bundle"], config=task["config"], requested=task["requested"], jobs=1, out=task["out"],
        runtime=task["runtime"],
    )  # fmt: skip


def measure(
    runtime: str, network: str, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Run one runtime on one network and return its figures."""
    rounds = options.rounds
    job = job_of(network, argparse.Namespace(sites=SITES, images=options.images, size=SIZE))
    data, partition = cohort(job, folder)
    out = folder / f"{network}-{runtime}"
    requested = {
        "data": str(data), "partition": f"file:{partition}", "rounds": rounds, "local_epochs": 1,
        "batch_size": job.batch, "lr": 0.01, "eval_every": 0, "cohort": 1.0,
    }  # fmt: skip
    task = {
        "bundle": job.bundle,
        "config": {"network": network, "optimizer": SGD, **job.config},
        "requested": requested,
    }
    command = [
        sys.executable,
        __file__,
        "--one",
        json.dumps({**task, "out": str(out), "runtime": runtime}),
    ]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    memory: dict[str, int] = {}
    carried: dict[int, int] = {}
    received, looked = Received(), 0.0
    while child.poll() is None:
        pids = _look(child.pid, memory)
        log = out / "rounds.jsonl"
        done = log.read_text().count("\n") if log.is_file() else 0
        if runtime == "flare" and (done not in carried or time.monotonic() - looked > LOOK_EVERY):
            carried.setdefault(done, received.look(pids))
            looked = time.monotonic()
        time.sleep(0.02)
    assert child.returncode == 0, (runtime, network)
    entries = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    encoded = sum(entry["bytes_up"] + entry["bytes_down"] for entry in entries[1:])
    crossed = carried[rounds] - carried[1] if {1, rounds} <= carried.keys() else 0
    return {
        "seconds_per_round": statistics.median(entry["seconds"] for entry in entries[1:]),
        "memory_bytes": memory,
        "encoded_bytes_per_round": encoded / (rounds - 1),
        "wire_over_encoded": crossed / encoded if runtime == "flare" else None,
    }


def _look(pid: int, memory: dict[str, int]) -> list[int]:
    """Note the resident sizes of a program's processes by what they are; return the processes."""
    pids: list[int] = []
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            pids.append(process.pid)
            words = " ".join(process.cmdline())
            kind = (
                "site"
                if "simulator_worker" in words
                else "server"
                if "simulator.simulator" in words
                else "command"
            )
            memory[kind] = max(memory.get(kind, 0), process.memory_info().rss)
    except psutil.Error:  # it has ended
        pass
    return pids


def compare(
    network: str, runtimes: list[str], folder: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each runtime."""
    found = {
        runtime: measure(runtime, network, folder, options) for runtime in ["simulator", *runtimes]
    }
    base = found["simulator"]["seconds_per_round"]
    return [
        {
            "name": f"runtime_cost/{network}/{runtime}",
            "ratio": found[runtime]["seconds_per_round"] / base,
            "relative_to": "medfl's simulator in one process, same arithmetic",
            **found[runtime],
        }
        for runtime in dict.fromkeys(["simulator", *runtimes])
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--images", type=int, default=IMAGES, help="of each site, for classifiers")
    parser.add_argument("--networks", default="resnet18,unet8")
    parser.add_argument("--runtimes", default=",".join(RUNTIMES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(json.loads(options.one))
        return
    assert options.rounds > 1, "the first round is not counted"
    runtimes = [runtime for runtime in options.runtimes.split(",") if runtime != "simulator"]
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            r
            for n in options.networks.split(",")
            for r in compare(n, runtimes, Path(folder), options)
        ]
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        memory = ", ".join(
            f"{kind} {size / 2**30:.2f} GiB" for kind, size in row["memory_bytes"].items()
        )
        wire = row["wire_over_encoded"]
        carried = f", wire {wire:.3f} x the encoded bytes" if wire else ""
        print(
            f"{row['name']:<36} ratio {row['ratio']:.2f}  {row['seconds_per_round']:.2f} s a round; {memory}{carried}"
        )


if __name__ == "__main__":
    main()
