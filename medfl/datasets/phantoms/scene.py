"""Scenes of phantoms: rounded parts on a background, in a picture or a volume, as the device of a centre shows them.

Lengths are in half sides of the image, in the order of its axes: down and right in pictures; right, front and top in
volumes. Shades are 0 to 1: one value in grey images, three in RGB.
"""

from __future__ import annotations

import colorsys
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medfl.core import Document
from medfl.datasets.base import read_sheet

Array = NDArray[np.float64]
Mask = NDArray[np.uint8]
Shape = tuple[int, ...]
Lengths = Sequence[float]

_SOFT_EDGE = 0.1  # share of the radius over which a part fades out


@dataclass(frozen=True)
class Part:
    """A rounded part of a scene.

    Attributes:
        shade: grey value or RGB colour.
        radii: along the axes; infinite: the part is the ground of the whole image.
        place: of its middle.
        value: in the reference mask.
        bumps: depth of the unevenness of its surface, as a share of the radius, and bumps along a side.
        texture: depth of the variation of its shade, and grains along a side.
    """

    shade: Lengths
    radii: Lengths = (math.inf, math.inf, math.inf)
    place: Lengths = (0.0, 0.0, 0.0)
    value: int = 0
    bumps: tuple[float, int] = (0.08, 4)
    texture: tuple[float, int] = (0.05, 6)


@dataclass(frozen=True)
class Scene:
    """Parts, painted one over the other, and how much one image differs from the next.

    Attributes:
        parts: the ground first.
        shift: how far the parts move together along an axis, at most.
        spread: by what share they grow or shrink together, at most.
        stray: how far each part moves on its own, at most.
        tone: standard deviation of a part's shade.
    """

    parts: Sequence[Part]
    shift: float = 0.08
    spread: float = 0.1
    stray: float = 0.02
    tone: float = 0.02

    def draw(self, rng: np.random.Generator, shape: Shape) -> tuple[Array, Mask]:
        """Return an image, `shape` in grey and (*shape, 3) in RGB, and its reference mask (shape)."""
        # The order of the draws decides every bit of a phantom.
        axes = np.meshgrid(*map(_axis, shape), indexing="ij", sparse=True)
        channels = len(self.parts[0].shade)
        image = np.zeros((channels, *shape))
        mask = np.zeros(shape, np.uint8)
        scale = rng.uniform(1 - self.spread, 1 + self.spread)
        move = rng.uniform(-self.shift, self.shift, len(shape))

        for part in self.parts:
            middle = scale * np.array(part.place[: len(shape)]) + move
            middle += rng.uniform(-self.stray, self.stray, len(shape))
            squares = np.zeros(shape)
            for axis, place, radius in zip(axes, middle, part.radii, strict=False):
                squares = squares + ((axis - place) / (scale * radius)) ** 2

            depth, bumps = part.bumps
            distance = np.sqrt(squares) - 1 + depth * noise(rng, shape, bumps)
            cover = np.clip(0.5 - distance / _SOFT_EDGE, 0, 1)

            shade = np.array(part.shade) + (
                rng.normal(0, self.tone, channels) if any(part.shade) else 0
            )
            depth, grains = part.texture
            grain = depth * noise(rng, shape, grains)
            image += cover * (shade.reshape(-1, *[1] * len(shape)) + grain - image)
            mask[cover > 0.5] = part.value

        image = np.clip(image, 0, 1)
        return (image[0] if channels == 1 else np.moveaxis(image, 0, -1)), mask


def _axis(side: int) -> Array:
    """Return the places of the pixel centres along an axis, -1 to 1."""
    return (np.arange(side) + 0.5) * 2 / side - 1


def noise(rng: np.random.Generator, shape: Shape, cells: int) -> Array:
    """Return smooth noise, about -1 to 1: random values at `cells` + 1 knots a side, linear in between."""
    values = rng.uniform(-1, 1, [cells + 1] * len(shape))
    for axis, side in enumerate(shape):
        knot, weight, rest = _between_knots(side, cells, len(shape) - axis - 1)
        values = values.take(knot, axis) * rest + values.take(knot + 1, axis) * weight

    return values


@functools.cache
def _between_knots(side: int, cells: int, later_axes: int) -> tuple[NDArray[np.intp], Array, Array]:
    """Return each pixel's knot before it, and the weights of the next knot and of this one."""
    place = (np.arange(side) + 0.5) * cells / side
    knot = place.astype(int)
    weight = (place - knot).reshape(-1, *[1] * later_axes)
    return knot, weight, 1 - weight


class Look(NamedTuple):
    """What the device of a centre makes of a scene.

    Attributes:
        brightness: is added.
        contrast: factor of the distance from middle grey.
        cast: factors of red, green and blue.
        shading: depth of the uneven illumination.
        grain: standard deviation of the noise.
    """

    brightness: float
    contrast: float
    cast: tuple[float, float, float]
    shading: float
    grain: float


LOOKS = [Look(**look) for look in read_sheet("looks")["looks"]]


def phantom_of(name: str) -> Document:
    """Return the arguments of `phantom.draw_files` that a data set's sheet has; its `scene` becomes their `scenes`.

    Parts and scene are described with the names of the attributes of `Part` and `Scene`.
    """
    arguments: Document = read_sheet(name)["phantom"]
    if scene := arguments.pop("scene", None):
        parts = [Part(**part) for part in scene.pop("parts")]
        arguments["scenes"] = [Scene(parts, **scene)]

    return arguments


_MARKS = 0.62, 0.82
"""Half axes, down and right, of the ellipse on which the marks of findings lie."""


def finding_scene(found: Sequence[int], count: int) -> Scene:
    """Return a chest in grey with a mark for each finding that it has, in this finding's shade, shape and place.

    Args:
        found: numbers of its findings, 0 to `count` - 1.
        count: of all findings.
    """
    marks = []
    for finding in found:
        angle = 2 * math.pi * finding / count
        place = (_MARKS[0] * math.sin(angle), _MARKS[1] * math.cos(angle))
        radii = (0.1 + 0.07 * (finding % 3), 0.1 + 0.07 * (finding // 3 % 3))
        marks.append(Part((0.95 if finding % 2 else 0.02,), radii, place))

    lungs = [Part((0.24,), (0.6, 0.27), (-0.05, side), texture=(0.12, 9)) for side in (-0.42, 0.42)]

    heart = Part((0.72,), (0.3, 0.26), (0.3, 0.16))
    return Scene((Part((0.1,)), Part((0.65,), (1.2, 0.9)), *lungs, heart, *marks), tone=0.04)


def photograph(image: Array, centre: int, rng: np.random.Generator) -> Array:
    """Return an image of a scene as the device of centre number `centre` shows it; air, exactly 0, stays so.

    Centres after the first six have their looks with less and less contrast.
    """
    look = LOOKS[centre % len(LOOKS)]
    contrast = look.contrast * 0.95 ** (centre // len(LOOKS))
    is_colour = image.ndim == 3 and image.shape[-1] == 3
    shape = image.shape[:-1] if is_colour else image.shape

    # Slowly varying light, as of a lamp or a coil.
    light = 1 + look.shading * noise(rng, shape, 2)
    shown = (image - 0.5) * contrast + 0.5 + look.brightness + rng.normal(0, 0.02)
    shown = shown * light[..., None] * look.cast if is_colour else shown * light
    shown = np.clip(shown + rng.normal(0, look.grain, image.shape), 0, 1)

    return np.where(image == 0, 0, shown)


@functools.cache
def class_scenes(classes: int, channels: int) -> tuple[Scene, ...]:
    """Return a scene for each class: an object with a colour, size, outline and texture, and a mark beside it.

    Features of single images overlap between classes, so that none tells the class for certain.

    Args:
        classes: number of them.
        channels: 1 or 3.
    """
    scenes = []
    variety = min(1.0, 10 / classes)  # many classes lie close together
    for label in range(classes):
        share = label / classes
        if channels == 3:
            ground: Lengths = (0.86, 0.76, 0.70)
            shade: Lengths = colorsys.hsv_to_rgb(share, 0.65, 0.65)
            mark_shade: Lengths = colorsys.hsv_to_rgb(label * 7 % classes / classes, 0.4, 0.95)
        else:
            ground = (0.1,)
            shade = (0.4 + 0.5 * (label * 3 % 7) / 7,)
            mark_shade = (0.95,)

        radius = 0.38 + 0.1 * (label % 3)
        angle = 2 * math.pi * share
        mark_place = (0.65 * math.sin(angle), 0.65 * math.cos(angle))
        parts = (
            Part(ground),
            Part(
                shade,
                (radius, radius),
                (0.0, 0.0),
                0,
                (0.1 + 0.2 * (label % 2), 5),
                (0.15, 3 + label % 4 * 4),
            ),
            Part(mark_shade, (0.16, 0.16), mark_place),
        )
        scenes.append(
            Scene(
                parts,
                shift=0.15 * variety,
                spread=0.2 * variety,
                stray=0.08 * variety,
                tone=0.04 + 0.4 / classes,
            )
        )

    return tuple(scenes)
