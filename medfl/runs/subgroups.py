"""Metrics by subgroup: by centre, site, sex, age or localisation, with intervals, suppressed for small groups.

A group of fewer than `min_count` cases is suppressed, and others with it, so that its size and metrics cannot be
computed from those of all cases (`policy.suppression`). The area of a class is reported only if it has at least this
many cases in the group, and so do all others together; balanced accuracy and AUROC only if this holds for every class
in the group: a number based on three patients says little, and may identify them.

Balanced accuracy is the mean recall and AUROC the mean one-versus-rest area over the classes in the group; with two
classes the second's area. Intervals are 95 %: Wilson's for accuracy, DeLong's for the area of a single class
(`medfl.evaluation.delong`), otherwise by the bootstrap, stratified by class (`medfl.evaluation.bootstrap`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from scipy.stats import binomtest

from medfl.bundle import case_metadata
from medfl.core import Array, Config, Flags, InputError, Integers, map_values, pick, without
from medfl.evaluation import Area, Cases, bootstrap, delong, findings, summarise
from medfl.policy.suppression import suppress_counts
from medfl.problem.tasks import KINDS
from medfl.problem.tasks.kind import Kind, column_names
from medfl.storage import Table

MIN_COUNT = 10  # cases: a number based on fewer may identify them
_NO_GROUPS = ("id", "label", "predicted", "group")
_NO_METRICS = (*_NO_GROUPS, "loss", "age")
_OF_VECTORS = ("label_", "predicted_", "p_", "target_")


@dataclass(frozen=True)
class Estimate:
    """A metric and its 95 % interval, None with few cases; `cases` are those that have it, 0 if all do."""

    value: float
    low: float | None
    high: float | None
    cases: int = 0


@dataclass(frozen=True)
class Subgroup:
    """The cases with one value.

    Attributes:
        name: the value.
        count: number of cases; None if suppressed, for being small or revealing another.
        metrics: name -> estimate; those based on too few cases are omitted.
        areas: class -> its area against the others, for reported classes.
        small_classes: classes with a case here but too few to be reported; metrics of a segmentation likewise.
    """

    name: str
    count: int | None
    metrics: dict[str, Estimate]
    areas: Mapping[str, Area]
    small_classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subgroups:
    """The groups of one column.

    Attributes:
        by: the column.
        groups: in order; ages from young to old, cases without a value last.
        total: all cases of the reported groups together.
        min_count: minimum number of cases to be reported.
        unread: a line on invalid ages, of cases counted as having none.
        findings: whether a case may have several of the classes.
    """

    by: str
    groups: tuple[Subgroup, ...]
    total: Subgroup
    min_count: int
    unread: tuple[str, ...] = ()
    findings: bool = False

    @property
    def metrics(self) -> list[str]:
        """The metrics reported for any group."""
        return [*dict.fromkeys(chain.from_iterable(group.metrics for group in self.rows))]

    @property
    def rows(self) -> tuple[Subgroup, ...]:
        """The groups, and all cases at last."""
        return *self.groups, self.total

    def records(self) -> list[dict[str, object]]:
        """Return one record per group: its name, cases, and value and bounds of each metric; None: suppressed."""
        rows = []
        for group in self.rows:
            row: dict[str, object] = {self.by: group.name, "cases": group.count}
            for name in self.metrics:
                estimate = group.metrics.get(name)
                value, low, high, cases = astuple(estimate) if estimate else (None, None, None, 0)
                row |= {name: value, f"{name}_low": low, f"{name}_high": high}
                if cases:
                    row[f"{name}_cases"] = cases

            rows.append({**row, "silent": ", ".join(group.small_classes)})

        return rows

    def notes(self) -> list[str]:
        """Return notes for a reader of the records."""
        hidden = []
        thin = []
        for group in self.groups:
            if group.count is None:
                hidden.append(group.name)

            if group.small_classes:
                thin.append(f"{group.name}: {', '.join(group.small_classes)}")

        notes = []
        if hidden:
            notes.append(
                f"not told, fewer than {self.min_count} cases, or its count would reveal such a group: "
                f"{', '.join(hidden)}"
            )

        if thin:
            reason = "no balanced accuracy and AUROC where a class, or all others, have fewer than"
            if self.findings:
                reason = "means are over findings that in every group enough cases have and lack; not told, fewer than"
            elif "accuracy" not in self.metrics:
                reason = "no means, nor that of all, where those with a structure have fewer than"

            notes.append(f"{reason} {self.min_count} cases: {'; '.join(thin)}")

        notes += self.unread
        if any(estimate.cases for estimate in self.total.metrics.values()):
            notes.append(
                "a structure's metrics are means over the cases whose reference has it, as many as stand beside them"
            )

        notes.append(
            "intervals of 95 %; images of one patient count as independent, so the true ones are wider"
        )
        return notes


def of(
    rows: Sequence[Config],
    by: str,
    classes: Sequence[str] = (),
    *,
    task: str = "",
    min_count: int = MIN_COUNT,
    seed: int = 0,
) -> Subgroups:
    """Return the metrics of cases by the values of a column.

    Args:
        rows: one record per case, with the columns of predictions.csv.
        by: name of the column; ages are put into bands of 20 years.
        classes: class names in label order, names of findings or numbers, () if there are none.
        task: its kind; default: classification if there are classes.
        min_count: minimum number of cases to be reported.
        seed: of the bootstrap.

    Raises:
        InputError: no such column, no cases, or a count below 1.
    """
    if min_count < 1:
        raise InputError(
            f"min_count {min_count}", "a whole number of at least 1", "give for example 10"
        )

    values = group_values(rows, by)
    members = {}
    for name in sorted(set(values.tolist()), key=group_order):
        members[name] = np.flatnonzero(values == name)

    # a second group is hidden where the first would follow from the total
    counts, _ = suppress_counts(map_values(len, members), min_count)

    kind = KINDS[task or ("classification" if classes else "other")]
    shown = {name: index for name, index in members.items() if counts[name] is not None}
    # without suppressed groups, whose metrics the total would otherwise reveal
    nobody = np.empty(0, np.int64)
    together = np.sort(np.concatenate([nobody, *shown.values()]))
    measured = _Measured(rows, kind, classes, min_count, seed, [*shown.values()])
    groups = [measured.group(name, shown.get(name, nobody)) for name in members]

    ages = [row.get("age") for row in rows] if by == "age" else []
    unread = case_metadata.unread(ages)
    total = measured.group("all of these", together)
    if not classes:  # an unreported mean would follow from the overall one
        for name in chain.from_iterable(subgroup.small_classes for subgroup in groups):
            total.metrics.pop(name, None)

    several = measured.common is not None
    return Subgroups(by, tuple(groups), total, min_count, tuple(unread), several)


def group_values(rows: Sequence[Config], by: str) -> Array:
    """Return each case's value of a column as text."""
    if not rows:
        raise InputError("no cases", "subgroups are of at least one", "let the run finish")

    # numbers are metrics rather than groups, except the age, which has bands
    excluded = {*_NO_GROUPS}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "age":
                excluded.add(name)

    columns = list(without(rows[0], excluded))
    if by not in columns:
        raise InputError(
            f"subgroups by {by!r}",
            f"of these cases is known: {', '.join(columns) or 'nothing'}",
            "choose one of them",
        )
    if by == "age":
        return np.array([case_metadata.band(row.get("age")) for row in rows])

    return np.array([str(row.get(by) or case_metadata.UNKNOWN) for row in rows])


def group_order(name: str) -> tuple[bool, float, str]:
    """Return the sort key of a column's values: ages from young to old, unknown ones last."""
    first = name.partition("–")[0].rstrip("+")
    return name == case_metadata.UNKNOWN, float(first) if first.isdecimal() else 0.0, name


def _classified(
    name: str, rows: Sequence[Config], classes: Sequence[str], min_count: int, seed: int
) -> Subgroup:
    label = np.array([int(row["label"]) for row in rows])
    hit = np.array([int(row["predicted"]) for row in rows]) == label
    probabilities = np.array([[float(row[f"p_{title}"]) for title in classes] for row in rows])
    cases = np.bincount(label, minlength=len(classes))
    # a curve needs enough cases of the class and enough of all others
    enough = np.minimum(cases, len(rows) - cases) >= min_count
    silent = []
    for title, count, is_enough in zip(classes, cases, enough, strict=True):
        if count and not is_enough:
            silent.append(title)

    times = bootstrap.draw(label, seed)
    # Wilson's: with few cases, all correct, the bootstrap would give no interval
    share = binomtest(int(hit.sum()), len(rows)).proportion_ci(method="wilson")
    estimates = {"accuracy": Estimate(float(hit.mean()), float(share.low), float(share.high))}
    reported = list(map(int, np.flatnonzero(enough)))
    areas = {k: delong.area(label == k, probabilities[:, k]) for k in reported}

    # a mean over some classes would not be comparable with other groups
    if len(reported) > 1 and not silent:
        is_class = [label == k for k in reported]
        recall = np.stack([times @ (hit & k) / k.sum() for k in is_class])
        mean_recall = float(np.mean([hit[k].mean() for k in is_class]))
        estimates["balanced_accuracy"] = _estimate(mean_recall, recall.mean(0))

    if len(classes) == 2 and 1 in areas:
        # DeLong's interval exists for a single class only; for a mean over classes the bootstrap is used
        estimates["auroc"] = Estimate(areas[1].value, areas[1].low, areas[1].high)
    elif areas and not silent:
        drawn = bootstrap.areas(label, probabilities, times)[:, reported].mean(1)
        mean_area = float(np.mean([area.value for area in areas.values()]))
        estimates["auroc"] = _estimate(mean_area, drawn)

    area_of = {classes[k]: area for k, area in areas.items()}
    return Subgroup(name, len(rows), estimates, area_of, tuple(silent))


@dataclass(frozen=True)
class _Measured:
    """The metrics of groups of cases; means over findings cover those reportable for every group."""

    rows: Sequence[Config]
    kind: Kind
    classes: Sequence[str]
    min_count: int
    seed: int
    groups: Sequence[Integers]

    @cached_property
    def common(self) -> Flags | None:
        """Findings that are reportable for every group."""
        if self.kind.name != "multilabel" or not self.groups:
            return None
        is_told: Flags = np.logical_and.reduce(
            [self._told(self._cases(index)) for index in self.groups]
        )
        return is_told

    def group(self, name: str, index: Integers) -> Subgroup:
        """Return the reportable values of the cases with these indices."""
        if not len(index):
            return Subgroup(name, None, {}, {})
        if self.kind.name == "classification":
            rows = [self.rows[i] for i in index]
            return _classified(name, rows, self.classes, self.min_count, self.seed)

        cases = self._cases(index)
        areas: dict[str, Area] = {}
        silent: tuple[str, ...] = ()
        if self.common is not None:
            areas, silent = self._of_findings(cases)
            remaining = torch.from_numpy(~self.common)
            shared = cases.values["findings"].masked_fill(remaining, -1)
            cases = Cases(cases.ids, {**cases.values, "findings": shared})

        # one stratum: these tasks have no classes that a draw could miss
        draws = bootstrap.draw(np.zeros(len(cases), np.int64), self.seed)
        redrawn = self.kind.redrawn(cases, draws)
        ends = self.kind.intervals(cases, redrawn)
        values = summarise(cases)
        estimates = {}
        for key in filter(redrawn.metrics.__contains__, values):
            count = int(values.get(f"{key}_cases", len(cases)))
            if count < self.min_count:
                silent = (*silent, key)
            else:
                of_some = count * (count < len(cases))
                low, high = ends.get(key, (None, None))
                estimates[key] = Estimate(values[key], low, high, of_some)

        return Subgroup(name, len(cases), estimates, areas, silent)

    def _cases(self, index: Integers) -> Cases:
        """Return the predictions of some rows, without metadata of the cases."""
        columns = ["id"]
        for key in self.rows[0]:
            floats = any(isinstance(row[key], float) for row in self.rows)
            if key not in _NO_METRICS and (floats or key.startswith(_OF_VECTORS)):
                columns.append(key)

        part = []
        for i in index:
            # the line of a table: its head is line 1
            part.append((int(i) + 2, pick(self.rows[i], columns)))

        return self.kind.read(Table(Path("predictions.csv"), part), self.classes)

    def _told(self, cases: Cases) -> Flags:
        return findings.scored(cases.array("findings"), self.min_count)

    def _of_findings(self, cases: Cases) -> tuple[dict[str, Area], tuple[str, ...]]:
        """Return the areas of the findings that are told, and the names of the others that a case has."""
        truth = cases.array("findings")
        probabilities = cases.array("probabilities")
        shown = self._told(cases)
        areas = {}
        silent = []
        for k, title in enumerate(column_names(self.classes, truth.shape[1])):
            if shown[k]:
                areas[title] = delong.area(*findings.known(probabilities, truth, k))
            elif (truth[:, k] >= 0).any():
                silent.append(title)

        return areas, tuple(silent)


def _estimate(value: float, drawn: Array) -> Estimate:
    ends = bootstrap.interval(np.asarray(drawn, dtype=np.float64))
    assert ends is not None  # every draw has a value: strata are resampled separately
    return Estimate(value, *ends)
