"""The area under the ROC curve with DeLong's variance and interval.

E. R. DeLong, D. M. DeLong, D. L. Clarke-Pearson: Comparing the areas under two or more correlated receiver operating
characteristic curves, Biometrics 44 (1988). With m positives X, n negatives Y and psi(x, y) = 1, 1/2 or 0 for x >,
= or < y, the area of a score is the mean of psi over all pairs; its structural components are

    V10(X_i) = mean_j psi(X_i, Y_j),    V01(Y_j) = mean_i psi(X_i, Y_j),

and the variance of the area is var(V10) / m + var(V01) / n. The components come from midranks
(X. Sun, W. Xu: Fast implementation of DeLong's algorithm, IEEE Signal Processing Letters 21, 2014), O(N log N).

Cases are treated as independent: if patients have several images, the true intervals are wider. Intervals are 95 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.stats import norm, rankdata

from medfl.core import Array, InputError
from medfl.evaluation.bootstrap import LEVEL


@dataclass(frozen=True)
class Area:
    """An area under the ROC curve.

    Attributes:
        value: the area, 0 to 1.
        low, high: its interval, clipped to 0 and 1; a point if the score separates the classes perfectly, since the
            variance is then 0.
        variance: DeLong's; NaN with fewer than two positives or negatives, as are low and high.
        positives, negatives: numbers of cases.
    """

    value: float
    low: float
    high: float
    variance: float
    positives: int
    negatives: int


def area(positive: Array, score: Array) -> Area:
    """Return the area of a score (N,) of binary cases, with its interval.

    Raises:
        InputError: there are no positives or no negatives, scores that are not finite, or not one a case.
    """
    chosen = np.asarray(positive).astype(bool)
    values = np.asarray(score, dtype=np.float64)
    m = int(chosen.sum())
    n = int((~chosen).sum())

    if chosen.ndim != 1 or values.shape != chosen.shape:
        raise InputError(
            f"scores {values.shape} of cases {chosen.shape}",
            "scores (N,) of cases (N,)",
            "give each case a score",
        )

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

    above = values[chosen]
    below = values[~chosen]
    ranks = rankdata(np.concatenate([above, below]))
    # V10(X_i): share of the negatives below a positive, which is its rank among all minus its rank
    # among the positives. Midranks count a tie as one half, as psi does.
    v10 = (ranks[:m] - rankdata(above)) / n
    # V01(Y_j): share of the positives above a negative.
    v01 = 1 - (ranks[m:] - rankdata(below)) / m
    value = float(v10.mean())
    variance = low = high = math.nan
    # One positive or one negative has no variance.
    if m > 1 and n > 1:
        variance = float(np.cov(v10) / m + np.cov(v01) / n)
        half = float(norm.isf((1 - LEVEL) / 2)) * math.sqrt(variance)
        low = min(1.0, max(0.0, value - half))
        high = min(1.0, max(0.0, value + half))

    return Area(value, low, high, variance, m, n)
