"""Metrics of a case, compared with MONAI's and with values by hand."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from monai.metrics import compute_dice, compute_hausdorff_distance, compute_surface_dice
from monai.metrics.utils import get_edge_surface_distance
from monai.networks import one_hot
from torch import Tensor

from medfl.core.errors import InputError
from medfl.evaluation.mask_metrics import (
    SURFACE_METRICS,
    by_structure,
    channel_scores,
    foreground,
    scores,
    slug,
    surface_metrics_of,
)
from medfl.evaluation.metrics import Cases, summarise

CLASSES = ("background", "Anterior part", "posterior")


def blobs(shape: tuple[int, ...], seed: int, classes: int = 3) -> Tensor:
    """Label maps whose classes have smooth borders, some of them along the edge of the image."""
    noise = np.random.default_rng(seed).normal(size=(classes, *shape))
    kernel = np.hanning(9)[1:-1] / np.hanning(9).sum()
    for axis in range(1, noise.ndim):
        noise = np.apply_along_axis(np.convolve, axis, noise, kernel, mode="same")
    return torch.from_numpy(noise.argmax(0).astype(np.uint8))


def monais(
    prediction: Tensor, reference: Tensor, spacing: Any, tolerance: float
) -> dict[str, float]:
    """The same numbers by MONAI's functions; these have no value for empty masks."""
    pair = [one_hot(mask[None, None].float(), 3) for mask in (prediction, reference)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dice = compute_dice(*pair, include_background=False)[0]
        hd95 = compute_hausdorff_distance(*pair, percentile=95, spacing=spacing)
        surface = compute_surface_dice(*pair, class_thresholds=[tolerance] * 2, spacing=spacing)
    return {
        "dice": float(dice.double().mean()),
        "dice_anterior_part": float(dice[0]),
        "dice_posterior": float(dice[1]),
        "pixel_accuracy": float((prediction == reference).double().mean()),
        "hd95": float(hd95.double().mean()),
        "surface_dice": float(surface.double().mean()),
        "hd95_anterior_part": float(hd95[0, 0]),
        "hd95_posterior": float(hd95[0, 1]),
        "surface_dice_anterior_part": float(surface[0, 0]),
        "surface_dice_posterior": float(surface[0, 1]),
    }


@pytest.mark.parametrize(
    ("shape", "spacing", "tolerance"),
    [
        ((40, 52), (1.0, 1.0), 1.0),
        ((33, 20), (0.4, 2.5), 0.8),
        ((17, 22, 12), (1.0, 0.9, 3.0), 2.0),
    ],
)
def test_the_numbers_are_monais(
    shape: tuple[int, ...], spacing: tuple[float, ...], tolerance: float
) -> None:
    for seed in range(4):
        prediction, reference = blobs(shape, seed), blobs(shape, seed + 100)
        found = scores(
            prediction, reference, CLASSES, spacing, tolerance, surface_metrics=SURFACE_METRICS
        )
        expected = monais(prediction, reference, list(spacing), tolerance)
        assert found == pytest.approx(expected, rel=1e-6)
        assert list(found) == list(expected)


def test_a_case_by_hand() -> None:
    """Two squares of 3 x 3 pixels, the prediction two columns to the right; pixels of 2 mm x 1 mm (rows x columns).

    They share a column of 3 pixels: Dice 2 * 3 / (9 + 9) = 1/3. 12 of 36 pixels are wrong: accuracy 24/36.
    The surface of a 3 x 3 square is its 8 border pixels. In both squares, columns (in steps of 1 mm) away from the
    other square's nearest column lie: the far column (3 pixels) 2 away, the middle column (2 border pixels) 1 away from
    it, the near column (3 pixels) 0, as it is one of the other's. Across rows, 2 mm, nothing is nearer, but for the
    near column, whose pixels all are border pixels of both. So each direction has the distances 0, 0, 0, 1, 1, 2, 2, 2.
    The 95th percentile is at position 0.95 * 7 = 6.65 of the sorted eight, between 2 and 2: HD95 = 2 mm.
    Within 1 mm are 5 of 8 in each direction: surface Dice 10/16.
    """
    reference, prediction = (
        torch.zeros(6, 6, dtype=torch.uint8),
        torch.zeros(6, 6, dtype=torch.uint8),
    )
    reference[1:4, 0:3] = 1
    prediction[1:4, 2:5] = 1
    found = scores(
        prediction,
        reference,
        ("background", "square"),
        (2.0, 1.0),
        1.0,
        surface_metrics=SURFACE_METRICS,
    )
    expected = {"dice": 1 / 3, "pixel_accuracy": 24 / 36, "hd95": 2.0, "surface_dice": 10 / 16}
    own = {f"{kind}_square": expected[kind] for kind in ("dice", "hd95", "surface_dice")}
    assert found == pytest.approx(expected | own)


def test_spacing_changes_distances_and_axis_order_does_not() -> None:
    """A voxel 4 along the last axis from a line: 4 or 12 mm; with the axes in another order the same."""
    reference = torch.zeros(7, 8, 9, dtype=torch.uint8)
    prediction = reference.clone()
    reference[3, 4, 1] = prediction[3, 4, 5] = 1
    names = ("background", "voxel")

    def hd95(order: tuple[int, ...], *spacing: float) -> float:
        masks = (mask.permute(order).flip(0) for mask in (prediction, reference))
        return scores(
            *masks, names, [spacing[axis] for axis in order], 1.0, surface_metrics=SURFACE_METRICS
        )["hd95"]

    assert hd95((0, 1, 2), 1, 1, 1) == 4
    assert hd95((0, 1, 2), 1, 1, 3) == 12
    assert hd95((2, 0, 1), 1, 1, 3) == 12
    assert hd95((0, 1, 2), 3, 1, 1) == 4
    large = [mask.repeat(3, 1, 1) for mask in (blobs((12, 14, 10), 0), blobs((12, 14, 10), 1))]
    first = scores(*large, CLASSES, (1, 1, 3), 2.0, surface_metrics=SURFACE_METRICS)
    turned = [mask.permute(2, 0, 1).flip(1) for mask in large]
    assert scores(
        *turned, CLASSES, (3, 1, 1), 2.0, surface_metrics=SURFACE_METRICS
    ) == pytest.approx(first, rel=1e-6)
    assert (
        scores(*large, CLASSES, (1, 1, 1), 2.0, surface_metrics=SURFACE_METRICS)["hd95"]
        < first["hd95"]
    )


@pytest.mark.parametrize("shape", [(5, 9), (5, 9, 3)])
def test_empty_masks(shape: tuple[int, ...]) -> None:
    """The diagonal joins the centres of pixels in opposite corners."""
    spacing = (2.0, 0.5, 4.0)[: len(shape)]
    empty, spot = torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape, dtype=torch.uint8)
    spot.view(-1)[7] = 1
    names = ("background", "spot")
    right = {"dice": 1.0, "pixel_accuracy": 1.0, "hd95": 0.0, "surface_dice": 1.0}
    own = {f"{kind}_spot": right[kind] for kind in ("dice", "hd95", "surface_dice")}
    none = dict.fromkeys(own, math.nan)
    assert scores(
        empty, empty, names, spacing, 1.0, surface_metrics=SURFACE_METRICS
    ) == pytest.approx(right | none, nan_ok=True)
    assert scores(spot, spot, names, spacing, 1.0, surface_metrics=SURFACE_METRICS) == right | own
    diagonal = math.dist(
        (0,) * len(shape), [(side - 1) * step for side, step in zip(shape, spacing, strict=True)]
    )
    for pair in ((spot, empty), (empty, spot)):
        found = scores(*pair, names, spacing, 1.0, surface_metrics=SURFACE_METRICS)
        worst = {
            "dice": 0.0,
            "pixel_accuracy": 1 - 1 / spot.numel(),
            "hd95": diagonal,
            "surface_dice": 0.0,
        }
        own = (
            {f"{kind}_spot": worst[kind] for kind in ("dice", *SURFACE_METRICS)}
            if pair[1] is spot
            else none
        )
        assert found == pytest.approx(worst | own, nan_ok=True)


def test_a_class_that_is_missing_enters_the_mean() -> None:
    """Of two foreground classes one is right, the other is in neither mask, or in one of them."""
    reference = torch.zeros(4, 4, dtype=torch.uint8)
    reference[1] = 1
    assert (
        scores(reference, reference, CLASSES, (1, 1), 1, surface_metrics=SURFACE_METRICS)["dice"]
        == 1
    )
    prediction = reference.clone()
    prediction[3, 3] = 2
    found = scores(prediction, reference, CLASSES, (1, 1), 1, surface_metrics=SURFACE_METRICS)
    assert (found["dice"], found["dice_anterior_part"]) == (0.5, 1.0)
    assert all(math.isnan(found[f"{kind}_posterior"]) for kind in ("dice", *SURFACE_METRICS))
    assert found["hd95"] == pytest.approx((0 + math.hypot(3, 3)) / 2)
    assert found["surface_dice"] == 0.5


def test_distances_are_left_out() -> None:
    found = scores(blobs((9, 9), 0), blobs((9, 9), 1), CLASSES, (1, 1), 1, surface_metrics=())
    assert list(found) == ["dice", "dice_anterior_part", "dice_posterior", "pixel_accuracy"]


def test_channels_that_exclude_each_other_are_classes() -> None:
    """The first of them is the background; a single channel, and overlapping ones, are all foreground."""
    prediction, reference = blobs((20, 22), 0), blobs((20, 22), 1)
    pair = [
        torch.stack([mask == index for index in range(3)]).to(torch.uint8)
        for mask in (prediction, reference)
    ]
    expected = scores(prediction, reference, CLASSES, (1, 2), 1, surface_metrics=SURFACE_METRICS)
    found = channel_scores(*pair, (1, 2), 1, surface_metrics=SURFACE_METRICS, names=CLASSES)
    assert found == pytest.approx(expected)
    assert [*found] == [*expected]
    one = scores(
        (prediction == 1).byte(),
        (reference == 1).byte(),
        ("", "class 1"),
        (1, 2),
        1,
        surface_metrics=SURFACE_METRICS,
    )
    assert (
        channel_scores(pair[0][1:2], pair[1][1:2], (1, 2), 1, surface_metrics=SURFACE_METRICS)
        == one
    )
    whole = [torch.stack([mask > 0, mask == 2]).to(torch.uint8) for mask in (prediction, reference)]
    parts = [
        scores(ours, theirs, ("", ""), (1, 2), 1, surface_metrics=SURFACE_METRICS)
        for ours, theirs in zip(*whole, strict=True)
    ]
    overlapping = channel_scores(*whole, (1, 2), 1, surface_metrics=SURFACE_METRICS)
    assert overlapping["hd95"] == pytest.approx(np.mean([part["hd95"] for part in parts]))
    assert overlapping["pixel_accuracy"] == expected["pixel_accuracy"]


def test_names_of_classes_in_names_of_metrics() -> None:
    assert [slug(name) for name in ("Left lung", "CSF (ventricles)", "grey-matter")] == [
        "left_lung",
        "csf_ventricles",
        "grey_matter",
    ]


def test_names_that_cannot_be_told_apart_are_numbers() -> None:
    assert (
        foreground(("background", "liver", "tumour"), 2)
        == foreground(("liver", "tumour"), 2)
        == ["liver", "tumour"]
    )
    assert (
        foreground((), 2)
        == foreground(("liver",), 2)
        == foreground(("a b", "a-b"), 2)
        == ["class 1", "class 2"]
    )


def test_each_structure_has_the_mean_of_the_cases_that_have_it() -> None:
    """Liver in all three cases, tumour in the second (half found) and third (missed), cyst in none.

    The tumour has 2 pixels, of which 1 is found and nothing besides: Dice 2 * 1 / (2 + 1) = 2/3, in the third 0: mean
    1/3 of two cases. Each pixel is within 1 of the found one: surface Dice 1 and 0, mean 1/2.
    """
    names = ("background", "liver", "tumour", "cyst")
    empty = torch.zeros(6, 6, dtype=torch.uint8)
    empty[0, 0] = 1
    whole, half = empty.clone(), empty.clone()
    whole[3, 3] = whole[3, 4] = half[3, 3] = 2
    pairs = [
        (whole, empty),
        (half, whole),
        (empty, whole),
    ]  # in the first case a tumour is found that is not there
    rows = [scores(*pair, names, (1, 1), 1, surface_metrics=SURFACE_METRICS) for pair in pairs]
    values = {
        name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in rows[0]
    }
    summary = summarise(Cases(("a", "b", "c"), values))
    found = by_structure(summary, values, names, 3)
    assert found["liver"] == {"dice": 1, "hd95": 0, "surface_dice": 1, "cases": 3}
    expected = {
        "dice": 1 / 3,
        "hd95": (0.95 + math.hypot(5, 5)) / 2,
        "surface_dice": 0.5,
        "cases": 2,
    }
    assert found["tumour"] == pytest.approx(expected)  # the 95th percentile of 0 and 1 is 0.95
    assert found["cyst"] == {"dice": None, "hd95": None, "surface_dice": None, "cases": 0}
    quick = [scores(*pair, names, (1, 1), 1, surface_metrics=()) for pair in pairs]
    values = {
        name: torch.tensor([row[name] for row in quick], dtype=torch.float64) for name in quick[0]
    }
    found = by_structure(summarise(Cases(("a", "b", "c"), values)), values, names, 3)
    assert found["tumour"] == pytest.approx({"dice": 1 / 3, "cases": 2})
    assert found["cyst"] == {"dice": None, "cases": 0}


# Surfaces, against MONAI's own of each class's mask alone


def by_monai(
    masks: tuple[Tensor, Tensor], spacing: tuple[float, ...], tolerance: float
) -> tuple[float, float]:
    """HD95 and surface Dice of two binary masks."""
    if not all(mask.any() for mask in masks):
        sides = math.hypot(
            *((side - 1) * step for side, step in zip(masks[0].shape, spacing, strict=True))
        )
        return (0.0, 1.0) if not any(mask.any() for mask in masks) else (sides, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, distances, _ = get_edge_surface_distance(*masks, spacing=[*spacing], symmetric=True)
    near = sum(int((distance <= tolerance).sum()) for distance in distances)
    return max(float(torch.quantile(one, 0.95)) for one in distances), near / sum(
        map(len, distances)
    )


@pytest.mark.parametrize("kind", ["noise", "blobs", "sparse", "empty"])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_surfaces_of_all_classes_at_once_have_the_bits_of_each_alone(
    kind: str, dimensions: int
) -> None:
    draw = np.random.default_rng(dimensions)
    for seed in range(3):
        shape = tuple(draw.integers(8 if kind in ("blobs", "empty") else 1, 14, dimensions))
        spacing = tuple(draw.uniform(0.3, 4, dimensions).tolist())
        count, tolerance = int(draw.integers(2, 10)), float(draw.uniform(0.5, 3))
        share = {"noise": 1.0, "sparse": 0.1}.get(kind, 0.0)
        masks = draw.integers(0, count, (2, *shape)) * (draw.random((2, *shape)) < share)
        pair = [*torch.from_numpy(masks.astype(np.uint8))]
        if kind in ("blobs", "empty"):
            pair = [
                pair[0] if kind == "empty" else blobs(shape, seed, count),
                blobs(shape, seed + 100, count),
            ]
        names = [f"c{c}" for c in range(count)]
        each = [by_monai((pair[0] == c, pair[1] == c), spacing, tolerance) for c in range(1, count)]
        found = scores(*pair, names, spacing, tolerance, surface_metrics=SURFACE_METRICS)
        assert [found[name] for name in SURFACE_METRICS] == np.mean(each, axis=0).tolist()
        channels = [torch.stack([one == c for c in range(count)]).to(torch.uint8) for one in pair]
        for shown in (
            channels,
            [channel[1:] for channel in channels],
            [channels[0] | channels[1], channels[1]],
        ):
            first = int(len(shown[1]) > 1 and bool((shown[1].sum(0) == 1).all()))
            alone = [
                by_monai((a > 0, b > 0), spacing, tolerance) for a, b in zip(*shown, strict=True)
            ][first:]
            found = channel_scores(*shown, spacing, tolerance, surface_metrics=SURFACE_METRICS)
            assert [found[name] for name in SURFACE_METRICS] == [
                np.mean(column) for column in zip(*alone, strict=True)
            ]


# What is asked for


def test_one_structure_is_measured_alone() -> None:
    prediction, reference = blobs((20, 22), 0), blobs((20, 22), 1)
    wanted = surface_metrics_of("hd95_posterior, dice,surface_dice_anterior_part", CLASSES)
    assert wanted == ("hd95_posterior", "surface_dice_anterior_part")
    found = scores(prediction, reference, CLASSES, (1, 2), 1, surface_metrics=wanted)
    hd95, _ = by_monai((prediction == 2, reference == 2), (1, 2), 1)
    _, near = by_monai((prediction == 1, reference == 1), (1, 2), 1)
    assert [*found] == ["dice", "dice_anterior_part", "dice_posterior", "pixel_accuracy", *wanted]
    assert [found[name] for name in wanted] == [hd95, near]
    channels = [
        torch.stack([mask == c for c in range(3)]).to(torch.uint8)
        for mask in (prediction, reference)
    ]
    shown = channel_scores(*channels, (1, 2), 1, surface_metrics=wanted, names=CLASSES)
    assert [shown[name] for name in wanted] == [hd95, near]
    assert all(
        math.isnan(channel_scores(*channels, (1, 2), 1, surface_metrics=wanted)[name])
        for name in wanted
    )


def test_what_can_be_asked_for() -> None:
    assert (
        surface_metrics_of("all", CLASSES)
        == surface_metrics_of("hd95,all", CLASSES)
        == surface_metrics_of("all", None)
        == SURFACE_METRICS
    )
    assert surface_metrics_of("dice", CLASSES) == surface_metrics_of("dice", ()) == ()
    with pytest.raises(
        InputError, match="--metrics hd96; all, dice, hd95, surface_dice, .*; did you mean hd95"
    ):
        surface_metrics_of("dice,hd96", CLASSES)
    with pytest.raises(InputError, match="--metrics hd95_liver"):
        surface_metrics_of("hd95_liver", CLASSES)
    with pytest.raises(
        InputError, match="--metrics dice; this bundle's test items are scored by all;"
    ):
        surface_metrics_of("dice", None)
