"""Tissues of the brain on T1 MRI of OASIS, the skull removed: scans at 2 mm with expert labels."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from medfl.datasets.base import DataSet
from medfl.datasets.phantoms import scenes_volumes
from medfl.datasets.phantoms.phantom import Generator, write_csv
from medfl.datasets.readers.splitting import Record, by_group, validation_from_train
from medfl.datasets.readers.tables import Layout, Table, read_csv
from medfl.datasets.readers.volumes import count_voxels, read_pair, volume_index

CLASSES = ("background", "csf", "grey", "white")
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
    table, path = Table(), folder / SUBJECTS
    rows = {row["id"]: row for row in read_csv(path, ("id", "subject", "age"))}
    for key, files in _files(folder).items():
        row = rows.get(key)
        if len(files) < 2:
            (uri,) = files.values()
            table.problems.append(f"{uri} has no {'mask' if 't1ss' in files else 'image'} beside it")
        elif row is None:
            table.problems.append(f"{files['t1ss']}: scan {key} is not in {path}")
        elif not row["age"].replace(".", "", 1).isdecimal():
            table.problems.append(f"{path}: scan {key} has age {row['age']!r}, an age is a number of years")
        else:
            sections = {"age": "test" if float(row["age"]) >= OLD else "train"}
            image, ident = files["t1ss"], f"oasis_{key}"
            size = count_voxels(image)
            table.records.append(Record(image, 0, ident, "unknown", row["subject"], sections, files["tissue"], size))
    return table


def draw(folder: Path, rng: Generator, cases: int, side: int) -> int:
    """Write a phantom of about 1 x 1.2 x 1 sides at 2 mm; every fifth subject has two scans, every fourth is old."""
    rows: list[tuple[object, ...]] = []
    subject = 0
    while len(rows) < cases:
        subject += 1
        age = int(rng.integers(45, 91) if subject % 4 == 0 else rng.integers(18, 35))
        for _ in range(min(2 if subject % 5 == 0 else 1, cases - len(rows))):
            number = 9000 + len(rows)
            sides = np.rint(np.array((1.0, 1.2, 1.0)) * side * rng.uniform(1.0, 1.1, 3)).astype(int)
            image, labels = scenes_volumes.brain(rng, (int(sides[0]), int(sides[1]), int(sides[2])), age)
            scenes_volumes.save(folder / f"oasis_{number}_t1ss.nii.gz", np.rint(image * 1700).astype(np.int16), 2.0)
            scenes_volumes.save(folder / f"oasis_{number}_tissue.nii.gz", labels, 2.0)
            rows.append((number, f"OAS9_{subject:04d}", age))
    write_csv(folder / SUBJECTS, [("id", "subject", "age"), *rows])
    return cases


DATASET = DataSet(
    name="brain_tissue",
    title="Brain tissue on T1 MRI of OASIS: ventricular fluid, grey, white",
    classes=CLASSES,
    channels=1,
    folders=("brain_tissue", "oasis_tissue"),
    layouts=(
        Layout(
            f"oasis_<id>_t1ss.nii.gz + oasis_<id>_tissue.nii.gz + {SUBJECTS} (id, subject, age)",
            ("subject", "age"),
            lambda folder: (folder / SUBJECTS).is_file() and _files(folder),
            _read,
        ),
    ),
    rules={"subject": by_group((0.7, 0.1, 0.2), "brain_tissue"), "age": validation_from_train("age", 0.2)},
    licence="CC BY-NC 3.0",
    source="https://github.com/muschellij2/malf.templates",
    citation="Marcus et al.: Open Access Series of Imaging Studies. Journal of Cognitive Neuroscience 19, 1498 (2007); "
    "labels by Neuromorphometrics, Inc., grouped into tissues",
    draw=draw,
    per_class=30,
    size=48,
    open_pair=lambda image, mask: read_pair(image, mask, len(CLASSES)),
    notes=(
        "test and retest scans of a subject stay in one section",
        f"split age tests on the subjects from {OLD:.0f} years on, and trains and validates on the younger ones",
        "the skull is removed (background exactly 0); fluid outside the ventricles is shown, but labelled background",
    ),
    download_note="the scans are made of the files of https://github.com/muschellij2/malf.templates, folder "
    "inst/extdata: <id>_SS.nii.gz and <id>_classified.nii.gz, brought to 2 mm",
)
