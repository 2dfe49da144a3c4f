"""A grid of runs, methods x partitions x seeds, in one folder: run what is missing, then compare.

Each run is a process with its own log, several at a time; they share the prepared images, which are read before they
start. A run that fails is reported and does not stop the others.

This process forks the runs and therefore must not initialise CUDA: it plans them as on a CPU, and queries NVML for
GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from medfl import methods
from medfl.compare import checks
from medfl.compare.comparison import Comparison, read
from medfl.compare.left_out import WITHOUT
from medfl.compare.search import Entry
from medfl.core import Config, Document, InputError, MedflError, not_among, terminal, trust_module
from medfl.report.formatting import time_left
from medfl.runs.launch import Shared, federate
from medfl.runs.plan import Plan, Request, device_named, make_plan
from medfl.runtimes import Launch
from medfl.storage import CROSS_SITE, GRID, read_run, read_summary, safe_file_name, write_json
from medfl.storage.places import TRIAL

_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    entry: Entry
    partition: str | None
    seed: int
    folder: Path
    untested: bool = False

    @property
    def title(self) -> str:
        """The name of the run for messages."""
        on = f" on {self.partition}" if self.partition else ""
        return f"{self.entry.label}{on}, seed {self.seed}"

    def beside(self, kind: str) -> Path:
        """Return the file of a kind, e.g. "log", beside the run's folder, which may not contain anything yet."""
        return self.folder.with_name(f"{self.folder.name}-{kind}.txt")

    def done(self, rounds: int | None) -> bool:
        """Tell whether the run is finished, with at least `rounds` rounds."""
        summary = self._summary()
        # a method may have its own number of rounds, chosen by a search
        rounds = self.entry.settings.get("rounds", rounds)
        return summary.get("status") == "finished" and (
            rounds is None or summary["rounds"] >= rounds
        )

    def _summary(self) -> Document:
        """Return the run's summary, {} if it has not finished.

        Raises:
            InputError: it is damaged.
        """
        path = self.folder / (TRIAL if self.untested else "summary.json")
        return read_summary(path) if path.is_file() else {}

    @property
    def undefined(self) -> Sequence[str]:
        """A trial's notes on rounds whose validation metric is undefined."""
        return self._summary().get("undefined") or ()

    def validated(self, key: str) -> float | None:
        """Return a trial's best validation metric, None if there is none."""
        return (self._summary().get("best") or {}).get(key)


@dataclass(frozen=True)
class Grid:
    """The runs to compare.

    Attributes:
        bundle: a shipped bundle's name or a folder.
        entries: the methods.
        partitions: their specs; None is the bundle's own.
        seeds: of the runs and of their partitions.
        options: for all methods that have them.
        config: ids of the bundle's configuration.
        requested: other settings of all runs (see `runs.plan.Request`).
        search: the searched settings as text if the runs are trials, which are validated and not tested; else "".
    """

    bundle: str
    entries: tuple[Entry, ...]
    partitions: tuple[str | None, ...] = (None,)
    seeds: tuple[int, ...] = (0, 1, 2)
    options: Mapping[str, object] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    requested: Config = field(default_factory=dict)
    search: str = ""

    def cells(self, out: Path) -> list[Cell]:
        """Return the runs, seed by seed, so that an interrupted grid has complete rows for the first seeds."""
        cells = []
        for seed in self.seeds:
            for partition in self.partitions:
                above = out / safe_file_name(partition or "protocol")
                for entry in self.entries:
                    # a hospital's own model does not depend on the others: Local is run with all hospitals
                    if entry.method == "local" and WITHOUT.fullmatch(partition or ""):
                        continue

                    folder = above / safe_file_name(entry.label) / f"seed-{seed}"
                    cells.append(Cell(entry, partition, seed, folder, bool(self.search)))

        return cells

    def settings(self) -> Document:
        """Return the common settings of all runs in a folder, as plain JSON values."""
        requested = dict(self.requested)
        if self.search:
            requested["grid"] = self.search

        shared = {
            "bundle": self.bundle,
            "options": self.options,
            "config": self.config,
            "requested": requested,
        }
        document: Document = json.loads(json.dumps(shared, default=str))
        return document


def compare(
    grid: Grid, launch: Launch, *, against: str | None = None, target: str | None = None
) -> tuple[Comparison | None, dict[str, str]]:
    """Run the missing runs of a grid in a folder, and read all results.

    Args:
        grid: the runs.
        launch: `out` is a new folder, or one of a grid with the same settings (methods, partitions and seeds may
            differ); `jobs` is the number of concurrent runs, each with one worker; default: the cores, or 1 on a GPU.
        against: as for `tables.write_tables`, checked before any run.
        target: likewise.

    Returns:
        The comparison of all finished runs of the grid, None if none finished; and title -> error of those that
            failed.

    Raises:
        InputError: a folder with other settings, or anything that a run would refuse.
    """
    cells, failed = run_missing(grid, launch, against, target)
    finished = []
    for cell in cells:
        if cell.done(grid.requested.get("rounds")):
            finished.append(cell.folder)

    return read(finished) if finished else None, failed


def run_missing(
    grid: Grid, launch: Launch, against: str | None = None, target: str | None = None
) -> tuple[list[Cell], dict[str, str]]:
    """Run the missing runs of a grid; return its runs, and title -> error of failed ones. Like `compare`."""
    out = launch.folder
    if launch.jobs is not None and launch.jobs < 1:
        raise InputError(
            f"--jobs {launch.jobs}", "a whole number of at least 1", "leave it out to use all cores"
        )

    checks.check_folder(grid.settings(), out)
    for entry in grid.entries:
        trust_module(entry.method)

    cells = grid.cells(out)
    rounds = grid.requested.get("rounds")
    done = []
    for cell in cells:
        lacks_matrix = launch.cross_site and not (cell.folder / CROSS_SITE).is_file()
        if cell.done(rounds) and not lacks_matrix:
            done.append(cell)

    missing = not_among(cells, done)
    shared = Shared()
    finished = [cell.folder for cell in done]
    runs = [read_run(path / "run.json")[0] for path in finished]
    plan_by_images = dict[str, Plan]()
    device = str(grid.requested.get("device", "cpu")) if missing else "cpu"

    if device != "cpu" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise InputError(
            "a comparison on a GPU from a process that has used CUDA",
            "its runs are forked, and CUDA works in no process that is forked after its first use",
            "begin it in a new process, as medfl compare does",
        )

    with _without_cuda_init():
        device = device_named(device)
        # One run per row is planned first, so that errors are found before any run
        row_cells = {(cell.entry.label, cell.partition): cell for cell in missing}
        for cell in row_cells.values():
            # on the CPU: initialising CUDA here would make it unusable in the forked runs
            planned = make_plan(dataclasses.replace(_request(grid, cell), device="cpu"))
            runs.append(dataclasses.replace(planned.run, device=device))
            checks.check_same_source_and_bundle(runs[-1], finished)
            plan_by_images.setdefault(Shared.key(planned), planned)

        checks.check_names(runs, against, target)
        for planned in plan_by_images.values():
            shared.sections(planned)

    for cell in missing:
        checks.check_places(out, (cell.folder, cell.beside("log")))

    out.mkdir(parents=True, exist_ok=True)
    write_json(out / GRID, grid.settings())
    launch.say(f"{len(cells)} runs, {len(done)} of them there already")
    if launch.jobs is None:
        # parallel runs with one core each: rounds wait for each other, runs do not
        launch = dataclasses.replace(launch, jobs=(os.cpu_count() or 1) if device == "cpu" else 1)

    return cells, _run_all(grid, missing, shared, launch)


@contextmanager
def _without_cuda_init() -> Iterator[None]:
    """Make `torch.cuda.is_available`, which bundles' expressions call, use NVML and leave CUDA uninitialised."""
    before = os.environ.get(_NVML)
    os.environ[_NVML] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NVML]
        else:
            os.environ[_NVML] = before


def _request(grid: Grid, cell: Cell) -> Request:
    entry = cell.entry
    options = {}
    for name, value in grid.options.items():
        # `--set` applies to all methods that know the option; the others run without it
        if methods.has_option(entry.method, name):
            options[name] = value

    requested = {**grid.requested, **entry.settings, "method": entry.method, "seed": cell.seed}
    if cell.partition:
        requested["partition"] = cell.partition

    options.update(entry.options)
    return Request(grid.bundle, options=options, config=grid.config, **requested)


def _run_all(grid: Grid, cells: Sequence[Cell], shared: Shared, launch: Launch) -> dict[str, str]:
    """Run the cells in order, at most `launch.jobs` at a time; return title -> error of the failed ones."""
    # the children share the prepared images in memory
    context = multiprocessing.get_context("fork")
    say = launch.say
    left = deque(cells)
    busy: dict[int, tuple[BaseProcess, Cell, float]] = {}
    failed = {}
    began = time.monotonic()
    ended = 0
    form = "{desc} {n}/{total} {bar:8} {elapsed}<{remaining}{postfix}"

    with terminal.bar(
        total=len(cells),
        desc="runs",
        unit="run",
        shown=launch.progress,
        bar_format=form,
        leave=True,
    ) as bar:
        try:
            while left or busy:
                while left and len(busy) < (launch.jobs or 1):
                    cell = left.popleft()
                    process: BaseProcess = context.Process(
                        target=_run, args=(grid, cell, shared, launch), daemon=False
                    )
                    process.start()
                    busy[process.sentinel] = (process, cell, time.monotonic())

                running = ", ".join(cell.entry.label for _, cell, _ in busy.values())
                bar.set_postfix_str(f"running {running}"[:40] + f"; {len(left)} left")

                # The bar's clock keeps running while nothing ends
                for sentinel in wait([*busy], timeout=5 if launch.progress else None):
                    process, cell, since = busy.pop(int(str(sentinel)))
                    process.join()
                    if process.exitcode == 0:
                        say(f"done: {cell.title} ({time.monotonic() - since:.0f} s)")
                    else:
                        # a killed process leaves no file
                        failed[cell.title] = _failure_line(cell) or f"ended with {process.exitcode}"
                        say(f"FAILED: {cell.title}: {failed[cell.title]}")

                    bar.update()
                    ended += 1
                    remaining = len(left) + len(busy)
                    if remaining:
                        seconds = (time.monotonic() - began) / ended * remaining
                        say(f"{time_left(seconds)} for {remaining} of {len(cells)} runs")

        finally:
            for process, _, _ in busy.values():
                # Ctrl-C: the runs' own folders can be resumed
                process.terminate()

    return failed


def _failure_line(cell: Cell) -> str:
    """Return the first line of a failed run's error, "" if it left none."""
    path = cell.beside("failed")
    if path.is_file():
        return path.read_text("utf-8").splitlines()[0]

    return ""


def _run(grid: Grid, cell: Cell, shared: Shared, of_grid: Launch) -> None:
    """Run one cell in a process of its own; its messages go to a file beside its folder."""
    parent = multiprocessing.parent_process()
    # a killed parent cannot end its children itself
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    failure = cell.beside("failed")
    failure.unlink(missing_ok=True)
    request = _request(grid, cell)
    method = methods.method_class(cell.entry.method)
    # of one model, averaged over the sites
    has_contributions = method.judged == "global" and methods.has_fedavg_server(method)

    with cell.beside("log").open("a", encoding="utf-8") as log:
        try:
            launch = Launch(
                out=cell.folder,
                resume=(cell.folder / "run.json").is_file(),
                jobs=1,
                cross_site=of_grid.cross_site,
                contribution=of_grid.contribution and has_contributions,
                untested=cell.untested,
                command=f"a run of medfl compare {grid.bundle}",
                say=partial(print, file=log, flush=True),
            )
            requested = {}
            for setting in dataclasses.fields(Request):
                value = getattr(request, setting.name)
                if setting.name not in ("bundle", "options", "config") and value is not None:
                    requested[setting.name] = value

            federate(
                grid.bundle,
                options=request.options,
                config=request.config,
                requested=requested,
                shared=shared,
                launch=launch,
            )
        except Exception as error:  # whatever it is, the other runs go on and the parent reports it
            text = f"{traceback.format_exc().splitlines()[-1]}\n{traceback.format_exc()}"
            code = 1
            if isinstance(error, MedflError):
                text = f"{' '.join(str(error).split())}\n"
                code = error.exit_code

            failure.write_text(text, "utf-8")
            sys.exit(code)


def _exit_with(parent: BaseProcess | None) -> None:
    """End this process when its parent ends, even by a kill, so that the grid can be started again."""
    if parent is not None:
        wait([parent.sentinel])

    os._exit(1)
