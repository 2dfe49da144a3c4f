"""Who gains? Each site under each method against its own Local model and against FedAvg, over runs and seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl import metrics
from medfl.curves import labels
from medfl.errors import InputError
from medfl.partition_plot import INK, SOFT, shorten
from medfl.pictures import Picture, colours, render
from medfl.report import RunFolder
from medfl.storage import write_atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCES = ("local", "fedavg")
"""The methods that a site's gain is measured against."""
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
    """

    key: str
    sites: tuple[str, ...]
    train: Mapping[str, int]
    small: frozenset[str]
    values: Mapping[str, Mapping[str, list[float]]]
    gains: Mapping[str, Mapping[str, Mapping[str, list[float]]]]
    phantom: bool = False

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
        """Return a sentence for each method: how many sites it serves better than each reference, and which worse."""
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
        return said


def _told(values: Sequence[float], head: str) -> str:
    if not values:
        return "–"
    mean = statistics.mean(values)
    text = f"{mean:+.3f}" if " − " in head else f"{mean:.3f}"
    return f"{text} ± {statistics.pstdev(values):.3f}" if len(values) > 1 else text


def gains(folders: Sequence[Path]) -> Gains:
    """Compare the sites of several runs; a run's own Local reference (`--with-local`) counts as a run of Local.

    Raises:
        InputError: a folder is not a finished run's, the runs differ in metric or sites, or no run of Local or FedAvg
            has the seed of another.
    """
    runs = [RunFolder.read(Path(folder)) for folder in folders]
    runs += [RunFolder.read(run.path / "local") for run in runs if (run.path / "local" / "run.json").is_file()]
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
    known = {label: {} for label in dict.fromkeys(labels(runs))}  # type: dict[str, dict[tuple[Any, ...], RunFolder]]
    for label, run in zip(labels(runs), runs, strict=True):
        known[label][_same(run)] = run
    sign = 1 if metrics.higher_is_better(keys[0]) else -1
    values: dict[str, dict[str, list[float]]] = {}
    gained: dict[str, dict[str, dict[str, list[float]]]] = {}
    for label, seeds in known.items():
        values[label], gained[label] = {}, {reference: {} for reference in REFERENCES if reference != label}
        for seed, run in sorted(seeds.items(), key=lambda entry: str(entry[0])):
            own = run.site_values(run.judged, run.key)
            for site, value in own.items():
                values[label].setdefault(site, []).append(value)
            for reference, column in gained[label].items():
                other = known.get(reference, {}).get(seed)
                theirs = other.site_values(other.judged, other.key) if other and label != "local" else {}
                for site in (one for one in own if one in theirs):
                    column.setdefault(site, []).append(sign * (own[site] - theirs[site]))
    if not any(column for references in gained.values() for column in references.values()):
        raise InputError(
            f"{len(runs)} runs, none of which has the data and seed of a run of Local or FedAvg",
            "a gain is measured against one of these",
            "add such a run, or --with-local",
        )
    large = {name.strip() for run in runs for name in str((run.run.get("options") or {}).get("large", "")).split(",")}
    sites = runs[0].site_names
    small = frozenset(site for site in sites if site not in large) if large - {""} else frozenset()
    return Gains(
        keys[0],
        sites,
        {site: runs[0].size(site, "train") or 0 for site in sites},
        small,
        values,
        gained,
        runs[0].phantom,
    )


def _same(run: RunFolder) -> tuple[Any, ...]:
    """Return what two runs share whose sites can be compared: seed, partition and data."""
    partition = run.run.get("partition") or {}
    return run.run.get("seed"), partition.get("spec"), partition.get("seed"), run.run["data"].get("checksum")


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
