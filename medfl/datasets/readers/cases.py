"""The table `cases.csv` at the top of a user's folder: patient, centre and section of each image."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from medfl.core.errors import InputError
from medfl.datasets.readers import tables
from medfl.datasets.readers.reading import JOINED
from medfl.datasets.readers.splitting import SECTIONS, Record
from medfl.datasets.readers.volumes import bare

TABLE, SPLIT = "cases.csv", "table"
Rows = Mapping[str, Mapping[str, str]]
"""id of an image -> its row."""


def described(root: Path, records: Sequence[Record], rows: Rows) -> list[Record]:
    """Return records with what rows say of them: `patient` is their group, `centre`, and `section` of split `SPLIT`.

    Raises:
        InputError: a section that is none.
    """
    for record in records:
        section = rows.get(record.id, {}).get("section", SECTIONS[0]) or ""
        if section not in SECTIONS:
            raise InputError(
                f"{root}: section {section!r} of {record.id}",
                f"one of {', '.join(SECTIONS)}",
                "write one of these",
            )
    return [_with(record, rows[record.id]) if record.id in rows else record for record in records]


def _with(record: Record, row: Mapping[str, str]) -> Record:
    return replace(
        record,
        centre=row.get("centre") or record.centre,
        group=row.get("patient") or record.group,
        sections={SPLIT: row["section"]} if "section" in row else {},
    )


def read(root: Path, records: Sequence[Record], others: Sequence[Record] = ()) -> Rows:
    """Return the rows of a folder's table, empty where it has none; `others` are images that may be without one.

    Raises:
        InputError: two rows of an image or two images of a row, an image without one, or no column `file`.
    """
    path = root / TABLE
    if not path.is_file():
        return {}
    rows = dict[str, dict[str, str]]()
    for row in tables.read_csv(path, ("file",)):
        if rows.setdefault(key(row["file"]), row) != row:
            raise InputError(
                f"{path} has two rows for {row['file']}", "a row for each image", "give paths, or remove one row"
            )
    row_of, used, missing = {}, dict[str, str](), []
    for number, record in enumerate([*records, *others]):
        name = next((name for name in _names(root, record) if name in rows), None)
        if name is None:
            missing += [record.id] if number < len(records) else []
            continue
        if name in used and number >= len(records):
            continue
        if name in used:
            raise InputError(
                f"{path}: row {name} fits the images {used[name]} and {record.id}",
                "a row for each image",
                "give their paths in the column 'file'",
            )
        used[name], row_of[record.id] = record.id, rows[name]
    if missing:
        raise InputError(
            f"{path} has no row for image {tables.several(missing, 'images')}", "a row for each image", "add one for it"
        )
    return row_of


def _names(root: Path, record: Record) -> list[str]:
    """Return what a row may call an image, the most exact first."""
    path = PurePosixPath(os.path.relpath(record.image.split(JOINED)[0], root).replace(os.sep, "/"))
    below = PurePosixPath(*path.parts[1:])  # below the folder of all images
    names = [
        record.id,
        str(path),
        str(path.with_suffix("")),
        str(below),
        str(below.with_suffix("")) if below.name else "",
    ]
    bare = PurePosixPath(record.id)
    return [*map(key, filter(None, names)), bare.name, bare.stem, path.name]


def key(text: str) -> str:
    """Return a path or name in a table as names of images are compared: with slashes, without NIfTI's ending."""
    return bare(text.strip().replace("\\", "/").removeprefix("./"))
