"""Natural scenes of phantoms: house numbers, garments, things of any number of classes."""

from __future__ import annotations

import colorsys

import numpy as np
from PIL import Image, ImageDraw

from medfl.datasets.phantoms.drawing import Array, Scene, blob, grid, noise, paint
from medfl.datasets.phantoms.scenes_text import character, hand

DIGITS = "0123456789"

# Outlines in half image sides, rows downwards: the right half of what is symmetric, the whole of what is not.
_HALVES = {
    0: ((0, -0.7), (0.25, -0.75), (0.8, -0.45), (0.65, -0.15), (0.42, -0.3), (0.42, 0.75), (0, 0.75)),
    1: ((0, -0.85), (0.35, -0.85), (0.4, 0.85), (0.15, 0.85), (0.05, -0.3), (0, -0.3)),
    2: ((0, -0.7), (0.25, -0.75), (0.6, -0.55), (0.85, 0.6), (0.62, 0.65), (0.45, -0.1), (0.45, 0.75), (0, 0.75)),
    3: ((0, -0.85), (0.2, -0.85), (0.22, -0.4), (0.5, 0.85), (0, 0.85)),
    4: ((0, -0.8), (0.2, -0.85), (0.55, -0.65), (0.8, 0.5), (0.6, 0.55), (0.42, -0.2), (0.52, 0.9), (0, 0.9)),
    6: ((0, -0.6), (0.15, -0.8), (0.5, -0.65), (0.75, 0.2), (0.55, 0.25), (0.4, -0.2), (0.42, 0.8), (0, 0.8)),
    8: ((0, -0.2), (0.75, -0.2), (0.8, 0.65), (0, 0.65)),
}
_WHOLES = {
    5: ((-0.85, 0.35), (0.85, 0.15), (0.85, 0.3), (-0.85, 0.5)),
    7: ((-0.85, 0.35), (-0.8, -0.05), (-0.2, -0.1), (0.3, 0.15), (0.85, 0.3), (0.85, 0.45), (-0.85, 0.45)),
    9: ((-0.7, -0.75), (-0.1, -0.75), (0, 0.05), (0.8, 0.3), (0.85, 0.6), (-0.75, 0.6)),
}
_LINES = {
    4: (((0, -0.8), (0, 0.9)),),
    5: (((-0.6, 0.35), (-0.2, -0.1), (0.1, 0.2)), ((0.3, 0.25), (0.5, -0.05), (0.7, 0.2))),
    6: (((0, -0.6), (0, 0.8)), ((-0.15, -0.8), (0, -0.55), (0.15, -0.8))),
    8: (((-0.35, -0.2), (-0.3, -0.65), (0.3, -0.65), (0.35, -0.2)),),
}
_FINE = 4  # drawn that many times larger, then averaged


def digit(rng: np.random.Generator, label: int, size: int) -> Array:
    """Draw a white digit on black, by any hand."""
    return character(rng, DIGITS[label], size, hand(rng))


def house_number(rng: np.random.Generator, label: int, size: int) -> Array:
    """Draw a light digit between parts of two others, on a dark wall, in any colours."""
    wall = rng.uniform(0.15, 0.3) + rng.uniform(-0.1, 0.1, 3)
    ink = rng.uniform(0.85, 0.95) + rng.uniform(-0.25, 0.05, 3)
    picture = np.ones((size, size, 3)) * wall + 0.04 * noise(rng, size, 3)[..., None]
    by, away = hand(rng), round(size * rng.uniform(0.65, 0.8))
    for shift in (-away, away):
        beside = character(rng, DIGITS[int(rng.integers(10))], size, by)
        moved = np.zeros_like(beside)
        moved[:, max(shift, 0) : size + min(shift, 0)] = beside[:, max(-shift, 0) : size - max(shift, 0)]
        picture = paint(picture, moved, ink)
    return np.clip(paint(picture, character(rng, DIGITS[label], size, by), ink), 0, 1)


def garment(rng: np.random.Generator, label: int, size: int) -> Array:
    """Draw a garment, light on black; labels in the order of Fashion-MNIST."""
    side, stretch, shift = size * _FINE, rng.uniform(0.65, 1.05, 2), rng.uniform(-0.12, 0.12, 2)

    def place(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
        bent = np.array(points) * stretch + shift + rng.normal(0, 0.06, (len(points), 2))
        return [(float(x), float(y)) for x, y in (bent + 1) * side / 2]

    shade = int(rng.integers(100, 250))
    picture = Image.new("L", (side, side))
    draw = ImageDraw.Draw(picture)
    if label in _HALVES:
        half = _HALVES[label]
        draw.polygon(place(half + tuple((-x, y) for x, y in half[::-1])), fill=shade)
    else:
        draw.polygon(place(_WHOLES[label]), fill=shade)
    for line in _LINES.get(label, ()):
        draw.line(place(line), fill=shade - 90 if label in (4, 6) else shade, width=max(1, side // 24))
    drawn: Array = np.asarray(picture.reduce(_FINE), dtype=np.float64) / 255
    return np.clip(drawn * (1 + 0.15 * noise(rng, size, min(12, size))), 0, 1)


def things(classes: int) -> Scene:
    """Return the scene of objects before a background: a class has its colours, its outline and its texture."""

    def scene(rng: np.random.Generator, label: int, size: int) -> Array:
        def colour(hue: float, strength: float, light: float) -> Array:
            return np.array(colorsys.hsv_to_rgb((hue + rng.normal(0, 0.02 + 0.6 / classes)) % 1, strength, light))

        behind = colour(label * 7 % classes / classes, 0.45, rng.uniform(0.45, 0.9))
        front = colour(label / classes, 0.8, rng.uniform(0.55, 1.0))
        x, y = grid(size)
        picture = np.ones((size, size, 3)) * behind + 0.1 * (y * rng.uniform(-1, 1) + x * rng.uniform(-1, 1))[..., None]
        at = (rng.uniform(-0.2, 0.2), rng.uniform(-0.2, 0.2))
        mask = blob(rng, size, 0.4 + 0.12 * (label % 3), 0.08 + 0.08 * (label % 2), 2 + label % 5, at)
        picture = paint(picture, mask, front, rng.uniform(0.8, 1.0))
        picture += 0.15 * (mask * noise(rng, size, min(3 + label % 4 * 4, size)))[..., None]
        return np.clip(picture, 0, 1)

    return scene
