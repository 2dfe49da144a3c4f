"""ROC curves: which there are, and their mean."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import auc, roc_auc_score

from medfl.evaluation.roc import curves, macro


def test_two_classes_have_the_seconds_curve_by_hand() -> None:
    """Scores of the second class 0.9 (of it), 0.7 (not), 0.6 (of it), 0.2 (not): three of four pairs are in order."""
    second = np.array([0.9, 0.7, 0.6, 0.2])
    (found,) = curves(np.array([1, 0, 1, 0]), np.stack([1 - second, second], 1))
    assert (found.index, found.positives, found.area) == (1, 2, 0.75)
    assert found.fpr.tolist() == [0, 0, 0.5, 0.5, 1]
    assert found.tpr.tolist() == [0, 0.5, 0.5, 1, 1]


def test_classes_without_cases_have_none_and_long_curves_are_thinned() -> None:
    draw = np.random.default_rng(0)
    label = draw.integers(0, 3, 3000)
    probabilities = draw.dirichlet(np.ones(4), 3000) + 0.2 * np.eye(4)[label]
    found = curves(label, probabilities)
    assert [curve.index for curve in found] == [0, 1, 2]
    for curve in found:
        assert len(curve.fpr) <= 202
        assert curve.area == pytest.approx(
            roc_auc_score(label == curve.index, probabilities[:, curve.index])
        )
        assert auc(curve.fpr, curve.tpr) == pytest.approx(curve.area, abs=5e-3)
    assert curves(np.zeros(5, int), probabilities[:5]) == []


def test_the_mean_curve_is_between_the_classes() -> None:
    """One class is told perfectly (1 at every rate), the other by chance (the diagonal): their mean is (1 + x) / 2."""
    label = np.array([0, 1, 2, 2])
    probabilities = np.array([[0.9, 0.5, 0.1], [0.1, 0.5, 0.2], [0.1, 0.5, 0.3], [0.1, 0.5, 0.4]])
    found = curves(label, probabilities)[:2]
    assert [curve.area for curve in found] == [1.0, 0.5]
    false, true = macro(found)
    assert (false[0], true[0]) == (0, 0)
    assert true[1:] == pytest.approx((1 + false[1:]) / 2, abs=1e-12)
