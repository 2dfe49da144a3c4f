"""Metrics of several findings per image, each present or absent, some possibly unknown.

Macro means are over findings with enough positive and enough negative cases (`scored`), so that two sites, or two
models, are compared on the same findings. A case with an unknown finding (-1) is ignored for that finding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from scipy.stats import rankdata

from medfl.core import Array, Flags, Floats, Metrics, without
from medfl.evaluation import bootstrap
from medfl.evaluation.bootstrap import Draws
from medfl.evaluation.numbers import mean_of

LEAST = 10
"""Minimum number of cases with a finding, and of cases without it, for it to enter a macro mean."""


def scored(findings: Array, least: int = LEAST) -> Flags:
    """Return which findings (K,) have at least `least` positives and negatives among (N, K) of 1, 0 and -1."""
    positive: Flags = (findings == 1).sum(0) >= least
    negative: Flags = (findings == 0).sum(0) >= least
    return positive & negative


def common(sets: Sequence[Array]) -> Flags | None:
    """Return which findings are scored in each of several sets of cases, None where no finding is."""
    flags = list(map(scored, filter(len, sets)))
    if not flags:
        return None

    in_all = np.logical_and.reduce(flags)
    return in_all if in_all.any() else None


def known(probabilities: Array, findings: Array, k: int) -> tuple[Flags, Floats]:
    """Return whether the cases (N,) in which finding k is known have it, and their probabilities of it."""
    is_known = findings[:, k] >= 0
    return findings[is_known, k] == 1, probabilities[is_known, k].astype(np.float64)


def area(truth: Array, score: Array) -> float:
    """Return the area under the ROC curve of cases (N,) that are 1 or 0, by Mann-Whitney; ties count one half."""
    positive = truth == 1
    count = int(positive.sum())
    rank_sum = rankdata(score)[positive].sum()
    # U = R - n (n + 1) / 2, as the share of all pairs
    return float((rank_sum - count * (count + 1) / 2) / (count * (len(truth) - count)))


def of_one(truth: Array, score: Array, decision: Array | None = None) -> Metrics:
    """Return the metrics of one finding over its known cases, as far as they are defined.

    Args:
        truth: (N,) 1, 0 or -1.
        score: (N,) probabilities.
        decision: (N,) whether the finding is called present, by a threshold chosen on other images.
    """
    from sklearn.metrics import average_precision_score  # imported here because it takes a second

    is_known = truth >= 0
    truth = truth[is_known]
    score = score[is_known]
    positives = int(truth.sum())
    metrics: Metrics = {"positives": positives, "cases": len(truth)}
    if 0 < positives < len(truth):
        metrics["auroc"] = area(truth, score)
        metrics["average_precision"] = float(average_precision_score(truth, score))

    if decision is None:
        return metrics

    called = decision[is_known] == 1
    hits = int(called[truth == 1].sum())
    if positives:
        metrics["sensitivity"] = hits / positives
        metrics["f1"] = 2 * hits / (positives + int(called.sum()))

    if positives < len(truth):
        metrics["specificity"] = float((~called[truth == 0]).mean())

    return metrics


def summary(
    probabilities: Array,
    findings: Array,
    decisions: Array | None = None,
) -> Metrics:
    """Return macro means over findings, {} if no finding can be averaged.

    For validation images (without `decisions`) only the AUROC, over all findings with both outcomes; for test images
    also average precision, F1, sensitivity and specificity, over the findings of `scored`.

    Args:
        probabilities: (N, K).
        findings: (N, K) 1, 0 or -1.
        decisions: (N, K) 1 where a finding is called present.
    """
    rows = []
    # with few test images per finding, a mean over findings would be mostly chance
    for k in np.flatnonzero(scored(findings, 1 if decisions is None else LEAST)).tolist():
        if decisions is None:
            rows.append({"auroc": area(*known(probabilities, findings, k))})
        else:
            rows.append(of_one(findings[:, k], probabilities[:, k], decisions[:, k]))

    return without(mean_of(rows), ("positives", "cases"))


def redrawn(
    probabilities: Array,
    findings: Array,
    decisions: Array | None,
    draws: Draws,
    wanted: Collection[str] | None = None,
) -> dict[str, Floats]:
    """Return the metrics of `of_one` in each draw (draws, K), NaN for findings that are not scored.

    `wanted` are the metrics to compute, None for all; the other arguments are those of `summary`.
    """
    values: dict[str, Floats] = {}

    def put(name: str, k: int, column: Floats) -> None:
        values.setdefault(name, np.full((len(draws), findings.shape[1]), np.nan))[:, k] = column

    for k in np.flatnonzero(scored(findings)).tolist():
        is_known = findings[:, k] >= 0
        times = draws[:, is_known]  # (draws, known cases)
        positive, score = known(probabilities, findings, k)
        if wanted is None or "auroc" in wanted:
            put("auroc", k, bootstrap.area(positive, score, times))
        if wanted is None or "average_precision" in wanted:
            put("average_precision", k, bootstrap.average_precision(positive, score, times))
        if decisions is None:
            continue

        called = decisions[is_known, k] == 1
        flags = np.stack([positive, positive & called, called, ~positive & ~called], 1)
        positives, hits, calls, rejected = (times @ flags.astype(float)).T
        with np.errstate(invalid="ignore"):
            put("sensitivity", k, hits / positives)
            put("f1", k, 2 * hits / (positives + calls))
            put("specificity", k, rejected / (times.sum(1) - positives))

    return values


def thresholds(probabilities: Array, findings: Array) -> Floats:
    """Return for each finding the threshold (K,) with the largest Youden index on these cases, (N, K) as above.

    0.5 for a finding without positives or without negatives. A probability >= the threshold means that it is present.
    W. J. Youden: Index for rating diagnostic tests (1950).
    """
    chosen = np.full(findings.shape[1], 0.5)
    for k in np.flatnonzero(scored(findings, 1)).tolist():
        positive, score = known(probabilities, findings, k)
        values = np.unique(score)
        # a score of at least the threshold is called positive
        sensitivity = 1 - np.searchsorted(np.sort(score[positive]), values) / positive.sum()
        specificity = np.searchsorted(np.sort(score[~positive]), values) / (~positive).sum()
        best = int((sensitivity + specificity).argmax())
        # halfway to the next lower value, so that rounding moves no case across
        chosen[k] = values[best] if best == 0 else (values[best] + values[best - 1]) / 2

    return chosen
