"""Metrics of one model on one set of cases, and their spread over sites.

Every number that a run stores or prints comes from `summarise`. Classification metrics equal scikit-learn's (the tests
compare them) but are computed from one confusion matrix and one ranking, since every round needs them for every site.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TypedDict

import numpy as np
import torch
import yaml
from scipy.stats import rankdata

from medfl.core import (
    LOADER,
    Array,
    Document,
    InputError,
    Integers,
    Metrics,
    RunError,
    Tensors,
    Weights,
    map_values,
    not_among,
    without,
)
from medfl.evaluation import findings, numbers


@dataclass(frozen=True)
class Metric:
    """A metric's title in reports, its one-line definition, its direction, and whether it can be negative."""

    title: str
    definition: str
    higher_is_better: bool = True
    signed: bool = False

    @property
    def is_share(self) -> bool:
        """Whether the metric lies between 0 and 1."""
        return self.higher_is_better and not self.signed


IF_MISSING = "1 for a structure that neither mask has, 0 where one has it"
"""Value of Dice and surface Dice if a structure is missing."""
_SHEET = yaml.load(
    Path(__file__).with_suffix(".yaml").read_text("utf-8").replace("IF_MISSING", IF_MISSING), LOADER
)
METRICS: Mapping[str, Metric] = MappingProxyType(
    {name: Metric(**entry) for name, entry in _SHEET.items()}
)
OF_CASES = (
    "probabilities",
    "label",
    "predicted",
    "findings",
    "decisions",
    "thresholds",
    "prediction",
    "target",
    "own_pred",
    "own_label",
)
"""Values that are not metrics of a case."""
WHOLE = "whole:"
"""Prefix of a metric that is not a mean over cases: each case holds the value of the whole set."""
LARGEST = "largest_"
"""Prefix of what a mask would score by the largest component of each structure; validation compares with it."""
OVER_CLASSES = frozenset(
    {
        "balanced_accuracy",
        "f1_macro",
        "auroc",
        "average_precision",
        "f1",
        "sensitivity",
        "specificity",
    }
)
"""Means over classes or findings, comparable between two sets of cases only if both have the same ones."""
_REFERENCES = ("label", "findings", "target")
_LOWER_IS_BETTER = frozenset(
    {"loss", "error", "mae", "mse", "rmse", "nll", "ece", "hd95", "hausdorff", "distance"}
)


def higher_is_better(name: str) -> bool:
    """Return whether larger values of the metric are better.

    A metric outside `METRICS` is better when higher, as MONAI's key metrics are, unless a word of its name says
    otherwise (loss, error, mae, mse, rmse, nll, ece, hd95, hausdorff, distance).
    """
    if name in METRICS:
        return METRICS[name].higher_is_better
    return _LOWER_IS_BETTER.isdisjoint(name.lower().replace("-", "_").split("_"))


def direction(name: str) -> int:
    """Return the factor that makes larger values of a metric better: 1 or -1."""
    return 1 if higher_is_better(name) else -1


def is_share(name: str) -> bool:
    """Return whether the metric is known to lie between 0 and 1: a bundle's own may be in decibels."""
    return name in METRICS and METRICS[name].is_share


def title(name: str) -> str:
    """Return the metric's title; `dice_<name>` is the Dice of one structure, likewise surface Dice and HD95."""
    if name in METRICS:
        return METRICS[name].title
    for kind in ("dice", "hd95", "surface_dice"):
        if name.startswith(f"{kind}_"):
            words = name.removeprefix(f"{kind}_").split("_")
            return " ".join([METRICS[kind].title, *words])

    return name.replace("_", " ")


def is_distance(name: str) -> bool:
    """Tell whether a metric has the unit of the images' spacing; the number of its cases has no unit."""
    return name.startswith("hd95") and not name.endswith("_cases")


@dataclass(frozen=True, eq=False)
class Cases:
    """Per-case outcomes of one model on one set.

    Attributes:
        ids: the items' ids, without repeats.
        values: tensors whose first dimension is the case. Classification: "probabilities" (N, K) float32, "label" (N,)
            int64, "loss" (N,) float32; read from a table also "predicted" (N,) int64. Findings: "probabilities" (N, K),
            "findings" (N, K) int8 of 1, 0 and -1 (unknown), of test images "decisions" (N, K) int8 by "thresholds"
            (N, K). Numbers: "prediction" and "target" (N, D) float64. Other
            tasks, and a user's own metrics: one (N,) float tensor per metric, NaN if a case has none.

    Raises:
        ValueError: a tensor's first dimension is not the number of ids.
    """

    ids: tuple[str, ...]
    values: Weights

    def __post_init__(self) -> None:
        for name, tensor in self.values.items():
            if tensor.ndim == 0 or len(tensor) != len(self.ids):
                raise ValueError(
                    f"values[{name!r}] has shape {tuple(tensor.shape)} for {len(self.ids)} cases"
                )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_classification(self) -> bool:
        """Whether the cases carry class probabilities with exactly one correct class."""
        return "label" in self.values

    @property
    def reference(self) -> torch.Tensor | None:
        """The ground truth of the cases, None if their values are already scores."""
        return next((self.values[name] for name in _REFERENCES if name in self.values), None)

    def array(self, name: str) -> Array:
        """Return a value as a NumPy array, which shares the memory of a tensor on the CPU."""
        return self.values[name].numpy(force=True)

    @property
    def arrays(self) -> dict[str, Array]:
        """All values as NumPy arrays; a dict of its own."""
        return {name: self.array(name) for name in self.values}

    @cached_property
    def _index(self) -> dict[str, int]:
        index = {name: i for i, name in enumerate(self.ids)}
        if len(index) != len(self.ids):
            raise ValueError(
                f"{len(self.ids) - len(index)} of {len(self.ids)} case ids are repeated"
            )
        return index

    def select(self, which: Sequence[str] | Sequence[int]) -> Cases:
        """Return these cases, by id or by index, in this order.

        Raises:
            KeyError: an id is not among the cases.
        """
        rows = [self._index[item] if isinstance(item, str) else int(item) for item in which]
        index = torch.tensor(rows, dtype=torch.int64)
        values = {}
        for name, tensor in self.values.items():
            values[name] = tensor.index_select(0, index.to(tensor.device))

        return Cases(tuple(self.ids[row] for row in rows), values)

    @staticmethod
    def concat(parts: Sequence[Cases]) -> Cases:
        """Return several sets joined in this order; empty sets add nothing, and a score that a set lacks is NaN there.

        Raises:
            ValueError: two sets of a classification carry different values.
        """
        filled = list(filter(len, parts))
        if not filled:
            return next(iter(parts), Cases((), {}))

        # the first tensor of each name, in order of appearance, which is the order of columns in predictions.csv
        examples: Tensors = {}
        for part in filled:
            for name, tensor in part.values.items():
                examples.setdefault(name, tensor)

        for part in filled:
            lacking = not_among(examples, part.values)
            for name in lacking:
                # Only a float can be NaN, and classes are never absent.
                if name == "probabilities" or not examples[name].is_floating_point():
                    raise ValueError(f"cannot join cases with and without {lacking}")

        ids: list[str] = []
        columns: dict[str, list[torch.Tensor]] = {name: [] for name in examples}
        for part in filled:
            ids += part.ids
            for name, example in examples.items():
                column = part.values.get(name)
                if column is None:
                    column = example.new_full((len(part), *example.shape[1:]), torch.nan)

                columns[name].append(column)

        return Cases(tuple(ids), map_values(torch.cat, columns))


CasesByName = dict[str, Cases]
"""Outcomes by site or section."""


def summarise(cases: Cases) -> Metrics:
    """Return the metrics of a set of cases as plain floats; the empty set has none.

    Classification: `accuracy`, `balanced_accuracy`, `f1_macro`, `auroc`, as defined in `METRICS`. `auroc` is the mean
    over the classes that some but not all cases have; without such classes it is left out. Findings: as in
    `medfl.evaluation.findings.summary`. Numbers: as in `medfl.evaluation.numbers.summary`.

    All tasks: the mean of each other value over the cases, whatever their size. Cases whose value is NaN are ignored;
    if there are any, `<name>_cases` counts the others, and if all are NaN, the metric is left out.

    Raises:
        InputError: a label is outside the classes.
        RunError: an output is not finite.
    """
    if not len(cases):
        return {}

    result: Metrics = {}
    arrays = cases.arrays
    for name in ("probabilities", "prediction"):
        if name in arrays:
            _check_finite(cases.ids, name, arrays[name])

    if "label" in arrays and "probabilities" in arrays:
        probabilities = arrays["probabilities"]
        label = arrays["label"]
        _check_labels(cases.ids, label, probabilities.shape[1])
        result |= from_confusion(confusion(label, probabilities.argmax(1), probabilities.shape[1]))
        if (area := _auroc(label, probabilities)) is not None:
            result["auroc"] = area

    if "findings" in arrays:
        decisions = arrays.get("decisions")
        result |= findings.summary(arrays["probabilities"], arrays["findings"], decisions)

    if "target" in arrays:
        result |= numbers.summary(arrays["prediction"], arrays["target"])

    return {**result, **_case_means(without(arrays, OF_CASES))}


def confusion(label: Array, predicted: Array, classes: int) -> Integers:
    """Return the (K, K) counts with the reference in rows; `label` and `predicted` are (N,) integers in 0..K-1."""
    counts = np.bincount(label.astype(np.int64) * classes + predicted, minlength=classes * classes)
    return counts.reshape(classes, classes)


def from_confusion(counts: Integers) -> Metrics:
    """Return accuracy, balanced accuracy and macro F1 of (K, K) counts that are not all zero, reference in rows."""
    hits = np.diag(counts)
    reference = counts.sum(1)
    predicted = counts.sum(0)
    present = reference > 0
    occurs = reference + predicted > 0

    return {
        "accuracy": float(hits.sum() / counts.sum()),
        "balanced_accuracy": float((hits[present] / reference[present]).mean()),
        # F1 = 2 TP / (2 TP + FP + FN), whose denominator is the sum of row and column.
        "f1_macro": float((2 * hits[occurs] / (reference + predicted)[occurs]).mean()),
    }


class Spread(TypedDict, total=False):
    """A metric over the sites; `sd` has ddof 0, `count` is the number of sites that have the metric."""

    mean: float
    sd: float
    worst: float
    worst_site: str
    count: int


def spread(
    values: Mapping[str, float | None],
    higher_is_better: bool = True,
    ranked: Collection[str] | None = None,
) -> Spread:
    """Return mean, standard deviation and worst site (the first of equals) over the sites that have the metric.

    A site without the metric has no entry, None or NaN. Without any site the result is empty. The worst site is one of
    `ranked` (None: of all sites); if `ranked` is empty there is none.
    """
    by_site: Metrics = {}
    for site, value in values.items():
        if value is not None and not math.isnan(value):
            by_site[site] = float(value)

    if not by_site:
        return {}

    # all sites have equal weight, whatever their size: a hospital is a hospital
    numbers = np.array(list(by_site.values()))
    result: Spread = {"mean": float(numbers.mean()), "sd": float(numbers.std())}
    candidates = [site for site in by_site if ranked is None or site in ranked]
    if candidates:
        worst_site = (min if higher_is_better else max)(candidates, key=by_site.__getitem__)
        result["worst"] = by_site[worst_site]
        result["worst_site"] = worst_site

    result["count"] = len(by_site)
    return result


def without_repeats(names: Sequence[str], rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Drop the metrics of a structure that equal the mean over structures in each row."""
    rows = [*rows]
    distinct = []
    for name in names:
        # "dice_liver" is the liver's own part of "dice"
        means = [mean for mean in names if name.startswith(f"{mean}_")]
        if not any(all(row.get(name) == row.get(mean) for row in rows) for mean in means):
            distinct.append(name)

    return distinct


def fewer_classes(averaged: Mapping[str, Collection[int]]) -> Document:
    """Return how many classes each site's mean over classes covers, and out of how many: {} if all sites cover all.

    `averaged` are the classes or findings of each site; "of_classes" is the number present at any site.
    """
    everywhere = set().union(*averaged.values())
    counts = map_values(len, averaged)
    if all(count == len(everywhere) for count in counts.values()):
        return {}

    return {"of_classes": len(everywhere), "classes_at": counts}


def _case_means(values_of: Mapping[str, Array]) -> Metrics:
    result: Metrics = {}
    for name, array in values_of.items():
        scored = array[~np.isnan(array)]
        if scored.size and array.ndim == 1 and not name.startswith(LARGEST):
            name = name.removeprefix(WHOLE)
            # In float64: the mean of many float32 losses would lose digits.
            result[name] = float(scored.mean(dtype=np.float64))
            if scored.size < array.size:
                result[f"{name}_cases"] = float(scored.size)

    return result


def _check_labels(ids: tuple[str, ...], label: Array, classes: int) -> None:
    outside = (label < 0) | (label >= classes)
    if outside.any():
        first = int(outside.argmax())
        raise InputError(
            f"item {ids[first]!r} has the label {label[first]}",
            f"the network has {classes} classes: labels 0 to {classes - 1}",
            "correct this label, or the number of classes in the bundle's configuration",
        )


def _check_finite(ids: tuple[str, ...], name: str, outputs: Array) -> None:
    bad = ~np.isfinite(outputs).all(1)
    if bad.any():
        count = f"{int(bad.sum())} of {len(ids)} cases"
        raise RunError(
            f"the model's {name} are not finite for {count}, first {ids[bad.argmax()]!r}"
        )


def _auroc(label: Array, probabilities: Array) -> float | None:
    """Return the macro one-versus-rest area by Mann-Whitney: (rank sum of n positives - n(n+1)/2) / (n · negatives)."""
    cases, classes = probabilities.shape
    # of two classes both areas are equal
    columns = np.array([1]) if classes == 2 else np.arange(classes)
    positive = label[:, None] == columns
    n = positive.sum(0)
    usable = (n > 0) & (n < cases)

    if not usable.any():
        return None

    n = n[usable]
    positive = positive[:, usable]
    ranks = rankdata(probabilities[:, columns[usable]], axis=0)
    # Midranks: a tie between a positive and a negative counts one half.
    areas = ((ranks * positive).sum(0) - n * (n + 1) / 2) / (n * (cases - n))

    return float(areas.mean())
