"""Colour PNG files of 16 bits a channel: Pillow keeps the upper 8 of them, SimpleITK reads all."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint16]

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_BITS, _COLOUR, _HEADER = 24, 25, 26  # bytes of the file: those of IHDR, which comes first
_GREY_ALPHA, _COLOURS = 4, (2, 4, 6)  # with RGB and RGBA
_TURNS: Mapping[int, Callable[[Pixels], Pixels]] = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: np.rot90(pixels),
}
"""What makes a picture upright, by EXIF orientation."""


def is_deep(head: bytes) -> bool:
    """Tell by the first 26 bytes of a file whether it is a PNG of which Pillow would drop bits."""
    known = len(head) >= _HEADER and head.startswith(_SIGNATURE)
    return known and head[_BITS] == 16 and head[_COLOUR] in _COLOURS


def read(source: str | bytes, orientation: int) -> Pixels:
    """Read such a file as (H, W, C) with C 3 or 4, upright by its EXIF orientation.

    Args:
        source: its path, or its content.
        orientation: 1 to 8.

    Raises:
        ValueError: it cannot be read, or is grey with transparency.
    """
    head = source[:_HEADER] if isinstance(source, bytes) else head_of(source)
    if head[_COLOUR] == _GREY_ALPHA:
        raise ValueError("it is grey with transparency in 16 bits: save it without transparency")
    if isinstance(source, str):
        return _TURNS[orientation](_read(source))
    with tempfile.TemporaryDirectory() as folder:  # SimpleITK reads files only
        path = Path(folder, "picture.png")
        path.write_bytes(source)
        return _TURNS[orientation](_read(str(path)))


def head_of(path: str) -> bytes:
    """Return the bytes of a file that `is_deep` looks at."""
    with open(path, "rb") as file:
        return file.read(_HEADER)


def _read(path: str) -> Pixels:
    sitk: Any = importlib.import_module("SimpleITK")  # slow to import, and rarely needed
    try:
        found: Pixels = sitk.GetArrayFromImage(sitk.ReadImage(path, imageIO="PNGImageIO"))
    except RuntimeError as error:
        raise ValueError(" ".join(str(error).split())[-200:]) from error
    return found
