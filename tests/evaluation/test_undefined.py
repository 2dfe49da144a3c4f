"""What is said of a metric without a value: against scikit-learn and NumPy, which have none either."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import roc_auc_score

from medfl.evaluation.metrics import Cases, summarise
from medfl.evaluation.undefined import of_rounds, of_tests, reason, told_by


def classified(labels: list[int], classes: int = 2) -> Cases:
    draws = torch.Generator().manual_seed(0)
    probabilities = torch.rand(len(labels), classes, generator=draws).softmax(1)
    ids = tuple(map(str, range(len(labels))))
    return Cases(ids, {"probabilities": probabilities, "label": torch.tensor(labels)})


def measured(**columns: list[float]) -> Cases:
    count = len(next(iter(columns.values())))
    values = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in columns.items()}
    return Cases(tuple(map(str, range(count))), values)


@pytest.mark.parametrize("labels", [[0, 0, 0], [1, 1], [0, 1, 0, 1]])
def test_auroc_is_undefined_where_scikit_learn_has_none(labels: list[int]) -> None:
    cases = classified(labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UndefinedMetricWarning)
        try:
            theirs = roc_auc_score(labels, cases.values["probabilities"][:, 1].numpy())
        except ValueError:  # scikit-learn before 1.6
            theirs = np.nan
    why = reason("auroc", summarise(cases), cases)
    assert bool(why) == np.isnan(theirs)
    assert why in ("", "all of them are of one class")


def test_reasons() -> None:
    nan = float("nan")
    assert reason("dice", {}, measured(dice=[])) == "there are none"
    assert reason("dice", None, None) == "there are none"
    empty = measured(iou=[nan, nan], dice=[1, 0], dice_liver=[nan, nan])
    assert reason("iou", summarise(empty), empty) == "no reference mask has a structure"
    odd = measured(iou=[nan, nan], dice=[1, 0], dice_liver=[nan, 1])
    assert reason("iou", summarise(odd), odd) == "none of them has it"
    assert reason("dice", summarise(odd), odd) == ""
    assert reason("hd95", summarise(odd), odd).startswith("it is none of dice, ")


@pytest.mark.parametrize("also", [{}, {"decisions": torch.ones(30, 2)}])
def test_a_bundle_s_own_metric_has_reasons_of_its_own(also: dict[str, torch.Tensor]) -> None:
    """Each finding is there and absent often enough: nothing of medfl's rule is the reason."""
    present = torch.tensor([[1, 0], [0, 1]] * 15)
    cases = Cases(
        tuple(map(str, range(30))),
        {"probabilities": torch.rand(30, 2), "findings": present, **also},
    )
    assert reason("auroc", summarise(cases), cases) == ""
    assert reason("val_roc", summarise(cases), cases) == "the bundle's own metric has no value"


def test_numbers_of_which_one_is_unknown() -> None:
    """Their mean is of all numbers, and was called none of those that there are."""
    nan = float("nan")
    target = torch.tensor([[1.0, nan], [2.0, nan]], dtype=torch.float64)
    cases = Cases(("a", "b"), {"prediction": torch.zeros_like(target), "target": target})
    assert reason("mae", summarise(cases), cases) == "1 of the 2 numbers are known of none"
    target[:] = nan
    assert reason("mae", summarise(cases), cases) == "the number of none is known"


def test_rounds_are_counted_and_named() -> None:
    assert of_rounds("iou", {1: "", 2: ""}) == []
    assert of_rounds("iou", {}) == []
    (line,) = of_rounds("iou", {1: "none of them has it", 2: "none of them has it", 3: ""})
    assert line == (
        "iou is undefined on the validation images in 2 of 3 rounds (1, 2): none of them has it; "
        "the best round is one of the others"
    )
    (line,) = of_rounds("auroc", {n: "there are none" for n in range(1, 10)})
    assert line == (
        "auroc is undefined on the validation images in 9 of 9 rounds: there are none; there is no best round"
    )
    (line,) = of_rounds("auroc", {**dict.fromkeys(range(1, 10), "x"), 10: ""})
    assert "(1, 2, 3, 4, 5, 6 and 3 more)" in line


def test_test_images_and_sites() -> None:
    nan = float("nan")
    cases = measured(iou=[nan, 0.5, 1.0])
    lines = of_tests("iou", summarise(cases), cases, {"a": "", "b": "there are none", "c": ""})
    assert lines == [
        "iou is the mean over 2 of 3 test images: the others have none",
        "iou is undefined on the test images of b (there are none); the mean is over 2 of 3 sites",
    ]
    none = measured(iou=[nan])
    assert of_tests("iou", summarise(none), none, {"a": "none of them has it"}) == [
        "iou is undefined on the test images: none of them has it"
    ]
    full = measured(iou=[0.5])
    assert of_tests("iou", summarise(full), full, {"a": ""}) == []


def test_a_line_is_said_once_with_those_who_say_it() -> None:
    said = [("fold-1", ["x"]), ("fold-2", ["y"]), ("fold-3", ["x"]), ("fold-4", [])]
    assert told_by(said) == ["x (fold-1; fold-3)", "y (fold-2)"]
