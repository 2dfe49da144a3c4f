"""Several runs in one picture: the metric that they are judged by against the bytes and seconds that it took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl.core.errors import InputError
from medfl.core.storage import write_atomic
from medfl.data.partition.table import shorten
from medfl.evaluation import metrics
from medfl.report import RunFolder
from medfl.report.pictures import Picture, colours, render
from medfl.report.style import INK, SOFT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = (9.6, 4.4)
_ENTRY = 34  # letters of a legend's entry


def write_curves(folders: Sequence[Path], file: Path) -> Path:
    """Write the picture of `curves` for these run folders as a PNG file and return its path.

    Raises:
        InputError: a folder is not a run's, the runs have different key metrics, or none was scored.
    """
    drawn = curves([RunFolder.read(Path(folder)) for folder in folders])
    if file.suffix.lower() != ".png":
        raise InputError(f"{file}", "the curves are a PNG file", "name it so")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, drawn.png)
    return file


def curves(runs: Sequence[RunFolder]) -> Picture:
    """Draw each run's validation metric over all that was sent, and over the time that it took, on logarithmic axes.

    Runs that differ in their seed only have one colour.

    Raises:
        InputError: as `write_curves`.
    """
    keys = sorted({run.key for run in runs})
    if len(keys) > 1:
        raise InputError(f"runs judged by {', '.join(keys)}", "one picture shows one metric", "draw them apart")
    for what, of in (("bundles", "bundle"), ("kinds of images", "data")):
        found = {str(run.run[of]["source"] if of == "data" else run.run[of]) for run in runs}
        if len(found) > 1:
            told = " and ".join(sorted(found))
            raise InputError(
                f"runs of different {what}: {told}", "one picture compares like with like", "draw them apart"
            )
    named = list(zip(labels(runs), (progress(run) for run in runs), strict=True))
    sent = [(label, [(so_far / 1e6, value) for _, so_far, _, value in found if so_far > 0]) for label, found in named]
    took = [(label, [(seconds, value) for _, _, seconds, value in found if seconds > 0]) for label, found in named]
    silent = sorted({label for label, found in sent if not found})
    dashed = {label for label, run in zip(labels(runs), runs, strict=True) if run.judged == "personal"}
    if not any(found for _, found in sent + took):
        raise InputError(f"{len(runs)} runs without scored rounds", "curves need some", "give runs with --eval-every")
    names = list(dict.fromkeys(label for label, found in named if found))
    tone = dict(zip(names, colours(len(names)), strict=True))
    title = f"{metrics.title(keys[0])} against what was sent and how long it took"
    title += ", PHANTOM data" if runs[0].phantom else ""

    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    def fill(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        figure.suptitle(title, size=11, weight="bold", color=INK)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, points, unit in zip(
            panels, (sent, took), ("megabytes sent so far, both ways, all sites", "seconds so far"), strict=True
        ):
            for label, found in points:
                if not found:
                    continue
                dots = "o" if len(found) <= 12 else ""
                line = {"color": tone[label], "linestyle": "--" if label in dashed else "-", "marker": dots}
                axes.plot(*zip(*found, strict=True), **line, linewidth=1.5, markersize=4, alpha=0.85)
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
            panels[0].plot([], [], color=tone[label], linestyle=style, label=shorten(label, _ENTRY))
        columns = 3 if max(map(len, names)) > 16 else 4
        figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=9, labelcolor=INK)

    caption = (
        f"{metrics.title(keys[0])} on the pooled validation set after a round, over the megabytes of the encoded "
        "messages until then, and over the seconds of the rounds on the machine that ran them; one line a run, one "
        "colour a method. Further left is cheaper."
    )
    if dashed:
        caption += " Dashed: each site's own model on the site's own images, which is another question."
    if silent:
        caption += f" Not drawn on the left, as they send nothing or were not scored: {', '.join(silent)}."
    return render("curves", title, caption, _SIZE, fill)


def progress(run: RunFolder) -> list[tuple[int, float, float, float]]:
    """Return (round, bytes so far, seconds so far, metric) of the rounds whose validation metric is known."""
    found, sent, took = [], 0.0, 0.0
    for entry in run.rounds:
        sent += entry.get("bytes_up", 0) + entry.get("bytes_down", 0)
        took += entry.get("seconds", 0)
        value = (entry.get("val") or {}).get(run.key)
        if value is not None:
            found.append((int(entry["round"]), sent, took, float(value)))
    return found


def labels(runs: Sequence[RunFolder]) -> list[str]:
    """Return each run's method with the options in which runs of that method differ."""
    made = []
    for run in runs:
        method, own = run.run["method"], run.run.get("options") or {}
        others: list[Mapping[str, Any]] = [o.run.get("options") or {} for o in runs if o.run["method"] == method]
        differing = [name for name, value in own.items() if any(other.get(name) != value for other in others)]
        made.append(" ".join([str(method), *(f"{name}={own[name]}" for name in differing)]))
    return made
