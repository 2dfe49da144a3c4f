"""One picture of several runs: the validation metric against the bytes sent and the seconds taken."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medfl.compare.checks import require_same
from medfl.compare.labels import labels
from medfl.core.errors import InputError
from medfl.data.partition.table import shorten
from medfl.evaluation import metrics
from medfl.report import RunFiles
from medfl.report.picture import Picture, colours, render, require_png, write_png
from medfl.report.style import INK, SOFT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = (9.6, 4.4)
_ENTRY = 34  # letters of a legend's entry
_MARKERS = ("o", "^", "s", "D", "v", "P", "X", "<", ">", "*")
_MOST_MARKS = 12  # on a line


def write_cost_curves(folders: Sequence[Path], file: Path) -> Path:
    """Write the picture of `cost_curves` for these run folders as a PNG file and return its path.

    Raises:
        InputError: a folder is not a run's, the runs have different key metrics, or none was scored.
    """
    require_png(file, "--curves")
    return write_png(cost_curves([RunFiles(Path(folder)) for folder in folders]), file)


def embedded(runs: Sequence[RunFiles]) -> tuple[str, str, str] | None:
    """Return title, caption and PNG in base64 of the curves for a page, None where no run was scored."""
    try:
        return cost_curves(runs).embedded
    except InputError:
        return None


def cost_curves(runs: Sequence[RunFiles]) -> Picture:
    """Draw each run's validation metric over the bytes sent and over the time taken, on logarithmic axes.

    Runs that differ only in their seed have one colour, and a marker for each seed.

    Raises:
        InputError: as `write_cost_curves`.
    """
    require_same(runs, "one picture shows one metric of one bundle", "draw a picture of each kind")
    key = metrics.title(runs[0].key)
    label_of = labels(runs)
    rounds_of = [run.progress() for run in runs]
    seeds = [str(run.record.get("seed", "–")) for run in runs]
    names_of_seeds = sorted(set(seeds), key=lambda seed: (len(seed), seed))
    marker = {seed: _MARKERS[i % len(_MARKERS)] for i, seed in enumerate(names_of_seeds)}
    by_bytes = [
        [(sent / 1e6, value) for _, sent, _, value in rounds if sent > 0] for rounds in rounds_of
    ]
    by_seconds = [
        [(took, value) for _, _, took, value in rounds if took > 0] for rounds in rounds_of
    ]
    without_bytes = sorted(
        {label for label, points in zip(label_of, by_bytes, strict=True) if not points}
    )
    dashed = {label for label, run in zip(label_of, runs, strict=True) if run.judged == "personal"}

    if not any(by_bytes + by_seconds):
        raise InputError(
            f"{len(runs)} runs without scored rounds",
            "curves need some",
            "give runs with --eval-every 1",
        )

    names = list(
        dict.fromkeys(label for label, rounds in zip(label_of, rounds_of, strict=True) if rounds)
    )
    colour = dict(zip(names, colours(len(names)), strict=True))
    title = f"{key} against what was sent and how long it took"
    title += ", PHANTOM data" if runs[0].phantom else ""

    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    def fill(figure: Figure) -> None:
        panels = figure.subplots(1, 2, sharey=True)
        units = ("megabytes sent so far, both ways, all sites", "seconds so far")
        for axes, curves, unit in zip(panels, (by_bytes, by_seconds), units, strict=True):
            for label, seed, points in zip(label_of, seeds, curves, strict=True):
                if not points:
                    continue

                line = {
                    "color": colour[label],
                    "linestyle": "--" if label in dashed else "-",
                    "marker": marker[seed],
                }
                every = -(-len(points) // _MOST_MARKS)
                axes.plot(
                    *zip(*points, strict=True),
                    **line,
                    markevery=every,
                    linewidth=1.5,
                    markersize=4,
                    alpha=0.85,
                )

            axes.set(xscale="log", xlabel=unit)
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.grid(color="#e5e7eb", linewidth=0.6)
            axes.tick_params(labelcolor=INK, color=SOFT)
            axes.spines[["top", "right"]].set_visible(False)

        panels[0].set_ylabel("on the validation set")
        for label in names:
            style = "--" if label in dashed else "-"
            panels[0].plot(
                [], [], color=colour[label], linestyle=style, label=shorten(label, _ENTRY)
            )

        for seed in names_of_seeds if len(names_of_seeds) > 1 else ():
            panels[0].plot(
                [],
                [],
                color=SOFT,
                linestyle="",
                marker=marker[seed],
                markersize=5,
                label=f"seed {seed}",
            )

        columns = 3 if max(map(len, names)) > 16 else 4
        figure.legend(
            loc="outside lower center", ncols=columns, frameon=False, fontsize=9, labelcolor=INK
        )

    caption = (
        f"{key} on the pooled validation set after a round, over the megabytes of the encoded "
        "messages until then, and over the seconds of the rounds on the machine that ran them; one line a run, one "
        "colour a method. Further left is cheaper."
    )

    if len(names_of_seeds) > 1:
        caption += " Markers tell the seeds apart."

    if dashed:
        caption += (
            " Dashed: each site's own model on the site's own images, which is another question."
        )

    if without_bytes:
        caption += f" Not drawn on the left, as they send nothing or were not scored: {', '.join(without_bytes)}."

    return render("curves", title, caption, _SIZE, fill, layout="constrained")
