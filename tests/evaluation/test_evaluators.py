"""Scores per case, compared with sums by hand and with MONAI's own metrics."""

from __future__ import annotations

from typing import Any

import ignite.metrics
import numpy as np
import pytest
import torch
from monai.handlers import MeanDice, MeanSquaredError, from_engine
from monai.inferers import SimpleInferer, SlidingWindowInferer
from monai.losses import DiceCELoss
from monai.transforms import AsDiscreted, Compose
from torch import nn

from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError, RunError
from medfl.data.prepared import Geometry, Shard, Stacked
from medfl.data.samples import Sampled
from medfl.evaluation.evaluators import CaseEvaluator, ClassEvaluator, MaskEvaluator
from medfl.evaluation.mask_metrics import SURFACE_METRICS, scores
from medfl.evaluation.metrics import summarise
from tests.support.samples import Plain

CPU = torch.device("cpu")
PAIR = from_engine(["pred", "label"])


def shard(x: torch.Tensor, y: torch.Tensor) -> Shard:
    return Shard.of(Stacked([{"id": f"i{n}"} for n in range(len(x))], x, y), range(len(x)))


def test_classes() -> None:
    """Probabilities are the softmax, the loss is the cross-entropy, and the batch size changes neither."""
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0], [0.0, 0.0, 0.0]])
    labels = torch.tensor([0, 1, 2])
    one, two = (
        ClassEvaluator(batch_size=size)(nn.Identity(), shard(logits, labels), CPU)
        for size in (1, 256)
    )
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
    assert (
        summarise(ClassEvaluator()(nn.Identity(), shard(torch.zeros(0, 2), torch.zeros(0)), CPU))
        == {}
    )


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


@pytest.mark.parametrize(
    ("metric", "scale"), [(MeanSquaredError, 1), (ignite.metrics.MeanSquaredError, 16)]
)
def test_metrics_of_monai_and_ignite(metric: Any, scale: int) -> None:
    """Both get the items one by one; MONAI's takes the mean over an item, ignite's the sum."""
    x, y = torch.rand(3, 1, 4, 4), torch.rand(3, 1, 4, 4)
    cases = CaseEvaluator("mse", metric(output_transform=PAIR), SimpleInferer())(
        nn.Identity(), shard(x, y), CPU
    )
    assert torch.allclose(cases.values["mse"].float(), scale * (x - y).square().flatten(1).mean(1))


def test_loss_as_metric() -> None:
    x, y = torch.rand(3, 2), torch.rand(3, 2)
    cases = CaseEvaluator("loss", nn.functional.mse_loss, SimpleInferer())(
        nn.Identity(), shard(x, y), CPU
    )
    assert torch.allclose(cases.values["loss"].float(), (x - y).square().mean(1))


def test_failure_names_the_case() -> None:
    def refuse(case: Any) -> Any:
        return case["missing"]

    evaluate = CaseEvaluator("dice", MeanDice(output_transform=PAIR), SimpleInferer(), refuse)
    with pytest.raises(RunError, match="fails on item 'i0': KeyError: 'missing'"):
        evaluate(nn.Identity(), shard(*masks()), CPU)


# Masks

STRUCTURES = ("background", "wall", "pool")
LOSS = DiceCELoss(to_onehot_y=True, softmax=True)


def evaluator(inferer: Any = None, tolerance: float = 1.0) -> MaskEvaluator:
    return MaskEvaluator(LOSS, STRUCTURES, inferer or SimpleInferer(), tolerance)


def maps(count: int = 5, side: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are inputs and outputs of `nn.Identity`, and reference masks."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, side, side, generator=draw), torch.randint(
        3, (count, 1, side, side), generator=draw
    )


def one_by_one(x: torch.Tensor, y: torch.Tensor) -> Shard:
    """The same items in a form that cannot be batched."""
    items = [{"id": f"i{n}"} for n in range(len(x))]
    prepared = Sampled(
        items,
        Plain(lambda i: (x[i], y[i])),
        lambda b: [torch.stack(p) for p in zip(*b, strict=True)],
        tuple,
    )
    return Shard.of(prepared, range(len(x)))


def test_masks_are_scored_case_by_case() -> None:
    x, y = maps()
    cases = evaluator(tolerance=2.0)(
        nn.Identity(), shard(x, y), CPU, surface_metrics=SURFACE_METRICS
    )
    assert cases.ids == ("i0", "i1", "i2", "i3", "i4")
    for index in range(5):
        expected = scores(
            x[index].argmax(0),
            y[index, 0],
            STRUCTURES,
            (1, 1),
            2.0,
            surface_metrics=SURFACE_METRICS,
        )
        expected["loss"] = float(LOSS(x[index : index + 1], y[index : index + 1]))
        assert {
            name: float(values[index]) for name, values in cases.values.items()
        } == pytest.approx(expected)
    assert {values.dtype for values in cases.values.values()} == {torch.float64}
    assert summarise(cases)["dice"] == pytest.approx(float(cases.values["dice"].mean()))


def test_distances_only_where_asked_for() -> None:
    quick = evaluator()(nn.Identity(), shard(*maps()), CPU)
    assert list(quick.values) == ["dice", "dice_wall", "dice_pool", "pixel_accuracy", "loss"]


@pytest.mark.parametrize(
    ("count", "shape", "batches"),
    [(20, (8, 8), [16, 4]), (3, (600, 500), [2, 1]), (2, (128, 128, 96), [1, 1])],
)
def test_batches_of_masks_fit(count: int, shape: tuple[int, ...], batches: list[int]) -> None:
    """At most 16 items and about a million pixels; powers of two, so that no multiple of 16 items cuts a batch."""
    seen: list[int] = []

    class Watched(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return x

    x = torch.zeros(count, 2, *shape)
    list(evaluator().masks(Watched(), shard(x, x[:, :1].long()), CPU))
    assert seen == batches


def test_batches_change_nothing() -> None:
    x, y = maps()
    network = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    whole, single = (evaluator()(network, items, CPU) for items in (shard(x, y), one_by_one(x, y)))
    assert whole.ids == single.ids
    assert all(torch.allclose(whole.values[name], single.values[name]) for name in whole.values)
    assert not network.training


def test_windows_see_the_whole_case() -> None:
    x, y = maps()
    windows = evaluator(SlidingWindowInferer((5, 5), overlap=0.25))(nn.Identity(), shard(x, y), CPU)
    whole = evaluator()(nn.Identity(), shard(x, y), CPU)
    assert torch.equal(windows.values["dice"], whole.values["dice"])


def test_one_output_and_one_hot_references() -> None:
    """A single logit is that of class 1; a reference may be given as one channel a class."""
    x, y = maps()
    one = MaskEvaluator(nn.BCEWithLogitsLoss(), ("background", "lung"), SimpleInferer())
    cases = one(nn.Identity(), shard(x[:, :1], (y > 0).float()), CPU)
    both = MaskEvaluator(LOSS, ("background", "lung"), SimpleInferer())
    two = torch.cat([torch.zeros_like(x[:, :1]), x[:, :1]], 1)
    assert torch.equal(
        cases.values["dice"], both(nn.Identity(), shard(two, (y > 0).long()), CPU).values["dice"]
    )
    channels = nn.functional.one_hot(y[:, 0], 3).movedim(-1, 1)
    found = MaskEvaluator(nn.functional.mse_loss, STRUCTURES, SimpleInferer())
    again = found(nn.Identity(), shard(x, channels.float()), CPU)
    assert torch.equal(
        again.values["dice"], evaluator()(nn.Identity(), shard(x, y), CPU).values["dice"]
    )


def test_padding_is_not_scored() -> None:
    """Of a grid of 12 x 12 the file has the middle 8 x 10; what is predicted around it changes no metric."""
    x, y = maps()
    affine = np.eye(4)
    affine[:2, 3] = -2, -1
    items = shard(x, y)
    items.prepared.geometry = [Geometry(affine, np.eye(4), (8, 10), "x.nii")] * 5
    found = evaluator()(nn.Identity(), items, CPU, surface_metrics=SURFACE_METRICS)
    inside = evaluator()(
        nn.Identity(),
        shard(x[..., 2:10, 1:11], y[..., 2:10, 1:11]),
        CPU,
        surface_metrics=SURFACE_METRICS,
    )
    assert {name for name in found.values if name != "loss"} >= {"dice", "pixel_accuracy", "hd95"}
    for name in found.values.keys() - {"loss"}:
        assert torch.equal(found.values[name], inside.values[name]), name
    assert not torch.equal(
        found.values["dice"], evaluator()(nn.Identity(), shard(x, y), CPU).values["dice"]
    )


def test_distances_are_in_the_unit_of_the_affine() -> None:
    """An affine that turns the axes and makes the first of them 3 mm a step."""
    x, y = maps()
    affine = np.array([[0, -1, 0, 7], [3, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1.0]])
    items = shard(x, y)
    items.prepared.geometry = [Geometry(affine, np.eye(4), (12, 12), "x.nii")] * 5
    cases = evaluator()(nn.Identity(), items, CPU, surface_metrics=SURFACE_METRICS)
    expected = [
        scores(a.argmax(0), b[0], STRUCTURES, (3, 1), 1, surface_metrics=SURFACE_METRICS)["hd95"]
        for a, b in zip(*maps(), strict=True)
    ]
    assert cases.values["hd95"].tolist() == expected


@pytest.mark.parametrize(
    ("x", "y", "kind", "told"),
    [
        (
            0.0,
            3,
            InputError,
            "the reference mask of item 'i0' has the value 3; the network has 3 classes: values 0 to 2; ",
        ),
        (0.0, -1, InputError, "the reference mask of item 'i0' has the value -1; "),
        (float("nan"), 0, RunError, "the model's output is not finite for case 'i0'"),
    ],
)
def test_what_cannot_be_scored(x: float, y: int, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        evaluator()(
            nn.Identity(), shard(torch.full((1, 3, 4, 4), x), torch.full((1, 1, 4, 4), y)), CPU
        )


def test_outputs_of_another_size_are_told() -> None:
    with pytest.raises(
        RunError, match="the model's output for case 'i0' is 2 x 2, its reference mask 4 x 4"
    ):
        evaluator()(nn.AvgPool2d(2), shard(torch.zeros(1, 3, 4, 4), torch.zeros(1, 1, 4, 4)), CPU)
    with pytest.raises(RunError, match="validation fails on item 'i0': RuntimeError: "):
        evaluator()(
            nn.Conv2d(5, 3, 1), shard(torch.zeros(1, 3, 4, 4), torch.zeros(1, 1, 4, 4)), CPU
        )


def test_no_masks() -> None:
    assert (
        summarise(
            evaluator()(nn.Identity(), shard(torch.zeros(0, 3, 4, 4), torch.zeros(0, 1, 4, 4)), CPU)
        )
        == {}
    )


# Masks of bundles that are not ours

DISCRETE = Compose(
    [AsDiscreted("pred", argmax=True, to_onehot=3), AsDiscreted("label", to_onehot=3)]
)


def test_a_foreign_key_metric_stays_and_others_come_with_it() -> None:
    """Dice is ours, whatever theirs leaves out; a metric of another name stays what it is."""
    x, y = maps(2)
    y[1] = y[1].clamp(max=0)
    theirs = MeanDice(include_background=False, output_transform=PAIR)
    cases = CaseEvaluator("dice", theirs, SimpleInferer(), DISCRETE, 1.0)(
        nn.Identity(), shard(x, y), CPU, surface_metrics=SURFACE_METRICS
    )
    ours = evaluator()(nn.Identity(), shard(x, y), CPU, surface_metrics=SURFACE_METRICS)
    own = [f"{kind}_class_{index}" for kind in ("hd95", "surface_dice") for index in (1, 2)]
    both = ["dice", "dice_class_1", "dice_class_2", "pixel_accuracy"]
    assert list(cases.values) == [*both, "hd95", "surface_dice", *own]
    for name in ("dice", "hd95", "surface_dice", "pixel_accuracy"):
        assert torch.allclose(cases.values[name], ours.values[name])
    renamed = CaseEvaluator("val_dice", theirs, SimpleInferer(), DISCRETE, 1.0)(
        nn.Identity(), shard(x, y), CPU
    )
    assert list(renamed.values) == [*both, "val_dice"]
    assert torch.allclose(renamed.values["dice"], ours.values["dice"])
    assert renamed.values["val_dice"].tolist() == pytest.approx(
        [float(ours.values["dice"][0]), float("nan")], nan_ok=True
    )


def test_what_is_no_mask_has_no_metrics_of_masks() -> None:
    """Probabilities instead of classes, or a label of another size."""
    x, y = torch.rand(2, 1, 4, 4), torch.rand(2, 1, 4, 4)
    bare = CaseEvaluator("loss", nn.functional.mse_loss, SimpleInferer(), None, 1.0)
    assert set(
        summarise(bare(nn.Identity(), shard(x, y), CPU, surface_metrics=SURFACE_METRICS))
    ) == {"loss"}
    assert list(bare.masks(nn.Identity(), shard(x, y), CPU)) == [None, None]
    small = CaseEvaluator(
        "loss", lambda prediction, target: torch.zeros(()), SimpleInferer(), None, 1.0
    )
    assert set(summarise(small(nn.AvgPool2d(2), shard(x.round(), y.round()), CPU))) == {"loss"}


def test_masks_of_channels() -> None:
    """One channel is the foreground, several that exclude each other are classes, overlapping ones are no mask."""
    x, y = maps(2)
    (first, *_) = CaseEvaluator("loss", LOSS, SimpleInferer(), DISCRETE, 1.0).masks(
        nn.Identity(), shard(x, y), CPU
    )
    assert first is not None
    assert first.classes == 3
    assert torch.equal(first.prediction.long(), x[0].argmax(0))
    assert torch.equal(first.reference.long(), y[0, 0])
    binary = CaseEvaluator("loss", nn.functional.mse_loss, SimpleInferer(), None, 1.0)
    (found,) = binary.masks(nn.Identity(), shard((x[:1, :1] > 0).float(), (y[:1] > 0).float()), CPU)
    assert found is not None
    assert found.classes == 2
    assert torch.equal(found.reference.bool(), y[0, 0] > 0)
    overlapping = torch.ones(1, 2, 4, 4)
    assert list(binary.masks(nn.Identity(), shard(overlapping, overlapping), CPU)) == [None]


def test_shipped_bundles_are_scored_by_structure() -> None:
    """Names from metadata, inferer and tolerance from the configuration; nothing of it needs the data."""
    bundle = Bundle("hippocampus", {"surface_tolerance": 2.5})
    found = bundle.evaluator
    assert isinstance(found, MaskEvaluator)
    assert bundle.structures == found.classes == ("background", "anterior", "posterior")
    assert (bundle.key_metric, found.tolerance) == ("dice", 2.5)
    assert isinstance(found.inferer, SlidingWindowInferer)
    assert Bundle("mednist").structures == ()
