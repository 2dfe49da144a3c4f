"""A partition as a picture with one row per site: a heat map of images by class, bars of the sections' sizes."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from medfl.core import Config, Floats
from medfl.data.partition import targets
from medfl.data.partition.table import TITLES, shorten, shown_sections
from medfl.report.style import BAND, INK, SOFT, TINTS
from medfl.storage import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from medfl.data.partition.rules import Partition

    Sections = Mapping[str, Sequence[Config]]

ROOM = 24
"""Maximum number of sites, and of columns, whose numbers fit."""


@contextmanager
def figure_of(sites: int, columns: int, lower: float = 0.0) -> Iterator[Figure]:
    """Provide an empty figure for this number of sites and columns, with `lower` inches below them."""
    # imported here: it takes longer than most commands
    import matplotlib as mpl
    from matplotlib.figure import Figure

    size = (width_of(columns) + 5.4, height_of(sites) + lower + 0.9)
    # names of classes and sites may contain a dollar sign
    with mpl.rc_context({"text.parse_math": False}):
        yield Figure(figsize=size, dpi=130, facecolor="white", layout="constrained")


def height_of(sites: int) -> float:
    """Return the height in inches of the rows of this number of sites."""
    return min(max(1.6, 0.36 * sites), 9.0) + 1.0


def width_of(columns: int) -> float:
    """Return the width in inches of this number of columns."""
    return min(max(4.0, 0.85 * columns), 12.0)


def draw_counts(
    axes: Axes, sites: Sequence[str], columns: Sequence[str], counts: Floats, told: Floats
) -> None:
    """Draw a heat map of each site's counts (S, C), coloured by their share of the site's total.

    If `told` (S, C) is NaN the count is an estimate: hatched, with a question mark.
    """
    from matplotlib.patches import Rectangle

    shares = np.nan_to_num(counts / np.maximum(counts.sum(1, keepdims=True), 1))
    # with many classes each has a small share
    darkest = max(0.25, float(shares.max()))
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=darkest, aspect="auto")
    name_rows(axes, sites)
    has_room = len(sites) <= ROOM and len(columns) <= ROOM
    for (y, x), count in np.ndenumerate(told):
        text = f"{count:,.0f}"
        if np.isnan(count):
            text = "?"
            axes.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, ec="#b8bec8", lw=0, hatch="////")
            )

        if has_room:
            color = "white" if shares[y, x] > 0.55 * darkest else INK
            axes.text(x, y, text, ha="center", va="center", size=8, color=color)

    # white lines between the cells
    axes.set_xticks(np.arange(1, len(columns)) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, len(sites)) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    labels = [shorten(name, 24) for name in columns]
    axes.set_xticks(
        range(len(labels)),
        labels,
        size=_font(columns),
        rotation=30,
        ha="right",
        rotation_mode="anchor",
    )


def draw_sizes(axes: Axes, sites: Sequence[str], sizes: Mapping[str, Sequence[int | None]]) -> None:
    """Draw how many images each site has in each section; None is not released."""
    name_rows(axes, sites)
    start = np.zeros(len(sites))
    untold = np.zeros(len(sites), bool)
    for section, part in sizes.items():
        counts = np.array(part, np.float64)  # None is NaN
        numbers = np.nan_to_num(counts)
        axes.barh(
            range(len(sites)),
            numbers,
            left=start,
            height=0.62,
            color=TINTS[section],
            label=TITLES[section],
        )
        start += numbers
        untold |= np.isnan(counts)

    for y in np.flatnonzero(untold).tolist():
        axes.text(start[y], y, " + ?", va="center", size=8, color=INK)

    axes.set_xlim(0, max(1.0, float(start.max()) * 1.12))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, frameon=False, fontsize=8)
    axes.grid(axis="x", color=BAND)
    axes.set_axisbelow(True)


def name_rows(axes: Axes, sites: Sequence[str]) -> None:
    """Make bare axes with one row per site."""
    axes.spines[:].set_visible(False)
    axes.tick_params(which="both", length=0, labelcolor=INK, labelsize=_font(sites))
    axes.set_yticks(range(len(sites)), [shorten(name, 24) for name in sites])
    axes.set_ylim(len(sites) - 0.5, -0.5)


def _font(names: Sequence[str]) -> int:
    return 9 if len(names) <= ROOM else 6


# A partition as a picture: images of each class at each site.

_PARTS = 5  # of the range of numbers


def plot(
    partition: Partition, sections: Sections, classes: Sequence[str] | None, path: Path
) -> None:
    """Draw the training images of each class at each site, and the sizes of its sections.

    Findings, or fifths of the range of the numbers, replace classes; without any of them only sizes are drawn.
    The extension of `path` (png, svg, pdf) selects the file format.
    """
    sites = partition.sites
    title, classes, counts = _columns(partition, sections, classes or ())
    sizes = {}
    for name in shown_sections(partition):
        sizes[name] = [len(parts[name]) for parts in sites.values()]

    matrix = np.array([counts[site] for site in sites], np.float64)
    file = io.BytesIO()
    with figure_of(len(sites), len(classes)) as figure:
        if classes:
            widths = (width_of(len(classes)), 3.0)
            left, right = figure.subplots(1, 2, sharey=True, width_ratios=widths)
            draw_counts(left, list(sites), classes, matrix, matrix)
            right.set_title("Images", loc="left", size=10, color=INK)
        else:
            left = right = figure.subplots()

        draw_sizes(right, list(sites), sizes)
        text = (
            f"partition {shorten(partition.spec, 40)}, seed {partition.seed}: {len(sites)} sites, "
        )
        text += f"{sum(sizes['train']):,} training images"
        left.set_title(text, loc="left", size=9.5, color=SOFT)
        figure.suptitle(
            f"{title} at each site", x=0.01, ha="left", size=13, weight="bold", color=INK
        )
        figure.savefig(file, format=path.suffix[1:])

    write_atomic(path, file.getvalue())


def _columns(
    partition: Partition, sections: Sections, classes: Sequence[str]
) -> tuple[str, Sequence[str], dict[str, list[int]]]:
    """Return the meaning of the columns, their names, and how many images of each a site has; no columns if unknown."""
    train = sections["train"]
    has_targets = targets.has_targets(sections)
    if not classes or not (has_targets or any("label" in item for item in train)):
        return "Images", (), dict.fromkeys(partition.sites, [])

    if not has_targets or targets.are_findings(sections):
        kind = "with each finding" if has_targets else "of each class"
        return f"Training images {kind}", classes, partition.counts(sections, len(classes))

    first = targets.rows_of(train)[:, 0]
    edges = np.linspace(np.nanmin(first), np.nanmax(first), _PARTS + 1)
    # unknown values are beyond the last edge
    is_in = np.searchsorted(edges[1:], first)[:, None] == np.arange(_PARTS)
    counts = {}
    for site, held in partition.sites.items():
        counts[site] = is_in[list(held["train"])].sum(0).tolist()

    names = [f"{low:.3g} to {high:.3g}" for low, high in itertools.pairwise(edges)]
    return f"Training images by {classes[0]}", names, counts
