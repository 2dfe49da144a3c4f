"""The stages of `gpu_day.py`: what each runs and measures, on a `Day`."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_day import Day

ROOT = Path(__file__).resolve().parents[1]
PIECE, AT_ONCE = 15 * 2**20, 4  # bytes; pieces that come back from one call
DRY = {"network": "small_cnn", "image_size": "32"}
SMALL_GENERATOR = ("--set", "g_iterations=2", "--set", "g_batch=8", "--set", "synthetic_batch=4")
SGD = (
    "{_target_: torch.optim.SGD, params: $@network_def.parameters(), lr: '@learning_rate', momentum: 0.9, "
    "weight_decay: 0.00001}"
)


class Cut(Exception):
    """The time of this call is over; what was done is kept."""


def environment(day: Day) -> None:
    """Whether the machine and the kit suffice: versions, the GPU, the images, one federated round."""
    from importlib import metadata

    import torch

    from medfl.core.release import DISTRIBUTION, version_of

    lacking = []
    for requirement in metadata.requires(DISTRIBUTION) or []:
        if "extra ==" not in requirement:
            name = requirement.split(">")[0].split("<")[0].split("=")[0].strip()
            try:
                metadata.version(name)
            except metadata.PackageNotFoundError:
                lacking.append(name)
    names = ("medfl", "torch", "torchvision", "monai", "numpy", "triton")
    versions = {name: version_of(name) for name in names if importlib.util.find_spec(name)}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    day.save(
        python=sys.version.split()[0], versions=versions, device=gpu or "CPU", cores=os.cpu_count()
    )
    of_dicom = ["SimpleITK", "pydicom"]
    day.add({"name": "missing packages", "found": lacking, "allowed": of_dicom})
    if set(lacking) - set(of_dicom):
        raise RuntimeError(
            f"without {', '.join(lacking)}; all but {' and '.join(of_dicom)} are needed: add their wheels to the kit"
        )
    if gpu is None and day.device != "cpu":
        raise RuntimeError("there is no CUDA device; --dry and --device cpu go without one")
    for bundle, folder in (
        ("ham10000", "ham10000"),
        ("mednist", "mednist"),
        ("hippocampus", "msd_hippocampus"),
    ):
        if not day.dry:
            code, output = day.command("-m", "medfl", "data", "check", bundle, *day.data(folder))
            day.add(
                {
                    "name": f"images of {bundle}",
                    "exit": code,
                    "said": output.strip().splitlines()[-1:],
                }
            )
    config = [f"--config={key}={value}" for key, value in DRY.items()]
    day.add(
        day.train("one-round", 1, "mednist", *day.data("mednist"), *config, "--batch-size", "32")
    )


def tests(day: Day) -> None:
    """Whether compiled and eager steps agree on a GPU; AMP, TF32 (pytest -m gpu)."""
    marked = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "pytest.mark.gpu" in path.read_text()
    ]
    found = day.work / "tests.xml"
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") and not day.dry else []
    try:
        day.command(
            "-m", "pytest", "-m", "gpu", "-q", "-rA", *workers, f"--junitxml={found}", *marked
        )
    finally:
        if found.is_file():
            suite = next(ET.parse(found).getroot().iter("testsuite"))
            day.save(
                tests={
                    key: int(suite.get(key, 0))
                    for key in ("tests", "failures", "errors", "skipped")
                }
            )
            for case in suite.iter("testcase"):
                bad = [*case.iter("failure"), *case.iter("error")]
                if bad:
                    day.add(
                        {
                            "name": f"{case.get('classname')}.{case.get('name')}",
                            "failed": bad[0].get("message"),
                        }
                    )


def table3(day: Day) -> None:
    """FedBM's Table III on all of HAM10000 (MedMNIST's split, ResNet-18, 128 pixels, 200 rounds, beta 0.05)."""
    from medfl.compare.papers import runs as tables

    table, cited = tables.load("fedbm/table3"), {}
    for method, name in (("fedavg", "FedAvg"), ("fedetf", "FedETF"), ("fedbm", "FedBM")):
        figures = table.published("ham10000", "dirichlet:0.05", name)
        cited[method] = {metric: [figure.mean, figure.sd] for metric, figure in figures.items()}
    base = ["ham10000", *day.data("ham10000"), "--eval-every", "10"]
    base += (
        [f"--config={k}={v}" for k, v in DRY.items()] if day.dry else ["--config=split=dermamnist"]
    )
    for seed in (0,) if day.dry else (0, 1, 2):
        runs, published = dict[str, Sequence[str]](), {}
        for method in ("fedavg", "fedetf", "fedcb", "fedbm"):
            small = SMALL_GENERATOR if day.dry and method == "fedbm" else ()
            runs[f"{method}-{seed}"] = [*base, "--method", method, "--seed", str(seed), *small]
            published[f"{method}-{seed}"] = cited.get(method)
        day.protocol(runs, 2 if day.dry else 200, published)


def steps(day: Day) -> None:
    """Local steps a second of five methods, eager and compiled, against the bare loop and the floor."""
    import gpu

    arguments = ["--device", day.device]
    if day.dry:
        arguments += [
            "--methods",
            "fedavg,fedhelp",
            "--network",
            "small_cnn",
            "--batch",
            "2",
            "--sizes",
            "32",
        ]
        arguments += ["--ways", "eager", "--steps", "32", "--repeats", "1", "--no-3d"]
    for row in gpu.rows(gpu.parser().parse_args(arguments), [row["name"] for row in day.rows]):
        day.add(row)
        if day.left < 0:
            raise Cut


def volumes(day: Day) -> None:
    """Images a second of a 3D U-Net on hippocampus volumes: eager, AMP, channels last, compiled."""
    ways = {
        "eager": [],
        "amp": ["--amp"],
        "channels-last": ["--channels-last"],
        "compiled": ["--compile"],
    }
    for way, flags in ways.items():
        if day.dry and way not in ("eager", "channels-last"):
            continue
        name, base = (
            f"hippocampus-{way}",
            ["hippocampus", *day.data("msd_hippocampus"), "--eval-every", "0"],
        )
        base += (
            ["--config", "image_size=[16,24,16]", "--config", "patch_size=null"] if day.dry else []
        )
        row = day.train(name, 2 if day.dry else 8, *base, *flags)
        if "failed" not in row:
            row["images_per_second"] = 4 * (
                row["site_steps_per_second"] or 0
            )  # the protocol's batches
        day.add(row)


def fedhelp(day: Day) -> None:
    """FedHelp's Table 1 on four real centres: its gain over FedAvg, FedProx and Local at each site."""
    small = [f"--config={key}={value}" for key, value in DRY.items()]
    teacher = day.train(
        "teacher", 1 if day.dry else 10, "mednist", "--method", "central", *day.data("mednist"),
        *(small if day.dry else ["--config=network=resnet20", "--batch-size", "32"]),
    )  # fmt: skip
    if "failed" in teacher:
        day.add(teacher)
        return
    base = ["isic19", *day.data(""), "--eval-every", "10", "--partition"]
    base += ["centre", *small, "--local-epochs", "1"] if day.dry else ["centre:rosendahl=180/45"]
    base += [] if day.dry else ["--config=image_size=128"]
    public = "mednist" if day.dry else f"mednist:{day.kit / 'data' / 'mednist'}"
    large = ["--set", "large=vidir_modern,vidir_molemax", "--set", f"public={public}"]
    large += ["--set", f"teachers=run:{day.folder('teacher')}"]
    large += ["--set", f"large_network={'two_conv' if day.dry else 'resnet110'}"]
    for seed in (0,) if day.dry else (0, 1, 2):
        runs = {
            f"{method}-{seed}": [*base, "--method", method, "--seed", str(seed), *more]
            for method, more in {"fedavg": [], "fedprox": [], "local": [], "fedhelp": large}.items()
        }
        day.protocol(runs, 1 if day.dry else 100, {})


def fedmr(day: Day) -> None:
    """FedMR's P10C3 on MedNIST with ResNet-18, its two weights tuned on validation images of seed 0, three seeds."""
    base = [
        "mednist",
        *day.data("mednist"),
        "--partition",
        "classes:3",
        "--sites",
        "4" if day.dry else "10",
    ]
    base += ["--cohort", "1", "--eval-every", "5"]
    if day.dry:
        base += [f"--config={key}={value}" for key, value in DRY.items()]
    else:
        base += [
            "--local-epochs",
            "10",
            "--batch-size",
            "32",
            "--lr",
            "0.01",
            "--config=image_size=32",
        ]
        base += ["--config=network=resnet18s", f"--config=optimizer={SGD}"]
    rounds = 1 if day.dry else 30
    tried = {}
    for mu in (0.1,) if day.dry else (0.001, 0.01, 0.1):
        row = day.train(f"fedmr-mu{mu}-0", rounds, *base, *weights_of(mu), "--seed", "0")
        day.add(row)
        if row.get("validation"):
            tried[mu] = max(value["balanced_accuracy"] for _, value in row["validation"])
    best = max(tried, key=lambda mu: tried[mu])
    day.save(mu=best, validation_of_mu={str(mu): value for mu, value in tried.items()})
    for seed in (0,) if day.dry else (0, 1, 2):
        for method, more in {
            "fedavg": [],
            "fedprox": [],
            "moon": [],
            "fedmr": weights_of(best)[2:],
        }.items():
            name = f"fedmr-mu{best}-{seed}" if method == "fedmr" else f"{method}-{seed}"
            day.add(day.train(name, rounds, *base, "--method", method, *more, "--seed", str(seed)))


def weights_of(mu: float) -> list[str]:
    """Return the flags of FedMR with one weight for both losses."""
    return ["--method", "fedmr", "--set", f"mu1={mu}", "--set", f"mu2={mu}"]


def busy(day: Day) -> None:
    """How much of the time the GPU is busy, and what is gained, with six small federations at once."""
    grid = [
        "pneumonia",
        "--data",
        "phantom",
        "--methods",
        "fedavg,fedprox",
        "--seeds",
        "0,1,2",
        "--sites",
        "6",
    ]
    grid += [
        "--partition",
        "iid",
        "--eval-every",
        "0",
        "--rounds",
        "1" if day.dry else "20",
        "--batch-size",
        "8",
    ]
    grid += (
        ["--seeds", "0", *(f"--config={key}={value}" for key, value in DRY.items())]
        if day.dry
        else ["--config=network=resnet18", "--config=image_size=32"]
    )
    for jobs in (1, 6):
        name = f"{jobs} at once"
        if day.has(name):
            continue
        out, started = day.work / "grids" / f"{jobs}-{time.time_ns()}", time.monotonic()
        with utilisation(day.device) as seen:
            code, output = day.command(
                "-m",
                "medfl",
                "compare",
                *grid,
                "--jobs",
                jobs,
                "--device",
                day.device,
                "--quiet",
                "--out",
                out,
            )
        seconds = time.monotonic() - started
        share = statistics.mean(seen) / 100 if seen else None
        failed = {"failed": output.strip().splitlines()[-1]} if code else {}
        day.add({"name": name, "seconds": seconds, "busy": share, "samples": len(seen), **failed})
    seconds = {row["name"]: row["seconds"] for row in day.rows}
    day.save(
        ratio=seconds["6 at once"] / seconds["1 at once"],
        relative_to="the same runs one after the other",
    )


@contextmanager
def utilisation(device: str) -> Iterator[list[float]]:
    """Collect the GPU's utilisation in percent, twice a second, as nvidia-smi says it; empty without one."""
    seen: list[float] = []
    if device == "cpu":
        yield seen
        return
    asked = [
        "nvidia-smi",
        "--query-gpu=utilization.gpu",
        "--format=csv,noheader,nounits",
        "-lms",
        "500",
    ]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True)
    try:
        yield seen
    finally:
        process.terminate()
        seen += [
            float(line)
            for line in (process.communicate()[0] or "").splitlines()
            if line.strip().isdecimal()
        ]


def checkpoint(day: Day) -> None:
    """Runs that have not reached their protocol's rounds, as pieces that a later day goes on from."""
    archive = day.work / "checkpoint.tar"
    if day.part == 0 or not archive.is_file():
        with tarfile.open(archive, "w") as made:
            for kept in sorted(day.work.glob("*.json")):
                made.add(kept, kept.name)
            for run in unfinished(day.work):
                made.add(
                    run,
                    str(run.relative_to(day.work)),
                    filter=lambda one: None if "/events" in one.name else one,
                )
    content = archive.stat().st_size
    count = math.ceil(content / PIECE)
    with archive.open("rb") as whole:
        for number in range(AT_ONCE * day.part, min(count, AT_ONCE * (day.part + 1))):
            whole.seek(number * PIECE)
            (day.out / f"checkpoint-{number:03d}-of-{count:03d}").write_bytes(whole.read(PIECE))
    day.add(
        {
            "name": "checkpoint",
            "bytes": content,
            "pieces": count,
            "parts": math.ceil(count / AT_ONCE),
        }
    )


def unfinished(work: Path) -> list[Path]:
    """Return the folders of runs with a saved round that are not finished, or have fewer rounds than their protocol."""
    whole = set()
    for stage in (json.loads(path.read_text()) for path in work.glob("*.json")):
        rows = [row for row in stage["rows"] if row.get("rounds", 0) >= row.get("of_rounds", 0)]
        whole |= {f"{stage['stage']}-{row['name']}" for row in rows}
    begun = sorted(path.parents[1] for path in (work / "runs").glob("*/state/manifest.json"))
    return [run for run in begun if run.name not in whole]


def restore(day: Day) -> None:
    """Take in pieces of a checkpoint; the runs are there when all pieces have come."""
    from medfl.datasets.readers.download import unpack

    pieces = day.work / "pieces"
    pieces.mkdir(exist_ok=True)
    for path in sorted(day.pieces.glob("checkpoint-*-of-*")) if day.pieces else []:
        (pieces / path.name).write_bytes(path.read_bytes())
    found = sorted(pieces.glob("checkpoint-*-of-*"))
    needed = int(found[0].name.rpartition("-")[2]) if found else 0
    if found and len(found) == needed:
        with (day.work / "restored.tar").open("wb") as whole:
            for path in found:
                whole.write(path.read_bytes())
        unpack(day.work / "restored.tar", day.work)
    day.add(
        {
            "name": "restored",
            "pieces": len(found),
            "of": needed,
            "complete": bool(found) and len(found) == needed,
        }
    )


STAGES: dict[str, Callable[[Day], None]] = {
    one.__name__: one for one in (environment, tests, table3, steps, volumes, fedhelp, fedmr, busy)
}
CARRIED: dict[str, Callable[[Day], None]] = {one.__name__: one for one in (checkpoint, restore)}
TOTAL = {"table3": 24.0}
"""Minutes that a stage may take in all its calls, where it is more than one call's."""
