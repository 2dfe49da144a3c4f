"""Bone age of children from radiographs of the hand: the RSNA's challenge of 2017."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from medfl.core.mappings import present
from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import Case, draw_files, even
from medfl.datasets.phantoms.scene import Part, Scene
from medfl.datasets.readers.splitting import Record, by_group, published
from medfl.datasets.readers.tables import (
    Layout,
    Table,
    check_row,
    first,
    folders_and_zips,
    image_index,
    number_of,
    read_csv,
)

_VALIDATION = "Bone Age Validation Set"
_TEST = "Bone Age Test Set"


class _Source(NamedTuple):
    """A table of the challenge: its file names, and its columns for the image, the age in months and the sex."""

    files: tuple[str, ...]
    image: str
    age: str
    sex: str


SOURCES = {
    "train": _Source(("boneage-training-dataset.csv", "train.csv"), "id", "boneage", "male"),
    "validate": _Source(
        ("Validation Dataset.csv", f"{_VALIDATION}/Validation Dataset.csv"),
        "Image ID",
        "Bone Age (months)",
        "male",
    ),
    "test": _Source(
        ("test.csv", f"{_TEST}/test.csv"), "Case ID", "Ground truth bone age (months)", "Sex"
    ),
}
"""By section."""
_MALE = ("true", "m")


def _roots(folder: Path) -> list[Path]:
    """Return the folders and archives `boneage-*` of a folder and of those of its sets."""
    return folders_and_zips(folder, "boneage-*", "Bone Age * Set/*")


def _tables(folder: Path) -> dict[str, Path]:
    """Return section -> its table, for the sections that have one."""
    matches = {section: first(folder, *source.files) for section, source in SOURCES.items()}
    return present(matches)


def _found(folder: Path) -> bool:
    return "train" in _tables(folder) and bool(_roots(folder))


def _read(folder: Path) -> Table:
    images = image_index(_roots(folder))
    table = Table()
    for section, path in _tables(folder).items():
        source = SOURCES[section]
        for row in read_csv(path, source[1:]):
            ident = row[source.image]
            where = f"{path}: image {ident}"
            months = number_of(row[source.age], f"{where} has bone age", table)
            if months is None or not check_row(
                table, where, ident, "unknown", ("unknown",), images
            ):
                continue

            is_male = row[source.sex].strip().lower() in _MALE
            table.records.append(
                Record(
                    images[ident],
                    0,
                    ident,
                    "unknown",
                    ident,
                    {"official": section},
                    target=(months,),
                    about={"sex": "male" if is_male else "female"},
                )
            )

    return table


_YEARS = 19
"""Ages of the phantom, in years from 1."""


def _scene(year: int) -> Scene:
    """Return a hand whose bones grow and whose growth plates close with age."""
    share = year / _YEARS
    parts = [Part((0.05,)), Part((0.35,), (0.45, 0.5), (0.45, 0.0))]
    for finger in range(5):
        side = 0.36 * (finger - 2)
        length = (0.14 + 0.16 * share) * (1 - 0.1 * abs(finger - 2))
        for joint in (0, 1):
            place = (-0.1 - 0.42 * joint, side)
            parts.append(Part((0.8,), (length, 0.04 + 0.06 * share), place))

    for bone in range(4):
        angle = math.pi * bone / 2
        place = (0.45 + 0.2 * math.sin(angle), 0.25 * math.cos(angle))
        size = 0.05 + 0.16 * share
        parts.append(Part((0.85,), (size, size), place))

    return Scene(tuple(parts), shift=0.05, spread=0.05)


def _phantom_columns(section: str, part: str) -> dict[str, Callable[[Case], object]]:
    """Return the columns of a section's table: a case of another part has no row."""
    source = SOURCES[section]
    male, female = ("M", "F") if source.sex == "Sex" else ("True", "False")
    return {
        source.image: lambda case: 90000 + case.number if case.part == part else None,
        source.age: lambda case: 12 * (case.label + 1),  # months
        source.sex: lambda case: female if case.group % 2 else male,
    }


_PHANTOM_FOLDERS = {
    "train": "training-dataset",
    "val": "validation-dataset-1",
    "test": "test-dataset",
}

DATASET = DataSet(
    **sheet("bone_age"),
    layouts=(
        Layout(
            "boneage-training-dataset.csv or train.csv (id, boneage, male), Validation Dataset.csv (Image ID, male, "
            "Bone Age (months)), test.csv (Case ID, Sex, Ground truth bone age (months)) + boneage-*/<id>.png, here or "
            f"in {_VALIDATION}/ and {_TEST}/, folders or zips",
            ("official", "image"),
            lambda folder: _found(folder) and len(_tables(folder)) == len(SOURCES),
            _read,
        ),
        Layout(
            "boneage-training-dataset.csv or train.csv (id, boneage, male) + boneage-*/<id>.png, folders or zips",
            ("image",),
            _found,
            _read,
            notes=("without the tables of all three sets all images are cut anew",),
        ),
    ),
    rules={
        "official": published("official"),
        "image": by_group("bone_age"),
    },
    draw=draw_files(
        tuple(map(_scene, range(1, _YEARS + 1))),
        even(_YEARS),
        lambda case: f"boneage-{_PHANTOM_FOLDERS[case.part]}/{90000 + case.number}.png",
        tables={
            SOURCES["train"].files[0]: _phantom_columns("train", "train"),
            SOURCES["validate"].files[0]: _phantom_columns("validate", "val"),
            SOURCES["test"].files[0]: _phantom_columns("test", "test"),
        },
    ),
)
