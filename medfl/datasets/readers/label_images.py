"""A reader for MONAI's LoadImage: image URIs, and classes in the place of label images.

MONAI's data statistics (`MonaiAlgoStats`) open images and labels alike with `LoadImage`. A class has no file: its index
is a path too, of an image with this value in each pixel. Widths come first, as in MONAI's reader of pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from monai.config.type_definitions import PathLike
from monai.data.image_reader import ImageReader
from monai.transforms.io.array import SUPPORTED_READERS
from monai.utils import ensure_tuple

from medfl.datasets.readers.reading import OF_CLASS, Pixels, read_pixels, split_uri


class UriReader(ImageReader):  # type: ignore[misc]
    """The reader that `LoadImage` uses for classes, images in a container, and TIFF files, for which it has none."""

    def __init__(self, **settings: object) -> None:
        """Take no settings: those of `LoadImage` are for readers of files."""

    def verify_suffix(self, filename: Sequence[PathLike] | PathLike) -> bool:
        """Tell whether these are such."""
        names = list(map(str, ensure_tuple(filename)))
        return all(
            OF_CLASS in n or split_uri(n)[1] or n.lower().endswith((".tif", ".tiff")) for n in names
        )

    def read(self, data: Sequence[PathLike] | PathLike, **settings: object) -> str:
        """Return the one URI."""
        (uri,) = map(str, ensure_tuple(data))
        return uri

    def get_data(self, img: str) -> tuple[Pixels, dict[str, Any]]:
        """Return pixels (W, H, C), those of a class (W, H, 1), and what MONAI has to know of them."""
        uri, _, index = img.partition(OF_CLASS)
        pixels = read_pixels(uri).swapaxes(0, 1)
        if index:
            pixels = np.full((*pixels.shape[:2], 1), int(index), np.float32)

        return pixels, {"original_channel_dim": -1, "spatial_shape": np.array(pixels.shape[:2])}


SUPPORTED_READERS["medfl"] = UriReader
