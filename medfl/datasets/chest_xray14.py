"""ChestX-ray14 of the NIH: frontal chest radiographs with any of fourteen findings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import Case, draw_files, even
from medfl.datasets.phantoms.scene import finding_scene
from medfl.datasets.readers.splitting import Record, by_group, validation_from_train
from medfl.datasets.readers.tables import (
    Layout,
    Table,
    check_row,
    first,
    folders_and_zips,
    image_index,
    note_absent,
    read_csv,
)

SHEET = sheet("chest_xray14")
FINDINGS = SHEET["classes"]
"""In the paper's order."""
NONE = "No Finding"
VIEWS = SHEET["centres"]
TABLES = ("Data_Entry_2017_v2020.csv", "Data_Entry_2017.csv")
LISTS = {"train_val_list.txt": "train", "test_list.txt": "test"}
_COLUMNS = ("Image Index", "Finding Labels", "Patient ID", "Patient Age", "View Position")


def _roots(folder: Path) -> list[Path]:
    return folders_and_zips(folder, "images*")


def _found(folder: Path) -> bool:
    return first(folder, *TABLES) is not None and bool(_roots(folder))


def _listed(folder: Path) -> dict[str, str]:
    """Return file name -> section from the published lists."""
    sections = {}
    for name, section in LISTS.items():
        text = (folder / name).read_text(encoding="utf-8")
        sections.update(dict.fromkeys(text.split(), section))

    return sections


def _read(folder: Path, sections: dict[str, str]) -> Table:
    path = first(folder, *TABLES)
    assert path is not None  # by it the layout was found
    images = image_index(_roots(folder))
    table = Table()
    absent = []
    for row in read_csv(path, _COLUMNS):
        name = row["Image Index"]
        ident = name.rpartition(".")[0]
        if ident not in images:
            absent.append(name)
            continue

        where = f"{path}: image {name}"
        matches = set(row["Finding Labels"].split("|"))
        if unknown := matches - {*FINDINGS, NONE}:
            finding = min(unknown)
            table.problems.append(f"{where} has finding {finding!r}; {', '.join(FINDINGS)}, {NONE}")
        elif check_row(table, where, ident, row["View Position"], VIEWS, images):
            table.records.append(
                Record(
                    images[ident],
                    0,
                    ident,
                    row["View Position"],
                    row["Patient ID"],
                    {"official": sections[name]} if name in sections else {},
                    target=tuple(float(finding in matches) for finding in FINDINGS),
                    about={
                        "sex": row.get("Patient Gender") or row.get("Patient Sex") or "",
                        "age": row["Patient Age"],
                    },
                )
            )

    note_absent(table, path, absent)
    return table


_PATTERNS = ((), *((k,) for k in range(14)), *((k, (k + 3) % 14) for k in range(14)))
"""Findings of the phantom's images: none, each alone, each with one other."""


def _phantom_name(case: Case) -> str:
    return f"9{case.group:07d}_{case.number:03d}.png"


def _phantom_findings(case: Case) -> str:
    return "|".join(FINDINGS[k] for k in _PATTERNS[case.label]) or NONE


def _phantom_list(is_tested: bool) -> Callable[[Case], str | None]:
    """Return the entry of a list, patients kept together: every fifth is in the test section."""
    return lambda case: _phantom_name(case) if (case.group % 5 == 0) == is_tested else None


DATASET = DataSet(
    **SHEET,
    layouts=(
        Layout(
            "Data_Entry_2017[_v2020].csv + images/ or images_001/ to images_012/, folders or zips + train_val_list.txt "
            "+ test_list.txt",
            ("official", "patient"),
            lambda folder: _found(folder) and all((folder / name).is_file() for name in LISTS),
            lambda folder: _read(folder, _listed(folder)),
        ),
        Layout(
            "Data_Entry_2017[_v2020].csv + images/ or images_001/ to images_012/, without the lists",
            ("patient",),
            _found,
            lambda folder: _read(folder, {}),
        ),
    ),
    rules={
        "official": validation_from_train("official"),
        "patient": by_group("chest_xray14"),
    },
    draw=draw_files(
        tuple(finding_scene(found, len(FINDINGS)) for found in _PATTERNS),
        even(len(_PATTERNS), len(VIEWS)),
        lambda case: f"images/{_phantom_name(case)}",
        tables={
            TABLES[0]: {
                "Image Index": _phantom_name,
                "Finding Labels": _phantom_findings,
                "Follow-up #": lambda case: case.shot,
                "Patient ID": lambda case: 90000000 + case.group,
                "Patient Age": lambda case: 20 + case.group % 70,
                "Patient Gender": lambda case: "MF"[case.group % 2],
                "View Position": lambda case: VIEWS[case.centre],
            },
            "train_val_list.txt": {"": _phantom_list(False)},
            "test_list.txt": {"": _phantom_list(True)},
        },
        repeats=True,
    ),
)
