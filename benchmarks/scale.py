"""Seconds a round, peak memory and bytes on disk of federations of 10 to 10,000 sites with at most 100 in the cohort.

Each site has four of the same 4,000 random images of 28x28, so that the data set takes the same memory however many
sites there are; what may grow is what is kept for each of them. One local epoch, batch 4, the bundles' small CNN, no
evaluation, one process. Every federation is run in a process of its own: FedAvg, and SCAFFOLD, whose sites keep a State
as large as the network. A round is the time from one commit to the next (median); memory and disk are read at the last
commit. Ratios are of seconds a round to the same method's at 100 sites, whose cohort is as large.

    python benchmarks/scale.py [--json] [--rounds 4] [--sites 10,100,1000,10000] [--methods fedavg,scaffold]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from medfl import methods, networks
from medfl.core.run import DataRecord, PartitionRecord, Run
from medfl.data.prepared import Stacked
from medfl.evaluation.evaluators import ClassEvaluator
from medfl.evaluation.metrics import summarise
from medfl.problem.tasks import KINDS
from medfl.runs.plan import versions
from medfl.runtimes.federation import Federation
from medfl.runtimes.output.pictures import Pictures
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.storage.run_folder import RunFolder

COHORT, IMAGES, OWN, CLASSES = 100, 4000, 4, 3
SECTIONS = {"train": IMAGES, "validate": COHORT, "test": COHORT}


class Random:
    """What a federation asks of a bundle, on random images."""

    name, task, key_metric, has_test = "random", "classification", "balanced_accuracy", True
    classes = tuple(f"class {i}" for i in range(CLASSES))
    evaluator, loss = ClassEvaluator(), staticmethod(nn.functional.cross_entropy)
    embeddings, is_scheduled, structures = None, False, ()
    metadata: dict[str, object] = {}
    kind, summarise = KINDS["classification"], staticmethod(summarise)

    def network(self) -> nn.Module:
        """Return the small CNN."""
        return networks.build("small_cnn", 1, CLASSES, 2)

    def optimizer(
        self, network: nn.Module, lr: float | None = None, epoch: int = 0
    ) -> torch.optim.Optimizer:
        """Return plain SGD."""
        return torch.optim.SGD(network.parameters(), lr=lr or 0.01)

    def section(self, name: str) -> SimpleNamespace:
        """Return a section without transforms."""
        return SimpleNamespace(source=SimpleNamespace(transforms=[]))

    def prepared(self, section: str, *, jobs: int = 1, progress: bool = False) -> Stacked:
        """Draw a section."""
        count, generator = SECTIONS[section], torch.Generator().manual_seed(len(section))
        y = torch.arange(count) % CLASSES
        items = [{"id": f"{section}{i}", "label": int(label)} for i, label in enumerate(y)]
        return Stacked(items, torch.randn(count, 1, 28, 28, generator=generator), y)


class Watched(RunFolder):
    """A run folder that notes the time of every commit."""

    def __init__(self, path: Path) -> None:
        """Begin with no commit."""
        super().__init__(path)
        self.commits: list[float] = []
        self.memory = 0

    def commit(self, *arguments: Any) -> None:
        """Commit, and look at the clock and the peak of the memory."""
        super().commit(*arguments)
        self.commits.append(time.perf_counter())
        self.memory = peak()


def peak() -> int:
    """Return the largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def record(method: str, sites: int, rounds: int) -> Run:
    """Return the run; the first hundred sites have a validation and a test image each."""
    held = {
        f"site-{i + 1}": {
            "train": [f"train{(i * OWN + j) % IMAGES}" for j in range(OWN)],
            "validate": [f"validate{i}"] * (i < COHORT),
            "test": [f"test{i}"] * (i < COHORT),
        }
        for i in range(sites)
    }
    return Run(
        bundle="random", bundle_path="", bundle_sha256="", method=method,
        options=methods.values_of(methods.load(method)), config={},
        data=DataRecord("phantom", "", "", "", dict(SECTIONS)), partition=PartitionRecord("file", 0, (), held),
        cohort=min(1.0, COHORT / sites), rounds=rounds, local_epochs=1, batch_size=OWN, lr=0.01, lr_decay=1.0, seed=0,
        device="cpu", amp=False, threads=1, eval_every=0, versions=versions(),
    )  # fmt: skip


def measure(method: str, sites: int, rounds: int) -> dict[str, Any]:
    """Run one federation in this process."""
    torch.set_num_threads(1)
    Pictures.finish = lambda *_: None  # type: ignore[method-assign]  # they are drawn once a run, and are no round
    imported, started = peak(), time.perf_counter()
    run = record(method, sites, rounds)
    with tempfile.TemporaryDirectory() as out:
        folder = Watched(Path(out))
        folder.state.mkdir()
        folder.write_run(run, {})
        federation = Federation(Random(), methods.load(method), run)  # type: ignore[arg-type]
        ready = time.perf_counter()
        Simulator(Execution(federation, folder)).execute()
        ended = time.perf_counter()
        disk = {path: path.stat().st_size for path in folder.path.rglob("*") if path.is_file()}
    spans = [
        after - before for before, after in zip(folder.commits, folder.commits[1:], strict=False)
    ]
    return {
        "name": f"scale/{method}-{sites}",
        "sites": sites,
        "cohort": len(federation.cohort(1)),
        "seconds_per_round": statistics.median(spans),
        "peak_memory_bytes": folder.memory,
        "memory_above_imports_bytes": folder.memory - imported,
        "disk_bytes": sum(disk.values()),
        "state_bytes": sum(size for path, size in disk.items() if path.parent.name == "state"),
        "start_seconds": ready - started,
        "end_seconds": ended - folder.commits[-1],
    }


def table(method: str, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Measure one method at all sizes, each in a process of its own."""
    rows = []
    for sites in sizes:
        command = [
            sys.executable,
            __file__,
            "--methods",
            method,
            "--sites",
            str(sites),
            "--rounds",
            str(rounds),
            "--one",
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    base = next((row for row in rows if row["sites"] == COHORT), rows[-1])
    for row in rows:
        row["ratio"] = row["seconds_per_round"] / base["seconds_per_round"]
        row["relative_to"] = f"seconds a round of {base['sites']} sites"
        row["memory_ratio"] = row["peak_memory_bytes"] / base["peak_memory_bytes"]
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of rows")
    parser.add_argument("--rounds", type=int, default=4, help="at least 2; the first is not timed")
    parser.add_argument("--sites", default="10,100,1000,10000")
    parser.add_argument("--methods", default="fedavg,scaffold")
    parser.add_argument(
        "--one", action="store_true", help="measure the first method and size in this process"
    )
    options = parser.parse_args()
    chosen, sizes = options.methods.split(","), [int(size) for size in options.sites.split(",")]
    if options.one:
        print(json.dumps(measure(chosen[0], sizes[0], options.rounds)))
        return
    rows = [row for method in chosen for row in table(method, sizes, options.rounds)]
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(
            f"{row['name']:<22} cohort {row['cohort']:>3}  {row['seconds_per_round']:>7.3f} s a round "
            f"(ratio {row['ratio']:.2f})  peak {row['peak_memory_bytes'] / 2**20:>6.0f} MiB, "
            f"{row['memory_above_imports_bytes'] / 2**20:>5.0f} above the imports  "
            f"disk {row['disk_bytes'] / 2**20:>7.1f} MiB  start {row['start_seconds']:.1f} s"
        )


if __name__ == "__main__":
    main()
