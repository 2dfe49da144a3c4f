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
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_stages import CARRIED, STAGES, TOTAL, Cut

ROOT = Path(__file__).resolve().parents[1]
PROBE = 7
"""Rounds after which a protocol's time is estimated: FedBM trains its generator after five, then its images join in."""
STOPPING = 30  # seconds that a command has to save and end
SHORTEST = 5  # seconds for which no command is begun, and of those above that are left for the rest
METRICS = ("accuracy", "f1_macro", "balanced_accuracy", "auroc")


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
        self.document = {
            "stage": self.stage,
            "status": "cut",
            "dry": self.dry,
            "seconds": 0.0,
            "cpu_seconds": 0.0,
        }
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
        self.say(
            f"  {row['name']}: "
            + ", ".join(f"{k} {short(v)}" for k, v in row.items() if k != "name")
        )
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
        if self.left < SHORTEST:
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
                    process.wait(STOPPING - SHORTEST)
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
            code, output = self.command(
                "-m", "medfl", "run", *arguments, "--device", self.device, *flags
            )
        if code:
            return {
                "name": name,
                "failed": output.strip().splitlines()[-1]
                if output.strip()
                else f"exit code {code}",
            }
        return self.row(name)

    def row(self, name: str) -> dict[str, Any]:
        """Return what a run has reached."""
        folder, found = self.folder(name), status(self.folder(name))
        rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        record = json.loads((folder / "run.json").read_text())
        scored = [(entry["round"], entry["val"]) for entry in rounds if entry["val"]]
        last, best = ({k: found.get(when, {}).get(k) for k in METRICS} for when in ("last", "best"))
        steps = sum(
            site["steps"]
            for entry in rounds[1:]
            for site in entry["sites"].values()
            if "steps" in site
        )
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
            "run_hash": found.get("run_hash"),
            "weights_sha256": found.get("weights_sha256"),
            "data_source": record["data"]["source"],
            "command": record.get("command"),
        }

    def protocol(
        self, runs: dict[str, Sequence[str]], rounds: int, published: dict[str, Any]
    ) -> None:
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
            lines = [
                json.loads(line)
                for line in (self.folder(name) / "rounds.jsonl").read_text().splitlines()
            ]
            server = max(entry["seconds_server"] for entry in lines)
            speeds[name] = statistics.mean(entry["seconds"] for entry in lines[-2:]) + server / 5
            if not self.has(name):
                self.add({**row, "of_rounds": rounds, "published": published.get(name)})
        if not speeds:
            return
        if "rounds" not in self.document:
            needed, allowed = (
                rounds * sum(speeds.values()),
                60 * self.total - self.document["seconds"],
            )
            reach = (
                rounds
                if needed <= allowed
                else max(probe, 10 * math.floor(rounds * allowed / needed / 10))
            )
            self.save(rounds=reach, of_rounds=rounds, seconds_for_one_seed=needed)
            self.say(
                f"{rounds} rounds of these take {needed / 60:.1f} min: {reach} rounds are trained"
            )
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
    day.save(status="failed" if failed else "done")  # what failed is tried again by the next call
    day.say(
        f"{day.stage}: done in {day.document['seconds']:.0f} s, {len(day.rows)} rows, {failed} of them failed"
    )
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
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-index",
                "--no-deps",
                "--no-compile",
            ]
            subprocess.run(
                [*pip, "--target", str(site), *map(str, sorted(wheels.glob("*.whl")))], check=True
            )
        paths += [str(site), str(wheels)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(
        os.pathsep
    )
    os.environ.setdefault("XDG_CACHE_HOME", str(work / "cache"))
    sys.path[:0] = [path for path in paths if path not in sys.path]


def main() -> int:
    """Run one stage, or all of them at tiny size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "stage", nargs="?", choices=[*STAGES, *CARRIED], metavar="STAGE", help="see --list"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the stages and what each answers"
    )
    parser.add_argument(
        "--dry", action="store_true", help="tiny, on the CPU; without a stage: all of them"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the JSON files and logs")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="what outlives a call; default runs/gpu_day"
    )
    parser.add_argument("--kit", type=Path, metavar="DIR", default=ROOT / "build" / "gpu-kit")
    parser.add_argument(
        "--device", metavar="cuda|cpu", help="default cuda, with --dry cpu; cpu rehearses a stage"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.5,
        metavar="M",
        help="that this call may take; default 8.5",
    )
    parser.add_argument(
        "--total", type=float, metavar="M", help="that the stage may take in all its calls"
    )
    parser.add_argument(
        "--part", type=int, default=0, metavar="K", help="of checkpoint: which four pieces"
    )
    parser.add_argument(
        "--pieces", type=Path, metavar="DIR", help="of restore: a folder with pieces"
    )
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
        day = Day(
            stage, *where, options.minutes, total, options.dry, device, options.part, options.pieces
        )
        codes.append(run(day))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
