"""Charts of a report as inline SVG, in the colours and fonts of the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import numpy as np
from markupsafe import Markup, escape

from medfl.core import Document, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# matplotlib draws with these placeholders, which `_inline` replaces by the page's CSS variables
_NAMES = (
    "muted",
    "rule",
    "received",
    "personal",
    "local",
    "ink",
    *(f"tone-{i}" for i in range(10)),
)
_VARIABLES = {f"#0a0b{i:02d}": name for i, name in enumerate(_NAMES)}
_COLOUR = {name: colour for colour, name in _VARIABLES.items()}

_DOTTED: Document = {"color": _COLOUR["muted"], "linewidth": 0.8, "linestyle": (0, (2, 3))}
_SQUARE = (4.7, 3.7)  # inches
Values = Sequence[float | None]


class Chart(NamedTuple):
    """A chart for the page; the legend is pairs of colour name and text."""

    title: str
    legend: Sequence[tuple[str, str]]
    svg: Markup | None
    caption: str = ""


TONES = 10
"""Number of distinct colours, `tone-0` to `tone-9`."""


def lines(
    label: str,
    rounds: Sequence[int],
    curves: Mapping[str, Values],
    sites: Sequence[Values],
    *,
    band_of: str,
    bounded: bool = False,
    chance: float | None = None,
) -> Markup | None:
    """Draw one line per curve and a band from the lowest to the highest site; None if no curve has a finite value.

    Args:
        label: text for screen readers.
        rounds: (R,) round numbers.
        curves: colour name (received, personal, local, tone-0 to tone-9) -> (R,) values, None if missing.
        sites: (R,) lists of the sites' values, of any length.
        band_of: colour name of the band.
        bounded: the values are within 0 to 1, and so is the axis.
        chance: the chance level, marked by a dotted line.
    """
    points_of: dict[str, list[tuple[int, float]]] = {}
    for name, values in curves.items():
        for number, value in zip(rounds, values, strict=True):
            if _is_finite(value):
                points_of.setdefault(name, []).append((number, value))

    if not points_of:
        return None

    band = []
    for number, values in zip(rounds, sites, strict=True):
        finite = list(filter(_is_finite, values))
        if finite:
            band.append((number, min(finite), max(finite)))

    def draw(axes: Axes) -> None:
        if len(band) > 1:
            x, low, high = zip(*band, strict=True)
            axes.fill_between(x, low, high, color=_COLOUR[band_of], alpha=0.16, linewidth=0)
        elif band:  # an area needs two rounds
            axes.vlines(*band[0], color=_COLOUR[band_of], alpha=0.3, linewidth=6)

        for name, points in points_of.items():
            marker = "o" if len(points) <= 12 else ""
            axes.plot(
                *zip(*points, strict=True),
                color=_COLOUR[name],
                linewidth=1.6,
                marker=marker,
                markersize=4,
            )

        if bounded:
            axes.set_ylim(0, 1)

        if chance is not None:
            axes.axhline(chance, **_DOTTED)

    return _svg(draw, label)


def stacked(
    label: str, rounds: Sequence[int], parts: Mapping[str, Values], unit: float = 1.0
) -> Markup | None:
    """Draw one stacked bar per round, each part in its colour and divided by `unit`; None if all are zero or absent."""
    if not any(map(any, parts.values())):
        return None

    edges = [*(number - 0.5 for number in rounds), rounds[-1] + 0.5]

    def draw(axes: Axes) -> None:
        base = np.zeros(len(rounds))
        for name, values in parts.items():
            top = base + np.nan_to_num(np.array(values, np.float64)) / unit  # None is NaN
            axes.stairs(top, edges, baseline=base, fill=True, color=_COLOUR[name], alpha=0.75)
            base = top

        axes.set(xlim=(edges[0], edges[-1]), ylim=(0, float(base.max()) * 1.08))

    return _svg(draw, label)


def roc(
    label: str,
    curves: Mapping[str, tuple[Floats, Floats]],
    background: Sequence[tuple[Floats, Floats]] = (),
    mean: tuple[Floats, Floats] | None = None,
) -> Markup:
    """Draw curves of (false, true) positive rates by colour name over thin grey ones, and a wide mean curve on top."""

    def draw(axes: Axes) -> None:
        _square(axes)
        for false, true in background:
            axes.plot(false, true, color=_COLOUR["local"], linewidth=0.8, alpha=0.5)

        for name, (false, true) in curves.items():
            axes.plot(false, true, color=_COLOUR[name], linewidth=1.5, alpha=0.9)

        if mean is not None:
            axes.plot(*mean, color=_COLOUR["ink"], linewidth=2.4)

    return _svg(draw, label, ("false positive rate", "true positive rate"), _SQUARE)


def reliability(
    label: str,
    confidence: Floats,
    accuracy: Floats,
    count: Sequence[int],
    ends: Floats,
    axis_labels: tuple[str, str],
) -> Markup:
    """Draw accuracy over confidence of B bins with their intervals (2, B), and bars of the bins' cases."""

    def draw(axes: Axes) -> None:
        _square(axes)
        shares = np.asarray(count) / max(1, sum(count))
        # the bars of cases take the lowest 22 % of the axes, below most of the curve
        axes.bar(
            confidence,
            0.22 * shares / shares.max(),
            width=0.022,
            color=_COLOUR["local"],
            alpha=0.35,
            zorder=1,
        )
        axes.vlines(confidence, *ends, color=_COLOUR["received"], alpha=0.45, linewidth=3, zorder=2)
        axes.plot(
            confidence,
            accuracy,
            "o-",
            color=_COLOUR["received"],
            linewidth=1.4,
            markersize=4,
            zorder=3,
        )

    return _svg(draw, label, axis_labels, _SQUARE)


def agreement(
    label: str, x: Floats, y: Floats, axis_labels: tuple[str, str], levels: Values
) -> Markup:
    """Draw a point per case; a line at each of the levels of y, the first one thick, or without levels where x = y."""

    def draw(axes: Axes) -> None:
        axes.scatter(x, y, s=9, color=_COLOUR["received"], alpha=0.55, linewidths=0)
        if not levels:
            ends = [float(min(x.min(), y.min())), float(max(x.max(), y.max()))]
            axes.plot(ends, ends, **_DOTTED)
            return

        axes.axhline(0, **_DOTTED)
        for place, level in enumerate(filter(_is_finite, levels)):
            axes.axhline(level, color=_COLOUR["ink"], linewidth=0.8 if place else 1.6)

    return _svg(draw, label, axis_labels, _SQUARE)


def _square(axes: Axes) -> None:
    """Set both axes to 0 to 1, with a dotted diagonal."""
    axes.plot([0, 1], [0, 1], **_DOTTED)
    axes.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02))


def _is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _svg(
    draw: Callable[[Axes], None],
    label: str,
    axis_labels: tuple[str, str] = ("round", ""),
    size: tuple[float, float] = (4.7, 2.6),
) -> Markup:
    """Return a figure of this size in inches, its axes filled by `draw`."""
    import matplotlib as mpl  # imported here: it takes longer than most commands
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # texts stay texts, in the page's font; identical charts get identical ids, so that reports have the same bytes
    with mpl.rc_context(
        {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": label, "font.size": 10}
    ):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(_COLOUR["rule"])
        axes.tick_params(length=0, labelcolor=_COLOUR["muted"])
        axes.grid(axis="y", color=_COLOUR["rule"], linewidth=0.6)
        axes.set_axisbelow(True)

        if axis_labels[0] == "round":
            axes.xaxis.set_major_locator(
                MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
            )

        axes.set_xlabel(axis_labels[0], color=_COLOUR["muted"])
        axes.set_ylabel(axis_labels[1], color=_COLOUR["muted"])
        file = io.StringIO()
        # a date or version would change the page of an unchanged run
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)

    return _inline(file.getvalue(), label)


def _inline(svg: str, label: str) -> Markup:
    """Remove header, metadata, size, fonts and unused ids from a matplotlib SVG, and use the page's colours."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    body = re.search(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>(.*</svg>)", svg, flags=re.DOTALL)
    assert body is not None
    svg = re.sub(r"font: ([\d.]+px) [^;\"]+", r"font-size: \1", body[2])
    used = set(re.findall(r"#([\w.-]+)", svg))
    # unused ids of two charts on one page would clash
    svg = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r"#0a0b\d\d", lambda match: f"var(--{_VARIABLES[match[0]]})", svg)

    return Markup(f'<svg {body[1]} role="img" aria-label="{escape(label)}">{svg}')
