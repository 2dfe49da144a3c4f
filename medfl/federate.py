"""federate: one call from a request to a finished run folder; what `medfl run` and notebooks use."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from medfl import methods, partition_plot
from medfl.errors import InputError
from medfl.folder import RunFolder
from medfl.planning import Plan, Request, plan, repeat
from medfl.report import write_report
from medfl.runtimes.federation import Federation
from medfl.runtimes.simulator import Simulator


def federate(
    bundle: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    requested: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    source: str | Path | None = None,
    jobs: int | None = None,
    with_local: bool = False,
    progress: bool = False,
    command: str = "medfl.federate(...)",
    say: Callable[[str], None] = str,
) -> dict[str, Any]:
    """Run a federation and return its summary with the run folder under "folder".

    Args:
        bundle: a shipped bundle's name or a folder; not needed with `source` or `resume`.
        options: options of the method.
        config: overrides of the bundle's configuration.
        requested: other settings by name (method, data, sites, partition, cohort, rounds, ...; see `planning.Request`).
        out: run folder.
        resume: continue the run in `out`, perhaps with more rounds.
        source: run.json of a recorded run to repeat.
        jobs: worker processes; None: the cores, at most the cohort.
        with_local: run the method Local first, into `out`/local, as each site's reference.
        progress: show bars on stderr.
        command: what run.json says about how it was made.
        say: where lines for the user go.

    Raises:
        InputError: bad input; nothing was written.
        RunError: failed while running; the last committed round is intact.
    """
    requested = dict(requested or {})
    made = _plan(bundle, options or {}, config or {}, requested, out, resume, source, say)
    run = made.run
    path = Path(out) if out else Path("runs") / f"{made.bundle.name}-{run.method.rpartition('.')[2]}-{run.seed}"
    for note in made.notes:
        say(f"note: {note}")
    if with_local and run.method != "local":
        say("first the Local reference")
        local = replace(made, run=replace(run, method="local", options={}), method=methods.load("local"))
        _execute(local, path / "local", resume and (path / "local").exists(), jobs, progress, command, say)
    summary = _execute(made, path, resume, jobs, progress, command, say, beside=("local",) if with_local else ())
    if with_local and run.method != "local":
        _add_local(path)
    say("writing the report")
    write_report(path)
    return {**summary, "folder": str(path)}


def _plan(
    bundle: str | None,
    options: Mapping[str, Any],
    config: Mapping[str, Any],
    requested: dict[str, Any],
    out: str | Path | None,
    resume: bool,
    source: str | Path | None,
    say: Callable[[str], None],
) -> Plan:
    """Make the plan: a new one, a recorded one, or the one in the folder to be resumed."""
    if source is not None:
        if bundle or options or config or set(requested) - {"data", "device"}:
            raise InputError("--from together with other settings", "--from repeats a recorded run as it was", "drop the others")
        record = Path(source)
        run, _ = RunFolder.existing(record.parent if record.is_file() else record).read_run()
        return repeat(run, requested.get("data"), say)
    if resume:
        if out is None:
            raise InputError("--resume without --out", "--out names the folder of the run to continue", "add it")
        run, _ = RunFolder.existing(Path(out)).read_run()
        rounds = requested.get("rounds", run.rounds)
        if bundle or options or config or set(requested) - {"rounds", "data"}:
            asked = plan(Request(bundle or run.bundle, options=options, config=config, **{"method": run.method, **requested}), say)
            different = asked.run.difference(run)
            if different:
                raise InputError(
                    f"--resume with other settings: {different[0]}" + (f" (and {len(different) - 1} more)" if different[1:] else ""),
                    "a run is resumed with its own settings; only --rounds may grow",
                    "repeat them, or start in another folder",
                )
        made = repeat(run, requested.get("data"), say)
        return replace(made, run=replace(made.run, rounds=rounds))
    if bundle is None:
        raise InputError("no bundle", "a shipped bundle's name or a folder", "see medfl bundles")
    return plan(Request(bundle, options=options, config=config, **requested), say)


def _execute(
    made: Plan,
    path: Path,
    resume: bool,
    jobs: int | None,
    progress: bool,
    command: str,
    say: Callable[[str], None],
    beside: tuple[str, ...] = (),
) -> dict[str, Any]:
    run = made.run
    with _threads(run.threads):
        cohort = max(1, int(run.cohort * len(run.partition.sites)))
        workers = jobs if jobs is not None else min(os.cpu_count() or 1, cohort)
        federation = Federation(made.bundle, made.method, run, jobs=workers, progress=progress)
        if resume and (path / "run.json").is_file():
            folder = RunFolder.existing(path)
        else:
            folder = RunFolder.create(path, beside=beside)
        folder.write_run(run, made.extra(command))
        say(made.partition.table(made.sections, made.bundle.classes or None))
        partition_plot.plot(made.partition, made.sections, made.bundle.classes or None, path / "partition.png")
        return Simulator(federation, folder, jobs=workers, progress=progress, say=say).execute(resume)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _add_local(path: Path) -> None:
    """Fill the `local_` columns of sites.csv from the Local reference beside it."""
    with (path / "local" / "sites.csv").open() as file:
        local = {row["site"]: row for row in csv.DictReader(file)}
    with (path / "sites.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        reference = local[row["site"]]
        row |= {f"local_{k.removeprefix('personal_')}": v for k, v in reference.items() if k.startswith("personal_")}
    RunFolder(path).write_table("sites.csv", rows)
