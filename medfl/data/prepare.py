"""Prepare a data set: run the transforms before the first random one once, as MONAI's CacheDataset does.

Their results are kept at one byte per element where that is lossless (`medfl.data.byte_codes`).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor, list_data_collate
from monai.engines.utils import default_prepare_batch
from torch.utils.data import default_collate

from medfl.core import terminal
from medfl.core.errors import InputError
from medfl.data.byte_codes import shape_of
from medfl.data.disk_cache import DiskCache, OnDisk
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
from medfl.data.sampled import Collate, Sampled
from medfl.data.samples import SampleMaker, Tracked, is_pair
from medfl.data.source import Source
from medfl.datasets.readers.reading import IMAGE_SUFFIXES
from medfl.storage.shared_memory import dump_shared, load_shared

_PARALLEL_FROM = 512  # items from which starting worker processes pays
_CHUNK = 64


def prepare(
    items: Sequence[Item],
    source: Source,
    collate: Collate = list_data_collate,
    prepare_batch: Callable[..., Any] = default_prepare_batch,
    *,
    label: str = "preparing images",
    jobs: int = 1,
    progress: bool = False,
    cache: DiskCache | None = None,
) -> Prepared:
    """Return the items ready to be batched.

    Samples too large for memory go to `cache`; without one all stay in memory. `label` is what the progress
    bar says.

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
        # Of samples in memory without their pixels, which would else be kept twice.
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
    prepare_batch: Callable[..., Any],
) -> Prepared:
    """Return the samples in the fastest form that they have: stacked, transformed in batches, or one by one."""
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

    # Threads hide random transforms and reads from disk; what lies in memory needs neither.
    in_threads = samples.has_own_state if samples.has_steps_left else isinstance(cached, OnDisk)
    unpack_batch = partial(_unpack_batch, prepare_batch)
    return Sampled(items, samples, collate, unpack_batch, in_threads=in_threads)


def _geometry(sample: Sample, rows_first: bool) -> Geometry | None:
    """Return an image's geometry as MONAI's transforms tracked it, or None if they did not.

    Of a picture MONAI's PILReader says the width and the height alone; its columns come first, unless `rows_first`.
    """
    pixels: Any = sample.get("image") if isinstance(sample, Mapping) else None
    image = pixels.tracked if isinstance(pixels, Tracked) else pixels
    if not isinstance(image, MetaTensor) or "spatial_shape" not in image.meta:
        return None

    shape = tuple(map(int, np.asarray(image.meta["spatial_shape"]).reshape(-1)))
    file = str(image.meta.get("filename_or_obj", ""))
    original = image.meta.get("original_affine")
    if original is None:
        if len(shape) != 2 or not file.lower().endswith(IMAGE_SUFFIXES):
            return None
        shape = shape[::-1]
        original = np.eye(4)[[0, 1, 2, 3] if rows_first else [1, 0, 2, 3]]

    affines = [np.asarray(a, dtype=np.float64) for a in (image.affine, original)]
    return Geometry(affines[0], affines[1], shape[: len(shape_of(pixels)) - 1], file)


def _unpack_batch(prepare_batch: Callable[..., Any], batch: Sample) -> Batch:
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
    """Run the deterministic transforms over these items in order, in forked workers where that pays."""
    count = len(indices)
    with terminal.bar(total=count, desc=label, unit="image", shown=progress) as bar:
        if jobs <= 1 or count < _PARALLEL_FROM:
            for index in indices:
                yield samples.compact(index)
                bar.update()

            return

        chunks = [indices[start : start + _CHUNK] for start in range(0, count, _CHUNK)]
        # Forked workers inherit what cannot be pickled: the bundle's lambdas.
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(jobs, context, _start_worker, (samples,)) as pool:
            for packed in pool.map(_make_chunk, chunks):
                chunk = load_shared(packed)
                if isinstance(chunk, str):
                    # An InputError's three parts, which a worker could only return as text.
                    raise InputError(*chunk.split("; ", 2))

                bar.update(len(chunk))
                yield from chunk


def _start_worker(samples: SampleMaker) -> None:
    global _SAMPLES
    _SAMPLES = samples
    torch.set_num_threads(1)


_SAMPLES: SampleMaker
"""What a worker process works on."""


def _make_chunk(indices: Sequence[int]) -> bytes:
    """Return packed samples, or the text of what is wrong with one of them."""
    try:
        chunk: Any = list(map(_SAMPLES.compact, indices))
    except InputError as error:
        chunk = str(error)
    return dump_shared(chunk)
