"""A data set taken apart: its data list, its transforms, and the list's information on each item."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import CacheDataset, Dataset, NPZDictItemDataset
from monai.transforms import Compose
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from medfl.core.documents import Document
from medfl.data.prepared import Item, Transform

_CENTRE = ("centre", "center", "site", "hospital", "institution")
# How a table read with pandas marks a missing value.
_NOTHING = ("", "nan", "<NA>")
_MOST_NUMBERS = 1000
_GROUP = ("group", "patient", "patient_id", "subject", "subject_id", "lesion", "lesion_id")


NO_LABEL = "lacks_label"
LACKS = "lacks_channels"
"""Keys of an entry and its record: its label is missing or must not be read; indices of missing channels."""
SPACING = "site_spacing"
"""Key of an entry: mm to which it is resampled, if not to the bundle's spacing."""


@dataclass(frozen=True)
class Source:
    """A data set taken apart.

    Attributes:
        entries: input of the transforms, one per item: a list, or a data set that only its own class can read.
        transforms: applied to an entry in this order.
        repeatable: reading an entry twice gives the same result.
    """

    entries: Any
    transforms: tuple[Transform, ...] = ()
    repeatable: bool = True

    @property
    def is_list(self) -> bool:
        """Whether the entries are known without reading them."""
        return isinstance(self.entries, list)


def take_apart(dataset: Any) -> Source:
    """Find the data list and the transforms of a data set, inside subsets and concatenations.

    Raises:
        TypeError: it cannot be indexed (a stream).
    """
    if isinstance(dataset, Subset):
        inner = take_apart(dataset.dataset)
        if inner.is_list:
            return replace(inner, entries=[inner.entries[i] for i in dataset.indices])
        return replace(inner, entries=Subset(inner.entries, dataset.indices))

    if isinstance(dataset, ConcatDataset):
        parts = list(map(take_apart, dataset.datasets))
        if all(part.is_list and part.transforms == parts[0].transforms for part in parts):
            return Source([entry for part in parts for entry in part.entries], parts[0].transforms)

    # A subclass with its own `_transform` processes entries in its own way.
    if isinstance(dataset, Dataset) and type(dataset)._transform in (
        Dataset._transform,
        CacheDataset._transform,
    ):
        inner = take_apart(dataset.data)
        return replace(inner, transforms=inner.transforms + _transforms(dataset))

    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(f"a {type(dataset).__name__} has no length or no positions")
    if not isinstance(dataset, torch.utils.data.Dataset):
        return Source(list(dataset))

    stored = isinstance(dataset, NPZDictItemDataset | TensorDataset) and not _transforms(dataset)
    return Source(dataset, (), repeatable=stored)


def _transforms(dataset: object) -> tuple[Transform, ...]:
    """Return what a data set applies to each entry."""
    transform = getattr(dataset, "transform", None)
    if transform is None or (isinstance(transform, Compose) and not transform.transforms):
        return ()

    return (transform,)


def records(source: Source, section: str, folders: Sequence[Path]) -> list[Item]:
    """Return one record per item: a unique id and, if the data list has them, label, centre, group, size.

    Without an id an item is named by its image's path below the first of `folders` that contains it, or by its section
    and index.
    """
    items: list[Item] = []
    taken: set[str] = set()
    for index in range(len(source.entries)):
        # Entries that are not in a list are not read for their records: that may take long.
        entry = source.entries[index] if source.is_list else None
        entry = entry if isinstance(entry, Mapping) else {}
        if "id" in entry:
            ident = str(entry["id"])
        else:
            ident = _path(entry, folders) or f"{section}-{index}"

        ident = f"{ident}#{index}" if ident in taken else ident
        taken.add(ident)
        record: Document = {"id": ident}
        label = class_index(entry.get("label"))

        if label is not None:
            record["label"] = label
        elif (target := numbers(entry.get("label"))) is not None:
            record["target"] = target

        for field, names in (("centre", _CENTRE), ("group", _GROUP)):
            for name in names:
                if entry.get(name) is not None and str(entry[name]) not in _NOTHING:
                    record[field] = str(entry[name])
                    break

        if isinstance(entry.get("size"), int):
            record["size"] = entry["size"]

        for key in (NO_LABEL, LACKS):
            if key in entry:
                record[key] = entry[key]

        items.append(record)

    return items


def _path(entry: Item, folders: Sequence[Path]) -> str:
    """Return the path of an entry's image, or else of its first file, below one of the folders ("" without files)."""
    for value in (entry.get("image"), *entry.values()):
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, str | Path):
            path = Path(os.path.abspath(first))
            for folder in folders:
                if path.is_relative_to(folder):
                    return path.relative_to(folder).as_posix()

            return path.as_posix()

    return ""


def numbers(label: object) -> tuple[float | None, ...] | None:
    """Return a label that is a number, or a row of numbers, with None for NaN; otherwise None."""
    if isinstance(label, bool | str | Mapping | None):
        return None
    try:
        row = np.atleast_1d(np.asarray(label, dtype=np.float64))
    except (TypeError, ValueError):
        return None

    if row.ndim > 1 or not 0 < len(row) <= _MOST_NUMBERS:
        return None

    return tuple(None if value != value else value for value in row.tolist())


def class_index(label: object) -> int | None:
    """Return a label that is an integer in any of the forms used in data lists, else None."""
    if isinstance(label, np.ndarray | np.generic | Tensor) and math.prod(label.shape) == 1:
        label = label.item()

    if isinstance(label, str) and re.fullmatch(r"-?\d+", label):
        return int(label)
    if isinstance(label, int | float) and float(label).is_integer():
        return int(label)

    return None
