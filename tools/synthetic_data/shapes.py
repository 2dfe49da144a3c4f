"""Images and masks of whatever form a bundle needs: smooth shapes, written as the file's ending says."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from medfl.core.errors import InputError
from medfl.core.seeding import derive
from medfl.datasets.phantoms.phantom import save_volume

VOLUMES, PICTURES = (".nii.gz", ".nii"), (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
ENDINGS = (*VOLUMES, *PICTURES, ".npy", ".npz")
_MASK = re.compile(
    r"label|mask|seg|lbl|annot|inst_?map|type_?map|ground|LMImg|(^|[\W_])gt([\W_]|$)", re.IGNORECASE
)
_WHOLE = 50
"""From this range of intensities on they are whole numbers, whose files are small."""


@dataclass(frozen=True)
class Need:
    """What a bundle's images are to be like.

    Attributes:
        shape: their two or three sides, in pixels or voxels.
        channels: of an image file; a mask has one.
        values: of a mask, its background first.
        one_value: a mask has one value beside the background, that of the image's class.
        pixdim: millimetres from voxel to voxel along each side.
        limits: the lowest and the highest intensity.
        first: in array files the channels come first; else last, and one alone is left out.
        last: in array files one channel alone is there too, as the last axis.
    """

    shape: tuple[int, ...]
    channels: int = 1
    values: tuple[int, ...] = (0, 1)
    one_value: bool = False
    pixdim: tuple[float, ...] = (1.0, 1.0, 1.0)
    limits: tuple[float, float] = (0.0, 255.0)
    first: bool = False
    last: bool = False


def is_mask(name: object) -> bool:
    """Tell by the name of a key, an array or a file whether it stands for masks."""
    return _MASK.search(str(name)) is not None


def ending(path: object) -> str:
    """Return the ending of an image file that is drawn here, "" for any other."""
    return next((end for end in ENDINGS if str(path).lower().endswith(end)), "")


def _mask(need: Need, seed: int, case: int, label: int) -> NDArray[np.uint8]:
    """Return an ellipsoid (*shape) in slabs, one of each value; with `one_value` it has that of the class alone."""
    rng, sides = np.random.default_rng(derive(seed, "shape", case)), np.asarray(need.shape)
    centre, radii = (
        sides * rng.uniform(0.42, 0.58, len(sides)),
        sides * rng.uniform(0.25, 0.38, len(sides)),
    )
    grid = np.indices(need.shape, sparse=True)
    away = sum(((axis - c) / r) ** 2 for axis, c, r in zip(grid, centre, radii, strict=True))
    marks = np.asarray(need.values[1:] or need.values)
    depth = (grid[0] - centre[0] + radii[0]) / (2 * radii[0]) * len(marks)
    slab = (
        np.clip(depth, 0, len(marks) - 1).astype(int) if not need.one_value else label % len(marks)
    )
    return np.where(np.asarray(away) <= 1, marks[slab], need.values[0]).astype(np.uint8)


def draw(need: Need, name: object, seed: int, case: int, label: int | None = None) -> NDArray[Any]:
    """Return a mask or an image of the same shape, lighter inside, striped by its class, and with noise.

    Args:
        need: its form.
        name: of the key that it stands for, which says which of both it is.
        seed: with the same seed a case has the same shape.
        case: its number.
        label: its class; default: the classes take turns.
    """
    label = case if label is None else label
    mask = _mask(need, seed, case, label)
    if is_mask(name):
        return mask[None] if need.first else mask[..., None] if need.last else mask
    inside, stripes = (
        mask / max(*need.values, 1),
        np.sin(np.arange(need.shape[-1]) * (label % 16 + 1) / 4),
    )
    light, rng = (
        0.25 + 0.45 * inside + 0.1 * stripes,
        np.random.default_rng(derive(seed, "light", case)),
    )
    gains = np.linspace(1, 0.6, need.channels)
    channels = np.stack(
        [np.clip(gain * light + rng.normal(0, 0.03, need.shape), 0, 1) for gain in gains]
    )
    low, high = need.limits
    drawn = (low + (high - low) * channels).astype(np.float32)
    return (
        drawn
        if need.first
        else np.moveaxis(drawn, 0, -1)
        if need.last or need.channels > 1
        else drawn[0]
    )


def write(
    path: Path, need: Need, name: object, seed: int, case: int, label: int | None = None
) -> None:
    """Write what `draw` draws, making its folder; in a picture's file a volume is a picture.

    Raises:
        InputError: files of this ending are not drawn.
    """
    end = ending(path)
    if not end:
        what = f"drawn files end in {', '.join(ENDINGS)}"
        raise InputError(
            f"{path}: a file of this kind is not drawn", what, "write these images yourself"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if end in PICTURES:
        need = replace(need, shape=need.shape[:2])
    if end in (*VOLUMES, *PICTURES):
        need = replace(need, first=False, last=False)
    drawn = draw(need, name, seed, case, label)
    if end in VOLUMES:
        coarse = need.limits[1] - need.limits[0] > _WHOLE
        kind = np.uint8 if is_mask(name) else np.int16 if coarse else np.float32
        save_volume(path, drawn.astype(kind), (*need.pixdim, 1.0, 1.0)[:3])
    elif end in PICTURES:
        low, high = (0.0, 255.0) if is_mask(name) else need.limits
        Image.fromarray(((drawn - low) * (255 / (high - low))).astype(np.uint8)).save(
            path, quality=100
        )
    elif end == ".npy":
        np.save(path, drawn)
    else:
        named: dict[str, Any] = {str(name): drawn}
        np.savez_compressed(path, **named)
