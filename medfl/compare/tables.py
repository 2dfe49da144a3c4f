"""The tables of a comparison as markdown, CSV and LaTeX (booktabs)."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from medfl.compare.comparison import Column, Comparison, Spread, Test

FORMATS = {"md": "github", "tex": "latex_booktabs"}
_UNITS = {"bytes": (1e6, "MB"), "seconds": (1.0, "s"), "count": (1.0, ""), "metric": (0.01, "%")}


def results(found: Comparison, partition: str, form: str) -> str:
    """Return the result table of a partition: a row a method, mean ± sd over the seeds.

    Args:
        found: the runs.
        partition: one of its partitions.
        form: "md" or "tex".
    """
    heads = ["method", "seeds", *(_head(column) for column in found.columns)]
    best = {column.name: _best(found, partition, column) for column in found.columns}
    lines = []
    for row in found.on(partition):
        cells = [row.method, str(len(row.runs))]
        for column in found.columns:
            spread = Spread.of(list(row.values(column).values()))
            cells.append(cell(spread, column, marked=spread is not None and spread.mean == best[column.name]))
        lines.append(cells)
    return rendered(heads, lines, form)


def tested(tests: Sequence[Test], form: str) -> str:
    """Return the table of paired tests."""
    heads = ["method", "against", "partition", "seeds", "difference", "95 % interval", "p (paired t)", "effect d_z"]
    lines = [
        [
            test.row.method, test.against.method, test.row.partition, str(test.count), f"{100 * test.difference:+.1f}",
            "–" if math.isnan(test.low) else f"{100 * test.low:+.1f} to {100 * test.high:+.1f}",
            "–" if math.isnan(test.p) else f"{test.p:.3f}", "–" if math.isnan(test.effect) else f"{test.effect:+.2f}",
        ]
        for test in tests
    ]  # fmt: skip
    return rendered(heads, lines, form)


def to_target(found: Comparison, partition: str, value: float, form: str) -> str:
    """Return the table of what each method took to reach a value of the validation metric."""
    heads = ["method", "reached", "rounds", "MB sent", "seconds"]
    lines = []
    for row in found.on(partition):
        target = found.to_reach(row, value)
        spreads = ((target.rounds, 1.0, 1), (target.bytes, 1e6, 1), (target.seconds, 1.0, 0))
        cells = [_spread(spread, unit, digits) for spread, unit, digits in spreads]
        lines.append([row.method, f"{target.reached} of {target.count}", *cells])
    return rendered(heads, lines, form)


def ranked(ranks: dict[str, float], form: str) -> str:
    """Return the table of mean ranks, the best first."""
    lines = [[method, f"{rank:.2f}"] for method, rank in sorted(ranks.items(), key=lambda entry: entry[1])]
    return rendered(["method", "mean rank"], lines, form)


def as_csv(found: Comparison) -> str:
    """Return every run as a line of CSV: partition, method, seed, folder and all columns, unrounded."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    about_runs = ["partition", "method", "seed", "data_source", "run_hash", "folder"]
    writer.writerow([*about_runs, *(column.name for column in found.columns)])
    for row in found.rows:
        for seed, run in sorted(row.runs.items()):
            values = [column.read(run) for column in found.columns]
            source, run_hash = run.run["data"]["source"], (run.summary or {}).get("run_hash", "")
            about = [row.partition, row.method, seed, source, run_hash, str(run.path)]
            writer.writerow([*about, *("" if value is None else repr(value) for value in values)])
    return file.getvalue()


def cell(spread: Spread | None, column: Column, *, marked: bool = False) -> str:
    """Return mean ± sd in the column's unit; the best is bold."""
    unit, _ = _UNITS[column.scale]
    text = _spread(spread, unit, 1)
    return f"**{text}**" if marked else text


def rendered(heads: Sequence[str], lines: Sequence[Sequence[Any]], form: str) -> str:
    """Return a table with these headings."""
    align = ["left", *["right"] * (len(heads) - 1)] if form == "tex" else None
    made = str(tabulate(lines, heads, tablefmt=FORMATS[form], disable_numparse=True, colalign=align))
    if form == "md":
        return made
    return re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", made).replace("±", r"$\pm$").replace("–", "--")


def _head(column: Column) -> str:
    unit = _UNITS[column.scale][1]
    return f"{column.title}, {unit}" if unit else column.title


def _spread(spread: Spread | None, unit: float, digits: int) -> str:
    if spread is None:
        return "–"
    mean = f"{spread.mean / unit:.{digits}f}"
    return f"{mean} ± {spread.sd / unit:.{digits}f}" if spread.count > 1 else mean


def _best(found: Comparison, partition: str, column: Column) -> float | None:
    if column.higher is None or column.scale != "metric":
        return None
    means = [s.mean for row in found.on(partition) if (s := Spread.of(list(row.values(column).values())))]
    return (max if column.higher else min)(means) if len(set(means)) > 1 else None
