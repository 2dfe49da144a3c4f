"""What `medfl new` keeps of each picture or volume that it read: shape, type and largest value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from medfl.core.errors import InputError
from medfl.datasets.readers.reading import Pixels


class Picture(NamedTuple):
    """Of a picture or volume: its shape, type and largest value."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    largest: float

    @classmethod
    def of(cls, pixels: Pixels) -> Picture:
        """Return what pixels have."""
        return cls(pixels.shape, pixels.dtype, float(pixels.max()))

    @property
    def brightest(self) -> int:
        """Largest value that pictures like it can have; floats in 0 to 1 have 1."""
        if self.dtype in (np.uint8, np.uint16):
            return int(np.iinfo(self.dtype).max)
        usual = (1, 255, 65535) if self.dtype.kind == "f" else (255, 65535)
        return next((value for value in usual if self.largest <= value), math.ceil(self.largest))


def pixels(seen: Sequence[Picture]) -> tuple[int, int, tuple[int, int]]:
    """Return channels, largest possible value, and least and largest side of pictures (H, W, C)."""
    channels = 3 if any(one.shape[-1] > 1 for one in seen) else 1
    brightest = 1 if mixed(seen) else max(one.brightest for one in seen)
    return channels, brightest, sides([one.shape[:2] for one in seen])


def mixed(seen: Sequence[Picture]) -> bool:
    """Tell whether pictures have different depths.

    Raises:
        InputError: some have neither 8 nor 16 bits.
    """
    found = Counter(one.brightest for one in seen)
    if len(found) > 1 and {one.dtype.name for one in seen} - {"uint8", "uint16"}:
        told = ", ".join(f"{count} of at most {value}" for value, count in sorted(found.items()))
        raise InputError(
            f"pictures of several depths: {told}",
            "one depth, or 8 and 16 bits beside each other",
            "save them as pictures of 8 or 16 bits",
        )
    return len(found) > 1


def depths(seen: Sequence[Picture]) -> tuple[str, ...]:
    """Return a note where pictures have different depths."""
    found = Counter(one.brightest for one in seen)
    told = ", ".join(f"{count} of at most {value}" for value, count in sorted(found.items()))
    return (f"pictures of several depths, each divided by its own: {told}",) if len(found) > 1 else ()


def sides(shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """Return the least and the largest side."""
    every = [side for shape in shapes for side in shape]
    return min(every), max(every)
