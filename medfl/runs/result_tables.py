"""A run's numbers as lists of records, as pandas tables, and as curves of matplotlib."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from medfl.core import Document, InputError, Run, did_you_mean
from medfl.evaluation import title

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

Record = Document
"""One row of a table: all rows have the same keys."""
_INDEX = {
    "rounds": ["round"],
    "site_rounds": ["round", "site"],
    "sites": ["site"],
    "predictions": ["id"],
}
Points = tuple[list[int], list[float]]
TABLES = tuple(_INDEX)


class ResultTables(ABC):
    """The tables and curves that `medfl.Result` makes from its lists of records."""

    run: Run

    @property
    @abstractmethod
    def rounds(self) -> list[Record]:
        """One record per round."""

    @property
    @abstractmethod
    def site_rounds(self) -> list[Record]:
        """One record per round and site."""

    def to_frame(self, table: str = "rounds") -> pandas.DataFrame:
        """Return one of the run's tables as a pandas DataFrame.

        Args:
            table: "rounds" (indexed by the round), "site_rounds" (by round and site), "sites" (by site) or
                "predictions" (by id), with the columns of the attribute of that name.

        Raises:
            InputError: no such table, or the run has not got that far.
        """
        if table not in TABLES:
            advice = did_you_mean(table, TABLES, "choose one")
            raise InputError(f"table {table!r}", f"tables are {', '.join(TABLES)}", advice)

        import pandas  # imported here because it takes a second

        frame = pandas.DataFrame.from_records(getattr(self, table))
        if frame.empty:
            return frame

        return frame.set_index(_INDEX[table])

    def plot_curves(self, *metrics: str, by_site: bool = False, axes: Axes | None = None) -> Axes:
        """Draw validation metrics over the rounds with matplotlib.

        Args:
            metrics: columns of `rounds`, with or without "val_" ("accuracy", "train_loss"); default: the key metric,
                which selects the best round.
            by_site: add a thin line for each scored site, of the model that it received.
            axes: to draw on; default: new ones.

        Returns:
            the axes, whose `figure` can be shown or saved.

        Raises:
            InputError: no such metric, or no round yet.
        """
        if not self.rounds:
            raise InputError("curves of a run without rounds", "one round or more", "let it train")

        from matplotlib.ticker import MaxNLocator  # imported here because it takes a second

        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.figure(figsize=(6, 3.5), layout="constrained").add_subplot()

        for name in metrics or (self._key,):
            column = self._column(name)
            points = _points(self.rounds, column)
            (line,) = axes.plot(*points, marker="o", markersize=3, label=_label(column))
            if by_site:
                for points in self._site_curves(column):
                    axes.plot(*points, color=line.get_color(), linewidth=0.6, alpha=0.5)

        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(f"{self.run.method} on {self.run.bundle}", fontsize=10)
        axes.legend(frameon=False)

        return axes

    @property
    @abstractmethod
    def _key(self) -> str:
        """The metric that selects the best round."""

    def _column(self, name: str) -> str:
        """Return the column of a metric, the validation metric first; InputError if no round has it."""
        columns = []
        # the last round may lack a validation, and then has None; all records have the same keys
        for key, value in self.rounds[-1].items():
            is_number = isinstance(value, int | float) and key != "round"
            if is_number or key.startswith("val_"):
                columns.append(key)

        for column in (f"val_{name}", name):
            if column in columns:
                return column

        advice = did_you_mean(name, [key.removeprefix("val_") for key in columns], "choose one")
        raise InputError(f"metric {name!r}", f"the rounds have {', '.join(columns)}", advice)

    def _site_curves(self, column: str) -> list[Points]:
        """Return the points of each site that has the metric."""
        if column.startswith("val_"):
            column = f"received_{column.removeprefix('val_')}"

        by_site: dict[str, list[Record]] = {}
        for row in self.site_rounds:
            if row.get(column) is not None:
                by_site.setdefault(row["site"], []).append(row)

        return [_points(rows, column) for rows in by_site.values()]


def _points(rows: list[Record], column: str) -> Points:
    """Return the rounds that have a value, and their values."""
    scored = [row for row in rows if row.get(column) is not None]
    return [row["round"] for row in scored], [row[column] for row in scored]


def _label(column: str) -> str:
    name = column.removeprefix("val_")
    if column.startswith("val_"):
        return f"{title(name)} (validation)"

    return name.replace("_", " ")


def with_same_keys(rows: list[Record]) -> list[Record]:
    """Give all records the same keys, with None for missing values."""
    names = dict.fromkeys(chain.from_iterable(rows))
    return [{name: row.get(name) for name in names} for row in rows]


def parse_row(row: Mapping[str, str]) -> Record:
    """Return a line of a table with its numbers parsed; ids and sites stay text, even if numeric ("007")."""
    record = {}
    for name, cell in row.items():
        record[name] = cell if name in ("id", "site") else _value(cell)

    return record


def _value(cell: str) -> str | int | float | None:
    """Return a cell as a number if it is one, None if it is blank."""
    if cell == "":
        return None
    for number in (int, float):
        with suppress(ValueError):
            return number(cell)
    return cell
