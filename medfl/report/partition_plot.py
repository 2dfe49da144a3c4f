"""A partition as a bubble chart of sites by classes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medfl.core.documents import Document
from medfl.data.partition.table import TITLES, shorten, shown_sections
from medfl.report.style import BAND, INK, LETTER, SOFT, TINTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from medfl.data.partition.rules import Partition

    Sections = Mapping[str, Sequence[Mapping[str, Any]]]

SMALLEST = 2.0  # points; the least diameter of a disc that can be seen


@dataclass(frozen=True)
class _Layout:
    """Sizes and positions of the chart's parts in inches; sites in rows, classes in columns."""

    sites: tuple[str, ...]
    classes: tuple[str, ...]
    shown: tuple[str, ...]

    @property
    def step_x(self) -> float:
        return min(1.0, max(0.42, 8 / len(self.classes)))

    @property
    def step_y(self) -> float:
        return min(0.7, max(0.21, 6.0 / len(self.sites)))

    @property
    def disc(self) -> float:
        """Diameter of the largest disc; in narrow rows it may overlap the neighbours."""
        return 0.95 * min(self.step_x, max(self.step_y, 0.36))

    @property
    def font(self) -> float:
        return 10 if self.step_y > 0.3 else 8.5

    @property
    def wrapped(self) -> list[str]:
        """The class names, wrapped to the width of a column."""
        letters = max(1, int(self.step_x / LETTER))
        return [
            textwrap.fill(name, letters, break_long_words=False, break_on_hyphens=False)
            for name in self.classes
        ]

    @property
    def slanted(self) -> bool:
        """Whether the class names do not fit above their columns in three lines."""
        lines = [name.split("\n") for name in self.wrapped]
        longest = max(len(line) for name in lines for line in name)
        return max(map(len, lines)) > 3 or longest * LETTER > self.step_x

    @property
    def head(self) -> float:
        if self.slanted:
            return 0.35 + 0.052 * max(map(len, self.classes))
        return 0.2 + 0.16 * max(name.count("\n") + 1 for name in self.wrapped)

    @property
    def left(self) -> float:
        return 0.35 + 1.05 * LETTER * max(map(len, self.sites))

    @property
    def body(self) -> tuple[float, float]:
        return self.step_x * len(self.classes), self.step_y * len(self.sites)

    @property
    def size(self) -> tuple[float, float]:
        width, height = self.body
        return self.left + width + 1.8 + 0.75 * len(self.shown), height + self.head + 2.3

    def box(self, figure: Figure, x: float, y: float, width: float, height: float) -> Axes:
        """Add bare axes; `x` and `y` are measured from the lower left corner of the bubbles."""
        total_x, total_y = self.size
        axes = figure.add_axes(
            ((self.left + x) / total_x, (0.85 + y) / total_y, width / total_x, height / total_y)
        )
        axes.patch.set_alpha(0)
        axes.tick_params(length=0, labelcolor=INK)
        axes.spines[:].set_visible(False)
        axes.set_xticks([])
        axes.set_yticks([])

        return axes


def plot(
    partition: Partition, sections: Sections, classes: Sequence[str] | None, path: str | Path
) -> None:
    """Draw a disc for each site and class, its area in proportion to the training images, and totals at the margins.

    The ending of `path` (png, svg, pdf) decides the file format. Without classes one column holds all images.
    """
    # Imported here because the command line imports this module also where nothing is drawn.
    from matplotlib.figure import Figure

    sites = partition.sites
    title = "Training images at each site"
    if classes:
        title = "Training images of each class at each site"
        counts = partition.counts(sections, len(classes))
    else:
        counts = {site: [len(parts["train"])] for site, parts in sites.items()}

    shown = shown_sections(partition)
    names = tuple(shorten(name, 36) for name in classes or ["all images"])
    layout = _Layout(tuple(shorten(site, 28) for site in sites), names, shown)
    figure = Figure(figsize=layout.size, dpi=130, facecolor="white")
    width, height = layout.body
    bands = layout.box(figure, 0, 0, width + 1.6 + 0.75 * len(shown), height)
    bands.set_ylim(len(sites), 0)

    for row in range(0, len(sites), 2):
        bands.axhspan(row, row + 1, color=BAND, linewidth=0)

    matrix = [counts[site] for site in sites]
    _draw_discs(layout, layout.box(figure, 0, 0, width, height), matrix)
    _draw_classes(layout.box(figure, 0, height + layout.head, width, 0.75), matrix)
    sizes = [[len(parts[name]) for name in shown] for parts in sites.values()]
    _draw_sizes(layout, layout.box(figure, width + 0.2, 0, 1.3, height), sizes)
    _draw_numbers(layout, layout.box(figure, width + 1.6, 0, 0.75 * len(shown), height), sizes)
    _draw_scale(
        layout,
        layout.box(figure, 0, -0.85, layout.size[0] - layout.left, 0.75),
        max(map(max, matrix)),
    )
    x = 0.2 / layout.size[0]
    top = 1 - 0.15 / layout.size[1]

    figure.text(x, top, title, size=13, weight="bold", color=INK, va="top")
    text = f"partition {shorten(partition.spec, 40)}, seed {partition.seed}: {len(sites)} sites, "
    text += f"{sum(map(sum, matrix)):,} training images"
    figure.text(x, top - 0.28 / layout.size[1], text, size=9.5, color=SOFT, va="top")
    figure.savefig(path)


def _draw_discs(layout: _Layout, axes: Axes, matrix: Sequence[Sequence[int]]) -> None:
    largest = max(map(max, matrix))
    counts = np.array(matrix)
    rows, columns = np.nonzero(counts)
    diameters = [_diameter(layout, count, largest) for count in counts[rows, columns].tolist()]
    axes.set(xlim=(-0.5, len(layout.classes) - 0.5), ylim=(len(matrix) - 0.5, -0.5))
    # matplotlib's sizes are areas in square points
    axes.scatter(
        columns,
        rows,
        s=np.square(diameters),
        color=TINTS["train"],
        alpha=0.85,
        linewidths=0,
        clip_on=False,
    )
    axes.set_yticks(range(len(matrix)), layout.sites, size=layout.font)
    axes.xaxis.tick_top()
    positions = range(len(layout.classes))
    if layout.slanted:
        style: Document = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"}
        axes.set_xticks(positions, layout.classes, size=9.5, **style)
    else:
        axes.set_xticks(positions, layout.wrapped, size=9.5)

    if len(matrix) > 25 and layout.head < 0.4:
        axes.tick_params(labelbottom=True)

    if layout.step_y < 0.3 or layout.step_x < 0.6:  # no space for a number at every disc
        return

    for x, y, diameter in zip(columns.tolist(), rows.tolist(), diameters, strict=True):
        text = f"{matrix[y][x]:,}"
        if diameter > 4.6 * len(text) + 3:
            axes.text(x, y, text, size=7.5, color="white", ha="center", va="center_baseline")
        else:
            shift = (diameter / 2 + 2, 0)
            axes.annotate(
                text,
                (x, y),
                shift,
                textcoords="offset points",
                size=7.5,
                color=SOFT,
                va="center_baseline",
            )


def _draw_classes(axes: Axes, matrix: Sequence[Sequence[int]]) -> None:
    """Draw each class's images at all sites as bars above the class names."""
    totals = list(map(sum, zip(*matrix, strict=True)))
    axes.bar(range(len(totals)), totals, width=0.55, color=TINTS["train"])
    axes.set(xlim=(-0.5, len(totals) - 0.5), ylim=(0, max(totals) * 1.25))
    for x, total in enumerate(totals):
        axes.annotate(
            f"{total:,}",
            (x, total),
            (0, 2),
            textcoords="offset points",
            size=8.5,
            color=INK,
            ha="center",
        )


def _draw_sizes(layout: _Layout, axes: Axes, sizes: Sequence[Sequence[int]]) -> None:
    """Draw the section sizes of each site as stacked bars."""
    start = np.zeros(len(sizes), np.int64)
    for name, part in zip(layout.shown, np.array(sizes).T, strict=True):
        axes.barh(range(len(sizes)), part, left=start, height=0.6, color=TINTS[name])
        start += part

    axes.set(xlim=(0, max(start)), ylim=(len(sizes) - 0.5, -0.5))


def _draw_numbers(layout: _Layout, axes: Axes, sizes: Sequence[Sequence[int]]) -> None:
    """Write the section sizes of each site below the section's colour, name and total."""
    axes.set(xlim=(0, len(layout.shown)), ylim=(len(sizes) - 0.5, -0.5))
    style: Document = {
        "xycoords": ("data", "axes fraction"),
        "textcoords": "offset points",
        "ha": "right",
    }
    for k, name in enumerate(layout.shown):
        total = f"{sum(row[k] for row in sizes):,}"
        axes.annotate(total, (k + 0.9, 1), (0, 6), size=8.5, weight="bold", color=INK, **style)
        patch = {"facecolor": TINTS[name], "linewidth": 0, "boxstyle": "round,pad=0.25"}
        color = "white" if name == "train" else INK
        axes.annotate(
            TITLES[name], (k + 0.9, 1), (0, 22), size=8.5, color=color, bbox=patch, **style
        )

        for y, row in enumerate(sizes):
            axes.text(
                k + 0.9,
                y,
                f"{row[k]:,}",
                size=layout.font - 1,
                color=INK,
                ha="right",
                va="center_baseline",
            )


def _draw_scale(layout: _Layout, axes: Axes, largest: int) -> None:
    """Draw a legend of discs for round numbers; the axes are in inches."""
    axes.set(xlim=(0, layout.size[0] - layout.left), ylim=(0, 0.75))
    # the largest of 1, 2, 5, 10, 20, ... images that a disc can have
    power = 10 ** int(math.log10(largest))
    top = max(step * power for step in (1, 2, 5) if step * power <= largest)
    x = 0.1

    for count in filter(None, (top // 100, top // 10, top)):
        diameter = _diameter(layout, count, largest)
        x += diameter / 144
        axes.scatter([x], [0.35], s=[diameter**2], color=TINTS["train"], alpha=0.85, linewidths=0)
        label = f"{count:,} image{'s' * (count > 1)}"
        x += diameter / 144 + 0.06
        axes.text(x, 0.35, label, size=8.5, color=INK, va="center_baseline")
        x += 0.075 * len(label) + 0.2

    # up to this count all discs have the least diameter
    floor = int(largest * (SMALLEST / (72 * layout.disc)) ** 2)
    if floor > 1:
        axes.text(
            x, 0.35, f"smallest dot: 1 to {floor}", size=8.5, color=SOFT, va="center_baseline"
        )


def _diameter(layout: _Layout, count: int, largest: int) -> float:
    """Return a disc's diameter in points, never too small to be seen."""
    return max(SMALLEST, 72 * layout.disc * math.sqrt(count / largest))
