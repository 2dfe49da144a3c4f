"""Brain tissues on skull-stripped T1 MRI of OASIS: scans at 2 mm with expert labels."""

from __future__ import annotations

import re
from pathlib import Path

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import Case, draw_files, mixed
from medfl.datasets.phantoms.scene import scene_of
from medfl.datasets.readers.splitting import Record, by_group, validation_from_train
from medfl.datasets.readers.tables import Layout, Table, read_csv
from medfl.datasets.readers.volumes import count_voxels, volume_index

SUBJECTS = "subjects.csv"
OLD = 40.0  # years; nobody in the data is between 34 and 45
_NAME = re.compile(r"oasis_(\d+)_(t1ss|tissue)")


def _files(folder: Path) -> dict[str, dict[str, str]]:
    """Return the URIs of image (t1ss) and mask (tissue) by the scan's number."""
    files: dict[str, dict[str, str]] = {}
    for stem, uri in volume_index(folder).items():
        if match := _NAME.fullmatch(stem):
            files.setdefault(match[1], {})[match[2]] = uri
    return files


def _read(folder: Path) -> Table:
    table = Table()
    path = folder / SUBJECTS
    rows = {row["id"]: row for row in read_csv(path, ("id", "subject", "age"))}
    for key, files in _files(folder).items():
        row = rows.get(key)
        if len(files) < 2:
            (uri,) = files.values()
            table.problems.append(
                f"{uri} has no {'mask' if 't1ss' in files else 'image'} beside it"
            )
        elif row is None:
            table.problems.append(f"{files['t1ss']}: scan {key} is not in {path}")
        # An age may have a decimal point.
        elif not row["age"].replace(".", "", 1).isdecimal():
            table.problems.append(
                f"{path}: scan {key} has age {row['age']!r}, an age is a number of years"
            )
        else:
            sections = {"age": "test" if float(row["age"]) >= OLD else "train"}
            image = files["t1ss"]
            ident = f"oasis_{key}"
            size = count_voxels(image)
            table.records.append(
                Record(image, 0, ident, "unknown", row["subject"], sections, files["tissue"], size)
            )

    return table


def _phantom_stem(case: Case) -> str:
    return f"oasis_{9000 + case.number}"


def _phantom_age(case: Case) -> int:
    """Return an age derived from the subject's number; every fourth is old and from another scanner."""
    if case.centre:
        return 50 + case.group % 40

    return 18 + case.group % 16


SHEET = sheet("brain_tissue")
_SCENE = scene_of(SHEET)
DATASET = DataSet(
    **SHEET,
    layouts=(
        Layout(
            f"oasis_<id>_t1ss.nii.gz + oasis_<id>_tissue.nii.gz + {SUBJECTS} (id, subject, age)",
            ("subject", "age"),
            lambda folder: (folder / SUBJECTS).is_file() and _files(folder),
            _read,
        ),
    ),
    rules={
        "subject": by_group("brain_tissue"),
        "age": validation_from_train("age", 0.2),
    },
    draw=draw_files(
        (_SCENE,),
        mixed([[9], [1]]),
        lambda case: f"{_phantom_stem(case)}_t1ss.nii.gz",
        mask=lambda case: f"{_phantom_stem(case)}_tissue.nii.gz",
        tables={
            SUBJECTS: {
                "id": lambda case: 9000 + case.number,
                "subject": lambda case: f"OAS9_{case.group:04d}",
                "age": _phantom_age,
            }
        },
        sides=((1, 1.1), (1.2, 1.3), (1, 1.1)),
        spacing=2.0,
        repeats=True,
    ),
)
