"""The area under the ROC curve with DeLong's variance: intervals, and the paired test of two scores on the same cases.

E. R. DeLong, D. M. DeLong, D. L. Clarke-Pearson: Comparing the areas under two or more correlated receiver operating
characteristic curves, Biometrics 44 (1988). With m positives X and n negatives Y and psi(x, y) = 1, 1/2 or 0 for x >,
= or < y, a score's area is the mean of psi over all pairs; its structural components are

    V10(X_i) = mean_j psi(X_i, Y_j),    V01(Y_j) = mean_i psi(X_i, Y_j),

and the covariance of the areas of several scores is cov(V10) / m + cov(V01) / n. The components come from midranks
(X. Sun, W. Xu: Fast implementation of DeLong's algorithm, IEEE Signal Processing Letters 21, 2014), O(N log N).

Cases count as independent: where one patient has several images, the true intervals are wider. Intervals are of 95 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, rankdata

from medfl.core.arrays import Array, Floats
from medfl.core.errors import InputError
from medfl.evaluation.bootstrap import LEVEL


@dataclass(frozen=True)
class Area:
    """An area under the ROC curve.

    Attributes:
        value: the area, 0 to 1.
        low, high: its interval, cut at 0 and 1; a point where the score separates the classes entirely, for the
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
    """The difference between the areas of two scores of the same cases.

    Attributes:
        first, second: the areas.
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


def covariance(positive: Array, scores: Array) -> tuple[Floats, Floats]:
    """Return the areas (R,) of R scores of the same cases and their covariance (R, R).

    Args:
        positive: (N,), true for the positives.
        scores: (R, N), larger for more likely positive.

    Raises:
        InputError: the shapes do not fit, a score is not finite, or one of the classes has no case.
    """
    chosen = np.asarray(positive).astype(bool)
    values = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    m = int(chosen.sum())
    n = int((~chosen).sum())

    if chosen.ndim != 1 or values.shape[1] != len(chosen):
        shapes = f"scores {values.shape} of cases {chosen.shape}"
        raise InputError(shapes, "scores (R, N) of cases (N,)", "give each case a score")

    if not np.isfinite(values).all():
        raise InputError(
            "scores with NaN or infinite values",
            "every case has a finite score",
            "leave out the cases without one",
        )
    if not m or not n:
        raise InputError(
            f"an area under the ROC curve of {m} positives and {n} negatives",
            "at least one of each",
            "leave out this class, or add cases",
        )

    above = values[:, chosen]
    below = values[:, ~chosen]
    ranks = rankdata(np.concatenate([above, below], axis=1), axis=1)
    # V10(X_i): share of the negatives below a positive, which is its rank among all less its rank
    # among the positives. Midranks count a tie as one half, as psi does.
    v10 = (ranks[:, :m] - rankdata(above, axis=1)) / n
    # V01(Y_j): share of the positives above a negative.
    v01 = 1 - (ranks[:, m:] - rankdata(below, axis=1)) / m

    return v10.mean(1), _covariance_of_means(v10) + _covariance_of_means(v01)


def area(positive: Array, score: Array) -> Area:
    """Return the area of one score (N,) with its interval; raises as `covariance`."""
    values, variances = covariance(positive, score)
    return _area(positive, float(values[0]), float(variances[0, 0]))


def paired_test(positive: Array, first: Array, second: Array) -> Difference:
    """Compare the areas of two scores (N,) of the same cases; raises as `covariance`."""
    values, covariances = covariance(positive, np.stack([first, second]))
    area_of_first = _area(positive, float(values[0]), float(covariances[0, 0]))
    area_of_second = _area(positive, float(values[1]), float(covariances[1, 1]))
    difference = float(values[0] - values[1])
    # Var(a - b) = Var(a) + Var(b) - 2 Cov(a, b)
    variance = float(covariances[0, 0] + covariances[1, 1] - 2 * covariances[0, 1])

    # Rounding leaves a little of a variance of 0: both scores rank every pair alike, or each
    # separates the classes entirely.
    if variance <= 1e-15:
        p = 1.0 if abs(difference) <= 1e-12 else math.nan
    else:
        p = float(2 * norm.sf(abs(difference) / math.sqrt(variance)))

    half = _half_width(max(variance, 0.0))
    low = difference - half
    high = difference + half
    return Difference(area_of_first, area_of_second, difference, low, high, p)


def _covariance_of_means(components: Floats) -> Floats:
    """Return the covariance (R, R) of the means of components (R, count); NaN for a count of 1."""
    count = components.shape[1]
    if count < 2:
        return np.full((len(components),) * 2, math.nan)
    covariances: Floats = np.atleast_2d(np.cov(components)) / count
    return covariances


def _area(positive: Array, value: float, variance: float) -> Area:
    half = _half_width(variance)
    chosen = np.asarray(positive).astype(bool)
    if math.isfinite(half):
        low = min(1.0, max(0.0, value - half))
        high = min(1.0, max(0.0, value + half))
    else:
        low = high = math.nan

    return Area(value, low, high, variance, int(chosen.sum()), int((~chosen).sum()))


def _half_width(variance: float) -> float:
    return float(norm.isf((1 - LEVEL) / 2)) * math.sqrt(variance)
