"""Pictures of segmented cases: image, reference, prediction and error, plane by plane; and the Dice of all cases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from medfl.core import Array, Config, Document, pick
from medfl.data import Geometry
from medfl.data.partition.table import shorten
from medfl.evaluation import planes, unit
from medfl.evaluation.slices import Plane
from medfl.report.formatting import number
from medfl.report.picture import Colour, Floats, Picture, colours, render, slant
from medfl.report.style import INK, SOFT, TINTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The palette of Okabe and Ito, distinguishable for colour-blind readers.
MISSED = "#56b4e9"
ADDED = "#d55e00"
CONFUSED = "#f0e442"
_STRUCTURES = ("#009e73", "#e69f00", "#cc79a7")
_DPI = 150
_TALLEST = 1.25  # height of a panel of width 1
# Inches: the picture, its margin and the space between panels; above the cases, above each case, and below.
_WIDTH = 7.2
_EDGE = 0.1
_GAP = 0.06
_TITLE = 0.32
_CASE = 0.56
_LEGEND = 0.45
_TITLES = ("", "the only test case", "best and worst test case", "best, median and worst test case")
_COLUMNS = ("image", "reference", "prediction", "error")
_FILL = 0.22  # opacity of a structure inside its outline


@dataclass(frozen=True, eq=False)
class Example:
    """A segmented case to show.

    Attributes:
        rank: "best", "median", "worst" or "only".
        ident: the case's id.
        scores: its metrics.
        image: (C, H, W[, D]).
        reference: (H, W[, D]) class indices.
        prediction: (H, W[, D]) class indices.
        geometry: of the image, None if unknown.
    """

    rank: str
    ident: str
    scores: Mapping[str, float]
    image: Array
    reference: Array
    prediction: Array
    geometry: Geometry | None


def ranked(dice: Mapping[str, float]) -> dict[str, str]:
    """Return id -> rank of the best, the median and the worst case; fewer than three cases give fewer.

    With an even number of cases the better of the two in the middle is the median; equal cases are ordered by id.
    """
    scored = [ident for ident, value in dice.items() if not math.isnan(value)]
    # ties by id, so that the same run shows the same cases
    order = sorted(scored, key=lambda ident: (-dice[ident], ident))
    if not order:
        return {}
    if len(order) == 1:
        return {order[0]: "only"}
    # the middle one would be one of the two
    if len(order) == 2:
        return {order[0]: "best", order[1]: "worst"}

    return {order[0]: "best", order[(len(order) - 1) // 2]: "median", order[-1]: "worst"}


def mask_overlays(
    name: str, site: str, examples: Sequence[Example], structures: Sequence[str], median: float
) -> Picture:
    """Draw a site's cases, each with the reference, the prediction and their difference, into a picture `name`.

    `structures` are the foreground classes; `median` is the Dice over all the site's test cases, stored as the
    picture's mark.
    """
    cuts = []
    for case in examples:
        cuts.append(planes(case.image, case.reference, case.prediction, case.geometry))

    has_names = any(plane.name for plane in chain.from_iterable(cuts))
    label = 0.18 if has_names else 0.0  # inches of the planes' names
    panel = (_WIDTH - 2 * _EDGE - 3 * _GAP - label) / 4
    rows = []
    tall = _TITLE + _LEGEND
    for case, cut in zip(examples, cuts, strict=True):
        # millimetres (or pixels) per inch, the same in all planes of a case
        scale = max(max(plane.size[1] / panel, plane.size[0] / (_TALLEST * panel)) for plane in cut)
        height = _CASE + sum(plane.size[0] / scale + _GAP for plane in cut)
        rows.append((case, cut, scale, height))
        tall += height

    title = f"{shorten(site, 50)}: {_TITLES[len(examples)]}"
    confused = len(structures) > 1

    def fill(figure: Figure) -> None:
        figure.text(
            0.5, 1 - 0.16 / tall, title, size=11, weight="bold", color=INK, ha="center", va="top"
        )
        top = tall - _TITLE
        for example, cut, scale, height in rows:
            _case(figure, example, cut, structures, panel, scale, top)
            top -= height

        _legend(figure, structures, confused)

    caption = (
        "Outlines are those of the masks; in the last column the reference's is white, and colours say what the "
        "prediction misses and what it adds"
    )
    if confused:
        caption += ", or takes for another structure"

    caption += ". "
    if examples[0].reference.ndim == 3:
        caption += "Volumes are cut through the middle of the reference. "

    return render(
        name,
        title,
        f"{caption}The median Dice of all test cases of this site is {median:.3f}.",
        (_WIDTH, tall),
        fill,
        dpi=_DPI,
        mark=f"{median:.6f}",
    )


# Cases


def _case(
    figure: Figure,
    example: Example,
    cut: Sequence[Plane],
    structures: Sequence[str],
    panel: float,
    scale: float,
    top: float,
) -> None:
    """Draw one case below `top` inches: its scores, the columns' names, and a row of panels for each plane."""
    wide, tall = figure.get_size_inches()
    label = wide - 2 * _EDGE - 3 * _GAP - 4 * panel
    lefts = [_EDGE + label + column * (panel + _GAP) for column in range(4)]

    def write(x: float, y: float, text: str, **style: Any) -> None:
        figure.text(x / wide, y / tall, text, **style)

    write(_EDGE, top - 0.12, example.rank.capitalize(), size=10, weight="bold", color=INK, va="top")
    write(_EDGE + 0.75, top - 0.12, _score_line(example, structures), size=9, color=INK, va="top")
    for column, left in zip(_COLUMNS, lefts, strict=True):
        write(left + panel / 2, top - _CASE + 0.06, column, size=8.5, color=SOFT, ha="center")

    palette = _palette(len(structures))
    top -= _CASE
    for plane in cut:
        height, width = (side / scale for side in plane.size)
        if plane.name:
            upright = {"rotation": 90, "ha": "center", "va": "center"}
            write(_EDGE + 0.06, top - height / 2, plane.name, size=8.5, color=SOFT, **upright)

        for column, left in zip(_COLUMNS, lefts, strict=True):
            x = left + (panel - width) / 2
            axes = figure.add_axes((x / wide, (top - height) / tall, width / wide, height / tall))
            axes.set_axis_off()
            _panel(axes, column, plane, palette)

            if column == "image":
                _marks(axes, plane, unit(example.geometry) if plane.name else "")

        top -= height + _GAP


def _score_line(example: Example, structures: Sequence[str]) -> str:
    parts = [shorten(example.ident, 36), f"Dice {example.scores['dice']:.3f}"]
    dice = [value for name, value in example.scores.items() if name.startswith("dice_")]
    if 1 < len(dice) == len(structures) <= 3:  # more do not fit in the line
        names = [shorten(name, 14) for name in structures]
        texts = [f"{name} {number(value)}" for name, value in zip(names, dice, strict=True)]
        parts[-1] += f" ({', '.join(texts)})"

    if "hd95" in example.scores:
        parts.append(f"HD95 {example.scores['hd95']:.3g} {unit(example.geometry)}")

    return "   ".join(parts)


def _panel(axes: Axes, column: str, plane: Plane, palette: Sequence[Colour]) -> None:
    height, width = plane.reference.shape
    place: Document = {"extent": (0, width, height, 0), "aspect": "auto"}
    if column != "error":
        axes.imshow(plane.image, cmap="gray", vmin=0, vmax=1, interpolation="bilinear", **place)

    if column in ("reference", "prediction"):
        mask = plane.reference if column == "reference" else plane.prediction
        for index, colour in enumerate(palette, 1):
            _shade(axes, mask == index, colour, _FILL, place)
            _outline(axes, mask == index, colour, 1.1)

    if column == "error":
        grey = plane.image if plane.image.ndim == 2 else plane.image.mean(2)
        axes.imshow(
            0.12 + 0.5 * grey, cmap="gray", vmin=0, vmax=1, interpolation="bilinear", **place
        )
        true = plane.reference
        predicted = plane.prediction
        wrong = true != predicted

        for index in range(1, len(palette) + 1):
            _outline(axes, true == index, "white", 0.8)

        for where, colour in (
            (predicted == 0, MISSED),
            (true == 0, ADDED),
            ((predicted > 0) & (true > 0), CONFUSED),
        ):
            _shade(axes, wrong & where, colour, 0.95, {**place, "zorder": 3})  # above the outline

    axes.set(xlim=(0, width), ylim=(height, 0))


def _shade(axes: Axes, mask: Array, colour: Colour, alpha: float, place: Config) -> None:
    if mask.any():
        from matplotlib.colors import to_rgba

        axes.imshow(
            np.where(mask[..., None], to_rgba(colour, alpha), 0.0), interpolation="nearest", **place
        )


def _outline(axes: Axes, mask: Array, colour: Colour, width: float) -> None:
    """Draw the border of a mask along the edges of its pixels."""
    from matplotlib.collections import LineCollection

    # an edge is where neighbouring pixels differ; int8, because a difference of booleans is not defined
    padded = np.pad(mask, 1).astype(np.int8)
    y, x = np.nonzero(np.diff(padded, axis=1)[1:-1])
    upright = np.stack([x, y, x, y + 1], 1)
    y, x = np.nonzero(np.diff(padded, axis=0)[:, 1:-1])
    edges = np.concatenate([upright, np.stack([x, y, x + 1, y], 1)]).reshape(-1, 2, 2)
    axes.add_collection(
        LineCollection(list(edges), colors=[colour], linewidths=width, capstyle="round", snap=False)
    )


def _marks(axes: Axes, plane: Plane, length: str) -> None:
    """Write the letter of the side shown on the left, and draw a scale bar in millimetres."""
    from matplotlib import patheffects

    halo: Document = {"path_effects": [patheffects.withStroke(linewidth=1.6, foreground="black")]}
    if plane.left:
        axes.text(
            0.03,
            0.5,
            plane.left,
            transform=axes.transAxes,
            size=8,
            color="white",
            va="center",
            **halo,
        )

    if length == "mm":
        longest = max(1.0, 0.4 * plane.size[1])
        bar = max(step for step in (1, 2, 5, 10, 20, 50, 100) if step <= longest)
        share = bar / plane.size[1]
        axes.plot(
            [0.97 - share, 0.97],
            [0.04, 0.04],
            transform=axes.transAxes,
            color="white",
            linewidth=1.6,
            **halo,
        )
        place: Document = {
            "xycoords": "axes fraction",
            "textcoords": "offset points",
            "ha": "right",
        }
        axes.annotate(
            f"{bar} mm", (0.97, 0.04), (0, 3), size=7, color="white", va="bottom", **place, **halo
        )


def _palette(count: int) -> list[Colour]:
    if count <= len(_STRUCTURES):
        return list(_STRUCTURES[:count])

    return colours(count)


def _legend(figure: Figure, structures: Sequence[str], confused: bool) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    shapes = []
    for colour, name in zip(_palette(len(structures)), structures, strict=True):
        tint = (*to_rgb(colour), _FILL)
        shapes.append(Patch(facecolor=tint, edgecolor=colour, label=shorten(name, 28)))

    errors = {"missed": MISSED, "added": ADDED}
    if confused:
        errors["other structure"] = CONFUSED

    for text, colour in errors.items():
        shapes.append(Patch(facecolor=colour, edgecolor=SOFT, linewidth=0.5, label=text))

    figure.legend(
        handles=shapes,
        loc="lower center",
        ncols=min(len(shapes), 6),
        handlelength=1.2,
        columnspacing=1.5,
    )


# The Dice of each site's test cases as a strip of points.

_MAX_SITES = 20  # per picture
# Inches, and dots an inch.
_HEIGHT = 3.6


def dice_strips(dice: Mapping[str, Sequence[float]]) -> list[Picture]:
    """Draw the Dice of each site's test cases (NaN: none) as points, their median as a line; 20 sites per picture."""
    by_site = {}
    for site, values in dice.items():
        cases = np.sort(np.asarray(values, np.float64))
        cases = cases[~np.isnan(cases)]
        if len(cases):
            by_site[site] = cases

    # all pictures have the same axis, so that they can be compared
    low = min((float(cases[0]) for cases in by_site.values()), default=0.0)
    sites = list(by_site)
    pictures: list[Picture] = []
    for start in range(0, len(sites), _MAX_SITES):
        block = pick(by_site, sites[start : start + _MAX_SITES])
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
        # as many points to the side as there are near ones below: a row starts where there is room again
        row = row + 1 if values[i] - values[i - row - 1] < near else 0
        offsets[i] = (row + 1) // 2 * (step if row % 2 else -step)
    return offsets * min(1.0, 0.38 / max(1e-12, float(np.abs(offsets).max())))
