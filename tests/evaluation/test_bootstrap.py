"""Bootstrap intervals against scipy.stats.bootstrap and scikit-learn, on fixed arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    roc_auc_score,
)

from medfl.evaluation import bootstrap as intervals, findings, numbers
from medfl.evaluation.bootstrap import Draws, Interval
from medfl.evaluation.metrics import Cases
from medfl.problem.tasks import KINDS


def cases(
    count: int = 90, classes: int = 3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels, predicted classes and probabilities with ties among them."""
    draw = np.random.default_rng(seed)
    label = np.arange(count) % classes
    scores = np.round(draw.dirichlet(np.ones(classes), count) + 0.5 * np.eye(classes)[label], 2)
    probabilities = scores / scores.sum(1, keepdims=True)
    return label, probabilities.argmax(1), probabilities


def intervals_of(task: str, values: dict[str, np.ndarray], times: Draws) -> dict[str, Interval]:
    count = len(next(iter(values.values())))
    tensors = {name: torch.from_numpy(column) for name, column in values.items()}
    given = Cases(tuple(map(str, range(count))), tensors)
    return KINDS[task].intervals(given, KINDS[task].redrawn(given, times))


def classified(
    label: np.ndarray, predicted: np.ndarray, probabilities: np.ndarray | None, times: Draws
) -> dict[str, Interval]:
    values = {"label": label, "predicted": predicted}
    if probabilities is not None:
        values["probabilities"] = probabilities
    return intervals_of("classification", values, times)


def test_a_draw_takes_as_many_of_each_stratum_as_there_are() -> None:
    strata = np.array([0, 1, 1, 2, 2, 2, 1])
    times = intervals.draw(strata, 3, 50)
    assert times.shape == (50, 7)
    for stratum, size in ((0, 1), (1, 3), (2, 3)):
        assert (times[:, strata == stratum].sum(1) == size).all()
    assert (times == intervals.draw(strata, 3, 50)).all()
    assert (times != intervals.draw(strata, 4, 50)).any()


def test_blocks_of_draws_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    label, _, probabilities = cases()
    whole = intervals.draw(label, 0, 40)
    areas = intervals.areas(label, probabilities, whole)
    monkeypatch.setattr(intervals, "_DRAWN_AT_ONCE", 7 * 30)
    monkeypatch.setattr(intervals, "_BLOCK", 7)
    assert (intervals.draw(label, 0, 40) == whole).all()
    assert intervals.areas(label, probabilities, whole) == pytest.approx(areas, abs=1e-12)


def test_mean_as_scipy() -> None:
    values = np.random.default_rng(1).beta(5, 2, 37)
    theirs = bootstrap(
        (values,), np.mean, n_resamples=1000, method="percentile", rng=np.random.default_rng(11)
    )
    ours = intervals_of("segmentation", {"dice": values}, intervals.draw(np.zeros(37, int), 11))[
        "dice"
    ]
    assert ours == pytest.approx(tuple(theirs.confidence_interval), abs=1e-6)


def test_stratified_balanced_accuracy_as_scipy() -> None:
    label, predicted, _ = cases(80)
    hits = [(predicted == label)[label == c].astype(float) for c in range(3)]

    def statistic(*parts: np.ndarray, axis: int) -> np.ndarray:
        return np.mean([part.mean(axis=axis) for part in parts], axis=0)

    theirs = bootstrap(
        hits, statistic, n_resamples=1000, method="percentile", rng=np.random.default_rng(5)
    )
    ours = classified(label, predicted, None, intervals.draw(label, 5))
    assert ours["balanced_accuracy"] == pytest.approx(tuple(theirs.confidence_interval), abs=1e-6)
    assert "auroc" not in ours


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_every_draw_as_scikit_learn_on_the_cases_drawn(classes: int) -> None:
    """A draw that takes a case twice is the data set with that case twice."""
    label, predicted, probabilities = cases(60, classes)
    times = intervals.draw(label, 2, 25)
    expected: dict[str, list[float]] = {
        "balanced_accuracy": [],
        "f1_macro": [],
        "auroc": [],
        "accuracy": [],
    }
    for row in times:
        taken = np.repeat(np.arange(60), row)
        y, p = label[taken], probabilities[taken]
        expected["accuracy"].append(float((y == predicted[taken]).mean()))
        expected["balanced_accuracy"].append(balanced_accuracy_score(y, predicted[taken]))
        expected["f1_macro"].append(f1_score(y, predicted[taken], average="macro"))
        columns = [1] if classes == 2 else range(classes)
        expected["auroc"].append(float(np.mean([roc_auc_score(y == c, p[:, c]) for c in columns])))
    found = classified(label, predicted, probabilities, times)
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert found[name] == pytest.approx(tuple(np.percentile(values, [2.5, 97.5])), abs=1e-6), (
            name
        )


def test_a_class_without_cases_has_no_area() -> None:
    label, _, probabilities = cases(60)
    label[label == 2] = 1
    areas = intervals.areas(label, probabilities, intervals.draw(label, 0, 10))
    assert np.isnan(areas[:, 2]).all()
    assert not np.isnan(areas[:, :2]).any()
    times = intervals.draw(np.zeros(60, int), 0, 10)
    only = classified(np.zeros(60, int), np.zeros(60, int), probabilities, times)
    assert only == {"accuracy": (1.0, 1.0), "balanced_accuracy": (1.0, 1.0), "f1_macro": (1.0, 1.0)}


def test_cases_without_a_metric_do_not_enter_its_mean() -> None:
    some = np.tile([1.0, np.nan, 3.0], 8)
    values = {"hd95": some, "surface_dice": np.full(24, np.nan)}
    times = intervals.draw(np.zeros(24, int), 0)
    found = intervals_of("segmentation", values, times)
    assert set(found) == {"hd95"}
    known = np.flatnonzero(~np.isnan(some))
    expected = [np.repeat(some[known], row[known]).mean() for row in times]
    assert found["hd95"] == pytest.approx(tuple(np.percentile(expected, [2.5, 97.5])))


@pytest.mark.parametrize("count", [9, 10])
def test_nine_cases_have_no_interval_and_ten_have_one(count: int) -> None:
    """Of ten values 0 and 1 by turns; the tenth decides, also where others have no value."""
    values = np.arange(count) % 2.0
    padded = np.concatenate([values, np.full(5, np.nan)])
    label, predicted = np.arange(count) % 2, np.zeros(count, int)
    probabilities = np.random.default_rng(0).dirichlet([1, 1], count)
    found = intervals_of(
        "segmentation", {"dice": padded}, intervals.draw(np.zeros(len(padded), int), 0)
    )
    times = intervals.draw(label, 0)
    found_classes = classified(label, predicted, probabilities, times)
    assert set(found) == ({"dice"} if count == 10 else set())
    assert set(found_classes) == (
        {"accuracy", "balanced_accuracy", "f1_macro", "auroc"} if count == 10 else set()
    )


def test_findings_of_every_draw_as_scikit_learn() -> None:
    """Unknown findings count nowhere, and a finding that too few cases have has no value."""
    draw = np.random.default_rng(3)
    truth = draw.integers(0, 2, (70, 3)).astype(np.int8)
    truth[draw.random((70, 3)) < 0.2] = -1
    truth[:, 2] = np.where(np.arange(70) < 5, 1, 0)
    scores = np.round(draw.random((70, 3)) + 0.3 * (truth == 1), 1)
    decisions = (scores >= 0.6).astype(np.int8)
    times = intervals.draw(np.zeros(70, int), 0, 20)
    found = findings.redrawn(scores, truth, decisions, times)
    assert np.isnan(found["auroc"][:, 2]).all()
    for row, counts in enumerate(times):
        for k in (0, 1):
            taken = np.repeat(np.arange(70), counts)
            taken = taken[truth[taken, k] >= 0]
            y, score, called = truth[taken, k], scores[taken, k], decisions[taken, k]
            expected = {
                "auroc": roc_auc_score(y, score),
                "average_precision": average_precision_score(y, score),
                "f1": f1_score(y, called),
                "sensitivity": called[y == 1].mean(),
                "specificity": 1 - called[y == 0].mean(),
            }
            assert {name: found[name][row, k] for name in found} == pytest.approx(expected)

    values = {"findings": truth, "probabilities": scores, "decisions": decisions}
    ends = intervals_of("multilabel", values, times)
    assert ends["auroc"] == pytest.approx(
        tuple(np.percentile(found["auroc"][:, :2].mean(1), [2.5, 97.5]))
    )


def test_numbers_of_every_draw_are_those_of_the_cases_drawn() -> None:
    draw = np.random.default_rng(4)
    target = 1000 + draw.normal(0, 3, (50, 2))
    target[:7, 1] = np.nan
    prediction = np.nan_to_num(target, nan=1000) + draw.normal(0, 1, (50, 2))
    times = intervals.draw(np.zeros(50, int), 0, 20)
    found = numbers.redrawn(prediction, target, times)
    for row, counts in enumerate(times):
        taken = np.repeat(np.arange(50), counts)
        for d in (0, 1):
            expected = numbers.of_one(target[taken, d], prediction[taken, d])
            assert {name: found[name][row, d] for name in found} == pytest.approx(expected)

    few = {"target": target[:12], "prediction": prediction[:12]}
    some = intervals_of("regression", few, intervals.draw(np.zeros(12, int), 0))
    assert set(some) == {"mae", "rmse", "r2", "pearson"}


def test_draws_of_very_many_cases_are_fewer() -> None:
    """A thousand draws of a million cases were four gigabytes, and the report took more than ten minutes."""
    assert intervals.draw(np.zeros(20_000, int), 0).shape == (1000, 20_000)
    assert intervals.draw(np.zeros(100_000, int), 0).shape == (200, 100_000)
