"""Every metric by hand on a few cases, and against scikit-learn on many."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, roc_auc_score

from medfl.core.errors import InputError, RunError
from medfl.evaluation.metrics import (
    METRICS,
    Cases,
    confusion,
    higher_is_better,
    is_share,
    spread,
    summarise,
    title,
    without_repeats,
)
from medfl.problem.tasks import KINDS


def classified(
    labels: list[int], probabilities: list[list[float]], losses: list[float] | None = None
) -> Cases:
    values = {
        "probabilities": torch.tensor(probabilities, dtype=torch.float32),
        "label": torch.tensor(labels),
    }
    if losses is not None:
        values["loss"] = torch.tensor(losses, dtype=torch.float32)
    return Cases(tuple(f"case-{i}" for i in range(len(labels))), values)


@pytest.fixture
def four() -> Cases:
    """Labels 0 0 1 2; predictions 0 1 1 1."""
    rows = [[0.8, 0.1, 0.1], [0.3, 0.5, 0.2], [0.2, 0.7, 0.1], [0.1, 0.6, 0.3]]
    return classified([0, 0, 1, 2], rows, [0.25, 0.5, 0.75, 1.5])


def test_by_hand(four: Cases) -> None:
    """Three classes by hand.

    Recall: 1/2, 1, 0. F1: class 0 precision 1, recall 1/2: 2/3; class 1 precision 1/3, recall 1: 1/2; class 2: 0.
    AUROC: class 0 scores .8 .3 against .2 .1: 1; class 1 .7 against .1 .5 .6: 1; class 2 .3 against .1 .2 .1: 1.
    """
    result = summarise(four)
    assert list(result) == ["accuracy", "balanced_accuracy", "f1_macro", "auroc", "loss"]
    assert result["accuracy"] == 0.5
    assert result["balanced_accuracy"] == 0.5
    assert result["f1_macro"] == pytest.approx((2 / 3 + 1 / 2) / 3)
    assert result["auroc"] == 1.0
    assert result["loss"] == 0.75
    assert all(type(value) is float for value in result.values())


def test_auroc_with_ties_by_hand() -> None:
    """Class 1 scores: positives .5 .9, negatives .5 .2. Pairs: tie 1/2, win, win, win = 3.5 of 4."""
    cases = classified([1, 1, 0, 0], [[0.5, 0.5], [0.1, 0.9], [0.5, 0.5], [0.8, 0.2]])
    assert summarise(cases)["auroc"] == 0.875


def test_absent_class_is_left_out_of_recall_and_counts_in_f1_only_if_predicted() -> None:
    """Labels 0 0 1, predictions 0 2 1 of four classes: recall over 0 and 1; F1 over 0, 1 and 2; class 3 nowhere."""
    cases = classified(
        [0, 0, 1], [[0.7, 0.1, 0.1, 0.1], [0.2, 0.1, 0.6, 0.1], [0.0, 1.0, 0.0, 0.0]]
    )
    result = summarise(cases)
    assert result["balanced_accuracy"] == 0.75
    assert result["f1_macro"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    # class 0 (.7 .2 against 0) and class 1 (1 against .1 .1) have positives and negatives; 2 and 3 have no positive
    assert result["auroc"] == 1.0
    assert "loss" not in result


def test_degenerate_sets(four: Cases) -> None:
    assert summarise(Cases((), {})) == {}
    assert summarise(four.select([])) == {}
    single = summarise(four.select([0, 1]))
    assert "auroc" not in single
    assert single["accuracy"] == single["balanced_accuracy"] == 0.5
    assert summarise(four.select([3])) == {
        "accuracy": 0.0,
        "balanced_accuracy": 0.0,
        "f1_macro": 0.0,
        "loss": 1.5,
    }


@pytest.mark.parametrize(
    ("classes", "cases", "decimals"), [(2, 60, 1), (2, 11, 3), (5, 200, 1), (7, 500, 3)]
)
def test_equals_scikit_learn(classes: int, cases: int, decimals: int) -> None:
    """Coarse rounding makes many ties."""
    draw = np.random.default_rng(classes * cases)
    label = np.concatenate([np.arange(classes), draw.integers(0, classes, cases - classes)])
    scores = np.round(draw.random((cases, classes)), decimals).astype(np.float32)
    predicted = scores.argmax(1)
    result = summarise(classified(label.tolist(), scores.tolist()))
    one_hot = np.eye(classes)[label]
    area = (
        roc_auc_score(label, scores[:, 1])
        if classes == 2
        else roc_auc_score(one_hot, scores, average="macro")
    )
    assert result["accuracy"] == pytest.approx(accuracy_score(label, predicted))
    assert result["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(label, predicted))
    assert result["f1_macro"] == pytest.approx(f1_score(label, predicted, average="macro"))
    assert result["auroc"] == pytest.approx(area)


def test_confusion_has_the_reference_in_rows() -> None:
    counts = confusion(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1]), 3)
    assert counts.tolist() == [[1, 1, 0], [0, 1, 0], [0, 1, 0]]


def test_case_wise_values_are_averaged_without_undefined_cases() -> None:
    cases = Cases(
        ("a", "b", "c"),
        {
            "dice": torch.tensor([0.5, 1.0, 0.75]),
            "hd95": torch.tensor([2.0, math.nan, 4.0]),
            "surface_dice": torch.full((3,), math.nan),
        },
    )
    assert summarise(cases) == {"dice": 0.75, "hd95": 3.0, "hd95_cases": 2.0}


def test_select_by_id_and_index(four: Cases) -> None:
    by_id = four.select(["case-3", "case-0"])
    assert by_id.ids == ("case-3", "case-0")
    assert by_id.values["label"].tolist() == [2, 0]
    assert torch.equal(by_id.values["probabilities"], four.select([3, 0]).values["probabilities"])
    with pytest.raises(KeyError, match="case-9"):
        four.select(["case-9"])


def test_select_refuses_repeated_ids() -> None:
    with pytest.raises(ValueError, match="1 of 2 case ids are repeated"):
        Cases(("a", "a"), {"dice": torch.zeros(2)}).select(["a"])


def test_concat_restores_what_select_took_apart(four: Cases) -> None:
    joined = Cases.concat([four.select([0, 1]), Cases((), {}), four.select([2, 3])])
    assert joined.ids == four.ids
    assert summarise(joined) == summarise(four)
    assert len(Cases.concat([])) == 0
    left, right = (
        Cases(("a",), {"dice": torch.ones(1), "dice_x": torch.ones(1)}),
        Cases(("b",), {"dice": torch.zeros(1)}),
    )
    both = Cases.concat(
        [right, left]
    )  # a site that annotates one structure has no score of another
    assert torch.equal(both.values["dice"], torch.tensor([0.0, 1.0]))
    assert torch.equal(both.values["dice_x"].isnan(), torch.tensor([True, False]))
    assert Cases.concat([four.select([])]).is_classification
    with pytest.raises(ValueError, match="cannot join"):
        Cases.concat([four, Cases(("x",), {"dice": torch.zeros(1)})])


def test_values_must_match_the_ids() -> None:
    with pytest.raises(ValueError, match=r"values\['dice'\] has shape \(2,\) for 3 cases"):
        Cases(("a", "b", "c"), {"dice": torch.zeros(2)})


@pytest.mark.parametrize("label", [-1, 3])
def test_label_outside_the_classes_is_named(label: int) -> None:
    cases = classified([0, label], [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    with pytest.raises(InputError, match=rf"'case-1' has the label {label}; .*0 to 2"):
        summarise(cases)


def test_probabilities_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(RunError, match="1 of 2 cases, first 'case-1'"):
        summarise(classified([0, 1], [[1.0, 0.0], [math.nan, 0.0]]))


def test_spread_by_hand() -> None:
    values = {"site-1": 0.5, "site-2": 0.75, "site-3": math.nan, "site-4": 1.0, "site-5": None}
    result = spread(values)
    assert result == {
        "mean": 0.75,
        "sd": pytest.approx(math.sqrt(0.125 / 3)),
        "worst": 0.5,
        "worst_site": "site-1",
        "count": 3,
    }
    assert spread(values, higher_is_better=False)["worst_site"] == "site-4"
    assert spread({"b": 0.5, "a": 0.5})["worst_site"] == "b"
    assert spread({"site-1": math.nan}) == {}
    assert spread({}) == {}


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("dice", True),
        ("hd95", False),
        ("loss", False),
        ("val_mean_dice", True),
        ("val_mae", False),
        ("mean-Hausdorff", False),
    ],
)
def test_direction(name: str, better: bool) -> None:
    assert higher_is_better(name) is better


def test_the_only_structure_has_no_columns_of_its_own() -> None:
    names = ["dice", "dice_lung", "surface_dice", "surface_dice_lung", "loss"]
    once = {
        "dice": 0.5,
        "dice_lung": 0.5,
        "surface_dice": 1.0,
        "surface_dice_lung": 1.0,
        "loss": 0.5,
    }
    assert without_repeats(names, [once]) == ["dice", "surface_dice", "loss"]
    assert without_repeats(names, [once, {**once, "dice_lung": 0.4}]) == [
        "dice",
        "dice_lung",
        "surface_dice",
        "loss",
    ]


def test_tables_agree() -> None:
    assert {kind.key_metric for kind in KINDS.values()} <= set(METRICS)
    assert not METRICS["hd95"].higher_is_better
    assert title("auroc") == "AUROC"
    assert title("val_mean_dice") == "val mean dice"
    assert title("surface_dice_left_lung") == "Surface Dice left lung"
    assert title("hd95_left_lung") == "HD95 left lung"


def test_a_value_of_several_numbers_that_a_site_lacks_is_nan_there() -> None:
    """A structure that a site does not annotate has no decision there."""
    decision = torch.tensor([[0.5, 0.6]], dtype=torch.float64)
    dice = torch.tensor([0.5])
    with_it = Cases(("a",), {"dice": dice, "kept_left": decision})
    joined = Cases.concat([with_it, Cases(("b",), {"dice": dice})]).values["kept_left"]
    assert joined[0].tolist() == [0.5, 0.6]
    assert joined.shape == (2, 2)
    assert joined[1].isnan().all()


@pytest.mark.parametrize(
    ("name", "share"), [("dice", True), ("r2", False), ("hd95", False), ("val_psnr", False)]
)
def test_a_metric_is_in_percent_where_it_is_known_to_be_a_share(name: str, share: bool) -> None:
    """A bundle's own metric may be in decibels."""
    assert is_share(name) is share
