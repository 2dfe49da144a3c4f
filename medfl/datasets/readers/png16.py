"""Colour PNG files of 16 bits a channel: Pillow keeps the upper 8 of them, SimpleITK reads all."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_BITS, _COLOUR, _HEADER = 24, 25, 26  # bytes of the file: those of IHDR, which comes first
_GREY_ALPHA, _COLOURS = 4, (2, 4, 6)  # with RGB and RGBA


def is_png16(head: bytes) -> bool:
    """Tell by the first 26 bytes of a file whether it is a PNG of which Pillow would drop bits."""
    is_png = len(head) >= _HEADER and head.startswith(_SIGNATURE)
    return is_png and head[_BITS] == 16 and head[_COLOUR] in _COLOURS


def read(source: str | bytes) -> NDArray[np.uint16]:
    """Read such a file, by its path or its content, as (H, W, C) with C 3 or 4.

    Raises:
        ValueError: it cannot be read, or is grey with transparency.
    """
    head = source[:_HEADER] if isinstance(source, bytes) else head_of(source)
    if head[_COLOUR] == _GREY_ALPHA:
        raise ValueError("it is grey with transparency in 16 bits: save it without transparency")
    if isinstance(source, str):
        return _read(source)

    with tempfile.TemporaryDirectory() as folder:  # SimpleITK reads files only
        path = Path(folder, "picture.png")
        path.write_bytes(source)
        return _read(str(path))


def head_of(path: str) -> bytes:
    """Return the bytes of a file that `is_png16` looks at."""
    with open(path, "rb") as file:
        return file.read(_HEADER)


def _read(path: str) -> NDArray[np.uint16]:
    sitk: Any = importlib.import_module("SimpleITK")  # slow to import, and rarely needed
    try:
        pixels: NDArray[np.uint16] = sitk.GetArrayFromImage(
            sitk.ReadImage(path, imageIO="PNGImageIO")
        )
    except RuntimeError as error:
        raise ValueError(" ".join(str(error).split())[-200:]) from error
    return pixels
