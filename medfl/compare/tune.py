"""Search for a method's settings: trials that are validated and not tested, and one full run with the chosen ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from medfl.compare.comparison import Comparison
from medfl.compare.grid import Cell, Grid, compare, run_missing
from medfl.compare.search import BEST, Entry, trials
from medfl.core import Document, RunError
from medfl.evaluation import higher_is_better, told_by
from medfl.runtimes import Launch
from medfl.storage import read_run, write_json

TESTED = "best"
"""Folder of the runs with the chosen settings, the only ones that are tested."""


def searched(
    bundle: str,
    method: str,
    values: Mapping[str, Sequence[str]],
    count: int | None,
    seeds: tuple[int, ...],
    partition: str | None,
    options: Mapping[str, object],
    config: Mapping[str, object],
    requested: Mapping[str, object],
) -> Grid:
    """Return the grid of a search's trials; `values` and `count` as in `search.trials`, the others as in `Grid`."""
    text = " ".join(f"{name}={','.join(listed)}" for name, listed in values.items())
    if count:
        text += f" ({count} of them, seed {seeds[0]})"

    entries = trials(method, values, count, seeds[0])
    return Grid(
        bundle, entries, (partition,), seeds, options, config, {**requested, "method": method}, text
    )


def tune(grid: Grid, launch: Launch) -> tuple[Document, Comparison | None, dict[str, str]]:
    """Run the missing trials of a search in a folder, write best.json, and run the chosen settings fully.

    The grid has the trials as its entries; everything else is as for `compare`. With several seeds the score is the
    mean of the validation metric's best round over the seeds that have one; of equal trials the first is chosen. If it
    is undefined in all trials, none is chosen: best.json is not written, and nothing is tested.

    Returns:
        The content of best.json; the comparison of the chosen settings' runs; title -> error of runs that failed.

    Raises:
        InputError: a folder of another search, or anything that a run would refuse.
        RunError: no trial was finished.
    """
    cells, failed = run_missing(grid, launch)
    done = [cell for cell in cells if cell.done(None)]
    if not done:
        raise RunError(f"no trial was validated: {'; '.join(failed.values())}")

    key = str(read_run(done[0].folder / "run.json")[1]["key_metric"])
    tried = []
    for entry in grid.entries:
        trial = [cell for cell in cells if cell.entry == entry]
        tried.append({"trial": entry.label, **_settings({}, entry), **_validated(trial, key)})

    validated = [trial for trial in tried if trial["validation"] is not None]
    document = {
        "bundle": grid.bundle,
        "method": grid.entries[0].method,
        "metric": key,
        "trials": len(grid.entries),
        "search": grid.search,
        "seeds": grid.seeds,
        "failed": failed,
        "tried": tried,
        "undefined": told_by((cell.title, cell.undefined) for cell in done),
    }
    if not validated:
        return document, None, failed

    best = (max if higher_is_better(key) else min)(trial["validation"] for trial in validated)
    # of equal ones the first, so that a resumed search chooses the same
    winner = grid.entries[[trial["validation"] for trial in tried].index(best)]
    document |= {
        "validation": best,
        "settings": _settings(grid.options, winner),
        "tested": TESTED,
    }
    write_json(launch.folder / BEST, document)
    launch.say(
        f"best of {len(validated)} trials: {winner.label}, {key} {best:.3f} on validation images; now its test"
    )
    # only the chosen one is tested: choosing by test images would make its score too good
    final = replace(grid, entries=(winner,), search="")
    comparison, more = compare(final, replace(launch, out=launch.folder / TESTED))

    return document, comparison, {**failed, **more}


def _validated(cells: Sequence[Cell], key: str) -> Document:
    """Return the mean validation score of a trial over its seeds, and how many have one; none if one has failed."""
    figures = []
    if all(cell.done(None) for cell in cells):
        figures = [cell.validated(key) for cell in cells]

    defined = [figure for figure in figures if figure is not None]
    mean = statistics.fmean(defined) if defined else None
    return {"validation": mean, "validated": len(defined)}


def _settings(options: Mapping[str, object], entry: Entry) -> dict[str, object]:
    return {"options": {**options, **entry.options}, "requested": dict(entry.settings)}
