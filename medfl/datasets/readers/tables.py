"""Readers that data sets share: tables, image indices, class folders, stacked arrays such as MedMNIST's."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medfl.core import InputError, listed, not_among, read_table, refusing
from medfl.datasets.readers.dicom import SUFFIXES as DICOM_SUFFIXES
from medfl.datasets.readers.reading import (
    IMAGE_SUFFIXES as IMAGE_SUFFIXES,
    Files,
    array,
    files_below,
    split_uri,
)
from medfl.datasets.readers.splitting import Record

SECTION_NAMES = {"train": "train", "val": "validate", "test": "test"}


ArrayUris = dict[str, tuple[str, str]]
"""Section as the source names it -> the arrays of its images and of its labels, URIs without a row."""


@dataclass
class Table:
    """The records of a folder, what is wrong with it (one line each, naming the file), and remarks for its user.

    `unlabelled` is name -> URI of images without a label or mask.
    """

    records: list[Record] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unlabelled: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """One way in which a data set lies on disk: its text, the splits it offers, how to find and to read it.

    `find` gives something true of a folder of this layout.
    """

    text: str
    splits: tuple[str, ...]
    find: Callable[[Path], object]
    read: Callable[[Path], Table]
    notes: tuple[str, ...] = ()


def several(entries: Sequence[str], what: str, most: int = 5) -> str:
    """Join up to `most` entries in one line, and say how many more of them (`what`) there are."""
    return listed(entries, most, " | ") + f" {what}" * (len(entries) > most)


def read_csv(path: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Read a table with a header line, parted by commas, semicolons or tabs.

    Raises:
        InputError: the file is not text, a needed column is missing, or a row is cut off.
    """
    with refusing(
        f"table {path} cannot be read",
        "a UTF-8 text table with a header",
        "save it as such a file (in Excel: CSV UTF-8)",
    ):
        names, rows = read_table(path, is_composed=True)

    if missing := not_among(columns, names):
        raise InputError(
            f"{path} has no column {missing[0]!r}",
            f"it needs {', '.join(columns)} and has {', '.join(names) or 'none'}",
            "download the table again, or name the columns so",
        )

    for number, row in rows:
        if any(row[column] is None for column in columns):
            raise InputError(
                f"{path} line {number} is cut off",
                f"{len(names)} values a line",
                "complete the line",
            )

    return [row for _, row in rows]


def first(folder: Path, *names: str) -> Path | None:
    """Return the first of the files or folders `names` that `folder` holds."""
    return next((folder / name for name in names if (folder / name).exists()), None)


def folders_and_zips(folder: Path, *patterns: str) -> list[Path]:
    """Return the folders and zip archives in a folder that fit glob patterns, sorted: a folder before its archive."""
    paths = sorted(itertools.chain.from_iterable(map(folder.glob, patterns)))
    return [path for path in paths if path.is_dir() or path.suffix == ".zip"]


def image_files(root: Path) -> Files:
    """Return (relative path, URI) of all images below a folder or in a zip archive, in sorted order.

    Without others, DICOM files directly in the folder are pictures; those in its subfolders are series of slices.
    """
    files = files_below(root, IMAGE_SUFFIXES)
    if not files:
        for name, uri in files_below(root, DICOM_SUFFIXES):
            if Path(uri).parent == root:
                files.append((name, uri))

    return files


def image_index(roots: Iterable[Path]) -> dict[str, str]:
    """Return the URI of each image by its file name without suffix; the first root that has it wins."""
    index: dict[str, str] = {}
    for root in roots:
        for name, uri in image_files(root):
            index.setdefault(name.rpartition("/")[2].rpartition(".")[0], uri)
    return index


def class_folders(
    text: str,
    splits: tuple[str, ...],
    root: str,
    zips: Sequence[str],
    classes: Sequence[str],
    *,
    sections: bool = False,
    centre: str = "unknown",
    group: Callable[[str, str], str] | None = None,
    notes: tuple[str, ...] = (),
) -> Layout:
    """Return the layout `[<root>/][train|val|test/]<class>/<image>`, as a folder or in a zip archive named like `zips`.

    Args:
        text: the layout in words.
        splits: names of the splits it offers; `sections=True` gives each image its section under the name "official".
        root: name of a folder that may lie, also twice, between the data set's folder and the section or class folders.
        zips: glob patterns of archives that may hold the same tree.
        classes: folder names in label order.
        sections: the tree has a level train, val, test above the classes.
        centre: centre of all images.
        group: patient id from (class folder, file name without suffix); the image is its own group without it.
        notes: what a user should know of this layout.
    """
    level = "(?:(train|val|test)/)" if sections else "()"
    pattern = re.compile(rf"(?:^|/)({level}({'|'.join(map(re.escape, classes))})/[^/]+)$")
    label = {name: number for number, name in enumerate(classes)}

    def roots_in(folder: Path) -> list[Path]:
        # More than half of the classes must be there: a subset counts, another data set does not.
        above = "train" if sections else "."
        for path in (folder, folder / root, folder / root / root):
            if 2 * sum((path / above / name).is_dir() for name in classes) > len(classes):
                return [path]

        for path in folders_and_zips(folder, *zips):
            if 2 * len({match[3] for match in _matches(path, pattern)}) > len(classes):
                return [path]

        return []

    def read(folder: Path) -> Table:
        records: dict[str, Record] = {}
        for root in roots_in(folder):
            for match, uri in _matches(root, pattern).items():
                stem = match[1].rpartition("/")[2].rpartition(".")[0]
                key = group(match[3], stem) if group else match[1]
                section = {"official": SECTION_NAMES[match[2]]} if sections else {}
                # Some published archives hold the same tree twice; the first copy counts.
                records.setdefault(
                    match[1], Record(uri, label[match[3]], match[1], centre, key, section)
                )

        return Table(list(records.values()))

    return Layout(text, splits, roots_in, read, notes)


def _matches(root: Path, pattern: re.Pattern[str]) -> dict[re.Match[str], str]:
    return {match: uri for name, uri in image_files(root) if (match := pattern.search(name))}


def medmnist(text: str, stem: str, classes: int, split: str, **about: Any) -> Layout:
    """Return the layout of a MedMNIST file `<stem>[_<size>].npz`; of several sizes in a folder the largest is taken.

    The arrays are {train,val,test}_images (N, H, W[, 3]) uint8 and {train,val,test}_labels (N, 1): split `split`.
    `about` are more_splits, centre and notes of `stacked`.
    """
    name = re.compile(rf"{re.escape(stem)}(?:_(\d+))?\.npz$")

    def find(folder: Path) -> ArrayUris:
        sizes = []
        for path in folder.glob(f"{stem}*.npz"):
            if match := name.match(path.name):
                sizes.append((int(match[1] or 28), path))

        if not sizes:
            return {}

        _, file = max(sizes)
        return {part: (f"{file}!{part}_images", f"{file}!{part}_labels") for part in SECTION_NAMES}

    return stacked(text, find, classes, split, **about)


def stacked(
    text: str,
    find: Callable[[Path], ArrayUris],
    classes: int,
    split: str,
    *,
    more_splits: tuple[str, ...] = (),
    centre: str = "unknown",
    notes: tuple[str, ...] = (),
) -> Layout:
    """Return the layout of images and labels that are stacked in arrays.

    Args:
        text: the layout in words.
        find: folder -> {section as the source names it: (array of images, array of labels)}, URIs without a row; empty
            where the folder is not of this layout.
        classes: number of classes.
        split: name of the split that the source's sections are.
        more_splits: names of further splits.
        centre: centre of all images.
        notes: what a user should know of this layout.
    """

    def read(folder: Path) -> Table:
        table = Table()
        for part, (images, label_uri) in find(folder).items():
            path, name = split_uri(label_uri)
            # MedMNIST's labels have a second axis of length 1.
            labels = array(path, name).reshape(-1)
            rows = len(array(*split_uri(images)))
            if len(labels) != rows:
                raise InputError(
                    f"{path}: {rows} {part} images but {len(labels)} labels",
                    "one label an image",
                    "download it again",
                )

            for row, label in enumerate(labels.tolist()):
                if not (isinstance(label, int) and 0 <= label < classes):
                    table.problems.append(
                        f"{path}: {name}[{row}] is {label}, the labels are 0 to {classes - 1}"
                    )
                    continue

                key = f"{part}_{row:06d}"
                table.records.append(
                    Record(f"{images}#{row}", label, key, centre, key, {split: SECTION_NAMES[part]})
                )

        return table

    return Layout(text, (split, *more_splits), find, read, notes)


def check_row(
    table: Table,
    where: str,
    key: str,
    centre: str,
    centres: Iterable[str],
    images: Mapping[str, str],
    masks: Mapping[str, str] | None = None,
) -> bool:
    """Tell whether a row names a centre of the data set and an image that is there; else add the problem.

    Args:
        table: takes the problem.
        where: the row in words.
        key: name of the image without suffix.
        centre: of the image.
        centres: those of the data set.
        images: name -> URI.
        masks: the same of the reference masks, which every image of a segmentation has.
    """
    if centre not in centres:
        table.problems.append(
            f"{where} has centre {centre!r}, the centres are {', '.join(centres)}"
        )
    elif key not in images:
        table.problems.append(f"{where}: its image is missing")
    elif masks is not None and key not in masks:
        table.problems.append(f"{where}: its mask is missing")
    else:
        return True

    return False


def note_absent(table: Table, path: Path, images: Sequence[str]) -> None:
    """Add the note that images of a table are left out, where some are: of large sets a part is often fetched."""
    if images:
        table.notes.append(
            f"{len(images)} images of {path.name} are not in the folder: {several(images, 'images', 1)}"
        )


def number_of(value: str, what: str, table: Table) -> float | None:
    """Return the number in a cell of a table, at least 0, or None after adding the problem (-1: not known)."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan

    if 0 <= number < math.inf:
        return number
    table.problems.append(f"{what} {value!r}, which is no number from 0")
    return None


def label_of(value: str, labels: Mapping[str, int], what: str, table: Table) -> int | None:
    """Return the label of a class name or number in a table, or None after adding the problem."""
    if value in labels:
        return labels[value]
    table.problems.append(f"{what} has label {value!r}, the labels are {', '.join(labels)}")
    return None
