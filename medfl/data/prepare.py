"""Prepare a data set: run the transforms before the first random one once, like MONAI's CacheDataset."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor, list_data_collate
from monai.engines.utils import default_prepare_batch
from torch import Tensor
from torch.utils.data import default_collate

from medfl import datasets
from medfl.core import InputError, RunError, terminal
from medfl.data.prepared import (
    Augmented,
    Batch,
    Geometry,
    Item,
    Prepared,
    Sample,
    as_plain,
    extras,
    stack,
)
from medfl.data.samples import Collate, Sampled, SampleMaker, is_pair
from medfl.data.source import Source
from medfl.datasets.readers.reading import IMAGE_SUFFIXES, content_key
from medfl.storage import writing
from medfl.storage.shared_memory import dump_shared, load_shared

PrepareBatch = Callable[..., Any]
"""(batch, device, non_blocking) -> inputs and targets, as of MONAI's trainers."""
_PARALLEL_FROM = 512  # number of items from which starting worker processes pays off
_CHUNK = 64  # items given to a worker at a time


def prepare(
    items: Sequence[Item],
    source: Source,
    collate: Collate = list_data_collate,
    prepare_batch: PrepareBatch = default_prepare_batch,
    *,
    label: str = "preparing images",
    jobs: int = 1,
    progress: bool = False,
    cache: DiskCache | None = None,
) -> Prepared:
    """Return the items ready to be batched.

    Samples too large for memory go to `cache`; without one all stay in memory. `label` is the text of the progress
    bar.

    Raises:
        InputError: an item cannot be read, or the images differ in their channels; names the item.
    """
    samples = SampleMaker(items, source)
    if source.repeatable:
        make = partial(_make, samples, label=label, jobs=jobs, progress=progress)
        samples.cached = (
            list(make(range(len(items)))) if cache is None else cache.keep(len(items), make)
        )

    prepared = _prepared(items, samples, collate, prepare_batch)
    if not samples.has_steps_left:
        cached = samples.cached or []
        # For samples in memory without their pixels, which would otherwise be kept twice.
        light = list(map(extras, cached)) if isinstance(cached, list) else cached
        prepared.extras_of = lambda index: collate([extras(light[index])])
        geometries = []
        for sample in cached:
            if (geometry := _geometry(sample, samples.reads_rows_first)) is not None:
                geometries.append(geometry)

        if len(geometries) == len(cached):
            prepared.geometry = geometries

    return prepared


def _prepared(
    items: Sequence[Item],
    samples: SampleMaker,
    collate: Collate,
    prepare_batch: PrepareBatch,
) -> Prepared:
    """Return the samples in the fastest available form: stacked, transformed in batches, or one by one."""
    cached = [] if samples.cached is None else samples.cached
    usual = (
        bool(cached)
        and collate in (list_data_collate, default_collate)
        and prepare_batch is default_prepare_batch
    )
    recipe = samples.recipe() if usual and samples.has_steps_left else None
    if (
        usual
        and isinstance(cached, list)
        and (recipe or not samples.has_steps_left)
        and all(map(is_pair, cached))
    ):
        stacked = stack(
            items, *([as_plain(sample[key]) for sample in cached] for key in ("image", "label"))
        )
        if stacked is not None:
            if recipe is None:
                return stacked

            return Augmented(items, stacked, recipe)

    if recipe is not None:
        return Augmented(items, cached, recipe)

    if samples.has_steps_left:
        samples.check_channels()

    # Threads hide random transforms and reads from disk; data in memory need neither.
    in_threads = samples.has_own_state if samples.has_steps_left else isinstance(cached, OnDisk)
    unpack_batch = partial(_unpack_batch, prepare_batch)
    return Sampled(items, samples, collate, unpack_batch, in_threads=in_threads)


def _geometry(sample: Sample, rows_first: bool) -> Geometry | None:
    """Return an image's geometry as tracked by MONAI's transforms, or None if they did not.

    For a picture MONAI's PILReader gives only width and height; its columns come first, unless `rows_first`.
    """
    image = sample.get("image") if isinstance(sample, Mapping) else None
    if not isinstance(image, MetaTensor) or "spatial_shape" not in image.meta:
        return None

    shape = tuple(map(int, np.asarray(image.meta["spatial_shape"]).reshape(-1)))
    file = str(image.meta.get("filename_or_obj", ""))
    original = image.meta.get("original_affine")
    # a picture has no affine, and MONAI's reader exchanges its axes unless it reads rows first
    if original is None:
        if len(shape) != 2 or not file.lower().endswith(IMAGE_SUFFIXES):
            return None
        shape = shape[::-1]
        original = np.eye(4)[[0, 1, 2, 3] if rows_first else [1, 0, 2, 3]]

    affines = [np.asarray(a, dtype=np.float64) for a in (image.affine, original)]
    return Geometry(affines[0], affines[1], shape[: image.ndim - 1], file)


def _unpack_batch(prepare_batch: PrepareBatch, batch: Sample) -> Batch:
    if not isinstance(batch, Mapping | tuple | list | torch.Tensor):
        raise InputError(
            f"collate_fn makes a {type(batch).__name__} of samples",
            "a batch is a dict, a pair or a tensor",
            "let the data loader collate as MONAI does: leave collate_fn out",
        )

    pair = prepare_batch(batch, torch.device("cpu"), False)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError(
            f"prepare_batch returns {len(pair) if isinstance(pair, tuple | list) else 'one value'}",
            "a supervised batch is a pair of inputs and targets",
            "let it return (inputs, targets)",
        )

    return as_plain(pair[0]), as_plain(pair[1])


def _make(
    samples: SampleMaker, indices: Sequence[int], label: str, jobs: int, progress: bool
) -> Iterator[Sample]:
    """Run the deterministic transforms over these items in order, in forked workers if that pays off."""
    count = len(indices)
    with terminal.bar(total=count, desc=label, unit="image", shown=progress) as bar:
        if jobs <= 1 or count < _PARALLEL_FROM:
            for index in indices:
                yield samples.after_deterministic(index)
                bar.update()

            return

        chunks = [indices[start : start + _CHUNK] for start in range(0, count, _CHUNK)]
        # Forked workers inherit what cannot be pickled: the bundle's lambdas.
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(jobs, context, _start_worker, (samples,)) as pool:
            for packed in pool.map(_make_chunk, chunks):
                chunk = load_shared(packed)
                if isinstance(chunk, str):
                    # The three parts of an InputError, which a worker could only return as text.
                    raise InputError(*chunk.split("; ", 2))

                bar.update(len(chunk))
                yield from chunk


def _start_worker(samples: SampleMaker) -> None:
    global _SAMPLES
    _SAMPLES = samples
    torch.set_num_threads(1)


_SAMPLES: SampleMaker
"""The data of a worker process."""


def _make_chunk(indices: Sequence[int]) -> bytes:
    """Return packed samples, or a description of the error in one of them."""
    try:
        chunk: Sample = list(map(_SAMPLES.after_deterministic, indices))
    except InputError as error:
        chunk = str(error)
    return dump_shared(chunk)


# Prepared samples on disk, for data sets that exceed their memory budget.
#
# A data set whose samples fit the budget stays in memory. A larger one is written once to the user's cache, one file
# per sample, and read back as memory maps, whose pages all processes share and the system reclaims when memory is
# short. A file is named by the hash of what determines its content (bundle, overridden configuration, versions, image
# files), so that later runs find it, and a changed file or transform is prepared again.

_SHARE = 1 / 3  # of the free memory, for one section's samples; to stack them takes it twice


def free_ram() -> int:
    """Return the bytes of available memory, or a large number if the system does not report it."""
    with suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 40


def budget() -> int:
    """Return the bytes available for one section's samples: $MEDFL_MEMORY GiB, else a third of the free memory.

    Raises:
        InputError: the variable is not a positive number.
    """
    gib = os.environ.get("MEDFL_MEMORY")
    if not gib:
        return int(free_ram() * _SHARE)

    with suppress(ValueError):
        if 0 < float(gib) < 1e9:
            return int(float(gib) * 2**30)

    raise InputError(
        f"MEDFL_MEMORY={gib}",
        "GiB for prepared images, a number above 0",
        "set it to 8, or unset it",
    )


def size_of(sample: object) -> int:
    """Return the bytes of the tensors and arrays in a sample."""
    if isinstance(sample, Mapping):
        return sum(map(size_of, sample.values()))
    if isinstance(sample, list | tuple):
        return sum(map(size_of, sample))
    return int(getattr(sample, "nbytes", 0))


@dataclass(frozen=True)
class DiskCache:
    """Storage for samples that are too large for memory.

    They become files in `folder`, named by `key` of their indices, beyond a `budget` of bytes in memory.
    """

    folder: Path
    key: Callable[[int], str]
    budget: int

    def keep(
        self, count: int, make: Callable[[Sequence[int]], Iterator[Sample]]
    ) -> Sequence[Sample]:
        """Return all samples: a list, or memory maps if the size of the first implies that they exceed the budget."""
        if not count:
            return []

        (first,) = make([0])
        # Samples of a data set have similar sizes.
        if size_of(first) * count <= self.budget:
            return [first, *make(range(1, count))]

        paths = [self.folder / f"{self.key(index)}.pt" for index in range(count)]
        missing = [index for index in range(count) if not paths[index].is_file()]
        for index, sample in zip(missing, make(missing), strict=True):
            _write(paths[index], sample)

        return OnDisk(paths)


class OnDisk(Sequence[Sample]):
    """Samples in files; each access maps one."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: Any) -> Sample:
        """Return a sample whose tensors are mapped from its file."""
        path = self.paths[index]
        try:  # the file is in the user's own cache, written by `_write`
            return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise RunError(
                f"the prepared sample {path} cannot be read ({error}); the last round is kept: remove the file and "
                "continue with --resume"
            ) from error


def sample_key(parts: Sequence[object], entry: object) -> str:
    """Hash what determines a prepared sample: `parts` (JSON), our readers, an entry's values and files' contents."""
    settings = json.dumps([_readers(), *parts], sort_keys=True, default=content_hash)
    return _hashed(settings, content_hash(entry))[:40]


@functools.cache
def _readers() -> str:
    """Return a hash of the code of `medfl.datasets`, whose transforms a bundle's configuration only names."""
    paths = sorted(Path(datasets.__path__[0]).rglob("*.py"))
    return _hashed(*(path.read_bytes() for path in paths))


def content_hash(value: object) -> str:
    """Return a text that identifies a value: by type, shape and bytes for an array, by content for a file."""
    if isinstance(value, Mapping):
        pairs = sorted(f"{name!r}: {content_hash(held)}" for name, held in value.items())
        return _hashed("mapping", *pairs)
    if isinstance(value, list | tuple):
        return _hashed("list", *map(content_hash, value))
    if isinstance(value, MetaTensor):  # its affine determines the effect of spacing and orientation
        return _hashed(content_hash(value.as_tensor()), content_hash(value.meta))

    if isinstance(value, Tensor):  # as bytes, since NumPy lacks some of its dtypes
        flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return _hashed(
            str(value.dtype), str(tuple(value.shape)), flat.view(torch.uint8).numpy().tobytes()
        )

    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:  # its bytes are addresses
            return _hashed(str(value.dtype), str(value.shape), content_hash(value.tolist()))

        is_masked = isinstance(value, np.ma.MaskedArray)
        mask = [content_hash(np.ma.getmaskarray(value))] if is_masked else []
        return _hashed(str(value.dtype), str(value.shape), np.asarray(value).tobytes(), *mask)

    if isinstance(value, str | os.PathLike):
        with suppress(InputError):
            return f"{value} {content_key(str(value))}"

    return repr(value)


def _hashed(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        # its length first: parts cannot run into each other
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def _write(path: Path, sample: Sample) -> None:
    advice = "free some space, set XDG_CACHE_HOME to a larger disk, or MEDFL_MEMORY to more GiB"
    with writing(f"the prepared sample {path}", advice):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(sample, file)
            # Other processes see a complete file or none.
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
