"""Colour scenes of phantoms: skin lesions, blood cells, endoscopy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from medfl.datasets.phantoms.drawing import Array, Scene, blob, grid, inside, noise, paint

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Lesion:
    """How the lesions of one class look; lengths in half image sides."""

    colour: Colour
    radius: float = 0.5
    jag: float = 0.05
    lobes: int = 3
    texture: float = 0.05
    cells: int = 8
    spots: tuple[int, float, Colour] | None = None
    core: tuple[float, Colour] | None = None


LESIONS = {
    "akiec": Lesion((0.78, 0.50, 0.45), 0.52, 0.14, 7, 0.16, 14, spots=(5, 0.07, (0.92, 0.84, 0.76))),
    "bcc": Lesion((0.80, 0.55, 0.54), 0.45, 0.10, 4, 0.06, 5, spots=(5, 0.10, (0.42, 0.40, 0.52))),
    "bkl": Lesion((0.58, 0.43, 0.32), 0.58, 0.06, 6, 0.12, 10, spots=(9, 0.05, (0.86, 0.78, 0.58))),
    "df": Lesion((0.68, 0.50, 0.42), 0.45, 0.04, 3, 0.05, 6, core=(0.45, (0.92, 0.84, 0.80))),
    "mel": Lesion((0.34, 0.24, 0.22), 0.62, 0.20, 5, 0.16, 4, spots=(3, 0.15, (0.22, 0.22, 0.32))),
    "nv": Lesion((0.52, 0.34, 0.26), 0.42, 0.04, 2, 0.06, 16),
    "vasc": Lesion((0.62, 0.14, 0.22), 0.38, 0.10, 5, 0.07, 6, spots=(6, 0.10, (0.40, 0.08, 0.24))),
    "scc": Lesion((0.74, 0.38, 0.34), 0.55, 0.12, 5, 0.12, 9, core=(0.55, (0.90, 0.82, 0.58))),
}


def skin(*kinds: str) -> Scene:
    """Return the scene of dermatoscopic pictures whose class numbers stand for `kinds` of LESIONS."""

    def scene(rng: np.random.Generator, label: int, size: int) -> Array:
        return lesion(rng, LESIONS[kinds[label]], size)[0]

    return scene


def lesion(rng: np.random.Generator, kind: Lesion, size: int) -> tuple[Array, Array]:
    """Return a dermatoscopic picture (size, size, 3) and the soft mask of its lesion (size, size)."""
    tone = np.array((0.86, 0.68, 0.60)) * rng.uniform(0.92, 1.06)
    picture = np.ones((size, size, 3)) * tone + 0.035 * noise(rng, size, 5)[..., None]
    centre = (rng.uniform(-0.15, 0.15), rng.uniform(-0.15, 0.15))
    radius = kind.radius * rng.uniform(0.7, 1.25)
    mask = blob(rng, size, radius, kind.jag, kind.lobes, centre)
    colour = np.array(kind.colour) + rng.normal(0, 0.018, 3) + rng.normal(0, 0.06)
    picture = paint(picture, mask, colour, rng.uniform(0.75, 0.95))
    picture += (mask * kind.texture * noise(rng, size, min(kind.cells, size)))[..., None]
    if kind.core:
        core = blob(rng, size, radius * kind.core[0], 0.08, 3, centre)
        picture = paint(picture, core, kind.core[1], rng.uniform(0.25, 0.75))
    if kind.spots:
        for _ in range(max(0, kind.spots[0] + int(rng.integers(-3, 2)))):
            away, angle = radius * np.sqrt(rng.uniform(0, 0.8)), rng.uniform(0, 2 * np.pi)
            at = (centre[0] + away * np.cos(angle), centre[1] + away * np.sin(angle))
            spot = blob(rng, size, kind.spots[1] * rng.uniform(0.7, 1.2), 0.1, 3, at)
            picture = paint(picture, spot, kind.spots[2], rng.uniform(0.3, 0.75))
    x, y = grid(size)
    for _ in range(int(rng.integers(0, 4))):
        slope, bend, start = rng.uniform(-0.8, 0.8), rng.uniform(-0.4, 0.4), rng.uniform(-0.9, 0.9)
        picture = paint(picture, inside(np.abs(y - start - slope * x - bend * x * x) - 0.012, 0.03), 0.25, 0.5)
    return picture * (1 - 0.18 * (x * x + y * y))[..., None], mask


@dataclass(frozen=True)
class Cell:
    """How the blood cells of one class look; lengths in half image sides."""

    radius: float
    cytoplasm: Colour
    nucleus: float
    nuclear: Colour
    lobes: int = 1
    granules: tuple[int, Colour] | None = None


CELLS = (
    Cell(0.50, (0.72, 0.58, 0.74), 0.34, (0.36, 0.20, 0.48), 2, (38, (0.30, 0.14, 0.42))),  # basophil
    Cell(0.55, (0.92, 0.66, 0.58), 0.24, (0.44, 0.26, 0.58), 2, (38, (0.90, 0.46, 0.36))),  # eosinophil
    Cell(0.34, (0.68, 0.62, 0.76), 0.25, (0.26, 0.14, 0.38)),  # erythroblast
    Cell(0.66, (0.78, 0.68, 0.80), 0.42, (0.52, 0.34, 0.64), 1, (20, (0.60, 0.40, 0.66))),  # immature granulocyte
    Cell(0.42, (0.68, 0.72, 0.88), 0.36, (0.42, 0.26, 0.58)),  # lymphocyte
    Cell(0.66, (0.72, 0.70, 0.80), 0.36, (0.50, 0.36, 0.62), -1),  # monocyte: bean-shaped nucleus
    Cell(0.55, (0.90, 0.78, 0.80), 0.18, (0.40, 0.24, 0.56), 4),  # neutrophil
    Cell(0.16, (0.66, 0.50, 0.70), 0.00, (0.0, 0.0, 0.0), 0, (4, (0.46, 0.28, 0.56))),  # platelet
)


def blood(rng: np.random.Generator, label: int, size: int) -> Array:
    """Draw a stained smear: red cells around one white cell (or platelet) in the middle."""
    kind = CELLS[label]
    picture = np.ones((size, size, 3)) * (0.95, 0.89, 0.86) + 0.02 * noise(rng, size, 4)[..., None]
    for _ in range(int(rng.integers(3, 7))):
        angle, away = rng.uniform(0, 2 * np.pi), rng.uniform(0.75, 1.1)
        at = (away * np.cos(angle), away * np.sin(angle))
        picture = paint(picture, blob(rng, size, rng.uniform(0.24, 0.32), 0.02, 3, at), (0.88, 0.66, 0.64), 0.8)
        picture = paint(picture, blob(rng, size, 0.12, 0.02, 3, at), (0.93, 0.80, 0.77), 0.7)
    centre, scale = (rng.uniform(-0.1, 0.1), rng.uniform(-0.1, 0.1)), rng.uniform(0.8, 1.2)
    shade = rng.normal(0, 0.04) + rng.normal(0, 0.03, 3)
    radius = kind.radius * scale
    picture = paint(picture, blob(rng, size, radius, 0.03, 3, centre), np.array(kind.cytoplasm) + shade, 0.9)
    turn = rng.uniform(0, 2 * np.pi)
    for lobe in range(abs(kind.lobes)):
        spread = 0.0 if abs(kind.lobes) == 1 else radius * 0.42
        angle = turn + 2 * np.pi * lobe / kind.lobes + rng.normal(0, 0.2)
        at = (centre[0] + spread * np.cos(angle), centre[1] + spread * np.sin(angle))
        mask = blob(rng, size, kind.nucleus * scale, 0.06, 3, at)
        if kind.lobes < 0:
            bite = (at[0] + 0.75 * kind.nucleus * np.cos(turn), at[1] + 0.75 * kind.nucleus * np.sin(turn))
            mask = mask * (1 - blob(rng, size, 0.55 * kind.nucleus * scale, 0.05, 3, bite))
        mask = mask * (0.9 + 0.1 * noise(rng, size, 12))
        picture = paint(picture, mask, np.array(kind.nuclear) + shade)
    if kind.granules:
        reach = radius * 0.9 * np.sqrt(rng.uniform(size=kind.granules[0]))
        angles = rng.uniform(0, 2 * np.pi, kind.granules[0])
        x, y = grid(size)
        dots = np.full_like(x, np.inf)
        for u, v in zip(centre[0] + reach * np.cos(angles), centre[1] + reach * np.sin(angles), strict=True):
            dots = np.minimum(dots, (x - u) ** 2 + (y - v) ** 2)
        picture = paint(picture, inside(np.sqrt(dots) - 0.045, 0.03), kind.granules[1], 0.7)
    return picture


def endoscopy(rng: np.random.Generator, label: int, size: int) -> Array:
    """Draw the inside of the gut; labels in the order of the Kvasir-v2 class folders."""
    x, y = grid(size)
    picture = np.ones((size, size, 3)) * (0.80, 0.46, 0.38) * rng.uniform(0.85, 1.1)
    picture += 0.05 * noise(rng, size, 6)[..., None] + 0.03 * noise(rng, size, min(16, size))[..., None]
    at = (rng.uniform(-0.25, 0.25), rng.uniform(-0.25, 0.25))
    away = np.hypot(x - at[0], y - at[1])
    if label in (0, 1):  # dyed: blue-green stain around a lifted polyp or a resection margin
        picture = paint(picture, inside(away - rng.uniform(0.65, 0.9), 0.3), (0.22, 0.40, 0.56), rng.uniform(0.6, 0.9))
        if label == 0:
            picture = _bump(rng, picture, at, 0.38, (0.62, 0.52, 0.58))
        else:
            wound = blob(rng, size, rng.uniform(0.28, 0.42), 0.18, 4, at)
            picture = paint(picture, wound, (0.90, 0.84, 0.72), 0.8) - 0.08 * (wound * noise(rng, size, 8))[..., None]
    elif label in (2, 5):  # oesophagus: pale above, red below a ring; inflamed tongues with esophagitis
        tongues = 0.22 if label == 2 else 0.06
        angle = np.arctan2(y - at[1], x - at[0])
        radius = rng.uniform(0.45, 0.65)
        edge = radius * (1 + tongues * np.sin(5 * angle + rng.uniform(0, 6)) + 0.04 * np.sin(9 * angle))
        picture = paint(picture, 1 - inside(away - edge, 0.08), (0.92, 0.76, 0.68), 0.85)
        picture = paint(picture, inside(away - 0.16, 0.12), (0.16, 0.07, 0.06), 0.9)
        if label == 2:
            for _ in range(int(rng.integers(3, 6))):
                turn = rng.uniform(0, 2 * np.pi)
                line = inside(np.abs(np.sin(angle - turn)) * away - 0.035, 0.05)
                streak = line * (np.cos(angle - turn) > 0) * (away > 0.3)
                picture = paint(picture, streak, (0.72, 0.16, 0.14), 0.75)
    elif label == 3:  # cecum: crescent folds, vessels
        for fold in range(3):
            ring = np.hypot(x - at[0] - 0.9, y - at[1] + 0.2) - 0.5 - 0.35 * fold - rng.uniform(-0.06, 0.06)
            picture = paint(picture, inside(np.abs(ring) - 0.03, 0.05), (0.92, 0.66, 0.54), 0.75)
            picture = paint(picture, inside(np.abs(ring + 0.09) - 0.03, 0.07), (0.46, 0.20, 0.16), 0.6)
    elif label == 4:  # pylorus: round dark opening with a smooth rim
        radius = rng.uniform(0.14, 0.26)
        picture = paint(picture, inside(np.abs(away - radius * 1.6) - 0.07, 0.10), (0.94, 0.66, 0.54), 0.7)
        picture = paint(picture, inside(away - radius, 0.06), (0.14, 0.05, 0.05), 0.95)
    elif label == 6:
        picture = _bump(rng, picture, at, rng.uniform(0.28, 0.44), (0.86, 0.44, 0.40))
    else:  # ulcerative colitis: red, patchy, fibrin spots
        picture = paint(picture, np.clip(0.5 + noise(rng, size, 7), 0, 1), (0.74, 0.20, 0.18), 0.75)
        for _ in range(int(rng.integers(6, 12))):
            spot = blob(rng, size, rng.uniform(0.05, 0.11), 0.2, 3, (rng.uniform(-0.8, 0.8), rng.uniform(-0.8, 0.8)))
            picture = paint(picture, spot, (0.93, 0.85, 0.70), 0.75)
    for _ in range(int(rng.integers(1, 5))):
        shine = np.hypot(x - rng.uniform(-0.7, 0.7), y - rng.uniform(-0.7, 0.7)) - 0.04
        picture = paint(picture, inside(shine, 0.04), 1.0, 0.8)
    scope = inside(np.hypot(x, y) - 1.18, 0.08) * (1 - 0.3 * (x * x + y * y))
    return np.clip(picture, 0, 1) * scope[..., None]


def _bump(rng: np.random.Generator, picture: Array, at: tuple[float, float], radius: float, colour: Colour) -> Array:
    size = len(picture)
    x, y = grid(size)
    mask = blob(rng, size, radius, 0.05, 3, at)
    rim = blob(rng, size, radius * 1.15, 0.05, 3, (at[0] + 0.05, at[1] + 0.07))
    picture = paint(paint(picture, rim, 0.15, 0.4), mask, colour, 0.85)
    light = 0.22 * (1 - np.hypot(x - at[0] + 0.3 * radius, y - at[1] + 0.3 * radius) / radius)
    return picture + (mask * light)[..., None]
