"""Scores per case, compared with sums by hand and with MONAI's own metrics."""

from __future__ import annotations

from typing import Any

import ignite.metrics
import pytest
import torch
from monai.handlers import MeanDice, MeanSquaredError, from_engine
from monai.inferers import SimpleInferer, SlidingWindowInferer
from monai.transforms import AsDiscreted, Compose
from torch import nn

from medfl.errors import RunError
from medfl.evaluation import CaseEvaluator, ClassEvaluator
from medfl.metrics import summarise
from medfl.prepared import Shard, Stacked

CPU = torch.device("cpu")
PAIR = from_engine(["pred", "label"])


def shard(x: torch.Tensor, y: torch.Tensor) -> Shard:
    return Shard.of(Stacked([{"id": f"i{n}"} for n in range(len(x))], x, y), range(len(x)))


def test_classes() -> None:
    """Probabilities are the softmax, the loss is the cross-entropy, and the batch size changes neither."""
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0], [0.0, 0.0, 0.0]])
    labels = torch.tensor([0, 1, 2])
    one, two = (ClassEvaluator(size)(nn.Identity(), shard(logits, labels), CPU) for size in (1, 256))
    assert one.ids == ("i0", "i1", "i2")
    assert torch.equal(one.values["probabilities"], logits.softmax(1))
    assert torch.allclose(one.values["loss"], -logits.log_softmax(1)[torch.arange(3), labels])
    assert all(torch.equal(one.values[key], two.values[key]) for key in one.values)


@pytest.mark.parametrize("ends_in_sigmoid", [False, True])
def test_one_output_is_the_second_class(ends_in_sigmoid: bool) -> None:
    logits, labels = torch.tensor([[2.0], [-1.0], [0.5]]), torch.tensor([[1.0], [0.0], [0.0]])
    x = logits.sigmoid() if ends_in_sigmoid else logits
    cases = ClassEvaluator(ends_in_sigmoid=ends_in_sigmoid)(nn.Identity(), shard(x, labels), CPU)
    assert torch.allclose(cases.values["probabilities"][:, 1:], logits.sigmoid(), atol=1e-5)
    assert cases.values["label"].tolist() == [1, 0, 0]
    assert summarise(cases)["accuracy"] == pytest.approx(2 / 3)


def test_one_hot_labels() -> None:
    logits = torch.eye(3) * 4
    cases = ClassEvaluator()(nn.Identity(), shard(logits, torch.eye(3)), CPU)
    assert cases.values["label"].tolist() == [0, 1, 2]
    assert summarise(cases)["accuracy"] == 1


def test_no_case() -> None:
    assert summarise(ClassEvaluator()(nn.Identity(), shard(torch.zeros(0, 2), torch.zeros(0)), CPU)) == {}


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    prediction, label = torch.zeros(3, 1, 4, 4), torch.zeros(3, 1, 4, 4)
    prediction[0, :, :2] = label[0, :, :2] = 1  # all right: Dice 1
    prediction[1, :, :2] = 1
    label[1, :, 1:3] = 1  # 4 of 8 and 8: Dice 2 * 4 / 16
    prediction[2, :, 0] = 1  # no label: not defined
    return prediction, label


@pytest.mark.parametrize("inferer", [SimpleInferer(), SlidingWindowInferer((2, 2))])
def test_dice_case_by_case(inferer: Any) -> None:
    metric = MeanDice(output_transform=PAIR)
    cases = CaseEvaluator("dice", metric, inferer, Compose([AsDiscreted("pred", threshold=0.5)]))(
        nn.Identity(), shard(*masks()), CPU
    )
    assert cases.values["dice"].tolist() == pytest.approx([1.0, 0.5, float("nan")], nan_ok=True)
    assert summarise(cases) == {"dice": 0.75, "dice_cases": 2}


@pytest.mark.parametrize(("metric", "scale"), [(MeanSquaredError, 1), (ignite.metrics.MeanSquaredError, 16)])
def test_metrics_of_monai_and_ignite(metric: Any, scale: int) -> None:
    """Both get the items one by one; MONAI's takes the mean over an item, ignite's the sum."""
    x, y = torch.rand(3, 1, 4, 4), torch.rand(3, 1, 4, 4)
    cases = CaseEvaluator("mse", metric(output_transform=PAIR), SimpleInferer())(nn.Identity(), shard(x, y), CPU)
    assert torch.allclose(cases.values["mse"].float(), scale * (x - y).square().flatten(1).mean(1))


def test_loss_as_metric() -> None:
    x, y = torch.rand(3, 2), torch.rand(3, 2)
    cases = CaseEvaluator("loss", nn.functional.mse_loss, SimpleInferer())(nn.Identity(), shard(x, y), CPU)
    assert torch.allclose(cases.values["loss"].float(), (x - y).square().mean(1))


def test_failure_names_the_case() -> None:
    def refuse(case: Any) -> Any:
        return case["missing"]

    evaluate = CaseEvaluator("dice", MeanDice(output_transform=PAIR), SimpleInferer(), refuse)
    with pytest.raises(RunError, match="fails on item 'i0': KeyError: 'missing'"):
        evaluate(nn.Identity(), shard(*masks()), CPU)
