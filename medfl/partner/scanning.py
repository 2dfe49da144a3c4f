"""Scan each item of a bundle's data once: read and transformed as for training, up to the first random transform."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfl.core import SECTIONS, Config, terminal
from medfl.data import NO_LABEL, SampleMaker
from medfl.data.prepare import content_hash
from medfl.datasets.readers.reading import (
    IMAGE_SUFFIXES,
    opened,
    orientation,
    turned,
)
from medfl.datasets.readers.volumes import changes_of
from medfl.problem import Problem


@dataclass(frozen=True, eq=False)
class ScannedItem:
    """An item.

    Attributes:
        image: (C, H, W[, D]) float or integer; None if unreadable.
        label: class index, or mask (C, H, W[, D]), or whatever the bundle makes of it; None if it has none.
        shape: (H, W[, D]) of the file.
        spacing: millimetres between neighbours along each axis of the file, () if unknown.
        changes: changes made by reading, from `volumes.changes_of`.
        problem: why it could not be read, "" if it could.
    """

    section: str
    id: str
    image: Tensor | None = None
    label: Any = None
    shape: tuple[int, ...] = ()
    spacing: tuple[float, ...] = ()
    changes: str = ""
    problem: str = ""

    @property
    def content(self) -> str:
        """Hash of the image as it is."""
        return content_hash(self.image)


def sections(bundle: Problem) -> list[str]:
    """Return the sections that have items of their own; a site without labels only has its training items."""
    names = [name for name in SECTIONS if name != "test" or bundle.has_test]
    return [name for name in names if len(bundle.items(name))]


def scan(bundle: Problem, section: str, *, progress: bool = False) -> Iterator[ScannedItem]:
    """Yield the items of a section one by one; nothing of them is kept."""
    data = bundle.section(section)
    samples = SampleMaker(data.items, data.source)
    shown = terminal.bar(data.items, desc=f"reading {section} images", unit="image", shown=progress)
    for index, item in enumerate(shown):
        ident = str(item["id"])
        entry = data.source.entries[index] if data.source.is_list else {}
        try:
            sample = samples.after_deterministic(index)
        except Exception as error:  # reported like any finding; the scan continues
            yield ScannedItem(section, ident, problem=" ".join(str(error).split()))
            continue

        image, label = _parts(sample)
        if image is None:
            yield ScannedItem(section, ident, problem=f"item {ident!r} has no image tensor")
            continue

        shape, spacing = _file(image, entry)
        changes = changes_of(image, label)
        if not spacing and getattr(label, "ndim", 0) > 1:
            with suppress(Exception):  # of an entry as in `_file`
                changes = turned(str(entry["image"])) + changes

        label = item.get("label", label)
        if NO_LABEL in item:
            label = None
        yield ScannedItem(section, ident, image.as_subclass(Tensor), label, shape, spacing, changes)


def _parts(sample: object) -> tuple[Tensor | None, Any]:
    """Return image and label of a sample; the image is the first tensor with channels if none has that name."""
    image: object
    label: Any
    if isinstance(sample, Mapping):
        image = sample.get("image")
        label = sample.get("label")
        if image is None:
            tensors = [value for value in sample.values() if isinstance(value, Tensor)]
            image = next((tensor for tensor in tensors if tensor.ndim > 2), None)
    elif isinstance(sample, list | tuple) and len(sample) == 2:
        image, label = sample
    else:
        image = sample
        label = None

    if isinstance(image, np.ndarray):
        image = torch.from_numpy(image)
    if isinstance(image, Tensor) and image.ndim > 1:
        return image, label

    return None, label


def _file(image: Tensor, entry: Config) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return shape and spacing of an image file: from MONAI's metadata, else the file's header, else the image."""
    meta = getattr(image, "meta", {})
    if "original_affine" in meta and "spatial_shape" in meta:
        sides = np.asarray(meta["spatial_shape"]).reshape(-1).astype(int).tolist()
        shape = tuple(sides[: image.ndim - 1])
        affine = np.asarray(meta["original_affine"], np.float64)
        # pictures have no millimetres: MONAI gives them the identity
        if len(shape) <= 2 and np.array_equal(affine, np.eye(len(affine))):
            return shape, ()

        spacing = np.linalg.norm(affine[:3, : len(shape)], axis=0).tolist()
        return shape, tuple(round(side, 4) for side in spacing)

    with suppress(Exception):  # of an entry without the name of a file, or of another file
        uri = str(entry["image"])
        if uri.lower().endswith(IMAGE_SUFFIXES):
            with opened(uri) as picture:
                size = (picture.height, picture.width)
                return size[::-1] if orientation(picture) > 4 else size, ()

    return tuple(image.shape[1:]), ()
