"""The data of `medfl.Parts`: each site's data sets or data loaders, joined to sections whose items know their site."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset

from medfl.core import SECTIONS, InputError, did_you_mean, generator_of, stream
from medfl.data import Source, records, take_apart
from medfl.data.source import class_index, numbers
from medfl.problem.sections import Section

_SHARES = (0.2, 0.1)
"""Shares of a data set for test and validate when it is split; the rest is for training."""
_BATCH = 16


class PartSections:
    """Sections by name, made from data in the forms that `Parts` accepts.

    If `record_key` is "label" or "target" and no data list gives an item's class or numbers, they are read from its
    sample.

    Raises:
        InputError: data that cannot be divided; names site and section.
    """

    test_error = ""

    def __init__(
        self,
        data: Mapping[str, Any],
        prepare_batch: Callable[..., Any],
        batch_size: int | None,
        record_key: str,
    ) -> None:
        """Register the data sets; no item is read yet."""
        if not isinstance(data, Mapping) or not data:
            raise InputError(
                f"data={data!r:.60}", "site -> data sets", "give for example {'north': dataset}"
            )

        self._prepare_batch = prepare_batch
        self._batch_size = batch_size
        self._record_key = record_key
        self._by_site = {str(site): _sections(str(site), parts) for site, parts in data.items()}
        self._opened: dict[str, Section] = {}

        for section in SECTIONS[:2]:
            if not any(section in parts for parts in self._by_site.values()):
                raise InputError(
                    f"data without {section} items",
                    f"one site or more has a {section} set",
                    f"add {section!r}",
                )

    @cached_property
    def has_test(self) -> bool:
        """Tell whether some site has test items."""
        return any("test" in parts for parts in self._by_site.values())

    @cached_property
    def checksum(self) -> str:
        """Hash of the items, of tensors and arrays in lists, and of the sizes of files that lists name.

        For data sets without a list: the first and the last sample.
        """
        digest = hashlib.sha256()
        for section in SECTIONS:
            for item in self[section].items:
                digest.update(json.dumps([section, item], sort_keys=True).encode())

            source = self[section].source
            if source.is_list:
                # any sample of one's own data set may take long to make: its ends stand for all
                indices: Iterable[int] = range(len(source.entries))
            else:
                indices = {0, len(source.entries) - 1}

            for index in sorted(indices):
                # what it draws at random is the same each time
                with stream(0, "checksum", index):
                    _hash(source.entries[index], digest)

        return digest.hexdigest()

    def __getitem__(self, section: str) -> Section:
        """Return a section, opened once; the validation items if there are no test items."""
        section = "validate" if section == "test" and not self.has_test else section
        if section not in self._opened:
            self._opened[section] = self._open(section)
        return self._opened[section]

    def _open(self, section: str) -> Section:
        datasets = []
        loaders = []
        sources = []
        sites = []  # site of each item
        for site, parts in self._by_site.items():
            if section not in parts:
                continue

            data = parts[section]
            if isinstance(data, DataLoader):
                loaders.append(data)

            dataset = _dataset(data)
            source = take_apart(dataset)
            datasets.append(dataset)
            sources.append(source)
            sites += [site] * len(source.entries)

        source = _joined(datasets, sources)
        items = []
        for item, site in zip(records(source, section, [Path.cwd()]), sites, strict=True):
            items.append({**item, "centre": site})

        key = self._record_key
        if key and not all(key in item for item in items):
            for item, label in zip(items, _labels(source, key), strict=True):
                item.pop("label", None)
                item[key] = label

        return Section(source, list(items), self._loader(section, loaders), self._prepare_batch)

    def _loader(self, section: str, loaders: list[DataLoader[Any]]) -> Any:
        """Return the batching settings, on which the loaders of all sites agree."""
        kinds = set()
        for loader in loaders:
            # a function defined twice has one name and two identities
            collate = getattr(loader.collate_fn, "__qualname__", None) or type(loader.collate_fn)
            kinds.add((loader.batch_size, collate))

        if len(kinds) > 1:
            raise InputError(
                f"{section} loaders with different batch sizes or collate_fn",
                "the same at all sites",
                "make them alike",
            )

        first = next(iter(loaders), None)
        size = self._batch_size or getattr(first, "batch_size", None) or _BATCH
        return SimpleNamespace(
            batch_size=int(size), **({} if first is None else {"collate_fn": first.collate_fn})
        )


def _dataset(data: Any) -> Any:
    if isinstance(data, DataLoader):
        return data.dataset

    return data


def _sections(site: str, data: Any) -> dict[str, Any]:
    """Return a site's data sets by section; a single data set is split."""
    if not isinstance(data, Mapping):
        return _split(site, data)
    for name, dataset in data.items():
        if name not in SECTIONS:
            advice = did_you_mean(str(name), SECTIONS, "choose one")
            raise InputError(
                f"data of site {site!r}: {name!r}", f"sections are {', '.join(SECTIONS)}", advice
            )

        _length(site, dataset)

    return {name: dataset for name, dataset in data.items() if len(_dataset(dataset))}


def _length(site: str, data: Any) -> int:
    try:
        return len(take_apart(_dataset(data)).entries)
    except TypeError as error:
        raise InputError(
            f"data of site {site!r}: {error}",
            "data sets with __len__ and __getitem__",
            "give such a data set",
        ) from error


def _split(site: str, data: Any) -> dict[str, Any]:
    """Split a data set 70/10/20 %, items of a group together; deterministic."""
    count = _length(site, data)
    dataset = _dataset(data)
    items = records(take_apart(dataset), "", [])
    groups_of_items = [item.get("group", item["id"]) for item in items]
    groups = list(dict.fromkeys(groups_of_items))

    if len(groups) < 3:
        raise InputError(
            f"data of site {site!r}: {count} items of {len(groups)} groups, to be split",
            "three or more",
            'give {"train": ..., "validate": ..., "test": ...}',
        )

    # not by the run's seed: with another one the same items test
    order = torch.randperm(len(groups), generator=generator_of(0, "split", site)).tolist()
    test, validate = (max(1, round(share * len(groups))) for share in _SHARES)
    names = ["test"] * test + ["validate"] * validate + ["train"] * len(groups)
    # there are names to spare, all of them `train`
    home = {groups[index]: name for index, name in zip(order, names, strict=False)}

    subsets = {}
    for name in SECTIONS:
        indices = [i for i, group in enumerate(groups_of_items) if home[group] == name]
        subsets[name] = Subset(_indexed(dataset), indices)

    if not isinstance(data, DataLoader):
        return subsets

    size = data.batch_size or 1
    loaders = {}
    for name, subset in subsets.items():
        loaders[name] = DataLoader(subset, size, collate_fn=data.collate_fn)

    return loaders


def _indexed(dataset: Any) -> torch.utils.data.Dataset[Any]:
    if isinstance(dataset, torch.utils.data.Dataset):
        return dataset

    return _Listed(dataset)


class _Listed(torch.utils.data.Dataset[Any]):
    """A plain list as a data set."""

    def __init__(self, entries: Any) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Any:
        return self.entries[index]


def _joined(datasets: list[Any], sources: list[Source]) -> Source:
    """Return the data of all sites as one source: a list if all are lists with the same transforms."""
    transforms = sources[0].transforms
    if all(part.is_list and part.repeatable and part.transforms == transforms for part in sources):
        entries = []
        for part in sources:
            entries += part.entries

        return Source(entries, transforms)

    return Source(
        ConcatDataset(list(map(_indexed, datasets))),
        (),
        repeatable=all(part.repeatable and not part.transforms for part in sources),
    )


def _labels(source: Source, key: str) -> Iterator[Any]:
    """Yield the class or numbers of each item from its sample: under "label", or the second of a pair."""
    for index in range(len(source.entries)):
        with stream(0, "labels", index):
            sample = source.entries[index]

        is_pair = isinstance(sample, tuple | list) and len(sample) == 2
        if isinstance(sample, Mapping):
            value = sample.get("label")
        elif is_pair:
            value = sample[1]
        else:
            value = None

        value = np.asarray(value) if isinstance(value, Tensor) else value
        label = class_index(value) if key == "label" else numbers(value)
        if label is None:
            index_or_numbers = "INDEX" if key == "label" else "NUMBERS"
            raise InputError(
                f"item {index} has no {'class' if key == 'label' else 'numbers'} (label {value!r:.40})",
                f"samples are {{'image': ..., 'label': {index_or_numbers}}} or (image, {index_or_numbers})",
                "return such samples, or say another task",
            )

        yield label


def _hash(value: object, digest: hashlib._Hash) -> None:
    """Add an entry or sample to a hash; objects of unknown types are skipped."""
    if isinstance(value, Mapping):
        value = [(key, value[key]) for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        for part in value:
            _hash(part, digest)
    elif isinstance(value, Tensor | np.ndarray | np.generic):
        array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
        digest.update(
            f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()
        )
    elif isinstance(value, str | Path) and Path(value).is_file():
        digest.update(str(Path(value).stat().st_size).encode())
    elif isinstance(value, str | int | float | None):
        digest.update(f"{value}\0".encode())
