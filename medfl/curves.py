"""Several runs in one picture: the metric that they are judged by against the bytes that they sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl import metrics
from medfl.errors import InputError
from medfl.partition_plot import INK, SOFT, shorten
from medfl.pictures import Picture, colours, render
from medfl.report import RunFolder
from medfl.storage import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE = (6.4, 4.4)
_ENTRY = 34  # letters of a legend's entry


def write_curves(folders: Sequence[Path], file: Path) -> Path:
    """Write the picture of `against_bytes` for these run folders as a PNG file and return its path.

    Raises:
        InputError: a folder is not a run's, the runs have different key metrics, or none has both scores and bytes.
    """
    drawn = against_bytes([RunFolder.read(Path(folder)) for folder in folders])
    if file.suffix.lower() != ".png":
        raise InputError(f"{file}", "the curves are a PNG file", "name it so")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, drawn.png)
    return file


def against_bytes(runs: Sequence[RunFolder]) -> Picture:
    """Draw each run's validation metric over all bytes that its sites and server have sent, on a logarithmic axis.

    Runs that differ in their seed only have one colour.

    Raises:
        InputError: as `write_curves`.
    """
    keys = sorted({run.key for run in runs})
    if len(keys) > 1:
        raise InputError(f"runs judged by {', '.join(keys)}", "one picture shows one metric", "draw them apart")
    points = [(label, _points(run)) for label, run in zip(labels(runs), runs, strict=True)]
    silent = sorted({label for label, found in points if not found})
    points = [(label, found) for label, found in points if found]
    dashed = {label for label, run in zip(labels(runs), runs, strict=True) if run.judged == "personal"}
    if not points:
        raise InputError(
            f"{len(runs)} runs without rounds that were scored and sent bytes",
            "Local and Central send nothing",
            "give federated runs",
        )
    names = list(dict.fromkeys(label for label, _ in points))
    tone = dict(zip(names, colours(len(names)), strict=True))
    title = f"{metrics.title(keys[0])} against what was sent"

    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    def fill(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        figure.suptitle(title, size=11, weight="bold", color=INK)
        axes = figure.subplots()
        for label, found in points:
            dots = "o" if len(found) <= 12 else ""
            line = {"color": tone[label], "linestyle": "--" if label in dashed else "-", "marker": dots}
            axes.plot(*zip(*found, strict=True), **line, linewidth=1.5, markersize=4, alpha=0.85)
        axes.set(xscale="log", xlabel="megabytes sent so far, both ways, all sites", ylabel="on the validation set")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.grid(color="#e5e7eb", linewidth=0.6)
        axes.tick_params(labelcolor=INK, color=SOFT)
        axes.spines[["top", "right"]].set_visible(False)
        for label in names:
            style = "--" if label in dashed else "-"
            axes.plot([], [], color=tone[label], linestyle=style, label=shorten(label, _ENTRY))
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=INK)

    caption = (
        f"{metrics.title(keys[0])} on the pooled validation set after a round, over the megabytes of the encoded "
        "messages until then; one line a run, one colour a method. Further left is cheaper."
    )
    if dashed:
        caption += " Dashed: each site's own model on the site's own images, which is another question."
    if silent:
        caption += f" Not drawn, as they send nothing or were not scored: {', '.join(silent)}."
    return render("against-bytes", title, caption, _SIZE, fill)


def labels(runs: Sequence[RunFolder]) -> list[str]:
    """Return each run's method with the options in which runs of that method differ."""
    made = []
    for run in runs:
        method, own = run.run["method"], run.run.get("options") or {}
        others: list[Mapping[str, Any]] = [o.run.get("options") or {} for o in runs if o.run["method"] == method]
        differing = [name for name, value in own.items() if any(other.get(name) != value for other in others)]
        made.append(" ".join([str(method), *(f"{name}={own[name]}" for name in differing)]))
    return made


def _points(run: RunFolder) -> list[tuple[float, float]]:
    """Return (megabytes so far, metric) of the rounds that were scored."""
    found, sent = [], 0.0
    for entry in run.rounds:
        sent += (entry.get("bytes_up", 0) + entry.get("bytes_down", 0)) / 1e6
        value = (entry.get("val") or {}).get(run.key)
        if value is not None and sent > 0:
            found.append((sent, float(value)))
    return found
