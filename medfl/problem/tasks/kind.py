"""Kind: what a kind of task decides of its targets, its scores and its tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medfl.core.arrays import Floats, Integers
from medfl.core.documents import Config
from medfl.core.errors import InputError
from medfl.data.prepared import Item, Shard
from medfl.evaluation import bootstrap
from medfl.evaluation.bootstrap import Draws, Interval
from medfl.evaluation.conformal import Rule, Scored
from medfl.evaluation.evaluators import Evaluator
from medfl.evaluation.metrics import METRICS, Cases
from medfl.storage.run_reader import Table

Row = dict[str, Any]
OwnValues = Callable[[Tensor, Tensor], dict[str, Tensor]]
"""(output, target) of a batch -> values by name, (B, ...)."""
Wanted = Collection[str] | None
"""Names of metrics, None for all."""


class Redrawn(NamedTuple):
    """Metrics in each draw of the cases.

    Attributes:
        metrics: name -> (draws,).
        by_name: name -> (draws, K), of each class, finding or number; NaN where one has none.
    """

    metrics: dict[str, Floats]
    by_name: dict[str, Floats]


@dataclass(frozen=True, eq=False)
class Examined:
    """A network, and the items that it is examined on.

    Attributes:
        evaluator: of the problem, as its metadata.
        network: on the device.
        shard: the items, at least one.
    """

    evaluator: Evaluator
    metadata: Config
    network: nn.Module
    shard: Shard
    device: torch.device

    def cases(self) -> Cases:
        """Return the outcomes of the items."""
        return self.evaluator(self.network, self.shard, self.device)


@dataclass(frozen=True)
class Kind:
    """A kind of task; this one, "other", has the bundle's own metric for each case.

    Attributes:
        name: of `medfl.core.task.TASKS`.
        key_metric: chooses the best round where a bundle names no metric.
        noun: what each of the network's outputs stands for.
        record_key: under which an item's record has its class ("label") or its numbers ("target"), "" without either.
        decides: whether validation cases decide something of test cases (`decided`).
        least_names: how many classes, findings or numbers have to be named.
        activation: what makes probabilities of a network's logits, "" where its outputs are none.
        chunk: items scored in one task of a worker: a multiple of the evaluation's batch.
        set_scores: what scores sets can be made of (`medfl.evaluation.conformal`), the default first; () for no sets.
        promise: of what a coverage is the share, in words.
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

    def fits(self, prediction: Tensor, target: Tensor, loss: Any, has_class: bool) -> bool:
        """Tell whether a training step is one of this kind; arguments as of `medfl.problem.tasks.told_by`."""
        return False

    def items(self, items: Sequence[Item]) -> list[Item]:
        """Return the records of a data list, whose "label" is a class index alone, and "target" numbers."""
        return [_without(item, "target") if "target" in item else item for item in items]

    def counts(self, shard: Shard, names: Sequence[str]) -> dict[str, int]:
        """Return how many items of a shard have each class or finding, {} where that is not known."""
        return {}

    def decided(self, cases: Cases, validation: Cases | None) -> Cases:
        """Return test cases with what is decided on validation cases of the same model, as a threshold."""
        return cases

    def decided_by(self, cases: Cases, thresholds: Sequence[float]) -> Cases:
        """Return cases with what these thresholds, one a finding, decide of them."""
        return cases

    def comparable(self, cases_of: Mapping[str, Cases]) -> Mapping[str, Cases]:
        """Return the cases of several sites so that a mean over classes or findings is of the same ones at each."""
        return cases_of

    def by_name(
        self, scores: Mapping[str, float], cases: Cases, names: Sequence[str]
    ) -> dict[str, dict[str, float | None]]:
        """Return the metrics of each structure, finding or number; {} where there are none."""
        return {}

    def units(self, metadata: Config) -> dict[str, str]:
        """Return the unit of each metric that has one by what metadata.json says."""
        return {}

    def row(self, cases: Cases, index: int, names: Sequence[str], key: str) -> Row:
        """Return the columns of predictions.csv, but id and site, of one case; `key` is the key metric."""
        row: Row = {}
        for metric, values in cases.values.items():
            if values.ndim > 1:
                continue
            # those that medfl computes of masks are left out where it cannot; folds have the same columns
            if metric not in METRICS or metric == key or not values.isnan().all():
                value = float(values[index])
                row[metric] = "" if value != value else value

        return row

    def read(self, table: Table, names: Sequence[str]) -> Cases:
        """Return the cases of predictions.csv, as `row` writes them; files of older versions may lack columns.

        Raises:
            InputError: the file is damaged.
        """
        columns = [name for name in table.columns if name not in ("id", "site")]
        return cases_of(table, {name: table.numbers(name) for name in columns})

    def strata(self, cases: Cases) -> Integers:
        """Return groups (N,) that are drawn from separately: here a single one."""
        return np.zeros(len(cases), np.int64)

    def has(self, cases: Cases, metric: str) -> NDArray[np.bool_]:
        """Return which cases (N,) a metric can be computed of."""
        values = cases.values.get(metric)
        if values is None or values.ndim > 1:
            return np.ones(len(cases), bool)

        has: NDArray[np.bool_] = ~np.isnan(values.numpy(force=True))
        return has

    def scored(self, examined: Examined, scores: str) -> Scored:
        """Return the cases of which something is true, with the scores that sets are made of.

        Raises:
            InputError: the outputs of the network are no probabilities or numbers.
        """
        raise no_sets(f"the task {self.name!r}, by its bundle's own metric")

    def abstains(self, scored: Scored, place: int) -> NDArray[np.bool_]:
        """Tell which cases' sets (N,) at an edge say nothing, as they have everything."""
        left_out = (scored.size * (scored.bins > place)).sum(1)
        return np.asarray(left_out == 0)

    def set_row(self, cases: Cases, index: int, names: Sequence[str], rule: Rule) -> Row:
        """Return the columns of a new case's set, and whether it says nothing, as `abstain`."""
        return {}

    def averaged(self, cases: Cases) -> tuple[int, ...]:
        """Return the classes or findings that macro means over these cases are of, () where there are no such means."""
        return ()

    def least(self, cases: Cases) -> int | None:
        """Return the cases of the class that has the fewest, None where draws need not have each class."""
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
    """Return the error of a model that no sets can be made of."""
    return InputError(
        f"sets of {what}",
        "finite probabilities of classes, findings or structures, or numbers",
        "calibrate such a model",
    )


def finite(cases: Cases, name: str) -> NDArray[np.float64]:
    """Return a network's outputs of this name; InputError where there are none, or one is not finite."""
    if name not in cases.values or not cases.values[name].isfinite().all():
        raise no_sets(f"a network without finite {name}")

    array: NDArray[np.float64] = cases.values[name].double().numpy(force=True)
    return array


def listed_set(names: Sequence[str], taken: NDArray[np.bool_]) -> str:
    """Return the names that are in a set, (K,), with | between them."""
    return "|".join(names[k] for k in np.flatnonzero(taken).tolist())


def cases_of(table: Table, columns: Mapping[str, NDArray[Any]]) -> Cases:
    """Return cases of a table's rows with these values."""
    return Cases(
        table.texts("id"), {name: torch.from_numpy(column) for name, column in columns.items()}
    )


def stacked(table: Table, names: Sequence[str]) -> NDArray[np.float64]:
    """Return the columns of these names, (N, K)."""
    return np.stack([table.numbers(name) for name in names], 1)


def probabilities_in(table: Table, names: Sequence[str]) -> NDArray[np.float64]:
    """Return the columns of these names, (N, K), whose numbers are 0 to 1."""
    probabilities = stacked(table, names)
    if not ((probabilities >= 0) & (probabilities <= 1)).all():
        raise table.damaged("has a probability that is not between 0 and 1")

    return probabilities


def starting(table: Table, prefix: str) -> list[str]:
    """Return the columns whose names start so."""
    return [name for name in table.columns if name.startswith(prefix)]


def macro(by_name: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the means (draws,) of metrics (draws, K) over the columns that have any."""
    means: dict[str, Floats] = {}
    for name, values in by_name.items():
        usable = values[:, ~np.isnan(values).all(0)]
        if usable.size:
            means[name] = usable.mean(1)

    return means


def _without(item: Item, key: str) -> Item:
    return {name: value for name, value in item.items() if name != key}


def column_names(names: Sequence[str], count: int) -> list[str]:
    """Return a name for each of a network's outputs: theirs, or numbers from 0."""
    if len(names) == count:
        return list(names)

    return [str(index) for index in range(count)]


def exact(value: float) -> str:
    """Return a float32 number in nine digits, which tell such numbers apart; "" for NaN."""
    return "" if value != value else f"{value:.9g}"


def joined(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the values of several batches in one tensor each; {} without any."""
    names = batches[0] if batches else ()
    return {name: torch.cat([batch[name] for batch in batches]) for name in names}


def are_flags(target: Tensor) -> bool:
    """Tell whether all targets are a yes (1), a no (0) or unknown (-1 or NaN)."""
    values = target.detach().float().cpu()
    flags = torch.isin(values, torch.tensor([-1.0, 0.0, 1.0])) | values.isnan()
    return bool(flags.all())


def misfit(shard: Shard, position: int, target: Tensor, output: Tensor) -> InputError:
    """Return the error of a batch, from this position of the shard on, whose targets are not one for each output."""
    return InputError(
        f"item {shard.ids[position]!r} has {target[0].numel()} targets, the network {output[0].numel()} outputs",
        "an output for each target",
        "make the number of the network's outputs that of the targets",
    )
