"""Pictures of more bits than Pillow keeps: it drops half of colours of 16 bits, and signs; SimpleITK reads all."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import IO

import numpy as np
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile
from PIL.TiffTags import TAGS_V2

from medfl.core.arrays import Array
from medfl.datasets.readers import dicom

_BITS, _PACKING, _PHOTOMETRIC, _STRIPS, _ORIENTATION, _SIZES, _PLANES, _FORMAT = (
    258, 259, 262, 273, 274, 279, 284, 339,
)  # fmt: skip
"""Tags of TIFF."""
_APART = 2
_UNSIGNED, _SIGNED, _FLOAT = 1, 2, 3


def loses(image: ImageFile) -> bool:
    """Tell whether Pillow would drop bits or signs of an opened picture."""
    if isinstance(image, PngImageFile):
        return image.mode != "I;16" and "16" in str(image.tile[0].args)
    if not isinstance(image, TiffImageFile):
        return False

    bits, kind = _stored(image)
    return (kind == _SIGNED and bits == 8) or (
        kind == _UNSIGNED and bits > 8 and (bits > 16 or len(image.getbands()) > 1)
    )


def read(image: ImageFile, content: bytes) -> Array:
    """Read such a picture, upright but for its EXIF, as (H, W) or (H, W, C) with C 3 or 4.

    Raises:
        ValueError: it cannot be read; it is grey with transparency, of inks, in packed planes or on its side.
    """
    layout = str(image.tile[0].args)
    if "LA;" in layout or "CMYK" in layout:
        raise ValueError("it is grey with transparency, or of inks, in 16 bits: save it without")

    bits = 16
    if isinstance(image, TiffImageFile):
        bits, _ = _stored(image)
        if image.tag_v2.get(_ORIENTATION, 1) != 1:
            raise ValueError("it lies on its side by Orientation: save it as PNG")
        if image.tag_v2.get(_PLANES) == _APART:
            return _planes(image, content, bits)

    sitk = dicom.sitk()
    with tempfile.TemporaryDirectory() as folder:  # SimpleITK reads files only
        path = Path(folder, "picture")
        path.write_bytes(content)
        try:
            pixels: Array = sitk.GetArrayFromImage(
                sitk.ReadImage(str(path), imageIO=f"{image.format}ImageIO")
            )
        except RuntimeError as error:
            raise ValueError(" ".join(str(error).split())[-200:]) from error

    if 8 * pixels.itemsize != bits:
        raise ValueError(f"it has {bits} bits a channel: save it with 8 or 16")

    return pixels


def _planes(image: TiffImageFile, content: bytes, bits: int) -> Array:
    """Return the channels (H, W, C) of a TIFF in which they lie one after the other."""
    tags = image.tag_v2
    sizes = tags.get(_SIZES, ())
    length = math.prod(image.size) * len(tags[_BITS]) * bits // 8
    if tags.get(_PACKING) != 1 or sum(sizes) != length:
        raise ValueError(
            "its channels lie apart by PlanarConfiguration, and packed or in tiles: save it as PNG"
        )

    planes = bytearray()
    for start, size in zip(tags[_STRIPS], sizes, strict=True):
        planes += content[start : start + size]

    order = ">" if content.startswith(b"MM") else "<"
    values = np.frombuffer(planes, f"{order}u{bits // 8}")
    return np.moveaxis(values.reshape(-1, image.height, image.width), 0, -1)


def tags_of(file: IO[bytes]) -> str:
    """Return the tags by which a TIFF says how it is stored; an error means that it is none."""
    file.seek(0)
    tags = ImageFileDirectory_v2(file.read(8))
    file.seek(tags.next)
    tags.load(file)
    present = tags.keys() & {_BITS, _FORMAT, _PHOTOMETRIC, _PACKING, _PLANES}
    return ", ".join(f"{TAGS_V2[tag].name} {tags[tag]}" for tag in sorted(present))


def white_is_high(image: ImageFile, pixels: Array) -> Array:
    """Return the pixels of a TIFF in which 0 is white with white as the highest value; Pillow does so up to 8 bits.

    Raises:
        ValueError: they are no whole numbers, and so have no highest value.
    """
    if not isinstance(image, TiffImageFile) or image.tag_v2.get(_PHOTOMETRIC) != 0:
        return pixels

    bits, kind = _stored(image)
    if kind == _FLOAT:
        raise ValueError(
            "0 is white in it by PhotometricInterpretation, and no value black: save it with black as 0"
        )
    if bits <= 8 and kind == _UNSIGNED:
        return pixels

    return (2**bits - 1 if kind == _UNSIGNED else -1) - pixels


def _stored(image: TiffImageFile) -> tuple[int, int]:
    """Return the bits of a channel, and the format of its numbers."""
    return max(image.tag_v2.get(_BITS, (1,))), max(image.tag_v2.get(_FORMAT, (_UNSIGNED,)))
