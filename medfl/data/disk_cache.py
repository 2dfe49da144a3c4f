"""Prepared samples on disk, for data sets that exceed their memory budget.

A data set whose samples fit the budget stays in memory. A larger one is written once to the user's cache, one file per
sample, and read back as memory maps, whose pages all processes share and the system reclaims when memory is short. A
file is named by the hash of what determines its content (bundle, overridden configuration, versions, image files), so
that later runs find it, and a changed file or transform is prepared again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor

from medfl import datasets
from medfl.core.errors import InputError, RunError
from medfl.data.prepared import Sample
from medfl.datasets.readers.reading import content_key
from medfl.storage.files import writing

_SHARE = 0.5  # of the free memory that one section's samples may take


def free_ram() -> int:
    """Return the bytes of available memory, or a large number where the system does not say."""
    with suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 40


def budget() -> int:
    """Return the bytes that one section's samples may take: $MEDFL_MEMORY GiB, else half of the free memory.

    Raises:
        InputError: the variable is no number above 0.
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
    """Where samples go that are too large for memory.

    They become files of `folder`, named by `key` of their positions, beyond a `budget` of bytes in memory together.
    """

    folder: Path
    key: Callable[[int], str]
    budget: int

    def keep(
        self, count: int, make: Callable[[Sequence[int]], Iterator[Sample]]
    ) -> Sequence[Sample]:
        """Return all samples: a list, or memory maps if the size of the first one says that they exceed the budget."""
        if not count:
            return []

        (first,) = make([0])
        # Samples of a data set are about equally large.
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
    """Hash what determines a prepared sample: `parts` (JSON), our readers, an entry's values and its files' content."""
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
    if isinstance(value, MetaTensor):  # its affine decides what spacing and orientation make of it
        return _hashed(content_hash(value.as_tensor()), content_hash(value.meta))

    if isinstance(value, Tensor):  # as bytes, for NumPy lacks some of its types
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
            # Other processes see a whole file or none.
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
