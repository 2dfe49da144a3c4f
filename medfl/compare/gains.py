"""Who gains? Each site under each method against its own Local model and against FedAvg, over runs and seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl.compare.curves import labels
from medfl.core.errors import InputError
from medfl.core.storage import write_atomic
from medfl.data.partition.table import shorten
from medfl.evaluation import metrics
from medfl.report import RunFolder
from medfl.report.pictures import Picture, colours, render
from medfl.report.style import INK, SOFT
from medfl.report.words import setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCES = ("local", "fedavg")
"""The methods that a site's gain is measured against."""
_SETTINGS = (
    "bundle", "rounds", "local_epochs", "batch_size", "lr", "lr_decay", "cohort", "amp", "messages", "aggregation"
)  # fmt: skip
_WIDTH, _HEIGHT = 7.2, 4.2


@dataclass(frozen=True)
class Gains:
    """What each method gives each site.

    Attributes:
        key: the metric.
        sites: names, in the partition's order.
        train: site -> training items, of the first seed.
        small: the sites that a run with large and small ones calls small.
        values: method -> site -> the metric of the model that the site is judged by, one a seed.
        gains: method -> reference -> site -> difference to the reference's run with the same seed, positive where the
            method is better; without seeds that the reference lacks.
        phantom: whether the images were drawn by a program.
        notes: sentences about runs that are measured against one with other settings.
    """

    key: str
    sites: tuple[str, ...]
    train: Mapping[str, int]
    small: frozenset[str]
    values: Mapping[str, Mapping[str, list[float]]]
    gains: Mapping[str, Mapping[str, Mapping[str, list[float]]]]
    phantom: bool = False
    notes: tuple[str, ...] = ()

    @property
    def methods(self) -> list[str]:
        """The methods with gains: all but those that they are measured against alone."""
        return [name for name in self.gains if any(self.gains[name].values())]

    def table(self) -> str:
        """Return a markdown table: a row a site, each method's metric, and its gains over Local and FedAvg."""
        titles = {"local": "Local", "fedavg": "FedAvg"}
        heads, columns = ["site", "training items"], []
        for name, found in self.values.items():
            heads.append(name)
            columns.append(found)
            for reference, gained in self.gains[name].items():
                if gained:
                    heads.append(f"{name} − {titles[reference]}")
                    columns.append(gained)
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for site in self.sites:
            mark = " (small)" if site in self.small else ""
            signed = [_told(column.get(site, []), head) for head, column in zip(heads[2:], columns, strict=True)]
            lines.append(f"| {site}{mark} | {self.train.get(site, 0)} | " + " | ".join(signed) + " |")
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """Return a sentence for each method: how many sites it serves better than each reference, and which worse.

        The notes follow.
        """
        said = []
        for name in self.methods:
            for reference, gained in self.gains[name].items():
                if not gained:
                    continue
                means = {site: statistics.mean(values) for site, values in gained.items() if values}
                better = [site for site, value in means.items() if value > 0]
                small = [site for site in better if site in self.small]
                told = f"{name} is above {reference} at {len(better)} of {len(means)} sites"
                if self.small:
                    told += f", {len(small)} of the {len(self.small & means.keys())} small ones"
                worse = [site for site, value in means.items() if value < 0]
                said.append(told + (f"; below at {', '.join(worse)}" if worse else ""))
        return [*said, *self.notes]


def _told(values: Sequence[float], head: str) -> str:
    if not values:
        return "–"
    mean = statistics.mean(values)
    text = f"{mean:+.3f}" if " − " in head else f"{mean:.3f}"
    return f"{text} ± {statistics.pstdev(values):.3f}" if len(values) > 1 else text


def gains(folders: Sequence[Path]) -> Gains:
    """Compare the sites of several runs.

    A run is measured against its own Local reference (`--with-local`) where it has one, which also counts as a run of
    Local; else against the run of Local or FedAvg with the same seed, partition and data, of several against the one
    with the same settings.

    Raises:
        InputError: a folder is not a finished run's, the runs differ in metric or sites, two differ in nothing, two
            could be the reference of a third, or no run of Local or FedAvg has the seed of another.
    """
    given = [RunFolder.read(path) for path in {Path(folder).resolve(): Path(folder) for folder in folders}.values()]
    own = {run.path: RunFolder.read(run.path / "local") for run in given if _has_local(run)}
    places = {run.path.resolve() for run in given}
    runs = given + [local for local in own.values() if local.path.resolve() not in places]
    _check(runs)
    known: dict[str, dict[tuple[Any, ...], RunFolder]] = {}
    for number, (label, run) in enumerate(zip(_labels(runs), runs, strict=True)):
        twin = known.setdefault(label, {}).setdefault(_same(run), run)
        if twin is not run and number < len(given):
            raise InputError(
                f"{twin.path} and {run.path} are both {label} with seed {run.run.get('seed')}",
                "runs differ in method, options, settings, partition, data or seed",
                "leave one of these two runs out",
            )
    rows = [run for seeds in known.values() for run in seeds.values()]
    sign = 1 if metrics.higher_is_better(runs[0].key) else -1
    values: dict[str, dict[str, list[float]]] = {}
    gained: dict[str, dict[str, dict[str, list[float]]]] = {}
    notes: dict[str, None] = {}
    for label, seeds in known.items():
        method = next(iter(seeds.values())).run["method"]
        values[label], gained[label] = {}, {reference: {} for reference in REFERENCES if reference != method}
        for _, run in sorted(seeds.items(), key=lambda entry: str(entry[0])):
            scores = run.site_values(run.judged, run.key)
            for site, value in scores.items():
                values[label].setdefault(site, []).append(value)
            for reference, column in gained[label].items() if method != "local" else ():
                other = own.get(run.path) if reference == "local" else None
                other = other or _reference(run, reference, rows)
                if other is None:
                    continue
                theirs = other.site_values(other.judged, other.key)
                for site in (one for one in scores if one in theirs):
                    column.setdefault(site, []).append(sign * (scores[site] - theirs[site]))
                if apart := _apart(run, other):
                    notes[f"{label} and the {reference} that it is measured against differ in {', '.join(apart)}"] = (
                        None
                    )
    if not any(column for references in gained.values() for column in references.values()):
        raise InputError(
            f"{len(runs)} runs, none of which has the data and seed of a run of Local or FedAvg",
            "a gain is measured against one of these",
            "add such a run, or --with-local",
        )
    large = {name.strip() for run in runs for name in str((run.run.get("options") or {}).get("large", "")).split(",")}
    sites = runs[0].site_names
    small = frozenset(site for site in sites if site not in large) if large - {""} else frozenset()
    train = {site: runs[0].size(site, "train") or 0 for site in sites}
    return Gains(runs[0].key, sites, train, small, values, gained, runs[0].phantom, tuple(notes))


def _has_local(run: RunFolder) -> bool:
    return (run.path / "local" / "run.json").is_file()


def _check(runs: Sequence[RunFolder]) -> None:
    for run in runs:
        if run.summary is None:
            raise InputError(f"{run.path} is not finished", "gains are of finished runs", "continue it with --resume")
    keys = sorted({run.key for run in runs})
    if len(keys) > 1:
        raise InputError(f"runs judged by {', '.join(keys)}", "one table shows one metric", "compare them apart")
    if len({run.phantom for run in runs}) > 1:
        raise InputError("runs on phantoms and runs on real images", "gains compare the same images", "give them apart")
    names = {tuple(sorted(run.site_names)) for run in runs}
    if len(names) > 1:
        raise InputError(
            f"runs with {len(names)} different sets of sites",
            "gains compare the same sites",
            "give runs of one partition",
        )


def _labels(runs: Sequence[RunFolder]) -> list[str]:
    """Return each run's method with the options and settings in which runs of that method differ."""
    made = []
    for label, run in zip(labels(runs), runs, strict=True):
        others = [_settings(other) for other in runs if other.run["method"] == run.run["method"]]
        differing = [
            f"{name}={setting(value)}"
            for name, value in _settings(run).items()
            if any(other.get(name) != value for other in others)
        ]
        made.append(" ".join([label, *differing]))
    return made


def _settings(run: RunFolder) -> dict[str, Any]:
    """Return what else decides how well a run does, but for its method and options."""
    return {name: run.run[name] for name in _SETTINGS if name in run.run} | dict(run.run.get("config") or {})


def _apart(run: RunFolder, other: RunFolder) -> list[str]:
    ours, theirs = _settings(run), _settings(other)
    return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def _same(run: RunFolder) -> tuple[Any, ...]:
    """Return what two runs share whose sites can be compared: seed, partition and data."""
    partition = run.run.get("partition") or {}
    return run.run.get("seed"), partition.get("spec"), partition.get("seed"), run.run["data"].get("checksum")


def _reference(run: RunFolder, method: str, rows: Sequence[RunFolder]) -> RunFolder | None:
    """Return the run of a method that another is measured against, None where there is none.

    Raises:
        InputError: there are two, and nothing says which.
    """
    found = [row for row in rows if row.run["method"] == method and _same(row) == _same(run)]
    found = [row for row in found if not _apart(run, row)] or found
    if len(found) > 1:
        raise InputError(
            f"{run.path} could be measured against {found[0].path} and {found[1].path}",
            f"one run of {method} with its seed, partition and data, or one with its settings too",
            "drop one, or compare them apart",
        )
    return found[0] if found else None


def write_gains(folders: Sequence[Path], file: Path) -> tuple[Gains, Path]:
    """Write the picture of `draw` for these run folders as a PNG file; return the gains and its path.

    Raises:
        InputError: as `gains`, or the file is no PNG.
    """
    if file.suffix.lower() != ".png":
        raise InputError(f"{file}", "the gains are a PNG file", "name it so")
    found = gains(folders)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, draw(found).png)
    return found, file


def draw(found: Gains) -> Picture:
    """Draw each site's gain under each method: a panel a reference, a group a site, small sites on a grey ground."""
    shown = [reference for reference in REFERENCES if any(found.gains[name].get(reference) for name in found.methods)]
    tone = dict(zip(found.methods, colours(len(found.methods)), strict=True))
    title = f"{metrics.title(found.key)}: what each site gains" + (", PHANTOM data" if found.phantom else "")

    def fill(figure: Figure) -> None:
        figure.set_layout_engine("constrained")
        figure.suptitle(title, size=11, weight="bold", color=INK)
        panels: Any = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
        for axes, reference in zip(panels[:, 0], shown, strict=True):
            methods = [name for name in found.methods if found.gains[name].get(reference)]
            step = 0.8 / max(1, len(methods))
            for place, site in enumerate(found.sites):
                if site in found.small:
                    axes.axvspan(place - 0.5, place + 0.5, color="#eef0f3", zorder=0, linewidth=0)
                for turn, name in enumerate(methods):
                    values = found.gains[name][reference].get(site, [])
                    if not values:
                        continue
                    x = place + (turn - (len(methods) - 1) / 2) * step
                    axes.bar(x, statistics.mean(values), width=0.9 * step, color=tone[name], zorder=2)
                    axes.plot([x] * len(values), values, ".", color=INK, markersize=3, zorder=3)
            axes.axhline(0, color=INK, linewidth=0.8)
            axes.set(
                ylabel=f"against {'Local' if reference == 'local' else 'FedAvg'}", xlim=(-0.5, len(found.sites) - 0.5)
            )
            axes.tick_params(labelcolor=INK, color=SOFT, length=0)
            axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
        names = [f"{shorten(site, 18)}\n({found.train.get(site, 0)})" for site in found.sites]
        slanted = max(map(len, found.sites)) * len(found.sites) > 75
        style: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
        panels[-1, 0].set_xticks(range(len(names)), names, **style)
        for name in found.methods:
            panels[0, 0].bar(math.nan, math.nan, color=tone[name], label=shorten(name, 34))
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=INK)

    caption = (
        f"Difference in {metrics.title(found.key).lower()} on each site's own test items; bars are means over "
        "the seeds, points single runs. In brackets: training items."
    )
    if found.small:
        caption += " Small sites on grey."
    return render("gains", title, caption, (_WIDTH, 1.4 + (_HEIGHT - 1.4) * len(shown) / 1.4), fill)
