"""What a site tells of its outcomes where single cases do not travel: tables of counts and sums that add up over sites.

    cases         (1,)    how many
    confusion     (K, K)  classes, the reference in rows
    hits          (K, 2)  right and wrong of each class, or (1, 2) of all: where `confusion` has too small a cell
    scores/<k>    (2, B)  cases without and with class or finding k, by the bin of its probability
    number/<d>    (8,)    of cases whose number d is known: how many, the sums of |e| and e^2 of the errors e, and those
                          of t, t^2, p, p^2 and t p of targets t and predictions p
    mean/<name>   (3,)    of cases that have a metric: how many, the sum, that of the squares
    whole/<name>  (2,)    of a metric that is no mean over cases: how many cases, and that times its value

The bins of a probability are of equal width in its logit from -8 to 8: 128 of them, or of 64 to 2 the most that leave
no cell too small. Within a bin the order is not known: half of its pairs of a case with and one without are taken as
right, so that the area under the ROC curve is off by at most half of the share of these pairs (`error`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import expit

from medfl.core.arrays import Array, Floats
from medfl.core.documents import Document
from medfl.core.errors import RunError
from medfl.core.message import Tensors, Weights
from medfl.core.names import listed
from medfl.core.seeding import derive
from medfl.core.untrusted import printable
from medfl.evaluation import bootstrap, findings, numbers
from medfl.evaluation.bootstrap import Interval
from medfl.evaluation.metrics import OF_CASES, WHOLE, Cases, confusion, from_confusion
from medfl.policy.suppression import suppress_counts

BINS = 128
_EDGES = expit(np.linspace(-8, 8, BINS + 1))
_NORMAL = 1.959963984540054
"""The quantile of the normal distribution at 97.5 %."""
_COUNTS = ("cases", "confusion", "hits", "scores")
_TITLES = {
    "cases": "number of cases",
    "hits": "counts of right and wrong cases",
    "scores": "histograms of scores",
    "number": "sums of errors",
    "mean": "means over cases",
    "whole": "bundle's own metric",
}
_NAME = re.compile(r"cases|confusion|hits|(scores|number)/[0-9]{1,4}|(mean|whole)/[^/]{1,100}")
Tally = dict[str, Array]


def of(cases: Cases) -> Tally:
    """Return the tables of a set of cases, {} of none."""
    if not len(cases):
        return {}

    values = {name: tensor.numpy(force=True) for name, tensor in cases.values.items()}
    tally: Tally = {"cases": np.array([len(cases)])}
    truth = values.get("findings")
    if "label" in values:
        label = values["label"]
        classes = values["probabilities"].shape[1]
        tally["confusion"] = confusion(label, values["probabilities"].argmax(1), classes)
        truth = label[:, None] == np.arange(classes)

    if truth is not None:
        # of two classes the second's area is the metric, as in `summarise`
        only_second = "label" in values and truth.shape[1] == 2
        for k in [1] if only_second else range(truth.shape[1]):
            tally[f"scores/{k}"] = _binned(truth[:, k], values["probabilities"][:, k])

    for d in range(values["target"].shape[1]) if "target" in values else ():
        tally[f"number/{d}"] = _sums(values["target"][:, d], values["prediction"][:, d])

    for name, column in values.items():
        if name in OF_CASES:
            continue

        known = column[~np.isnan(column)].astype(np.float64)
        if name.startswith(WHOLE):
            sums = [len(known), known.sum()]
            tally[f"whole/{name.removeprefix(WHOLE)}"] = np.array(sums)
        else:
            tally[f"mean/{name}"] = np.array([len(known), known.sum(), known @ known])

    return tally


def _binned(truth: Array, score: Array) -> Array:
    known = truth >= 0
    bins = np.searchsorted(_EDGES[1:-1], score[known], "right")
    return np.bincount(bins + BINS * truth[known].astype(np.int64), minlength=2 * BINS).reshape(
        2, -1
    )


def _sums(target: Array, prediction: Array) -> Floats:
    known = ~np.isnan(target)
    t = target[known].astype(np.float64)
    p = prediction[known].astype(np.float64)
    error = p - t
    columns = (np.ones_like(t), np.abs(error), error**2, t, t**2, p, p**2, t * p)
    return np.array([column.sum() for column in columns])


def released(tally: Tally, least: int) -> Tally:
    """Return what of a tally may be told where cells below `least` may not, {} where all cases are fewer.

    A table with such cells, or with others by which they would be known (`policy.suppression`), is told as the finest
    coarser one that has none.
    """
    if not tally or tally["cases"][0] < least:
        return {}

    told: Tally = {}
    for name, table in tally.items():
        for coarser_name, coarser in _coarser(name, table):
            if _may_be_told(coarser, int(tally["cases"][0]), least):
                told[coarser_name] = coarser
                break

    return told


def _coarser(name: str, table: Array) -> Iterator[tuple[str, Array]]:
    """Yield a table, and coarser ones."""
    yield name, table
    if name == "confusion":
        yield "hits", _hits(table)
        yield "hits", _hits(table).sum(0, keepdims=True)

    while name.startswith("scores/") and table.shape[1] > 2:
        table = _halved(table)
        yield name, table


def _hits(table: Array) -> Array:
    return np.stack([np.diag(table), table.sum(1) - np.diag(table)], 1)


def _halved(table: Array) -> Array:
    halved: Array = table.reshape(2, -1, 2).sum(2)
    return halved


def _may_be_told(table: Array, cases: int, least: int) -> bool:
    if least < 1:
        return True

    cells = table.ravel()
    if table.dtype.kind == "f":
        lacking = cases - int(cells[0])
        return bool(cells[0] >= least and (lacking == 0 or lacking >= least))

    named = {str(index): int(count) for index, count in enumerate(cells)}
    return None not in suppress_counts(named, least)[0].values()


def added(tallies: Sequence[Tally]) -> Tally:
    """Return the sums of several sites' tables, each over the sites that tell it, as coarse as the coarsest."""
    total: Tally = {}
    for name in dict.fromkeys(name for tally in tallies for name in tally):
        parts = [tally[name] for tally in tallies if name in tally]
        if name == "hits":
            parts += [_hits(tally["confusion"]) for tally in tallies if "confusion" in tally]
            if min(map(len, parts)) == 1:
                parts = [part.sum(0, keepdims=True) for part in parts]

        if name.startswith("scores/"):
            bins = min(part.shape[1] for part in parts)
            parts = [part.reshape(2, bins, -1).sum(2) for part in parts]

        total[name] = np.sum(parts, 0)

    if "hits" in total:
        total.pop("confusion", None)

    return total


class _Scores(NamedTuple):
    """A class or finding: of each case whether it has it (N,), the middle of the bin of its probability (N,)."""

    truth: Array
    score: Array
    error: float

    @classmethod
    def of(cls, table: Array) -> _Scores:
        bins = table.shape[1]
        middles = expit(np.linspace(-8, 8, 2 * bins + 1)[1::2])
        pairs = float(table[0].sum()) * float(table[1].sum())
        together = float(table[0].astype(np.float64) @ table[1])
        truth = np.repeat([0, 1], table.sum(1))
        return cls(
            truth, np.repeat(np.tile(middles, 2), table.ravel()), together / 2 / max(1.0, pairs)
        )


def _scores(tally: Tally) -> dict[int, _Scores]:
    tables = {}
    for name, table in tally.items():
        if name.startswith("scores/"):
            tables[int(name.partition("/")[2])] = _Scores.of(table)

    return tables


def thresholds(validation: Tally) -> dict[int, float]:
    """Return the threshold of each finding by its validation cases (`findings.thresholds`)."""
    return {
        k: float(findings.thresholds(scores.score[:, None], scores.truth[:, None])[0])
        for k, scores in _scores(validation).items()
    }


class Told(NamedTuple):
    """Metrics as `metrics.summarise` has them, their intervals, how many cases, and how far the AUROC may be off."""

    metrics: dict[str, float]
    intervals: dict[str, Interval]
    cases: int
    error: float

    def as_dict(self) -> Document:
        """Return what a run's summary says beside the metrics."""
        return {"cases": self.cases, "intervals": self.intervals, "auroc_error": self.error}


def told(tally: Tally, cuts: Mapping[int, float] | None = None, seed: int = 0) -> Told:
    """Return the metrics that tables tell; of findings with their thresholds, 0.5 where one is missing.

    Intervals are those of the bootstrap over the cases of a table, of a mean over cases the normal one.
    """
    values: dict[str, float] = {}
    ends: dict[str, Interval] = {}
    if not tally:
        return Told(values, ends, 0, 0.0)

    _add_classified(tally, seed, values, ends)
    areas: list[dict[str, float]] = []
    errors = []
    for k, (truth, score, error) in _scores(tally).items():
        decision = None if cuts is None else (score >= cuts.get(k, 0.5)).astype(np.int8)
        # a class needs a case of each outcome, a finding as many as `findings.scored` says
        if findings.scored(truth[:, None], 1 if cuts is None else findings.LEAST)[0]:
            areas.append(findings.of_one(truth, score, decision))
            errors.append(error)
            drawn = (truth == 1, score)

    for name in areas[0].keys() - {"positives", "cases"} if areas else ():
        if cuts is not None or name == "auroc":
            values[name] = float(np.mean([area[name] for area in areas]))

    if len(areas) == 1 and len(drawn[0]) >= bootstrap.LEAST:
        draws = bootstrap.draw(drawn[0].astype(np.int64), seed)
        ends |= bootstrap.intervals({"auroc": bootstrap.area(*drawn, draws)})

    _add_sums(tally, values, ends)
    error = float(np.mean(errors)) if errors else 0.0
    return Told(values, ends, int(tally["cases"][0]), error)


def _add_classified(
    tally: Tally, seed: int, values: dict[str, float], ends: dict[str, Interval]
) -> None:
    """Add accuracy and the like, as far as the classes are told."""
    table = tally.get("confusion")
    names = {"accuracy", "balanced_accuracy", "f1_macro"}
    if table is None:
        hits = tally.get("hits")
        if hits is None:
            return

        # what is wrong is called a class of its own
        table = np.pad(np.diag(hits[:, 0]), (0, 1))
        table[:-1, -1] = hits[:, 1]
        names = {"accuracy", "balanced_accuracy"} if len(hits) > 1 else {"accuracy"}

    values |= {name: value for name, value in from_confusion(table).items() if name in names}
    if table.sum() < bootstrap.LEAST:
        return

    label, predicted = np.repeat(np.indices(table.shape).reshape(2, -1), table.ravel(), axis=1)
    drawn = bootstrap.classified(label, predicted, len(table), bootstrap.draw(label, seed))
    ends |= bootstrap.intervals({name: column for name, column in drawn.items() if name in names})


def _add_sums(tally: Tally, values: dict[str, float], ends: dict[str, Interval]) -> None:
    """Add means over cases, metrics of numbers, and metrics of whole sets."""
    rows = []
    for name, sums in tally.items():
        kind, _, metric = name.partition("/")
        count = float(sums.ravel()[0])
        if kind == "number" and count:
            rows.append(numbers.of_sums(sums))
        elif kind in ("mean", "whole") and count:
            values[metric] = float(sums[1] / count)
            if count < tally["cases"][0]:
                values[f"{metric}_cases"] = count
            if kind == "mean" and count >= bootstrap.LEAST:
                variance = max(0.0, float(sums[2] / count) - values[metric] ** 2)
                half = _NORMAL * float(np.sqrt(variance / count))
                ends[metric] = (values[metric] - half, values[metric] + half)

    for name in rows[0] if rows else ():
        if all(name in row for row in rows):
            values[name] = float(np.mean([row[name] for row in rows]))


class Examined(NamedTuple):
    """What several sites tell of a model: of all of them together, of each, and lines on what is not told."""

    pooled: Told
    sites: dict[str, Told]
    lines: list[str]


def examined(tallies: Mapping[str, Mapping[str, Tally]], decides: bool) -> Examined:
    """Return what sites tell of a model; `tallies` are site -> section -> tables.

    Where validation cases decide of test cases, it is those of all sites together, for it is one model.
    """
    tests = {site: tallies[site].get("test", {}) for site in sorted(tallies)}
    cuts = None
    if decides:
        cuts = thresholds(added([tally.get("validate", {}) for tally in tallies.values()]))

    total = added([*tests.values()])
    sites = {site: told(tally, cuts, derive(0, "told", site)) for site, tally in tests.items()}
    lines = []
    for name, title in _TITLES.items():
        without = [site for site, tally in tests.items() if name not in _kinds(tally)]
        if without and name in _kinds(total):
            lines.append(f"without the {title} of {listed(without)}, which hide small counts")

    return Examined(told(total, cuts, derive(0, "told")), sites, lines)


def _kinds(tally: Tally) -> set[str]:
    kinds = {name.partition("/")[0] for name in tally}
    return kinds | {"hits"} if "confusion" in kinds else kinds


def tensors(tally: Tally) -> Tensors:
    """Return tables as they cross a wire."""
    return {name: torch.from_numpy(np.ascontiguousarray(table)) for name, table in tally.items()}


def read(arrived: Weights, outputs: int) -> Tally:
    """Return tables that arrived; `outputs` are the classes, findings or numbers that the bundle names.

    Raises:
        RunError: they have other forms than a site's tables.
    """
    tally: Tally = {}
    for name, tensor in arrived.items():
        table = tensor.numpy(force=True)
        if not _fits(name, table, outputs):
            raise RunError(f"its table {printable(name, 60)!r} is none of a site's outcomes")

        tally[name] = table

    if tally and "cases" not in tally:
        raise RunError("it does not tell of how many cases its tables are")

    return tally


def _fits(name: str, table: Array, outputs: int) -> bool:
    if not (_NAME.fullmatch(name) and name.isprintable()):
        return False

    kind, _, member = name.partition("/")
    is_count = kind in _COUNTS
    if table.dtype != (np.int64 if is_count else np.float64) or not np.isfinite(table).all():
        return False
    # how many stand first in each table of sums
    if (table if is_count else table[:1]).min(initial=0) < 0 or np.abs(table).max(
        initial=0
    ) > 2**53:
        return False

    shapes: Mapping[str, Any] = {
        "cases": [(1,)],
        "confusion": [(outputs, outputs)],
        "hits": [(outputs, 2), (1, 2)],
        "scores": [(2, 2**power) for power in range(1, 8)],
        "number": [(8,)],
        "mean": [(3,)],
        "whole": [(2,)],
    }
    in_range = kind not in ("scores", "number") or int(member) < max(1, outputs)
    return in_range and table.shape in shapes[kind]
