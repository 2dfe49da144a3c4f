"""What only a GPU can show, prepared for a machine that is at hand for half an hour and reaches no network.

    make gpu-kit                                        on a machine with a network and the images; 46 MiB
    python benchmarks/gpu_day.py --list                 the stages, and what each answers
    python benchmarks/gpu_day.py STAGE --out DIR        one stage, at most --minutes long
    python benchmarks/gpu_day.py --dry --out DIR        all of them at tiny size on the CPU, on drawn images

A stage leaves DIR/STAGE.json and DIR/STAGE.log. It keeps its runs and rows below --work: one that was cut goes on
there when it is called again, and one that is done is not done again. `checkpoint` writes unfinished runs as pieces of
at most 15 MiB, four a call (--part 0, 1, ...), and `restore --pieces DIR` takes them in on another machine, also
call by call. Packages that the machine lacks are installed from the kit into --work.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import resource
import signal
import statistics
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PIECE, AT_ONCE = 15 * 2**20, 4  # bytes; pieces that come back from one call
PROBE = 7
"""Rounds after which a protocol's time is estimated: FedBM trains its generator after five, then its images join in."""
STOPPING = 30  # seconds that a command has to save and end
METRICS = ("accuracy", "f1_macro", "balanced_accuracy", "auroc")

DRY = {"network": "small_cnn", "image_size": "32"}
SMALL_GENERATOR = ("--set", "g_iterations=2", "--set", "g_batch=8", "--set", "synthetic_batch=4")


class Cut(Exception):
    """The time of this call is over; what was done is kept."""


@dataclass
class Day:
    """One call of one stage.

    Attributes:
        stage: its name.
        out: folder of the JSON file and the log.
        work: folder of what has to outlive a call.
        kit: folder that `make gpu-kit` made.
        minutes: that this call may take.
        total: minutes that the stage may take in all its calls.
        dry: whether all is tiny and on drawn images.
        device: where networks are trained.
        part, pieces: of a checkpoint.
    """

    stage: str
    out: Path
    work: Path
    kit: Path
    minutes: float
    total: float
    dry: bool
    device: str
    part: int = 0
    pieces: Path | None = None
    document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Take up what an earlier call left."""
        self.begun = time.monotonic()
        self.document = {"stage": self.stage, "status": "cut", "dry": self.dry, "seconds": 0.0, "cpu_seconds": 0.0}
        self.document |= {"rows": []}
        if self._kept.is_file():
            self.document |= json.loads(self._kept.read_text())
        self._before = self.document["seconds"], self.document["cpu_seconds"]
        self._cpu = cpu_seconds()
        for folder in (self.out, self.work):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def _kept(self) -> Path:
        return self.work / f"{self.stage}.json"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was measured, also in earlier calls."""
        found: list[dict[str, Any]] = self.document["rows"]
        return found

    @property
    def left(self) -> float:
        """Seconds of this call that are left, but for what ending takes."""
        return self.begun + 60 * self.minutes - STOPPING - time.monotonic()

    def has(self, name: str) -> bool:
        """Tell whether a row is there."""
        return any(row["name"] == name for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Take a row in, in the place of one with its name, and save."""
        self.document["rows"] = [one for one in self.rows if one["name"] != row["name"]] + [row]
        self.say(f"  {row['name']}: " + ", ".join(f"{k} {short(v)}" for k, v in row.items() if k != "name"))
        self.save()

    def save(self, **changes: Any) -> None:
        """Write the stage's JSON file, here and where it outlives the call."""
        self.document |= changes
        self.document["seconds"] = self._before[0] + time.monotonic() - self.begun
        self.document["cpu_seconds"] = self._before[1] + cpu_seconds() - self._cpu
        for path in (self._kept, self.out / f"{self.stage}.json"):
            path.with_suffix(".part").write_text(json.dumps(self.document, indent=1))
            path.with_suffix(".part").replace(path)

    def say(self, line: str) -> None:
        """Print a line and write it to the log."""
        print(line, flush=True)
        with (self.out / f"{self.stage}.log").open("a") as log:
            log.write(line + "\n")

    def command(self, *words: str | Path) -> tuple[int, str]:
        """Run a command with this Python and return its exit code and output; it is interrupted when time is over.

        Raises:
            Cut: the time was over.
        """
        if self.left < 5:
            raise Cut
        self.say(f"$ python {' '.join(map(str, words))}")
        with (self.out / f"{self.stage}.log").open("a+") as log:
            log.seek(0, os.SEEK_END)
            start = log.tell()
            process = subprocess.Popen(
                [sys.executable, *map(str, words)],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            cut = False
            try:
                process.wait(self.left)
            except subprocess.TimeoutExpired:
                cut = True
                os.killpg(process.pid, signal.SIGINT)
                try:
                    process.wait(STOPPING - 5)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            log.seek(start)
            output = log.read()
        if cut:
            raise Cut
        return process.returncode, output

    # Runs

    def data(self, name: str) -> list[str]:
        """Return the flags that name a data set: the kit's, or drawn images."""
        return ["--data", "phantom" if self.dry else str(self.kit / "data" / name)]

    def folder(self, name: str) -> Path:
        """Return the folder of a run."""
        return self.work / "runs" / f"{self.stage}-{name}"

    def train(self, name: str, rounds: int, *arguments: str) -> dict[str, Any]:
        """Train a run to so many rounds, going on where it stands, and return its row.

        Raises:
            Cut: the time was over; the run goes on from its last round.
        """
        folder = self.folder(name)
        finished = status(folder)
        if finished.get("rounds", 0) >= rounds and finished.get("status") == "finished":
            return self.row(name)
        flags = ["--rounds", str(rounds), "--out", str(folder), "--jobs", "1", "--quiet"]
        if (folder / "run.json").is_file():
            code, output = self.command("-m", "medfl", "run", "--resume", *flags)
        else:
            code, output = self.command("-m", "medfl", "run", *arguments, "--device", self.device, *flags)
        if code:
            return {"name": name, "failed": output.strip().splitlines()[-1] if output.strip() else f"exit code {code}"}
        return self.row(name)

    def row(self, name: str) -> dict[str, Any]:
        """Return what a run has reached."""
        folder, found = self.folder(name), status(self.folder(name))
        rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        record = json.loads((folder / "run.json").read_text())
        scored = [(entry["round"], entry["val"]) for entry in rounds if entry["val"]]
        last, best = ({k: found.get(when, {}).get(k) for k in METRICS} for when in ("last", "best"))
        steps = sum(site["steps"] for entry in rounds[1:] for site in entry["sites"].values() if "steps" in site)
        spent = sum(entry["seconds_train"] for entry in rounds[1:])
        return {
            "name": name,
            "rounds": len(rounds),
            "seconds_per_round": statistics.median(entry["seconds"] for entry in rounds),
            "site_steps_per_second": steps / spent if spent else None,
            "last": last,
            "best": {**best, "round": found.get("best", {}).get("round")},
            "validation": scored,
            "site_models": found.get("site_models"),
            "peak_device_bytes": found.get("peak_device_bytes"),
            "packed": record.get("packed"),
            "run_hash": found.get("run_hash"),
            "weights_sha256": found.get("weights_sha256"),
            "data_source": record["data"]["source"],
            "command": record.get("command"),
        }

    def protocol(self, runs: dict[str, Sequence[str]], rounds: int, published: dict[str, Any]) -> None:
        """Train some runs for as many rounds as their protocol has, or as fit into the stage's total time.

        Args:
            runs: name -> arguments of `medfl run`.
            rounds: of the protocol.
            published: name -> the paper's figures, shown beside ours.
        """
        probe, speeds = min(PROBE, rounds), {}
        for name, arguments in runs.items():
            row = self.train(name, probe, *arguments)
            if "failed" in row:
                self.add(row)
                continue
            lines = [json.loads(line) for line in (self.folder(name) / "rounds.jsonl").read_text().splitlines()]
            server = max(entry["seconds_server"] for entry in lines)
            speeds[name] = statistics.mean(entry["seconds"] for entry in lines[-2:]) + server / 5
            if not self.has(name):
                self.add({**row, "of_rounds": rounds, "published": published.get(name)})
        if not speeds:
            return
        if "rounds" not in self.document:
            needed, allowed = rounds * sum(speeds.values()), 60 * self.total - self.document["seconds"]
            reach = rounds if needed <= allowed else max(probe, 10 * math.floor(rounds * allowed / needed / 10))
            self.save(rounds=reach, of_rounds=rounds, seconds_for_one_seed=needed)
            self.say(f"{rounds} rounds of these take {needed / 60:.1f} min: {reach} rounds are trained")
        for name in speeds:
            row = self.train(name, self.document["rounds"], *runs[name])
            self.add({**row, "of_rounds": rounds, "published": published.get(name)})


def status(folder: Path) -> dict[str, Any]:
    """Return a run's summary, empty if it has none yet."""
    path = folder / "summary.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has waited for."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def short(value: Any) -> str:
    """Return a value for a line of the log."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 100 else text[:97] + "..."


# Stages


def environment(day: Day) -> None:
    """Whether the machine and the kit suffice: versions, the GPU, the images, one federated round."""
    from importlib import metadata

    import torch

    lacking = []
    for requirement in metadata.requires("medfl") or []:
        if "extra ==" not in requirement:
            name = requirement.split(">")[0].split("<")[0].split("=")[0].strip()
            try:
                metadata.version(name)
            except metadata.PackageNotFoundError:
                lacking.append(name)
    names = ("medfl", "torch", "torchvision", "monai", "numpy", "triton")
    versions = {name: metadata.version(name) for name in names if importlib.util.find_spec(name)}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    day.save(python=sys.version.split()[0], versions=versions, device=gpu or "CPU", cores=os.cpu_count())
    day.add({"name": "missing packages", "found": lacking, "allowed": ["SimpleITK"]})
    if set(lacking) - {"SimpleITK"}:
        raise RuntimeError(f"without {', '.join(lacking)}; all but SimpleITK are needed: add their wheels to the kit")
    if gpu is None and day.device != "cpu":
        raise RuntimeError("there is no CUDA device; --dry and --device cpu go without one")
    for bundle, folder in (("ham10000", "ham10000"), ("mednist", "mednist"), ("hippocampus", "msd_hippocampus")):
        if not day.dry:
            code, output = day.command("-m", "medfl", "data", "check", bundle, *day.data(folder))
            day.add({"name": f"images of {bundle}", "exit": code, "said": output.strip().splitlines()[-1:]})
    config = [f"--config={key}={value}" for key, value in DRY.items()]
    day.add(day.train("one-round", 1, "mednist", *day.data("mednist"), *config, "--batch-size", "32"))


def tests(day: Day) -> None:
    """Whether captured, packed, compiled and eager steps agree on a GPU; AMP, TF32, memory limits (pytest -m gpu)."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    found = day.work / "tests.xml"
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") and not day.dry else []
    try:
        day.command("-m", "pytest", "-m", "gpu", "-q", "-rA", *workers, f"--junitxml={found}", *marked)
    finally:
        if found.is_file():
            suite = next(ET.parse(found).getroot().iter("testsuite"))
            day.save(tests={key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")})
            for case in suite.iter("testcase"):
                bad = [*case.iter("failure"), *case.iter("error")]
                if bad:
                    day.add({"name": f"{case.get('classname')}.{case.get('name')}", "failed": bad[0].get("message")})


def table3(day: Day) -> None:
    """FedBM's Table III on all of HAM10000 (MedMNIST's split, ResNet-18, 128 pixels, 200 rounds, beta 0.05)."""
    from medfl.compare.papers import tables

    table, cited = tables.load("fedbm/table3"), {}
    for method, name in (("fedavg", "FedAvg"), ("fedetf", "FedETF"), ("fedbm", "FedBM")):
        figures = table.published("ham10000", "dirichlet:0.05", name)
        cited[method] = {metric: [figure.mean, figure.sd] for metric, figure in figures.items()}
    base = ["ham10000", *day.data("ham10000"), "--eval-every", "10"]
    base += [f"--config={k}={v}" for k, v in DRY.items()] if day.dry else ["--config=split=dermamnist", "--pack", "5"]
    for seed in (0,) if day.dry else (0, 1, 2):
        runs, published = dict[str, Sequence[str]](), {}
        for method in ("fedavg", "fedetf", "fedcb", "fedbm"):
            small = SMALL_GENERATOR if day.dry and method == "fedbm" else ()
            runs[f"{method}-{seed}"] = [*base, "--method", method, "--seed", str(seed), *small]
            published[f"{method}-{seed}"] = cited.get(method)
        day.protocol(runs, 2 if day.dry else 200, published)


def steps(day: Day) -> None:
    """Local steps a second of five methods, eager, captured, compiled, packed, against the bare loop and the floor."""
    import gpu

    arguments = ["--device", day.device]
    if day.dry:
        arguments += ["--methods", "fedavg,fedhelp", "--network", "small_cnn", "--batch", "2", "--sizes", "32"]
        arguments += ["--packs", "2", "--steps", "32", "--repeats", "1", "--no-3d"]
    for row in gpu.rows(gpu.parser().parse_args(arguments), [row["name"] for row in day.rows]):
        day.add(row)
        if day.left < 0:
            raise Cut


def volumes(day: Day) -> None:
    """Images a second of a 3D U-Net on hippocampus volumes: eager, AMP, channels last, captured, compiled."""
    ways = {"eager": [], "amp": ["--amp"], "channels-last": ["--channels-last"], "captured": ["--capture"]}
    ways |= {"packed": ["--pack", "4"], "compiled": ["--compile", "--capture"]}
    for way, flags in ways.items():
        if day.dry and way not in ("eager", "channels-last"):
            continue
        name, base = f"hippocampus-{way}", ["hippocampus", *day.data("msd_hippocampus"), "--eval-every", "0"]
        row = day.train(name, 2 if day.dry else 8, *base, *flags)
        if "failed" not in row:
            row["images_per_second"] = 4 * (row["site_steps_per_second"] or 0)  # the protocol's batches
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
    base += ["centre", *small, "--local-epochs", "1"] if day.dry else ["centre:rosendahl=180/45", "--pack", "4"]
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
    base = ["mednist", *day.data("mednist"), "--partition", "classes:3", "--sites", "4" if day.dry else "10"]
    base += ["--cohort", "1", "--eval-every", "5"]
    if day.dry:
        base += [f"--config={key}={value}" for key, value in DRY.items()]
    else:
        base += ["--local-epochs", "10", "--batch-size", "32", "--lr", "0.01", "--pack", "5", "--config=image_size=32"]
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
        for method, more in {"fedavg": [], "fedprox": [], "moon": [], "fedmr": weights_of(best)[2:]}.items():
            name = f"fedmr-mu{best}-{seed}" if method == "fedmr" else f"{method}-{seed}"
            day.add(day.train(name, rounds, *base, "--method", method, *more, "--seed", str(seed)))


SGD = (
    "{_target_: torch.optim.SGD, params: $@network_def.parameters(), lr: '@learning_rate', momentum: 0.9, "
    "weight_decay: 0.00001}"
)


def weights_of(mu: float) -> list[str]:
    """Return the flags of FedMR with one weight for both losses."""
    return ["--method", "fedmr", "--set", f"mu1={mu}", "--set", f"mu2={mu}"]


def busy(day: Day) -> None:
    """How much of the time the GPU is busy, and what is gained, with six small federations at once."""
    grid = ["pneumonia", "--data", "phantom", "--methods", "fedavg,fedprox", "--seeds", "0,1,2", "--sites", "6"]
    grid += ["--partition", "iid", "--eval-every", "0", "--rounds", "1" if day.dry else "20", "--batch-size", "8"]
    grid += (
        ["--seeds", "0", *(f"--config={key}={value}" for key, value in DRY.items())]
        if day.dry
        else ["--config=network=resnet18", "--config=image_size=32", "--capture"]
    )
    for jobs in (1, 6):
        name = f"{jobs} at once"
        if day.has(name):
            continue
        out, started = day.work / "grids" / f"{jobs}-{time.time_ns()}", time.monotonic()
        with utilisation(day.device) as seen:
            code, output = day.command(
                "-m", "medfl", "compare", *grid, "--jobs", jobs, "--device", day.device, "--quiet", "--out", out
            )
        seconds = time.monotonic() - started
        share = statistics.mean(seen) / 100 if seen else None
        failed = {"failed": output.strip().splitlines()[-1]} if code else {}
        day.add({"name": name, "seconds": seconds, "busy": share, "samples": len(seen), **failed})
    seconds = {row["name"]: row["seconds"] for row in day.rows}
    day.save(ratio=seconds["6 at once"] / seconds["1 at once"], relative_to="the same runs one after the other")


@contextmanager
def utilisation(device: str) -> Iterator[list[float]]:
    """Collect the GPU's utilisation in percent, twice a second, as nvidia-smi says it; empty without one."""
    seen: list[float] = []
    if device == "cpu":
        yield seen
        return
    asked = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "500"]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True)
    try:
        yield seen
    finally:
        process.terminate()
        seen += [float(line) for line in (process.communicate()[0] or "").splitlines() if line.strip().isdecimal()]


def checkpoint(day: Day) -> None:
    """Runs that have not reached their protocol's rounds, as pieces that a later day goes on from."""
    archive = day.work / "checkpoint.tar"
    if day.part == 0 or not archive.is_file():
        with tarfile.open(archive, "w") as made:
            for kept in sorted(day.work.glob("*.json")):
                made.add(kept, kept.name)
            for run in unfinished(day.work):
                made.add(run, str(run.relative_to(day.work)), filter=lambda one: None if "/events" in one.name else one)
    content = archive.stat().st_size
    count = math.ceil(content / PIECE)
    with archive.open("rb") as whole:
        for number in range(AT_ONCE * day.part, min(count, AT_ONCE * (day.part + 1))):
            whole.seek(number * PIECE)
            (day.out / f"checkpoint-{number:03d}-of-{count:03d}").write_bytes(whole.read(PIECE))
    day.add({"name": "checkpoint", "bytes": content, "pieces": count, "parts": math.ceil(count / AT_ONCE)})


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
        with tarfile.open(day.work / "restored.tar") as made:
            made.extractall(day.work, filter="data")
    day.add({"name": "restored", "pieces": len(found), "of": needed, "complete": bool(found) and len(found) == needed})


STAGES: dict[str, Callable[[Day], None]] = {
    one.__name__: one for one in (environment, tests, table3, steps, volumes, fedhelp, fedmr, busy)
}
CARRIED: dict[str, Callable[[Day], None]] = {one.__name__: one for one in (checkpoint, restore)}
TOTAL = {"table3": 24.0}
"""Minutes that a stage may take in all its calls, where it is more than one call's."""


def run(day: Day) -> int:
    """Do one stage and return an exit code: 0 done, 3 cut, 1 failed."""
    if day.document["status"] == "done" and day.stage in STAGES:
        day.say(f"{day.stage}: done before")
        day.save()
        return 0
    day.say(f"{day.stage}: {summary(day.stage)}")
    try:
        {**STAGES, **CARRIED}[day.stage](day)
    except (Cut, KeyboardInterrupt):
        day.save(status="cut")
        day.say(f"{day.stage}: cut after {day.document['seconds']:.0f} s; call it again to go on")
        return 3
    except Exception as error:  # the other stages are to be tried all the same
        day.save(status="failed", error=f"{type(error).__name__}: {error}")
        day.say(f"{day.stage}: failed: {type(error).__name__}: {error}")
        return 1
    failed = sum("failed" in row for row in day.rows)
    day.save(status="done")
    day.say(f"{day.stage}: done in {day.document['seconds']:.0f} s, {len(day.rows)} rows, {failed} of them failed")
    return 1 if failed else 0


def summary(stage: str) -> str:
    """Return what a stage answers."""
    return " ".join(({**STAGES, **CARRIED}[stage].__doc__ or "").split())


def prepare(kit: Path, work: Path) -> None:
    """Let this process and those that it starts import medfl from here, and what is missing from the kit's wheels."""
    paths = [str(ROOT), str(ROOT / "benchmarks")]
    wheels = kit / "wheels"
    if importlib.util.find_spec("monai") is None and wheels.is_dir():
        site = work / "site"
        if not site.is_dir():
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
            subprocess.run([*pip, "--target", str(site), *map(str, sorted(wheels.glob("*.whl")))], check=True)
        paths += [str(site), str(wheels)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    os.environ.setdefault("XDG_CACHE_HOME", str(work / "cache"))
    sys.path[:0] = [path for path in paths if path not in sys.path]


def main() -> int:
    """Run one stage, or all of them at tiny size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="?", choices=[*STAGES, *CARRIED], metavar="STAGE", help="see --list")
    parser.add_argument("--list", action="store_true", help="print the stages and what each answers")
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU; without a stage: all of them")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the JSON files and logs")
    parser.add_argument("--work", type=Path, metavar="DIR", help="what outlives a call; default runs/gpu_day")
    parser.add_argument("--kit", type=Path, metavar="DIR", default=ROOT / "build" / "gpu-kit")
    parser.add_argument("--device", metavar="cuda|cpu", help="default cuda, with --dry cpu; cpu rehearses a stage")
    parser.add_argument("--minutes", type=float, default=8.5, metavar="M", help="that this call may take; default 8.5")
    parser.add_argument("--total", type=float, metavar="M", help="that the stage may take in all its calls")
    parser.add_argument("--part", type=int, default=0, metavar="K", help="of checkpoint: which four pieces")
    parser.add_argument("--pieces", type=Path, metavar="DIR", help="of restore: a folder with pieces")
    options = parser.parse_args()
    if options.list:
        for name in (*STAGES, *CARRIED):
            print(f"{name:<12} {summary(name)}")
        return 0
    if options.out is None or (options.stage is None and not options.dry):
        given = "a stage without --out" if options.out is None else "no stage"
        print(f"error: {given}; STAGE --out DIR, or --dry --out DIR; see --list", file=sys.stderr)
        return 2
    out = options.out.resolve()
    work = options.work or (out / "work" if options.dry else ROOT / "runs" / "gpu_day")
    prepare(options.kit.resolve(), work.resolve())
    codes = []
    for stage in [options.stage] if options.stage else list(STAGES):
        total = options.total or TOTAL.get(stage, options.minutes)
        where = out, work.resolve(), options.kit.resolve()
        device = options.device or ("cpu" if options.dry else "cuda")
        day = Day(stage, *where, options.minutes, total, options.dry, device, options.part, options.pieces)
        codes.append(run(day))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
