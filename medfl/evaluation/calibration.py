"""Calibration of a classifier's probabilities: reliability curve and expected calibration error.

Top-label calibration: among cases whose most probable class has a probability near 0.8, that class should be correct
in 80 %. With cases in M bins of equal width by that probability, the confidence,

    ECE = sum_m |B_m| / N · |acc(B_m) - conf(B_m)|

(M. Naeini, G. Cooper, M. Hauskrecht: Obtaining well calibrated probabilities using Bayesian binning, AAAI 2015;
C. Guo et al.: On calibration of modern neural networks, ICML 2017, with M = 15). A bin includes its upper edge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from medfl.core import Array, Floats, Integers
from medfl.evaluation.bootstrap import Draws

BINS = 15


@dataclass(frozen=True, eq=False)
class Reliability:
    """The reliability curve over the B non-empty bins.

    Attributes:
        confidence: (B,) mean confidence.
        accuracy: (B,) share of correct predictions.
        count: (B,) cases.
        member: (N,) index of each case's bin.
        ece: expected calibration error, 0 to 1.
        bins: number of all bins, including empty ones.
    """

    confidence: Floats
    accuracy: Floats
    count: Integers
    member: Integers
    ece: float
    bins: int


def reliability(confidence: Floats, correct: Array, bins: int = BINS) -> Reliability:
    """Return the reliability curve of N > 0 cases, in bins of equal width between 0 and 1.

    `confidence` (N,) is the probability of the predicted class, `correct` (N,) whether that class is the reference.
    """
    from sklearn.calibration import calibration_curve  # imported here because it takes a second

    right = np.asarray(correct).astype(bool)
    edges = np.linspace(0, 1, bins + 1)
    # "left", as in scikit-learn's curve: a confidence on an edge belongs to the bin that ends there.
    _, member = np.unique(np.searchsorted(edges[1:-1], confidence), return_inverse=True)
    accuracy, mean = calibration_curve(right, confidence, n_bins=bins, strategy="uniform")
    count = np.bincount(member)
    ece = float((count * np.abs(accuracy - mean)).sum() / len(confidence))

    return Reliability(mean, accuracy, count, member, ece, bins)


def redrawn(
    curve: Reliability, confidence: Floats, correct: Array, case: Integers, draws: Draws
) -> tuple[Floats, Floats]:
    """Return the ECE (draws,) and each bin's accuracy (draws, B) over draws, NaN if a draw has no case in the bin.

    The curve is that of all predictions (N,), of which a case may have several; `draws` (draws, C) is how often each
    draw of `evaluation.bootstrap` contains a case, `case` (N,) which case each prediction is of.
    """
    right = np.asarray(correct).astype(np.float64)
    bins = len(curve.count)
    cells = case * bins + curve.member
    # (C, B), the sums over a case's predictions in a bin: how many, how many right, of (right - confidence)
    sums = [
        np.bincount(cells, weights, draws.shape[1] * bins).reshape(-1, bins)
        for weights in (np.ones(len(cells)), right, right - confidence)
    ]
    cases, hits, gaps = np.split(draws @ np.concatenate(sums, 1), 3, 1)
    with np.errstate(invalid="ignore"):
        return np.abs(gaps).sum(1) / cases.sum(1), hits / cases
