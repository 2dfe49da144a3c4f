"""Functions for notebooks and scripts: `medfl.run`, `medfl.compare`, `medfl.tune`, `medfl.bundles`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medfl.bundle.files import shipped
from medfl.compare.comparison import Comparison
from medfl.compare.grid import Grid, compare as run_grid
from medfl.compare.search import Entry, parse_grid
from medfl.compare.tables import write_tables
from medfl.compare.tune import searched, tune as run_search
from medfl.core import (
    Config,
    Document,
    InputError,
    Print,
    RunError,
    check_arguments,
    map_values,
    present,
)
from medfl.policy.admission import trusting
from medfl.problem.parts import Parts, given
from medfl.runs.launch import federate
from medfl.runs.plan import Request, check_names
from medfl.runs.result import Result
from medfl.runtimes import Launch
from medfl.runtimes.callbacks import Callback

_APART = ("bundle", "method", "options", "config")


@check_arguments
def run(
    bundle: str | Path | Parts,
    method: str = "fedavg",
    *,
    out: str | Path | None = None,
    options: Config | None = None,
    config: Config | None = None,
    resume: bool = False,
    with_local: bool = False,
    callbacks: Sequence[Callback] = (),
    track: str | None = None,
    runtime: str = "simulator",
    jobs: int | None = None,
    trust: bool = False,
    say: Print = print,
    **settings: Any,
) -> Result:
    """Run a federation in this process, like `medfl run`, and return the results.

    Args:
        bundle: a shipped bundle's name (`medfl.bundles()`), any bundle's folder, or your own `medfl.Parts`.
        method: its name (`medfl.methods.names()`), or the dotted path of your own module.
        out: run folder, new or empty; default: a folder in runs/.
        options: options of the method, e.g. `{"mu": 0.01}`.
        config: overridden ids of the bundle's configuration, e.g. `{"image_size": 48}`.
        resume: continue the run in `out`, perhaps with more rounds; method, options and settings must be the same.
        with_local: first train each site alone, as its reference.
        callbacks: called after each round with a `medfl.RoundEnd`: `medfl.EarlyStopping(patience=5)`,
            `medfl.BestCheckpoint("best.pt")`, your own functions; one that returns True ends the run.
        track: "mlflow" or "mlflow:URI": also log the numbers there.
        runtime: runs the sites, with the same results; see `medfl.federate`.
        jobs: worker processes; they do not change the result. None: the cores, at most the cohort.
        trust: run a bundle that inspection refuses; its code then runs with your rights.
        say: prints lines for the user; `str` is silent.
        settings: the flags of `medfl run` under their names: data, sites, partition, cohort, rounds, local_epochs,
            batch_size, lr, seed, init, device, ... Defaults come from the bundle's protocol.

    Raises:
        InputError: bad input; nothing was written.
        RunError: it failed while running; what was saved can be resumed with `resume`.
    """
    requested = {"method": method, **_known(settings)}
    launch = _launch(out, jobs, say).having(
        with_local=with_local, resume=resume, callbacks=callbacks, track=track, runtime=runtime
    )

    with trusting(trust):
        summary = federate(
            given(bundle), options=options, config=config, requested=requested, launch=launch
        )

    return Result(summary["folder"])


@check_arguments
def compare(
    bundle: str | Path | Parts,
    methods: Sequence[str],
    *,
    out: str | Path,
    seeds: Sequence[int] = (0, 1, 2),
    partitions: Sequence[str] = (),
    options: Config | None = None,
    config: Config | None = None,
    jobs: int | None = None,
    trust: bool = False,
    say: Print = print,
    **settings: Any,
) -> Comparison:
    """Run the missing runs of a grid of methods, partitions and seeds, and return the comparison of all its runs.

    The folder then contains results.csv, tables.md and tables.tex, and a folder for each run.

    Args:
        bundle: a shipped bundle's name, any bundle's folder, or `medfl.Parts`.
        methods: names, with their own options if wanted: `["fedavg", "fedprox mu=0.1"]`.
        out: folder; a new one, or that of an earlier comparison with the same settings.
        seeds: of the runs and their partitions.
        partitions: e.g. `["iid", "dirichlet:0.1"]`; default: the bundle's own.
        options: options for every method that has them.
        config: overridden ids of the bundle's configuration.
        jobs: number of concurrent runs; default: the cores.
        trust: run a bundle that inspection refuses; its code then runs with your rights.
        say: prints lines for the user; `str` is silent.
        settings: as for `run`, except seed and partition.

    Raises:
        InputError: bad input.
        RunError: a run failed; those that finished are kept.
    """
    requested = _known(settings, ("seed", "partition"))
    specs = tuple(partitions) or (None,)
    entries = tuple(map(Entry.read, methods))
    if not entries:
        raise InputError(
            "no methods", "names such as 'fedavg' or 'fedprox mu=0.1'", "name at least one method"
        )
    if not seeds:
        raise InputError("no seeds", "whole numbers, as (0, 1, 2)", "give at least one")

    grid = Grid(
        given(bundle),
        entries,
        specs,
        tuple(seeds),
        dict(options or {}),
        dict(config or {}),
        requested,
    )
    with trusting(trust):
        comparison, failed = run_grid(grid, _launch(out, jobs, say))

    if failed or comparison is None:
        failures = "; ".join(f"{title}: {text}" for title, text in failed.items())
        raise RunError(f"{len(failed)} runs failed, the others are kept in {out}: {failures}")

    write_tables(comparison, Path(out))
    return comparison


@check_arguments
def tune(
    bundle: str | Path | Parts,
    method: str,
    grid: Mapping[str, Sequence[Any]],
    *,
    out: str | Path,
    trials: int | None = None,
    seeds: Sequence[int] = (0,),
    partition: str | None = None,
    options: Config | None = None,
    config: Config | None = None,
    jobs: int | None = None,
    trust: bool = False,
    say: Print = print,
    **settings: Any,
) -> Document:
    """Search for a method's settings, like `medfl tune`, and return the content of best.json.

    Args:
        bundle: a shipped bundle's name, any bundle's folder, or `medfl.Parts`.
        method: its name, or the dotted path of your own module.
        grid: values to try, e.g. `{"mu": [0.01, 0.1], "lr": [0.001, 0.01]}`: for options of the method, or lr,
            lr_decay, local_epochs, batch_size, rounds, cohort. Trials are validated and not tested; the best one is
            run in full.
        out: folder; a new one, or that of the same search.
        trials: number of combinations, drawn by the first seed; None: all.
        seeds: of each trial, which is scored by their mean.
        partition: of all trials; default: the bundle's own.
        options: of all trials.
        config: overridden ids of the bundle's configuration.
        jobs: number of concurrent runs; default: the cores.
        trust: run a bundle that inspection refuses; its code then runs with your rights.
        say: prints lines for the user; `str` is silent.
        settings: as for `run`, except seed.

    Raises:
        InputError: bad input.
        RunError: no trial, or not the chosen run, finished.
    """
    requested = _known(settings, ("seed", "partition"))
    values = parse_grid(f"{name}={','.join(map(str, listed))}" for name, listed in grid.items())
    search = searched(
        given(bundle),
        method,
        values,
        trials,
        tuple(seeds),
        partition,
        options or {},
        config or {},
        requested,
    )

    with trusting(trust):
        best, comparison, failed = run_search(search, _launch(out, jobs, say))

    if comparison is None:
        reasons = "; ".join([*best["undefined"], *failed.values()])
        raise RunError(
            f"no settings were chosen and tested; the trials are kept in {out}: {reasons}"
        )

    return best


def bundles() -> tuple[str, ...]:
    """Return the names of the shipped bundles; `medfl bundles NAME` describes each."""
    return shipped()


def _launch(out: str | Path | None, jobs: int | None, say: Print) -> Launch:
    """Return how these calls execute their runs."""
    folder = Path(out) if out else None
    return Launch(
        out=folder, jobs=jobs, progress=sys.stderr.isatty(), command="medfl.run(...)", say=say
    )


def _known(settings: Config, never: Sequence[str] = ()) -> Document:
    """Return the settings in a run's form; refuse unknown ones."""
    if "folds" in settings:
        call = "medfl.runs.cross_validate(BUNDLE, K, requested={'method': NAME}, out=DIR)"
        raise InputError(
            f"folds={settings['folds']}", "a cross-validation is a call of its own", f"use {call}"
        )
    check_names(
        settings, [f.name for f in dataclasses.fields(Request) if f.name not in (*_APART, *never)]
    )
    return map_values(_plain, present(settings))


def _plain(value: Any) -> Any:
    """Convert a path to text, and a NumPy number to Python's, for the record."""
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value
