"""Scenes of phantoms with reference masks: lungs in chest radiographs, lesions in dermatoscopic pictures.

A scene takes a generator and a side in pixels; it returns a picture (size, size[, 3]) of floats in 0..1 and its mask
(size, size) of 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from medfl.datasets.phantoms.drawing import Array, blob, centre_look, grid, inside, noise, paint, to_bytes
from medfl.datasets.phantoms.phantom import Case
from medfl.datasets.phantoms.scenes_colour import LESIONS, lesion

Bytes = NDArray[np.uint8]
LEAST = 5  # cases a centre: fewer would leave a section without any
_TWICE = 5  # every fifth case of a large centre shows the patient or lesion of the one before


def centre_cases(rng: np.random.Generator, real: Sequence[int], total: int) -> Iterator[Case]:
    """Yield about `total` cases, centre by centre.

    Numbers follow the square root of the real ones of each centre, from `LEAST` up.
    """
    weight = np.sqrt(np.asarray(real, dtype=np.float64))
    group = 0
    for centre, share in enumerate(weight / weight.sum()):
        count, shape = max(LEAST, round(share * total)), 0
        for index in range(count):
            again = count >= 2 * LEAST and index % _TWICE == _TWICE - 1
            if not again:
                group, shape = group + 1, int(rng.integers(2**62))
            yield Case(0, centre, group, shape, int(again))


def photograph(picture: Array, mask: Array, case: Case, height: float) -> tuple[Bytes, Bytes]:
    """Return the 8-bit picture with the look of its centre, and its mask (0, 255), both cut to `height` of the side."""
    light = case.light()
    rows = slice(skip := round(len(mask) * (1 - height) / 2), len(mask) - skip)
    shown = centre_look(picture[rows] + (light.normal(0, 0.03) if case.shot else 0), case.centre)
    return to_bytes(shown, light), (mask[rows] > 0.5).astype(np.uint8) * 255


def lungs(rng: np.random.Generator, size: int) -> tuple[Array, Array]:
    """Draw a chest radiograph: two dark ellipses in a bright chest, the heart before the left one."""
    x, y = grid(size)
    shift, wide = rng.uniform(-0.08, 0.08), rng.uniform(0.86, 1.1)
    picture = 0.08 + 0.58 * inside(np.abs(x - shift) - 0.88 * wide + 0.25 * np.clip(-y, 0, 1) ** 2, 0.1)
    field = np.zeros_like(x)
    for side in (-1, 1):
        lean, high = side * rng.uniform(0.05, 0.2), rng.uniform(0.5, 0.66)
        u, v = x - shift - side * 0.42 * wide, y - rng.uniform(-0.08, 0.04)
        u, v = u * np.cos(lean) - v * np.sin(lean), u * np.sin(lean) + v * np.cos(lean)
        field = np.maximum(field, inside(np.hypot(u / (0.27 * wide), v / high) - 1, 0.08))
    heart = blob(rng, size, rng.uniform(0.22, 0.3), 0.05, 3, (shift + 0.16, 0.3))
    mask = field * (1 - heart)
    picture = paint(picture, field, rng.uniform(0.16, 0.28), 0.9)
    picture = paint(picture, inside(np.abs(x - shift) - 0.08, 0.08), 0.74, 0.7)
    picture = paint(picture, heart, 0.7, 0.85)
    ribs = (0.5 + 0.5 * np.cos(2 * np.pi * (3.2 * y + 0.9 * np.abs(x - shift) + rng.uniform()))) ** 3
    picture += mask * (0.09 * ribs + 0.06 * np.abs(noise(rng, size, 9)))
    if rng.uniform() < 0.4:  # a consolidation, which belongs to the lung
        at = (shift + rng.choice((-1, 1)) * rng.uniform(0.3, 0.5), rng.uniform(-0.3, 0.3))
        picture = paint(picture, blob(rng, size, rng.uniform(0.1, 0.2), 0.2, 5, at) * mask, 0.6, rng.uniform(0.4, 0.8))
    return np.clip(picture * rng.uniform(0.9, 1.1), 0, 1), mask


def some_lesion(rng: np.random.Generator, size: int) -> tuple[Array, Array]:
    """Draw a lesion of any kind."""
    return lesion(rng, LESIONS[str(rng.choice(sorted(LESIONS)))], size)
