"""The tables of a comparison as CSV, markdown and LaTeX (booktabs), and the files that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from medfl.compare.comparison import Comparison, MeanSd, PairedTest, Row, scale_of
from medfl.compare.cost_curves import cost_curves
from medfl.core.documents import Document
from medfl.core.tables import formatted_table, latex_text, markdown_text
from medfl.evaluation import metrics
from medfl.report.differences import Difference
from medfl.storage.run_folder import RunFolder, safe_file_name
from medfl.storage.writing import write_atomic

_FORMATS = (("md",), ("tex", "% needs \\usepackage{booktabs,graphicx}"))
"""Formats, with the first line of their file."""
_BOLD = {"md": "**", "tex": "\\textbf", "html": "<b>"}
_MAX_COLUMNS = 9  # on a LaTeX page


class _Scale(NamedTuple):
    """How numbers are written: divisor, unit, and decimals."""

    factor: float
    unit: str
    digits: int

    def text(self, value: float, sign: str = "") -> str:
        """Return a number; `sign` is "+" for one that always has a sign."""
        return f"{value / self.factor:{sign}.{self.digits}f}"

    def interval(self, low: float, high: float) -> str:
        """Return an interval of a difference; a dash if it has no bounds."""
        if math.isnan(low):
            return "–"

        return f"{self.text(low, '+')} to {self.text(high, '+')}"


_SCALES = {
    "bytes": _Scale(1e6, "MB", 1),
    "seconds": _Scale(1.0, "s", 1),
    "share": _Scale(0.01, "%", 1),
    "number": _Scale(1.0, "", 3),
}


def result_table(comparison: Comparison, partition: str, format_: str) -> str:
    """Return the result table of a partition as "md" or "tex": one row per method, mean ± sd over the seeds.

    If some seeds have no value, the mean is over the others, with their number. A value is bold if it is better
    than every other by the paired interval over the seeds.
    """
    heads = ["method", "seeds"]
    best = {}
    for column in comparison.columns:
        unit = _SCALES[column.scale].unit
        heads.append(f"{column.title}, {unit}" if unit else column.title)
        # costs are not scores: fewer bytes do not make a method better
        if column.scale in ("share", "number"):
            # bold only by an interval: the largest mean of three seeds is mostly chance
            best[column.name] = comparison.clearly_best(partition, column)

    lines = []

    for row in comparison.on(partition):
        cells = [row.method, str(len(row.runs))]
        for column in comparison.columns:
            spread = MeanSd.of(list(row.values(column).values()))
            text = _spread(spread, _SCALES[column.scale])
            if spread and spread.count < len(row.runs):
                # a mean over fewer seeds must not look like the others
                text += f" ({spread.count} of {len(row.runs)})"

            if best.get(column.name) is row:
                text = f"**{text}**"

            cells.append(text)

        lines.append(cells)

    return formatted_table(heads, lines, format_)


def test_table(tests: Sequence[PairedTest], format_: str, scale_name: str) -> str:
    """Return the table of paired tests of a metric of this scale."""
    scale = _SCALES[scale_name]
    heads = [
        "method",
        "against",
        "partition",
        "seeds",
        "difference",
        "95 % interval",
        "p (paired t)",
        "effect d_z",
        "",
    ]
    lines = []
    for test in tests:
        # a single seed has a difference, but neither an interval nor a p-value
        lines.append(
            [
                test.row.method,
                test.against.method,
                test.row.partition,
                str(test.count),
                scale.text(test.difference, "+"),
                scale.interval(test.low, test.high),
                "–" if math.isnan(test.p) else f"{test.p:.3f}",
                "–" if math.isnan(test.effect) else f"{test.effect:+.2f}",
                test.word,
            ]
        )

    return formatted_table(heads, lines, format_)


def case_table(tests: Sequence[tuple[Row, Row, Difference]], format_: str, scale_name: str) -> str:
    """Return the table of differences over the test cases of one seed, of a metric of this scale."""
    scale = _SCALES[scale_name]
    heads = ["method", "against", "partition", "test cases", "difference", "95 % interval", ""]
    lines = []
    for row, against, test in tests:
        lines.append(
            [
                row.method,
                against.method,
                row.partition,
                str(test.cases),
                scale.text(test.value, "+"),
                scale.interval(*(test.ends or (math.nan, math.nan))),
                test.word,
            ]
        )

    return formatted_table(heads, lines, format_)


def target_table(comparison: Comparison, partition: str, value: float | None, format_: str) -> str:
    """Return the table of each method's cost to reach a value of the validation metric; None: it is undefined."""
    heads = ["method", "reached", "rounds", "MB sent", "seconds"]
    lines = []
    for row in comparison.on(partition):
        target = comparison.to_reach(row, value)
        cells = [
            _spread(target.rounds, _Scale(1.0, "rounds", 1)),
            _spread(target.bytes, _SCALES["bytes"]),
            _spread(target.seconds, _Scale(1.0, "s", 0)),
        ]
        if value is None:
            reached = "–"
        else:
            reached = f"{target.reached} of {target.count}"

        lines.append([row.method, reached, *cells])

    return formatted_table(heads, lines, format_)


def rank_table(ranks: dict[str, float], format_: str) -> str:
    """Return the table of mean ranks, best first."""
    in_order = sorted(ranks.items(), key=lambda entry: entry[1])
    lines = [[method, f"{rank:.2f}"] for method, rank in in_order]
    return formatted_table(["method", "mean rank"], lines, format_)


def records(comparison: Comparison) -> Iterator[Document]:
    """Yield a record of each run: partition, method, seed, folder and all columns, None without a value."""
    for row in comparison.rows:
        for seed, run in sorted(row.runs.items()):
            line = {
                "partition": row.partition,
                "method": row.method,
                "seed": seed,
                "data_source": run.record["data"]["source"],
                "run_hash": run.summary.get("run_hash"),
                "folder": str(run.path),
            }

            yield line | {column.name: column.read(run) for column in comparison.columns}


def write_tables(
    comparison: Comparison, out: Path, *, against: str | None = None, target: str | None = None
) -> dict[str, Path]:
    """Write results.csv, tables.md, tables.tex and the cost curves of a comparison; return name -> path.

    Args:
        comparison: the runs.
        out: folder.
        against: reference method for the tests; default: the first.
        target: value, or method whose mean best validation metric is the target; default: `against`.

    Raises:
        InputError: no such method.
    """
    against = against or comparison.rows[0].method
    written = {"csv": out / "results.csv"}
    RunFolder(out).write_table("results.csv", [*records(comparison)])
    for partition in comparison.partitions:
        runs = comparison.runs(partition)
        if any(run.progress() for run in runs):
            if len(comparison.partitions) == 1:
                name = "curves"
            else:
                name = f"curves-{safe_file_name(partition)}"

            written[name] = out / f"{name}.png"
            write_atomic(written[name], cost_curves(runs).png)

    for format_, *texts in _FORMATS:
        written[format_] = out / f"tables.{format_}"
        for title, table in all_tables(comparison, against, target or against, format_):
            texts.append(titled(f"{title}; {comparison.describe()}", table, format_))

        for line in comparison.undefined:
            texts.append(latex_text(line) if format_ == "tex" else markdown_text(line))

        write_atomic(written[format_], ("\n\n".join(texts) + "\n").encode())

    return written


def all_tables(
    comparison: Comparison, against: str, target: str, format_: str
) -> list[tuple[str, str]]:
    """Return title and text of each table; same arguments as `write_tables`."""
    parts = []
    for partition in comparison.partitions:
        table = result_table(comparison, partition, format_)
        title = f"Partition {partition}"
        if _BOLD[format_] in table:
            title += "; bold: better than all others by the paired 95 % interval"

        parts.append((title, table))
        value = comparison.target_value(target, partition)
        scale = scale_of(comparison.key)
        if value is None:
            reached = "–"
        else:
            reached = _SCALES[scale].text(value)

        metric = metrics.title(comparison.key)
        title = (
            f"To reach {metric} {reached} on the validation set ({target}), partition {partition}"
        )
        parts.append((title, target_table(comparison, partition, value, format_)))

    if tests := comparison.tests(against):
        parts.append(
            (
                f"Paired over the seeds: {comparison.judged_by.title}",
                test_table(tests, format_, comparison.judged_by.scale),
            )
        )

    if cases := comparison.case_tests(against):
        title = f"Paired over the test cases of the judged models, one seed: {metrics.title(comparison.key)}"
        parts.append((title, case_table(cases, format_, scale_of(comparison.key))))

    if ranks := comparison.ranks():
        parts.append(("Mean ranks over partitions and seeds", rank_table(ranks, format_)))

    return parts


def titled(title: str, table: str, format_: str) -> str:
    """Return a table with its title; in LaTeX the title is the caption, and wide tables are scaled to the page."""
    if format_ == "md":
        return f"## {markdown_text(title)}\n\n{table}"
    lines = ["\\begin{table}", "\\centering", f"\\caption{{{latex_text(title)}}}"]
    # the first line is \begin{tabular}{lrr...}: one letter per column, and the closing brace
    columns = len(table.partition("\n")[0].rpartition("{")[2]) - 1
    if columns > _MAX_COLUMNS:
        lines.append("\\resizebox{\\textwidth}{!}{%")
        table += "}"

    return "\n".join([*lines, table, "\\end{table}"])


def _spread(spread: MeanSd | None, scale: _Scale) -> str:
    """Return mean ± sd in a unit, or just the mean for one run."""
    if spread is None:
        return "–"

    mean = scale.text(spread.mean)
    if spread.count > 1:
        return f"{mean} ± {scale.text(spread.sd)}"

    return mean
