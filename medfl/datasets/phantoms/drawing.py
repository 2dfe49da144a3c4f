"""Pictures for phantom cohorts: skin lesions, blood cells, endoscopy, OCT scans, radiographs, simple organs.

Every scene takes a generator, a class number and a side in pixels; it returns floats in 0..1, (size, size, 3) or
(size, size).
Classes differ in shape, texture and shade, with overlap: features of single images do not tell the class for certain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Scene = Callable[[np.random.Generator, int, int], Array]

# Brightness offset, contrast and RGB cast of the devices of up to six centres.
LOOKS: tuple[tuple[float, float, tuple[float, float, float]], ...] = (
    (0.00, 1.00, (1.00, 1.00, 1.00)),
    (0.10, 0.80, (1.04, 0.98, 0.92)),
    (-0.10, 1.15, (0.94, 0.98, 1.06)),
    (0.05, 1.25, (1.08, 0.94, 0.94)),
    (-0.16, 0.85, (0.96, 1.04, 0.98)),
    (0.15, 1.00, (0.97, 0.97, 1.08)),
)


@functools.lru_cache(maxsize=4)
def grid(size: int) -> tuple[Array, Array]:
    """Return the coordinates (x, y) of the pixel centres in -1..1, each (size, size); not to be changed."""
    axis = (np.arange(size) + 0.5) * 2 / size - 1
    x, y = np.meshgrid(axis, axis)
    x.flags.writeable = y.flags.writeable = False
    return x, y


def noise(rng: np.random.Generator, size: int, cells: int) -> Array:
    """Return smooth noise of `cells` bumps a side, about -1..1: random values at knots, bilinear in between."""
    knots = rng.uniform(-1, 1, (cells + 1, cells + 1))
    at = (np.arange(size) + 0.5) * cells / size
    low = np.minimum(at.astype(int), cells - 1)
    part = at - low
    rows = knots[low] * (1 - part)[:, None] + knots[low + 1] * part[:, None]
    mixed: Array = rows[:, low] * (1 - part) + rows[:, low + 1] * part
    return mixed


def inside(distance: Array, softness: float = 0.06) -> Array:
    """Return 1 where a signed distance is negative, 0 where positive, with a soft edge."""
    return np.clip(0.5 - distance / (2 * softness), 0, 1)


def blob(
    rng: np.random.Generator, size: int, radius: float, jag: float, lobes: int, centre: tuple[float, float] = (0, 0)
) -> Array:
    """Return the soft mask of a rounded shape; `jag` is the depth and `lobes` the number of its bulges."""
    x, y = grid(size)
    x, y = x - centre[0], y - centre[1]
    stretch, turn = rng.uniform(0.85, 1.18), rng.uniform(0, np.pi)
    u, v = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    angle, edge = np.arctan2(v, u), np.ones_like(u)
    for waves, share in ((2, 0.5), (3, 0.5), (lobes, 0.7), (lobes + 2, 0.4)):
        edge += jag * share * rng.uniform(0.4, 1.2) * np.cos(waves * angle + rng.uniform(0, 2 * np.pi))
    return inside(np.hypot(u / stretch, v * stretch) - radius * edge)


def paint(picture: Array, mask: Array, colour: ArrayLike, strength: float = 1.0) -> Array:
    """Lay `colour` over an RGB or grey picture where `mask` is 1."""
    cover = (mask[..., None] if picture.ndim == 3 else mask) * strength
    return picture + cover * (np.asarray(colour, dtype=np.float64) - picture)


def centre_look(picture: Array, centre: int) -> Array:
    """Give a picture the brightness, contrast and, in RGB, the colour cast of the device of centre number `centre`."""
    offset, contrast, cast = LOOKS[centre % len(LOOKS)]
    shown = (picture - 0.5) * contrast + 0.5 + offset
    return np.clip(shown * np.array(cast) if picture.ndim == 3 else shown, 0, 1)


def to_bytes(picture: Array, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return 8-bit pixels with sensor noise of standard deviation 0.03."""
    return (np.clip(picture + rng.normal(0, 0.03, picture.shape), 0, 1) * 255).round().astype(np.uint8)
