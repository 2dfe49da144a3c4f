"""Checks of a user's own folder: files that are not used, and folders whose names are not those of classes."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from medfl.core.errors import InputError
from medfl.core.untrusted import folders_below, printable
from medfl.datasets.readers import cases, conventions, matching, tables
from medfl.datasets.readers.reading import JOINED, is_hidden, is_odd, is_text, shown_files
from medfl.datasets.readers.splitting import Record

_TABLES = (cases.TABLE, conventions.NNUNET_FILE, conventions.BIDS_FILE)
_SECTIONS = {"train", "training", "val", "valid", "validate", "validation", "test", "testing"}
_IMAGES = {"image", "images", "img", "imgs"}
_WORDS = """
    mask masks label labels seg segs segmentation segmentations annotations ground_truth groundtruth
    gt
"""
_MASKS = {*_WORDS.split()}


def refuse_other_folders(folder: Path, names: Iterable[str]) -> None:
    """Raise an InputError if the folders with pictures are named as sections, or as images and masks, not classes."""
    lower = {name.lower(): name for name in names}
    sections = [lower[name] for name in lower if name in _SECTIONS]
    if {"train", "training"} & lower.keys() or len(sections) == len(lower):
        raise InputError(
            f"folders {', '.join(sections)} in {folder} are named as sections, not classes",
            "a folder for each class, with its images of all sections",
            "put each class's into one folder and say their sections in column 'section' of cases.csv",
        )

    images = [lower[name] for name in lower if name in _IMAGES]
    masks = [lower[name] for name in lower if name in _MASKS]
    if images and masks and 2 * len(images + masks) > len(lower):
        raise InputError(
            f"folders {images[0]} and {masks[0]} in {folder} are named as images and their masks, not classes",
            "a folder for each class, or images with masks",
            f"give --images {folder / images[0]} --masks {folder / masks[0]}",
        )


def refuse_masks_among(folders: Iterable[Path]) -> None:
    """Raise an InputError if a class folder holds a picture and its mask: the mask would count as a picture."""
    for folder in folders:
        pictures = {path.rpartition(".")[0]: path for path, _ in tables.image_files(folder)}
        for stem, path in pictures.items():
            if stem.lower().endswith("_mask") and (
                picture := pictures.get(matching.MASK_END.sub("", stem))
            ):
                raise InputError(
                    f"class folder {folder} holds {picture} and its mask {path}",
                    "pictures only, or images and their masks in two folders",
                    "move the masks elsewhere; with masks instead of classes give --images DIR --masks DIR",
                )


def left_out(
    folder: Path, used: Iterable[str], endings: Collection[str], what: str
) -> tuple[str, ...]:
    """Return a line about images of a folder that are not used, and one about its other files, where it has any.

    Args:
        folder: the folder; its hidden files, its cases.csv and the files of nnU-Net and BIDS do not count.
        used: files, and folders of a DICOM series.
        endings: of images, in lower case.
        what: describes images that are not used, as in "3 images {what}: left out".
    """
    used_paths = set(used)
    images = list[str]()
    other_files = list[str]()
    tables_there = [folder / name for name in _TABLES]
    # A folder's own files before those of its folders.
    for path in sorted(shown_files(folder), key=lambda path: (path.parent, path)):
        is_used = not used_paths.isdisjoint(map(str, (path, *path.parents)))
        if not is_used and path not in tables_there:
            is_image = path.name.lower().endswith(tuple(endings))
            (images if is_image else other_files).append(path.relative_to(folder).as_posix())

    lines = []
    if images:
        lines.append(f"{len(images)} images {what}: left out, first {images[0]}")
    if other_files:
        kind = f"files that do not end in {', '.join(endings)}"
        lines.append(f"{len(other_files)} {kind}: left out, first {other_files[0]}")

    return tuple(lines)


def odd(folder: Path) -> tuple[str, ...]:
    """Return a line about what no reader takes of a folder, where it holds such: pipes, and names that are no text."""
    paths = []
    for base, folders, files in folders_below(folder):
        paths += [os.path.join(base, name) for name in folders if not is_text(name)]
        folders[:] = [name for name in folders if not is_hidden(name) and is_text(name)]
        shown = (os.path.join(base, name) for name in files if not is_hidden(name))
        paths += filter(is_odd, shown)

    if not paths:
        return ()

    note = f"{len(paths)} pipes, devices, or names that are not in UTF-8 or have {JOINED!r}: left out, first "
    return (note + printable(os.path.relpath(min(paths), folder)),)


def of_pairs(
    images: Path, masks: Path, records: Sequence[Record], endings: Collection[str]
) -> tuple[str, ...]:
    """Return lines about files of two folders, or of one, that are no pair."""
    shown = []
    for record in records:
        shown += record.image.split(JOINED)

    if images.is_file():  # which lists both
        images = masks = images.parent
    if images == masks or masks.is_relative_to(images):
        return left_out(
            images, [*shown, *(record.mask for record in records)], endings, "without a mask"
        )
    return (
        *left_out(images, shown, endings, "without a mask"),
        *left_out(masks, (record.mask for record in records), endings, "of no image"),
    )
