"""Runs beside each other: means over seeds, paired tests, ranks, and the cost to reach a target.

A row is a method (with the options that distinguish it) on a partition; its runs differ only in their seed.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from scipy import stats

from medfl.compare.checks import differing_settings, require_same
from medfl.compare.labels import labels
from medfl.core import InputError, either
from medfl.evaluation import metrics, t_interval, told_by
from medfl.report import RunFiles
from medfl.report.differences import BETTER, UNCLEAR, Difference, between_models, word

_ROUNDING = 1e-9  # share of the largest value below which differences count as equal


@dataclass(frozen=True)
class MeanSd:
    """Mean and standard deviation (ddof 0) of `count` values."""

    mean: float
    sd: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanSd | None:
        """Return mean and sd of the finite values, None where there are none."""
        finite = list(filter(math.isfinite, values))
        if finite:
            # ddof 0, as papers print it: with three seeds the other one is a fifth larger
            return cls(statistics.fmean(finite), statistics.pstdev(finite), len(finite))

        return None


@dataclass(frozen=True)
class Row:
    """One method on one partition: its label, the partition's spec, and seed -> run."""

    method: str
    partition: str
    runs: Mapping[int, RunFiles]

    @property
    def first(self) -> RunFiles:
        """One of the runs, for their common properties."""
        return next(iter(self.runs.values()))

    def values(self, column: Column) -> dict[int, float]:
        """Return a column's value for each seed that has one."""
        values = {}
        for seed, run in sorted(self.runs.items()):
            value = column.read(run)
            if value is not None:
                values[seed] = value

        return values


RunValue = Callable[[RunFiles], float | None]
"""Run -> value, None if it has none."""


@dataclass(frozen=True)
class Column:
    """A column of the tables.

    Attributes:
        name: of the column in CSV and JSON.
        title: heading.
        read: run -> value, None if it has none.
        higher: whether higher is better; None if neither is.
        scale: "share" (0 to 1), "number" (of a metric with its own unit), "bytes" or "seconds".
    """

    name: str
    title: str
    read: RunValue
    higher: bool | None
    scale: str = "share"


@dataclass(frozen=True)
class PairedTest:
    """A paired comparison of two rows over the seeds that both have.

    Attributes:
        row, against: the two.
        count: number of seeds.
        difference: mean of (row - against).
        low, high: its 95 % confidence interval by Student's t.
        p: of the two-sided paired t-test.
        effect: Cohen's d_z, the mean difference over its standard deviation (ddof 1).
        word: better or worse if the interval excludes zero, else that there is no clear difference.

    """

    row: Row
    against: Row
    count: int
    difference: float
    low: float
    high: float
    p: float
    effect: float
    word: str


@dataclass(frozen=True)
class CostToTarget:
    """Rounds, bytes and seconds until the validation metric of a row's runs, `reached` of them, reached a value."""

    rounds: MeanSd | None
    bytes: MeanSd | None
    seconds: MeanSd | None
    reached: int
    count: int


class Comparison:
    """Rows of runs with one key metric."""

    def __init__(self, runs: Sequence[RunFiles]) -> None:
        """Group runs by partition and method.

        Raises:
            InputError: there are none, they have different bundles, tasks, key metrics or images, or two runs of a
                row have the same seed.
        """
        if not runs:
            raise InputError(
                "no runs",
                "a comparison needs finished run folders",
                "start them with medfl compare or medfl run",
            )

        one_data = "a comparison has one bundle, one key metric and the same images"
        require_same(runs, one_data, "compare the runs of each kind apart")
        # a bundle's split may use the seed, so images are compared only between runs with equal seeds
        seed_of_first = runs[0].record.get("seed")
        same_seed = [run for run in runs if run.record.get("seed") == seed_of_first]
        data = {"data": lambda run: str(run.record["data"].get("checksum"))}
        require_same(same_seed, one_data, "compare the runs of each data set apart", data)
        rows: dict[tuple[str, str], dict[int, RunFiles]] = {}

        for label, run in zip(labels(runs), runs, strict=True):
            by_seed = rows.setdefault((run.partition, label), {})
            seed = int(run.record["seed"])
            if seed in by_seed:
                twins = f"{by_seed[seed].path} and {run.path} are both {label} with seed {seed}"
                differences = differing_settings(by_seed[seed].record, run.record)
                if differences:
                    twins += f", but differ in {', '.join(differences)}"

                raise InputError(
                    twins,
                    "rows are told apart by method, options and partition, runs in a row by their seed",
                    "leave one of these two runs out",
                )

            by_seed[seed] = run

        self.rows = [
            Row(method, partition, by_seed) for (partition, method), by_seed in rows.items()
        ]

        self.key = runs[0].key
        self.higher = metrics.higher_is_better(self.key)

    @property
    def partitions(self) -> list[str]:
        """The partitions, in the order of the runs."""
        return list(dict.fromkeys(row.partition for row in self.rows))

    @property
    def methods(self) -> list[str]:
        """The methods, in the order of the runs."""
        return list(dict.fromkeys(row.method for row in self.rows))

    @property
    def phantom(self) -> bool:
        """Whether the images are phantoms."""
        return self.rows[0].first.phantom

    def describe(self) -> str:
        """Return the kind of data and the bundle of the runs."""
        bundle = self.rows[0].first.record["bundle"]
        if self.phantom:
            return f"PHANTOM data, drawn by a program: {bundle}"

        return f"real data: {bundle}"

    def on(self, partition: str) -> list[Row]:
        """Return the rows on a partition."""
        return [row for row in self.rows if row.partition == partition]

    def runs(self, partition: str | None = None) -> list[RunFiles]:
        """Return all runs, or those on a partition."""
        runs: list[RunFiles] = []
        for row in self.rows:
            if partition in (None, row.partition):
                runs += row.runs.values()

        return runs

    @cached_property
    def columns(self) -> list[Column]:
        """The columns of the tables: everything that any run has, and the one that decides."""
        columns = []
        for name in dict.fromkeys([self.key, "accuracy", "auroc"]):
            higher = metrics.higher_is_better(name)
            for when in ("last", "best"):
                heading = f"{metrics.title(name)}, one model, {when} round"
                column = Column(
                    f"global_{when}_{name}",
                    heading,
                    _entry("global", when, name),
                    higher,
                    scale_of(name),
                )
                columns.append(column)

        title = metrics.title(self.key)
        site_models = _entry("site_models", "mean", self.key)
        personal = _entry("personal", "last", self.key)
        scale = scale_of(self.key)
        columns += [
            Column(
                "site_models", f"{title}, each site's model on all", site_models, self.higher, scale
            ),
            Column("personal_last", f"{title}, personal, own", personal, self.higher, scale),
            Column("sites_mean", "mean of the sites", self._over_sites("mean"), self.higher, scale),
            Column("sites_worst", "worst site", self._over_sites("worst"), self.higher, scale),
            Column("bytes", "sent", _total("bytes_up", "bytes_down"), False, "bytes"),
            Column("seconds", "time", _total("seconds"), False, "seconds"),
        ]

        filled = []
        for column in columns:
            # the deciding column stays even if undefined in every run, so that a reader sees it
            if column.name == self._judged_name or any(row.values(column) for row in self.rows):
                filled.append(column)

        return filled

    @cached_property
    def _fewer_sites(self) -> dict[Path, str]:
        """Folder -> how many sites have the metric, of the runs with fewer than others of their partition and seed."""
        count_of = _entry("sites", "count")
        most = defaultdict[tuple[str, int], float](float)
        for run in self.runs():
            group = run.partition, run.seed
            most[group] = max(most[group], count_of(run) or 0)

        fewer = {}
        for run in self.runs():
            count = count_of(run)
            largest = most[run.partition, run.seed]

            if count and count < largest:
                fewer[run.path] = f"{count:.0f} of {largest:.0f}"

        return fewer

    def _over_sites(self, entry: str) -> RunValue:
        """Return what reads a figure over the sites, None of fewer sites than other runs of the partition have."""
        read = _entry("sites", entry)
        return lambda run: None if run.path in self._fewer_sites else read(run)

    @property
    def judged_by(self) -> Column:
        """The column that decides: the mean over sites if any method is personal, else the global model's."""
        return next(column for column in self.columns if column.name == self._judged_name)

    @property
    def _judged_name(self) -> str:
        # a personal model has no score on all test images comparable to a global one's
        if any(run.judged == "personal" for run in self.runs()):
            return "sites_mean"

        return f"global_last_{self.key}"

    @property
    def undefined(self) -> list[str]:
        """The runs' notes on a metric that is undefined or not a mean over all classes, each with its runs."""
        undefined = []
        for row in self.rows:
            on = f" on {row.partition}" if len(self.partitions) > 1 else ""
            for seed, run in sorted(row.runs.items()):
                remarks = list(run.said)
                if sites := self._fewer_sites.get(run.path):
                    remarks.append(f"a mean of {sites} sites is not compared")

                undefined.append((f"{row.method}{on}, seed {seed}", remarks))

        return told_by(undefined)

    def tests(self, against: str) -> list[PairedTest]:
        """Compare each row with that of the method `against` on the same partition, over at least two common seeds.

        Raises:
            InputError: no such method.
        """
        if against not in self.methods:
            raise InputError(
                f"against {against}",
                f"methods are {', '.join(sorted(self.methods))}",
                "choose one of them",
            )

        tests = []
        for row, base in self._pairs(against):
            test = paired_test(row, base, self.judged_by)
            if test is not None:
                tests.append(test)

        return tests

    def case_tests(self, against: str) -> list[tuple[Row, Row, Difference]]:
        """Compare rows with exactly one seed in common with the method `against`: over its test cases."""
        tests = []
        for row, base in self._pairs(against):
            seeds = sorted(row.runs.keys() & base.runs.keys())
            if len(seeds) != 1:
                continue

            difference = between_models(row.runs[seeds[0]], base.runs[seeds[0]])
            if difference is not None:
                tests.append((row, base, difference))

        return tests

    def _pairs(self, against: str) -> Iterator[tuple[Row, Row]]:
        """Yield each row with that of the method `against` on the same partition."""
        for row in self.rows:
            for base in self.on(row.partition):
                if base.method == against and base is not row:
                    yield row, base

    def clearly_best(self, partition: str, column: Column) -> Row | None:
        """Return the row that is better than every other on a partition by its paired interval, None without one."""
        rows = self.on(partition)
        for row in rows:
            words = set()
            for rival in rows:
                if rival is not row:
                    test = paired_test(row, rival, column)
                    words.add(test and test.word)

            # a row without competitors is not better than any
            if words == {BETTER}:
                return row

        return None

    def ranks(self) -> dict[str, float]:
        """Return each method's mean rank (1 is best, ties share) over partitions and seeds that all methods have."""
        column = self.judged_by
        # rank 1 is the smallest value
        sign = -1 if column.higher else 1
        places = defaultdict(list)
        for partition in self.partitions:
            rows = self.on(partition)
            # mean ranks are comparable only over partitions on which every method was run
            if len(rows) < len(self.methods):
                continue

            values = [row.values(column) for row in rows]
            for seed in sorted(set(values[0]).intersection(*values)):
                ranks = stats.rankdata([sign * by_seed[seed] for by_seed in values])
                for row, rank in zip(rows, ranks, strict=True):
                    places[row.method].append(float(rank))

        # in the order of the methods, which breaks ties when ranks are sorted
        methods = [method for method in self.methods if method in places]
        return {method: statistics.fmean(places[method]) for method in methods}

    def target_value(self, target: str, partition: str) -> float | None:
        """Return a target's value on a partition: a number, or the mean best validation metric of a method.

        It is None if that metric is undefined in all rounds.

        Raises:
            InputError: it is neither a number nor a method.
        """
        with suppress(ValueError):
            return float(target)

        best_of = max if self.higher else min
        values = []
        methods = []
        for row in self.on(partition):
            methods.append(row.method)
            for run in row.runs.values():
                points = run.progress()
                if row.method == target and points:
                    values.append(best_of(value for *_, value in points))

        if target not in methods:
            raise InputError(
                f"target {target}",
                f"a number, or one of {either(methods)}",
                "give --target one of these",
            )

        return statistics.fmean(values) if values else None

    def to_reach(self, row: Row, value: float | None) -> CostToTarget:
        """Return the cost until a row's runs reached a value of their validation metric; None: an undefined value."""
        sign = metrics.direction(self.key)
        rounds = []
        sent = []
        seconds = []
        for run in row.runs.values():
            # the first time it is reached, even if it is lost again later
            for number, bytes_so_far, seconds_so_far, score in run.progress():
                if value is not None and sign * score >= sign * value:
                    rounds.append(number)
                    sent.append(bytes_so_far)
                    seconds.append(seconds_so_far)
                    break

        # means over the runs that reached the value; the others have no cost
        costs = (MeanSd.of(rounds), MeanSd.of(sent), MeanSd.of(seconds))
        return CostToTarget(*costs, len(rounds), len(row.runs))


def paired_test(row: Row, against: Row, column: Column) -> PairedTest | None:
    """Compare two rows over their common seeds; None with fewer than two."""
    ours = row.values(column)
    theirs = against.values(column)
    seeds = sorted(ours.keys() & theirs.keys())
    if len(seeds) < 2:
        return None

    first = [ours[seed] for seed in seeds]
    second = [theirs[seed] for seed in seeds]
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    sd = statistics.stdev(differences)
    # relative to the values, not the differences: identical runs differ only by rounding
    rounding = _ROUNDING * max(map(abs, first + second))
    ends = t_interval(differences, rounding)

    # equal differences: t would divide by zero
    if ends is None:
        p = effect = math.nan
        if abs(mean) <= rounding:
            p = 1.0
            effect = 0.0

        return PairedTest(row, against, len(seeds), mean, math.nan, math.nan, p, effect, UNCLEAR)

    # paired: seeds share partition and initial weights, so their noise cancels in the difference
    p = float(stats.ttest_rel(first, second).pvalue)
    verdict = UNCLEAR
    if column.higher is not None:
        verdict = word(ends, column.higher)

    # the effect is Cohen's d of paired differences: mean over their standard deviation
    return PairedTest(row, against, len(seeds), mean, *ends, p, mean / sd, verdict)


def scale_of(metric: str) -> str:
    """Return the scale of a metric's column."""
    return "share" if metrics.is_share(metric) else "number"


def read(folders: Sequence[Path]) -> Comparison:
    """Return the comparison of the finished runs among these folders.

    Raises:
        InputError: as `Comparison`, or a folder is not a run's.
    """
    runs = list(map(RunFiles, folders))
    return Comparison([run for run in runs if run.summary])


def _entry(*keys: str) -> RunValue:
    """Return a reader of a summary's entry by its keys, None if a run has none."""

    def read_entry(run: RunFiles) -> float | None:
        """Return the entry as a finite number."""
        value: Any = run.summary
        for key in keys:
            value = (value or {}).get(key)

        if value is None or not math.isfinite(float(value)):
            return None

        return float(value)

    return read_entry


def _total(*names: str) -> RunValue:
    def read_total(run: RunFiles) -> float | None:
        total = 0.0
        for name in names:
            value = run.summary.get(name)
            if value is None:
                return None

            total += value

        return total

    return read_total
