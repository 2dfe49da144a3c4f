"""Readers of images under guard: each file's place and kind are checked where it is opened, whoever names it.

A path may come from a data list, a transform or an expression; at the reader all of them meet. Some formats keep the
pixels in another file, which their header names: such a header makes any file of the machine an image.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from monai.data import ImageReader
from monai.transforms import LoadImage
from monai.utils import ensure_tuple
from monai.utils.enums import MetaKeys

import medfl.data.samples  # noqa: F401 - a reader that warns is taken out of MONAI's there
from medfl.core.untrusted import Refused, printable
from medfl.datasets.readers.reading import names_other_file

Check = Callable[[Any], None]
"""Raises `Refused` for a path that may not be opened."""

_HEAD = 1 << 16
_GZIP = b"\x1f\x8b"
_UNIT = 0b111  # the bits of a NIfTI's xyzt_units that say in what lengths are
_MILLIMETRES = {1: 1e3, 3: 1e-3}  # of metres and micrometres; others are mm, or said to be nothing


class GuardedReader(ImageReader):
    """One of MONAI's readers, which checks each path before it opens it."""

    def __init__(self, reader: ImageReader, check: Check) -> None:
        self._reader = reader
        self._check = check

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of Python's own, asked for before it is made
            raise AttributeError(name)
        return getattr(self._reader, name)

    def verify_suffix(self, filename: Any) -> bool:
        """Tell whether the reader knows files of this name."""
        return self._reader.verify_suffix(filename)

    def read(self, data: Any, **kwargs: Any) -> Any:
        """Return what the reader makes of a file, or of several.

        Raises:
            Refused: one lies elsewhere, or names another file.
        """
        for path in ensure_tuple(data):
            self._check(path)
        return self._reader.read(data, **kwargs)

    def get_data(self, *args: Any, **kwargs: Any) -> Any:
        """Return the pixels and what is known of them, affines in mm; readers call what they take `img` or `wsi`."""
        pixels, meta = self._reader.get_data(*args, **kwargs)
        factor = _MILLIMETRES.get(int(meta.get("xyzt_units", 0)) & _UNIT, 1.0)
        for key in (MetaKeys.AFFINE, MetaKeys.ORIGINAL_AFFINE):
            if factor != 1 and key in meta:
                meta[key] = np.diag([factor] * 3 + [1]) @ meta[key]

        return pixels, meta


def guard_readers(component: Any, check_place: Check) -> None:
    """Let what a component opens be checked: MONAI's loaders, alone or within a data set, and medfl's readers."""

    def check(path: Any) -> None:
        check_place(path)
        check_content(path)

    for part in _parts(component):
        if isinstance(part, LoadImage):
            part.readers = [_guarded(reader, check) for reader in part.readers]
        if isinstance(getattr(part, "wsi_reader", None), ImageReader):
            part.wsi_reader = _guarded(part.wsi_reader, check)
        if hasattr(type(part), "check_path"):  # of medfl's own readers
            part.check_path = check


def check_content(path: Any) -> None:
    """Check that a file holds its pixels itself.

    Raises:
        Refused: its header names another file, or may: HDF5 has links to others.
    """
    if not os.path.isfile(path):
        return

    with open(path, "rb") as file:
        head = file.read(_HEAD)

    if head.startswith(_GZIP):
        with gzip.open(path) as file:
            try:
                head = file.read(_HEAD)
            except (OSError, EOFError):
                return  # its reader says what is wrong with it

    if names_other_file(head):
        raise Refused(f"the file {printable(path)}, which names another file as its pixels")


def _guarded(reader: ImageReader, check: Check) -> ImageReader:
    if isinstance(reader, GuardedReader):
        return reader

    return GuardedReader(reader, check)


def _parts(component: Any) -> Iterator[Any]:
    """Yield a component, and what it loads images with."""
    yield component
    for name in ("_loader", "loader", "transform"):
        part = getattr(component, name, None)
        if part is not None and not isinstance(part, type):
            yield from _parts(part)
