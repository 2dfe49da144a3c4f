"""Each item's sample: the deterministic transforms run once and are stored, the random ones run on each use."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from monai import transforms as mt
from monai.data import MetaTensor, PILReader
from monai.transforms import (
    Compose,
    LoadImage,
    MapTransform,
    Randomizable,
    RandomizableTrait,
    Spacingd,
    Transform as MonaiTransform,
)
from monai.transforms.io.array import SUPPORTED_READERS
from torch import Tensor

from medfl.core import Document, InputError, MedflError, missing_package, without, without_package
from medfl.core.seeding import derive, stream
from medfl.data.batch_transforms import BatchRecipe, recipe
from medfl.data.prepared import (
    Batch,
    Item,
    Prepared,
    Sample,
    Transform,
    as_plain,
    check_channels,
    extras,
)
from medfl.data.source import LACKS, NO_LABEL, SPACING, Source
from medfl.datasets.readers.reading import JOINED

# Entries of a data list without a label, or without some channels: make the deterministic transforms accept them.
#
# A missing label becomes a mask of zeros or class -1, which is never used (`LabelsHidden`). Channels that an
# entry lists under `LACKS` are set to zero after each transform, so that the contents of their files have no effect.

_NUMBERED = re.compile(r"_(\d{4})\.nii(?:\.gz)?$", re.IGNORECASE)


def is_unlabelled(entry: object) -> bool:
    """Tell whether an entry of a data list has an image but no label."""
    return isinstance(entry, Mapping) and "image" in entry and entry.get("label") in (None, "")


def drop_label(entry: Item) -> Document:
    """Return the entry without its label, marked so that nothing looks for one."""
    return {**without(entry, ["label"]), NO_LABEL: True}


def allow_missing_labels(chain: Sequence[Transform]) -> Compose:
    """Return a copy of the transforms, composed, that accepts entries without a label."""
    transforms = deepcopy(Compose(chain).flatten())  # type: ignore[no-untyped-call]
    for transform in transforms.transforms:
        if isinstance(transform, MapTransform):
            transform.allow_missing_keys = True
    return transforms  # type: ignore[no-any-return]


def first_random(steps: Sequence[Transform]) -> int:
    """Return the index of the first transform that is random, or not MONAI's; the number of steps if none is."""
    for position, step in enumerate(steps):
        if isinstance(step, RandomizableTrait) or not isinstance(step, MonaiTransform):
            return position

    return len(steps)


def with_all_channels(entry: Sample, channels: int, numbered: bool) -> Sample:
    """Return an entry whose image has a file for every channel: a missing one is replaced by another.

    Args:
        entry: its image is a list of files in the channels' order, or their URIs joined by ` | `.
        channels: of an image.
        numbered: joined files are volumes <name>_0000, <name>_0001, ... of one channel.
    """
    image = entry.get("image") if isinstance(entry, Mapping) else None
    if isinstance(image, list | tuple):
        if len(image) != channels:
            return entry

        there = {i: file for i, file in enumerate(image) if os.path.exists(file)}
    elif isinstance(image, str) and numbered:
        # as NAME_0000, NAME_0001, ...
        matches = [(_NUMBERED.search(file), file) for file in image.split(JOINED)]
        there = {int(match[1]): file for match, file in matches if match}
        there = there if len(there) == len(matches) and max(there) < channels else {}
    else:
        return entry

    if not 0 < len(there) < channels:
        return entry

    files = [there.get(channel, min(there.items())[1]) for channel in range(channels)]

    complete = JOINED.join(files) if isinstance(image, str) else files
    lacking = sorted(set(range(channels)) - set(there))
    return {**entry, "image": complete, LACKS: tuple(lacking)}


def fill_missing(source: Source, channels: int = 0) -> Source:
    """Return a source whose transforms accept entries without labels or channels.

    Args:
        source: its entries are a list of mappings; those without a label have no such key.
        channels: of an image; 0: none of them is missing.
    """
    steps = list(allow_missing_labels(source.transforms).transforms)
    if any(isinstance(step, ZeroChannels if channels else StandInLabel) for step in steps):
        return source

    first = first_random(steps)
    zero = [ZeroChannels(channels)] if channels else []
    fixed = []
    for step in steps[:first]:
        fixed += [step, *zero]

    example = next((entry for entry in source.entries if "label" in entry), None)

    return replace(
        source,
        transforms=(Compose([*fixed, StandInLabel(Compose(fixed), example), *steps[first:]]),),
    )


class ZeroChannels(MonaiTransform):
    """Set missing channels of an image (C, H, W[, D]) to zero; other images pass unchanged."""

    keys = ()

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def __call__(self, data: Item) -> Item:
        """Return the entry with its image changed in a copy."""
        image = data["image"]
        absent = list(data.get(LACKS, ()))
        if (
            not absent
            or not isinstance(image, Tensor)
            or image.ndim < 3
            or len(image) != self.channels
        ):
            return data

        image = image.clone()
        image[absent] = 0
        return {**data, "image": image}


def resample_each(source: Source) -> Source:
    """Return a source that resamples each entry to its `SPACING`.

    Raises:
        InputError: no transform resamples.
    """
    steps = []
    for step in Compose(source.transforms).flatten().transforms:  # type: ignore[no-untyped-call]  # MONAI declares no types for it
        steps.append(_OwnSpacing(step) if isinstance(step, Spacingd) else step)

    if not any(isinstance(step, _OwnSpacing) for step in steps):
        raise InputError(
            "--site-spacing with a bundle that does not resample its images",
            "volumes that its transforms give a spacing (Spacingd)",
            "leave it out",
        )

    return replace(source, transforms=(Compose(steps),))


class _OwnSpacing(MonaiTransform):
    """Resample an entry to its `SPACING`, others as `step` does."""

    def __init__(self, step: Spacingd) -> None:
        self.step = step
        self.keys = step.keys

    def __call__(self, data: Item) -> Item:
        """Return the entry without its `SPACING`."""
        step = copy(self.step)
        if SPACING in data:
            step.spacing_transform = copy(step.spacing_transform)
            step.spacing_transform.pixdim = np.array(data[SPACING])

        return step(without(data, [SPACING]))  # type: ignore[arg-type, return-value]  # MONAI asks for keys of its own kind


class StandInLabel(MonaiTransform):
    """Give an image without a label a placeholder in the form of the other labels.

    Args:
        before: the transforms already applied to the entry.
        example: an entry with a label; None: an image has a mask if the first transform would read one.
    """

    keys = ()

    def __init__(self, before: Compose, example: Item | None) -> None:
        self.before = before
        self.example = example

    @cached_property
    def like(self) -> Sample:
        """A label in the form that the transforms produce."""
        if self.example is not None:
            return self.before(dict(self.example))["label"]

        # Without an example the first transform, which reads files, distinguishes masks from classes.
        steps = (step for step in self.before.transforms if isinstance(step, MapTransform))
        first = next(steps, None)
        if first is not None and "label" in first.keys:
            return torch.zeros((1, 1, 1), dtype=torch.uint8)

        return -1

    def __call__(self, data: Item) -> Document:
        """Return the entry with a label, and without the keys that say what it lacks."""
        sample = without(data, (LACKS, NO_LABEL))
        if "label" in sample:
            return sample

        return {**sample, "label": self._empty(sample["image"])}

    def _empty(self, image: Sample) -> Sample:
        like = self.like
        if not isinstance(like, Tensor):
            return -1
        if like.ndim < 2:
            return torch.full_like(like, -1)

        mask = torch.zeros((len(like), *image.shape[1:]), dtype=like.dtype)
        if isinstance(like, MetaTensor):
            return MetaTensor(mask, meta=image.meta)

        return mask


# Samples

# Every LoadImage creates it if pydicom is installed, and it always warns if NVIDIA's decoder is missing.
SUPPORTED_READERS.pop("nvimgcodecpydicomreader", None)

# Modules of MONAI's transforms; other transforms may draw from a global generator.
_OWN_STATE = ("spatial", "intensity", "croppad", "smooth_field", "utility")


class SampleMaker:
    """Index -> the sample after all transforms; a failure names the item.

    Attributes:
        has_steps_left: whether anything remains to be done per sample after the deterministic transforms.
        cached: the samples after the deterministic transforms, None if entries are read again each time.
    """

    def __init__(self, items: Sequence[Item], source: Source) -> None:
        chain = source.transforms
        if len(chain) == 1 and type(chain[0]) is Compose:
            compose = chain[0]
        else:
            compose = Compose(chain)

        self._items = items
        self._entries = source.entries
        self._compose = compose.flatten()  # type: ignore[no-untyped-call]
        steps = self._compose.transforms
        self._first = first_random(steps) if source.repeatable else 0
        self.has_steps_left = not source.repeatable or self._first < len(steps)
        self.cached: Sequence[Sample] | None = None
        self._parts: list[Any] | None = None

    @cached_property
    def reads_rows_first(self) -> bool:
        """Whether one of the transforms is a MONAI PILReader that keeps a picture's rows as the first axis."""
        loaders = [getattr(step, "_loader", step) for step in self._compose.transforms]
        for loader in loaders:
            for reader in loader.readers if isinstance(loader, LoadImage) else ():
                if isinstance(reader, PILReader) and not reader.reverse_indexing:
                    return True

        return False

    def __len__(self) -> int:
        return len(self._items)

    def after_deterministic(self, index: int) -> Sample:
        """Return one sample after the deterministic transforms."""
        with self._naming(index):
            entry = self._entries[index]
            return self._compose(
                dict(entry) if isinstance(entry, Mapping) else entry, end=self._first
            )

    def __call__(self, index: int) -> Sample:
        """Return one sample after all transforms."""
        if self.cached is None:
            sample = self.after_deterministic(index)
        else:
            sample = self.cached[index]

        if not self.has_steps_left:
            return sample
        with self._naming(index):  # a copy, like CacheDataset's: transforms may write in place
            return self._compose(
                sample if self.cached is None else deepcopy(sample), start=self._first
            )

    def reseed(self, seed: int) -> None:
        """Set the state of all random transforms, including those that a data set applies itself.

        Parts of a transform get seeds of their own: MONAI gives them the transform's, and then their first random
        numbers depend on whether it is applied at all.
        """
        if self._parts is None:
            self._parts = []
            for transform in self._compose.transforms[self._first :]:
                self._parts += random_parts(transform, set())
            for transform in _inner_transforms(self._entries):
                self._parts += random_parts(transform, set())

        for number, part in enumerate(self._parts):
            part.set_random_state(seed=derive(seed, number) % 2**32)  # NumPy's seeds have 32 bits

    def clone(self) -> SampleMaker:
        """Return a copy with transforms and random states of its own, and the same samples."""
        clone = copy(self)
        clone._compose = deepcopy(self._compose)
        clone._parts = None
        return clone

    def without_draws(self, uncropped: bool) -> SampleMaker:
        """Return a copy with the same samples but without random transforms; itself if it knows of none."""
        if not self.has_steps_left or self.cached is None:  # a data set may draw while being read
            return self

        clone = self.clone()
        steps = clone._compose.transforms
        clone._compose.transforms = (
            *steps[: self._first],
            *without_draws(steps[self._first :], uncropped=uncropped),
        )
        return clone

    @property
    def has_own_state(self) -> bool:
        """Whether the remaining steps draw only from their transforms' own state."""
        return self.cached is not None and all(
            map(_has_own_state, self._compose.transforms[self._first :])
        )

    def recipe(self) -> BatchRecipe | None:
        """Return the remaining steps per sample as steps for batches, None if impossible.

        It depends on the transforms and on the cached samples of all items, not on where these are cached.
        """
        images = set()
        masks = set()
        for sample in self.cached or []:
            if not is_pair(sample):
                return None

            image = as_plain(sample["image"])
            label = as_plain(sample["label"])
            shape = image.shape
            images.add((shape[0], image.dtype, tuple(shape[1:])))
            is_mask = isinstance(label, Tensor) and label.ndim > 1
            masks.add(is_mask)

            if len(shape) < 3 or (is_mask and label.shape[1:] != shape[1:]):
                return None

        if len(masks) != 1 or len({image[:2] for image in images}) != 1:
            return None

        channels, dtype, _ = next(iter(images))
        return recipe(
            self._compose,
            self._first,
            frozenset(shape for *_, shape in images),
            channels,
            dtype,
            masks == {True},
        )

    def check_channels(self) -> None:
        """Compare the images' channels now if the deterministic transforms already put them first."""
        # Samples on disk are skipped: that would be another pass over them.
        cached = self.cached if isinstance(self.cached, list) else []
        images = [sample["image"] for sample in cached if _has_image(sample)]
        if not images or len(images) < len(self):
            return

        # a stream of its own, as making a sample draws
        with stream(0, "channels"):
            self.reseed(0)
            last = self(0)

        last = last[0] if isinstance(last, list) else last
        shape = images[0].shape
        if _has_image(last) and (last["image"].ndim, len(last["image"])) == (len(shape), shape[0]):
            check_channels(self._items, images)

    @contextmanager
    def _naming(self, index: int) -> Iterator[None]:
        """Add the item to a transform's error."""
        try:
            yield
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None and not isinstance(cause, MedflError):
                cause = cause.__cause__

            if isinstance(cause, MedflError):
                raise cause from None

            item = f"item {self._items[index].get('id', index)!r}"
            if package := missing_package(error):
                raise without_package(item, package) from error

            entry = self._entries[index] if isinstance(self._entries, list) else None
            bare = ", or name its site with --unlabelled" * (
                is_unlabelled(entry) and "label" in str(cause)
            )
            advice = f"remove the item from the data, or repair its files{bare}"
            if isinstance(cause, KeyError) and "_meta_dict" in str(cause):  # MONAI before 1.3
                advice = "give its LoadImage `image_only: false`, which older MONAI had where nothing was said"

            raise InputError(
                f"{item} cannot be prepared: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}",
                "every item can be read and transformed",
                advice,
            ) from error


def _has_image(sample: Sample) -> bool:
    return isinstance(sample, Mapping) and isinstance(sample.get("image"), Tensor)


def is_pair(sample: Sample) -> bool:
    """Tell whether a sample has an image and a label."""
    return _has_image(sample) and sample.get("label") is not None


def random_parts(transform: object, visited: set[int]) -> list[Any]:
    """Return the parts of a transform that have a random state: itself first, then the transforms inside it."""
    if id(transform) in visited or not hasattr(transform, "set_random_state"):
        return []

    visited.add(id(transform))
    parts = [transform]
    for held in vars(transform).values() if isinstance(transform, Randomizable) else ():
        for value in held if isinstance(held, list | tuple) else [held]:
            parts += random_parts(value, visited)

    return parts


def _has_own_state(transform: object) -> bool:
    """Tell whether a transform is a MONAI one that uses neither a global generator nor a user's function."""
    module = type(transform).__module__.split(".")
    is_listed = (
        module[:2] == ["monai", "transforms"] and len(module) > 2 and module[2] in _OWN_STATE
    )
    is_foreign = any(
        alternative in type(transform).__name__
        for alternative in ("Lambda", "TorchVision", "TorchIO", "CuCIM")
    )
    return is_listed and not is_foreign


def _inner_transforms(dataset: object) -> list[Any]:
    """Return the random transforms inside a data set that only its own class can read."""
    if not isinstance(dataset, torch.utils.data.Dataset):
        return []

    inner = [getattr(dataset, name, None) for name in ("dataset", "data")]
    transforms = []
    for part in (*inner, *getattr(dataset, "datasets", [])):
        transforms += _inner_transforms(part)

    for part in (dataset, getattr(dataset, "transform", None)):
        if hasattr(part, "set_random_state"):
            transforms.append(part)

    return transforms


def without_draws(transforms: Sequence[object], *, uncropped: bool) -> list[Any]:
    """Return transforms without randomness: nothing with a probability happens, random crops become centre crops.

    Other random transforms (users' functions, choices between transforms) stay; they draw according to the item's
    index.

    Args:
        transforms: MONAI's or any others; their probabilities are changed in place.
        uncropped: omit random crops instead.
    """
    without = []
    for transform in transforms:
        crop = None
        if isinstance(transform, mt.RandomizableTrait):
            crop = _middle(transform)

        if crop is not None:
            if not uncropped:
                without += [crop]
            continue

        if isinstance(transform, mt.RandomizableTransform):
            # it still does what it always does: dtypes, and requested sizes
            transform.prob = 0.0

        without.append(transform)

    return without


def _middle(transform: object) -> Any:
    """Return the centre crop of the same size, None for anything but a crop of known size."""
    if not any(
        "Crop" in kind.__name__ and kind.__module__.startswith("monai.")
        for kind in type(transform).__mro__
    ):
        return None

    cropper = transform
    while hasattr(cropper, "cropper"):
        cropper = cropper.cropper

    for name, array, mapped in (
        ("roi_scale", mt.CenterScaleCrop, mt.CenterScaleCropd),
        ("roi_size", mt.CenterSpatialCrop, mt.CenterSpatialCropd),
        ("spatial_size", mt.CenterSpatialCrop, mt.CenterSpatialCropd),
    ):
        size = getattr(cropper, name, None)
        if size is not None and isinstance(transform, mt.MapTransform):
            return mapped(transform.keys, size, allow_missing_keys=transform.allow_missing_keys)
        if size is not None:
            return array(size)

    return None


# Items one by one: random transforms of each, and the bundle's own collation.

_THREADS = 2  # that make samples before they are needed
_MADE_AHEAD = 4  # batches that they may be ahead

Collate = Callable[[list[Sample]], Sample]
"""Samples -> batch."""


class Sampled(Prepared):
    """Items of any shape, with random transforms and the bundle's own collation.

    Args:
        items: data list entries.
        samples: index -> the sample after all transforms.
        collate: samples -> batch.
        unpack: batch -> (inputs, targets).
        in_threads: make samples ahead in separate threads, with clones of `samples` that draw only from their own
            state.
    """

    def __init__(
        self,
        items: Sequence[Item],
        samples: SampleMaker,
        collate: Collate,
        unpack: Callable[[Sample], Batch],
        *,
        in_threads: bool = False,
    ) -> None:
        super().__init__(items)
        self.samples = samples
        self.collate = collate
        self.unpack = unpack
        self.in_threads = in_threads
        self._clones: list[SampleMaker] = []

    def deterministic(self, uncropped: bool = False) -> Prepared:
        """Return the same items without random transforms."""
        samples = self.samples.without_draws(uncropped)
        if samples is self.samples:
            return self

        return self._with(samples=samples, _clones=[])

    def batches(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Batch]:
        """Yield batches; each item's random transforms are seeded from the generator, or without one by its index.

        The samples of the next batches are made in threads if that is safe.
        """
        yield from map(self.unpack, self._collated(indices, size, generator))

    def cases(self, indices: Tensor) -> Iterator[tuple[Sample, Sample, Item]]:
        """Yield inputs and targets of each item, a batch of one, and the other fields of the batch."""
        for batch in self._collated(indices, 1, None):
            yield *self.unpack(batch), extras(batch)

    def _collated(
        self, indices: Tensor, size: int, generator: torch.Generator | None
    ) -> Iterator[Sample]:
        seeds = indices
        if self.samples.has_steps_left and generator is not None:
            seeds = torch.randint(2**31 - 1, (len(indices),), generator=generator)

        pairs = list(zip(indices.tolist(), seeds.tolist(), strict=True))
        work = [pairs[start : start + size] for start in range(0, len(pairs), size)]

        if self.in_threads and len(work) > 1:
            batches = self._in_threads(work)
        else:
            batches = map(self._make, work)

        for batch in batches:
            yield self.collate(batch)

    def _make(self, work: list[tuple[int, int]]) -> list[Sample]:
        """Make one batch's samples in this thread, where transforms may draw from the global generators."""
        batch = []
        for index, seed in work:
            with stream(seed, "sample") if self.samples.has_steps_left else nullcontext():
                batch.append(_made(self.samples, index, seed))

        return batch

    def _in_threads(self, work: list[list[tuple[int, int]]]) -> Iterator[list[Sample]]:
        """Make the batches' samples in threads, a few batches ahead; stop when the caller stops asking."""
        pool = ThreadPoolExecutor(_THREADS, "medfl-samples")
        pending: deque[Future[list[Sample]]] = deque()
        try:
            for batch in work:
                pending.append(pool.submit(self._make_in_thread, batch))
                if len(pending) > _MADE_AHEAD:
                    yield pending.popleft().result()

            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # no thread may be at work during a fork

    def _make_in_thread(self, work: list[tuple[int, int]]) -> list[Sample]:
        """Make one batch's samples with transforms that no other thread uses."""
        try:
            clone = self._clones.pop()
        except IndexError:
            clone = self.samples.clone()

        batch = [_made(clone, index, seed) for index, seed in work]
        self._clones.append(clone)
        return batch


def _made(samples: SampleMaker, index: int, seed: int) -> Sample:
    if samples.has_steps_left:
        samples.reseed(seed)

    return samples(index)
