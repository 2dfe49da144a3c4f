"""Run deterministic transforms once over a data list; split them from the random ones as MONAI's CacheDataset does."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from monai.data import MetaTensor, list_data_collate
from monai.engines.utils import default_prepare_batch
from monai.transforms import Compose, RandomizableTrait, Transform
from torch import Tensor
from tqdm import tqdm

from medfl.errors import InputError, MedflError
from medfl.prepared import Batch, Item, Prepared, Sampled, stack

_PARALLEL_FROM = 512  # items from which starting worker processes pays


def prepare(
    items: Sequence[Item],
    data: Any,
    transform: Any | None,
    prepare_batch: Callable[..., Any],
    *,
    label: str = "preparing images",
    jobs: int = 1,
    progress: bool = False,
) -> Prepared:
    """Return the items ready to be batched.

    Args:
        items: one record per item (id, label, ...).
        data: the data list, or a data set object that applies its own transforms.
        transform: the section's transforms (callable, list or Compose), or None.
        prepare_batch: batch dictionary -> (inputs, targets), as the trainer's.
        label: what the progress bar says.
        jobs: worker processes for long lists.
        progress: show a bar.

    Raises:
        InputError: an item cannot be read, or the images differ in their channels; names the item.
    """
    unpack = _unpack(prepare_batch)
    if not isinstance(data, list | tuple):
        return Sampled(items, data.__getitem__, getattr(data, "transform", None) and _Reseed(data), list_data_collate, unpack)
    compose = transform if isinstance(transform, Compose) else Compose(transform if transform is not None else [])
    first = compose.get_index_of_first(lambda t: isinstance(t, RandomizableTrait) or not isinstance(t, Transform))
    count = len(compose.transforms) if first is None else int(first)
    fixed, random = Compose(compose.transforms[:count]), list(compose.transforms[count:])
    fixed.map_items = False  # a list of paths is one item
    run = _Runner(fixed, [str(item.get("id", i)) for i, item in enumerate(items)], data)
    samples = list(_mapped(run, len(data), label, jobs, progress))
    if not random and prepare_batch is default_prepare_batch and all(isinstance(s, Mapping) for s in samples):
        images = [s.get("image") for s in samples]
        if all(isinstance(image, Tensor) for image in images) and all("label" in s for s in samples):
            stacked = stack(items, images, [_target(s["label"]) for s in samples])
            if stacked is not None:
                return stacked
    return Sampled(items, samples.__getitem__, Compose(random) if random else None, list_data_collate, unpack)


class _Runner:
    """Apply the deterministic transforms to one item; a failure names the item."""

    def __init__(self, fixed: Compose, names: Sequence[str], data: Sequence[Any]) -> None:
        self.fixed, self.names, self.data = fixed, names, data

    def __call__(self, index: int) -> Any:
        try:
            sample = self.fixed(dict(self.data[index]) if isinstance(self.data[index], Mapping) else self.data[index])
        except Exception as error:
            cause: BaseException = error
            while cause.__cause__ is not None and not isinstance(cause, MedflError):
                cause = cause.__cause__
            if isinstance(cause, MedflError):
                raise cause from None
            reason = " ".join(str(cause).split())[:300]
            raise InputError(
                f"item {self.names[index]!r} cannot be prepared: {type(cause).__name__}: {reason}",
                "every item can be read and transformed",
                "remove or repair it (medfl data check names all such files)",
            ) from error
        if isinstance(sample, Mapping):
            return {key: _plain(value) for key, value in sample.items() if not isinstance(value, str) or key == "image"}
        return sample


def _mapped(run: _Runner, count: int, label: str, jobs: int, progress: bool) -> Any:
    """Run over all indices in order, in forked workers where that pays (they inherit the transforms)."""
    bar = {"total": count, "desc": label, "unit": "image", "disable": not progress, "leave": False}
    if jobs <= 1 or count < _PARALLEL_FROM:
        yield from tqdm(map(run, range(count)), **bar)
        return
    global _RUN  # forked workers find it here; a pickled Compose would lose what the bundle built
    _RUN = run
    step = 64
    chunks = [range(start, min(start + step, count)) for start in range(0, count, step)]
    with (
        tqdm(**bar) as shown,
        ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork"), initializer=_one_thread) as pool,
    ):
        for samples in pool.map(_run_chunk, chunks):
            shown.update(len(samples))
            yield from (_to_torch(sample) for sample in samples)
    _RUN = None


_RUN: _Runner | None = None


def _one_thread() -> None:
    torch.set_num_threads(1)


def _run_chunk(indices: range) -> list[Any]:
    assert _RUN is not None
    return [_to_numpy(_RUN(index)) for index in indices]


def _to_numpy(sample: Any) -> Any:
    """Arrays travel between processes as bytes; tensors would travel as file handles, which run out."""
    if isinstance(sample, Mapping):
        return {k: ("tensor", v.numpy()) if type(v) is Tensor else v for k, v in sample.items()}
    return sample


def _to_torch(sample: Any) -> Any:
    if isinstance(sample, Mapping):
        return {k: torch.from_numpy(v[1]) if isinstance(v, tuple) and v and v[0] == "tensor" else v for k, v in sample.items()}
    return sample


def _plain(value: Any) -> Any:
    """Copy 2D images out of MONAI's MetaTensor; volumes keep it, for random transforms that need the affine."""
    return value.as_tensor() if isinstance(value, MetaTensor) and value.ndim <= 3 else value


def _target(value: Any) -> Any:
    return value.as_tensor() if isinstance(value, MetaTensor) else value


def _unpack(prepare_batch: Callable[..., Any]) -> Callable[[Any], Batch]:
    def unpack(batch: Any) -> Batch:
        pair = prepare_batch(batch) if prepare_batch is not default_prepare_batch else default_prepare_batch(batch)
        if len(pair) != 2:
            raise InputError(f"the trainer's prepare_batch returns {len(pair)} values", "inputs and targets", "use another bundle")
        return tuple(_target(value) for value in pair)  # type: ignore[return-value]

    return unpack


class _Reseed:
    """Stand in for the random transforms of a data set that applies its own: only the seed is set from outside."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def set_random_state(self, seed: int) -> None:
        transform = getattr(self.data, "transform", None)
        if hasattr(transform, "set_random_state"):
            transform.set_random_state(seed=seed)

    def __call__(self, sample: Any) -> Any:
        return sample
