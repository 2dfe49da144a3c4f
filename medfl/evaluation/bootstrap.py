"""Bootstrap intervals of test metrics: test cases are resampled with replacement, a thousand times.

Above 20,000 cases fewer times, but at least a hundred: memory and time would grow with the product of both.

Percentile intervals as in B. Efron, R. Tibshirani: An Introduction to the Bootstrap (1993), chapter 13. A draw is
stored as the number of times it contains each case, so that every metric is computed from counts, for all draws at
once. Stratified draws keep the number of cases of each stratum, so that no class can be missing.

Cases are treated as independent: if patients have several images, the true intervals are wider. Fewer than ten
cases give no interval: their draws take too few different values to say anything about other cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from medfl.core import Array, Flags, Floats, Integers, map_values

DRAWS = 1000
LEVEL = 0.95
LEAST = 10
"""Minimum number of cases for an interval."""
_NUMBERS = 20_000_000  # of all draws: 80 MB
_FEWEST = 100  # draws, however many cases
_DRAWN_AT_ONCE = 1 << 22  # numbers: 32 MiB of int64
_BLOCK = 64  # draws that are computed at once, so that they fit in a cache

Interval = tuple[float, float]
Draws = NDArray[np.int32]
"""(draws, N): how often each draw contains each of N cases."""


def draw(strata: Integers, seed: int, count: int = DRAWS) -> Draws:
    """Draw cases with replacement, from each stratum (N,) as many as it has; `count` times, or fewer of many cases.

    The draws are those of `scipy.stats.bootstrap` with `numpy.random.default_rng(seed)`.
    """
    generator = np.random.default_rng(seed)
    count = min(count, max(_FEWEST, _NUMBERS // max(1, len(strata))))
    draws = np.zeros((count, len(strata)), np.int32)
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        size = len(members)
        for block in _blocks(draws):
            rows = len(block)
            # Row r counts in its own range of `size` numbers, so that one bincount serves all rows.
            taken = generator.integers(0, size, (rows, size)) + size * np.arange(rows)[:, None]
            block[:, members] = np.bincount(taken.ravel(), minlength=rows * size).reshape(rows, -1)

    return draws


def interval(values: Floats) -> Interval | None:
    """Return the percentile interval of a metric's values over the draws, None where all are NaN."""
    numbers = values[~np.isnan(values)]
    if not len(numbers):
        return None
    low, high = np.percentile(numbers, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(low), float(high)


def intervals(values: Mapping[str, Floats]) -> dict[str, Interval]:
    """Return the interval of each metric that has one."""
    ends_of = map_values(interval, values)
    return {name: ends for name, ends in ends_of.items() if ends is not None}


def classified(
    label: Integers, predicted: Integers, classes: int, draws: Draws
) -> dict[str, Floats]:
    """Return accuracy, balanced accuracy and macro F1 (draws,) in each draw, as `medfl.evaluation.metrics` has them."""
    counts = _confusions(label, predicted, classes, draws)  # (draws, K, K)
    hits = np.diagonal(counts, 0, 1, 2)  # (draws, K)
    reference = counts.sum(2)
    predictions = counts.sum(1)

    return {
        "accuracy": hits.sum(1) / reference.sum(1),
        "balanced_accuracy": _mean_share(hits, reference),
        "f1_macro": _mean_share(2 * hits, reference + predictions),
    }


def _mean_share(part: Array, total: Array) -> Floats:
    """Return the mean of part / total (draws, K) over the classes whose total is not 0."""
    shares: Floats = (part / np.maximum(total, 1)).sum(1) / (total > 0).sum(1)
    return shares


def mean(values: Floats, draws: Draws) -> Floats:
    """Return the mean (draws,) of the values (N,) that are not NaN in each draw, NaN if a draw contains none."""
    scored = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        averages: Floats = draws[:, scored] @ values[scored] / draws[:, scored].sum(1)
    return averages


def areas(label: Integers, probabilities: Floats, draws: Draws) -> Floats:
    """Return the one-versus-rest area under the ROC curve of each class in each draw, (draws, K).

    Mann-Whitney on weighted cases: the mean, over all pairs of a case of the class and a case of another, of 1 if the
    former has the higher probability and 1/2 if they are equal. With two classes only the second has areas, as in
    `medfl.evaluation.metrics`; a class that no case or every case has is NaN.
    """
    by_class = np.full((len(draws), probabilities.shape[1]), np.nan)
    for c in [1] if probabilities.shape[1] == 2 else range(probabilities.shape[1]):
        # A class that every case has, or none, has no pair to compare.
        if 0 < np.count_nonzero(label == c) < len(label):
            by_class[:, c] = area(label == c, probabilities[:, c], draws)

    return by_class


def area(positive: Flags, score: Floats, draws: Draws) -> Floats:
    """Return the area under the ROC curve (draws,) of N binary cases and their scores."""
    order = np.argsort(score, kind="stable")
    positives = order[positive[order]]
    negatives = order[~positive[order]]
    # the negatives with a lower score than each positive; then those with its score too
    below = np.searchsorted(score[negatives], score[positives], "left")
    up_to = np.searchsorted(score[negatives], score[positives], "right")
    shares = []
    for block in _blocks(draws):
        drawn = block.take(positives, 1)
        # summed[:, i]: number of drawn negatives among the i lowest.
        summed = block.take(negatives, 1).cumsum(1, dtype=np.int32)
        summed = np.pad(summed, ((0, 0), (1, 0)))
        pairs = summed.take(below, 1) + summed.take(up_to, 1)
        won = np.einsum("dp,dp->d", drawn, pairs, dtype=float)

        with np.errstate(invalid="ignore"):
            # A pair counts twice if won and once if tied, hence the half.
            shares.append(won / 2 / (drawn.sum(1, dtype=float) * summed[:, -1]))

    return np.concatenate(shares)


def _blocks(draws: Draws) -> list[Draws]:
    """Split draws so that what is computed of a block fits in a cache."""
    step = max(1, min(_BLOCK, _DRAWN_AT_ONCE // draws.shape[1]))
    return np.split(draws, range(step, len(draws), step))


def average_precision(positive: Flags, score: Floats, draws: Draws) -> Floats:
    """Return the average precision (draws,): over the positives, the mean precision at each positive's score."""
    order = np.argsort(-score, kind="stable")
    positives = order[positive[order]]
    # number of cases whose score is at least that of each positive
    reach = len(score) - np.searchsorted(np.sort(score), score[positives], "left")
    precision_sums = []
    for block in _blocks(draws):
        # (draws, N), the highest score first
        rows = block.take(order, 1)
        # how many cases each draw has with a score of at least that of each positive
        called = rows.cumsum(1, dtype=np.int32).take(reach - 1, 1)
        hits = (rows * positive[order]).cumsum(1, dtype=np.int32).take(reach - 1, 1)
        with np.errstate(invalid="ignore"):
            precision = np.where(hits > 0, hits / called, 0.0)
        precision_sums.append((precision * block.take(positives, 1)).sum(1))

    with np.errstate(invalid="ignore"):
        mean: Floats = np.concatenate(precision_sums) / draws[:, positive].sum(1)

    return mean


def _confusions(label: Integers, predicted: Integers, classes: int, draws: Draws) -> Array:
    """Return (draws, K, K) counts with the reference in rows."""
    cells = label * classes + predicted
    order = np.argsort(cells, kind="stable")
    # Omit cells without cases: `reduceat` cannot sum an empty range.
    present, first = np.unique(cells[order], return_index=True)
    counts = np.zeros((len(draws), classes * classes), np.int64)
    counts[:, present] = np.add.reduceat(draws[:, order], first, axis=1, dtype=np.int64)
    return counts.reshape(-1, classes, classes)


def t_interval(differences: Sequence[float], least_sd: float = 1e-9) -> Interval | None:
    """Return the 95 % interval of a mean difference by Student's t, None for one difference or equal ones."""
    count = len(differences)
    if count < 2 or (sd := stdev(differences)) <= least_sd:
        return None

    # mean ± t(0.975; n - 1) · s / √n
    mean = fmean(differences)
    half = float(stdtrit(count - 1, 0.975)) * sd / count**0.5
    return mean - half, mean + half
