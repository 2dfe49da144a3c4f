"""Grey scenes of phantoms: OCT scans of the retina, chest radiographs, one picture per modality of MedNIST."""

from __future__ import annotations

import numpy as np

from medfl.datasets.phantoms.drawing import Array, blob, grid, inside, noise, paint


def oct_scan(rng: np.random.Generator, label: int, size: int) -> Array:
    """Draw an OCT scan; labels AMD, CNV, CSR, DME, DR, DRUSEN, MH, NORMAL."""
    x, _ = grid(size)
    middle, sway, width = rng.uniform(-0.2, 0.2), rng.uniform(-0.12, 0.12), rng.uniform(0.9, 1.1)
    curve = rng.uniform(-0.1, 0.15) * x * x + sway * x + rng.uniform(-0.12, 0.12)
    floor, swelling = 0.35 + curve, np.zeros_like(x)  # floor: the pigment epithelium; swelling: of the inner retina
    if label in (0, 5):  # AMD: large uneven bumps; DRUSEN: small round ones
        for _ in range(int(rng.integers(2, 4) if label == 0 else rng.integers(4, 8))):
            place, wide = rng.uniform(-0.7, 0.7), rng.uniform(0.14, 0.24) if label == 0 else rng.uniform(0.05, 0.08)
            floor = floor - (0.15 if label == 0 else 0.10) * np.exp(-(((x - place) / wide) ** 2))
    if label == 1:
        floor = floor - 0.26 * np.exp(-(((x - middle) / 0.3) ** 2))
    if label in (2, 3):
        swelling = 0.2 * np.exp(-(((x - middle) / 0.45) ** 2))
    pit = 0.22 * np.exp(-(((x - middle) / 0.2) ** 2)) * (0.2 if label in (1, 2, 3) else 1.0)
    top = floor - 0.55 * width + pit - swelling
    picture = _layers(rng, size, top, floor, atrophy=label == 0)
    if label == 1:
        picture = paint(picture, blob(rng, size, 0.16, 0.2, 4, (middle, 0.28)), 0.78, 0.7)
    if label == 2:
        picture = paint(picture, _dome(size, middle, 0.45, 0.3, floor), 0.06, 0.9)
    for _ in range({3: 5, 4: 8}.get(label, 0) + int(rng.integers(-1, 2)) * (label in (3, 4))):
        place, deep = rng.normal(middle, 0.25), rng.uniform(0.3, 0.7)
        column = min(max(int((place + 1) * size / 2), 0), size - 1)
        row = top[0, column] * (1 - deep) + floor[0, column] * deep
        mask = blob(rng, size, rng.uniform(0.07, 0.13) if label == 3 else 0.045, 0.08, 3, (place, row))
        picture = paint(picture, mask, 0.08 if label == 3 else 0.98, 0.9)
    if label == 6:
        gap = rng.uniform(0.1, 0.17) * (1 + 0.5 * np.clip((grid(size)[1] - top) / 0.5, 0, 1))
        hole = inside(np.abs(x - middle) - gap, 0.05) * inside(grid(size)[1] - floor + 0.08, 0.05)
        picture = paint(picture, hole, 0.06, 0.95)
    speckle = 1 + 0.25 * rng.standard_normal((size, size))
    return np.clip(picture * speckle, 0, 1)


def _layers(rng: np.random.Generator, size: int, top: Array, floor: Array, atrophy: bool) -> Array:
    _, y = grid(size)
    depth = (y - top) / (floor - top)
    tissue = np.clip(inside(-(y - top), 0.03) * inside(y - floor, 0.04), 0, 1)
    bands = 0.42 + 0.14 * np.cos(2 * np.pi * 2.5 * depth) + 0.05 * noise(rng, size, 6)
    picture = 0.06 + tissue * bands
    picture = paint(picture, inside(np.abs(y - floor) - 0.04, 0.03), 0.85 if not atrophy else 0.7, 0.9)
    fade = 0.3 if not atrophy else 0.45
    below: Array = np.where(y > floor, fade * np.exp(-(y - floor) / 0.3), 0)
    return picture + below


def _dome(size: int, middle: float, half: float, height: float, floor: Array) -> Array:
    x, y = grid(size)
    roof = floor - height * np.sqrt(np.clip(1 - ((x - middle) / half) ** 2, 0, None))
    return inside(-(y - roof), 0.03) * inside(y - floor + 0.05, 0.03) * (np.abs(x - middle) < half)


def chest(rng: np.random.Generator, label: int, size: int) -> Array:
    """Draw a chest radiograph: 0 clear lungs, 1 with patches of consolidation."""
    x, y = grid(size)
    shift, wide = rng.uniform(-0.06, 0.06), rng.uniform(0.88, 1.1)
    picture = 0.60 * inside(np.abs(x - shift) - 0.85 * wide + 0.25 * np.clip(-y, 0, 1) ** 2, 0.1) + 0.08
    lungs = np.zeros_like(x)
    for side in (-1, 1):
        u, v = (x - shift - side * 0.40 * wide) / 0.27, (y - 0.02) / 0.68
        lungs = np.maximum(lungs, inside((np.abs(u) ** 2.3 + np.abs(v) ** 2.6) ** 0.4 - 1, 0.12))
    picture = paint(picture, lungs, rng.uniform(0.20, 0.30), 0.9)
    ribs = 0.5 + 0.5 * np.cos(2 * np.pi * (3.2 * y + 0.9 * np.abs(x) + rng.uniform()))
    picture += 0.09 * lungs * ribs**3
    picture = paint(picture, inside(np.abs(x - shift) - 0.09, 0.08), 0.74, 0.7)
    heart = blob(rng, size, rng.uniform(0.26, 0.34), 0.05, 3, (shift + 0.16, 0.32))
    picture = paint(picture, heart, 0.72, 0.85)
    picture += 0.06 * lungs * np.abs(noise(rng, size, 9))  # vessels
    if label == 1:
        for _ in range(int(rng.integers(2, 5))):
            at = (shift + rng.choice((-1, 1)) * rng.uniform(0.25, 0.52), rng.uniform(-0.35, 0.5))
            patch = blob(rng, size, rng.uniform(0.13, 0.26), 0.2, 5, at) * (0.75 + 0.35 * noise(rng, size, 7))
            picture = paint(picture, np.clip(patch, 0, 1) * lungs, rng.uniform(0.55, 0.68), rng.uniform(0.5, 0.85))
    return np.clip(picture * rng.uniform(0.9, 1.1), 0, 1)


def modality(rng: np.random.Generator, label: int, size: int) -> Array:
    """Draw one of MedNIST's classes: AbdomenCT, BreastMRI, CXR, ChestCT, Hand, HeadCT."""
    return (_abdomen, _breast, _chest_film, _thorax, _hand, _head)[label](rng, size)


def _body(rng: np.random.Generator, size: int, wide: float, high: float) -> Array:
    x, y = grid(size)
    wide, high = wide * rng.uniform(0.9, 1.08), high * rng.uniform(0.9, 1.08)
    return inside(np.hypot(x / wide, y / high) - 1, 0.05)


def _abdomen(rng: np.random.Generator, size: int) -> Array:
    picture = paint(np.full((size, size), 0.04), _body(rng, size, 0.85, 0.65), 0.42)
    picture = paint(picture, blob(rng, size, 0.36, 0.10, 3, (-0.33, -0.08)), 0.60)
    picture = paint(picture, blob(rng, size, 0.15, 0.08, 3, (0.42, 0.12)), 0.64)
    for _ in range(4):
        loop = blob(rng, size, 0.10, 0.1, 3, (rng.uniform(-0.1, 0.5), rng.uniform(-0.35, 0.1)))
        picture = paint(picture, loop, rng.uniform(0.2, 0.6))
    return paint(picture, blob(rng, size, 0.11, 0.1, 4, (0.0, 0.38)), 0.92) + 0.03 * noise(rng, size, 10)


def _thorax(rng: np.random.Generator, size: int) -> Array:
    picture = paint(np.full((size, size), 0.04), _body(rng, size, 0.9, 0.65), 0.48)
    for side in (-1, 1):
        picture = paint(picture, blob(rng, size, rng.uniform(0.28, 0.36), 0.08, 3, (side * 0.42, -0.02)), 0.08)
    picture = paint(picture, blob(rng, size, 0.20, 0.08, 3, (0.06, -0.1)), 0.66)
    return paint(picture, blob(rng, size, 0.10, 0.1, 4, (0.0, 0.40)), 0.92) + 0.03 * noise(rng, size, 10)


def _breast(rng: np.random.Generator, size: int) -> Array:
    picture = np.full((size, size), 0.03)
    for side in (-1, 1):
        at = (side * rng.uniform(0.40, 0.46), 0.1)
        picture = paint(picture, blob(rng, size, rng.uniform(0.34, 0.42), 0.04, 2, at), 0.34)
        picture = paint(picture, blob(rng, size, 0.2, 0.22, 5, at), rng.uniform(0.55, 0.8), 0.7)
    _, y = grid(size)
    return paint(picture, inside(-(y - 0.5), 0.05), 0.30) + 0.04 * noise(rng, size, 12)


def _chest_film(rng: np.random.Generator, size: int) -> Array:
    return chest(rng, int(rng.integers(0, 2)), size)


def _hand(rng: np.random.Generator, size: int) -> Array:
    x, y = grid(size)
    turn = rng.uniform(-0.15, 0.15)
    u, v = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
    soft = np.hypot(u / 0.42, (v - 0.45) / 0.45) - 1
    bone = np.full_like(u, 1.0)
    for finger in range(5):
        lean, length = (finger - 2) * rng.uniform(0.2, 0.26), (0.75, 0.98, 1.05, 0.98, 0.6)[finger]
        along = np.clip((0.35 - v) / length, 0, 1)
        away = np.hypot(u - lean * (0.6 + along), np.clip(v - 0.6, 0, None) + np.clip(0.35 - length - v, 0, None))
        soft = np.minimum(soft, away - 0.10)
        gaps = 0.012 * (np.abs(np.sin(3 * np.pi * along)) < 0.2)
        bone = np.minimum(bone, away - 0.05 + gaps)
    picture = paint(np.full((size, size), 0.05), inside(soft, 0.05), rng.uniform(0.3, 0.4))
    return paint(picture, inside(bone, 0.04), rng.uniform(0.7, 0.9)) + 0.03 * noise(rng, size, 8)


def _head(rng: np.random.Generator, size: int) -> Array:
    x, y = grid(size)
    wide, high = rng.uniform(0.55, 0.68), rng.uniform(0.75, 0.85)
    away = np.hypot(x / wide, y / high) - 1
    picture = paint(np.full((size, size), 0.03), inside(away, 0.05), 0.45)
    picture += 0.06 * inside(away + 0.1, 0.1) * noise(rng, size, 10)
    picture = paint(picture, inside(np.abs(away + 0.05) - 0.06, 0.03), 0.95)
    for side in (-1, 1):
        picture = paint(picture, blob(rng, size, 0.09, 0.2, 2, (side * 0.12, rng.uniform(-0.1, 0.05))), 0.2)
    return picture
