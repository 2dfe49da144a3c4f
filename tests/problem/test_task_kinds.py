"""Several findings an image, and numbers: what tells them, and their scores beside scikit-learn's and SciPy's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.losses import FocalLoss
from scipy.stats import pearsonr
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    recall_score,
    roc_auc_score,
    roc_curve,
    root_mean_squared_error,
)
from torch import Tensor, nn

import medfl
from medfl.core.errors import InputError
from medfl.data.prepared import Shard, Stacked
from medfl.evaluation import findings, numbers
from medfl.evaluation.metrics import Cases, summarise
from medfl.problem.tasks import KINDS, check_task, told_by
from medfl.problem.tasks.multilabel import FindingEvaluator
from medfl.problem.tasks.regression import NumberEvaluator
from medfl.training.site import mean_loss

NAMES = ("Effusion", "Mass", "Hernia", "Edema")
NAN = float("nan")


def drawn(count: int, seed: int, rare: bool = True) -> tuple[Any, Any]:
    """Return probabilities and findings (N, 4): a fifth is unknown, the third finding is had by few."""
    generator = np.random.default_rng(seed)
    truth = (generator.random((count, 4)) < [0.4, 0.2, 0.01 if rare else 0.3, 0.5]).astype(np.int8)
    score = np.clip(0.3 * truth + generator.random((count, 4)).round(2), 0, 1).astype(np.float32)
    truth[generator.random(truth.shape) < 0.2] = -1
    return score, truth


def cases_of(score: Any, truth: Any, name: str = "case") -> Cases:
    ids = tuple(f"{name}-{i}" for i in range(len(score)))
    values = {"probabilities": torch.from_numpy(score), "findings": torch.from_numpy(truth)}
    return Cases(ids, values)


@pytest.mark.parametrize("seed", range(4))
def test_findings_are_scored_as_by_scikit_learn_over_the_known_cases(seed: int) -> None:
    score, truth = drawn(400, seed)
    kind = KINDS["multilabel"]
    cases = kind.decided(cases_of(score, truth), cases_of(*drawn(300, seed + 50)))
    scores = summarise(cases)
    by_name = kind.by_name(scores, cases, NAMES)
    assert [metrics["scored"] for metrics in by_name.values()] == [1, 1, 0, 1]
    decided = cases.values["decisions"].numpy()

    means: dict[str, list[float]] = {}
    for k, name in enumerate(NAMES):
        known = truth[:, k] >= 0
        y, p, called = truth[known, k], score[known, k], decided[known, k]
        assert by_name[name]["cases"] == known.sum()
        assert by_name[name]["positives"] == y.sum()
        expected = {
            "auroc": roc_auc_score(y, p),
            "average_precision": average_precision_score(y, p),
            "f1": f1_score(y, called),
            "sensitivity": recall_score(y, called),
            "specificity": recall_score(1 - y, 1 - called),
        }
        for metric, value in expected.items():
            assert by_name[name][metric] == pytest.approx(value, abs=1e-12), (name, metric)
            if name != "Hernia":
                means.setdefault(metric, []).append(value)

    assert {name: scores[name] for name in means} == pytest.approx(
        {name: np.mean(values) for name, values in means.items()}
    )


@pytest.mark.parametrize("seed", range(3))
def test_thresholds_have_the_largest_youden_index(seed: int) -> None:
    score, truth = drawn(250, seed, rare=False)
    for k, threshold in enumerate(findings.thresholds(score, truth)):
        known = truth[:, k] >= 0
        false, true, _ = roc_curve(truth[known, k], score[known, k])
        called = score[known, k] >= threshold
        y = truth[known, k] == 1
        assert called[y].mean() - called[~y].mean() == pytest.approx((true - false).max())


def test_a_threshold_without_positives_is_one_half() -> None:
    truth = np.array([[0, 1], [0, -1], [-1, 0]], dtype=np.int8)
    score = np.array([[0.9, 0.8], [0.1, 0.2], [0.4, 0.3]])
    assert findings.thresholds(score, truth)[0] == 0.5
    assert 0.3 < findings.thresholds(score, truth)[1] < 0.8


def test_sites_are_compared_by_the_same_findings() -> None:
    """A site that lacks a finding has no mean over fewer: all sites are scored without it."""
    kind = KINDS["multilabel"]
    first, second = drawn(300, 1, rare=False), drawn(300, 2, rare=False)
    second[1][:, 0] = 0  # nobody has it there
    decided = {}
    for name, arrays in {"north": first, "south": second}.items():
        decided[name] = kind.decided(cases_of(*arrays), None)

    compared = {name: summarise(cases) for name, cases in kind.comparable(decided).items()}
    for name, (score, truth) in {"north": first, "south": second}.items():
        areas = []
        for k in (1, 2, 3):
            known = truth[:, k] >= 0
            areas.append(roc_auc_score(truth[known, k], score[known, k]))
        assert compared[name]["auroc"] == pytest.approx(np.mean(areas))


@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_scored_as_by_scikit_learn_and_scipy(seed: int) -> None:
    generator = np.random.default_rng(seed)
    target = generator.normal(127, 41, (200, 2)).round()
    prediction = target + generator.normal(0, [10, 30], (200, 2))
    target[generator.random(target.shape) < 0.1] = NAN
    cases = Cases(
        tuple(map(str, range(200))),
        {"prediction": torch.from_numpy(prediction), "target": torch.from_numpy(target)},
    )
    expected: dict[str, list[float]] = {"mae": [], "rmse": [], "r2": [], "pearson": []}
    for d in range(2):
        known = ~np.isnan(target[:, d])
        y, p = target[known, d], prediction[known, d]
        expected["mae"].append(mean_absolute_error(y, p))
        expected["rmse"].append(root_mean_squared_error(y, p))
        expected["r2"].append(r2_score(y, p))
        expected["pearson"].append(pearsonr(y, p).statistic)

    scores = summarise(cases)
    assert scores == pytest.approx({name: np.mean(values) for name, values in expected.items()})
    by_name = KINDS["regression"].by_name(scores, cases, ("age", "weight"))
    assert by_name["weight"]["rmse"] == pytest.approx(expected["rmse"][1])


@pytest.mark.parametrize(
    ("said", "units"),
    [
        ({"unit": "months"}, {"mae": "months", "rmse": "months"}),
        ({"unit": ["mm", "mm"]}, {"mae": "mm", "rmse": "mm"}),
        ({"unit": ["mm", "kg"]}, {}),
        ({"unit": [""]}, {}),
        ({"unit": []}, {}),
        ({"unit": 3}, {}),
        ({"unit": "m" * 21}, {}),
        ({"unit": "\x1b[2J"}, {}),
        ({}, {}),
    ],
)
def test_errors_have_the_unit_of_the_numbers_where_it_is_one(
    said: dict[str, object], units: dict[str, str]
) -> None:
    metadata = {"network_data_format": {"outputs": {"pred": said}}}
    assert KINDS["regression"].units(metadata) == units
    assert KINDS["multilabel"].units(metadata) == {}


def test_equal_targets_have_no_correlation() -> None:
    assert numbers.of_one(np.full(5, 3.0), np.arange(5.0)).keys() == {"mae", "rmse"}
    assert numbers.of_one(np.full(5, NAN), np.arange(5.0)) == {}


def test_a_case_without_a_known_number_has_no_loss() -> None:
    """A loss of 0 would make the mean over the cases too small."""
    x = torch.tensor([[1.0], [3.0]])
    y = torch.tensor([[0.0], [NAN]])
    shard = Shard.of(Stacked([{"id": "a"}, {"id": "b"}], x, y), range(2))
    cases = NumberEvaluator(mean_loss(nn.L1Loss()), {})(nn.Identity(), shard, torch.device("cpu"))
    assert summarise(cases) == {"mae": 1, "rmse": 1, "loss": 1, "loss_cases": 1}


def test_limits_of_agreement() -> None:
    target = np.array([1.0, 2.0, 3.0, NAN])
    prediction = np.array([2.0, 2.0, 5.0, 9.0])
    bias, low, high = numbers.agreement(prediction, target)
    assert bias == pytest.approx(1)
    assert (low, high) == pytest.approx((1 - 1.96, 1 + 1.96))  # errors 1, 0, 2


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.L1Loss(), nn.functional.mse_loss])
def test_an_unknown_target_has_no_part_in_the_loss(loss: Any) -> None:
    prediction = torch.tensor([[0.3, -1.0], [2.0, 0.5]], requires_grad=True)
    target = torch.tensor([[1.0, NAN], [0.0, 1.0]])
    value = mean_loss(loss)(prediction, target)
    value.backward()
    known = torch.tensor([True, False, True, True])
    expected = loss(prediction.detach().flatten()[known], target.flatten()[known])
    assert value.item() == pytest.approx(expected.item())
    assert prediction.grad is not None
    assert prediction.grad[0, 1] == 0
    assert (prediction.grad.flatten()[known] != 0).all()

    nothing = mean_loss(loss)(prediction, torch.full((2, 2), NAN))
    assert nothing.item() == 0
    nothing.backward()
    assert prediction.grad.isfinite().all()


@pytest.mark.parametrize(
    "loss",
    [
        nn.BCEWithLogitsLoss(),
        nn.functional.binary_cross_entropy_with_logits,
        FocalLoss(use_softmax=False),
    ],
)
def test_a_finding_below_0_is_as_unknown_in_training_as_in_scores(loss: Any) -> None:
    prediction = torch.tensor([[0.3, -1.0], [2.0, 0.5]])
    target = torch.tensor([[1.0, -1.0], [0.0, 1.0]])
    value = mean_loss(loss)(prediction, target)
    assert value == mean_loss(loss)(prediction, target.masked_fill(target < 0, NAN))


def test_a_number_below_0_is_a_number() -> None:
    prediction, target = torch.zeros(1, 2), torch.tensor([[-1.0, 2.0]])
    assert mean_loss(nn.L1Loss())(prediction, target) == 1.5


@pytest.mark.parametrize(
    ("evaluator", "wrong", "allowed"),
    [
        (FindingEvaluator(), 2.0, r"1 \(present\), 0 \(absent\)"),
        (NumberEvaluator(mean_loss(nn.L1Loss()), {}), float("inf"), "a finite number"),
    ],
)
def test_a_target_that_is_read_with_its_image_is_checked_when_it_is_scored(
    evaluator: Any, wrong: float, allowed: str
) -> None:
    x, y = torch.zeros(300, 1), torch.zeros(300, 1)
    y[280] = wrong
    shard = Shard.of(Stacked([{"id": f"i{k}"} for k in range(300)], x, y), range(300))
    with pytest.raises(InputError, match=f"item 'i280': target {wrong:g}; {allowed}"):
        evaluator(nn.Identity(), shard, torch.device("cpu"))


def test_a_loss_of_all_targets_at_once_cannot_leave_one_out() -> None:
    target = torch.tensor([[1.0, NAN]])
    with pytest.raises(InputError, match="reduction='none'"):
        mean_loss(lambda p, y: ((p - y) ** 2).mean())(torch.zeros(1, 2), target)


@pytest.mark.parametrize(
    ("prediction", "target", "loss", "has_class", "kind"),
    [
        (torch.zeros(2, 3), torch.tensor([[1.0, 0, 1]] * 2), nn.BCEWithLogitsLoss(), False, "multilabel"),
        (torch.zeros(2, 3), torch.tensor([[1.0, NAN, 1]] * 2), nn.BCEWithLogitsLoss(), False, "multilabel"),
        (torch.zeros(2, 3), torch.tensor([[1, 0, 1]] * 2), nn.BCEWithLogitsLoss(), False, "multilabel"),
        (torch.zeros(2, 3), torch.tensor([1, 1]), nn.CrossEntropyLoss(), True, "classification"),
        (torch.zeros(2, 1), torch.tensor([[1.0], [1.0]]), nn.BCEWithLogitsLoss(), True, "classification"),
        (torch.zeros(2, 1), torch.tensor([[1.0], [1.0]]), nn.BCEWithLogitsLoss(), False, "multilabel"),
        (torch.zeros(2, 1), torch.tensor([[12.0], [12.0]]), nn.MSELoss(), True, "regression"),
        (torch.zeros(2), torch.tensor([12.0, 12.0]), nn.L1Loss(), True, "regression"),
        (torch.zeros(2, 1), torch.tensor([[0.3], [0.3]]), lambda p, y: p.mean(), False, "regression"),
        (torch.zeros(2, 2), torch.tensor([[0.3, 40.0]] * 2), nn.HuberLoss(), False, "regression"),
        (torch.zeros(2, 3, 8, 8), torch.zeros(2, 1, 8, 8), nn.L1Loss(), False, "segmentation"),
        (None, torch.zeros(2), nn.L1Loss(), False, "other"),
    ],
)  # fmt: skip
def test_the_kind_of_a_task_is_told_by_a_training_step(
    prediction: Tensor | None, target: Tensor, loss: Any, has_class: bool, kind: str
) -> None:
    assert told_by(prediction, target, loss, has_class) == kind


def test_a_kind_that_there_is_not() -> None:
    with pytest.raises(InputError, match="task 'multi-label'"):
        check_task("multi-label", "task")


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, outputs))


def pictures(count: int, seed: int, target_of: Any) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 1, 4, 4, generator=generator)
    return [{"image": image, "label": target_of(image)} for image in images]


def two_findings(image: Tensor) -> Tensor:
    target = torch.stack([image.mean() > 0, image[0, 0, 0] > 0]).float()
    target[1] = NAN if image[0, 1, 1] > 1 else target[1]
    return target


def months(image: Tensor) -> Tensor:
    return (100 + 40 * image.mean()).round().reshape(1)


def parts_of(task: str, **changes: Any) -> medfl.Parts:
    target_of, outputs, loss = two_findings, 2, nn.BCEWithLogitsLoss()
    classes: tuple[str, ...] = ("Effusion", "Mass")
    if task == "regression":
        target_of, outputs, loss, classes = months, 1, nn.L1Loss(), ("age",)

    data = {}
    for index, site in enumerate(("north", "south")):
        sizes = {"train": 40, "validate": 30, "test": 60}
        data[site] = {
            section: pictures(size, 10 * index + place, target_of)
            for place, (section, size) in enumerate(sizes.items())
        }

    arguments: dict[str, Any] = {
        "network": partial(network, outputs), "data": data, "loss": loss, "task": task, "classes": classes,
        "optimizer": partial(torch.optim.Adam, lr=0.05), "batch_size": 8,
    }  # fmt: skip
    return medfl.Parts(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("task", "metric", "columns"),
    [
        ("multilabel", "auroc", ["label_Effusion", "label_Mass", "predicted_Effusion", "predicted_Mass"]),
        ("regression", "mae", ["target_age", "predicted_age"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_a_run_of_parts(
    task: str, metric: str, columns: list[str], method: str, tmp_path: Path
) -> None:
    result = medfl.run(parts_of(task), method, rounds=2, out=tmp_path / "run")
    header = (tmp_path / "run" / "predictions.csv").read_text().splitlines()[0].split(",")
    assert header[2 : 2 + len(columns)] == columns
    assert metric in result.summary["last"]
    assert result.summary["best"]["round"] in (1, 2)
    if task == "multilabel":
        assert result.summary["last"]["classes"].keys() == {"Effusion", "Mass"}
        assert result.summary["last"]["auroc"] > 0.6


@pytest.mark.parametrize(("task", "metric"), [("multilabel", "auroc"), ("regression", "mae")])
def test_callbacks_see_its_metric_and_end_a_run_by_it(
    task: str, metric: str, tmp_path: Path
) -> None:
    """Steps of length 0 make no round better than the first."""
    seen: list[medfl.RoundEnd] = []

    def keep(ended: medfl.RoundEnd) -> None:
        seen.append(ended)

    parts = parts_of(task, optimizer=partial(torch.optim.SGD, lr=0.0))
    stop = medfl.EarlyStopping(patience=2)
    result = medfl.run(parts, "fedavg", rounds=6, out=tmp_path / "run", callbacks=[keep, stop])
    assert [ended.round for ended in seen] == [1, 2, 3]
    assert seen[-1].key_metric == metric
    assert seen[-1].best() == (1, seen[0].metrics[metric])
    assert f"{metric} has not become better" in result.summary["stopped"]


def test_methods_with_class_prototypes_say_that_they_are_for_classification(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a multilabel task; it supports classification"):
        medfl.run(parts_of("multilabel"), "fedmr", rounds=1, out=tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "target", "told"),
    [
        ("multilabel", (0.0, 2.0), "item 'a': target 2; 1 \\(present\\), 0 \\(absent\\)"),
        ("regression", (float("inf"),), "item 'a': target inf; a finite number"),
        ("regression", (float("-inf"),), "item 'a': target -inf; a finite number"),
    ],
)
def test_a_target_that_no_kind_has_is_refused(
    kind: str, target: tuple[float, ...], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        KINDS[kind].item({"id": "a", "target": target})

    assert KINDS[kind].item({"id": "a", "target": (None, 1.0)})
