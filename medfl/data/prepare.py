"""Prepare a data set: run its deterministic transforms once, up to the first random one as MONAI's CacheDataset.

What they give is kept a byte a number where no bit is lost by it (`medfl.data.byte_codes`).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import CacheDataset, Dataset, MetaTensor, NPZDictItemDataset, list_data_collate
from monai.engines.utils import default_prepare_batch
from monai.transforms import Compose, Randomizable, RandomizableTrait, Transform
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, default_collate
from tqdm import tqdm

from medfl.core.errors import InputError, MedflError
from medfl.core.seeding import derive, stream
from medfl.core.shared_memory import pack, unpack
from medfl.data.batch_transforms import BatchRecipe, recipe
from medfl.data.byte_codes import Coded, decoded, encode, shape_of
from medfl.data.deterministic import stilled
from medfl.data.disk_cache import OnDisk, Spot
from medfl.data.prepared import Augmented, Batch, Geometry, Item, Prepared, Sampled, Sampler, check_channels, stack

_PARALLEL_FROM = 512  # items from which starting worker processes pays
_CHUNK = 64
_OWN_STATE = ("spatial", "intensity", "croppad", "smooth_field", "utility")  # MONAI's; others may draw globally
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
    kept: Sequence[Any] = [] if samples.kept is None else samples.kept
    usual = bool(kept) and collate in (list_data_collate, default_collate) and prepare_batch is default_prepare_batch
    batched = samples.recipe() if usual and samples.random else None
    if usual and isinstance(kept, list) and (batched or not samples.random) and all(map(_is_pair, kept)):
        stacked = stack(items, *([_plain(sample[key]) for sample in kept] for key in ("image", "label")))
        if stacked is not None:
            return stacked if batched is None else Augmented(items, stacked, batched)
    if batched is not None:
        return Augmented(items, kept, batched)
    if samples.random:
        samples.check_channels()
    reseed = samples.reseed if samples.random else None
    ahead = samples.has_own_state if samples.random else isinstance(kept, OnDisk)
    calm = samples.still if samples.random and samples.kept is not None else None  # else they cannot be told apart
    return Sampled(items, samples, reseed, collate, split, samples.twin if ahead else None, calm)


@dataclass(frozen=True, eq=False)
class _Tracked(Coded):
    """A MetaTensor as bytes, and an empty one that holds what MONAI keeps track of."""

    like: MetaTensor

    def restored(self) -> MetaTensor:
        """Return the MetaTensor, its records a copy."""
        like = deepcopy(self.like)
        return MetaTensor(decoded(self), meta=like.meta, applied_operations=like.applied_operations)


def _encoded(image: Tensor) -> Coded | None:
    coded = encode(_plain(image))
    if coded is None or not isinstance(image, MetaTensor):
        return coded
    if image.pending_operations:
        return None
    like = MetaTensor(torch.empty(0), meta=image.meta, applied_operations=image.applied_operations)
    return _Tracked(coded.codes, coded.values, like)


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
        self._parts: list[Any] | None = None

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def fixed(self, index: int) -> Any:
        """Return one sample after the deterministic transforms."""
        with self._named(index):
            entry = self._entries[index]
            return self._compose(dict(entry) if isinstance(entry, Mapping) else entry, end=self._first)

    def compact(self, index: int) -> Any:
        """Return the same, image and mask a byte a number where that is lossless."""
        sample = self.fixed(index)
        if not isinstance(sample, Mapping):
            return sample
        coded = {key: _encoded(sample[key]) for key in ("image", "label") if isinstance(sample.get(key), Tensor)}
        return {**sample, **{key: value for key, value in coded.items() if value is not None}}

    def __call__(self, index: int) -> Any:
        """Return one sample after all transforms."""
        kept = self.fixed(index) if self.kept is None else _decoded(self.kept[index])
        if not self.random:
            return kept
        with self._named(index):  # a copy, as CacheDataset makes: transforms may write in place
            return self._compose(kept if self.kept is None else deepcopy(kept), start=self._first)

    def reseed(self, seed: int) -> None:
        """Set the state of all random transforms, also of those that a data set applies by itself.

        Parts of a transform get seeds of their own: MONAI gives them the transform's, and then what is first drawn in
        them depends on whether it is applied at all.
        """
        if self._parts is None:
            given = [*self._compose.transforms[self._first :], *_own_transforms(self._entries)]
            self._parts = [part for transform in given for part in _random_parts(transform, set())]
        for number, part in enumerate(self._parts):
            part.set_random_state(seed=derive(seed, number) % 2**32)

    def twin(self) -> Sampler:
        """Return what makes the same samples in another thread, and what seeds its random transforms."""
        other = copy(self)
        other._compose, other._parts = deepcopy(self._compose), None
        return other, other.reseed if self.random else None

    def still(self, whole: bool) -> Sampler:
        """Return what makes the same samples without random transforms, and what seeds those that have to stay."""
        other = copy(self)
        other._compose, other._parts = deepcopy(self._compose), None
        steps = other._compose.transforms
        other._compose.transforms = (*steps[: self._first], *stilled(steps[self._first :], whole=whole))
        return other, other.reseed

    @property
    def has_own_state(self) -> bool:
        """Whether what is left to do for each sample draws from nothing but its transforms' own state."""
        left = self._compose.transforms[self._first :]
        return self.kept is not None and all(map(_draws_alone, left))

    def recipe(self) -> BatchRecipe | None:
        """Return what is left to do for each sample as steps for batches, None where it has no such form.

        It depends on the transforms and on what is kept of all items, not on where that is kept.
        """
        images, masks = set(), set()
        for sample in self.kept or []:
            if not _is_pair(sample):
                return None
            image, label = _plain(sample["image"]), _plain(sample["label"])
            shape = shape_of(image)
            images.add((shape[0], image.values.dtype if isinstance(image, Coded) else image.dtype, tuple(shape[1:])))
            is_mask = isinstance(label, Coded) or (isinstance(label, Tensor) and label.ndim > 1)
            masks.add(is_mask)
            if len(shape) < 3 or (is_mask and shape_of(label)[1:] != shape[1:]):
                return None
        if len(masks) != 1 or len({image[:2] for image in images}) != 1:
            return None
        channels, dtype, _ = next(iter(images))
        return recipe(
            self._compose, self._first, frozenset(shape for *_, shape in images), channels, dtype, masks == {True}
        )

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
        shape = shape_of(images[0])
        if _has_image(last) and (last["image"].ndim, len(last["image"])) == (len(shape), shape[0]):
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
    given = sample.get("image") if isinstance(sample, Mapping) else None
    image = given.like if isinstance(given, _Tracked) else given
    if not isinstance(image, MetaTensor) or not {"original_affine", "spatial_shape"} <= set(image.meta):
        return None
    affines = [np.asarray(a, dtype=np.float64) for a in (image.affine, image.meta["original_affine"])]
    shape = tuple(int(side) for side in np.asarray(image.meta["spatial_shape"]).reshape(-1))
    file = str(image.meta.get("filename_or_obj", ""))
    pixels = given if isinstance(given, _Tracked) else image
    return Geometry(affines[0], affines[1], shape[: len(shape_of(pixels)) - 1], file)


def _has_image(sample: Any) -> bool:
    return isinstance(sample, Mapping) and isinstance(sample.get("image"), Tensor | Coded)


def _is_pair(sample: Any) -> bool:
    return _has_image(sample) and sample.get("label") is not None


def _decoded(sample: Any) -> Any:
    """Return a sample as the transforms gave it."""
    if not isinstance(sample, Mapping) or not any(isinstance(value, Coded) for value in sample.values()):
        return sample
    made = dict(sample)
    for key, value in sample.items():
        if isinstance(value, Coded):
            made[key] = value.restored() if isinstance(value, _Tracked) else decoded(value)
    return made


def _random_parts(transform: Any, seen: set[int]) -> list[Any]:
    """Return what has a random state in a transform: itself first, then the transforms inside it."""
    if id(transform) in seen or not hasattr(transform, "set_random_state"):
        return []
    seen.add(id(transform))
    inside = vars(transform).values() if isinstance(transform, Randomizable) else ()
    many = [value if isinstance(value, list | tuple) else [value] for value in inside]
    parts = [part for values in many for value in values for part in _random_parts(value, seen)]
    return [transform, *parts]


def _draws_alone(transform: Any) -> bool:
    """Tell whether a transform is one of MONAI's that use neither a global generator nor somebody's own function."""
    module = type(transform).__module__.split(".")
    named = module[:2] == ["monai", "transforms"] and len(module) > 2 and module[2] in _OWN_STATE
    foreign = any(other in type(transform).__name__ for other in ("Lambda", "TorchVision", "TorchIO", "CuCIM"))
    return named and not foreign


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
                "let it return (inputs, targets)",
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
                yield samples.compact(index)
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
        made: Any = [_SAMPLES.compact(index) for index in indices]
    except InputError as error:
        made = str(error)
    return pack(made)
