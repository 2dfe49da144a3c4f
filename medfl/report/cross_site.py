"""Every model at every site: the global model and the sites' own, each on each site's test images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, filterfalse
from math import isnan
from pathlib import Path
from statistics import fmean

from medfl.core import markdown_table, markdown_text
from medfl.evaluation import Interval, metrics
from medfl.report import formatting
from medfl.report.run_files import MODEL_KINDS, RunFiles
from medfl.storage import CROSS_SITE, Table, read_rows, write_atomic

LEGEND = "Bold: a site's own model at the site. Compare within a column: sites have other images."
_COLUMNS = ("model", "of", "at", "cases")


@dataclass(frozen=True)
class Cell:
    """A model at a site: its metric there, NaN if undefined, with its interval over the test cases."""

    value: float
    ends: Interval | None
    cases: int
    is_own: bool


@dataclass(frozen=True)
class Matrix:
    """Models by sites.

    Attributes:
        metric: the key metric's name.
        rows: title of a model -> site -> cell.
    """

    metric: str
    rows: Mapping[str, Mapping[str, Cell]]

    @property
    def sites(self) -> list[str]:
        """Sites at which models were evaluated, in order."""
        return list(dict.fromkeys(chain.from_iterable(self.rows.values())))

    @cached_property
    def _ranges(self) -> dict[str, tuple[float, float]]:
        """Site -> lowest and highest value there."""
        ranges = {}
        for site in self.sites:
            values = [cells[site].value for cells in self.rows.values() if site in cells]
            numbers = list(filterfalse(isnan, values)) or [0.0]
            ranges[site] = min(numbers), max(numbers)

        return ranges

    def shade(self, site: str, cell: Cell) -> float:
        """Return how dark a site's cell is: 0 for the worst model there, 1 for the best where models differ most."""
        low, high = self._ranges[site]
        # the images of one site may be harder than those of another, which says nothing about models
        widest = max(top - bottom for bottom, top in self._ranges.values())
        if isnan(cell.value) or widest == 0:
            return 0.0

        gain = cell.value - low if metrics.higher_is_better(self.metric) else high - cell.value
        return gain / widest

    def markdown(self) -> str:
        """Return the matrix as a table; a site's own model at its site is bold."""
        lines = []
        for title, cells in self.rows.items():
            lines.append([title, *(_text(cells.get(site)) for site in self.sites)])

        return markdown_table(["model", *(f"at {site}" for site in self.sites)], lines)


def read(run: RunFiles) -> Matrix | None:
    """Return the matrix of a run, None if it has none; InputError if its file is damaged."""
    path = run.path / CROSS_SITE
    if not path.is_file():
        return None

    table = Table(path, read_rows(path, _COLUMNS))
    columns = [table.numbers(name).tolist() for name in (run.key, "low", "high", "cases")]
    rows: dict[str, dict[str, Cell]] = {}
    for (_, row), value, low, high, cases in zip(table.rows, *columns, strict=True):
        title = dict(MODEL_KINDS).get(row["model"], row["model"])
        if row["of"]:
            title += f", {row['of']}"

        ends = None if isnan(low) else (low, high)
        cell = Cell(value, ends, int(cases), row["of"] == row["at"])
        rows.setdefault(title, {})[row["at"]] = cell

    return Matrix(run.key, rows)


def mean(matrices: Sequence[Matrix]) -> Matrix:
    """Return the means over several runs' matrices with the same models and sites, without intervals."""
    rows: dict[str, dict[str, Cell]] = {}
    for title, cells in matrices[0].rows.items():
        rows[title] = {}
        for site, cell in cells.items():
            values = [matrix.rows[title][site].value for matrix in matrices]
            rows[title][site] = replace(cell, value=fmean(values), ends=None)

    return Matrix(matrices[0].metric, rows)


def write(folder: Path) -> None:
    """Write a run's cross_site.md, if it has a matrix."""
    run = RunFiles(folder)
    matrix = read(run)
    if matrix is None:
        return

    text = f"""## Every model at every site: {markdown_text(run.title(run.key))}

{matrix.markdown()}

Rows are models, columns the sites on whose test images they were scored, with 95 % bootstrap intervals over these
(none from fewer than ten, or of a bundle's own metric). {LEGEND}
"""
    write_atomic((folder / CROSS_SITE).with_suffix(".md"), text.encode())


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "–"

    text = formatting.number(cell.value)
    if cell.is_own:
        text = f"**{text}**"
    if cell.ends is not None:
        text += f" ({formatting.interval(cell.ends)})"

    return text
