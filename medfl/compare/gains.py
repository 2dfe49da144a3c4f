"""Each site's gain under each method over its own Local model and over FedAvg, by runs and seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medfl.compare.checks import require_same
from medfl.compare.comparison import t_interval
from medfl.compare.labels import labels_with_settings, settings
from medfl.core import tables
from medfl.core.errors import InputError
from medfl.data.partition.table import shorten
from medfl.evaluation import metrics
from medfl.report import RunFiles
from medfl.report.differences import BETTER, UNCLEAR, between_models, counted, word
from medfl.report.picture import Picture, colours, plain_axes, render, require_png, slant, write_png
from medfl.report.style import INK, SOFT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCES = {"local": "Local", "fedavg": "FedAvg"}
"""The methods that a site's gain is measured against, and their titles."""
_WIDTH = 7.2
_HEIGHT = 4.2


@dataclass(frozen=True)
class Gains:
    """The metric of each site under each method, and its gains.

    Attributes:
        key: the metric.
        sites: names, in the order of the partition.
        train: site -> training items of the first run.
        small: the small sites, of runs that name the large ones.
        values: method -> site -> the metric of the site's judged model, one for each seed.
        gains: method -> reference -> site -> differences to the reference's runs of the same seeds, positive where
            the method is better.
        words: method -> reference -> site -> what may be said of the gain: by its interval over the seeds, of one seed
            over the site's test cases.
        phantom: whether the images were drawn by a program.
        notes: sentences about runs whose reference has other settings.
    """

    key: str
    sites: tuple[str, ...]
    train: Mapping[str, int]
    small: frozenset[str]
    values: Mapping[str, Mapping[str, list[float]]]
    gains: Mapping[str, Mapping[str, Mapping[str, list[float]]]]
    words: Mapping[str, Mapping[str, Mapping[str, str]]]
    phantom: bool = False
    notes: tuple[str, ...] = ()

    @property
    def methods(self) -> list[str]:
        """The methods that have gains."""
        return [name for name in self.gains if any(self.gains[name].values())]

    def table(self) -> str:
        """Return a markdown table: for each site each method's metric and its gains over Local and FedAvg."""
        heads = ["site", "training items"]
        columns = []
        for name, by_site in self.values.items():
            heads.append(name)
            columns.append(by_site)
            for reference, gained in self.gains[name].items():
                if gained:
                    heads.append(f"{name} − {REFERENCES[reference]}")
                    columns.append(gained)

        rows = []
        for site in self.sites:
            mark = " (small)" if site in self.small else ""
            cells = [
                _cell(column.get(site, []), head)
                for head, column in zip(heads[2:], columns, strict=True)
            ]
            rows.append([f"{site}{mark}", str(self.train.get(site, 0)), *cells])

        return tables.markdown_table(heads, rows)

    def summary(self) -> list[str]:
        """Return sentences on how many sites each method serves better than each reference, and the notes."""
        sentences = []
        for name in self.methods:
            for reference, words in self.words[name].items():
                if not words:
                    continue

                sentence = f"{name} against {reference}: {counted([*words.values()], 'site')}"
                if self.small:
                    small = [verdict for site, verdict in words.items() if site in self.small]
                    sentence += f"; better at {small.count(BETTER)} of the {len(small)} small ones"

                sentences.append(sentence)

        return [*sentences, *self.notes]


def _cell(values: Sequence[float], head: str) -> str:
    if not values:
        return "–"

    mean = statistics.mean(values)
    text = f"{mean:+.3f}" if " − " in head else f"{mean:.3f}"
    if len(values) > 1:
        return f"{text} ± {statistics.pstdev(values):.3f}"

    return text


def gains(folders: Sequence[Path]) -> Gains:
    """Compare the sites of several runs.

    The reference of a run is its own Local run (`--with-local`) where it has one, which also counts as a run of Local;
    else the run of Local or FedAvg with the same seed, partition and data, of several the one with the same settings.

    Raises:
        InputError: a folder is not a finished run's, the runs differ in bundle, metric, images or sites, two are the
            same, two could be the reference of a third, or no run has a reference.
    """
    listed = [
        RunFiles(path)
        for path in {Path(folder).resolve(): Path(folder) for folder in folders}.values()
    ]
    local = {
        run.path: RunFiles(run.path / "local")
        for run in listed
        if (run.path / "local/run.json").is_file()
    }
    paths = {run.path.resolve() for run in listed}
    runs = listed + [run for run in local.values() if run.path.resolve() not in paths]
    _check(runs)
    by_label: dict[str, dict[tuple[Any, ...], RunFiles]] = {}

    for number, (label, run) in enumerate(zip(labels_with_settings(runs), runs, strict=True)):
        twin = by_label.setdefault(label, {}).setdefault(_pairing(run), run)
        if twin is not run and number < len(listed):
            raise InputError(
                f"{twin.path} and {run.path} are both {label} with seed {run.record.get('seed')}",
                "runs differ in method, options, settings, partition, data or seed",
                "leave one of these two runs out",
            )

    rows = [run for seeds in by_label.values() for run in seeds.values()]
    sign = 1 if metrics.higher_is_better(runs[0].key) else -1
    values: dict[str, dict[str, list[float]]] = {}
    gained: dict[str, dict[str, dict[str, list[float]]]] = {}
    words: dict[str, dict[str, dict[str, str]]] = {}
    notes: dict[str, None] = {}

    for label, seeds in by_label.items():
        method = next(iter(seeds.values())).method
        values[label] = {}
        gained[label] = {reference: {} for reference in REFERENCES if reference != method}
        words[label] = {reference: {} for reference in gained[label]}
        for _, run in sorted(seeds.items(), key=lambda entry: str(entry[0])):
            scores = run.site_values(run.judged, run.key)
            for site, value in scores.items():
                values[label].setdefault(site, []).append(value)
            for reference, column in gained[label].items() if method != "local" else ():
                base = local.get(run.path) if reference == "local" else None
                base = base or _reference(run, reference, rows)
                if base is None:
                    continue

                base_scores = base.site_values(base.judged, base.key)
                for site in (name for name in scores if name in base_scores):
                    column.setdefault(site, []).append(sign * (scores[site] - base_scores[site]))
                    words[label][reference][site] = _verdict(column[site], run, base, site)

                if differing := ", ".join(_differing(run, base)):
                    notes[
                        f"{label} and the {reference} that it is measured against differ in {differing}"
                    ] = None

    if not any(column for references in gained.values() for column in references.values()):
        raise InputError(
            f"{len(runs)} runs, none of which has the data and seed of a run of Local or FedAvg",
            "a gain is measured against one of these",
            "give such a run too, or repeat the runs with --with-local",
        )

    large = {name.strip() for run in runs for name in str(run.options.get("large", "")).split(",")}
    sites = runs[0].site_names
    if large - {""}:
        small = frozenset(site for site in sites if site not in large)
    else:
        small = frozenset()

    train = {site: runs[0].size(site, "train") for site in sites}
    return Gains(
        runs[0].key, sites, train, small, values, gained, words, runs[0].phantom, tuple(notes)
    )


def _verdict(gained: Sequence[float], run: RunFiles, base: RunFiles, site: str) -> str:
    """Judge a site's gains, one a seed; a single gain, that of `run` over `base`, over the site's test cases."""
    if len(gained) > 1:
        return word(t_interval(gained), higher_is_better=True)
    difference = between_models(run, base, site)
    return UNCLEAR if difference is None else difference.word


def _check(runs: Sequence[RunFiles]) -> None:
    for run in runs:
        if run.summary is None:
            raise InputError(
                f"{run.path} is not finished",
                "gains are of finished runs",
                "continue it with --resume",
            )

    require_same(
        runs,
        "gains compare one metric of one bundle on the same images",
        "give the runs of each kind apart",
    )
    names = {tuple(sorted(run.site_names)) for run in runs}
    if len(names) > 1:
        different = f"runs with {len(names)} different sets of sites"
        raise InputError(different, "gains compare the same sites", "give runs of one partition")


def _differing(run: RunFiles, other: RunFiles) -> list[str]:
    """Return the settings in which two runs differ."""
    first = settings(run)
    second = settings(other)
    return [name for name in {**first, **second} if first.get(name) != second.get(name)]


def _pairing(run: RunFiles) -> tuple[Any, ...]:
    """Return the seed, partition and data, which two runs share whose sites can be compared."""
    partition = run.record["partition"]
    return (
        run.record.get("seed"),
        partition.get("spec"),
        partition.get("seed"),
        run.record["data"].get("checksum"),
    )


def _reference(run: RunFiles, method: str, rows: Sequence[RunFiles]) -> RunFiles | None:
    """Return the run of `method` that is the reference of another, None where there is none.

    Raises:
        InputError: there are two.
    """
    candidates = [row for row in rows if row.method == method and _pairing(row) == _pairing(run)]
    candidates = [row for row in candidates if not _differing(run, row)] or candidates
    if len(candidates) > 1:
        raise InputError(
            f"{run.path} could be measured against {candidates[0].path} and {candidates[1].path}",
            f"one run of {method} with its seed, partition and data, or one with its settings too",
            "leave one of these two runs out",
        )

    return candidates[0] if candidates else None


def write_gains(folders: Sequence[Path], file: Path) -> tuple[Gains, Path]:
    """Write the picture of the gains of these run folders as a PNG file; return the gains and its path.

    Raises:
        InputError: as `gains`, or the file is no PNG.
    """
    require_png(file, "--gains")
    result = gains(folders)
    return result, write_png(draw(result), file)


def draw(result: Gains) -> Picture:
    """Draw each site's gain under each method: a panel for each reference, small sites on grey."""
    shown = [
        reference
        for reference in REFERENCES
        if any(result.gains[name].get(reference) for name in result.methods)
    ]
    tone = dict(zip(result.methods, colours(len(result.methods)), strict=True))
    title = f"{metrics.title(result.key)}: what each site gains" + (
        ", PHANTOM data" if result.phantom else ""
    )

    def fill(figure: Figure) -> None:
        panels: Any = figure.subplots(len(shown), 1, sharex=True, squeeze=False)
        for axes, reference in zip(panels[:, 0], shown, strict=True):
            methods = [name for name in result.methods if result.gains[name].get(reference)]
            step = 0.8 / max(1, len(methods))
            for column, site in enumerate(result.sites):
                if site in result.small:
                    axes.axvspan(column - 0.5, column + 0.5, color="#eef0f3", zorder=0, linewidth=0)
                for turn, name in enumerate(methods):
                    values = result.gains[name][reference].get(site, [])
                    if not values:
                        continue

                    x = column + (turn - (len(methods) - 1) / 2) * step
                    axes.bar(
                        x, statistics.mean(values), width=0.9 * step, color=tone[name], zorder=2
                    )
                    axes.plot([x] * len(values), values, ".", color=INK, markersize=3, zorder=3)

            axes.axhline(0, color=INK, linewidth=0.8)
            axes.set(
                ylabel=f"against {REFERENCES[reference]}", xlim=(-0.5, len(result.sites) - 0.5)
            )
            axes.tick_params(labelcolor=INK, color=SOFT, length=0)
            plain_axes(axes)
            axes.spines["bottom"].set_visible(False)

        names = [f"{shorten(site, 18)}\n({result.train.get(site, 0)})" for site in result.sites]
        slanted = max(map(len, result.sites)) * len(result.sites) > 75
        panels[-1, 0].set_xticks(range(len(names)), names, **(slant(35) if slanted else {}))
        for name in result.methods:
            panels[0, 0].bar(math.nan, math.nan, color=tone[name], label=shorten(name, 34))

        figure.legend(
            loc="outside lower center", ncols=3, frameon=False, fontsize=9, labelcolor=INK
        )

    caption = (
        f"Difference in {metrics.title(result.key).lower()} on each site's own test items; bars are means over "
        "the seeds, points single runs. In brackets: training items."
    )

    if result.small:
        caption += " Small sites on grey."

    size = (_WIDTH, 1.4 + (_HEIGHT - 1.4) * len(shown) / 1.4)
    return render("gains", title, caption, size, fill, layout="constrained")
