"""A comparison's folder as one HTML page: its tables, learning curves and costs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from medfl.compare.checks import GRID
from medfl.compare.comparison import Comparison
from medfl.compare.cost_curves import embedded
from medfl.compare.tables import all_tables
from medfl.core.errors import InputError
from medfl.evaluation import metrics
from medfl.report import RunFiles, charts
from medfl.report.charts import Chart
from medfl.report.templating import environment
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
    if not any(run.progress() for run in finished):
        raise InputError(
            f"{folder} with {len(finished)} finished runs, none of them scored",
            "a comparison has finished runs whose rounds were scored",
            "repeat its medfl compare, which runs what is missing",
        )

    page = (
        environment().get_template("grid.html.j2").render(_context(Comparison(finished), len(runs)))
    )
    path = folder / "report.html"
    write_atomic(path, page.encode())
    return path


def _context(comparison: Comparison, begun: int) -> dict[str, Any]:
    methods = comparison.methods
    against = _BASE if _BASE in methods else methods[0]
    scored = {
        row.partition
        for row in comparison.rows
        if row.method == against and any(r.progress() for r in row.runs.values())
    }
    target = against if scored == set(comparison.partitions) else None
    runs = comparison.runs()

    return {
        "run": runs[0].record,
        "key": comparison.key,
        "higher": comparison.higher,
        "phantom": comparison.phantom,
        "methods": methods,
        "finished": len(runs),
        "begun": begun,
        "against": against,
        "judged_by": comparison.judged_by.title,
        "tables": [
            (title, Markup(table))
            for title, table in all_tables(comparison, against, target, "html")
        ],  # noqa: S704
        "learning": [_learning(comparison, partition) for partition in comparison.partitions],
        "costs": [
            (partition, *drawn)
            for partition in comparison.partitions
            if (drawn := embedded(comparison.runs(partition)))
        ],
    }


def _learning(comparison: Comparison, partition: str) -> Chart:
    """Draw each method's validation metric over the rounds, the mean over its seeds."""
    rows = comparison.on(partition)[: charts.TONES]
    scored = [
        [{point[0]: point[3] for point in run.progress()} for run in row.runs.values()]
        for row in rows
    ]
    numbers = sorted({number for row in scored for run in row for number in run})
    lines = {
        f"tone-{i}": [_mean([run[number] for run in row if number in run]) for number in numbers]
        for i, row in enumerate(scored)
    }
    title = f"{metrics.title(comparison.key)} on the validation set, {partition}"

    if numbers:
        svg = charts.lines(title, numbers, lines, [[] for _ in numbers], band_of="local")
    else:
        svg = None

    legend = [(f"tone-{i}", row.method) for i, row in enumerate(rows)]
    left = len(comparison.on(partition)) - len(rows)
    caption = "Lines are means over the seeds." + (
        f" {left} more methods are not drawn." if left else ""
    )
    personal = [
        row.method for row in rows if any(run.judged == "personal" for run in row.runs.values())
    ]

    if personal:
        caption += f" Each site's own model on the site's own images, which is another question: {', '.join(personal)}."

    return Chart(title, legend, svg, caption)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
