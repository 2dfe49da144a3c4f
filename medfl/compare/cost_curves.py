"""One picture of several runs: the validation metric against the bytes sent and the seconds taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from medfl.compare.checks import require_same
from medfl.compare.labels import labels
from medfl.core import InputError
from medfl.data.partition.table import shorten
from medfl.evaluation import metrics
from medfl.report import RunFiles
from medfl.report.picture import Picture, colours, render, require_png, write_png
from medfl.report.style import SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (9.6, 4.4)  # inches
_ENTRY = 34  # letters of a legend's entry
# more seeds than markers begin anew
_MARKERS = ("o", "^", "s", "D", "v", "P", "X", "<", ">", "*")
_MOST_MARKS = 12  # per line


class _Curve(NamedTuple):
    """A run's validation metric over megabytes and over seconds.

    `personal`: it is that of the sites' own models; `scored`: some round has it.
    """

    label: str
    seed: str
    personal: bool
    scored: bool
    by_bytes: list[tuple[float, float]]
    by_seconds: list[tuple[float, float]]


def write_cost_curves(folders: Sequence[Path], file: Path) -> Path | None:
    """Write the picture of `cost_curves` for these run folders as a PNG file; return its path, None without scores.

    Raises:
        InputError: a folder is not a run's, or the runs have different key metrics.
    """
    require_png(file, "--curves")
    runs = [RunFiles(Path(folder)) for folder in folders]
    if not any(map(RunFiles.progress, runs)):
        return None

    return write_png(cost_curves(runs), file)


def embedded(runs: Sequence[RunFiles]) -> tuple[str, str, str] | None:
    """Return title, caption and PNG in base64 of the curves for a page, None if no run was scored."""
    try:
        return cost_curves(runs).embedded
    except InputError:
        return None


def cost_curves(runs: Sequence[RunFiles]) -> Picture:
    """Draw each run's validation metric over the bytes sent and over the time taken, on logarithmic axes.

    Runs that differ only in their seed have the same colour, and a marker for each seed.

    Raises:
        InputError: as for `write_cost_curves`.
    """
    require_same(runs, "one picture shows one metric of one bundle", "draw a picture of each kind")
    key = metrics.title(runs[0].key)
    curves = []
    for run, label in zip(runs, labels(runs), strict=True):
        points = run.progress()
        curve = _Curve(
            label, str(run.record.get("seed", "–")), run.judged == "personal", bool(points), [], []
        )
        curves.append(curve)
        for _, sent, seconds, value in points:
            # a logarithmic axis cannot show zero
            if sent > 0:
                curve.by_bytes.append((sent / 1e6, value))

            if seconds > 0:
                curve.by_seconds.append((seconds, value))

    # by length, then alphabetically: seed 10 comes after seed 9
    seeds = sorted({curve.seed for curve in curves}, key=lambda seed: (len(seed), seed))
    marker = {seed: _MARKERS[i % len(_MARKERS)] for i, seed in enumerate(seeds)}
    dashed = set()
    without_bytes = set()
    labels_of_scored: dict[str, None] = {}  # in order, without repeats
    for curve in curves:
        if curve.personal:
            dashed.add(curve.label)
        if not curve.by_bytes:
            without_bytes.add(curve.label)
        if curve.scored:
            labels_of_scored[curve.label] = None

    names = list(labels_of_scored)
    if not any(curve.by_bytes or curve.by_seconds for curve in curves):
        raise InputError(
            f"{len(runs)} runs without scored rounds",
            f"curves need some in which {runs[0].key} is defined",
            "give runs with --eval-every 1 and validation images that have it",
        )

    # one colour per label, so that seeds of a method look alike
    colour = dict(zip(names, colours(len(names)), strict=True))
    title = f"{key} against what was sent and how long it took"
    if runs[0].phantom:
        title += ", PHANTOM data"

    def line_style(label: str) -> str:
        return "--" if label in dashed else "-"

    def fill(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for curve in curves:
            for axes, points in ((left, curve.by_bytes), (right, curve.by_seconds)):
                if not points:
                    continue

                axes.plot(
                    *zip(*points, strict=True),
                    color=colour[curve.label],
                    linestyle=line_style(curve.label),
                    marker=marker[curve.seed],
                    markevery=math.ceil(len(points) / _MOST_MARKS),
                    linewidth=1.5,
                    markersize=4,
                    alpha=0.85,
                )

        _logarithmic(left, "megabytes sent so far, both ways, all sites")
        _logarithmic(right, "seconds so far")
        left.set_ylabel("on the validation set")

        # empty lines make the legend: one for each label, then one for each seed's marker
        for label in names:
            text = shorten(label, _ENTRY)
            left.plot([], [], color=colour[label], linestyle=line_style(label), label=text)

        if len(seeds) > 1:
            for seed in seeds:
                style = {"linestyle": "", "marker": marker[seed], "markersize": 5}
                left.plot([], [], color=SOFT, label=f"seed {seed}", **style)

        columns = 3 if max(map(len, names)) > 16 else 4
        figure.legend(loc="outside lower center", ncols=columns)

    caption = (
        f"{key} on the pooled validation set after a round, over the megabytes of the encoded "
        "messages until then, and over the seconds of the rounds on the machine that ran them; one line a run, one "
        "colour a method. Further left is cheaper."
    )

    if len(seeds) > 1:
        caption += " Markers tell the seeds apart."

    if dashed:
        caption += (
            " Dashed: each site's own model on the site's own images, which is another question."
        )

    if without_bytes:
        left_out = ", ".join(sorted(without_bytes))
        caption += f" Not drawn on the left, as they send nothing or were not scored: {left_out}."

    return render("curves", title, caption, _SIZE, fill, layout="constrained")


def _logarithmic(axes: Axes, unit: str) -> None:
    """Give axes a logarithmic scale with plain numbers at 1, 2 and 5 of each power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set(xscale="log", xlabel=unit)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid()
