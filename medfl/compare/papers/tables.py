"""Published tables as data: the grid of runs that each expands to, and its figures beside ours.

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

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import yaml

from medfl.bundle.protocol import resolved
from medfl.compare.comparison import Comparison, MeanSd, Row
from medfl.compare.grid import Grid
from medfl.compare.papers import ROOT, check_name
from medfl.compare.search import Entry
from medfl.core.documents import Config, Metrics
from medfl.core.errors import InputError
from medfl.report import RunFiles
from medfl.runs.pace import AUTO

AVERAGE = "average"
"""The partition of figures that are means over all partitions."""
COUNTS = frozenset({
    "rounds_to_fedavg", "million_values_down", "thousand_values_up", "seconds_small", "seconds_large",
    "eigenvalue_spread",
})  # fmt: skip
"""Metrics that are no fractions: neither `unit` nor percent apply."""


@dataclass(frozen=True)
class Figure:
    """One published figure: mean and, where it is given, standard deviation; fractions, but for `COUNTS`."""

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
        key: its name here, as fedbm/table3.
        paper, title: where it stands.
        grids: its runs.
        names: label of a method in a grid -> its name in the table.
        figures: the published ones.
        notes: remarks for the reader.
        round: "last" or "best", whose pooled metrics are compared.
        spread: "seeds" or "sites", over which standard deviations are taken.
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

            # a figure that names no partition or number of sites holds for all
            if figure.partition in (None, partition) and figure.num_sites in (None, num_sites):
                figures[figure.metric] = figure

        return figures


def load(key: str) -> PaperTable:
    """Return a table by its name.

    Raises:
        InputError: there is no such table.
    """
    check_name(key)
    document = yaml.safe_load((ROOT / f"{key}.yaml").read_text())
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
        # one column may stand without the brackets of a list
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
    """Return a grid with `factor` times its rounds, or those of the bundle's protocol, rounded up; and a text on it.

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

    # less what floating point adds: a tenth of 30 rounds is 3, not 4
    rounds = max(1, math.ceil(factor * int(full) - 1e-9))

    if rounds < int(full):
        text = f"{rounds} of {full} rounds"
    else:
        text = f"all {full} rounds"

    requested = {**grid.requested, "rounds": rounds}
    return replace(grid, requested=requested), text


def beside(table: PaperTable, comparison: Comparison, labels: Mapping[str, str]) -> list[list[str]]:
    """Return rows (partition, method, metric, ours, published, difference) for the published figures, in percent.

    `comparison` has our runs of one bundle; `labels` leads from the label of a row of it to that of the grid's entry.
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
    """Return rows as `beside` for figures published as the mean over all grids and partitions of a bundle.

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
                    value = _ours(run, figure.metric, table.round)
                    if run.record["bundle"] == figure.bundle and value is not None:
                        by_seed[seed].append(value)

        means = [statistics.fmean(values) for values in by_seed.values() if len(values) == expected]
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
        value = _ours(run, metric, table.round)
        if value is not None:
            values.append(value)

        over_sites = MeanSd.of([*_at_sites(run, metric).values()])
        if over_sites is not None:
            sds.append(over_sites.sd)

    over_seeds = MeanSd.of(values)
    if over_seeds is None or table.spread != "sites" or not metric.startswith("sites"):
        return over_seeds

    return replace(over_seeds, sd=statistics.fmean(sds))


def _ours(run: RunFiles, metric: str, when: str) -> float | None:
    """Return our value of a published metric, None where this run has none."""
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

    summary = run.summary or {}
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
