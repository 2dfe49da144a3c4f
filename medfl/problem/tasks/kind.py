"""Kind: how a kind of task handles its targets, scores and tables."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medfl.core import (
    Array,
    Config,
    Document,
    Floats,
    InputError,
    Integers,
    map_values,
    not_among,
    without,
)
from medfl.data import Item, Shard
from medfl.evaluation import METRICS, Cases, Draws, Evaluator, Interval, Rule, Scored, bootstrap
from medfl.evaluation.conformal import halves
from medfl.storage import Table

Row = Document
Wanted = Collection[str] | None
"""Names of metrics, None for all."""


class Redrawn(NamedTuple):
    """Metrics in each draw of the cases.

    Attributes:
        metrics: name -> (draws,).
        by_name: name -> (draws, K), for each class, finding or number; NaN if undefined.
    """

    metrics: dict[str, Floats]
    by_name: dict[str, Floats]


@dataclass(frozen=True, eq=False)
class Examined:
    """A network and the items that it is evaluated on.

    Attributes:
        evaluator: the problem's, with its metadata.
        network: on the device.
        shard: the items.
    """

    evaluator: Evaluator
    metadata: Config
    network: nn.Module
    shard: Shard
    device: torch.device

    def cases(self) -> Cases:
        """Return the outcomes of the items."""
        return self.evaluator(self.network, self.shard, self.device)

    def at(self, places: Sequence[int]) -> Examined:
        """Return it with only the items at these indices."""
        shard = self.shard
        chosen = np.asarray(places, np.int64)
        return replace(self, shard=replace(shard, indices=shard.indices[chosen]))


@dataclass(frozen=True)
class Kind:
    """A kind of task; this one, "other", scores each case by the bundle's own metric.

    Attributes:
        name: one of `medfl.core.task.TASKS`.
        key_metric: chooses the best round if a bundle names no metric.
        noun: what one output of the network represents.
        record_key: under which an item's record holds its class ("label") or its numbers ("target"), "" if neither.
        decides: whether validation cases determine something about test cases (`decided`).
        least_names: minimum number of classes, findings or numbers to be named.
        activation: turns a network's logits into probabilities, "" if its outputs are not logits.
        chunk: items scored in one task of a worker: a multiple of the evaluation's batch.
        set_scores: scores available for prediction sets (`medfl.evaluation.conformal`), default first; () for no sets.
        promise: what a coverage is a share of, in words.
        most: largest target; `allowed`: which there are, in words.
    """

    name: str
    key_metric: str = "loss"
    noun: str = "class"
    record_key: str = ""
    decides: bool = False
    least_names: int = 0
    activation: str = ""
    chunk: int = 16
    set_scores: tuple[str, ...] = ()
    promise: str = ""
    most: float = sys.float_info.max
    allowed: str = ""

    def fits(self, prediction: Tensor, target: Tensor, loss: Any, has_class: bool) -> bool:
        """Tell whether a training step is of this kind; same arguments as `medfl.problem.tasks.told_by`."""
        return False

    def item(self, item: Item) -> Item:
        """Return a record of a data list, whose "label" is a class index alone, and "target" numbers."""
        return without(item, ["target"]) if "target" in item else item

    def check(self, ids: Iterable[str], targets: Iterable[Sequence[float | None]]) -> None:
        """Raise InputError if a target of these items is none of this kind."""
        for ident, target in zip(ids, targets, strict=True):
            for value in target:
                if value is not None and (value > self.most or value == -math.inf):
                    raise InputError(
                        f"item {ident!r}: target {value:g}", self.allowed, "correct it"
                    )

    def counts(self, shard: Shard, names: Sequence[str]) -> dict[str, int]:
        """Return how many items of a shard have each class or finding, {} if unknown."""
        return {}

    def decided(self, cases: Cases, validation: Cases | None) -> Cases:
        """Return test cases with decisions based on validation cases of the same model, such as a threshold."""
        return cases

    def decided_by(self, cases: Cases, thresholds: Sequence[float]) -> Cases:
        """Return cases with the decisions that these thresholds, one per finding, imply."""
        return cases

    def comparable(self, cases_of: Mapping[str, Cases]) -> Mapping[str, Cases]:
        """Return the cases of several sites such that a mean over classes or findings covers the same ones at each."""
        return cases_of

    def by_name(
        self, scores: Mapping[str, float], cases: Cases, names: Sequence[str]
    ) -> dict[str, dict[str, float | None]]:
        """Return the metrics of each structure, finding or number; {} if there are none."""
        return {}

    def units(self, metadata: Config) -> dict[str, str]:
        """Return the unit of each metric for which metadata.json declares one."""
        return {}

    def row(self, cases: Cases, index: int, names: Sequence[str], key: str) -> Row:
        """Return the columns of predictions.csv for one case, except id and site; `key` is the key metric."""
        row = {}
        for metric, values in cases.values.items():
            if values.ndim > 1:
                continue
            # omit medfl's mask metrics if they cannot be computed; folds have the same columns
            if metric not in METRICS or metric == key or not values.isnan().all():
                value = float(values[index])
                # NaN is an empty cell
                row[metric] = "" if value != value else value

        return row

    def read(self, table: Table, names: Sequence[str]) -> Cases:
        """Return the cases of predictions.csv as written by `row`; files of older versions may lack columns.

        Raises:
            InputError: the file is damaged.
        """
        columns = not_among(table.columns, ("id", "site"))
        return cases_of(table, {name: table.numbers(name) for name in columns})

    def strata(self, cases: Cases) -> Integers:
        """Return the stratum (N,) of each case for resampling: here a single one."""
        return np.zeros(len(cases), np.int64)

    def has(self, cases: Cases, metric: str) -> NDArray[np.bool_]:
        """Return for which cases (N,) a metric can be computed."""
        values = cases.values.get(metric)
        if values is None or values.ndim > 1:
            return np.ones(len(cases), bool)

        has: NDArray[np.bool_] = ~np.isnan(values.numpy(force=True))
        return has

    def scored(self, examined: Examined, scores: str) -> Scored:
        """Return the cases that have some truth, with the scores from which sets are made.

        Raises:
            InputError: the outputs of the network are not probabilities or numbers.
        """
        raise no_sets(f"the task {self.name!r}, by its bundle's own metric")

    def sets(self, validate: Examined, test: Examined, scores: str, seed: int) -> dict[str, Scored]:
        """Return "validate", the cases for calibration, and "test"; without validation "half" of the test cases.

        The halves are split by patient if patients are known, seeded; "test" is then the other half. A part
        without cases is omitted.
        """
        parts = {"validate": validate, "test": test}
        if not len(validate.shard):
            shard = test.shard
            # images of one patient in both halves would make coverage look better than it is
            patients = []
            for index, ident in zip(shard.indices.tolist(), shard.ids, strict=True):
                patients.append(str(shard.prepared.items[index].get("group") or ident))

            first, second = halves(patients, seed)
            parts = {"half": test.at(first), "test": test.at(second)}

        return {name: self.scored(part, scores) for name, part in parts.items() if len(part.shard)}

    def set_row(self, cases: Cases, index: int, names: Sequence[str], rule: Rule) -> Row:
        """Return the columns of a new case's set, and whether the set is uninformative, as `abstain`."""
        return {}

    def averaged(self, cases: Cases) -> tuple[int, ...]:
        """Return the classes or findings covered by macro means over these cases, () if there are no such means."""
        return ()

    def least(self, cases: Cases) -> int | None:
        """Return the number of cases of the rarest class, None if draws need not contain each class."""
        return None

    def redrawn(self, cases: Cases, draws: Draws, wanted: Wanted = None) -> Redrawn:
        """Return the metrics of `row`'s cases in draws (draws, N) of `medfl.evaluation.bootstrap`."""
        values: dict[str, Floats] = {}
        for name, column in cases.values.items():
            if column.ndim == 1 and (wanted is None or name in wanted):
                values[name] = bootstrap.mean(column.numpy(force=True).astype(np.float64), draws)

        return Redrawn(values, {})

    def intervals(self, cases: Cases, redrawn: Redrawn) -> dict[str, Interval]:
        """Return the interval of each metric that enough cases have."""
        values: dict[str, Floats] = {}
        for name, column in redrawn.metrics.items():
            if np.count_nonzero(self.has(cases, name)) >= bootstrap.LEAST:
                values[name] = column

        return bootstrap.intervals(values)


def no_sets(what: str) -> InputError:
    """Return the error for a model that allows no prediction sets."""
    return InputError(
        f"sets of {what}",
        "finite probabilities of classes, findings or structures, or numbers",
        "calibrate such a model",
    )


def finite(cases: Cases, name: str) -> NDArray[np.float64]:
    """Return a network's outputs of this name; InputError if there are none, or one is not finite."""
    if name not in cases.values or not cases.values[name].isfinite().all():
        raise no_sets(f"a network without finite {name}")

    return cases.values[name].double().numpy(force=True)


def listed_set(names: Sequence[str], taken: NDArray[np.bool_]) -> str:
    """Return the names of a set, (K,), joined by |."""
    return "|".join(names[k] for k in np.flatnonzero(taken).tolist())


def cases_of(table: Table, columns: Mapping[str, Array]) -> Cases:
    """Return cases of a table's rows with these values."""
    return Cases(table.texts("id"), map_values(torch.from_numpy, columns))


def stacked(table: Table, prefix: str, titles: Sequence[str]) -> NDArray[np.float64]:
    """Return the columns of these titles behind a prefix, (N, K)."""
    return np.stack([table.numbers(prefix + title) for title in titles], 1)


def probabilities_in(table: Table, titles: Sequence[str]) -> NDArray[np.float64]:
    """Return the columns `p_` of these titles, (N, K), with numbers from 0 to 1."""
    probabilities = stacked(table, "p_", titles)
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise table.damaged("has a probability that is not between 0 and 1")

    return probabilities


def titles_in(table: Table, prefix: str) -> list[str]:
    """Return what follows a prefix in the names of the columns that start with it."""
    return [name[len(prefix) :] for name in table.columns if name.startswith(prefix)]


def macro(by_name: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the means (draws,) of metrics (draws, K) over the columns that have values."""
    means = {}
    for name, values in by_name.items():
        usable = values[:, ~np.isnan(values).all(0)]
        if usable.size:
            means[name] = usable.mean(1)

    return means


def column_names(names: Sequence[str], count: int) -> list[str]:
    """Return a name for each of a network's outputs: the given ones, or numbers from 0."""
    if len(names) == count:
        return list(names)

    return list(map(str, range(count)))


def exact(value: float) -> str:
    """Return a float32 number in nine digits, enough to distinguish any two; "" for NaN."""
    return "" if value != value else f"{value:.9g}"


def are_flags(target: Tensor) -> bool:
    """Tell whether all targets are present (1), absent (0) or unknown (-1 or NaN)."""
    values = target.detach().float().cpu()
    flags = torch.isin(values, torch.tensor([-1.0, 0.0, 1.0])) | values.isnan()
    return bool(flags.all())


def misfit(shard: Shard, position: int, target: Tensor, output: Tensor) -> InputError:
    """Return the error for a batch, starting at this position of the shard, without one target per output."""
    return InputError(
        f"item {shard.ids[position]!r} has {target[0].numel()} targets, the network {output[0].numel()} outputs",
        "an output for each target",
        "make the number of the network's outputs that of the targets",
    )
