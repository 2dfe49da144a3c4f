"""Reliability and ECE by hand, and against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.calibration import calibration_curve

from medfl.evaluation.bootstrap import draw
from medfl.evaluation.calibration import redrawn, reliability


def test_ece_by_hand() -> None:
    """Five bins; 0.4 belongs to the second, as its upper edge.

    Bin 2 (0.2, 0.4]: confidences 0.3, 0.4, none right: |0 - 0.35| = 0.35, weight 2/6.
    Bin 3 (0.4, 0.6]: 0.5, right: |1 - 0.5| = 0.5, weight 1/6.
    Bin 5 (0.8, 1.0]: 0.9, 0.9, 1.0, two right: |2/3 - 14/15| = 4/15, weight 3/6.
    """
    confidence = np.array([0.3, 0.4, 0.5, 0.9, 0.9, 1.0])
    correct = np.array([0, 0, 1, 1, 0, 1])
    found = reliability(confidence, correct, 5)
    assert found.ece == pytest.approx(0.35 * 2 / 6 + 0.5 / 6 + 4 / 15 * 3 / 6, abs=1e-12)
    assert found.count.tolist() == [2, 1, 3]
    assert found.confidence == pytest.approx([0.35, 0.5, 14 / 15])
    assert found.accuracy == pytest.approx([0, 1, 2 / 3])
    assert found.member.tolist() == [0, 0, 1, 2, 2, 2]


def test_certain_and_right_is_calibrated() -> None:
    assert reliability(np.ones(4), np.ones(4)).ece == 0
    assert reliability(np.ones(4), np.zeros(4)).ece == 1


def test_bins_are_those_of_scikit_learn() -> None:
    draws = np.random.default_rng(0)
    confidence = np.round(draws.uniform(0, 1, 400), 2)  # some on the edges
    correct = draws.random(400) < confidence
    found = reliability(confidence, correct, 10)
    accuracy, mean = calibration_curve(correct, confidence, n_bins=10)
    for b in range(len(found.count)):
        own = found.member == b
        assert confidence[own].mean() == pytest.approx(mean[b], abs=1e-12)
        assert correct[own].mean() == pytest.approx(accuracy[b], abs=1e-12)
        assert own.sum() == found.count[b]


def test_a_draw_is_the_reliability_of_the_cases_drawn() -> None:
    draws = np.random.default_rng(3)
    confidence = draws.uniform(0.3, 1, 50)
    correct = draws.random(50) < confidence
    times = draw(np.zeros(50, int), 0, 20)
    eces, accuracy = redrawn(
        reliability(confidence, correct), confidence, correct, np.arange(50), times
    )
    assert accuracy.shape == (20, reliability(confidence, correct).count.size)
    for row, ece, by_bin in zip(times, eces, accuracy, strict=True):
        taken = np.repeat(np.arange(50), row)
        again = reliability(confidence[taken], correct[taken])
        assert ece == pytest.approx(again.ece, abs=1e-12)
        assert by_bin[~np.isnan(by_bin)] == pytest.approx(again.accuracy, abs=1e-12)


def test_predictions_of_one_case_are_drawn_together() -> None:
    """Two findings each of 50 cases: a draw has both as often as it has the case."""
    draws = np.random.default_rng(3)
    confidence = draws.uniform(0, 1, 100)
    correct = draws.random(100) < confidence
    case = np.repeat(np.arange(50), 2)
    times = draw(np.zeros(50, int), 0, 20)
    curve = reliability(confidence, correct)
    of_cases = redrawn(curve, confidence, correct, case, times)
    of_each = redrawn(curve, confidence, correct, np.arange(100), times[:, case])
    for found, expected in zip(of_cases, of_each, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-12)
