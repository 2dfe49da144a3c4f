"""A grid of runs, methods x partitions x seeds, in one folder: run what is missing, then compare.

Each run is a process of its own with its own log, several at a time; they share the prepared images, which are read
before they start. Seeds come one after the other, so that an interrupted grid has whole tables of the first; within a
seed the longest run begins first, as far as runs of the same method have told. A run that fails is told and does not
stop the others.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tabulate import LATEX_ESCAPE_RULES
from tqdm import tqdm

from medfl import comparable, curves, methods, tables
from medfl.comparison import Comparison, read
from medfl.errors import InputError, MedflError
from medfl.folder import read_run, safe
from medfl.launch import Shared, federate
from medfl.planning import Plan, Request, plan
from medfl.storage import write_atomic

Say = Callable[[str], object]
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
            raise InputError(f"method {text!r} ({error})", "NAME OPTION=VALUE ...", "correct it") from error
        wrong = [word for word in words if "=" not in word]
        if wrong:
            raise InputError(f"{wrong[0]!r} in method {text!r}", "NAME OPTION=VALUE ...", "correct it")
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
        return f"{self.entry.label}{f' on {self.partition}' if self.partition else ''}, seed {self.seed}"

    @property
    def kind(self) -> tuple[str, str | None]:
        """What takes the same time with any seed."""
        return self.entry.label, self.partition

    def seconds(self) -> float | None:
        """Return what the run took, None if it is not over."""
        summary = self._summary()
        return float(summary["seconds"]) if summary else None

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
            Cell(entry, partition, seed, out / safe(partition or "protocol") / safe(entry.label) / f"seed-{seed}")
            for seed in self.seeds for partition in self.partitions for entry in self.entries
        ]  # fmt: skip

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
    say: Say = str,
) -> tuple[Comparison | None, dict[str, str]]:
    """Run what is missing of a grid in a folder, and read what is there.

    Args:
        grid: the runs.
        out: folder; a new one, or one of a grid with the same settings (methods, partitions and seeds may differ).
        at_once: runs at the same time, each with one worker; default: the cores.
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
        raise InputError(f"--jobs {at_once}", "a whole number of at least 1, or None for the cores", "correct it")
    comparable.folder(grid.settings(), out)
    cells = grid.cells(out)
    rounds = grid.requested.get("rounds")
    missing = [cell for cell in cells if not cell.done(rounds)]
    shared, there = Shared(), [cell.folder for cell in cells if cell.done(rounds)]
    runs, images = [read_run(path / "run.json")[0] for path in there], dict[str, Plan]()
    for cell in {cell.kind: cell for cell in missing}.values():  # refuse before any run
        made = plan(_request(grid, cell))
        comparable.runs(made.run, there)
        runs.append(made.run)
        images.setdefault(Shared.key(made), made)
    comparable.named(runs, against, target)
    for made in images.values():
        shared.sections(made)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / comparable.GRID, (json.dumps(grid.settings(), indent=1) + "\n").encode())
    say(f"{len(cells)} runs, {len(cells) - len(missing)} of them there already")
    known = [cell for cell in cells if cell not in missing]
    failed = _run_all(grid, missing, known, shared, at_once or os.cpu_count() or 1, progress, say)
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
            name = "curves" if len(found.partitions) == 1 else f"curves-{safe(partition)}"
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


def _run_all(
    grid: Grid, cells: Sequence[Cell], known: Sequence[Cell], shared: Shared, at_once: int, progress: bool, say: Say
) -> dict[str, str]:
    """Run the cells, so many at a time; return title -> error of failed ones. Of `known` ones the time is read."""
    context, left, failed = multiprocessing.get_context("fork"), list(cells), {}
    busy: dict[int, tuple[Any, Cell, float]] = {}
    took = {cell.kind: seconds for cell in known if (seconds := cell.seconds()) is not None}
    with tqdm(
        total=len(cells),
        desc="runs",
        unit="run",
        disable=not progress,
        bar_format="{desc} {n}/{total} {bar:8}{postfix}",
    ) as bar:
        try:
            while left or busy:
                while left and len(busy) < at_once:
                    cell = _next(left, took)
                    left.remove(cell)
                    process = context.Process(target=_run, args=(grid, cell, shared), daemon=False)
                    process.start()
                    busy[process.sentinel] = (process, cell, time.monotonic())
                running = [(cell, time.monotonic() - started) for _, cell, started in busy.values()]
                about = remaining(left, running, took, at_once)
                time_left = "" if about is None else f", about {max(1, round(about / 60))} min"
                bar.set_postfix_str(
                    f"running {', '.join(cell.entry.label for cell, _ in running)}"[:40]
                    + f"; {len(left)} left{time_left}"
                )
                for sentinel in wait([*busy], timeout=5 if progress else None):
                    process, cell, started = busy.pop(int(str(sentinel)))
                    process.join()
                    bar.update()
                    if process.exitcode == 0:
                        took[cell.kind] = time.monotonic() - started
                        say(f"done: {cell.title} ({time.monotonic() - started:.0f} s)")
                        continue
                    path = cell.folder.with_name(f"{cell.folder.name}-{_FAILED}")
                    text = path.read_text().splitlines()[0] if path.is_file() else f"ended with {process.exitcode}"
                    failed[cell.title] = text
                    say(f"FAILED: {cell.title}: {text}")
        finally:
            for process, _, _ in busy.values():
                process.terminate()
    return failed


def _next(left: Sequence[Cell], took: Mapping[tuple[str, str | None], float]) -> Cell:
    """Return the longest run of the first seed; one of which nothing is known comes first, and tells."""
    seed = left[0].seed
    return max((cell for cell in left if cell.seed == seed), key=lambda cell: took.get(cell.kind, math.inf))


def remaining(
    left: Sequence[Cell],
    running: Sequence[tuple[Cell, float]],
    took: Mapping[tuple[str, str | None], float],
    at_once: int,
) -> float | None:
    """Return about how many seconds a grid will still take, None while nothing is known.

    Args:
        left: runs that have not begun.
        running: those that have, with the seconds since.
        took: kind of run -> seconds of one that is over; of other kinds their mean is taken.
        at_once: runs at the same time.
    """
    if not took:
        return None
    mean = sum(took.values()) / len(took)
    rest = [max(0.0, took.get(cell.kind, mean) - since) for cell, since in running]
    whole = [took.get(cell.kind, mean) for cell in left]
    return max([sum(rest + whole) / at_once, *rest])


def _run(grid: Grid, cell: Cell, shared: Shared) -> None:
    """Run one cell in this process, which was made for it; what it says goes to a file beside its folder."""
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    told = cell.folder.with_name(f"{cell.folder.name}-{_FAILED}")
    told.unlink(missing_ok=True)
    request = _request(grid, cell)
    with _logged(cell.folder.with_name(f"{cell.folder.name}-log.txt")) as say:
        try:
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
        except MedflError as error:
            told.write_text(f"{' '.join(str(error).split())}\n")
            sys.exit(error.exit_code)
        except Exception:  # whatever it is, the other runs go on; the parent reads it here and tells it
            told.write_text(f"{traceback.format_exc().splitlines()[-1]}\n{traceback.format_exc()}")
            sys.exit(1)


_REQUESTED = tuple(f.name for f in dataclasses.fields(Request) if f.name not in ("bundle", "options", "config"))


def _end_with(parent: Any) -> None:
    """End this process when its parent is gone, were it killed: whoever starts the grid again finds the folder free."""
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _logged(path: Path) -> Iterator[Say]:
    with path.open("a") as file:
        yield lambda line: print(line, file=file, flush=True)
