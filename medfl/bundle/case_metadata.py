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
    cases: dict[str, dict[str, Any]] = {}
    for item in items:
        cases[str(item["id"])] = {
            name: str(item[name]) for name in ("centre", "group") if name in item
        }

    entries = bundle.data(section)
    if isinstance(entries, list):
        for item, entry in zip(items, entries, strict=True):
            if isinstance(entry, Mapping):
                cases[str(item["id"])] |= _columns(entry)

    if folder and Path(folder).is_dir():
        for rows in _tables(Path(folder)):
            for ident, row in _by_name(rows, list(cases)).items():
                cases[ident] = {**_columns(row), **cases[ident]}  # the data list has precedence

    present = set[str]().union(*cases.values())
    for name in COLUMNS:
        if name in present:
            for row in cases.values():
                row.setdefault(name, None if name == "age" else UNKNOWN)

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


def _columns(row: Mapping[str, object]) -> dict[str, Any]:
    """Return the columns of a row that are known here, under the names that they have here."""
    lower = {str(key).strip().lower(): value for key, value in row.items()}
    columns: dict[str, Any] = {}
    for name, aliases in COLUMNS.items():
        value = next((lower[alias] for alias in aliases if alias in lower), None)
        if value is None:
            continue

        text = str(value).strip().lower()
        missing = text in ("", "nan", "none", "na", "n/a", "unknown")
        if name == "age":
            columns[name] = _years(text)
        else:
            columns[name] = UNKNOWN if missing else text

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


def _stem(path: str) -> str:
    return _file_name(path).partition(".")[0]


def _by_name(rows: Sequence[Mapping[str, str]], ids: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """Return id -> row, by the first column that names items: whole, by file name, or by that without its ending."""
    heads = {str(key).strip().lower(): key for key in rows[0]} if rows else {}
    for column in [heads[name] for name in _NAMES if name in heads]:
        for short in (str, _file_name, _stem):
            rows_by_name = {short(str(row[column])): row for row in rows}
            ids_by_name = {short(ident): ident for ident in ids}
            if len(ids_by_name) == len(ids) and (both := ids_by_name.keys() & rows_by_name.keys()):
                return {ids_by_name[name]: rows_by_name[name] for name in both}

    return {}
