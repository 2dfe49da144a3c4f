"""The area under the ROC curve with DeLong's variance: intervals, and the paired test of two scores on the same cases.

E. R. DeLong, D. M. DeLong, D. L. Clarke-Pearson: Comparing the areas under two or more correlated receiver operating
characteristic curves, Biometrics 44 (1988). With m positives X and n negatives Y and psi(x, y) = 1, 1/2 or 0 for x >,
= or < y, a score's area is the mean of psi over all pairs; its structural components are

    V10(X_i) = mean_j psi(X_i, Y_j),    V01(Y_j) = mean_i psi(X_i, Y_j),

and the covariance of the areas of several scores is cov(V10) / m + cov(V01) / n. The components come from midranks
(X. Sun, W. Xu: Fast implementation of DeLong's algorithm, IEEE Signal Processing Letters 21, 2014), O(N log N).

Cases count as independent: where one patient has several images, the true intervals are wider.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, rankdata

from medfl.core.errors import InputError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Area:
    """An area under the ROC curve.

    Attributes:
        value: the area, 0 to 1.
        low, high: its interval, cut at 0 and 1; where the score separates the classes entirely it is a point, for the
            variance is then 0.
        variance: DeLong's; NaN with fewer than two positives or negatives, and so are low and high.
        positives, negatives: cases.
    """

    value: float
    low: float
    high: float
    variance: float
    positives: int
    negatives: int


@dataclass(frozen=True)
class Difference:
    """Two scores of the same cases compared.

    Attributes:
        first, second: their areas.
        value: first minus second.
        low, high: its interval.
        p: two-sided; 1 for scores that rank alike, NaN for others whose difference has no variance.
    """

    first: Area
    second: Area
    value: float
    low: float
    high: float
    p: float


def covariance(positive: NDArray[Any], scores: NDArray[Any]) -> tuple[Floats, Floats]:
    """Return the areas (R,) of R scores of the same cases and their covariance (R, R).

    Args:
        positive: (N,), true for the positives.
        scores: (R, N), larger for more likely positive.

    Raises:
        InputError: the shapes do not fit, a score is not finite, or one of the classes has no case.
    """
    chosen, values = np.asarray(positive).astype(bool), np.atleast_2d(np.asarray(scores, dtype=np.float64))
    m, n = int(chosen.sum()), int((~chosen).sum())
    if chosen.ndim != 1 or values.shape[1] != len(chosen):
        raise InputError(f"scores {values.shape} of cases {chosen.shape}", "(R, N) of cases (N,)", "give as many")
    if not np.isfinite(values).all():
        raise InputError("scores with NaN or infinite values", "every case has a finite score", "leave the others out")
    if not m or not n:
        raise InputError(
            f"an area under the ROC curve of {m} positives and {n} negatives", "at least one of each", "leave it out"
        )
    above, below = values[:, chosen], values[:, ~chosen]
    among_all = rankdata(np.concatenate([above, below], axis=1), axis=1)
    v10 = (among_all[:, :m] - rankdata(above, axis=1)) / n  # negatives below each positive
    v01 = 1 - (among_all[:, m:] - rankdata(below, axis=1)) / m  # positives above each negative
    return v10.mean(1), _of_mean(v10) + _of_mean(v01)


def area(positive: NDArray[Any], score: NDArray[Any], level: float = 0.95) -> Area:
    """Return the area of one score (N,) with its interval.

    Raises:
        InputError: as `covariance`, or a level outside 0 to 1.
    """
    values, variances = covariance(positive, score)
    return _area(positive, float(values[0]), float(variances[0, 0]), level)


def one_vs_rest(label: NDArray[Any], probabilities: NDArray[Any], level: float = 0.95) -> dict[int, Area]:
    """Return the area of each class against all others; classes without a case, or without any other, have none.

    Args:
        label: (N,) class indices.
        probabilities: (N, K).
        level: of the intervals.

    Raises:
        InputError: as `area`.
    """
    found = {k: label == k for k in range(probabilities.shape[1])}
    return {k: area(own, probabilities[:, k], level) for k, own in found.items() if 0 < own.sum() < len(label)}


def paired_test(positive: NDArray[Any], first: NDArray[Any], second: NDArray[Any], level: float = 0.95) -> Difference:
    """Compare the areas of two scores (N,) of the same cases.

    Raises:
        InputError: as `covariance`.
    """
    values, between = covariance(positive, np.stack([first, second]))
    one, other = (_area(positive, float(values[i]), float(between[i, i]), level) for i in (0, 1))
    difference = float(values[0] - values[1])
    variance = float(between[0, 0] + between[1, 1] - 2 * between[0, 1])
    if variance <= 1e-15:  # both rank every pair alike, or each is constant over the classes
        p = 1.0 if abs(difference) <= 1e-12 else math.nan
    else:
        p = float(2 * norm.sf(abs(difference) / math.sqrt(variance)))
    half = _half_width(max(variance, 0.0), level)
    return Difference(one, other, difference, difference - half, difference + half, p)


def _of_mean(components: Floats) -> Floats:
    """Return the covariance (R, R) of the means of components (R, count); NaN for a single one."""
    count = components.shape[1]
    if count < 2:
        return np.full((len(components),) * 2, math.nan)
    found: Floats = np.atleast_2d(np.cov(components)) / count
    return found


def _area(positive: NDArray[Any], value: float, variance: float, level: float) -> Area:
    half, chosen = _half_width(variance, level), np.asarray(positive).astype(bool)
    low, high = (min(1.0, max(0.0, end)) if math.isfinite(end) else math.nan for end in (value - half, value + half))
    return Area(value, low, high, variance, int(chosen.sum()), int((~chosen).sum()))


def _half_width(variance: float, level: float) -> float:
    if not 0 < level < 1:
        raise InputError(f"level {level:g}", "a number between 0 and 1", "give 0.95")
    return float(norm.isf((1 - level) / 2)) * math.sqrt(variance)
