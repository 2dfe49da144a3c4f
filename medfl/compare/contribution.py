"""What sites contributed in the runs of a comparison: means over the seeds."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from medfl.compare.comparison import Comparison
from medfl.core.tables import markdown_table
from medfl.evaluation import metrics
from medfl.report import formatting
from medfl.report.page import contribution_of
from medfl.storage.files import write_atomic


def write(comparison: Comparison, folder: Path) -> str:
    """Write contribution.md into a comparison's folder; return its table, "" where nothing was estimated."""
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
    title = metrics.title(comparison.key)
    text = f"""## What each site contributed to {title} on the validation images (estimates)

{markdown_table(heads, lines)}

Means over the seeds; each run's report has intervals over its rounds.
"""
    write_atomic(folder / "contribution.md", text.encode())
    return text
