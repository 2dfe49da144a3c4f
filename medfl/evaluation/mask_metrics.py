"""Metrics of one segmented case. Whole cases are scored, never patches, so that every case counts the same.

One pass over a case finds the surfaces of all structures; only those that a metric needs are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from scipy import ndimage
from scipy.spatial import KDTree
from torch import Tensor

from medfl.core import (
    ALL,
    SURFACE_METRICS,
    Array,
    InputError,
    Integers,
    Metrics,
    did_you_mean,
    metrics,
    slug,
)

KINDS = ("dice", *SURFACE_METRICS)
"""The metrics that are computed per structure: `<kind>_<slug of its name>`."""

_Surfaces = tuple[float, float]
"""HD95, in the unit of the spacing, and surface Dice of one class, in the order of `SURFACE_METRICS`."""


def surface_metrics_of(text: str, structures: Sequence[str] | None) -> tuple[str, ...]:
    """Return the surface metrics that `--metrics` names, in its order; Dice is always computed.

    Args:
        text: comma-separated names: all, dice, hd95, surface_dice, or one of the last two with a structure's name
            (`hd95_left_kidney`), for that structure alone.
        structures: names of a mask's values or channels, None unless the task is segmentation.

    Raises:
        InputError: a name is none of these.
    """
    allowed = [ALL]
    if structures is not None:
        allowed += ["dice", *SURFACE_METRICS]

    for structure in map(slug, structures or ()):
        if structure != "background":
            allowed += [f"{kind}_{structure}" for kind in SURFACE_METRICS]

    names = metrics(text)

    for name in names:
        if name not in allowed:
            raise InputError(
                f"--metrics {name}",
                f"this bundle's test items are scored by {', '.join(allowed[:10])}{', …' if allowed[10:] else ''}",
                did_you_mean(name, allowed, "leave it out"),
            )

    chosen = {}  # in order, without repeats
    for name in names:
        chosen.update(dict.fromkeys(SURFACE_METRICS if name == ALL else (name,)))

    chosen.pop("dice", None)
    return tuple(chosen)


def scores(
    prediction: Tensor,
    reference: Tensor,
    classes: Sequence[str],
    spacing: Sequence[float],
    tolerance: float,
    *,
    surface_metrics: Sequence[str] = (),
) -> Metrics:
    """Return the metrics of one case.

    The means over the foreground classes 1 to K-1 are `dice`, 2|A∩B| / (|A|+|B|); `hd95`, the 95th percentile of the
    distances between the surfaces, the larger of the two directions; and `surface_dice`, the share of both surfaces
    that lies within the tolerance of the other. `pixel_accuracy` is the share of all pixels, background included, with
    the correct class. `dice_<name>`, and `hd95_<name>` and `surface_dice_<name>` if requested, are per class, NaN for a
    case whose reference lacks the class.

    In the means, a class in neither mask has Dice 1, surface Dice 1 and HD95 0. A class in only one mask has Dice 0,
    surface Dice 0 and, as HD95, the diagonal of the image, the largest distance between two of its pixels.

    Args:
        prediction: (H, W[, D]) class indices.
        reference: (H, W[, D]) class indices.
        classes: K names, background first.
        spacing: distance between neighbours along each axis, in mm, or in pixels if unknown.
        tolerance: of the surface Dice, in the same unit.
        surface_metrics: surface metrics to compute as well, from `surface_metrics_of`.
    """
    predicted = prediction.detach().cpu().numpy()
    true = reference.detach().cpu().numpy()
    count = len(classes)
    shape = predicted.shape
    # Count pixels and find surfaces only in the box around both masks; the rest is background.
    boxes = ndimage.find_objects(((predicted > 0) | (true > 0)).astype(np.uint8))
    box = boxes[0] if boxes else (slice(0, 0),) * predicted.ndim  # empty if both masks are
    predicted = predicted[box].astype(np.int64)
    true = true[box].astype(np.int64)
    # (K, K) pixels, the reference in rows
    cells = (true * count + predicted).ravel()
    counts = np.bincount(cells, minlength=count * count).reshape(count, count)
    counts[0, 0] += math.prod(shape) - predicted.size
    both = np.diag(counts)[1:]
    sizes = (counts.sum(0) + counts.sum(1))[1:]
    present = counts.sum(1)[1:] > 0
    # 2|A∩B| / (|A|+|B|), and 1 if both are empty
    dice = np.where(sizes > 0, 2 * both / np.maximum(sizes, 1), 1.0)
    result = {"dice": float(dice.mean())}
    # A class's own Dice is NaN if the reference lacks it: its mean is over the cases that have it.
    for name, value in zip(classes[1:], np.where(present, dice, math.nan), strict=True):
        result[f"dice_{slug(name)}"] = float(value)

    result["pixel_accuracy"] = float(np.trace(counts) / counts.sum())

    if surface_metrics:
        ours = _surface_points(predicted, count)
        theirs = _surface_points(true, count)
        measure = partial(_surfaces, spacing=spacing, tolerance=tolerance, shape=shape)
        result |= _of_surfaces(
            surface_metrics,
            classes[1:],
            present,
            lambda c: measure(ours[c], theirs[c]),
            lambda pairs: np.mean(pairs, axis=0),
        )

    return result


def channel_scores(
    prediction: Tensor,
    reference: Tensor,
    spacing: Sequence[float],
    tolerance: float,
    *,
    surface_metrics: Sequence[str] = (),
    names: Sequence[str] = (),
) -> Metrics:
    """Return the metrics of one case whose masks are binary channels (C, H, W[, D]), which may overlap.

    Each channel is a foreground class; if the reference's channels sum to 1 everywhere, the first is the background.
    A pixel is correct if it is so in all channels. `surface_metrics` as in `scores`; `names`: of the channels.
    """
    # channels of which each pixel has one include the background, which is no structure
    first = int(len(reference) > 1 and _exclusive(reference))
    pairs = [*zip(prediction[first:], reference[first:], strict=True)]
    names = foreground(names, len(pairs))
    result = {"dice": math.nan}  # first in the row, computed last
    dice = []
    for pair, name in zip(pairs, names, strict=True):
        case = scores(*pair, ("", name), spacing, tolerance)
        dice.append(case["dice"])
        result[f"dice_{slug(name)}"] = case[f"dice_{slug(name)}"]

    result["dice"] = float(np.mean(dice))
    result["pixel_accuracy"] = float((prediction == reference).all(0).double().mean())

    if surface_metrics:
        present = [bool(true.any()) for _, true in pairs]
        measure_surfaces = partial(
            _surfaces, spacing=spacing, tolerance=tolerance, shape=prediction.shape[1:]
        )
        maps = []
        if first and _exclusive(prediction):  # one pass over the image instead of one per channel
            for mask in (prediction, reference):
                maps.append(_surface_points(mask.argmax(0).numpy(), len(mask)))

        def measured(c: int) -> _Surfaces:
            if maps:
                return measure_surfaces(maps[0][c], maps[1][c])

            predicted, true = pairs[c]
            return measure_surfaces(
                _surface_points(predicted.numpy(), 2)[0], _surface_points(true.numpy(), 2)[0]
            )

        result |= _of_surfaces(
            surface_metrics, names, present, measured, lambda r: map(np.mean, zip(*r, strict=True))
        )

    return result


def foreground(names: Sequence[str], count: int) -> list[str]:
    """Return names for this many structures: these, without the background's, or class 1, class 2, ...

    They are numbered if their count differs, or if the names of metrics could not tell them apart.
    """
    if 0 <= len(names) - count <= 1:  # with or without the background's name
        structures = [*names[-count:]]
        # names that would share a column, or have none, are not used
        if len(set(map(slug, structures)) - {""}) == count:
            return structures

    return _numbered(count)


def by_structure(
    summary: Mapping[str, float], measured: Collection[str], names: Sequence[str], cases: int
) -> dict[str, dict[str, float | None]]:
    """Return structure -> its metrics over the cases whose reference has it (None without any), and their number."""
    structures = [name for name in names if f"dice_{slug(name)}" in measured]
    if not structures:
        numbered = _numbered(len(measured) - 1)
        structures = [name for name in numbered if f"dice_{slug(name)}" in measured]

    results: dict[str, dict[str, float | None]] = {}
    for name in structures:
        results[name] = {}
        for kind in KINDS:
            column = f"{kind}_{slug(name)}"
            if column in measured:
                results[name][kind] = summary.get(column)

        # A summary counts the cases of a metric only if some are NaN.
        dice = f"dice_{slug(name)}"
        scored = summary.get(f"{dice}_cases", cases) if dice in summary else 0
        results[name]["cases"] = int(scored)

    return results


def _numbered(count: int) -> list[str]:
    return [f"class {index}" for index in range(1, count + 1)]


def _exclusive(channels: Tensor) -> bool:
    return bool((channels.sum(0) == 1).all())


# Surfaces


def _of_surfaces(
    surface_metrics: Sequence[str],
    names: Sequence[str],
    present: Sequence[bool],
    measured: Callable[[int], _Surfaces],
    mean: Callable[[list[_Surfaces]], Iterable[float]],
) -> Metrics:
    """Return the requested surface metrics: means over the foreground classes, and those of single classes.

    A metric is NaN for a structure that is not a class of the case, or that the reference lacks.
    """
    of_all = [kind for kind in SURFACE_METRICS if kind in surface_metrics]
    metric_names = dict.fromkeys(surface_metrics)
    for kind in of_all:
        metric_names.update(dict.fromkeys(f"{kind}_{slug(name)}" for name in names))

    values = {}
    for c, name in enumerate(names):
        if any(f"{kind}_{slug(name)}" in metric_names for kind in SURFACE_METRICS):
            values[c] = measured(c)

    results = {}
    for c, pair in values.items():
        for kind, value in zip(SURFACE_METRICS, pair, strict=True):
            if present[c]:
                results[f"{kind}_{slug(names[c])}"] = value

    if of_all:
        results |= zip(SURFACE_METRICS, mean([*values.values()]), strict=True)

    return {name: float(results.get(name, math.nan)) for name in metric_names}


def _surface_points(labels: Array, count: int) -> list[Integers]:
    """Return each foreground class's surface (N, dimensions): its pixels with a face neighbour of another class.

    Pixels outside the image belong to no class.
    """
    edges = np.zeros(labels.shape, bool)
    for axis in range(labels.ndim):
        along = np.moveaxis(labels, axis, 0)
        edge = np.moveaxis(edges, axis, 0)
        differs = along[1:] != along[:-1]
        edge[1:] |= differs
        edge[:-1] |= differs
        # The outermost pixels have no neighbour beyond them.
        edge[:1] = edge[-1:] = True

    points = np.argwhere(edges & (labels > 0))
    classes = labels[tuple(points.T)]
    order = np.argsort(classes, kind="stable")
    # One pass for all classes: points sorted by class, split where it changes.
    return np.split(points[order], np.searchsorted(classes[order], np.arange(2, count)))


def _surfaces(
    predicted: Integers,
    true: Integers,
    spacing: Sequence[float],
    tolerance: float,
    shape: Sequence[int],
) -> _Surfaces:
    """Return HD95 and surface Dice of one class from its surface points in an image of this shape."""
    if not len(predicted) and not len(true):
        return 0.0, 1.0
    if not len(predicted) or not len(true):
        # Half a pixel from each end: between the centres of opposite corner pixels.
        sides = ((side - 1) * step for side, step in zip(shape, spacing, strict=True))
        return math.hypot(*sides), 0.0

    # From the corner of a box one pixel wider, in single precision, to match MONAI to the bit
    corner = np.minimum(predicted.min(0), true.min(0)) - 1
    here = (predicted - corner) * np.asarray(spacing, float)
    there = (true - corner) * np.asarray(spacing, float)
    distances = []
    for starts, ends in ((here, there), (there, here)):
        nearest, _ = KDTree(ends, leafsize=32).query(starts)
        distances.append(torch.from_numpy(nearest).float())

    # the larger of the two directions, as in MONAI's get_surface_distance for HD95
    hd95 = max(float(torch.quantile(distance, 0.95)) for distance in distances)
    near = (torch.cat(distances) <= tolerance).sum()

    return hd95, int(near) / sum(map(len, distances))
