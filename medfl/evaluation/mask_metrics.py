"""Metrics of one segmented case; every case counts the same, whatever its size, so patches are never scored.

MONAI finds the surfaces and the distances between them, once for the two metrics that are made of them.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from monai.metrics.utils import get_edge_surface_distance
from torch import Tensor

DISTANCES = ("hd95", "surface_dice")
"""The metrics that take as long as a network does, and are computed on test items only."""


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
    ours, theirs = (mask.detach().cpu().numpy() for mask in (prediction, reference))
    count, shape = len(classes), ours.shape
    box = _box((ours > 0) | (theirs > 0))
    ours, theirs = ours[box].astype(np.int64), theirs[box].astype(np.int64)
    counts = np.bincount((theirs * count + ours).ravel(), minlength=count * count).reshape(count, count)
    counts[0, 0] += math.prod(shape) - ours.size
    both, sizes = np.diag(counts)[1:], (counts.sum(0) + counts.sum(1))[1:]
    dice = np.where(sizes > 0, 2 * both / np.maximum(sizes, 1), 1.0)
    result = {"dice": float(dice.mean())}
    if count > 2:
        result |= {f"dice_{slug(name)}": float(value) for name, value in zip(classes[1:], dice, strict=True)}
    result["pixel_accuracy"] = float(np.trace(counts) / counts.sum())
    if distances:
        found = [_surfaces(ours == index, theirs == index, spacing, tolerance, shape) for index in range(1, count)]
        result |= dict(zip(DISTANCES, np.mean(found, axis=0).tolist(), strict=True))
    return result


def channel_scores(
    prediction: Tensor, reference: Tensor, spacing: Sequence[float], tolerance: float, *, distances: bool
) -> dict[str, float]:
    """Return the metrics of one case whose masks are binary channels (C, H, W[, D]), which may overlap.

    Each channel is a foreground class, but for the first where the reference's add up to 1 everywhere: that is the
    background. A pixel is right if it is right in all channels.
    """
    one_hot = len(reference) > 1 and bool((reference.sum(0) == 1).all())
    pairs = zip(prediction[one_hot:], reference[one_hot:], strict=True)
    found = [scores(*pair, ("", ""), spacing, tolerance, distances=distances) for pair in pairs]
    result = {name: float(np.mean([case[name] for case in found])) for name in found[0]}
    return result | {"pixel_accuracy": float((prediction == reference).all(0).double().mean())}


def slug(name: str) -> str:
    """Return a class's name as part of a metric's name: lower case, words joined by underscores."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _surfaces(
    ours: np.ndarray, theirs: np.ndarray, spacing: Sequence[float], tolerance: float, shape: Sequence[int]
) -> tuple[float, float]:
    """Return HD95 and surface Dice of one class's masks, cropped from an image of this shape."""
    if not ours.any() and not theirs.any():
        return 0.0, 1.0
    if not ours.any() or not theirs.any():
        return math.hypot(*((side - 1) * step for side, step in zip(shape, spacing, strict=True))), 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of MONAI, about how it calls itself
        _, found, _ = get_edge_surface_distance(
            torch.from_numpy(ours), torch.from_numpy(theirs), spacing=[float(step) for step in spacing], symmetric=True
        )
    there, back = tuple(found)
    near = int((there <= tolerance).sum() + (back <= tolerance).sum())
    hd95 = max(float(torch.quantile(distance, 0.95)) for distance in (there, back))
    return hd95, near / (len(there) + len(back))


def _box(mask: np.ndarray) -> tuple[slice, ...]:
    """Return the bounding box of a mask."""
    box = []
    for axis in range(mask.ndim):
        inside = np.flatnonzero(mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis)))
        box.append(slice(inside[0], inside[-1] + 1) if inside.size else slice(0, 0))
    return tuple(box)
