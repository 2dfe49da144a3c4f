"""Age from T1 MRI of the brain: OASIS-1 and IXI with the tables of their subjects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import Case, draw_files, even
from medfl.datasets.phantoms.scene import Part, Scene
from medfl.datasets.readers.splitting import Record, by_group, filled
from medfl.datasets.readers.tables import Layout, Table, first, number_of, read_csv, several
from medfl.datasets.readers.volumes import count_voxels, volume_files

OASIS = "oasis"
CENTRES = (OASIS, "Guys", "HH", "IOP")
_SEXES = {"m": "male", "f": "female", "1": "male", "2": "female"}


class _Source(NamedTuple):
    """A table of subjects and its volumes.

    Attributes:
        files: names of the table.
        ident: its column of scans or subjects.
        age: its column of ages in years.
        sex: its column of sexes, "" without one.
        group: its column of subjects, "" where the volume's name says it.
        volume: a volume's path: groups `id` in the table, `name`, `group` and, where it says it, `centre`.
    """

    files: tuple[str, ...]
    ident: str
    age: str
    sex: str
    group: str
    volume: re.Pattern[str]


SOURCES = (
    _Source(
        ("oasis_cross-sectional.csv",),
        "ID",
        "Age",
        "M/F",
        "",
        # _fseg are the maps of tissues beside the volumes
        re.compile(r"(?:^|/)(?P<name>(?P<id>(?P<group>OAS1_\d{4})_MR\d))(?![^/]*fseg)[^/]*$"),
    ),
    _Source(
        ("IXI.csv", "IXI.xls.csv"),
        "IXI_ID",
        "AGE",
        "SEX_ID (1=m, 2=f)",
        "",
        re.compile(
            r"(?:^|/)(?P<name>(?P<group>IXI(?P<id>\d{3,}))-(?P<centre>Guys|HH|IOP)-\d+)"
            r"(?:/T1/[^/]+|-T1\.nii(?:\.gz)?)$"
        ),
    ),
    _Source(
        ("subjects.csv",),
        "id",
        "age",
        "",
        "subject",
        re.compile(r"(?:^|/)(?P<name>oasis_(?P<id>\d+))_t1ss\.nii(?:\.gz)?$"),
    ),
)


def _key(ident: str) -> str:
    """Return a subject in the form common to tables and file names: IXI002 is 2."""
    return ident.strip().removeprefix("IXI").lstrip("0")


def _found(folder: Path) -> bool:
    sources = [source for source in SOURCES if first(folder, *source.files)]
    return bool(sources) and any(
        source.volume.search(name) for name, _ in volume_files(folder) for source in sources
    )


def _read(folder: Path) -> Table:
    table = Table()
    volumes = volume_files(folder)
    ageless = []
    for source in SOURCES:
        path = first(folder, *source.files)
        if path is None:
            continue

        rows: dict[str, dict[str, str]] = {}
        columns = (source.ident, source.age, source.sex, source.group)
        for row in read_csv(path, list(filter(None, columns))):
            # IXI's table has some subjects twice: the first row with an age counts
            if row[source.age].strip():
                rows.setdefault(_key(row[source.ident]), row)

        for name, uri in volumes:
            match = source.volume.search(name)
            if match is None:
                continue

            ident = match["name"]
            if (subject := rows.get(_key(match["id"]))) is None:
                ageless.append(ident)
                continue

            years = number_of(subject[source.age], f"{path}: {ident} has age", table)
            if years is not None:
                sex = subject[source.sex].strip().lower() if source.sex else ""
                table.records.append(
                    Record(
                        uri,
                        0,
                        ident,
                        match.groupdict().get("centre") or OASIS,
                        subject[source.group] if source.group else match["group"],
                        size=count_voxels(uri),
                        target=(years,),
                        about={"sex": _SEXES.get(sex, ""), "age": subject[source.age]},
                    )
                )

    if ageless:
        table.notes.append(
            f"{len(ageless)} volumes have no age in the tables and are left out: {several(ageless, 'volumes', 1)}"
        )
    return table


_DECADES = 8
"""Ages of the phantom: from 20 years."""


def _scene(decade: int) -> Scene:
    """Return a skull-stripped brain whose ventricles grow and whose cortex atrophies with age."""
    share = decade / (_DECADES - 1)
    shrunken = 1 - 0.22 * share
    size = 0.1 + 0.3 * share
    parts = (
        Part((0.0,), texture=(0.0, 1)),
        Part((0.2,), (0.86, 0.92, 0.86), bumps=(0.05, 5)),
        Part((0.55,), (0.82 * shrunken, 0.88 * shrunken, 0.82 * shrunken), bumps=(0.05, 5)),
        Part((0.82,), (0.6 * shrunken, 0.66 * shrunken, 0.6 * shrunken), bumps=(0.2, 7)),
        Part((0.2,), (size / 2, size, size * 0.7), (-0.18, 0.0, 0.1)),
        Part((0.2,), (size / 2, size, size * 0.7), (0.18, 0.0, 0.1)),
    )
    return Scene(parts, shift=0.02, spread=0.05)


def _phantom_path(case: Case) -> str:
    if case.centre == 0:
        return f"OAS1_{9000 + case.number}_MR1_t88_masked_gfc.nii.gz"

    return f"IXI-T1/IXI{case.number:03d}-{CENTRES[case.centre]}-9{case.group:03d}-T1.nii.gz"


def _phantom_age(case: Case) -> int:
    return 20 + 10 * case.label


DATASET = DataSet(
    **sheet("brain_age"),
    centres=CENTRES,
    layouts=(
        Layout(
            "any of: oasis_cross-sectional.csv (ID, M/F, Age) + OAS1_<number>_MR<n>*.nii[.gz]; IXI.csv (IXI_ID, "
            "SEX_ID (1=m, 2=f), AGE) + IXI<number>-<hospital>-<number>-T1.nii[.gz] or "
            "IXI<number>-<hospital>-<number>/T1/*; subjects.csv (id, subject, age) + oasis_<id>_t1ss.nii[.gz]; also in "
            "subfolders",
            ("subject",),
            _found,
            _read,
        ),
    ),
    rules={"subject": filled(by_group("brain_age"))},
    draw=draw_files(
        tuple(map(_scene, range(_DECADES))),
        even(_DECADES, len(CENTRES)),
        _phantom_path,
        tables={
            "oasis_cross-sectional.csv": {
                "ID": lambda case: None if case.centre else f"OAS1_{9000 + case.number}_MR1",
                "M/F": lambda case: "MF"[case.group % 2],
                "Hand": lambda case: "R",
                "Age": _phantom_age,
            },
            "IXI.csv": {
                "IXI_ID": lambda case: case.number if case.centre else None,
                "SEX_ID (1=m, 2=f)": lambda case: 1 + case.group % 2,
                "AGE": lambda case: f"{_phantom_age(case)}.0",
            },
        },
        sides=((1, 1), (1.25, 1.25), (1, 1)),
        spacing=4.0,
    ),
)
