"""Runs beside each other: means over seeds, paired tests, ranks, and what it takes to reach a target.

A row is a method (with the options that set it apart) on a partition; its runs differ in their seed only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from scipy import stats

from medfl.compare.checks import differences
from medfl.compare.curves import labels, progress
from medfl.core.errors import InputError
from medfl.evaluation import metrics
from medfl.report import RunFolder

_ROUNDING = 1e-9  # of the largest value: differences of float64 metrics that are closer are equal

Values = Mapping[int, float]
"""Seed -> value."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (ddof 0) of so many values."""

    mean: float
    sd: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the spread of values, None of none."""
        known = [value for value in values if math.isfinite(value)]
        return cls(statistics.fmean(known), statistics.pstdev(known), len(known)) if known else None


@dataclass(frozen=True)
class Row:
    """One method on one partition.

    Attributes:
        method: its label.
        partition: the partition's spec.
        runs: seed -> run.
    """

    method: str
    partition: str
    runs: Mapping[int, RunFolder]

    def values(self, column: Column) -> dict[int, float]:
        """Return a column's value for each seed that has one."""
        found = {seed: column.read(run) for seed, run in sorted(self.runs.items())}
        return {seed: value for seed, value in found.items() if value is not None}


@dataclass(frozen=True)
class Column:
    """What a table shows of each row.

    Attributes:
        name: of the column in CSV and JSON.
        title: for readers.
        read: run -> value, None where it has none.
        higher: more is better; None where neither is.
        scale: "metric", "bytes", "seconds" or "count".
    """

    name: str
    title: str
    read: Callable[[RunFolder], float | None]
    higher: bool | None
    scale: str = "metric"


@dataclass(frozen=True)
class Test:
    """A paired comparison of two rows over the seeds that both have.

    Attributes:
        row, against: the two.
        count: seeds.
        difference: mean of (row - against).
        low, high: its 95 % confidence interval by Student's t.
        p: of the two-sided paired t-test.
        effect: Cohen's d_z, the mean difference over its standard deviation (ddof 1).

    Where all differences are equal, up to rounding, there is no t: these four are NaN, but p is 1 and the effect 0
    where the rows are equal.
    """

    row: Row
    against: Row
    count: int
    difference: float
    low: float
    high: float
    p: float
    effect: float


@dataclass(frozen=True)
class Target:
    """What a row took until its validation metric reached a value: rounds, bytes, seconds; None where it never did."""

    rounds: Spread | None
    bytes: Spread | None
    seconds: Spread | None
    reached: int
    count: int


class Comparison:
    """Rows of runs with one key metric."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        """Group runs by partition and method.

        Raises:
            InputError: there are none, they are of different bundles, tasks or key metrics, or two runs are the same
                but for their folder.
        """
        if not runs:
            raise InputError("no runs", "a comparison needs finished run folders", "give at least one of these")
        for what, values in (
            ("bundles", {run.run["bundle"] for run in runs}),
            ("key metrics", {run.key for run in runs}),
            ("kinds of images", {str(run.run["data"]["source"]) for run in runs}),
            ("data", _checksums(runs)),
        ):
            if len(values) > 1:
                told = ", ".join(sorted(values))
                raise InputError(f"runs with different {what}: {told}", "a comparison has one", "drop the others")
        rows: dict[tuple[str, str], dict[int, RunFolder]] = {}
        for label, run in zip(labels(runs), runs, strict=True):
            seeds = rows.setdefault((str((run.run.get("partition") or {}).get("spec")), label), {})
            seed = int(run.run["seed"])
            if seed in seeds:
                others = ", ".join(differences(seeds[seed].run, run.run))
                raise InputError(
                    f"{seeds[seed].path} and {run.path} are both {label} with seed {seed}"
                    + (f", but differ in {others}" if others else ""),
                    "rows are told apart by method, options and partition, runs in a row by their seed",
                    "leave one of these two runs out",
                )
            seeds[seed] = run
        self.rows = [Row(method, partition, found) for (partition, method), found in rows.items()]
        self.key = runs[0].key
        self.higher = metrics.higher_is_better(self.key)

    @property
    def partitions(self) -> list[str]:
        """The partitions, in the order of the runs."""
        return list(dict.fromkeys(row.partition for row in self.rows))

    @property
    def phantom(self) -> bool:
        """Whether the images were drawn by a program."""
        return next(iter(self.rows[0].runs.values())).phantom

    def describe(self) -> str:
        """Say on which data the runs were made."""
        run = next(iter(self.rows[0].runs.values()))
        source = "PHANTOM data, drawn by a program" if self.phantom else "real data"
        return f"{source}: {run.run['bundle']}"

    def on(self, partition: str) -> list[Row]:
        """Return the rows on a partition."""
        return [row for row in self.rows if row.partition == partition]

    @cached_property
    def columns(self) -> list[Column]:
        """What the tables show, without columns that no run has."""
        names = [self.key, *(n for n in ("accuracy", "auroc") if n != self.key)]
        found = [
            Column(f"global_{when}_{name}", f"{metrics.title(name)}, one model, {said}", _pooled("global", when, name),
                   metrics.higher_is_better(name))
            for name in names for when, said in (("last", "last round"), ("best", "best round"))
        ]  # fmt: skip
        title = metrics.title(self.key)
        found += [
            Column("site_models", f"{title}, each site's model on all", _site_models(self.key), self.higher),
            Column("personal_last", f"{title}, personal, own", _pooled("personal", "last", self.key), self.higher),
            Column("sites_mean", "mean of the sites", _of_sites("mean"), self.higher),
            Column("sites_worst", "worst site", _of_sites("worst"), self.higher),
            Column("bytes", "sent", _total("bytes_up", "bytes_down"), False, "bytes"),
            Column("seconds", "time", _total("seconds"), False, "seconds"),
        ]  # fmt: skip
        return [column for column in found if any(row.values(column) for row in self.rows)]

    @property
    def judged_by(self) -> Column:
        """The column by which methods are compared: the site mean where any method is personal, else the one model."""
        personal = any(run.judged == "personal" for row in self.rows for run in row.runs.values())
        name = "sites_mean" if personal else f"global_last_{self.key}"
        return next(column for column in self.columns if column.name == name)

    def tests(self, against: str, column: Column | None = None) -> list[Test]:
        """Compare each row with the row of a method on the same partition, over common seeds; from two seeds on.

        Raises:
            InputError: no such method.
        """
        known = {row.method for row in self.rows}
        if against not in known:
            raise InputError(f"against {against}", f"methods are {', '.join(sorted(known))}", "choose one of them")
        column, made = column or self.judged_by, []
        for partition in self.partitions:
            rows = self.on(partition)
            base = next((row for row in rows if row.method == against), None)
            for row in rows:
                if base is not None and row is not base and (test := paired(row, base, column)) is not None:
                    made.append(test)
        return made

    def ranks(self, column: Column | None = None) -> dict[str, float]:
        """Return each method's mean rank (1 is best, ties share) over partitions and seeds that all methods have."""
        column = column or self.judged_by
        methods = list(dict.fromkeys(row.method for row in self.rows))
        places: dict[str, list[float]] = {method: [] for method in methods}
        for partition in self.partitions:
            rows = {row.method: row.values(column) for row in self.on(partition)}
            if len(rows) < len(methods):
                continue
            for seed in sorted(set.intersection(*(set(values) for values in rows.values()))):
                sign = -1 if column.higher else 1
                found = stats.rankdata([sign * rows[method][seed] for method in methods])
                for method, rank in zip(methods, found, strict=True):
                    places[method].append(float(rank))
        return {method: statistics.fmean(values) for method, values in places.items() if values}

    def target_value(self, target: str, partition: str) -> float:
        """Return a target's value on a partition: a number, or the mean best validation metric of a method.

        Raises:
            InputError: neither a number nor a method with scored rounds.
        """
        try:
            return float(target)
        except ValueError:
            pass
        row = next((row for row in self.on(partition) if row.method == target), None)
        scored = [[value for *_, value in progress(run)] for run in row.runs.values()] if row else []
        values = [(max if self.higher else min)(points) for points in scored if points]
        if not values:
            raise InputError(
                f"target {target}",
                f"a number, or one of {', '.join(row.method for row in self.on(partition))} with scored rounds",
                "give a number such as 0.8, or one of these methods",
            )
        return statistics.fmean(values)

    def to_reach(self, row: Row, value: float) -> Target:
        """Return what a row's runs took until their validation metric reached a value."""
        found = []
        for run in row.runs.values():
            sign = 1 if self.higher else -1
            first = next((point for point in progress(run) if sign * point[3] >= sign * value), None)
            if first is not None:
                found.append(first)
        spreads = [Spread.of([point[i] for point in found]) for i in range(3)]
        return Target(spreads[0], spreads[1], spreads[2], len(found), len(row.runs))


def paired(row: Row, against: Row, column: Column) -> Test | None:
    """Compare two rows over their common seeds; None with fewer than two."""
    ours, theirs = row.values(column), against.values(column)
    seeds = sorted(ours.keys() & theirs.keys())
    if len(seeds) < 2:
        return None
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    mean, sd = statistics.fmean(differences), statistics.stdev(differences)
    half = float(stats.t.ppf(0.975, len(seeds) - 1)) * sd / math.sqrt(len(seeds))
    rounding = _ROUNDING * max(abs(values[seed]) for values in (ours, theirs) for seed in seeds)
    if sd <= rounding:
        p, effect = (1.0, 0.0) if abs(mean) <= rounding else (math.nan, math.nan)
        return Test(row, against, len(seeds), mean, math.nan, math.nan, p, effect)
    p = float(stats.ttest_rel([ours[s] for s in seeds], [theirs[s] for s in seeds]).pvalue)
    return Test(row, against, len(seeds), mean, mean - half, mean + half, p, mean / sd)


def read(folders: Sequence[Path]) -> Comparison:
    """Read finished runs; those that are not finished are left out.

    Raises:
        InputError: as `Comparison`, or a folder is not a run's.
    """
    runs = [RunFolder.read(folder) for folder in folders]
    return Comparison([run for run in runs if run.summary is not None])


def _pooled(kind: str, when: str, name: str) -> Callable[[RunFolder], float | None]:
    return lambda run: _number((((run.summary or {}).get(kind) or {}).get(when) or {}).get(name))


def _site_models(name: str) -> Callable[[RunFolder], float | None]:
    return lambda run: _number((((run.summary or {}).get("site_models") or {}).get("mean") or {}).get(name))


def _of_sites(which: str) -> Callable[[RunFolder], float | None]:
    return lambda run: _number(((run.summary or {}).get("sites") or {}).get(which))


def _total(*names: str) -> Callable[[RunFolder], float | None]:
    def read_total(run: RunFolder) -> float | None:
        values = [(run.summary or {}).get(name) for name in names]
        return None if None in values else float(sum(values))  # type: ignore[arg-type]

    return read_total


def _number(value: Any) -> float | None:
    return None if value is None or not math.isfinite(float(value)) else float(value)


def _checksums(runs: Sequence[RunFolder]) -> set[str]:
    """Return the checksums of the data of runs with one seed: a split may draw its writers by the seed."""
    first = runs[0].run.get("seed")
    return {str(run.run["data"].get("checksum")) for run in runs if run.run.get("seed") == first}
