"""What a site releases if single cases do not travel: tables of counts and sums that add up over sites.

    cases         (1,)    number of cases
    confusion     (K, K)  classes, the reference in rows
    hits          (2,)    right and wrong, if `confusion` has too small a cell
    scores/<k>    (2, B)  cases without and with class or finding k, by the bin of its probability
    mean/<name>   (3,)    over cases that have a metric: their number, the sum, the sum of squares; -1 instead of the
                          latter if the metric is not a mean over cases: its value is then sum / number
    numbers/<d>   (7,)    over cases with number d known: number, and the sums of |e|, e, e², y, y², xy, where y is
                          the number, x its prediction and e = x - y

Probability bins have equal width in the logit from -8 to 8: 128 bins, or the largest of 64 to 2 that leaves no cell
too small. The order within a bin is unknown: half of its pairs of a case with and one without are counted as correct,
so that the area under the ROC curve is off by at most half of the share of these pairs (`error`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.special import expit, ndtri

from medfl.core import (
    Array,
    Document,
    Metrics,
    RunError,
    Tensors,
    Weights,
    listed,
    map_values,
    printable,
)
from medfl.core.seeding import derive
from medfl.evaluation import bootstrap, findings, numbers
from medfl.evaluation.bootstrap import LEAST, Interval
from medfl.evaluation.metrics import OF_CASES, WHOLE, Cases, confusion, from_confusion
from medfl.policy.suppression import suppress_counts

BINS = 128
_EDGES = expit(np.linspace(-8, 8, BINS + 1))
_NAME = re.compile(r"cases|confusion|hits|(scores|numbers)/[0-9]{1,4}|mean/[^/]{1,100}")
Tally = dict[str, Array]


def of(cases: Cases) -> Tally:
    """Return the tables of a set of cases, {} for an empty set."""
    if not len(cases):
        return {}

    values = cases.arrays

    tally = {"cases": np.array([len(cases)])}
    truth = values.get("findings", np.empty((0, 0)))
    if "label" in values:
        label = values["label"]
        classes = values["probabilities"].shape[1]
        tally["confusion"] = confusion(label, values["probabilities"].argmax(1), classes)
        truth = label[:, None] == np.arange(classes)

    # with two classes the metric is the second's area, as in `summarise`
    first = int("label" in values and truth.shape[1] == 2)
    for k in range(first, truth.shape[1]):
        tally[f"scores/{k}"] = _binned(truth[:, k], values["probabilities"][:, k])

    if "target" in values:
        tally |= _sums_of_numbers(values["target"], values["prediction"])
        # for its interval
        values["mae"] = np.abs(values["prediction"] - values["target"]).mean(1)

    for name in values.keys() - {*OF_CASES}:
        scores = values[name][~np.isnan(values[name])].astype(np.float64)
        # a metric of a whole set has no variance over cases, marked by -1
        squares = -1.0 if name.startswith(WHOLE) else scores @ scores
        sums = np.array([len(scores), scores.sum(), squares])
        tally[f"mean/{name.removeprefix(WHOLE)}"] = sums

    return tally


def _sums_of_numbers(target: Array, prediction: Array) -> Tally:
    tables = {}
    for d in range(target.shape[1]):
        is_known = ~np.isnan(target[:, d])
        y = target[is_known, d].astype(np.float64)
        x = prediction[is_known, d].astype(np.float64)
        e = x - y
        # in the order of `numbers.of_sums`
        terms = (np.ones_like(y), np.abs(e), e, e**2, y, y**2, x * y)
        tables[f"numbers/{d}"] = np.array([float(term.sum()) for term in terms])

    return tables


def _binned(truth: Array, score: Array) -> Array:
    is_known = truth >= 0
    bins = np.searchsorted(_EDGES[1:-1], score[is_known], "right")
    # the first row is of cases without it, the second of those with it
    cells = bins + BINS * truth[is_known].astype(np.int64)
    return np.bincount(cells, minlength=2 * BINS).reshape(2, -1)


def released(tally: Tally, least: int) -> Tally:
    """Return the part of a tally that may be released if cells below `least` may not, {} if there are fewer cases.

    A table with such cells, or with others that would reveal them (`policy.suppression`), is released in the finest
    coarser form without them.
    """
    if not tally or tally["cases"][0] < least:
        return {}

    tables = {}
    for name, table in tally.items():
        for coarser_name, coarser in _coarser(name, table):
            if _may_be_told(coarser, tally["cases"][0], least):
                tables[coarser_name] = coarser
                break

    return tables


def _coarser(name: str, table: Array) -> Iterator[tuple[str, Array]]:
    """Yield a table, then coarser versions of it."""
    yield name, table
    if name == "confusion":
        yield "hits", _hits(table)

    while name.startswith("scores/") and table.shape[1] > 2:
        table = table.reshape(2, -1, 2).sum(2)
        yield name, table


def _hits(table: Array) -> Array:
    right = np.trace(table)
    return np.array([right, table.sum() - right])


def _may_be_told(table: Array, cases: int, least: int) -> bool:
    cells = table.ravel()
    # for sums: the number of cases they cover, and of the others
    if table.dtype.kind == "f":
        # that nobody is left out of a metric is no count to hide
        cells = np.trim_zeros(np.array([cells[0], cases - cells[0]]))

    names = map(str, range(len(cells)))
    counts = dict(zip(names, cells.astype(int).tolist(), strict=True))
    return None not in suppress_counts(counts, least)[0].values()


def added(tallies: Sequence[Tally]) -> Tally:
    """Return the sums of the tables of several sites, each over the sites that release it, at the coarsest level."""
    if "hits" in set().union(*tallies):
        tallies = list(map(_without_confusion, tallies))

    total = {}
    for name in sorted(set().union(*tallies)):
        parts = [tally[name] for tally in tallies if name in tally]
        if name.startswith("scores/"):
            bins = min(part.shape[1] for part in parts)
            # coarser bins are sums of finer ones side by side
            parts = [part.reshape(2, bins, -1).sum(2) for part in parts]

        total[name] = np.sum(parts, 0)

    return total


def _without_confusion(tally: Tally) -> Tally:
    tables = dict(tally)
    if "confusion" in tally:
        tables["hits"] = _hits(tables.pop("confusion"))

    return tables


def _scores(tally: Tally) -> dict[int, tuple[Array, Array]]:
    """Return for each class or finding whether each case has it (N,), and the centre of its score's bin (N,)."""
    scores = {}
    for name, table in tally.items():
        if name.startswith("scores/"):
            # bins have equal width in logits, where the scores of a confident network differ
            middles = expit(np.linspace(-8, 8, 2 * table.shape[1] + 1)[1::2])
            score = np.repeat(np.tile(middles, 2), table.ravel())
            scores[int(name.partition("/")[2])] = np.repeat([0, 1], table.sum(1)), score

    return scores


def thresholds(validation: Tally) -> dict[int, float]:
    """Return the threshold of each finding, chosen on its validation cases (`findings.thresholds`)."""
    return {
        k: float(findings.thresholds(score[:, None], truth[:, None])[0])
        for k, (truth, score) in _scores(validation).items()
    }


@dataclass
class Outcome:
    """Results from tables: number of cases, metrics as in `metrics.summarise`, intervals, the AUROC's error."""

    cases: int = 0
    metrics: Metrics = field(default_factory=dict)
    intervals: dict[str, Interval] = field(default_factory=dict)
    error: float = 0.0

    @property
    def row(self) -> Metrics:
        """The metrics with the bounds of their intervals."""
        row = dict(self.metrics)
        for name, (low, high) in self.intervals.items():
            row |= {f"{name}_low": low, f"{name}_high": high}

        return row

    def as_dict(self) -> Document:
        """Return what a run's summary says in addition to the metrics."""
        return {"cases": self.cases, "intervals": self.intervals, "auroc_error": self.error}


def outcome(tally: Tally, cuts: Mapping[int, float] | None = None, seed: int = 0) -> Outcome:
    """Compute results from tables; findings use the given thresholds, or 0.5 for a finding without one.

    Intervals are bootstrapped over the cases of a table; intervals of means over cases use the normal approximation.
    """
    result = Outcome()
    if tally:
        result.cases = int(tally["cases"][0])
        _add_classified(tally, seed, result)
        _add_areas(tally, cuts, seed, result)
        _add_sums(tally, result)
        _add_numbers(tally, result)

    return result


def _add_classified(tally: Tally, seed: int, result: Outcome) -> None:
    """Add accuracy and related metrics, as far as the classes are released."""
    table = tally.get("confusion")
    names = {"accuracy", "balanced_accuracy", "f1_macro"}
    if table is None and "hits" in tally:
        # wrong predictions count as a class of their own
        table = np.array([tally["hits"], [0, 0]])
        names = {"accuracy"}

    if table is None:
        return

    # the cases again, from how many there are of each kind
    label, predicted = np.repeat(np.indices(table.shape).reshape(2, -1), table.ravel(), axis=1)
    drawn = bootstrap.classified(label, predicted, len(table), bootstrap.draw(label, seed))
    ends = bootstrap.intervals(drawn)
    for name in names:
        result.metrics[name] = from_confusion(table)[name]
        if len(label) >= LEAST:
            result.intervals[name] = ends[name]


def _add_areas(tally: Tally, cuts: Mapping[int, float] | None, seed: int, result: Outcome) -> None:
    """Add the means over classes or findings of score-based metrics; the AUROC of a single one gets an interval."""
    rows = []
    errors = []
    # a class needs a case of each outcome, a finding the minimum number for averages
    least = 1 if cuts is None else findings.LEAST
    scores = _scores(tally)
    for k, (truth, score) in scores.items():
        if not findings.scored(truth[:, None], least)[0]:
            continue
        if cuts is None:
            rows.append({"auroc": findings.area(truth, score)})
        else:
            rows.append(findings.of_one(truth, score, score >= cuts.get(k, 0.5)))

        without, having = tally[f"scores/{k}"].astype(np.float64)
        # of a case of each in the same bin nobody knows whose score is higher: the area is off by half of these pairs
        errors.append(without @ having / 2 / (without.sum() * having.sum()))

    if not rows:
        return

    result.error = float(np.mean(errors))
    for name in rows[0].keys() - {"positives", "cases"}:
        result.metrics[name] = float(np.mean([row[name] for row in rows]))

    if len(scores) == 1 and len(truth) >= LEAST:
        drawn = bootstrap.area(truth == 1, score, bootstrap.draw(truth, seed))
        result.intervals |= bootstrap.intervals({"auroc": drawn})


def _add_sums(tally: Tally, result: Outcome) -> None:
    """Add means over cases, and metrics of whole sets."""
    for name, sums in tally.items():
        kind, _, metric = name.partition("/")
        if kind != "mean" or not sums[0]:
            continue

        count, total, squares = map(float, sums)
        mean = total / count
        result.metrics[metric] = mean
        if count < result.cases:
            result.metrics[f"{metric}_cases"] = count
        if squares >= 0 and count >= LEAST:
            variance = max(0.0, squares / count - mean**2)  # rounding may put it below 0
            half = float(ndtri(0.975)) * math.sqrt(variance / count)
            result.intervals[metric] = (mean - half, mean + half)


def _add_numbers(tally: Tally, result: Outcome) -> None:
    """Add the metrics of `evaluation.numbers.summary`; their mean error replaces that of `mean/mae`."""
    rows = []
    for name, sums in tally.items():
        if name.startswith("numbers/"):
            rows.append(numbers.of_sums(*map(float, sums)))

    result.metrics |= numbers.mean_of(rows)


@dataclass(frozen=True)
class Examined:
    """Evaluation of one model from what several sites release: pooled, per site, and notes on what is withheld."""

    pooled: Outcome
    sites: dict[str, Outcome]
    lines: list[str]


def examined(
    tallies: Mapping[str, Mapping[str, Tally]], decides: bool, key: str
) -> Examined | None:
    """Evaluate a model from the released tables, site -> section -> tables; None if no site releases any.

    Thresholds applied to test cases are chosen on the validation cases of all sites together, since there is one model.
    A note says if the metric `key` cannot be computed, and which sites released less than others.
    """
    if not tallies:
        return None

    tests = {site: tallies[site].get("test", {}) for site in sorted(tallies)}
    cuts = None
    if decides:
        cuts = thresholds(added([tally.get("validate", {}) for tally in tallies.values()]))

    total = added([*tests.values()])
    pooled = outcome(total, cuts, derive(0, "told"))
    sites = {}
    hiding = []
    for site, tally in tests.items():
        sites[site] = outcome(tally, cuts, derive(0, "told", site))
        if total.keys() - _without_confusion(tally).keys() - tally.keys():
            hiding.append(site)

    lines = []
    if key not in pooled.metrics:
        lines.append(f"{key} does not follow from what the sites tell")
    if hiding:
        lines.append(f"some metrics are without {listed(hiding)}, where counts are too small")

    return Examined(pooled, sites, lines)


def tensors(tally: Tally) -> Tensors:
    """Return tables in the form in which they are sent."""
    return map_values(lambda table: torch.from_numpy(np.ascontiguousarray(table)), tally)


def read(arrived: Weights, outputs: int) -> Tally:
    """Return received tables; `outputs` are the classes, findings or numbers that the bundle names.

    Raises:
        RunError: their form differs from that of a site's tables.
    """
    tally = {}
    for name, tensor in arrived.items():
        tally[name] = tensor.numpy(force=True)
        if not (name.isprintable() and _fits(name, tally[name], outputs)):
            raise RunError(f"its table {printable(name, 60)!r} is none of a site's outcomes")

    if tally and "cases" not in tally:
        raise RunError("it does not tell of how many cases its tables are")

    return tally


def _fits(name: str, table: Array, outputs: int) -> bool:
    kind, _, member = name.partition("/")
    shapes = {
        "cases": (1,),
        "confusion": (outputs, outputs),
        "hits": (2,),
        "scores": (2, *table.shape[1:2]),
        "mean": (3,),
        "numbers": (7,),
    }
    if not _NAME.fullmatch(name) or table.shape != shapes[kind]:
        return False
    # a power of two, since bins are halved
    if kind == "scores" and (BINS % table.shape[1] or int(member) >= outputs):
        return False
    if kind == "numbers" and int(member) >= outputs:
        return False
    if kind in ("mean", "numbers"):
        return bool(table.dtype == np.float64 and np.isfinite(table).all() and table[0] >= 0)

    return bool(table.dtype == np.int64 and table.min() >= 0 and table.max() <= 2**53)
