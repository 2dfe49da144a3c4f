"""Receiver operating characteristic curves of a classifier: one per class, against the rest, and their mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from medfl.core import Flags, Floats, Integers

_POINTS = 201  # maximum per curve, more than a chart can show


@dataclass(frozen=True, eq=False)
class Curve:
    """The curve of one class against the rest.

    Attributes:
        index: of the class.
        fpr, tpr: (P,) false and true positive rates, increasing.
        area: under the whole curve.
        positives: number of cases of the class.
        cases: number of all cases.
    """

    index: int
    fpr: Floats
    tpr: Floats
    area: float
    positives: int
    cases: int


def curves(label: Integers, probabilities: Floats) -> list[Curve]:
    """Return the curve of each class that some but not all cases have; with two classes only the second's.

    Takes the class indices (N,) and the probabilities (N, K) of N cases.
    """
    matches = []
    classes = probabilities.shape[1]
    for c in [1] if classes == 2 else range(classes):
        matches += curve(c, label == c, probabilities[:, c])

    return matches


def curve(index: int, positive: Flags, score: Floats) -> list[Curve]:
    """Return the curve of one class or finding of cases (N,), [] if all cases have it or none."""
    # Imported here because it takes a second.
    from sklearn.metrics import roc_auc_score, roc_curve

    if not positive.any() or positive.all():
        return []

    fpr, tpr, _ = roc_curve(positive, score)
    if len(fpr) > _POINTS + 1:
        fpr, tpr = _at_grid(fpr, tpr)

    area = float(roc_auc_score(positive, score))
    return [Curve(index, fpr, tpr, area, int(positive.sum()), len(positive))]


def macro(curves: list[Curve]) -> tuple[Floats, Floats]:
    """Return the mean of the curves at equal false positive rates, (P,) each; it starts at (0, 0)."""
    on_grid = [_at_grid(curve.fpr, curve.tpr) for curve in curves]
    return on_grid[0][0], np.mean([tpr for _, tpr in on_grid], axis=0)


def _at_grid(fpr: Floats, tpr: Floats) -> tuple[Floats, Floats]:
    """Return a curve at equal steps from (0, 0); a vertical part is represented by its upper end."""
    grid = np.linspace(0, 1, _POINTS)
    return np.concatenate([[0.0], grid]), np.concatenate([[0.0], np.interp(grid, fpr, tpr)])
