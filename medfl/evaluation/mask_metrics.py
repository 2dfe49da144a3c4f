"""Metrics of one segmented case. Whole cases are scored, never patches, so that every case counts the same.

MONAI finds the surfaces and their distances, once for both metrics that use them.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from monai.metrics.utils import get_edge_surface_distance
from scipy import ndimage
from torch import Tensor

DISTANCES = ("hd95", "surface_dice")
"""The metrics that take as long as a forward pass, and are computed for test items only."""


def scores(
    prediction: Tensor,
    reference: Tensor,
    classes: Sequence[str],
    spacing: Sequence[float],
    tolerance: float,
    *,
    distances: bool,
) -> dict[str, float]:
    """Return the metrics of one case.

    Means over the foreground classes 1 to K-1 are `dice`, 2|A∩B| / (|A|+|B|); `hd95`, the 95th percentile of the
    distances between the surfaces, the larger of the two directions; and `surface_dice`, the share of both surfaces
    that is within the tolerance of the other. With more than one foreground class `dice_<name>` is the Dice of each.
    `pixel_accuracy` is the share of all pixels, background among them, that have the right class.

    A class that neither mask has: Dice 1, surface Dice 1, HD95 0. A class that one of them has: Dice 0, surface Dice 0,
    and for HD95 the diagonal of the image, the largest distance between two of its pixels.

    Args:
        prediction: (H, W[, D]) class indices.
        reference: (H, W[, D]) class indices.
        classes: K names, the background's first.
        spacing: distance between neighbours along each axis, in mm, or in pixels where these are not known.
        tolerance: of the surface Dice, in the same unit.
        distances: compute `hd95` and `surface_dice` too.
    """
    predicted, true = (mask.detach().cpu().numpy() for mask in (prediction, reference))
    count, shape = len(classes), predicted.shape
    boxes = ndimage.find_objects(((predicted > 0) | (true > 0)).astype(np.uint8))
    box = boxes[0] if boxes else (slice(0, 0),) * predicted.ndim  # empty where both masks are
    predicted, true = predicted[box].astype(np.int64), true[box].astype(np.int64)
    counts = np.bincount((true * count + predicted).ravel(), minlength=count * count).reshape(count, count)
    counts[0, 0] += math.prod(shape) - predicted.size
    both, sizes = np.diag(counts)[1:], (counts.sum(0) + counts.sum(1))[1:]
    dice = np.where(sizes > 0, 2 * both / np.maximum(sizes, 1), 1.0)
    result = {"dice": float(dice.mean())}
    if count > 2:
        result |= {f"dice_{slug(name)}": float(value) for name, value in zip(classes[1:], dice, strict=True)}
    result["pixel_accuracy"] = float(np.trace(counts) / counts.sum())
    if distances:
        values = [_surfaces(predicted == c, true == c, spacing, tolerance, shape) for c in range(1, count)]
        result |= dict(zip(DISTANCES, np.mean(values, axis=0).tolist(), strict=True))
    return result


def channel_scores(
    prediction: Tensor, reference: Tensor, spacing: Sequence[float], tolerance: float, *, distances: bool
) -> dict[str, float]:
    """Return the metrics of one case whose masks are binary channels (C, H, W[, D]), which may overlap.

    Each channel is a foreground class; where the reference's channels add up to 1 everywhere, the first is the
    background. A pixel is right if it is right in all channels.
    """
    one_hot = len(reference) > 1 and bool((reference.sum(0) == 1).all())
    pairs = zip(prediction[one_hot:], reference[one_hot:], strict=True)
    cases = [scores(*pair, ("", ""), spacing, tolerance, distances=distances) for pair in pairs]
    result = {name: float(np.mean([case[name] for case in cases])) for name in cases[0]}
    return result | {"pixel_accuracy": float((prediction == reference).all(0).double().mean())}


def slug(name: str) -> str:
    """Return a class's name as part of a metric's name: lower case, words joined by underscores."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _surfaces(
    predicted: np.ndarray, true: np.ndarray, spacing: Sequence[float], tolerance: float, shape: Sequence[int]
) -> tuple[float, float]:
    """Return HD95 and surface Dice of one class's masks, cropped from an image of this shape."""
    if not predicted.any() and not true.any():
        return 0.0, 1.0
    if not predicted.any() or not true.any():
        return math.hypot(*((side - 1) * step for side, step in zip(shape, spacing, strict=True))), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of MONAI's own calls
        _, distances, _ = get_edge_surface_distance(
            torch.from_numpy(predicted), torch.from_numpy(true), spacing=[*map(float, spacing)], symmetric=True
        )
    hd95 = max(float(torch.quantile(distance, 0.95)) for distance in distances)
    near = sum(int((distance <= tolerance).sum()) for distance in distances)
    return hd95, near / sum(map(len, distances))
