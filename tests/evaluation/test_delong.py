"""DeLong's areas and variances against the definition over all pairs and against scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from medfl.core.errors import InputError
from medfl.evaluation.delong import area


def cases(count: int, ties: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels (count,) and two correlated scores (2, count), rounded to a few values where ties are wanted."""
    draws = np.random.default_rng(seed)
    positive = draws.permutation(np.arange(count) % 3 == 0)
    shared = draws.normal(size=count) + positive
    scores = np.stack([shared + draws.normal(size=count), shared + 2 * draws.normal(size=count)])
    return positive, np.round(scores) if ties else scores


def by_pairs(positive: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition: psi of every positive with every negative, and its sample covariances, O(m n)."""
    x, y = scores[:, positive], scores[:, ~positive]
    m, n = x.shape[1], y.shape[1]
    psi = np.empty((len(scores), m, n))
    for r in range(len(scores)):
        for i in range(m):
            for j in range(n):
                psi[r, i, j] = 1.0 if x[r, i] > y[r, j] else 0.5 if x[r, i] == y[r, j] else 0.0
    theta = psi.mean((1, 2))
    v10, v01 = psi.mean(2) - theta[:, None], psi.mean(1) - theta[:, None]
    return theta, v10 @ v10.T / (m - 1) / m + v01 @ v01.T / (n - 1) / n


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("count", [12, 61])
def test_area_and_variance_are_those_of_the_definition(count: int, ties: bool) -> None:
    positive, scores = cases(count, ties)
    expected, between = by_pairs(positive, scores)
    for row, score in enumerate(scores):
        found = area(positive, score)
        assert found.value == pytest.approx(expected[row], abs=1e-12)
        assert found.value == pytest.approx(roc_auc_score(positive, score), abs=1e-12)
        assert found.variance == pytest.approx(between[row, row], abs=1e-12)


@pytest.mark.parametrize("ties", [False, True])
def test_the_interval_follows_from_the_variance(ties: bool) -> None:
    positive, scores = cases(61, ties)
    theta, between = by_pairs(positive, scores)
    found = area(positive, scores[0])
    half = 1.959963984540054 * math.sqrt(between[0, 0])
    assert (found.low, found.high) == pytest.approx(
        (theta[0] - half, min(1.0, theta[0] + half)), abs=1e-9
    )
    assert (found.positives, found.negatives) == (21, 40)


def test_each_class_has_the_area_of_scikit_learn() -> None:
    draws = np.random.default_rng(3)
    label = draws.integers(0, 4, 80)
    probabilities = draws.dirichlet(np.ones(4), 80)
    for k in range(4):
        expected = roc_auc_score(label == k, probabilities[:, k])
        assert area(label == k, probabilities[:, k]).value == pytest.approx(expected, abs=1e-12)


def test_the_interval_covers_the_true_area_as_often_as_it_says() -> None:
    """Scores N(1, 1) against N(0, 1): the area is Phi(1 / sqrt 2) = 0.760; 400 draws of 40 + 60 cases."""
    draws, truth = np.random.default_rng(1), norm.cdf(1 / math.sqrt(2))
    positive = np.arange(100) < 40
    covered = 0
    for _ in range(400):
        found = area(positive, draws.normal(size=100) + positive)
        covered += found.low <= truth <= found.high
    assert 0.92 <= covered / 400 <= 0.98


def test_a_score_that_separates_the_classes_has_a_point_as_interval() -> None:
    positive = np.array([0, 0, 1, 1])
    found = area(positive, np.array([0.1, 0.2, 0.8, 0.9]))
    assert (found.value, found.low, found.high, found.variance) == (1, 1, 1, 0)


def test_one_positive_gives_an_area_and_no_interval() -> None:
    found = area(np.array([1, 0, 0]), np.array([0.5, 0.1, 0.7]))
    assert found.value == 0.5
    assert math.isnan(found.low)
    assert math.isnan(found.variance)


@pytest.mark.parametrize(
    ("positive", "score", "told"),
    [
        ([1, 1], [0.1, 0.2], "2 positives and 0 negatives"),
        ([1, 0], [0.1, math.nan], "NaN"),
        ([1, 0, 1], [0.1, 0.2], r"\(2,\) of cases \(3,\)"),
    ],
)
def test_what_has_no_area_is_refused(positive: list[int], score: list[float], told: str) -> None:
    with pytest.raises(InputError, match=told):
        area(np.array(positive), np.array(score))
