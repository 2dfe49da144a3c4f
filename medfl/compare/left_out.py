"""Left-out hospitals: performance of the others' model at a hospital that did not take part in training.

One row per hospital and method: its test images scored by the model trained without it, by the one trained with it,
and by its own (method local). Values are means over the seeds; intervals are bootstrap intervals of that mean
over the hospital's test images, which are the same for all seeds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from medfl.compare.comparison import Comparison
from medfl.core import (
    Document,
    InputError,
    derive,
    did_you_mean,
    listed,
    markdown_table,
    markdown_text,
    split_commas,
)
from medfl.evaluation import Interval, bootstrap, metrics
from medfl.report import formatting
from medfl.report.run_files import RunFiles
from medfl.runs.plan import Request, make_plan
from medfl.storage import RunFolder, write_atomic

EVERYBODY = "centre"
EACH = "each"
WITHOUT = re.compile(r"centre:(.+)=0/all")
"""A partition without a hospital."""
_OWN = "local"


@dataclass(frozen=True)
class Score:
    """A metric at a hospital: mean over seeds, and its interval over the test images, None if it has none."""

    value: float
    ends: Interval | None


@dataclass(frozen=True)
class LeftOut:
    """A hospital and method.

    Attributes:
        hospital: its name.
        method: its label in the comparison.
        images: test images there.
        without: of the model trained without it.
        took_part: of the model trained with it.
        alone: of its own model.
        newcomer: description of the model scored as `without`, if that is not simply the global one.
    """

    hospital: str
    method: str
    images: int
    without: Score | None
    took_part: Score | None
    alone: Score | None
    newcomer: str


def partitions(bundle: str, wanted: str, **request: Any) -> tuple[str, ...]:
    """Return the partitions of a comparison with left-out hospitals: all hospitals, and one without each of them.

    Args:
        bundle: a shipped bundle's name or a folder.
        wanted: names of centres separated by commas, or "each".
        request: further fields of `runs.plan.Request`.

    Raises:
        InputError: a centre does not exist, or is the only one.
    """
    plan = make_plan(Request(bundle, partition=EVERYBODY, **request))
    centres = list(plan.run.partition.sites)
    names = centres
    if wanted != EACH:
        names = split_commas(wanted)

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
    """Return a row for each left-out hospital and each method, [] if there is none."""
    rows = []
    own_runs = []
    with_it = {}
    for row in comparison.on(EVERYBODY):
        with_it[row.method] = [*row.runs.values()]
        if row.first.method == _OWN:
            own_runs = with_it[row.method]

    for partition in comparison.partitions:
        match = WITHOUT.fullmatch(partition)
        if match is None:
            continue

        hospital = match[1]
        for row in comparison.on(partition):
            if row.first.method == _OWN:
                continue

            rows.append(
                LeftOut(
                    hospital,
                    row.method,
                    row.first.size(hospital, "test"),
                    _score([*row.runs.values()], hospital),
                    _score(with_it.get(row.method, []), hospital),
                    _score(own_runs, hospital),
                    str(row.first.summary.get("newcomers") or ""),
                )
            )

    return rows


def _score(runs: Sequence[RunFiles], hospital: str) -> Score | None:
    values = []
    drawn = []
    for run in runs:
        # a hospital without training images has no personal model: it gets the global one
        received = run.site_values("received", run.key)
        value = {**received, **run.site_values(run.judged, run.key)}.get(hospital)
        if value is None:
            return None

        values.append(value)
        # methods with a model per site have none for a site without training images
        predictions = run.predictions
        if predictions is None or hospital not in predictions.sites:
            predictions = run.newcomers
        if predictions is None:
            continue

        part = predictions.select(np.flatnonzero(np.array(predictions.sites) == hospital))
        if len(part) >= bootstrap.LEAST:
            # the same draws for every run and method, so that comparisons are paired
            draws = bootstrap.draw(part.strata, derive(0, "left out", hospital))
            redrawn = part.redrawn(draws, [run.key]).metrics.get(run.key)
            if redrawn is not None:
                drawn.append(redrawn)

    if not values:
        return None

    ends = None
    if len(drawn) == len(values):
        # of the mean over seeds in each draw: the interval reflects the test images, not the seeds
        ends = bootstrap.interval(np.mean(drawn, axis=0))

    return Score(float(np.mean(values)), ends)


def write(comparison: Comparison, folder: Path) -> str:
    """Write left_out.md and left_out.csv into a comparison's folder; return the table, "" without such hospitals."""
    rows = rows_of(comparison)
    if not rows:
        return ""

    remarks = "\n".join(map(markdown_text, notes(rows)))
    text = f"""## Hospitals left out: {markdown_text(metrics.title(comparison.key))} at each

{markdown_table(*table(rows))}

{remarks}"""
    write_atomic(folder / "left_out.md", f"{text}\n".encode())

    records = []
    for row in rows:
        record: Document = {
            "hospital": row.hospital,
            "test_images": row.images,
            "method": row.method,
        }
        scores = {"left_out": row.without, "took_part": row.took_part, "own": row.alone}
        for name, score in scores.items():
            low, high = (score and score.ends) or (None, None)
            record |= {name: score and score.value, f"{name}_low": low, f"{name}_high": high}

        records.append(record)

    RunFolder(folder).write_table("left_out.csv", records)
    return text


def table(rows: Sequence[LeftOut]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of a table: one line per hospital, two columns per method, its own model last."""
    methods = dict.fromkeys(row.method for row in rows)
    head = ["hospital", "test images"]
    for method in methods:
        head += [f"{method}, left out", f"{method}, took part"]

    lines = []
    for hospital in dict.fromkeys(row.hospital for row in rows):
        by_method = {row.method: row for row in rows if row.hospital == hospital}
        any_row = next(iter(by_method.values()))
        absent = replace(any_row, without=None, took_part=None)
        line = [hospital, str(any_row.images)]
        for method in methods:
            # a run of an interrupted comparison may be missing
            row = by_method.get(method, absent)
            line += [_shown(row.without), _shown(row.took_part)]

        lines.append([*line, _shown(any_row.alone)])

    return [*head, "its own model"], lines


def notes(rows: Sequence[LeftOut]) -> list[str]:
    """Return notes on such a table, a sentence each."""
    sentences = [
        "Means over the seeds, with 95 % bootstrap intervals over the hospital's test images; "
        f"there is none from fewer than {bootstrap.LEAST} images, and of a bundle's own metric.",
        "Left out: of the model that was trained without the hospital; took part: of the one that it trained too.",
    ]
    if not any(row.alone for row in rows):
        sentences.append("Its own model: add the method local.")

    if any(None in (row.without, row.took_part) for row in rows):
        sentences.append(
            "–: its test images do not define the metric, as a mean over findings none of which ten of them have and "
            "ten lack; it has no test images; or a run is missing."
        )

    newcomers = {row.method: row.newcomer for row in rows if row.newcomer}
    return [*sentences, *(f"Left out of {method}: {words}." for method, words in newcomers.items())]


def _shown(score: Score | None) -> str:
    if score is None:
        return "–"

    value = formatting.number(score.value)
    ends = formatting.interval(score.ends)
    # a dash: all draws are equal
    if ends in ("", "–"):
        return value

    return f"{value} ({ends})"
