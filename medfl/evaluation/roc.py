"""Receiver operating characteristic curves of a classifier: one a class, against the others, and their mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from medfl.core.arrays import Flags, Floats, Integers

_POINTS = 201  # of a curve at most, which is more than a chart shows


@dataclass(frozen=True, eq=False)
class Curve:
    """The curve of one class against the others.

    Attributes:
        index: of the class.
        fpr, tpr: (P,) rates of false and true positives, rising.
        area: under the whole curve.
        positives: cases of the class.
        cases: all.
    """

    index: int
    fpr: Floats
    tpr: Floats
    area: float
    positives: int
    cases: int


def curves(label: Integers, probabilities: Floats) -> list[Curve]:
    """Return the curve of each class that some but not all cases have; of two classes only the second's.

    Of N cases, the class indices (N,) and the probabilities (N, K).
    """
    matches = []
    classes = probabilities.shape[1]
    for c in [1] if classes == 2 else range(classes):
        matches += curve(c, label == c, probabilities[:, c])

    return matches


def curve(index: int, positive: Flags, score: Floats) -> list[Curve]:
    """Return the curve of one class or finding of cases (N,), [] where all have it or none."""
    # Here, because it takes a second to import.
    from sklearn.metrics import roc_auc_score, roc_curve

    if not positive.any() or positive.all():
        return []

    fpr, tpr, _ = roc_curve(positive, score)
    if len(fpr) > _POINTS + 1:
        fpr, tpr = _at_grid(fpr, tpr)

    area = float(roc_auc_score(positive, score))
    return [Curve(index, fpr, tpr, area, int(positive.sum()), len(positive))]


def macro(curves: list[Curve]) -> tuple[Floats, Floats]:
    """Return the mean of the curves at equal rates of false positives, (P,) each; it begins at (0, 0)."""
    on_grid = [_at_grid(curve.fpr, curve.tpr) for curve in curves]
    return on_grid[0][0], np.mean([tpr for _, tpr in on_grid], axis=0)


def _at_grid(fpr: Floats, tpr: Floats) -> tuple[Floats, Floats]:
    """Return a curve at equal steps, from (0, 0); of a vertical part its upper end."""
    grid = np.linspace(0, 1, _POINTS)
    return np.concatenate([[0.0], grid]), np.concatenate([[0.0], np.interp(grid, fpr, tpr)])
