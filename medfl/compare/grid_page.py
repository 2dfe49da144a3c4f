"""A comparison's folder as one HTML page: its tables, learning curves and costs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

from markupsafe import Markup

from medfl.compare.checks import GRID
from medfl.compare.comparison import Comparison
from medfl.compare.cost_curves import embedded
from medfl.compare.side_by_side import over_rounds
from medfl.compare.sites import matrices
from medfl.compare.tables import all_tables
from medfl.core.errors import InputError
from medfl.evaluation import metrics
from medfl.report import RunFiles, charts
from medfl.report.charts import Chart
from medfl.report.templating import rendered
from medfl.storage.files import write_atomic

_BASE = "fedavg"  # the others are tested against it where it is there


def is_grid(folder: Path) -> bool:
    """Tell whether `medfl compare` wrote a folder."""
    return (folder / GRID).is_file()


def runs_of(folder: Path) -> list[RunFiles]:
    """Return the runs in a comparison's folder, unfinished ones too, in the order of their names."""
    return [RunFiles(file.parent) for file in sorted(folder.glob("*/*/seed-*/run.json"))]


def write_grid_page(folder: Path) -> Path:
    """Write `report.html` into a comparison's folder and return its path.

    Raises:
        InputError: none of its runs is finished and scored, or one is damaged.
    """
    runs = runs_of(folder)
    finished = [run for run in runs if run.summary is not None]
    if not finished:
        raise InputError(
            f"{folder} with 0 finished runs, none of them scored",
            "a comparison has finished runs",
            "repeat its medfl compare, which runs what is missing",
        )

    path = folder / "report.html"
    write_atomic(path, rendered("grid.html.j2", _context(Comparison(finished), len(runs))))
    return path


def _context(comparison: Comparison, begun: int) -> dict[str, object]:
    methods = comparison.methods
    if _BASE in methods:
        against = _BASE
    else:
        against = methods[0]

    tables = []
    for title, table in all_tables(comparison, against, against, "html"):
        tables.append((title, Markup(table)))  # noqa: S704

    costs = []
    for partition in comparison.partitions:
        picture = embedded(comparison.runs(partition))
        if picture:
            costs.append((partition, *picture))

    runs = comparison.runs()
    return {
        "run": runs[0].record,
        "key": comparison.key,
        "higher": comparison.higher,
        "share": metrics.is_share(comparison.key),
        "phantom": comparison.phantom,
        "methods": methods,
        "finished": len(runs),
        "begun": begun,
        "against": against,
        "judged_by": comparison.judged_by.title,
        "tables": tables,
        "undefined": comparison.undefined,
        "cross_site": list(matrices(comparison)),
        "learning": [_learning(comparison, partition) for partition in comparison.partitions],
        "costs": costs,
    }


def _learning(comparison: Comparison, partition: str) -> Chart:
    """Draw each method's validation metric over the rounds, the mean over its seeds."""
    rows = comparison.on(partition)
    curves = {}
    legend = []
    personal = []
    # the page has no more colours
    for i, row in enumerate(rows[: charts.TONES]):
        by_round = defaultdict(list)
        for run in row.runs.values():
            for number, _, _, value in run.progress():
                by_round[number].append(value)

        curves[f"tone-{i}"] = {n: statistics.fmean(values) for n, values in by_round.items()}
        legend.append((f"tone-{i}", row.method))
        if any(run.judged == "personal" for run in row.runs.values()):
            personal.append(row.method)

    caption = "Lines are means over the seeds."
    if len(rows) > len(legend):
        caption += f" {len(rows) - len(legend)} more methods are not drawn."

    if personal:
        caption += f" Each site's own model on the site's own images, which is another question: {', '.join(personal)}."

    title = f"{metrics.title(comparison.key)} on the validation set, {partition}"
    return over_rounds(title, legend, curves, caption)
