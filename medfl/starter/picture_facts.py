"""What `medfl new` keeps of each picture or volume that it read: shape, type and largest value."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from medfl.core.errors import InputError
from medfl.datasets.readers.reading import Pixels
from medfl.datasets.readers.splitting import Record


class PictureFacts(NamedTuple):
    """Of a picture or volume: its shape, type and largest value, a hash of its pixels, and what reading changed."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    largest: float
    digest: bytes = b""
    changes: str = ""

    @classmethod
    def of(cls, pixels: Pixels) -> PictureFacts:
        """Return what pixels have."""
        digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=16).digest()
        return cls(pixels.shape, pixels.dtype, float(pixels.max()), digest)

    @property
    def brightest(self) -> int:
        """Largest value that pictures like it can have; floats in 0 to 1 have 1, and 16 bits are often 12."""
        if self.dtype == np.uint8:
            return 255
        usual = {"f": (1, 255, 65535), "u": DEPTHS}.get(self.dtype.kind, (255, 65535))
        return next((value for value in usual if self.largest <= value), math.ceil(self.largest))


DEPTHS = (255, 1023, 4095, 16383, 65535)
"""Largest values of 8, 10, 12, 14 and 16 bits."""


def common_facts(facts: Sequence[PictureFacts]) -> tuple[int, int, tuple[int, int]]:
    """Return channels, largest possible value, and least and largest side of pictures (H, W, C)."""
    channels = 3 if any(picture.shape[-1] > 1 for picture in facts) else 1
    brightest = 1  # each picture is divided by the largest value of its own depth
    if not own_depth(facts):
        brightest = max(picture.brightest for picture in facts)

    return channels, brightest, sides([picture.shape[:2] for picture in facts])


def own_depth(facts: Sequence[PictureFacts]) -> int:
    """Return the largest value of 16-bit pictures, 255 if all have 8 bits; 0 where some have neither.

    Raises:
        InputError: some have neither 8 nor 16 bits, and pictures have different depths.
    """
    if {picture.dtype.name for picture in facts} <= {"uint8", "uint16"}:
        return max(_sixteen_bit_depths(facts), default=255)

    if len({picture.brightest for picture in facts}) > 1:
        raise InputError(
            f"pictures of several depths: {_depths(facts)}",
            "one depth, or 8 and 16 bits beside each other",
            "save them as pictures of 8 or 16 bits",
        )

    return 0


def depth_notes(facts: Sequence[PictureFacts]) -> tuple[str, ...]:
    """Return notes where pictures have different depths, or use a part of their 16 bits."""
    depth = own_depth(facts)
    several = len({picture.dtype for picture in facts}) > 1
    notes = []
    if depth and several:
        notes.append(f"pictures of several depths, each divided by its own: {_depths(facts)}")

    if depth in DEPTHS[1:-1] or (
        depth == DEPTHS[0] and any(picture.dtype == np.uint16 for picture in facts)
    ):
        most = max(picture.largest for picture in facts if picture.dtype == np.uint16)
        notes.append(
            f"pictures of 16 bits with values up to {most:g}: read as 0 to {depth}; brighter ones are refused"
        )

    return tuple(notes)


def _sixteen_bit_depths(facts: Sequence[PictureFacts]) -> list[int]:
    return [picture.brightest for picture in facts if picture.dtype == np.uint16]


def _depths(facts: Sequence[PictureFacts]) -> str:
    most = max(_sixteen_bit_depths(facts), default=0)
    # the 16-bit pictures of a folder come from one device: its brightest says how many bits it uses
    counts = Counter(most if picture.dtype == np.uint16 else picture.brightest for picture in facts)
    return ", ".join(f"{count} of at most {value}" for value, count in sorted(counts.items()))


def sides(shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """Return the least and the largest side."""
    return min(map(min, shapes)), max(map(max, shapes))


def duplicate_notes(facts: Sequence[PictureFacts], records: Sequence[Record]) -> tuple[str, ...]:
    """Return a note where images of several files are the same pixel by pixel: they may be in several sections."""
    first: dict[tuple[bytes, tuple[int, ...]], Record] = {}
    copies = []
    for picture, record in zip(facts, records, strict=True):
        original = first.setdefault((picture.digest, picture.shape), record)
        if original is not record:
            copies.append((original, record))

    if not copies:
        return ()

    contradictions = sum(original.label != copy.label for original, copy in copies)
    classes = f", {contradictions} of another class" if contradictions else ""
    example = f"{copies[0][0].id} and {copies[0][1].id}"
    return (
        f"{len(copies)} images are the same as another{classes}, first {example}: keep one, or name one patient",
    )
