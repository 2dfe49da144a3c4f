"""A grid of runs, methods x partitions x seeds, in one folder: run what is missing, then compare.

Each run is a process of its own with its own log, several at a time; they share the prepared images, which are read
before they start. Which run starts when, and how many at once, says `scheduling`. A run that fails is told and does not
stop the others. On a GPU a run that runs out of its share of the memory is tried once more, with the device to itself.

This process forks the runs and therefore leaves CUDA alone: it plans them as on a CPU, and what it asks of a device is
asked in a process apart.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tabulate import LATEX_ESCAPE_RULES
from tqdm import tqdm

from medfl import methods
from medfl.compare import checks as comparable
from medfl.compare import curves, tables
from medfl.compare.comparison import Comparison, read
from medfl.compare.scheduling import Schedule, Start, named
from medfl.core import gpu_memory
from medfl.core.errors import InputError, MedflError
from medfl.core.run_folder import read_run, safe_file_name
from medfl.core.storage import write_atomic
from medfl.core.terminal import Print
from medfl.data.on_device import within
from medfl.runs.launch import Shared, federate
from medfl.runs.plan import Plan, Request, device_named, make_plan

_FAILED = "failed.txt"
_HEADS: dict[str, tuple[str, ...]] = {"md": (), "tex": ("% needs \\usepackage{booktabs,graphicx}",)}
_FITS = 9  # columns on a page of LaTeX


@dataclass(frozen=True)
class Entry:
    """A method of the grid with its options; `label` is what the user typed."""

    label: str
    method: str
    options: Mapping[str, str]

    @classmethod
    def read(cls, text: str) -> Entry:
        """Read `fedcb classifier=random_frozen`.

        Raises:
            InputError: no such method, or a word that is no OPTION=VALUE.
        """
        try:
            name, *words = shlex.split(text)
        except ValueError as error:
            raise InputError(f"method {text!r} ({error})", "NAME OPTION=VALUE ...", "close its quotes") from error
        wrong = [word for word in words if "=" not in word]
        if wrong:
            raise InputError(f"{wrong[0]!r} in method {text!r}", "NAME OPTION=VALUE ...", "write it as OPTION=VALUE")
        methods.method_class(name)
        return cls(" ".join([name, *words]), name, dict(word.split("=", 1) for word in words))


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    entry: Entry
    partition: str | None
    seed: int
    folder: Path

    @property
    def title(self) -> str:
        """What the cell is called in messages."""
        return f"{named(self.kind)}, seed {self.seed}"

    @property
    def kind(self) -> tuple[str, str | None]:
        """What takes the same time and memory with any seed."""
        return self.entry.label, self.partition

    def seconds(self) -> float | None:
        """Return what the run took, None if it is not over."""
        summary = self._summary()
        return float(summary["seconds"]) if summary else None

    def peak(self) -> int | None:
        """Return the bytes of a GPU that the run took, None where it is not over, or was on a CPU."""
        found = self._summary().get("peak_device_bytes")
        return None if found is None else int(found)

    def done(self, rounds: int | None) -> bool:
        """Whether the run is finished, with so many rounds where a number is asked for."""
        summary = self._summary()
        return summary.get("status") == "finished" and (rounds is None or summary["rounds"] >= rounds)

    def _summary(self) -> dict[str, Any]:
        """Return the run's summary, {} where it is not over.

        Raises:
            InputError: it is damaged.
        """
        path = self.folder / "summary.json"
        try:
            found: Any = json.loads(path.read_text()) if path.is_file() else {}
        except ValueError as error:
            raise InputError(f"{path} is damaged ({error})", "a run's summary", "remove this run's folder") from error
        if not isinstance(found, dict) or (found and not {"seconds", "rounds"} <= found.keys()):
            raise InputError(f"{path} is damaged", "a run's summary", "remove this run's folder")
        return found


@dataclass(frozen=True)
class Grid:
    """What is compared.

    Attributes:
        bundle: a shipped bundle's name or a folder.
        entries: the methods.
        partitions: their specs; None is the bundle's own.
        seeds: seeds of the runs, which also draw the partitions.
        options: options that all methods take which have them.
        config: ids of the bundle's configuration.
        requested: other settings of all runs (see `planning.Request`).
    """

    bundle: str
    entries: tuple[Entry, ...]
    partitions: tuple[str | None, ...] = (None,)
    seeds: tuple[int, ...] = (0, 1, 2)
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    requested: Mapping[str, Any] = field(default_factory=dict)

    def cells(self, out: Path) -> list[Cell]:
        """Return the runs, seed by seed, so that an interrupted grid has whole rows of the first seeds."""
        return [
            Cell(entry, partition, seed, out.joinpath(*map(safe_file_name, names), f"seed-{seed}"))
            for seed in self.seeds
            for partition in self.partitions
            for entry in self.entries
            for names in [(partition or "protocol", entry.label)]
        ]

    def settings(self) -> dict[str, Any]:
        """Return what all runs of a folder share, as plain JSON."""
        shared = {"bundle": self.bundle, "options": self.options, "config": self.config, "requested": self.requested}
        document: dict[str, Any] = json.loads(json.dumps(shared, default=str))
        return document


def compare(
    grid: Grid,
    out: Path,
    *,
    at_once: int | None = None,
    against: str | None = None,
    target: str | None = None,
    progress: bool = False,
    say: Print = str,
) -> tuple[Comparison | None, dict[str, str]]:
    """Run what is missing of a grid in a folder, and read what is there.

    Args:
        grid: the runs.
        out: folder; a new one, or one of a grid with the same settings (methods, partitions and seeds may differ).
        at_once: runs at the same time, each with one worker; default: the cores. On a GPU fewer where no more fit.
        against: as for `write_tables`, to be refused before any run.
        target: likewise.
        progress: show a bar on stderr.
        say: where lines for the user go.

    Returns:
        The comparison of all finished runs of the grid, None where none finished; and title -> error of those that
        failed.

    Raises:
        InputError: a folder of other settings, or anything that a run would refuse.
    """
    if at_once is not None and at_once < 1:
        raise InputError(f"--jobs {at_once}", "a whole number of at least 1, or None for the cores", "give 1 or more")
    comparable.folder(grid.settings(), out)
    cells = grid.cells(out)
    rounds = grid.requested.get("rounds")
    missing = [cell for cell in cells if not cell.done(rounds)]
    shared, there = Shared(), [cell.folder for cell in cells if cell.done(rounds)]
    runs, images = [read_run(path / "run.json")[0] for path in there], dict[str, Plan]()
    device = _device(str(grid.requested.get("device", "cpu"))) if missing else "cpu"
    with gpu_memory.without_cuda_init():
        for cell in {cell.kind: cell for cell in missing}.values():  # refuse before any run
            made = make_plan(dataclasses.replace(_request(grid, cell), device="cpu"))
            runs.append(dataclasses.replace(made.run, device=device))
            comparable.runs(runs[-1], there)
            images.setdefault(Shared.key(made), made)
        comparable.named(runs, against, target)
        for made in images.values():
            shared.sections(made)
    gpu = None if device == "cpu" else gpu_memory.Gpu.query(device)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / comparable.GRID, (json.dumps(grid.settings(), indent=1) + "\n").encode())
    say(f"{len(cells)} runs, {len(cells) - len(missing)} of them there already")
    known = [cell for cell in cells if cell not in missing]
    failed = _run_all(grid, missing, known, shared, at_once or os.cpu_count() or 1, gpu, progress, say)
    finished = [cell.folder for cell in cells if cell.done(rounds)]
    return (read(finished) if finished else None), failed


def write_tables(
    found: Comparison, out: Path, *, against: str | None = None, target: str | None = None
) -> dict[str, Path]:
    """Write results.csv, tables.md, tables.tex and the curves of a comparison and return their paths.

    Args:
        found: the runs.
        out: folder.
        against: method that the others are tested against; default: the first.
        target: value, or method whose mean best validation metric is the target; default: `against`.

    Raises:
        InputError: no such method.
    """
    against = against or found.rows[0].method
    written = {"csv": out / "results.csv"}
    write_atomic(written["csv"], tables.as_csv(found).encode())
    for partition in found.partitions:
        runs = [run for row in found.on(partition) for run in row.runs.values()]
        if any(curves.progress(run) for run in runs):
            name = "curves" if len(found.partitions) == 1 else f"curves-{safe_file_name(partition)}"
            written[name] = out / f"{name}.png"
            write_atomic(written[name], curves.curves(runs).png)
    for form in tables.FORMATS:
        parts: list[tuple[str, str]] = []
        for partition in found.partitions:
            parts += [(f"Partition {partition}", tables.results(found, partition, form))]
            value = found.target_value(target or against, partition)
            title = f"To reach {100 * value:.1f} on the validation set ({target or against}), partition {partition}"
            parts += [(title, tables.to_target(found, partition, value, form))]
        if tests := found.tests(against):
            parts += [(f"Paired over the seeds: {found.judged_by.title}", tables.tested(tests, form))]
        if ranks := found.ranks():
            parts += [("Mean ranks over partitions and seeds", tables.ranked(ranks, form))]
        written[form] = out / f"tables.{form}"
        texts = [titled(f"{title}; {found.describe()}", table, form) for title, table in parts]
        write_atomic(written[form], ("\n\n".join([*_HEADS[form], *texts]) + "\n").encode())
    return written


def titled(title: str, table: str, form: str) -> str:
    """Return a table with its title, in LaTeX as its caption, and no wider than the page."""
    if form == "md":
        return f"## {title}\n\n{table}"
    caption = "".join(LATEX_ESCAPE_RULES.get(letter, letter) for letter in title).replace("–", "--")
    lines = ["\\begin{table}", "\\centering", f"\\caption{{{caption}}}"]
    wide = len(table.partition("\n")[0].rpartition("{")[2]) > _FITS + 1
    body = ["\\resizebox{\\textwidth}{!}{%", f"{table}}}"] if wide else [table]
    return "\n".join([*lines, *body, "\\end{table}"])


def _request(grid: Grid, cell: Cell) -> Request:
    own = {name: value for name, value in grid.options.items() if methods.has_option(cell.entry.method, name)}
    partition = {"partition": cell.partition} if cell.partition else {}
    requested = {**grid.requested, **partition, "method": cell.entry.method, "seed": cell.seed}
    return Request(grid.bundle, options={**own, **cell.entry.options}, config=grid.config, **requested)


def _device(name: str) -> str:
    """Return the device of a name, which is looked for in another process."""
    return name if name == "cpu" else gpu_memory.in_forked_process(partial(device_named, name))


def _run_all(
    grid: Grid,
    cells: Sequence[Cell],
    known: Sequence[Cell],
    shared: Shared,
    at_once: int,
    gpu: gpu_memory.Gpu | None,
    progress: bool,
    say: Print,
) -> dict[str, str]:
    """Run the cells, so many at a time; return title -> error of failed ones. Known ones tell time and memory."""
    context, failed = multiprocessing.get_context("fork"), dict[str, str]()
    busy: dict[int, tuple[Any, Start[Cell], float]] = {}
    schedule = Schedule(cells, at_once, gpu.memory if gpu else None)
    for cell in known:
        schedule.learn(cell, cell.seconds(), cell.peak())
    with tqdm(
        total=len(cells),
        desc="runs",
        unit="run",
        disable=not progress,
        bar_format="{desc} {n}/{total} {bar:8}{postfix}",
    ) as bar:
        try:
            while schedule.left or busy:
                for line in schedule.news():
                    say(line)
                while start := schedule.start([begun for _, begun, _ in busy.values()]):
                    if start.measures:
                        say(f"alone on the device, to see how much memory it takes: {start.run.title}")
                    process = context.Process(target=_run, args=(grid, start, shared, gpu), daemon=False)
                    process.start()
                    busy[process.sentinel] = (process, start, time.monotonic())
                running = [(begun.run, time.monotonic() - since) for _, begun, since in busy.values()]
                about = schedule.remaining(running)
                time_left = "" if about is None else f", about {max(1, round(about / 60))} min"
                bar.set_postfix_str(
                    f"running {', '.join(cell.entry.label for cell, _ in running)}"[:40]
                    + f"; {len(schedule.left)} left{time_left}"
                )
                for sentinel in wait([*busy], timeout=5 if progress else None):
                    process, start, since = busy.pop(int(str(sentinel)))
                    process.join()
                    cell, seconds = start.run, time.monotonic() - since
                    if process.exitcode == 0:
                        schedule.learn(cell, seconds, cell.peak())
                        say(f"done: {cell.title} ({seconds:.0f} s)")
                    elif process.exitcode == gpu_memory.OUT_OF_MEMORY_EXIT and schedule.again(start):
                        say(f"{cell.title}: {_told(cell)}; once more from its last round, alone on the device")
                        continue
                    else:
                        failed[cell.title] = _told(cell) or f"ended with {process.exitcode}"
                        say(f"FAILED: {cell.title}: {failed[cell.title]}")
                    bar.update()
        finally:
            for process, _, _ in busy.values():
                process.terminate()
    return failed


def _told(cell: Cell) -> str:
    """Return in a line why a run failed, "" where it could not tell."""
    path = _failure(cell)
    return path.read_text().splitlines()[0] if path.is_file() else ""


def _failure(cell: Cell) -> Path:
    return cell.folder.with_name(f"{cell.folder.name}-{_FAILED}")


def _run(grid: Grid, start: Start[Cell], shared: Shared, gpu: gpu_memory.Gpu | None) -> None:
    """Run one cell in this process, which was made for it; what it says goes to a file beside its folder."""
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    cell, allowance = start.run, start.allowance
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    told = _failure(cell)
    told.unlink(missing_ok=True)
    request = _request(grid, cell)
    with _logged(cell.folder.with_name(f"{cell.folder.name}-log.txt")) as say:
        try:
            if gpu and allowance is not None:
                tensors = gpu.limit_process(allowance)
                shared.free = within(tensors, gpu.memory) if allowance < gpu.memory else None
            resume = (cell.folder / "run.json").is_file()
            requested = {name: getattr(request, name) for name in _REQUESTED if getattr(request, name) is not None}
            federate(
                grid.bundle,
                options=request.options,
                config=request.config,
                requested=requested,
                out=cell.folder,
                resume=resume,
                jobs=1,
                shared=shared,
                command=f"a run of medfl compare {grid.bundle}",
                say=say,
            )
        except Exception as error:  # whatever it is, the other runs go on; the parent reads it here and tells it
            text, code = f"{traceback.format_exc().splitlines()[-1]}\n{traceback.format_exc()}", 1
            if gpu and allowance is not None and gpu_memory.is_out_of_memory(error):
                given = f"given {gpu_memory.format_gib(allowance)} of {gpu_memory.format_gib(gpu.memory)}"
                text, code = (
                    f"out of the device's memory, {given}\n{traceback.format_exc()}",
                    gpu_memory.OUT_OF_MEMORY_EXIT,
                )
            elif isinstance(error, MedflError):
                text, code = f"{' '.join(str(error).split())}\n", error.exit_code
            told.write_text(text)
            sys.exit(code)


_REQUESTED = tuple(f.name for f in dataclasses.fields(Request) if f.name not in ("bundle", "options", "config"))


def _end_with(parent: Any) -> None:
    """End this process when its parent is gone, were it killed: whoever starts the grid again finds the folder free."""
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _logged(path: Path) -> Iterator[Print]:
    with path.open("a") as file:
        yield lambda line: print(line, file=file, flush=True)
