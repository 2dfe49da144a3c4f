"""Each site's gain under each method over its own Local model and over FedAvg, by runs and seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from medfl.compare.checks import differing_names, require_same
from medfl.compare.labels import labels_with_settings, settings
from medfl.core import InputError, split_commas, tables
from medfl.data.partition.table import shorten
from medfl.evaluation import metrics, t_interval, told_by
from medfl.report import RunFiles
from medfl.report.differences import BETTER, UNCLEAR, between_models, counted, word
from medfl.report.picture import Picture, colours, render, require_png, slant, write_png
from medfl.report.style import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCES = {"local": "Local", "fedavg": "FedAvg"}
"""The methods that a site's gain is measured against, and their titles."""
# inches
_WIDTH = 7.2
_HEIGHT = 4.2


@dataclass(frozen=True)
class Gains:
    """The metric of each site under each method, and its gains.

    Attributes:
        key: the metric.
        sites: names, in the order of the partition.
        train: site -> training items of the first run.
        small: the small sites, if the runs name the large ones.
        values: method -> site -> the metric of the site's judged model, one for each seed.
        gains: method -> reference -> site -> differences from the reference's runs with the same seeds, positive if
            the method is better.
        words: method -> reference -> site -> verdict on the gain: by its interval over the seeds, or for one seed
            over the site's test cases.
        phantom: whether the images are phantoms.
        notes: sentences about runs whose reference has other settings, and the runs' notes on an undefined metric.
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
            columns.append((by_site, ""))
            for reference, differences in self.gains[name].items():
                if differences:
                    heads.append(f"{name} − {REFERENCES[reference]}")
                    columns.append((differences, "+"))

        rows = []
        for site in self.sites:
            mark = " (small)" if site in self.small else ""
            cells = [f"{site}{mark}", str(self.train.get(site, 0))]
            for column, sign in columns:
                cells.append(_cell(column.get(site, []), sign))

            rows.append(cells)

        return tables.markdown_table(heads, rows)

    def summary(self) -> list[str]:
        """Return sentences on how many sites each method improves over each reference, and the notes."""
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


def _cell(values: Sequence[float], sign: str) -> str:
    """Return mean ± sd over the seeds; `sign` is "+" if a positive mean has one."""
    if not values:
        return "–"

    text = f"{statistics.mean(values):{sign}.3f}"
    if len(values) > 1:
        return f"{text} ± {statistics.pstdev(values):.3f}"

    return text


def gains(folders: Sequence[Path]) -> Gains:
    """Compare the sites of several runs.

    The reference of a run is its own Local run (`--with-local`) if it has one, which also counts as a run of Local;
    otherwise the run of Local or FedAvg with the same seed, partition and data; of several the one with equal settings.

    Raises:
        InputError: a folder is not a finished run's, the runs differ in bundle, metric, images or sites, two are the
            same, two could be the reference of a third, or no run has a reference.
    """
    by_path = {}
    for folder in folders:
        by_path[Path(folder).resolve()] = RunFiles(Path(folder))

    # the runs' own Local references follow the runs, and are treated like other runs of Local
    runs = [*by_path.values()]
    count = len(runs)
    local = {}
    for run in by_path.values():
        if (run.path / "local/run.json").is_file():
            local[run.path] = RunFiles(run.path / "local")
            if local[run.path].path.resolve() not in by_path:
                runs.append(local[run.path])

    _check(runs)
    by_label: dict[str, dict[tuple[object, ...], RunFiles]] = {}

    for number, (label, run) in enumerate(zip(labels_with_settings(runs), runs, strict=True)):
        twin = by_label.setdefault(label, {}).setdefault(_pairing(run), run)
        # two runs may have identical Local references, but must not be identical themselves
        if twin is not run and number < count:
            raise InputError(
                f"{twin.path} and {run.path} are both {label} with seed {run.record.get('seed')}",
                "runs differ in method, options, settings, partition, data or seed",
                "leave one of these two runs out",
            )

    rows: list[RunFiles] = []
    for by_pairing in by_label.values():
        rows += by_pairing.values()

    sign = metrics.direction(runs[0].key)
    values: dict[str, dict[str, list[float]]] = {}
    differences: dict[str, dict[str, dict[str, list[float]]]] = {}
    words: dict[str, dict[str, dict[str, str]]] = {}
    notes: dict[str, None] = {}
    undefined = []

    has_reference = False
    for label, by_pairing in by_label.items():
        method = next(iter(by_pairing.values())).method
        values[label] = {}
        differences[label] = {}
        words[label] = {}
        for name in REFERENCES:
            if name != method:
                differences[label][name] = {}
                words[label][name] = {}

        for _, run in sorted(by_pairing.items(), key=lambda entry: str(entry[0])):
            scores = run.site_values(run.judged, run.key)
            undefined.append((f"{label}, seed {run.seed}", run.said))
            for site, value in scores.items():
                values[label].setdefault(site, []).append(value)

            # Local is a reference, and has no gains itself
            if method == "local":
                continue

            for reference, column in differences[label].items():
                base = None
                if reference == "local":
                    base = local.get(run.path)

                base = base or _reference(run, reference, rows)
                if base is None:
                    continue

                has_reference = True
                base_scores = base.site_values(base.judged, base.key)
                for site, score in scores.items():
                    if site not in base_scores:
                        continue

                    # each seed against the same seed, which has the same images and initial weights
                    column.setdefault(site, []).append(sign * (score - base_scores[site]))
                    words[label][reference][site] = _verdict(column[site], run, base, site)

                unlike = ", ".join(_differing(run, base))
                if unlike:
                    pair = f"{label} and the {reference} that it is measured against"
                    notes[f"{pair} differ in {unlike}"] = None

    if not has_reference:
        raise InputError(
            f"{len(runs)} runs, none of which has the data and seed of a run of Local or FedAvg",
            "a gain is measured against one of these",
            "give such a run too, or repeat the runs with --with-local",
        )

    # FedHelp names its large sites; otherwise there are no small ones
    large: set[str] = set()
    for run in runs:
        large.update(split_commas(str(run.options.get("large", ""))))

    large.discard("")
    sites = runs[0].site_names
    small = frozenset(sites) - large if large else frozenset[str]()

    train = {site: runs[0].size(site, "train") for site in sites}
    return Gains(
        runs[0].key,
        sites,
        train,
        small,
        values,
        differences,
        words,
        runs[0].phantom,
        (*notes, *told_by(undefined)),
    )


def _verdict(differences: Sequence[float], run: RunFiles, base: RunFiles, site: str) -> str:
    """Judge a site's gains, one per seed; a single gain, that of `run` over `base`, over the site's test cases."""
    # seeds vary more than resampled test cases, so they decide if there are several
    if len(differences) > 1:
        return word(t_interval(differences), higher_is_better=True)

    difference = between_models(run, base, site)
    if difference is None:
        return UNCLEAR

    return difference.word


def _check(runs: Sequence[RunFiles]) -> None:
    for run in runs:
        if not run.summary:
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
        raise InputError(
            f"runs with {len(names)} different sets of sites",
            "gains compare the same sites",
            "give runs of one partition",
        )


def _differing(run: RunFiles, base: RunFiles) -> list[str]:
    """Return the settings in which two runs differ."""
    return differing_names(settings(run), settings(base))


def _pairing(run: RunFiles) -> tuple[object, ...]:
    """Return seed, partition and data, which must be equal for sites of two runs to be compared."""
    partition = run.record["partition"]
    return (
        run.record.get("seed"),
        partition.get("spec"),
        partition.get("seed"),
        run.record["data"].get("checksum"),
    )


def _reference(run: RunFiles, method: str, rows: Sequence[RunFiles]) -> RunFiles | None:
    """Return the run of `method` that is the reference of another, None if there is none.

    Raises:
        InputError: there are two.
    """
    candidates = []
    with_settings = []
    for row in rows:
        if row.method == method and _pairing(row) == _pairing(run):
            candidates.append(row)
            if not _differing(run, row):
                with_settings.append(row)

    # a reference with other settings is better than none, and is mentioned in a note
    candidates = with_settings or candidates
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
        InputError: as for `gains`, or the file is not a PNG.
    """
    require_png(file, "--gains")
    result = gains(folders)
    return result, write_png(draw(result), file)


def draw(result: Gains) -> Picture:
    """Draw each site's gain under each method: a panel for each reference, small sites on grey."""
    methods_of: dict[str, list[str]] = {}
    for name in result.methods:
        for reference, differences in result.gains[name].items():
            if differences:
                methods_of.setdefault(reference, []).append(name)

    # if the metric is undefined at all sites there is one empty panel
    references = [reference for reference in REFERENCES if reference in methods_of] or ["local"]
    tone = dict(zip(result.methods, colours(len(result.methods)), strict=True))
    title = f"{metrics.title(result.key)}: what each site gains"
    if result.phantom:
        title += ", PHANTOM data"

    def fill(figure: Figure) -> None:
        panels = figure.subplots(len(references), 1, sharex=True, squeeze=False)
        for axes, reference in zip(panels[:, 0], references, strict=True):
            methods = methods_of.get(reference, [])
            step = 0.8 / max(1, len(methods))
            for column, site in enumerate(result.sites):
                if site in result.small:
                    axes.axvspan(column - 0.5, column + 0.5, color="#eef0f3", zorder=0, linewidth=0)
                for turn, name in enumerate(methods):
                    values = result.gains[name][reference].get(site, [])
                    if not values:
                        continue

                    # the bars of a site are side by side, 0.8 wide in total
                    x = column + (turn - (len(methods) - 1) / 2) * step
                    axes.bar(
                        x, statistics.mean(values), width=0.9 * step, color=tone[name], zorder=2
                    )
                    axes.plot([x] * len(values), values, ".", color=INK, markersize=3, zorder=3)

            axes.axhline(0, color=INK, linewidth=0.8)
            axes.set(
                ylabel=f"against {REFERENCES[reference]}", xlim=(-0.5, len(result.sites) - 0.5)
            )
            axes.tick_params(length=0)
            axes.grid(axis="y")
            axes.spines["bottom"].set_visible(False)

        names = [f"{shorten(site, 18)}\n({result.train.get(site, 0)})" for site in result.sites]
        # longer horizontal names would overlap
        slanted = max(map(len, result.sites)) * len(result.sites) > 75
        panels[-1, 0].set_xticks(range(len(names)), names, **(slant(35) if slanted else {}))
        for name in result.methods:
            panels[0, 0].bar(math.nan, math.nan, color=tone[name], label=shorten(name, 34))

        if result.methods:
            figure.legend(loc="outside lower center", ncols=3)

    caption = (
        f"Difference in {metrics.title(result.key).lower()} on each site's own test items; bars are means over "
        "the seeds, points single runs. In brackets: training items."
    )

    if result.small:
        caption += " Small sites on grey."

    size = (_WIDTH, 1.4 + (_HEIGHT - 1.4) * len(references) / 1.4)
    return render("gains", title, caption, size, fill, layout="constrained")
