"""What the data contain about each case beyond its label: centre, age, sex, localisation.

These are personal data. They are read from the data folder on demand and never written into a run folder.

Tables of shipped data sets and of users are found alike: any comma- or tab-separated table at the top of the data
folder with a column that names the items (`image_id`, `image`, `file`, `id`, ...).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from medfl.core import Document, InputError, alike, as_number, listed, words_of
from medfl.datasets.readers.tables import read_csv
from medfl.problem import Problem

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
"""Name here -> names in tables, in lower case."""
UNKNOWN = "not stated"
_NAMES = words_of("image_id image isic_id file filename file_name case case_id id")
_SUFFIXES = (".csv", ".tsv", ".tab", "")
_LARGEST = 1 << 26  # bytes of a table
_BAND = 20  # years
_OLDEST = 80
_MOST = 130
_NO_END = 1e9
_YEARS = {"": 1, "y": 1, "m": 1 / 12, "w": 7 / 365.25, "d": 1 / 365.25}
"""First letter of a unit -> years in it."""
_AGE = re.compile(
    r"([<>]=?|[≤≥])? *(\d+(?:\.\d+)?)(?: *(?:[-–—]|to) *(\d+(?:\.\d+)?))? *(\+)? *"
    r"(y(?:(?:ea)?rs?)?|m(?:o(?:nth)?s?)?|w(?:(?:ee)?ks?)?|d(?:ays?)?|)\.?(?: old)?"
)


def read(bundle: Problem, section: str, folder: str) -> dict[str, Document]:
    """Return the known data on each item of a section: id -> {"centre", "group", "age", "sex", "localisation"}.

    Age is in years, or the unparsed text; a key that the data do not have is omitted, a value missing for a case is
    `UNKNOWN`, for age None.
    """
    items = bundle.items(section)
    cases: dict[str, Document] = {}
    for item in items:
        cases[str(item["id"])] = {
            name: str(item[name]) for name in ("centre", "group") if name in item
        }

    entries = bundle.data(section)
    if isinstance(entries, list):
        for item, entry in zip(items, entries, strict=True):
            if isinstance(entry, Mapping):
                cases[str(item["id"])] |= _columns(entry)

    paths = sorted(Path(folder).iterdir()) if folder and Path(folder).is_dir() else []
    for path in paths:
        rows = []
        if path.is_file() and path.suffix.lower() in _SUFFIXES and path.stat().st_size <= _LARGEST:
            with suppress(InputError):  # not a table
                rows = read_csv(path, ())

        for ident, row in _by_name(rows, list(cases)).items():
            cases[ident] = {**_columns(row), **cases[ident]}  # the data list takes precedence

    present = set[str]().union(*cases.values())
    for name in COLUMNS:
        if name in present:
            for row in cases.values():
                row.setdefault(name, None if name == "age" else UNKNOWN)

    return cases


def band(age: float | str | None) -> str:
    """Return the 20-year band of an age: "0–19", ..., "80+", or `UNKNOWN`, also for unparsed text."""
    if age is None or isinstance(age, str):
        return UNKNOWN

    first = min(int(age // _BAND) * _BAND, _OLDEST)
    if first == _OLDEST:
        return f"{first}+"

    return f"{first}–{first + _BAND - 1}"


def unread(ages: Iterable[object]) -> list[str]:
    """Return a line on ages that could not be parsed; none if all were."""
    texts = [repr(age) for age in ages if isinstance(age, str)]
    if not texts:
        return []

    return [
        f"{len(texts)} ages are not read, or fit several bands, and count as {UNKNOWN}: "
        f"{listed(sorted({*texts}))}; write years, as 70, 070Y, 018M, 70-79 or >89"
    ]


BANDS = tuple(map(band, range(0, _OLDEST + 1, _BAND)))
"""All bands, from young to old."""


def _columns(row: Mapping[str, object]) -> Document:
    """Return the known columns of a row, under the names used here."""
    lower = {str(key).strip().lower(): value for key, value in row.items()}
    columns = {}
    for name, aliases in COLUMNS.items():
        value = next((lower[alias] for alias in aliases if alias in lower), None)
        if value is None:
            continue

        text = str(value).strip().lower()
        missing = text in ("", "nan", "none", "na", "n/a", "unknown")
        if name == "age":
            columns[name] = None if missing else _years(text)
        else:
            columns[name] = UNKNOWN if missing else text

    return columns


def _years(text: str) -> float | str:
    """Return an age in years, or the text if it is not an age or fits several bands.

    Accepted are `70`, `70.0`, DICOM's `070Y`, `018M`, `052W` or `030D`, `18 months`, `70-79`, `>89`, `89+` or `<1`.
    """
    match = _AGE.fullmatch(text.replace(",", "."))
    if match is None:
        return text

    sign, first, last, plus, unit = match.groups()
    low = float(first)
    high = float(last or first)
    if plus or sign in (">", ">=", "≥"):
        # in whole units: > 89 is from 90 on
        low += sign == ">"
        high = _NO_END
    elif sign:
        high -= sign == "<"
        low = 0.0

    years = _YEARS[unit[:1]]
    low *= years
    high *= years
    if low > high or low >= _MOST or band(low) != band(high):
        return text

    return low if high >= _MOST else (low + high) / 2


def _file_name(path: str) -> str:
    return PurePosixPath(path).name


def _stem(path: str) -> str:
    return _file_name(path).partition(".")[0]


def _number(path: str) -> str:
    return as_number(_stem(path))


Row = Mapping[str, str]
"""Column -> cell."""


def _by_name(rows: Sequence[Row], ids: Sequence[str]) -> dict[str, Row]:
    """Return id -> row, by the first column that names items: exactly, by file name, without extension, or by number.

    An item named by several rows has none if they differ in the columns known here.
    """
    heads = {str(key).strip().lower(): key for key in rows[0]} if rows else {}
    for column in [heads[name] for name in _NAMES if name in heads]:
        matches: dict[str, Row] = {}
        for short in (str, _file_name, _stem, _number):
            rows_by_name = dict[str, Row]()
            # a row without a name is of no case
            contradicted = {""}
            for row in rows:
                name = short(alike(str(row[column])))
                # rows that repeat a name have to agree
                if _columns(rows_by_name.setdefault(name, row)) != _columns(row):
                    contradicted.add(name)

            ids_by_name = {short(alike(ident)): ident for ident in ids}
            both = ids_by_name.keys() & rows_by_name.keys() - contradicted
            # names by which two items are the same tell neither
            if len(ids_by_name) == len(ids) and len(both) > len(matches):
                matches = {ids_by_name[name]: rows_by_name[name] for name in both}

        if matches:
            return matches

    return {}
