"""Search for a method's settings: trials that are validated and not tested, and one whole run of the chosen one."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from medfl.compare.comparison import Comparison
from medfl.compare.entry import Entry
from medfl.compare.grid import Cell, Grid, compare, run_missing
from medfl.compare.search import BEST, trials
from medfl.core.errors import RunError
from medfl.evaluation.metrics import higher_is_better
from medfl.runtimes.launch import Launch
from medfl.storage.files import write_atomic
from medfl.storage.run_documents import read_run

TESTED = "best"
"""Folder of the chosen settings' runs, the only ones that are tested."""


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
    """Return the grid of a search's trials; `values` and `count` as of `search.trials`, the others as of `Grid`."""
    text = " ".join(f"{name}={','.join(listed)}" for name, listed in values.items())
    if count:
        text += f" ({count} of them, seed {seeds[0]})"

    entries = trials(method, values, count, seeds[0])
    return Grid(
        bundle, entries, (partition,), seeds, options, config, {**requested, "method": method}, text
    )


def tune(grid: Grid, launch: Launch) -> tuple[dict[str, Any], Comparison | None, dict[str, str]]:
    """Run what is missing of a search in a folder, write best.json, and run the chosen settings whole.

    The grid has the trials as its entries; what is not told here is as for `compare`. Of several seeds the mean of the
    validation metric's best round counts; of equal trials the first one.

    Returns:
        The content of best.json; the comparison of the chosen settings' runs; title -> error of runs that failed.

    Raises:
        InputError: a folder of another search, or anything that a run would refuse.
        RunError: no trial could be validated.
    """
    cells, failed = run_missing(grid, launch)
    done = [cell for cell in cells if cell.done(None)]
    key = str(read_run(done[0].folder / "run.json")[1]["key_metric"]) if done else ""
    figures = []
    for entry in grid.entries:
        figures.append(_mean([cell for cell in cells if cell.entry == entry], key))

    validated = [figure for figure in figures if figure is not None]

    if not validated:
        raise RunError(
            "no trial was validated: " + ("; ".join(failed.values()) or "no validation images")
        )

    best = (max if higher_is_better(key) else min)(validated)
    winner = grid.entries[figures.index(best)]
    document = {
        "bundle": grid.bundle, "method": winner.method, "metric": key, "validation": best, "trials": len(grid.entries),
        "settings": _settings(grid.options, winner), "search": grid.search, "seeds": grid.seeds, "failed": failed,
        "tried": [{**_settings({}, entry), "validation": v} for entry, v in zip(grid.entries, figures, strict=True)],
        "tested": TESTED,
    }  # fmt: skip
    write_atomic(launch.folder / BEST, (json.dumps(document, indent=1) + "\n").encode())
    launch.say(
        f"best of {len(validated)} trials: {winner.label}, {key} {best:.3f} on validation images; now its test"
    )
    final = replace(grid, entries=(winner,), search="")
    comparison, more = compare(final, replace(launch, out=launch.folder / TESTED))

    return document, comparison, {**failed, **more}


def _mean(cells: Sequence[Cell], key: str) -> float | None:
    """Return the mean of the validation figures of a trial's seeds, None unless all have one."""
    values = []
    for cell in cells:
        value = cell.validated(key) if cell.done(None) else None
        if value is None:
            return None

        values.append(value)

    return statistics.fmean(values)


def _settings(options: Mapping[str, object], entry: Entry) -> dict[str, object]:
    return {"options": {**options, **entry.options}, "requested": dict(entry.settings)}
