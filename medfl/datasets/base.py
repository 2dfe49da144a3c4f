"""Data sets: their descriptions, their folders on disk, and their images as MONAI data lists."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import os
import pkgutil
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np
import yaml

from medfl.core.errors import InputError, did_you_mean
from medfl.core.mappings import pick
from medfl.core.task import SECTIONS
from medfl.core.untrusted import LOADER
from medfl.datasets.readers.reading import ClassIndex, container_uri, content_key
from medfl.datasets.readers.splitting import LEFT_OUT, Record, Rule, WholeCentres, fold_of
from medfl.datasets.readers.tables import Layout, Table, several


class _Item(TypedDict):
    image: str
    label: int | str | tuple[float, ...]
    id: str
    centre: str
    group: str


class Item(_Item, total=False):
    """One entry of a data list. `group` is the patient or lesion, or `id` if that is unknown.

    `label` is the class; in segmentation, the location of the reference mask; or findings or numbers. `size` is the
    number of pixels or voxels. Sex and age are present if the source has them.
    """

    size: int
    sex: str
    age: str


@dataclass(frozen=True)
class Download:
    """A downloadable file; `digest` is "md5:…" or "sha256:…", or None if its source publishes none."""

    url: str
    file: str
    digest: str | None = None
    bytes: int | None = None


def sheet(name: str) -> dict[str, Any]:
    """Return what `sheets/<name>.yaml` says: the attributes of a `DataSet` that need no code, by their names.

    Raises:
        FileNotFoundError: the data set has no sheet.
    """
    text = (Path(__file__).parent / "sheets" / f"{name}.yaml").read_text("utf-8")
    entries = yaml.load(text, LOADER)
    if "downloads" in entries:
        entries["downloads"] = tuple(Download(**file) for file in entries["downloads"])

    for key in {"folders", "concepts", "notes", "classes", "centres"} & entries.keys():
        entries[key] = tuple(entries[key])

    return {"name": name, **entries}


@dataclass(frozen=True, eq=False)
class DataSet:
    """One data set. Title, licence, source and all else that needs no code is in its `sheet`.

    Attributes:
        classes: names in label order, as in the source's tables or folders; in segmentation of the mask's values 0, 1,
            ..., the background first; of findings or numbers where an image has several of them.
        concepts: classification: the classes in words, in the same order.
        centres: where images were taken; one name if the source does not say, or for all where they are too many to
            name (writers).
        channels: channels of an image (1 grey, 3 RGB).
        mixed_channels: some files have another number of channels and are to be converted.
        folders: names under which the data set is looked for below $MEDFL_DATA.
        layouts: the layouts that are recognised, in the order tried.
        rules: split name -> rule; a layout may offer only some, its first is the default. A rule that draws centres has
            trials: `<split>:<number>` is another draw.
        notes: what a user of the data must know.
        draw: writes a phantom cohort: (folder, generator, images per class, pixels per side) -> number of images.
        per_class: default number of phantom images per class, in segmentation of cases; of images with findings or
            numbers per scene that is drawn.
        size: default side of phantom images.
        task: what an image has: classification (a class), segmentation (a mask), multilabel (findings) or regression
            (numbers).
    """

    name: str
    title: str
    classes: tuple[str, ...]
    channels: int
    folders: tuple[str, ...]
    layouts: tuple[Layout, ...]
    rules: Mapping[str, Rule]
    licence: str
    source: str
    citation: str
    draw: Callable[[Path, np.random.Generator, int, int], int]
    per_class: int
    concepts: tuple[str, ...] = ()
    centres: tuple[str, ...] = ("unknown",)
    size: int = 64
    task: str = "classification"
    mixed_channels: bool = False
    notes: tuple[str, ...] = ()
    downloads: tuple[Download, ...] = ()
    download_note: str = ""

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of all splits; a folder may offer only some of them, see `splits(name, folder)`."""
        return tuple(self.rules)

    @property
    def layout_texts(self) -> tuple[str, ...]:
        """The recognised layouts, in words."""
        return tuple(layout.text for layout in self.layouts)

    def layout(self, folder: Path) -> Layout | None:
        """Return the layout of `folder`, or None."""
        layouts = self.layouts if folder.is_dir() else ()
        return next((layout for layout in layouts if layout.find(folder)), None)


@functools.cache
def _registry() -> Mapping[str, DataSet]:
    # Modules without a DATASET, such as this one, are not data sets.
    names_here = (module.name for module in pkgutil.iter_modules([os.path.dirname(__file__)]))
    modules = (importlib.import_module(f"medfl.datasets.{name}") for name in names_here)
    return MappingProxyType(
        {module.DATASET.name: module.DATASET for module in modules if hasattr(module, "DATASET")}
    )


def names() -> tuple[str, ...]:
    """Return the names of the data sets, sorted."""
    return tuple(sorted(_registry()))


def get(name: str) -> DataSet:
    """Return the data set `name`.

    Raises:
        InputError: no such data set.
    """
    if name not in _registry():
        raise InputError(
            f"data set {name!r} is not known",
            f"data sets: {', '.join(names())}",
            did_you_mean(name, names(), "give one of these names"),
        )

    return _registry()[name]


def locate(name: str, folder: str | Path | None = None) -> Path:
    """Return the folder that holds data set `name`, as `layout_of` does."""
    return layout_of(name, folder)[0]


def layout_of(name: str, folder: str | Path | None) -> tuple[Path, Layout]:
    """Return the folder that holds data set `name`, and its layout.

    It is `folder` or a known folder in it; if None, below $MEDFL_DATA.

    Raises:
        InputError: none of the folders has a known layout.
    """
    dataset = get(name)
    layouts = f"known layouts: {' | '.join(dataset.layout_texts)}"
    if folder is None and not os.environ.get("MEDFL_DATA"):
        raise InputError(
            f"no folder is given for {name} and MEDFL_DATA is not set",
            layouts,
            "give --data, or set MEDFL_DATA",
        )

    root = Path(os.environ["MEDFL_DATA"] if folder is None else folder)
    if not root.is_dir():
        raise InputError(
            f"{root} is not a folder", layouts, f"give the folder that holds {name} with --data"
        )

    candidates = [root, *(root / folder_name for folder_name in dataset.folders)]
    for candidate in candidates:
        if layout := dataset.layout(candidate):
            return candidate, layout

    looked = ", ".join(candidate.name for candidate in candidates[1:])
    raise InputError(
        f"{root} holds no {name} data, nor does a folder {looked} in it",
        layouts,
        "give its folder with --data",
    )


def splits(name: str, folder: str | Path) -> tuple[str, ...]:
    """Return the splits that the layout of `folder` offers, the default first."""
    return layout_of(name, folder)[1].splits


def trial(name: str, split: str, number: int) -> str:
    """Return `<split>:<number>` for a split that has trials; any other split, or one with a trial, unchanged."""
    if isinstance(get(name).rules.get(split), WholeCentres):
        return f"{split}:{number}"

    return split


def choose(name: str, folder: str | Path, split: str | None = None) -> tuple[str, Rule]:
    """Return the name and the rule of a split that the layout of `folder` offers; None takes its default.

    Raises:
        InputError: it does not offer this split, or the split has no trials.
    """
    root, layout = layout_of(name, folder)
    split = split or layout.splits[0]
    if rule := fold_of(split, name):
        return split, rule

    kind, colon, number = split.partition(":")
    rules = pick(get(name).rules, layout.splits)
    rule = rules.get(kind)
    if rule is not None and not colon:
        return split, rule
    if isinstance(rule, WholeCentres) and number.isdecimal():
        return split, dataclasses.replace(rule, trial=int(number))

    forms = []
    for offered, rule in rules.items():
        forms.append(f"{offered}[:TRIAL]" if isinstance(rule, WholeCentres) else offered)

    raise InputError(
        f"split {split!r} is not offered by {name} in {root}",
        f"splits there: {', '.join(forms)}",
        "give one of them with --config split=NAME",
    )


def notes(name: str, folder: str | Path) -> tuple[str, ...]:
    """Return what a user of the data in `folder` must know about this folder, its layout and the data set."""
    root, layout = layout_of(name, folder)
    remarks = []
    if is_phantom(root):
        remarks.append(f"{root} is a phantom: drawn images, not real ones")

    with contextlib.suppress(InputError):  # raised where the data are asked for
        remarks += read_table(name, root).notes

    return (*remarks, *layout.notes, *get(name).notes)


MARKER = "PHANTOM.json"


def is_phantom(folder: str | Path) -> bool:
    """Tell whether `folder` is a phantom cohort or lies directly in one, by its marker file."""
    return any((path / MARKER).is_file() for path in (Path(folder), Path(folder).absolute().parent))


def read_table(name: str, folder: str | Path) -> Table:
    """Return the records of a data set in `folder`, sorted by id, and the problems found without opening images."""
    return _read(name, *_version(name, folder))


def datalist(name: str, folder: str | Path, section: str, split: str | None = None) -> list[Item]:
    """Return the items of one section (train, validate, test), in a stable order; `split` None is the layout's default.

    The folder is read once per process and again when its direct contents change.

    Raises:
        InputError: unknown layout, section or split; missing images, bad labels or double ids in its tables.
    """
    if section not in SECTIONS:
        raise InputError(
            f"section {section!r} is not known",
            f"sections: {', '.join(SECTIONS)}",
            "give one of these sections",
        )

    from medfl.datasets.readers import label_images  # noqa: F401 - MONAI's own reader learns to open such items

    # Copies, since the items are shared with later calls.
    return [item.copy() for item in sections(name, folder, split)[section]]


Version = tuple[tuple[str, int, int], ...]
"""Names, times and sizes, a key that changes with a folder's content."""


def sections(
    name: str, folder: str | Path, split: str | None = None
) -> Mapping[str, tuple[Item, ...]]:
    """Return the items of all sections; they are shared with later calls and must not be changed."""
    return _sections(name, *_version(name, folder), split)


def _version(name: str, folder: str | Path) -> tuple[Path, Version]:
    """Return the data's folder and its version."""
    root, layout = layout_of(name, folder)
    # Only the folder's own entries: looking below them would take as long as reading the data.
    files = []
    with os.scandir(root) as entries:
        for entry in entries:
            stat = entry.stat(follow_symlinks=False)
            files.append((entry.name, stat.st_mtime_ns, stat.st_size))

    return root.absolute(), (*sorted(files), (layout.text, 0, 0))


@functools.lru_cache(maxsize=8)
def _read(name: str, root: Path, version: Version) -> Table:
    table = layout_of(name, root)[1].read(root)
    # in whatever order the disk lists them
    table.records.sort(key=lambda record: record.id)
    for ident, count in Counter(record.id for record in table.records).items():
        if count > 1:
            table.problems.append(f"image {ident} is listed {count} times")

    if not table.records and not table.problems:
        table.problems.append(f"{root} holds no image")

    return table


@functools.lru_cache(maxsize=16)
def _sections(
    name: str, root: Path, version: Version, split: str | None
) -> Mapping[str, tuple[Item, ...]]:
    dataset = get(name)
    table = _read(name, root, version)
    if table.problems:
        raise InputError(
            f"{name} in {root}: {several(table.problems, 'problems')}",
            f"the classes are {', '.join(dataset.classes)}; each image lies in the folder once",
            f"see `medfl data check {name} --data {root}`",
        )

    items: dict[str, list[Item]] = {section: [] for section in (*SECTIONS, LEFT_OUT)}
    for record, section in zip(
        table.records, choose(name, root, split)[1](table.records), strict=True
    ):
        items[section].append(item_of(record))

    return MappingProxyType({section: tuple(items[section]) for section in SECTIONS})


def item_of(record: Record) -> Item:
    """Return a record as an entry of a data list."""
    label = record.mask or record.target or ClassIndex(record.label, record.image)
    item = Item(
        image=record.image, label=label, id=record.id, centre=record.centre, group=record.group
    )
    if record.size is not None:
        item["size"] = record.size
    item.update(record.about)  # type: ignore[typeddict-item]
    return item


def checksum(name: str, folder: str | Path, split: str | None = None) -> str:
    """Return the SHA-256 over ids, labels, centres, groups, sections, and size and CRC-32 of each image and mask file.

    Nothing is decoded. It is the same for zipped and plain files and does not depend on where the folder lies.
    """
    items_of = sections(name, folder, split)
    # All rows of an array share one checksum: that of the array.
    uris = set()
    for item in itertools.chain.from_iterable(items_of.values()):
        uris.add(container_uri(item["image"]))
        if isinstance(item["label"], str):
            uris.add(container_uri(item["label"]))

    # threads: checksums wait for the disk, and zlib lets others run
    with ThreadPoolExecutor(4) as pool:
        content = dict(zip(uris, pool.map(content_key, uris), strict=True))

    digest = hashlib.sha256()
    for section, items in items_of.items():
        for item in items:
            label = item["label"]
            text = content[container_uri(label)] if isinstance(label, str) else str(label)
            image = content[container_uri(item["image"])]
            fields = (section, item["id"], text, item["centre"], item["group"], image)
            digest.update(("\t".join(fields) + "\n").encode())

    return digest.hexdigest()
