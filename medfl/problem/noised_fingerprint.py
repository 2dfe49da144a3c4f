"""A fingerprint with noise: the number of cases, and means that one case changes by a bounded amount each.

Each case contributes d numbers, clipped to -1 to 1: 1 for the case; for each axis (log2 of the voxels - 7) / 3, and
for x = log2 of the spacing / 3 both x and 2 x^2 - 1; for each channel, in the same way, x = (foreground - 1024) / 2048,
as means; 1 for each class that it has. Adding or removing a case changes their sums by at most d in total (L1). Each
sum gets noise n with P(n) proportional to exp(-epsilon |n| / d) (`policy.suppression.geometric`, on a grid of 2^-20):
this is epsilon-differential privacy per case, for all numbers of one fingerprint together. Cells, axis orders and
volumes of classes are then not released. Released without noise: that the minimum count is met, and what all cases
have in common: kind, channels, depth, names of folders and classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from medfl.core import Floats
from medfl.data import Fingerprint, Tally
from medfl.data.fingerprint import AXES, UNIT
from medfl.policy.suppression import geometric

_GRID = 2**20
_SIZE = (7.0, 3.0)
_SPACING = (0.0, 3.0)
_VALUE = (1024.0, 2048.0)
"""Centre and half width of the range of log2 of voxels, of log2 of mm, and of intensities (Hounsfield units)."""


def numbers(fingerprint: Fingerprint) -> Floats:
    """Return the sums over the cases of a fingerprint; of a single case they are clipped as said above."""
    # the mean of 1 over the cases counts them
    means = [1.0]
    for tally in fingerprint.sizes:
        means += _moments(tally, *_SIZE)[:1]
    for tally in fingerprint.spacings:
        means += _moments(tally, *_SPACING)
    for tally in fingerprint.foreground:
        means += _moments(tally, *_VALUE)
    for volume in fingerprint.volumes.values():
        means.append(getattr(volume, "count", 0) / fingerprint.cases)

    return fingerprint.cases * np.clip(means, -1, 1)


def _moments(tally: Tally, centre: float, half: float) -> list[float]:
    if not tally.count:
        return [0.0, 0.0]

    mean = (tally.mean - centre) / half
    return [mean, 2 * (mean**2 + (tally.sd / half) ** 2) - 1]


def with_noise(empty: Fingerprint, singles: Sequence[Floats], epsilon: float) -> Fingerprint:
    """Return what may be told of cases, each by its `numbers`."""
    # whole steps of a grid, since the noise is of whole numbers; each number has an equal part of epsilon
    total = np.rint(np.array(singles) * _GRID).sum(0)
    sums = (total + geometric(len(total), epsilon / len(total) / _GRID)) / _GRID

    cases = max(1, round(sums[0]))
    # in the order of `numbers`
    means = iter(np.clip(sums[1:] / cases, -1, 1).tolist())
    axes = range(AXES[empty.kind])
    sizes = [_tally(cases, *_SIZE, next(means), -1) for _ in axes]
    spacings = [_tally(cases, *_SPACING, next(means), next(means)) for _ in axes]
    extents = []
    # voxels times spacing, of which both are logarithms
    for i in axes:
        extents.append(_tally(cases, 0, 1, sizes[i].mean + spacings[i].mean, -1))

    foreground = [_tally(cases, *_VALUE, next(means), next(means)) for _ in range(empty.channels)]
    volumes = {}
    for value in empty.classes:
        volumes[value] = Tally(max(0, round(next(means) * cases)))

    return replace(
        empty, cases=cases, sizes=tuple(sizes), spacings=tuple(spacings), extents=tuple(extents),
        foreground=tuple(foreground), volumes=volumes, noise=math.sqrt(2) * len(total) / epsilon,
    )  # fmt: skip


def _tally(cases: int, centre: float, half: float, mean: float, square: float) -> Tally:
    value = centre + half * mean
    squares = value**2 + max(0.0, half**2 * ((square + 1) / 2 - mean**2))
    return Tally(cases, round(value * UNIT) * cases, math.ceil(squares * UNIT) * cases)
