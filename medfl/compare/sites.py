"""Site results of a comparison, averaged over the seeds: every model at every site, and each site's contribution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isnan
from pathlib import Path
from statistics import fmean

from medfl.compare.comparison import Comparison
from medfl.core import markdown_table, markdown_text
from medfl.evaluation import metrics
from medfl.report import cross_site, formatting
from medfl.report.cross_site import Cell, Matrix
from medfl.report.page import contribution_of
from medfl.storage import CROSS_SITE, RunFolder, write_atomic


def matrices(comparison: Comparison) -> Iterator[tuple[str, Matrix]]:
    """Yield each partition with its matrix: the models of all methods, each the mean over its seeds."""
    for partition in comparison.partitions:
        rows: dict[str, Mapping[str, Cell]] = {}
        for row in comparison.on(partition):
            of_runs = list(filter(None, map(cross_site.read, row.runs.values())))
            if of_runs:
                # without intervals: those of single runs cannot be combined into one of their mean
                models = cross_site.mean(of_runs).rows
                rows |= {f"{row.method}: {title}": cells for title, cells in models.items()}

        if rows:
            yield partition, Matrix(comparison.key, rows)


def write_cross_site(comparison: Comparison, folder: Path) -> str:
    """Write cross_site.md and cross_site.csv into a comparison's folder; return the tables, "" without any."""
    sections = [f"## Every model at every site: {markdown_text(metrics.title(comparison.key))}"]
    table = []
    for partition, matrix in matrices(comparison):
        sections.append(
            f"Partition {markdown_text(partition)}, means over the seeds:\n\n{matrix.markdown()}"
        )
        for title, cells in matrix.rows.items():
            for site, cell in cells.items():
                table.append(
                    {
                        "partition": partition,
                        "model": title,
                        "at": site,
                        "cases": cell.cases,
                        comparison.key: "" if isnan(cell.value) else cell.value,
                    }
                )

    if not table:
        return ""

    text = "\n\n".join([*sections, cross_site.LEGEND])
    RunFolder(folder).write_table(CROSS_SITE, table)
    write_atomic((folder / CROSS_SITE).with_suffix(".md"), f"{text}\n".encode())
    return text


def write_contribution(comparison: Comparison, folder: Path) -> str:
    """Write contribution.md into a comparison's folder; return its table, "" if nothing was estimated."""
    lines = []
    for row in comparison.rows:
        by_site: dict[str, list[dict[str, float]]] = {}
        for run in row.runs.values():
            for site, values in contribution_of(run):
                by_site.setdefault(site, []).append(values)

        for site, runs in by_site.items():
            cells = []
            for name in ("shapley", "left_out"):
                cells.append(formatting.signed(fmean(values[name] for values in runs)))

            lines.append([row.partition, row.method, site, *cells, str(len(runs))])

    if not lines:
        return ""

    heads = ["partition", "method", "site", "Shapley value a round", "left out, a round", "seeds"]
    title = markdown_text(metrics.title(comparison.key))
    text = f"""## What each site contributed to {title} on the validation images (estimates)

{markdown_table(heads, lines)}

Means over the seeds; each run's report has intervals over its rounds. + is better, also if the metric falls.
"""
    write_atomic(folder / "contribution.md", text.encode())
    return text
