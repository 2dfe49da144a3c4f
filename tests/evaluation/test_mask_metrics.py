"""Metrics of a case, compared with MONAI's and with values by hand."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from monai.metrics import compute_dice, compute_hausdorff_distance, compute_surface_dice
from monai.networks import one_hot
from torch import Tensor

from medfl.evaluation.mask_metrics import channel_scores, scores, slug

CLASSES = ("background", "Anterior part", "posterior")


def blobs(shape: tuple[int, ...], seed: int, classes: int = 3) -> Tensor:
    """Label maps whose classes have smooth borders, some of them along the edge of the image."""
    noise = np.random.default_rng(seed).normal(size=(classes, *shape))
    kernel = np.hanning(9)[1:-1] / np.hanning(9).sum()
    for axis in range(1, noise.ndim):
        noise = np.apply_along_axis(np.convolve, axis, noise, kernel, mode="same")
    return torch.from_numpy(noise.argmax(0).astype(np.uint8))


def monais(prediction: Tensor, reference: Tensor, spacing: Any, tolerance: float) -> dict[str, float]:
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
    }


@pytest.mark.parametrize(
    ("shape", "spacing", "tolerance"),
    [((40, 52), (1.0, 1.0), 1.0), ((33, 20), (0.4, 2.5), 0.8), ((17, 22, 12), (1.0, 0.9, 3.0), 2.0)],
)
def test_the_numbers_are_monais(shape: tuple[int, ...], spacing: tuple[float, ...], tolerance: float) -> None:
    for seed in range(4):
        prediction, reference = blobs(shape, seed), blobs(shape, seed + 100)
        found = scores(prediction, reference, CLASSES, spacing, tolerance, distances=True)
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
    reference, prediction = torch.zeros(6, 6, dtype=torch.uint8), torch.zeros(6, 6, dtype=torch.uint8)
    reference[1:4, 0:3] = 1
    prediction[1:4, 2:5] = 1
    found = scores(prediction, reference, ("background", "square"), (2.0, 1.0), 1.0, distances=True)
    assert found == pytest.approx({"dice": 1 / 3, "pixel_accuracy": 24 / 36, "hd95": 2.0, "surface_dice": 10 / 16})


def test_spacing_changes_distances_and_axis_order_does_not() -> None:
    """A voxel 4 along the last axis from a line: 4 or 12 mm; with the axes in another order the same."""
    reference = torch.zeros(7, 8, 9, dtype=torch.uint8)
    prediction = reference.clone()
    reference[3, 4, 1] = prediction[3, 4, 5] = 1
    names = ("background", "voxel")

    def hd95(order: tuple[int, ...], *spacing: float) -> float:
        masks = (mask.permute(order).flip(0) for mask in (prediction, reference))
        return scores(*masks, names, [spacing[axis] for axis in order], 1.0, distances=True)["hd95"]

    assert hd95((0, 1, 2), 1, 1, 1) == 4
    assert hd95((0, 1, 2), 1, 1, 3) == 12
    assert hd95((2, 0, 1), 1, 1, 3) == 12
    assert hd95((0, 1, 2), 3, 1, 1) == 4
    large = [mask.repeat(3, 1, 1) for mask in (blobs((12, 14, 10), 0), blobs((12, 14, 10), 1))]
    first = scores(*large, CLASSES, (1, 1, 3), 2.0, distances=True)
    turned = [mask.permute(2, 0, 1).flip(1) for mask in large]
    assert scores(*turned, CLASSES, (3, 1, 1), 2.0, distances=True) == pytest.approx(first, rel=1e-6)
    assert scores(*large, CLASSES, (1, 1, 1), 2.0, distances=True)["hd95"] < first["hd95"]


@pytest.mark.parametrize("shape", [(5, 9), (5, 9, 3)])
def test_empty_masks(shape: tuple[int, ...]) -> None:
    """The diagonal joins the centres of pixels in opposite corners."""
    spacing = (2.0, 0.5, 4.0)[: len(shape)]
    empty, spot = torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape, dtype=torch.uint8)
    spot.view(-1)[7] = 1
    names = ("background", "spot")
    right = {"dice": 1.0, "pixel_accuracy": 1.0, "hd95": 0.0, "surface_dice": 1.0}
    assert scores(empty, empty, names, spacing, 1.0, distances=True) == right
    assert scores(spot, spot, names, spacing, 1.0, distances=True) == right
    diagonal = math.dist((0,) * len(shape), [(side - 1) * step for side, step in zip(shape, spacing, strict=True)])
    for pair in ((spot, empty), (empty, spot)):
        found = scores(*pair, names, spacing, 1.0, distances=True)
        share = 1 - 1 / spot.numel()
        assert found == pytest.approx({"dice": 0.0, "pixel_accuracy": share, "hd95": diagonal, "surface_dice": 0.0})


def test_a_class_that_is_missing_enters_the_mean() -> None:
    """Of two foreground classes one is right, the other is in neither mask, or in one of them."""
    reference = torch.zeros(4, 4, dtype=torch.uint8)
    reference[1] = 1
    assert scores(reference, reference, CLASSES, (1, 1), 1, distances=True)["dice"] == 1
    prediction = reference.clone()
    prediction[3, 3] = 2
    found = scores(prediction, reference, CLASSES, (1, 1), 1, distances=True)
    assert (found["dice"], found["dice_anterior_part"], found["dice_posterior"]) == (0.5, 1.0, 0.0)
    assert found["hd95"] == pytest.approx((0 + math.hypot(3, 3)) / 2)
    assert found["surface_dice"] == 0.5


def test_distances_are_left_out() -> None:
    found = scores(blobs((9, 9), 0), blobs((9, 9), 1), CLASSES, (1, 1), 1, distances=False)
    assert list(found) == ["dice", "dice_anterior_part", "dice_posterior", "pixel_accuracy"]


def test_channels_that_exclude_each_other_are_classes() -> None:
    """The first of them is the background; a single channel, and overlapping ones, are all foreground."""
    prediction, reference = blobs((20, 22), 0), blobs((20, 22), 1)
    pair = [torch.stack([mask == index for index in range(3)]).to(torch.uint8) for mask in (prediction, reference)]
    expected = scores(prediction, reference, CLASSES, (1, 2), 1, distances=True)
    found = channel_scores(*pair, (1, 2), 1, distances=True)
    assert found == pytest.approx({name: expected[name] for name in found})
    one = scores((prediction == 1).byte(), (reference == 1).byte(), ("", ""), (1, 2), 1, distances=True)
    assert channel_scores(pair[0][1:2], pair[1][1:2], (1, 2), 1, distances=True) == one
    whole = [torch.stack([mask > 0, mask == 2]).to(torch.uint8) for mask in (prediction, reference)]
    parts = [scores(ours, theirs, ("", ""), (1, 2), 1, distances=True) for ours, theirs in zip(*whole, strict=True)]
    overlapping = channel_scores(*whole, (1, 2), 1, distances=True)
    assert overlapping["hd95"] == pytest.approx(np.mean([part["hd95"] for part in parts]))
    assert overlapping["pixel_accuracy"] == expected["pixel_accuracy"]


def test_names_of_classes_in_names_of_metrics() -> None:
    assert [slug(name) for name in ("Left lung", "CSF (ventricles)", "grey-matter")] == [
        "left_lung",
        "csf_ventricles",
        "grey_matter",
    ]
