"""A folder of one's own: labelled pictures, a folder a class, or images with masks of the same names.

An optional table `cases.csv` at its top says more of the images: a column `file` (path in the folder, or file name
where one image has it, with or without its ending), and any of `patient` (whose images stay in one section), `centre`
(where it was taken) and `section` (train, validate, test). Without sections 70, 10 and 20 % of the images of each class
are train, validation and test images, drawn by a hash of the patient or file name, so always the same at a site.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from medfl.core.errors import InputError
from medfl.datasets.base import MARKER, Item, item_of
from medfl.datasets.readers import matching, pairs, tables
from medfl.datasets.readers.reading import split_uri
from medfl.datasets.readers.splitting import SECTIONS, Record, by_group, published
from medfl.datasets.readers.volumes import SUFFIXES, volume_paths

TABLE = "cases.csv"
_SHARES = (0.7, 0.1, 0.2)
_SPLIT = "table"


def labelled(folder: str | Path, classes: Sequence[str], section: str) -> list[Item]:
    """Return the items of a section of `<folder>/<class>/<image>`; a class may be missing, no other may be there.

    Raises:
        InputError: no images, a folder that is no class, or a wrong table.
    """
    root = _root(folder)
    folders = class_folders(root)
    unknown = [name for name in folders if name not in classes]
    if unknown or not folders:
        foreign = tables.several([repr(name) for name in unknown], "folders")
        problem = f"folder {foreign} in {root} is of no class" if unknown else f"{root} has no folder with images"
        any_known = any(name in classes for name in folders)
        advice = "rename it, or move it away" if any_known else "give the folder that holds these folders with --data"
        raise InputError(problem, f"a folder for each class: {', '.join(classes)}", advice)
    records = [
        Record(uri, classes.index(name), f"{name}/{path}", "unknown", f"{name}/{path}")
        for name in folders
        for path, uri in tables.image_files(root / name)
    ]
    return [item_of(record) for record in _divided(root, records, section)]


def paired(folder: str | Path, images: str, masks: str, section: str) -> list[Item]:
    """Return the items of a section of `<folder>/<images>/<name>` and `<folder>/<masks>/<name>`.

    They are pictures or NIfTI volumes, also in subfolders; a mask's name may end in _mask, _segmentation, _seg or
    _label. `medfl.datasets.readers.matching.match` finds the image of a mask.

    Raises:
        InputError: a folder is missing, there are no pairs, a mask is not that of one image, or a wrong table.
    """
    root = _root(folder)
    return [item_of(record) for record in _divided(root, pairs_of(root / images, root / masks), section)]


def notes(folder: str | Path, images: str, masks: str, items: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return notes on a folder whose pairs are the items of all sections: how many images have no mask.

    Items that are no such pairs, those of another kind of data list, have no notes.
    """
    root, used = Path(folder), {str(item.get("image")) for item in items}
    try:
        table = _table(root / images, root / masks)
    except InputError:
        return ()
    return tuple(table.notes) if used == {record.image for record in table.records} else ()


def above(items: Iterable[Mapping[str, Any]]) -> str:
    """Return the deepest folder above the images of a data list: predictions keep the paths that they have below it."""
    return os.path.commonpath([os.path.dirname(os.path.abspath(split_uri(str(item["image"]))[0])) for item in items])


def class_folders(root: Path) -> list[str]:
    """Return the names of the folders that hold images, sorted."""
    return [p.name for p in sorted(root.iterdir()) if p.is_dir() and p.name[0] not in "._" and tables.image_files(p)]


def cohort_of(places: Iterable[str | Path]) -> Path | None:
    """Return the phantom cohort in which one of these folders or files lies, None where none is known to.

    What is not there is passed over; a link counts for what it leads to.
    """
    files = {Path(split_uri(str(place))[0]) for place in places}
    existing = {whole for path in files if os.path.exists(path) for whole in (path.absolute(), path.resolve())}
    folders = {folder for path in existing for folder in (path, *path.parents)}
    return next((folder for folder in sorted(folders) if (folder / MARKER).is_file()), None)


def pairs_of(images: Path, masks: Path) -> list[Record]:
    """Return a record for each image that has a mask.

    Raises:
        InputError: a folder is missing, there are no pairs, or a mask is not that of one image.
    """
    return _table(images, masks).records


def _table(images: Path, masks: Path) -> tables.Table:
    """Return the records of `pairs_of` with what there is to say of them."""
    for place in (images, masks):
        if not place.is_dir():
            raise InputError(
                f"{place} is no folder", "a folder of images and one of their masks", "give the paths of both folders"
            )
    index = volume_paths if is_volumes(images) else pairs.picture_paths
    image_paths, mask_paths = index(images), index(masks)
    table = pairs.paired(*matching.match(image_paths, mask_paths))
    if table.problems or not table.records:
        problem = tables.several(table.problems, "masks") or f"no image in {images} has a mask in {masks}"
        advice = "name each mask as its image, and move other files away"
        endings = [[bool(matching.ENDING.search(name)) for name, _ in paths] for paths in (image_paths, mask_paths)]
        if image_paths and all(endings[0]) and not any(endings[1]):
            advice = f"the masks seem to be in {images}: swap the two folders"
        raise InputError(problem, "an image and its mask have the same name", advice)
    return table


def is_volumes(images: Path) -> bool:
    """Tell whether a folder holds NIfTI volumes or DICOM series, and no pictures."""
    if any(path.name.endswith(SUFFIXES) for path in images.iterdir()):
        return True
    return not tables.image_files(images) and any(path.is_dir() for path in images.iterdir())


def _root(folder: str | Path) -> Path:
    root = Path(folder)
    if not root.is_dir():
        raise InputError(
            f"the bundle's images are to lie in {root}, which is no folder",
            "a folder of images as docs/README.md of the bundle has it",
            "give it with --data DIR",
        )
    return root


def _divided(root: Path, records: Sequence[Record], section: str) -> list[Record]:
    described, rows = _described(root, records)
    if any("section" in row for row in rows.values()):
        rule = published(_SPLIT)
    else:
        rule = by_group(_SHARES, "own", at_centres=False)
    chosen = [record for record, own in zip(described, rule(described), strict=True) if own == section]
    if not chosen:
        raise InputError(
            f"{len(described)} images in {root}, none of them in section {section!r}",
            f"sections are {', '.join(SECTIONS)}: about 10 images of a class, or column 'section' of {TABLE}",
            "add images, or name their sections in that table",
        )
    return sorted(chosen, key=lambda record: record.id)


def _described(root: Path, records: Sequence[Record]) -> tuple[list[Record], Mapping[str, Mapping[str, str]]]:
    """Return the records with what the table says of them, and the rows by id."""
    path = root / TABLE
    if not path.is_file():
        return list(records), {}
    rows = dict[str, dict[str, str]]()
    for row in tables.read_csv(path, ("file",)):
        if rows.setdefault(_key(row["file"]), row) != row:
            raise InputError(
                f"{path} has two rows for {row['file']}", "a row for each image", "give paths, or remove one row"
            )
    row_of, used, missing = {}, dict[str, str](), []
    for record in records:
        name = next((name for name in _names(root, record) if name in rows), None)
        if name is None:
            missing.append(record.id)
            continue
        if name in used:
            raise InputError(
                f"{path}: row {name} fits the images {used[name]} and {record.id}",
                "a row for each image",
                "give their paths in the column 'file'",
            )
        used[name], row = record.id, rows[name]
        section = row.get("section") or "" if "section" in row else None
        if section is not None and section not in SECTIONS:
            raise InputError(
                f"{path}: section {section!r} of {record.id}", f"one of {', '.join(SECTIONS)}", "write one of these"
            )
        row_of[record.id] = row
    if missing:
        raise InputError(
            f"{path} has no row for image {tables.several(missing, 'images')}", "a row for each image", "add one for it"
        )
    described = [
        replace(
            record,
            centre=row_of[record.id].get("centre") or record.centre,
            group=row_of[record.id].get("patient") or record.group,
            sections={_SPLIT: row_of[record.id]["section"]} if "section" in row_of[record.id] else {},
        )
        for record in records
    ]
    return described, row_of


def _names(root: Path, record: Record) -> list[str]:
    """Return what a row may call an image, the most exact first."""
    path = PurePosixPath(os.path.relpath(record.image, root).replace(os.sep, "/"))
    below = PurePosixPath(*path.parts[1:])  # below the folder of all images
    names = [record.id, str(path), str(path.with_suffix("")), str(below), str(below.with_suffix(""))]
    bare = PurePosixPath(record.id)
    return [*map(_key, names), bare.name, bare.stem, path.name]


def _key(text: str) -> str:
    return text.strip().replace("\\", "/").removeprefix("./").removesuffix(".gz").removesuffix(".nii")
