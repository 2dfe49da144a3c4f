"""Tissue scenes of phantoms: nine kinds of colorectal tissue, stained with haematoxylin and eosin."""

from __future__ import annotations

import numpy as np

from medfl.datasets.phantoms.drawing import Array, blob, grid, inside, noise, paint

_GLASS, _PINK, _PURPLE = (0.94, 0.92, 0.94), (0.88, 0.66, 0.80), (0.40, 0.26, 0.56)


def tissue(rng: np.random.Generator, label: int, size: int) -> Array:
    """Draw a patch (size, size, 3); labels in the order of the class folders of NCT-CRC-HE-100K."""
    picture = _KINDS[label](rng, size)
    return picture * rng.uniform(0.93, 1.05) + rng.normal(0, 0.015, 3)


def _adipose(rng: np.random.Generator, size: int) -> Array:
    picture = _field(rng, size, (0.80, 0.58, 0.74), 6, 0.05)
    for _ in range(int(rng.integers(14, 20))):
        picture = paint(picture, blob(rng, size, rng.uniform(0.26, 0.42), 0.05, 3, _spot(rng, 1.0)), _GLASS)
    return picture


def _background(rng: np.random.Generator, size: int) -> Array:
    return _field(rng, size, _GLASS, 3, 0.02)


def _debris(rng: np.random.Generator, size: int) -> Array:
    picture = _field(rng, size, (0.82, 0.62, 0.76), min(16, size), 0.16)
    for _ in range(int(rng.integers(5, 10))):
        picture = paint(picture, blob(rng, size, rng.uniform(0.1, 0.25), 0.3, 5, _spot(rng)), _GLASS, 0.6)
    return _nuclei(rng, picture, int(rng.integers(20, 40)), 0.025, 0.6)


def _lymphocytes(rng: np.random.Generator, size: int) -> Array:
    return _nuclei(rng, _field(rng, size, (0.80, 0.66, 0.82), 6, 0.04), int(rng.integers(130, 170)), 0.065, 0.9)


def _mucus(rng: np.random.Generator, size: int) -> Array:
    picture = _stripes(rng, _field(rng, size, (0.86, 0.84, 0.90), 4, 0.05), (0.70, 0.68, 0.84), 4, 0.45)
    return _nuclei(rng, picture, int(rng.integers(0, 6)), 0.04, 0.6)


def _muscle(rng: np.random.Generator, size: int) -> Array:
    picture = _stripes(rng, _field(rng, size, (0.86, 0.52, 0.70), 5, 0.04), (0.76, 0.40, 0.62), 9, 0.5)
    return _nuclei(rng, picture, int(rng.integers(12, 24)), 0.03, 0.7)


def _mucosa(rng: np.random.Generator, size: int) -> Array:
    """Round glands with a pale middle and a ring of nuclei, in a lattice."""
    picture = _nuclei(rng, _field(rng, size, _PINK, 6, 0.05), int(rng.integers(40, 60)), 0.035, 0.7)
    turn, step = rng.uniform(0, np.pi), rng.uniform(0.8, 0.95)
    for row in (-1, 0, 1):
        for column in (-1, 0, 1):
            u, v = step * (column + 0.5 * (row % 2)), step * row
            at = (u * np.cos(turn) - v * np.sin(turn), u * np.sin(turn) + v * np.cos(turn))
            for radius, colour in ((0.36, _PURPLE), (0.29, (0.80, 0.70, 0.86)), (0.12, _GLASS)):
                picture = paint(picture, blob(rng, size, radius, 0.05, 3, at), colour, 0.85)
    return picture


def _stroma(rng: np.random.Generator, size: int) -> Array:
    picture = _stripes(rng, _field(rng, size, (0.90, 0.70, 0.82), 6, 0.06), (0.95, 0.84, 0.90), 5, 0.7)
    return _nuclei(rng, picture, int(rng.integers(30, 50)), 0.035, 0.8)


def _tumour(rng: np.random.Generator, size: int) -> Array:
    """Crowded, large and uneven nuclei around a few ragged holes."""
    picture = _nuclei(rng, _field(rng, size, (0.70, 0.48, 0.68), 8, 0.10), int(rng.integers(60, 85)), 0.115, 0.75)
    for _ in range(int(rng.integers(1, 4))):
        picture = paint(picture, blob(rng, size, rng.uniform(0.12, 0.26), 0.25, 5, _spot(rng)), (0.90, 0.82, 0.88), 0.9)
    return picture


_KINDS = (_adipose, _background, _debris, _lymphocytes, _mucus, _muscle, _mucosa, _stroma, _tumour)


def _spot(rng: np.random.Generator, reach: float = 0.9) -> tuple[float, float]:
    return float(rng.uniform(-reach, reach)), float(rng.uniform(-reach, reach))


def _field(rng: np.random.Generator, size: int, colour: tuple[float, float, float], cells: int, depth: float) -> Array:
    """Return a colour that varies a little over the picture."""
    return np.ones((size, size, 3)) * colour + depth * noise(rng, size, cells)[..., None]


def _stripes(
    rng: np.random.Generator, picture: Array, colour: tuple[float, float, float], waves: int, strength: float
) -> Array:
    """Lay wavy fibres of one direction over the picture."""
    x, y = grid(len(picture))
    turn, bend = rng.uniform(0, np.pi), rng.uniform(0.05, 0.15)
    u, v = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    u = u + bend * np.sin(3 * v + rng.uniform(0, 2 * np.pi)) + 0.04 * noise(rng, len(picture), 6)
    return paint(picture, 0.5 + 0.5 * np.sin(np.pi * waves * u + rng.uniform(0, 2 * np.pi)), colour, strength)


def _nuclei(rng: np.random.Generator, picture: Array, count: int, radius: float, strength: float) -> Array:
    """Scatter dark nuclei of about one size."""
    x, y = grid(len(picture))
    edge = np.full_like(x, np.inf)
    for _ in range(count):
        (u, v), stretch = _spot(rng, 1.0), rng.uniform(0.75, 1.33)
        edge = np.minimum(edge, np.hypot((x - u) * stretch, (y - v) / stretch) - radius * rng.uniform(0.75, 1.25))
    return paint(picture, inside(edge, 0.03), _PURPLE, strength)
