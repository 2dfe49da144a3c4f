"""Prepare a data set: run its deterministic transforms once, up to the first random one as MONAI's CacheDataset."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import CacheDataset, Dataset, MetaTensor, NPZDictItemDataset, list_data_collate
from monai.engines.utils import default_prepare_batch
from monai.transforms import Compose, RandomizableTrait, Transform
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate
from tqdm import tqdm

from medfl.cache import Spot
from medfl.errors import InputError, MedflError
from medfl.packing import pack, unpack
from medfl.prepared import Batch, Geometry, Item, Prepared, Sampled, check_channels, stack
from medfl.seeding import stream

_PARALLEL_FROM = 512  # items from which starting worker processes pays
_CHUNK = 64
_CENTRE = ("centre", "center", "site", "hospital", "institution")
_GROUP = ("group", "patient", "patient_id", "subject", "subject_id", "lesion", "lesion_id")


@dataclass(frozen=True)
class Source:
    """A data set taken apart.

    Attributes:
        entries: what goes into the transforms, one per item: a list, or a data set that only its own class can read.
        transforms: what is applied to an entry, in this order.
        fixed: reading an entry twice gives the same.
    """

    entries: Any
    transforms: tuple[Any, ...] = ()
    fixed: bool = True

    @property
    def is_list(self) -> bool:
        """Whether the entries are known without reading them."""
        return isinstance(self.entries, list)


def take_apart(dataset: Any) -> Source:
    """Find the data list and the transforms of a data set, through subsets and concatenations.

    Raises:
        TypeError: it cannot be indexed (a stream).
    """
    if isinstance(dataset, Subset):
        inner = take_apart(dataset.dataset)
        whole, indices = inner.entries, dataset.indices
        entries = [whole[i] for i in indices] if inner.is_list else Subset(whole, indices)
        return Source(entries, inner.transforms, inner.fixed)
    if isinstance(dataset, ConcatDataset):
        parts = [take_apart(part) for part in dataset.datasets]
        if all(part.is_list and part.transforms == parts[0].transforms for part in parts):
            return Source([entry for part in parts for entry in part.entries], parts[0].transforms)
    if isinstance(dataset, Dataset) and type(dataset)._transform in (Dataset._transform, CacheDataset._transform):
        inner = take_apart(dataset.data)
        return Source(inner.entries, inner.transforms + _transforms(dataset), inner.fixed)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(f"a {type(dataset).__name__} has no length or no positions")
    if not isinstance(dataset, torch.utils.data.Dataset):
        return Source(list(dataset))
    stored = isinstance(dataset, NPZDictItemDataset | TensorDataset) and not _transforms(dataset)
    return Source(dataset, (), fixed=stored)


def _transforms(dataset: Any) -> tuple[Any, ...]:
    """Return what a data set applies to each entry."""
    transform = getattr(dataset, "transform", None)
    empty = transform is None or (isinstance(transform, Compose) and not transform.transforms)
    return () if empty else (transform,)


def records(source: Source, section: str, folders: Sequence[Path]) -> list[Item]:
    """Return one record per item: a unique id and, where the data list has them, label, centre, group and size.

    Without an id of its own an item is named by its image's path below the first of `folders` that holds it, or by its
    section and position.
    """
    made: list[Item] = []
    taken: set[str] = set()
    for index in range(len(source.entries)):
        entry = source.entries[index] if source.is_list else None
        entry = entry if isinstance(entry, Mapping) else {}
        ident = str(entry["id"]) if "id" in entry else _path(entry, folders) or f"{section}-{index}"
        ident = f"{ident}#{index}" if ident in taken else ident
        taken.add(ident)
        record: dict[str, Any] = {"id": ident}
        label = _class_index(entry.get("label"))
        if label is not None:
            record["label"] = label
        for field, names in (("centre", _CENTRE), ("group", _GROUP)):
            value = next((entry[name] for name in names if entry.get(name) is not None), None)
            if value is not None:
                record[field] = str(value)
        if isinstance(entry.get("size"), int):
            record["size"] = entry["size"]
        made.append(record)
    return made


def _path(entry: Mapping[str, Any], folders: Sequence[Path]) -> str:
    """Return the path of an entry's image, or else of its first file, below one of the folders ("" without files)."""
    for value in (entry.get("image"), *entry.values()):
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, str | Path):
            path = Path(os.path.abspath(first))
            below = next((path.relative_to(folder) for folder in folders if path.is_relative_to(folder)), path)
            return below.as_posix()
    return ""


def _class_index(label: Any) -> int | None:
    """Return a label that is a whole number in any of the forms that data lists have, else None."""
    if isinstance(label, np.ndarray | np.generic | Tensor) and math.prod(label.shape) == 1:
        label = label.item()
    if isinstance(label, str) and re.fullmatch(r"-?\d+", label):
        return int(label)
    return int(label) if isinstance(label, int | float) and float(label).is_integer() else None


def prepare(
    items: Sequence[Item],
    source: Source,
    collate: Callable[[list[Any]], Any] = list_data_collate,
    prepare_batch: Callable[..., Any] = default_prepare_batch,
    *,
    label: str = "preparing images",
    jobs: int = 1,
    progress: bool = False,
    spot: Spot | None = None,
) -> Prepared:
    """Return the items ready to be batched.

    Args:
        items: one record per item (id, label, ...).
        source: the data set, taken apart.
        collate: samples -> batch, as the data loader's.
        prepare_batch: (batch, device, non_blocking) -> (inputs, targets), as the engine's.
        label: what the progress bar says.
        jobs: worker processes for long lists.
        progress: show a bar.
        spot: where samples go that are too large for memory; None keeps them there whatever their size.

    Raises:
        InputError: an item cannot be read, or the images differ in their channels; names the item.
    """
    samples = Samples(items, source)
    if source.fixed:
        make = partial(_mapped, samples, label=label, jobs=jobs, progress=progress)
        samples.kept = list(make(range(len(items)))) if spot is None else spot.keep(len(items), make)
    prepared = _ready(items, samples, collate, prepare_batch)
    if not samples.random:
        found = [_geometry(sample) for sample in samples.kept or []]
        if all(found):
            prepared.geometry = [geometry for geometry in found if geometry is not None]
    return prepared


def _ready(
    items: Sequence[Item],
    samples: Samples,
    collate: Callable[[list[Any]], Any],
    prepare_batch: Callable[..., Any],
) -> Prepared:
    split = _unpacking(prepare_batch)
    if samples.random:
        samples.check_channels()
        return Sampled(items, samples, samples.reseed, collate, split)
    kept = samples.kept if isinstance(samples.kept, list) else []
    usual = bool(kept) and collate in (list_data_collate, default_collate) and prepare_batch is default_prepare_batch
    if usual and all(_has_image(sample) and sample.get("label") is not None for sample in kept):
        stacked = stack(items, *([_plain(sample[key]) for sample in kept] for key in ("image", "label")))
        if stacked is not None:
            return stacked
    return Sampled(items, samples, None, collate, split)


class Samples:
    """Index -> the sample after all transforms; a failure names the item.

    Attributes:
        random: whether anything after the deterministic transforms is left to do for each sample.
        kept: the samples after the deterministic transforms, None where entries are read anew each time.
    """

    def __init__(self, items: Sequence[Item], source: Source) -> None:
        """Find the first random transform."""
        chain = source.transforms
        compose = chain[0] if len(chain) == 1 and type(chain[0]) is Compose else Compose(chain)
        self._items, self._entries, self._compose = items, source.entries, compose.flatten()  # type: ignore[no-untyped-call]
        steps = self._compose.transforms
        moving = (i for i, t in enumerate(steps) if isinstance(t, RandomizableTrait) or not isinstance(t, Transform))
        self._first = next(moving, len(steps)) if source.fixed else 0
        self.random = not source.fixed or self._first < len(steps)
        self.kept: Sequence[Any] | None = None

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def fixed(self, index: int) -> Any:
        """Return one sample after the deterministic transforms."""
        with self._named(index):
            entry = self._entries[index]
            return self._compose(dict(entry) if isinstance(entry, Mapping) else entry, end=self._first)

    def __call__(self, index: int) -> Any:
        """Return one sample after all transforms."""
        kept = self.fixed(index) if self.kept is None else self.kept[index]
        if not self.random:
            return kept
        with self._named(index):  # a copy, as CacheDataset makes: transforms may write in place
            return self._compose(kept if self.kept is None else deepcopy(kept), start=self._first)

    def reseed(self, seed: int) -> None:
        """Set the state of all random transforms, also of those that a data set applies by itself."""
        for transform in (self._compose, *_own_transforms(self._entries)):
            transform.set_random_state(seed=seed)

    def check_channels(self) -> None:
        """Compare the images' channels now where the deterministic transforms already put them first."""
        kept = self.kept if isinstance(self.kept, list) else []  # else another pass over the disk
        images = [sample["image"] for sample in kept if _has_image(sample)]
        if not images or len(images) < len(self):
            return
        with stream(0, "channels"):
            self.reseed(0)
            last = self(0)
        last = last[0] if isinstance(last, list) else last
        if _has_image(last) and (last["image"].ndim, len(last["image"])) == (images[0].ndim, len(images[0])):
            check_channels(self._items, images)

    @contextmanager
    def _named(self, index: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None and not isinstance(cause, MedflError):
                cause = cause.__cause__
            if isinstance(cause, MedflError):
                raise cause from None
            raise InputError(
                f"item {self._items[index].get('id', index)!r} cannot be prepared: "
                f"{type(cause).__name__}: {' '.join(str(cause).split())[:300]}",
                "every item can be read and transformed",
                "remove or repair it",
            ) from error


def _geometry(sample: Any) -> Geometry | None:
    """Return what MONAI's transforms wrote down of an image's place, None where they do not keep track."""
    image = sample.get("image") if isinstance(sample, Mapping) else None
    if not isinstance(image, MetaTensor) or not {"original_affine", "spatial_shape"} <= set(image.meta):
        return None
    affines = [np.asarray(a, dtype=np.float64) for a in (image.affine, image.meta["original_affine"])]
    shape = tuple(int(side) for side in np.asarray(image.meta["spatial_shape"]).reshape(-1))
    file = str(image.meta.get("filename_or_obj", ""))
    return Geometry(affines[0], affines[1], shape[: image.ndim - 1], file)


def _has_image(sample: Any) -> bool:
    return isinstance(sample, Mapping) and isinstance(sample.get("image"), Tensor)


def _own_transforms(dataset: Any) -> list[Any]:
    """Return the random transforms inside a data set that only its own class can read."""
    if not isinstance(dataset, torch.utils.data.Dataset):
        return []
    inner = [getattr(dataset, name) for name in ("dataset", "data") if hasattr(dataset, name)]
    found = [transform for part in [*inner, *getattr(dataset, "datasets", [])] for transform in _own_transforms(part)]
    own = [dataset, getattr(dataset, "transform", None)]
    return [*found, *(part for part in own if hasattr(part, "set_random_state"))]


def _unpacking(prepare_batch: Callable[..., Any]) -> Callable[[Any], Batch]:
    def split(batch: Any) -> Batch:
        pair = prepare_batch(batch, torch.device("cpu"), False)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(
                f"prepare_batch returns {len(pair) if isinstance(pair, tuple | list) else 'one value'}",
                "a supervised batch is a pair of inputs and targets",
                "use another bundle",
            )
        return _plain(pair[0]), _plain(pair[1])

    return split


def _plain(value: Any) -> Any:
    """Take the tensor out of MONAI's MetaTensor, whose bookkeeping costs more than small networks."""
    return value.as_tensor() if isinstance(value, MetaTensor) else value


# Many items at once


def _mapped(samples: Samples, indices: Sequence[int], label: str, jobs: int, progress: bool) -> Iterator[Any]:
    """Run the deterministic transforms over these items in order, in forked workers where that pays."""
    count = len(indices)
    with tqdm(total=count, desc=label, unit="image", disable=not progress, leave=False) as bar:
        if jobs <= 1 or count < _PARALLEL_FROM:
            for index in indices:
                yield samples.fixed(index)
                bar.update()
            return
        chunks = [indices[start : start + _CHUNK] for start in range(0, count, _CHUNK)]
        context = multiprocessing.get_context("fork")  # workers inherit what cannot be pickled: the bundle's lambdas
        with ProcessPoolExecutor(jobs, context, _start_worker, (samples,)) as pool:
            for answer in pool.map(_run_chunk, chunks):
                made = unpack(answer)
                if isinstance(made, str):
                    raise InputError(*made.split("; ", 2))
                bar.update(len(made))
                yield from made


def _start_worker(samples: Samples) -> None:
    global _SAMPLES
    _SAMPLES = samples
    torch.set_num_threads(1)


_SAMPLES: Samples
"""What a worker process works on."""


def _run_chunk(indices: Sequence[int]) -> bytes:
    """Return packed samples, or the text of what is wrong with one of them."""
    try:
        made: Any = [_SAMPLES.fixed(index) for index in indices]
    except InputError as error:
        made = str(error)
    return pack(made)
