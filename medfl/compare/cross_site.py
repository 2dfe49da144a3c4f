"""The matrices of a comparison: every model at every site, means over the seeds, a table for each partition."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

from medfl.compare.comparison import Comparison
from medfl.core.names import as_cell
from medfl.evaluation import metrics
from medfl.report import cross_site
from medfl.report.cross_site import Cell, Matrix
from medfl.storage.files import write_atomic
from medfl.storage.places import CROSS_SITE


def matrices(comparison: Comparison) -> Iterator[tuple[str, Matrix]]:
    """Yield each partition with its matrix: the models of all methods, each the mean over its seeds."""
    for partition in comparison.partitions:
        rows: dict[str, Mapping[str, Cell]] = {}
        for row in comparison.on(partition):
            found = [m for run in row.runs.values() if (m := cross_site.read(run)) is not None]
            if found:
                of_method = cross_site.mean(found).rows
                rows |= {f"{row.method}: {title}": cells for title, cells in of_method.items()}

        if rows:
            yield partition, Matrix(comparison.key, rows)


def write(comparison: Comparison, folder: Path) -> str:
    """Write cross_site.md and cross_site.csv into a comparison's folder; return the tables, "" without any."""
    found = dict(matrices(comparison))
    if not found:
        return ""

    sections = [f"## Every model at every site: {metrics.title(comparison.key)}"]
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(["partition", "model", "at", "cases", comparison.key])
    for partition, matrix in found.items():
        sections.append(f"Partition {partition}, means over the seeds:\n\n{matrix.markdown()}")
        for title, cells in matrix.rows.items():
            for site, cell in cells.items():
                value = "" if cell.value != cell.value else cell.value
                names = map(as_cell, (partition, title, site))
                writer.writerow([*names, cell.cases, value])

    text = "\n\n".join(sections)
    path = folder / CROSS_SITE
    write_atomic(path, buffer.getvalue().encode())
    write_atomic(path.with_suffix(".md"), f"{text}\n".encode())
    return text
