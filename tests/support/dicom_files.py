"""DICOM files written byte by byte (PS3.5), with tags, sequences and mistakes that libraries would not write."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Elements = Mapping[tuple[int, int], tuple[str, Any]]
"""(group, element) -> kind of value, value: text, bytes, whole numbers, or the Elements of a sequence's items."""

EXPLICIT = "1.2.840.10008.1.2.1"
IMPLICIT = "1.2.840.10008.1.2"
BIG_ENDIAN = "1.2.840.10008.1.2.2"
_LONG = ("OB", "OW", "SQ", "UN")


def slice_of(pixels: np.ndarray, z: float = 0, more: Elements | None = None) -> dict[Any, Any]:
    """Return the elements of a slice (H, W) of 1 mm at (0, 0, z) with the pixels, in their own type; None drops one."""
    bits = 8 * pixels.itemsize
    elements: dict[Any, Any] = {
        (0x0008, 0x0016): ("UI", "1.2.840.10008.5.1.4.1.1.2"), (0x0008, 0x0018): ("UI", f"1.2.3.{round(z) + 1000}"),
        (0x0008, 0x0060): ("CS", "CT"), (0x0018, 0x0050): ("DS", "1"), (0x0020, 0x000E): ("UI", "1.2.3"),
        (0x0020, 0x0032): ("DS", f"0\\0\\{z:g}"), (0x0020, 0x0037): ("DS", "1\\0\\0\\0\\1\\0"),
        (0x0028, 0x0002): ("US", [1]), (0x0028, 0x0004): ("CS", "MONOCHROME2"),
        (0x0028, 0x0010): ("US", [pixels.shape[-2]]), (0x0028, 0x0011): ("US", [pixels.shape[-1]]),
        (0x0028, 0x0030): ("DS", "1\\1"),
        (0x0028, 0x0100): ("US", [bits]), (0x0028, 0x0101): ("US", [bits]), (0x0028, 0x0102): ("US", [bits - 1]),
        (0x0028, 0x0103): ("US", [int(pixels.dtype.kind == "i")]), (0x7FE0, 0x0010): ("OW", pixels),
    }  # fmt: skip
    elements.update(more or {})
    return {tag: element for tag, element in elements.items() if element is not None}


def write(path: Path, elements: Elements, syntax: str = EXPLICIT) -> str:
    """Write a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = _encoded({(0x0002, 0x0010): ("UI", syntax)}, EXPLICIT)
    path.write_bytes(bytes(128) + b"DICM" + meta + _encoded(elements, syntax))
    return str(path)


def _encoded(elements: Elements, syntax: str) -> bytes:
    order = ">" if syntax == BIG_ENDIAN else "<"
    content = b""
    for (group, number), (kind, value) in sorted(elements.items()):
        data = _value(value, syntax, order)
        data += (b" " if isinstance(value, str) and kind != "UI" else b"\0") * (len(data) % 2)
        content += struct.pack(f"{order}HH", group, number)
        if syntax == IMPLICIT:
            content += struct.pack("<I", len(data))
        elif kind in _LONG:
            content += kind.encode() + struct.pack(f"{order}HI", 0, len(data))
        else:
            content += kind.encode() + struct.pack(f"{order}H", len(data))
        content += data
    return content


def _value(value: Any, syntax: str, order: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder(order)).tobytes()
    if isinstance(value, Sequence) and value and isinstance(value[0], Mapping):
        items = [_encoded(item, syntax) for item in value]
        return b"".join(
            struct.pack(f"{order}HHI", 0xFFFE, 0xE000, len(item)) + item for item in items
        )
    return struct.pack(f"{order}{len(value)}H", *(number % 65536 for number in value))
