"""Every model at every site: the global model and the sites' own, each on each site's test images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from medfl.core.tables import markdown_table
from medfl.evaluation import metrics
from medfl.evaluation.bootstrap import Interval
from medfl.report import formatting
from medfl.report.run_files import MODEL_KINDS, RunFiles
from medfl.storage.files import write_atomic
from medfl.storage.places import CROSS_SITE
from medfl.storage.run_documents import read_rows
from medfl.storage.run_reader import Table

_TITLES = dict(MODEL_KINDS)
_COLUMNS = ("model", "of", "at", "cases")


@dataclass(frozen=True)
class Cell:
    """A model at a site: its metric there, NaN where that is undefined, with its interval over the test cases."""

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
        """Where models were examined, in order."""
        return list(dict.fromkeys(site for cells in self.rows.values() for site in cells))

    @property
    def lines(self) -> list[tuple[str, list[Cell | None], list[float]]]:
        """Each model with its cells, and how dark each is, 0 to 1 from the worst cell of all to the best."""
        values = [
            c.value for cells in self.rows.values() for c in cells.values() if c.value == c.value
        ]
        low, high = min(values, default=0.0), max(values, default=0.0)
        lines = []
        for title, cells in self.rows.items():
            shown = [cells.get(site) for site in self.sites]
            shades = []
            for cell in shown:
                shade = 0.0
                if cell is not None and cell.value == cell.value and high > low:
                    shade = (cell.value - low) / (high - low)
                    if not metrics.higher_is_better(self.metric):
                        shade = 1 - shade

                shades.append(shade)

            lines.append((title, shown, shades))

        return lines

    def markdown(self) -> str:
        """Return the matrix as a table; a site's own model at the site is bold."""
        lines = []
        for title, cells, _ in self.lines:
            lines.append([title, *map(_text, cells)])

        return markdown_table(["model", *(f"at {site}" for site in self.sites)], lines)


def read(run: RunFiles) -> Matrix | None:
    """Return the matrix of a run, None where it has none; InputError where its file is damaged."""
    path = run.path / CROSS_SITE
    if not path.is_file():
        return None

    table = Table(path, read_rows(path, _COLUMNS))
    numbers = {name: table.numbers(name) for name in ("cases", run.key, "low", "high")}
    rows: dict[str, dict[str, Cell]] = {}
    models = zip(*(table.texts(name) for name in _COLUMNS[:3]), strict=True)
    for index, (model, of, at) in enumerate(models):
        title = _TITLES.get(model, model) + (f", {of}" if of else "")
        low, high = (float(numbers[name][index]) for name in ("low", "high"))
        rows.setdefault(title, {})[at] = Cell(
            float(numbers[run.key][index]),
            (low, high) if low == low and high == high else None,
            int(numbers["cases"][index]),
            of == at,
        )

    return Matrix(run.key, rows)


def mean(matrices: Sequence[Matrix]) -> Matrix:
    """Return the means over several runs' matrices of the same models, without intervals."""
    rows: dict[str, dict[str, Cell]] = {}
    first = matrices[0]
    for title, cells in first.rows.items():
        rows[title] = {}
        for site, cell in cells.items():
            found = [matrix.rows.get(title, {}).get(site, cell) for matrix in matrices]
            values = [other.value for other in found if other.value == other.value]
            value = fmean(values) if values else float("nan")
            rows[title][site] = Cell(value, None, cell.cases, cell.is_own)

    return Matrix(first.metric, rows)


def write(folder: Path) -> None:
    """Write a run's cross_site.md, where it has a matrix."""
    run = RunFiles(folder)
    matrix = read(run)
    if matrix is None:
        return

    text = f"""## Every model at every site: {run.title(run.key)}

{matrix.markdown()}

Rows are models, columns the sites on whose test images they were scored, with 95 % bootstrap intervals over these.
Bold: a site's own model at the site. Compare within a column: sites have other images.
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
