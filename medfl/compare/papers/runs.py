"""Run a published table's grid, whole or in part, and print its figures beside ours.

A table is a YAML file `papers/<paper>/<table>.yaml` of this package:

    paper, title: where the figures stand
    grids: list of {bundle, presets, partitions, seeds, options, config, requested, methods}
        methods: list of {name: as published, run: "NAME OPTION=VALUE ..."}
        seeds: of all grids that name none, beside `grids`
    unit: 100 if the figures are percentages (default), 1 if they are fractions
    round: of pooled metrics, last (default) or best: the round with the best validation metric
    spread: what the published sd is over, seeds (default) or sites; ours is shown likewise
    published: list of {bundle, partition, num_sites, columns: [metric, ...], rows: {name: [value or [mean, sd], ...]}}
        partition, num_sites: what tells figures of one bundle apart; left out where they hold for all.
            partition: average stands for the mean over all the bundle's grids and partitions
        a row of one column may be the value itself
    notes: remarks for the reader

Metrics, beside `accuracy`, `f1_macro`, ... of one model on the pooled test items (of methods without one model: the
mean over the sites' own models, each on all of them):

    sites, sites_METRIC: mean over the sites of the model that each is judged by; METRIC is else the bundle's key metric
    site:NAME, site_METRIC:NAME: that of one site
    rounds_to_fedavg: rounds until FedAvg's best validation metric
    million_values_down: received by a participant in the last round, encoded bytes / 4
    thousand_values_up: sent by all participants in the last round, encoded bytes / 4

No run here measures any other metric: its figures are published only.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain

import yaml

from medfl.bundle.bundle import Bundle
from medfl.bundle.protocol import resolved
from medfl.compare import papers
from medfl.compare.comparison import Comparison, MeanSd, Row
from medfl.compare.grid import Grid, compare
from medfl.compare.papers import ROOT, check_name
from medfl.compare.search import Entry
from medfl.compare.tables import write_tables
from medfl.core import Config, Document, InputError, Metrics, formatted_table
from medfl.methods import load as load_method, method_class, options_of, values_of
from medfl.report import RunFiles
from medfl.runs.pace import AUTO
from medfl.runtimes import Launch
from medfl.storage import write_atomic

PAPER = "paper"
"""The preset with the settings of a bundle's paper, used for its tables; for a second paper it is paper-NAME."""
_OURS = re.compile(r"\(ours\b|\bours[;)]")  # in the help text of an option that no paper has
_HEADS = ("partition", "method", "metric, %", "ours", "published", "difference")


def run(
    table: PaperTable,
    launch: Launch,
    *,
    bundle: str | None = None,
    methods: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    partitions: Sequence[str] | None = None,
    scale: float = 1.0,
    options: Mapping[str, object],
    config: Mapping[str, object],
    requested: Config,
) -> tuple[list[str], int, Document]:
    """Run the missing runs of a published table, a folder for each grid, and compare.

    Only this bundle, these methods (a method's name covers all its variants, a row's only one), seeds and partitions,
    and this `scale` of the rounds are run; `options` apply to all methods that have them, replace those of the table,
    and are printed.

    Returns:
        lines to print, exit code, document.

    Raises:
        InputError: no run of the table is left, or a run would be refused.
    """
    grids = []
    for number, full in enumerate(table.grids, 1):
        grid = restricted(table, full, methods, partitions)
        if grid.entries and grid.partitions and bundle in (None, grid.bundle):
            grids.append((number, grid))

    if not grids:
        bundles = sorted({grid.bundle for grid in table.grids})
        specs = dict[str, None]()
        for full in table.grids:
            specs |= dict.fromkeys(_spec(full, partition) for partition in full.partitions)

        raise InputError(
            f"--paper {table.key} with bundle {bundle or 'any'} and methods {', '.join(methods) or 'all'}, "
            f"partitions {', '.join(partitions or ()) or 'all'}",
            f"its bundles are {', '.join(bundles)}, its rows {', '.join(dict.fromkeys(table.names.values()))}, its "
            f"partitions {', '.join(specs)}",
            "give --methods and --partition from these lists, and one of the bundles",
        )

    out = launch.folder
    lines = [f"# {table.paper}: {table.title}"]
    collected = []
    document: Document = {"paper": table.key, "folder": str(out), "failed": {}, "rows": []}

    for number, grid in grids:
        grid, rounds = scaled(grid, scale, Bundle(grid.bundle).protocol)
        # the user's options override the paper's, and appear in the heading
        grid_requested = {**grid.requested, **requested}
        presets = presets_of(grid, requested.get("presets", ()))
        if presets:
            grid_requested["presets"] = presets

        grid = replace(
            grid,
            seeds=tuple(seeds) if seeds is not None else grid.seeds,
            options={**grid.options, **options},
            config={**grid.config, **config},
            requested=grid_requested,
        )
        heading = f"{grid.bundle}, {rounds}"
        changes = [*options.items(), *config.items(), *requested.items()]
        if changes:
            heading += f", changed: {', '.join(f'{name}={value}' for name, value in changes)}"

        launch.say(f"{table.key}: {heading}")
        folder = out / grid.bundle
        # several grids of a table may belong to one bundle
        if len(table.grids) > 1:
            folder = out / f"{number}-{grid.bundle}"

        comparison, failed = compare(grid, replace(launch, out=folder))
        document["failed"] |= failed

        if comparison is not None and comparison.phantom:
            # phantom images beside published figures would mislead
            heading = f"PHANTOM images, not the paper's: {heading}"

        lines += ["", f"## {heading}"]
        if comparison is None:
            lines.append("no run finished")
        else:
            write_tables(comparison, folder)
            labels = _labels(grid, comparison)
            collected.append((comparison, labels))
            rows = beside(table, comparison, labels)
            document["rows"] += [dict(zip(_HEADS, row, strict=True)) for row in rows]
            lines += [
                formatted_table(_HEADS, rows, "md"),
                _sizes(comparison),
                f"tables: {folder / 'tables.md'}",
            ]

        lines += [f"FAILED: {title}: {text}" for title, text in failed.items()]

    if collected and (averaged := averages(table, collected)):
        lines += ["", "## Averages over the partitions", formatted_table(_HEADS, averaged, "md")]
        document["rows"] += [dict(zip(_HEADS, row, strict=True)) for row in averaged]

    lines += [
        "",
        "## What is ours and not the paper's",
        *_ours(table, [grid for _, grid in grids]),
        "",
    ]
    lines += dict.fromkeys(comparison.describe() for comparison, _ in collected)
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "published.md", ("\n".join(lines) + "\n").encode())

    return lines, 1 if document["failed"] else 0, document


def presets_of(grid: Grid, more: Sequence[str] = ()) -> list[str]:
    """Return the presets of a grid's runs: `paper` of the bundle unless the grid has one of its own, and `more`."""
    presets = list(dict.fromkeys([*grid.requested.get("presets", ()), *more]))
    has_own = any(name.partition("-")[0] == PAPER for name in presets)
    if has_own or PAPER not in Bundle(grid.bundle).protocol.get("presets", {}):
        return presets

    return [PAPER, *presets]


def _sizes(comparison: Comparison) -> str:
    """Describe how many images runs train on: validation uses part of what a paper counts as training images."""
    counts = comparison.rows[0].first.record["data"]["counts"]
    train, validate, test = (counts[name] for name in ("train", "validate", "test"))
    return (
        f"images: {train:,} to train on, {validate:,} to validate, {test:,} to test; a paper without validation prints "
        f"{train + validate:,} to train on"
    )


def _ours(table: PaperTable, grids: Sequence[Grid]) -> list[str]:
    protocols = {}
    for grid in grids:
        protocol = Bundle(grid.bundle).protocol
        presets = presets_of(grid)
        # a second paper's preset replaces the protocol, whose description then does not apply
        if not any(name.startswith(f"{PAPER}-") for name in presets):
            protocols[f"bundle {grid.bundle}"] = str(protocol.get("protocol", ""))

        for name, values in protocol.get("presets", {}).items():
            if name in presets:
                protocols[f"bundle {grid.bundle}, preset {name}"] = values.get("about", "")

    entries = chain.from_iterable(grid.entries for grid in grids)
    return departures([entry.method for entry in entries], protocols, table.notes)


def departures(
    methods: Iterable[str], protocols: Mapping[str, str], notes: Iterable[str]
) -> list[str]:
    """Return list lines: the notes, descriptions of protocols and presets, and each method's departures."""
    lines = [f"- {note}" for note in notes]
    for source, text in protocols.items():
        if text:
            lines.append(f"- {source}: {text}")

    for name in dict.fromkeys(methods):
        kind = method_class(name)
        document = inspect.getdoc(importlib.import_module(kind.__module__)) or ""
        for paragraph in document.split("\n\n"):
            # methods list their differences from the paper under this word
            _, word, text = paragraph.partition("Departures")
            if word:
                lines.append(f"- {name}: {' '.join((word + text).split())}")

        for option in options_of(kind):
            if _OURS.search(option["help"]):
                lines.append(f"- {name}: {option['name']}={option['default']}: {option['help']}")

    return lines or ["- nothing that is known"]


def published(comparison: Comparison) -> list[str]:
    """Return lines with our runs beside the papers' figures for these methods, partitions and numbers of sites.

    The runs may have other settings than the papers'; `--paper` uses a table's own protocol.
    """
    bundle = comparison.rows[0].first.record["bundle"]
    rows = []
    notes = []
    bundles = set()
    for key in papers.names():
        table = load(key)
        for grid in table.grids:
            bundles.add(grid.bundle)
            if grid.bundle != bundle:
                continue

            # two grids of a table may share a row, e.g. if their seeds differ
            for row in beside(table, comparison, _labels(grid, comparison)):
                if [key, *row] not in rows:
                    rows.append([key, *row])

        if any(row[0] == key for row in rows):
            notes.append(
                f"{key}: {table.paper}, {table.title}; its own protocol: medfl compare {bundle} --paper {key}"
            )

    if not rows:
        return [
            f"no published figures for {bundle} with these methods, partitions and numbers of sites; tables have "
            f"{', '.join(sorted(bundles))}"
        ]

    return [
        formatted_table(("table", *_HEADS), rows, "md"),
        *notes,
        "ours may have other settings than the papers'",
    ]


def restricted(
    table: PaperTable, grid: Grid, methods: Sequence[str], partitions: Sequence[str] | None
) -> Grid:
    """Return a grid restricted to these methods and partitions; without any, all of them.

    A method is given by its name, for all its variants, or by that of the table's row.
    """
    names = {name.lower() for name in methods}
    entries = grid.entries
    specs = grid.partitions
    if names:
        chosen = []
        for entry in grid.entries:
            if entry.method in names or table.names[entry.label].lower() in names:
                chosen.append(entry)

        entries = tuple(chosen)

    if partitions:
        specs = tuple(spec for spec in grid.partitions if _spec(grid, spec) in partitions)

    return replace(grid, entries=entries, partitions=specs)


def _spec(grid: Grid, partition: str | None) -> str:
    """Return the spec of a partition of a grid; None is that of the bundle's protocol with the grid's presets."""
    protocol = resolved(
        grid.bundle, Bundle(grid.bundle).protocol, grid.requested.get("presets", ())
    )
    return partition or str(protocol["partition"])


def _labels(grid: Grid, comparison: Comparison) -> dict[str, str]:
    """Return the label of each of our rows -> the label of its entry in the grid."""
    labels = {}
    for row in comparison.rows:
        run = row.first.record
        for entry in grid.entries:
            if entry.method != run["method"]:
                continue
            # compared after parsing by the method, including defaults
            values = values_of(load_method(entry.method, {**entry.options}))
            if all(run["options"].get(name) == values[name] for name in entry.options):
                labels[row.method] = entry.label
                if entry.options:  # an entry with options fits better than one without
                    break

    return labels


# Published tables as data: the grid of runs that each expands to, and its figures beside ours

AVERAGE = "average"
"""The partition of figures that are means over all partitions."""
COUNTS = frozenset(
    {
        "rounds_to_fedavg",
        "million_values_down",
        "thousand_values_up",
        "seconds_small",
        "seconds_large",
        "eigenvalue_spread",
    }
)
"""Metrics that are not fractions: neither `unit` nor percent applies."""


@dataclass(frozen=True)
class Figure:
    """One published figure: mean and, if given, standard deviation; fractions, except for `COUNTS`."""

    bundle: str
    partition: str | None
    num_sites: int | None
    name: str
    metric: str
    mean: float
    sd: float | None


@dataclass(frozen=True)
class PaperTable:
    """A published table.

    Attributes:
        key: its name here, e.g. fedbm/table3.
        paper, title: its source.
        grids: its runs.
        names: label of a method in a grid -> its name in the table.
        figures: the published ones.
        notes: for the reader.
        round: "last" or "best", whose pooled metrics are compared.
        spread: "seeds" or "sites", over which standard deviations are computed.
    """

    key: str
    paper: str
    title: str
    grids: tuple[Grid, ...]
    names: Mapping[str, str]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = field(default=())
    round: str = "last"
    spread: str = "seeds"

    def published(
        self, bundle: str, partition: str, name: str, num_sites: int | None = None
    ) -> dict[str, Figure]:
        """Return metric -> figure of a method on a partition of a bundle."""
        figures = {}
        for figure in self.figures:
            if (figure.bundle, figure.name) != (bundle, name):
                continue

            # a figure without partition or number of sites applies to all
            if figure.partition in (None, partition) and figure.num_sites in (None, num_sites):
                figures[figure.metric] = figure

        return figures


def load(key: str) -> PaperTable:
    """Return a table by its name.

    Raises:
        InputError: there is no such table.
    """
    check_name(key)
    document = yaml.safe_load((ROOT / f"{key}.yaml").read_text("utf-8"))
    unit = float(document.get("unit", 100))
    names_by_label = {}
    grids = []

    for grid in document["grids"]:
        entries = []
        for method in grid["methods"]:
            entry = Entry.read(method["run"])
            entries.append(entry)
            names_by_label[entry.label] = method["name"]

        requested = dict(grid.get("requested") or {})
        if grid.get("presets"):
            requested["presets"] = list(grid["presets"])

        grids.append(
            Grid(
                grid["bundle"],
                tuple(entries),
                tuple(grid.get("partitions") or (None,)),
                tuple(grid.get("seeds") or document.get("seeds") or (0, 1, 2)),
                grid.get("options") or {},
                grid.get("config") or {},
                requested,
            )
        )

    figures: list[Figure] = []
    for block in document.get("published") or ():
        figures += _figures(block, unit)

    return PaperTable(
        key,
        document["paper"],
        document["title"],
        tuple(grids),
        names_by_label,
        tuple(figures),
        tuple(document.get("notes") or ()),
        document.get("round", "last"),
        document.get("spread", "seeds"),
    )


def _figures(block: Config, unit: float) -> Iterator[Figure]:
    for name, row in block["rows"].items():
        # a single column may be given without the brackets of a list
        values = row if isinstance(row, list) else [row]
        for metric, value in zip(block["columns"], values, strict=True):
            if value is None:
                continue

            scale = 1.0 if metric in COUNTS else unit
            sd = None
            if isinstance(value, list):
                mean = value[0] / scale
                sd = value[1] / scale
            else:
                mean = value / scale

            yield Figure(
                block["bundle"],
                block.get("partition"),
                block.get("num_sites"),
                name,
                metric,
                mean,
                sd,
            )


def scaled(grid: Grid, factor: float, protocol: Config) -> tuple[Grid, str]:
    """Return a grid with `factor` times its rounds, or those of the bundle's protocol, rounded up; and a description.

    Raises:
        InputError: the factor is outside (0, 1].
    """
    if not 0 < factor <= 1:
        raise InputError(
            f"--scale {factor:g}",
            "a factor above 0 and at most 1",
            "give 0.1 for a tenth of the rounds",
        )

    full = grid.requested.get("rounds")
    if full is None:
        full = resolved(grid.bundle, protocol, grid.requested.get("presets", ()))["rounds"]

    if full == AUTO:
        raise InputError(
            f"--scale {factor:g} of rounds that are fitted", "a number of rounds", "add --rounds N"
        )

    # minus rounding error: a tenth of 30 rounds is 3, not 4
    rounds = max(1, math.ceil(factor * int(full) - 1e-9))

    text = f"{rounds} of {full} rounds" if rounds < int(full) else f"all {full} rounds"
    requested = {**grid.requested, "rounds": rounds}
    return replace(grid, requested=requested), text


def beside(table: PaperTable, comparison: Comparison, labels: Mapping[str, str]) -> list[list[str]]:
    """Return rows (partition, method, metric, ours, published, difference) for the published figures, in percent.

    `comparison` has our runs of one bundle; `labels` maps labels of its rows to labels of the grid's entries.
    """
    rows = []
    for row in comparison.rows:
        record = row.first.record
        name = _name(table, labels, row)
        count = len(record["partition"]["sites"])
        for figure in table.published(record["bundle"], row.partition, name, count).values():
            ours = _spread(table, comparison, row, figure.metric)
            rows.append([row.partition, *_cells(figure, ours)])

    return rows


def averages(
    table: PaperTable, comparisons: Sequence[tuple[Comparison, Mapping[str, str]]]
) -> list[list[str]]:
    """Return rows as in `beside` for figures published as the mean over all grids and partitions of a bundle.

    Ours is the mean over the seeds that have all of them. `comparisons` has our runs by grid, labels as in `beside`.
    """
    rows = []
    for figure in table.figures:
        if figure.partition != AVERAGE:
            continue

        expected = 0
        for grid in table.grids:
            names = {table.names[entry.label] for entry in grid.entries}
            if grid.bundle == figure.bundle and figure.name in names:
                expected += len(grid.partitions)

        by_seed = defaultdict(list)
        for comparison, labels in comparisons:
            for row in comparison.rows:
                if _name(table, labels, row) != figure.name:
                    continue

                for seed, run in row.runs.items():
                    value = _our_value(run, figure.metric, table.round)
                    if run.record["bundle"] == figure.bundle and value is not None:
                        by_seed[seed].append(value)

        means = []
        # a seed without one of the partitions would average over easier or harder ones
        for values in by_seed.values():
            if len(values) == expected:
                means.append(statistics.fmean(values))

        rows.append([AVERAGE, *_cells(figure, MeanSd.of(means))])

    return rows


def _name(table: PaperTable, labels: Mapping[str, str], row: Row) -> str:
    return table.names.get(labels.get(row.method, row.method), row.method)


def _cells(figure: Figure, ours: MeanSd | None) -> list[str]:
    """Return method, metric, ours, published and the difference as text."""

    def text(value: float, form: str = "") -> str:
        if figure.metric in COUNTS:
            return f"{value:{form}.5g}"

        return f"{100 * value:{form}.1f}"

    published = text(figure.mean)
    if figure.sd is not None:
        published += f" ± {text(figure.sd)}"

    if ours is None:
        return [figure.name, figure.metric, "–", published, "–"]

    our_text = text(ours.mean)
    if ours.count > 1 or ours.sd:
        our_text += f" ± {text(ours.sd)}"

    return [figure.name, figure.metric, our_text, published, text(ours.mean - figure.mean, "+")]


def _spread(table: PaperTable, comparison: Comparison, row: Row, metric: str) -> MeanSd | None:
    """Return our mean over the seeds; its sd is over the seeds, or the mean of the runs' sds over their sites."""
    if metric == "rounds_to_fedavg":
        with suppress(InputError):  # FedAvg is not among the runs
            return comparison.to_reach(row, comparison.target_value("fedavg", row.partition)).rounds
        return None

    values = []
    sds = []
    for run in row.runs.values():
        value = _our_value(run, metric, table.round)
        if value is not None:
            values.append(value)

        # some papers give the deviation over the sites, a measure of their inequality
        over_sites = MeanSd.of([*_at_sites(run, metric).values()])
        if over_sites is not None:
            sds.append(over_sites.sd)

    over_seeds = MeanSd.of(values)
    if over_seeds is None or table.spread != "sites" or not metric.startswith("sites"):
        return over_seeds

    return replace(over_seeds, sd=statistics.fmean(sds))


def _our_value(run: RunFiles, metric: str, when: str) -> float | None:
    """Return our value of a published metric, None if this run has none."""
    kind, _, site = metric.partition(":")
    if kind.partition("_")[0] in ("site", "sites"):
        values = _at_sites(run, kind)
        if site:
            return values.get(site)
        if values:
            return statistics.fmean(values.values())

        return None

    if metric in ("million_values_down", "thousand_values_up"):
        return _sent(run, metric)

    summary = run.summary
    pooled = (summary.get("global") or {}).get(when)
    # a method without a global model: the mean over the sites' own, each on all items
    if pooled is None:
        pooled = (summary.get("site_models") or {}).get("mean") or {}

    value = pooled.get(metric)
    return None if value is None else float(value)


def _at_sites(run: RunFiles, kind: str) -> Metrics:
    """Return the test metric of `site_METRIC` or `sites_METRIC` of each site's judged model after the last round."""
    return run.site_values(run.judged, kind.partition("_")[2] or run.key)


def _sent(run: RunFiles, metric: str) -> float | None:
    if not run.rounds:
        return None
    # a value is four bytes, a float32
    last = run.rounds[-1]
    if metric == "thousand_values_up":
        return float(last["bytes_up"]) / 4e3
    return float(last["bytes_down"]) / 4e6 / len(last["cohort"])
