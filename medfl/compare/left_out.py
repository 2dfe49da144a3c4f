"""Hospitals left out: what the model of the others reaches at a hospital that none of them trained for.

A row a hospital and method: its test images scored by the model that was trained without it, by the one that it took
part in, and by its own (method local). Values are means over the seeds; intervals are bootstrap intervals of that mean
over the hospital's test images, which are the same in all seeds.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medfl.compare.comparison import Comparison
from medfl.core.errors import InputError, did_you_mean
from medfl.core.names import as_cell, listed
from medfl.core.seeding import derive
from medfl.core.tables import markdown_table
from medfl.evaluation import bootstrap, metrics
from medfl.evaluation.bootstrap import Interval
from medfl.report import formatting
from medfl.report.run_files import RunFiles
from medfl.runs.plan import Request, make_plan
from medfl.storage.files import write_atomic

EVERYBODY = "centre"
EACH = "each"
_WITHOUT = re.compile(r"centre:(.+)=0/all")
_OWN = "local"


@dataclass(frozen=True)
class Score:
    """A metric at a hospital: mean over seeds, and its interval over the test images, None where it has none."""

    value: float
    ends: Interval | None


@dataclass(frozen=True)
class LeftOut:
    """A hospital and method.

    Attributes:
        hospital: its name.
        method: as the comparison calls it.
        images: test images there.
        without: of the model that was trained without it.
        took_part: of the model that it took part in.
        alone: of its own model.
        newcomer: what was scored as `without`, in words, where that is no global model as it is.
    """

    hospital: str
    method: str
    images: int
    without: Score | None
    took_part: Score | None
    alone: Score | None
    newcomer: str


def partitions(bundle: str, wanted: str, **request: Any) -> tuple[str, ...]:
    """Return the partitions of a comparison with hospitals left out: everybody, and one without each of them.

    Args:
        bundle: a shipped bundle's name or a folder.
        wanted: names of centres with commas between, or "each".
        request: further fields of `runs.plan.Request`.

    Raises:
        InputError: a centre that nobody has, or a single one.
    """
    plan = make_plan(Request(bundle, partition=EVERYBODY, **request))
    centres = list(plan.run.partition.sites)
    names = centres if wanted == EACH else [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in centres:
            advice = did_you_mean(name, centres, "name one of these, or each")
            raise InputError(f"--leave-out {name}", f"the centres are {listed(centres)}", advice)

    if len(centres) < 2:
        raise InputError(
            f"--leave-out {wanted} of one centre", "others to train at", "take data of two or more"
        )

    return (EVERYBODY, *(f"centre:{name}=0/all" for name in names))


def rows_of(comparison: Comparison) -> list[LeftOut]:
    """Return a row for each hospital that is left out and each method, [] where none is."""
    rows = []
    everybody = {row.method: row for row in comparison.on(EVERYBODY)}
    own_row = next((row for row in everybody.values() if row.first.method == _OWN), None)
    for partition in comparison.partitions:
        match = _WITHOUT.fullmatch(partition)
        if match is None:
            continue

        hospital = match[1]
        own_runs = [*own_row.runs.values()] if own_row is not None else []
        for row in comparison.on(partition):
            if row.first.method == _OWN:
                continue

            with_it = everybody.get(row.method)
            with_runs = [*with_it.runs.values()] if with_it is not None else []
            rows.append(
                LeftOut(
                    hospital,
                    row.method,
                    row.first.size(hospital, "test"),
                    _score([*row.runs.values()], hospital),
                    _score(with_runs, hospital),
                    _score(own_runs, hospital),
                    str((row.first.summary or {}).get("newcomers") or ""),
                )
            )

    return rows


def _score(runs: Sequence[RunFiles], hospital: str) -> Score | None:
    values = []
    drawn = []
    for run in runs:
        by_site = run.site_values(run.judged, run.key) or run.site_values("received", run.key)
        value = by_site.get(hospital, run.site_values("received", run.key).get(hospital))
        if value is None:
            return None

        values.append(value)
        # a method with a model for each site has none of one without training images
        predictions = run.predictions
        if predictions is None or hospital not in predictions.sites:
            predictions = run.newcomers
        if predictions is None:
            continue

        part = predictions.select(np.flatnonzero(np.array(predictions.sites) == hospital))
        if len(part) >= bootstrap.LEAST:
            draws = bootstrap.draw(part.strata, derive(0, "left out", hospital))
            redrawn = part.redrawn(draws, [run.key]).metrics.get(run.key)
            if redrawn is not None:
                drawn.append(redrawn)

    if not values:
        return None

    ends = None
    if len(drawn) == len(values):
        ends = bootstrap.interval(np.mean(drawn, axis=0))

    return Score(float(np.mean(values)), ends)


def write(comparison: Comparison, folder: Path) -> str:
    """Write left_out.md and left_out.csv into a comparison's folder; return the table, "" without such hospitals."""
    rows = rows_of(comparison)
    if not rows:
        return ""

    title = metrics.title(comparison.key)
    heads = ["hospital", "test images", "method", "left out", "took part", "its own model"]
    lines = []
    for row in rows:
        scores = [_shown(score) for score in (row.without, row.took_part, row.alone)]
        lines.append([row.hospital, str(row.images), row.method, *scores])

    words = {}
    for row in rows:
        if row.newcomer:
            words[row.method] = f"Left out of {row.method}: {row.newcomer}."

    text = "\n".join(
        [
            f"## Hospitals left out: {title} at each",
            "",
            markdown_table(heads, lines),
            "",
            "Means over the seeds, with 95 % bootstrap intervals over the hospital's test images. "
            "Its own model: add the method local.",
            *words.values(),
        ]
    )
    write_atomic(folder / "left_out.md", f"{text}\n".encode())
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    columns = ["hospital", "test_images", "method"]
    for name in ("left_out", "took_part", "own"):
        columns += [name, f"{name}_low", f"{name}_high"]

    writer.writerow(columns)
    for row in rows:
        cells: list[object] = [as_cell(row.hospital), row.images, as_cell(row.method)]
        for score in (row.without, row.took_part, row.alone):
            value = "" if score is None else score.value
            cells += [value, *((score and score.ends) or ("", ""))]

        writer.writerow(cells)

    write_atomic(folder / "left_out.csv", buffer.getvalue().encode())
    return text


def _shown(score: Score | None) -> str:
    if score is None:
        return "–"
    if score.ends is None:
        return formatting.number(score.value)

    return f"{formatting.number(score.value)} ({formatting.interval(score.ends)})"
