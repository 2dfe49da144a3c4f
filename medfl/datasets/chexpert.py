"""CheXpert of Stanford: chest radiographs with findings that may be uncertain; the five of its competition."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

from medfl.core.names import not_among
from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import Case, draw_files, even
from medfl.datasets.phantoms.scene import finding_scene
from medfl.datasets.readers.splitting import LEFT_OUT, Record, validation_from_train
from medfl.datasets.readers.tables import Layout, Table, image_files, note_absent, read_csv

SHEET = sheet("chexpert")
FINDINGS = SHEET["classes"]
CENTRES = SHEET["centres"]
TABLES = {"train.csv": "train", "valid.csv": "test"}
_VALUES = {"": 0.0, "0": 0.0, "0.0": 0.0, "1": 1.0, "1.0": 1.0, "-1": -1.0, "-1.0": -1.0}
"""Meaning of a cell; nothing if the report does not mention the finding."""
_PATH = re.compile(r"(?:train|valid)/(patient\d+)/[^/]+/[^/]+$")
_COLUMNS = ("Path", "Sex", "Age", "Frontal/Lateral", "AP/PA", *FINDINGS)


def _read(folder: Path) -> Table:
    table = Table()
    images: dict[str, str] = {}
    for part in ("train", "valid"):
        if (folder / part).is_dir():
            images.update((f"{part}/{name}", uri) for name, uri in image_files(folder / part))

    for name, section in TABLES.items():
        path = folder / name
        absent = []
        for row in read_csv(path, _COLUMNS):
            where = f"{path}: image {row['Path']}"
            match = _PATH.search(row["Path"])
            if match is None:
                table.problems.append(f"{where} is no .../patient<number>/<study>/<view>")
                continue
            if match[0] not in images:
                absent.append(row["Path"])
                continue

            cells = [row[finding].strip() for finding in FINDINGS]
            if odd := not_among(cells, _VALUES):
                table.problems.append(f"{where} has finding {odd[0]!r}; 1, 0, -1 or nothing")
                continue

            is_frontal = row["Frontal/Lateral"] == "Frontal"
            # LL and RL, of patients who lie on a side, count as AP
            centre = "PA" if row["AP/PA"] == "PA" else "AP"
            table.records.append(
                Record(
                    images[match[0]],
                    0,
                    match[0].rpartition(".")[0],
                    centre if is_frontal else "lateral",
                    match[1],
                    {"frontal": section if is_frontal else LEFT_OUT, "all": section},
                    target=tuple(_VALUES[cell] for cell in cells),
                    about={"sex": row["Sex"], "age": row["Age"]},
                )
            )

        note_absent(table, path, absent)

    return table


_PATTERNS = ((), *((k,) for k in range(5)), *itertools.combinations(range(5), 2))
"""Findings of the phantom's images: none, each alone, each pair."""


def _phantom_path(case: Case) -> str:
    part = "train" if case.group % 5 else "valid"
    view = "lateral" if case.centre == 2 else "frontal"
    return f"{part}/patient{90000 + case.group}/study1/view{case.shot + 1}_{view}.jpg"


def _phantom_cell(case: Case, finding: int) -> str:
    """Return the phantom table's entry for a finding: in train some are uncertain and some are not mentioned."""
    number = case.group + finding
    if finding not in _PATTERNS[case.label]:
        return "0.0" if number % 2 else ""
    if case.group % 5 and number % 6 == 0:
        return "-1.0"

    return "1.0"


def _phantom_columns(part: str) -> dict[str, Callable[[Case], object]]:
    """Return the columns of a part's table: a case without a path in it has no row."""

    def path(case: Case) -> str | None:
        below = _phantom_path(case)
        return f"CheXpert-v1.0-small/{below}" if below.startswith(part) else None

    columns = {
        "Path": path,
        "Sex": lambda case: "Female" if case.group % 2 else "Male",
        "Age": lambda case: 20 + case.group % 70,
        "Frontal/Lateral": lambda case: "Lateral" if case.centre == 2 else "Frontal",
        "AP/PA": lambda case: ("AP", "PA", "")[case.centre],
    }
    for k, finding in enumerate(FINDINGS):
        # k is bound here: a later call would see the loop's last
        columns[finding] = lambda case, k=k: _phantom_cell(case, k)  # type: ignore[misc]

    return columns


DATASET = DataSet(
    **SHEET,
    layouts=(
        Layout(
            "train.csv + valid.csv (Path, Sex, Age, Frontal/Lateral, AP/PA, the findings) + train/ + valid/ with "
            "patient<number>/<study>/<view>.jpg",
            ("frontal", "all"),
            lambda folder: (
                all((folder / name).is_file() for name in TABLES) and (folder / "train").is_dir()
            ),
            _read,
        ),
    ),
    rules={
        "frontal": validation_from_train("frontal"),
        "all": validation_from_train("all"),
    },
    draw=draw_files(
        tuple(finding_scene(found, len(FINDINGS)) for found in _PATTERNS),
        even(len(_PATTERNS), len(CENTRES)),
        _phantom_path,
        tables={
            "train.csv": _phantom_columns("train"),
            "valid.csv": _phantom_columns("valid"),
        },
        repeats=True,
    ),
)
