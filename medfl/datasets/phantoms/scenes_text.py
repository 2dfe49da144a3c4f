"""Characters of phantoms: printed letters and digits, bent by the habits of a hand."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from medfl.datasets.phantoms.drawing import Array

# Typefaces that matplotlib carries.
FACES = ("DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral", "cmss10", "cmtt10")
_FINE = 2  # drawn that many times larger, then averaged


@dataclass(frozen=True)
class Hand:
    """How somebody writes.

    Attributes:
        face: number in FACES.
        slant: shift to the right per unit of height.
        scale: height against that of a usual hand.
        aspect: width against height.
        turn: radians, counter-clockwise.
        weight: extra width of a stroke, in shares of the side.
        ink: darkness, 0 to 1.
    """

    face: int = 0
    slant: float = 0.0
    scale: float = 1.0
    aspect: float = 1.0
    turn: float = 0.0
    weight: float = 0.03
    ink: float = 1.0


def hand(rng: np.random.Generator) -> Hand:
    """Draw somebody's habits."""
    return Hand(
        int(rng.integers(len(FACES))),
        rng.uniform(-0.25, 0.4),
        rng.uniform(0.8, 1.1),
        rng.uniform(0.75, 1.15),
        rng.uniform(-0.12, 0.12),
        rng.uniform(0.0, 0.05),
        rng.uniform(0.6, 1.0),
    )


def character(rng: np.random.Generator, text: str, size: int, by: Hand) -> Array:
    """Draw one character as ink, 0 to 1, (size, size); `rng` gives what differs between two of the same hand."""
    side = size * _FINE
    picture, width = Image.new("L", (side, side)), round(by.weight * side / 2)
    place, font = (side / 2, side * 0.78), _font(by.face, round(side * 0.72))
    ImageDraw.Draw(picture).text(place, text, 255, font, "ms", stroke_width=width)
    turn, slant = by.turn + rng.normal(0, 0.05), by.slant + rng.normal(0, 0.06)
    high = by.scale * rng.uniform(0.92, 1.08)
    wide = high * by.aspect * rng.uniform(0.92, 1.08)
    # PIL asks where each pixel comes from: the way back, from turned to upright, to not slanted, to the usual size.
    cosine, sine = np.cos(turn), np.sin(turn)
    a, b = (cosine - slant * sine) / wide, -(sine - slant * cosine) / wide
    d, e = sine / high, cosine / high
    x, y = side * (0.5 + rng.uniform(-0.06, 0.06, 2))
    back = (a, b, side / 2 - a * x - b * y, d, e, side / 2 - d * x - e * y)
    moved = picture.transform((side, side), Image.Transform.AFFINE, back, Image.Resampling.BILINEAR).reduce(_FINE)
    return np.asarray(moved, dtype=np.float64) * (by.ink / 255)


@functools.lru_cache(maxsize=32)
def _font(face: int, pixels: int) -> ImageFont.FreeTypeFont:
    import matplotlib  # only to find its typefaces, when something is drawn

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(folder / f"{FACES[face]}.ttf"), pixels)
