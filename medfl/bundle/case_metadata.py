"""What the data say of each case beyond its label: centre, age, sex, localisation.

These are personal data. They are read from the data folder when they are asked for and never written into a run folder.

A shipped data set's tables and a user's own are found alike: any comma- or tab-separated table at the top of the data
folder with a column that names the items (`image_id`, `image`, `file`, `id`, ...).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from medfl.core.errors import InputError
from medfl.datasets.readers.tables import read_csv
from medfl.problem.problem import Problem

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "age": ("age", "age_approx", "age_at_diagnosis", "age_years", "patient_age"),
    "sex": ("sex", "gender", "patient_sex"),
    "localisation": (
        "localisation",
        "localization",
        "anatom_site_general",
        "anatom_site",
        "body_part",
        "location",
    ),
}
"""Name here -> what tables call it, in lower case."""
UNKNOWN = "not stated"
_NAMES = ("image_id", "image", "isic_id", "file", "filename", "file_name", "case", "case_id", "id")
_SUFFIXES = (".csv", ".tsv", ".tab", "")
_LARGEST = 1 << 26  # bytes of a table
_BAND = 20  # years
_OLDEST = 80


def read(bundle: Problem, section: str, folder: str) -> dict[str, dict[str, Any]]:
    """Return what is known of each item of a section: id -> {"centre", "group", "age", "sex", "localisation"}.

    Age is in years; a key that the data do not have is left out, a value that is missing for a case is `UNKNOWN`, of
    age None.
    """
    items = bundle.items(section)
    cases: dict[str, dict[str, Any]] = {
        str(item["id"]): {name: str(item[name]) for name in ("centre", "group") if name in item}
        for item in items
    }
    entries = bundle.data(section)

    if isinstance(entries, list):
        for item, entry in zip(items, entries, strict=True):
            cases[str(item["id"])] |= _columns(entry) if isinstance(entry, Mapping) else {}

    for rows in _tables(Path(folder)) if folder and Path(folder).is_dir() else ():
        for ident, row in _by_name(rows, list(cases)).items():
            cases[ident] = {**_columns(row), **cases[ident]}

    columns = [name for name in COLUMNS if any(name in row for row in cases.values())]
    for row in cases.values():
        row |= {name: None if name == "age" else UNKNOWN for name in columns if name not in row}

    return cases


def band(age: float | None) -> str:
    """Return the band of 20 years that an age is in: "0–19", ..., "80+", or `UNKNOWN`."""
    if age is None:
        return UNKNOWN

    first = min(int(age // _BAND) * _BAND, _OLDEST)
    if first == _OLDEST:
        return f"{first}+"

    return f"{first}–{first + _BAND - 1}"


BANDS = tuple(band(first) for first in range(0, _OLDEST + 1, _BAND))
"""All bands, from young to old."""


def _columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that are known here, under the names that they have here."""
    lower = {str(key).strip().lower(): value for key, value in row.items()}
    columns: dict[str, Any] = {}
    for name, aliases in COLUMNS.items():
        value = next((lower[alias] for alias in aliases if alias in lower), None)
        if value is None:
            continue

        text = str(value).strip().lower()
        missing = text in ("", "nan", "none", "na", "n/a", "unknown")
        columns[name] = _years(text) if name == "age" else UNKNOWN if missing else text

    return columns


def _years(text: str) -> float | None:
    """Return an age in years from `70`, `70.0` or DICOM's `070Y`; None for anything else."""
    try:
        years = float(text.removesuffix("y"))
    except ValueError:
        return None

    if math.isfinite(years) and 0 <= years < 130:
        return years

    return None


def _tables(folder: Path) -> Iterator[list[dict[str, str]]]:
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix.lower() in _SUFFIXES and path.stat().st_size <= _LARGEST:
            with suppress(InputError):  # no table
                yield read_csv(path, ())


def _file_name(path: str) -> str:
    return PurePosixPath(path).name


def _by_name(rows: Sequence[Mapping[str, Any]], ids: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return id -> row, by the first column that names items: whole, by file name, or by that without its ending."""
    heads = {str(key).strip().lower(): key for key in rows[0]} if rows else {}
    for column in (heads[name] for name in _NAMES if name in heads):
        for short in (str, _file_name, lambda text: _file_name(text).partition(".")[0]):
            rows_by_name = {short(str(row[column])): row for row in rows}
            ids_by_name = {short(ident): ident for ident in ids}
            if len(ids_by_name) == len(ids) and (both := ids_by_name.keys() & rows_by_name.keys()):
                return {ids_by_name[name]: rows_by_name[name] for name in both}

    return {}
