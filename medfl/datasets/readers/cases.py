"""The table `cases.csv` at the top of a user's folder: patient, centre and section of each image."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from medfl.core import SECTIONS, InputError, alike, as_number, either, respelled, words_of
from medfl.datasets.readers import tables
from medfl.datasets.readers.reading import JOINED
from medfl.datasets.readers.splitting import Record
from medfl.datasets.readers.volumes import bare

TABLE = "cases.csv"
SPLIT = "table"
SECTION_NAMES = {*words_of("train training val valid validate validation dev test testing")}
"""What sections are called elsewhere."""
COLUMNS = {
    "patient": ("patient", "patient_id", "subject", "subject_id"),
    "centre": ("centre", "center", "site"),
    "section": ("section",),
}
"""What tables call the columns about a case."""
DIVIDING = re.compile(
    rf"(is_|in_)?(k?folds?|split|subset|partition|training|{'|'.join(sorted(SECTION_NAMES))})(_(set|id))?[0-9]*"
)
"""The names of columns that divide images, by whatever values."""
NOTHING = {"nan", "none", "na", "n/a", "null"}
"""What some programs write for a missing value."""
Rows = Mapping[str, Mapping[str, str]]
"""id of an image -> its row."""


def head(name: str) -> str:
    """Return a column's name in the form that is compared."""
    return re.sub(r"[\s_-]+", "_", alike(str(name)).strip().lower())


def columns_of(names: Iterable[str]) -> dict[str, str]:
    """Return patient, centre, section -> the column of a table that has it, of those that are there."""
    name_of = {head(name): name for name in names}
    columns = {}
    for role, spellings in COLUMNS.items():
        for spelling in filter(name_of.__contains__, spellings[::-1]):
            columns[role] = name_of[spelling]

    return columns


def unused_sections(rows: Sequence[Mapping[str, str]], used: Collection[str] = ()) -> list[str]:
    """Return a line for each column of a table that seems to divide it, as `Training set`, and is not used."""
    lines = []
    for name in rows[0] if rows else ():
        # "Test set", "test_2" and "TEST" all begin with the word
        words = {re.split(r"[\W\d_]", str(row.get(name) or "").lower())[0] for row in rows} - {""}
        is_named_so = bool(words) and words <= SECTION_NAMES
        if (
            (is_named_so or DIVIDING.fullmatch(head(name)))
            and head(name) != "section"
            and name not in used
        ):
            lines.append(
                f"column {name!r} is not used: to take the sections from it, call it section, and its values train, "
                "validate and test"
            )

    return lines


def described(root: Path, records: Sequence[Record], rows: Rows) -> list[Record]:
    """Return the records with group, centre and section (of split `SPLIT`) taken from their rows.

    Raises:
        InputError: a section that is none.
    """
    patients = _one_spelling(rows, "patient")
    centres = _one_spelling(rows, "centre")

    described_records = []
    for record in records:
        if (row := rows.get(record.id)) is None:
            described_records.append(record)
            continue

        sections = {SPLIT: row["section"] or ""} if "section" in row else {}
        if sections and sections[SPLIT] not in SECTIONS:
            raise InputError(
                f"{root}: section {sections[SPLIT]!r} of {record.id}",
                f"one of {either(SECTIONS)}",
                "write one of these",
            )

        centre = row.get("centre") or record.centre
        patient = row.get("patient") or record.group
        described_records.append(
            replace(
                record,
                centre=centres.get(centre, centre),
                group=patients.get(patient, patient),
                sections=sections,
            )
        )

    return described_records


def notes(rows: Rows) -> list[str]:
    """Return lines on patients whose names a program changed: numbers without zeros, words in empty cells.

    And on columns of sections that are not used.
    """
    lines = unused_sections([*rows.values()])
    for column in ("patient", "centre"):
        if ways := [" and ".join(map(ascii, names)) for names in _spellings(rows, column)]:
            lines.append(f"one {column}, written in several ways: {tables.several(ways, 'such')}")

    for name, count in Counter(row.get("patient") or "" for row in rows.values()).items():
        if name.lower() in NOTHING:
            lines.append(
                f"{count} images are of a patient {name!r}: one, as its cells are not empty"
            )

    return lines


def _one_spelling(rows: Rows, column: str) -> dict[str, str]:
    """Return the names in a column that are written in several ways, and what each of them is read as."""
    spelling = dict[str, str]()
    for names in _spellings(rows, column):
        spelling |= dict.fromkeys(names, names[0].strip())

    return spelling


def _spellings(rows: Rows, column: str) -> list[list[str]]:
    """Return the names that a column writes in several ways, such as `007`, `7`, `7.0`, `p1`, `P1` and look-alikes."""
    names = defaultdict(set)
    for row in rows.values():
        name = row.get(column) or ""
        plain = alike(name).strip()
        names[as_number(plain) or plain.casefold()].add(name)

    return [*map(sorted, filter(lambda spellings: len(spellings) > 1, names.values()))]


def read(root: Path, records: Sequence[Record], unlabelled: Sequence[Record] = ()) -> Rows:
    """Return the rows of a folder's table, empty if it has none; `unlabelled` are images that need no row.

    Raises:
        InputError: two rows of an image or two images of a row, an image without one, or no column `file`.
    """
    path = root / TABLE
    if not path.is_file():
        return {}

    rows = dict[str, dict[str, str]]()
    table = tables.read_csv(path, ("file",))
    columns = columns_of(table[0] if table else ())
    for row in table:
        row |= {role: row[name] for role, name in columns.items()}
        if rows.setdefault(key(row["file"]), row) != row:
            raise InputError(
                f"{path} has two rows for {row['file']}",
                "a row for each image",
                "give paths, or remove one row",
            )

    row_of = {}
    used = dict[str, str]()
    missing = []
    for number, record in enumerate([*records, *unlabelled]):
        name = next((name for name in _names(root, record) if name in rows), None)
        # An unlabelled image has no claim to a row that a labelled one uses.
        if name is None or (name in used and number >= len(records)):
            missing += [record.id] * (number < len(records))
            continue
        if name in used:
            raise InputError(
                f"{path}: row {name} fits the images {used[name]} and {record.id}",
                "a row for each image",
                "give their paths in the column 'file'",
            )

        used[name], row_of[record.id] = record.id, rows[name]

    if missing:
        advice = respelled(rows.keys() - used.keys()) or "add one for it"
        bare_number = as_number(PurePosixPath(missing[0]).stem)
        if bare_number and bare_number in map(as_number, rows):
            advice = f"write column 'file' as text: {bare_number!r} has lost the zeros before it"

        raise InputError(
            f"{path} has no row for image {tables.several(missing, 'images')}",
            "a row for each image, by its name in the same capitals",
            advice,
        )

    return row_of


def _names(root: Path, record: Record) -> list[str]:
    """Return the names by which a row may mean an image, the most specific first."""
    path = os.path.relpath(record.image.split(JOINED)[0], root).replace(os.sep, "/")
    below = path.partition("/")[2]  # the folder of all images
    names = []
    for form in (record.id, path, below, PurePosixPath(record.id).name, PurePosixPath(path).name):
        names += [key(form), key(os.path.splitext(form)[0])]

    return [*filter(None, names)]


def key(text: str) -> str:
    """Return a path or name from a table in its comparable form: with slashes, without the ending of NIfTI."""
    return bare(alike(text).strip().replace("\\", "/").removeprefix("./"))
