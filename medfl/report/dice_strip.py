"""The Dice of each site's test cases as a strip of points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from medfl.data.partition.table import shorten
from medfl.report.picture import Floats, Picture, render, slant
from medfl.report.style import INK, TINTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_SITES = 20  # of a picture
# Inches, and dots an inch.
_WIDTH = 7.2
_HEIGHT = 3.6
_DPI = 150


def dice_strips(dice: Mapping[str, Sequence[float]]) -> list[Picture]:
    """Draw the Dice of each site's test cases (NaN: none) as points and their median as a line; 20 sites a picture."""
    by_site = {}
    for site, values in dice.items():
        cases = np.sort(np.asarray(values, np.float64))
        cases = cases[~np.isnan(cases)]
        if len(cases):
            by_site[site] = cases

    # all pictures have one axis, so that they compare
    low = min((float(cases[0]) for cases in by_site.values()), default=0.0)
    sites = list(by_site)
    pictures: list[Picture] = []
    for start in range(0, len(sites), _MAX_SITES):
        block = {site: by_site[site] for site in sites[start : start + _MAX_SITES]}
        ending = f"-{len(pictures) + 1}" if len(sites) > _MAX_SITES else ""
        pictures.append(_strip(block, low, ending))

    return pictures


def _strip(dice: Mapping[str, Floats], low: float, ending: str) -> Picture:
    slanted = max(map(len, dice)) * len(dice) > 75  # letters that fit below the axis
    bottom = max(0.0, math.floor(low * 10 - 0.5) / 10)

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        size = 14 if max(map(len, dice.values())) * len(dice) < 400 else 6
        for x, values in enumerate(dice.values()):
            # the diameter of a point, whose area is `size`, in units of each axis
            diameter = math.sqrt(size)
            sides = _swarm(values, 0.0058 * diameter * (1 - bottom), 0.0032 * diameter * len(dice))
            axes.scatter(
                x + sides, values, s=size, color=TINTS["train"], alpha=0.65, linewidths=0, zorder=2
            )
            middle = float(np.median(values))
            order = 1 if size > 6 else 3  # below large points, above a cloud of small ones
            axes.plot(
                [x - 0.4, x + 0.4],
                [middle, middle],
                color=TINTS["test"],
                linewidth=2.2,
                zorder=order,
            )
            axes.text(
                x,
                1.01,
                f"{middle:.2f}",
                size=8 if len(dice) > 12 else 9,
                color=INK,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
            )

        names = [f"{shorten(site, 24)} ({len(values)})" for site, values in dice.items()]
        axes.set_xticks(range(len(names)), names, **(slant(40) if slanted else {}))
        axes.set(xlim=(-0.6, len(names) - 0.4), ylim=(bottom - 0.012, 1.012), ylabel="Dice")
        axes.tick_params(length=0)
        axes.grid(axis="y")

    return render(
        f"dice{ending}",
        "Dice of each test case",
        "A point is a test case, the line and the number above are the site's median, in brackets is the number of its "
        "cases. The Dice of a case is the mean over its structures.",
        (_WIDTH, _HEIGHT + (0.05 * min(30, max(map(len, dice))) if slanted else 0)),
        fill,
        dpi=_DPI,
        layout="compressed",
    )


def _swarm(values: Floats, near: float, step: float) -> Floats:
    """Return the sideways shift of each of the sorted values, so that points nearer than `near` lie side by side."""
    offsets = np.zeros(len(values))
    row = 0
    for i in range(1, len(values)):
        row = row + 1 if values[i] - values[i - row - 1] < near else 0
        offsets[i] = (row + 1) // 2 * (step if row % 2 else -step)
    return offsets * min(1.0, 0.38 / max(1e-12, float(np.abs(offsets).max())))
