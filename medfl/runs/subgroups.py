"""Metrics by subgroup: by centre, site, sex, age or localisation, with intervals, and silence where a group is small.

A group of fewer than `min_count` cases is not told, nor are others with it, so that its size and metrics do not follow
from those of all cases (`policy.suppression`). The area of a class is told only where it has at least so many
cases in the group, and so do all others together; balanced accuracy and AUROC only where this holds for every class in
the group: a number that rests on three patients says little, and may say who they are.

Balanced accuracy is the mean recall and AUROC the mean one-versus-rest area over the classes in the group; of two
classes the second's area. Intervals are of 95 %: Wilson's for accuracy, DeLong's for an area of a single class
(`medfl.evaluation.delong`), else by the bootstrap, stratified by class (`medfl.evaluation.bootstrap`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from medfl.bundle import case_metadata
from medfl.core.arrays import Array, Integers
from medfl.core.documents import Config
from medfl.core.errors import InputError
from medfl.core.names import listed
from medfl.evaluation import bootstrap, delong
from medfl.evaluation.delong import Area
from medfl.policy.suppression import suppress_counts

MIN_COUNT = 10
_NO_GROUPS = ("id", "label", "predicted", "group")
_NO_METRICS = (*_NO_GROUPS, "loss", "age")


@dataclass(frozen=True)
class Estimate:
    """A metric and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Subgroup:
    """The cases that have one value.

    Attributes:
        name: the value.
        count: cases; None where they are too few to be told, or would give away others that are.
        metrics: name -> estimate; those that rest on too few cases are left out.
        areas: class -> its area against the others, of the classes that are told.
        small_classes: classes with a case here but too few to be told.
    """

    name: str
    count: int | None
    metrics: Mapping[str, Estimate]
    areas: Mapping[str, Area]
    small_classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subgroups:
    """The groups of one column.

    Attributes:
        by: the column.
        groups: in order; ages from young to old, cases without a value last.
        total: all cases of the groups that are told, together.
        min_count: the fewest cases that are told.
        unread: ages that are no ages, of the cases that count as without one.
    """

    by: str
    groups: tuple[Subgroup, ...]
    total: Subgroup
    min_count: int
    unread: tuple[str, ...] = ()

    def records(self) -> list[dict[str, object]]:
        """Return one record a group: its name, cases, and value, low and high end of each metric; None: not told."""
        names = list(self.total.metrics)
        rows = []
        for group in (*self.groups, self.total):
            row: dict[str, object] = {self.by: group.name, "cases": group.count}
            for name in names:
                estimate = group.metrics.get(name)
                if estimate:
                    ends: tuple[float | None, ...] = (estimate.value, estimate.low, estimate.high)
                else:
                    ends = (None, None, None)

                row |= dict(zip((name, f"{name}_low", f"{name}_high"), ends, strict=True))

            rows.append({**row, "silent": ", ".join(group.small_classes)})

        return rows

    def notes(self) -> list[str]:
        """Return what a reader of the records must know."""
        hidden = []
        thin = []
        for group in self.groups:
            if group.count is None:
                hidden.append(group.name)

            if group.small_classes:
                thin.append(f"{group.name}: {', '.join(group.small_classes)}")

        notes = []
        if hidden:
            reason = f"fewer than {self.min_count} cases, or its count would reveal such a group"
            notes.append(f"not told, {reason}: {', '.join(hidden)}")

        if thin:
            reason = f"a class, or all others, have fewer than {self.min_count} cases"
            notes.append(f"no balanced accuracy and AUROC where {reason}: {'; '.join(thin)}")

        if self.unread:
            examples = listed(sorted({*map(repr, self.unread)}))
            notes.append(
                f"{len(self.unread)} ages are not read, or fit several bands, and count as {case_metadata.UNKNOWN}: "
                f"{examples}; write years, as 70, 070Y, 018M, 70-79 or >89"
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
    min_count: int = MIN_COUNT,
    seed: int = 0,
) -> Subgroups:
    """Return the metrics of cases by the values of a column.

    Args:
        rows: one record a case. Of a classification with label, predicted and `p_<class>`; else numbers are metrics.
        by: name of the column; ages are put into bands of 20 years.
        classes: class names in label order, () where there are none.
        min_count: the fewest cases that are told.
        seed: of the bootstrap.

    Raises:
        InputError: no such column, no cases, or a count below 1.
    """
    if min_count < 1:
        raise InputError(
            f"min_count {min_count}", "a whole number of at least 1", "give for example 10"
        )

    values = _values(rows, by)
    members = {}
    for name in sorted(set(values.tolist()), key=_order):
        members[name] = np.flatnonzero(values == name)

    counts, _ = suppress_counts({name: len(index) for name, index in members.items()}, min_count)

    def group(name: str, index: Integers) -> Subgroup:
        group_rows = [rows[i] for i in index]
        if not group_rows:
            return Subgroup(name, None, {}, {})
        if classes:
            return _classified(name, group_rows, classes, min_count, seed)

        return _measured(name, group_rows, seed)

    groups = []
    # without the hidden groups, whose metrics the total would otherwise reveal
    together = np.empty(0, np.int64)
    for name, index in members.items():
        if counts[name] is None:
            groups.append(Subgroup(name, None, {}, {}))
        else:
            groups.append(group(name, index))
            together = np.append(together, index)

    unread = [str(row["age"]) for row in rows if by == "age" and isinstance(row.get("age"), str)]
    total = group("all of these", np.sort(together))
    return Subgroups(by, tuple(groups), total, min_count, tuple(unread))


def _values(rows: Sequence[Config], by: str) -> Array:
    """Return each case's value of a column as text."""
    if not rows:
        raise InputError("no cases", "subgroups are of at least one", "let the run finish")

    # numbers are metrics and not groups, but for the age, which has bands
    excluded = {*_NO_GROUPS}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "age":
                excluded.add(name)

    columns = [name for name in rows[0] if name not in excluded]
    if by not in columns:
        raise InputError(
            f"subgroups by {by!r}",
            f"of these cases is known: {', '.join(columns) or 'nothing'}",
            "choose one of them",
        )
    if by == "age":
        return np.array([case_metadata.band(row.get("age")) for row in rows])

    return np.array([str(row.get(by) or case_metadata.UNKNOWN) for row in rows])


def _order(name: str) -> tuple[bool, float, str]:
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
    share = binomtest(int(hit.sum()), len(rows)).proportion_ci(method="wilson")
    estimates = {"accuracy": Estimate(float(hit.mean()), float(share.low), float(share.high))}
    reported = list(map(int, np.flatnonzero(enough)))
    areas = {k: delong.area(label == k, probabilities[:, k]) for k in reported}

    if len(reported) > 1 and not silent:
        is_class = [label == k for k in reported]
        recall = np.stack([times @ (hit & k) / k.sum() for k in is_class])
        mean_recall = float(np.mean([hit[k].mean() for k in is_class]))
        estimates["balanced_accuracy"] = _estimate(mean_recall, recall.mean(0))

    if len(classes) == 2 and 1 in areas:
        estimates["auroc"] = Estimate(areas[1].value, areas[1].low, areas[1].high)
    elif areas and not silent:
        drawn = bootstrap.areas(label, probabilities, times)[:, reported].mean(1)
        mean_area = float(np.mean([area.value for area in areas.values()]))
        estimates["auroc"] = _estimate(mean_area, drawn)

    area_of = {classes[k]: area for k, area in areas.items()}
    return Subgroup(name, len(rows), estimates, area_of, tuple(silent))


def _measured(name: str, rows: Sequence[Config], seed: int) -> Subgroup:
    """Return the means of all numbers of the rows."""
    values = {}
    for key in rows[0]:
        if key in _NO_METRICS:
            continue

        column = [row[key] for row in rows]
        if any(isinstance(value, float) for value in column):
            # as float64, None is NaN: a case without this structure
            values[key] = np.array(column, dtype=np.float64)

    ends = bootstrap.means(values, bootstrap.draw(np.zeros(len(rows), np.int64), seed))
    estimates = {}
    for key, numbers in values.items():
        if key in ends:
            estimates[key] = Estimate(float(np.nanmean(numbers)), *ends[key])

    return Subgroup(name, len(rows), estimates, {})


def _estimate(value: float, drawn: Array) -> Estimate:
    ends = bootstrap.interval(np.asarray(drawn, dtype=np.float64))
    assert ends is not None  # every draw has a value: strata are drawn whole
    return Estimate(value, *ends)
