"""Which columns of a table say what an image shows: one class, several findings, or a number; and their cells."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from medfl.core.errors import InputError, did_you_mean
from medfl.core.names import composed, listed

Rows = Sequence[Mapping[str, str]]

_WORDS = """
    file filename file_name image image_id image_name image_index isic_id img path id name
"""
FILES = tuple(_WORDS.split())
_WORDS = """
    diagnosis dx class class_name label_name label category target finding finding_labels findings
    labels
"""
LABELS = tuple(_WORDS.split())
CASES = {
    "patient": ("patient", "patient_id", "subject", "subject_id"),
    "centre": ("centre", "center", "site"),
    "section": ("section",),
}
KINDS = ("classification", "multilabel", "regression")
UNCERTAIN = {"ignore": math.nan, "zeros": 0.0, "ones": 1.0}
BLANK = {"ignore": math.nan, "zeros": 0.0}
_TAKEN = {
    "ignore": "unknown: no part of loss and scores",
    "zeros": "taken as absent",
    "ones": "taken as present",
}
NOTHING = {"nan", "none", "na", "n/a", "null"}
"""What some programs write for a missing value."""
_SURE = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
_UNSURE = {"-1", "-1.0", "?", "u", "uncertain"}
_EMPTY = {"", "unknown", *NOTHING}
_NO_FINDING = {"no_finding", "no_findings", "nofinding", "normal", "none"}
_WORDS = """
    age age_approx age_at_diagnosis age_years patient_age sex gender patient_sex patient_gender male
    female race view view_position laterality hospital institution year number
"""
_OF_CASES = {*_WORDS.split()}
"""What tables call columns about a case, and not about what its image shows."""
_WORDS = """
    id patient file path index pixel spacing width height split fold follow date unnamed
"""
_OF_FILES = {*_WORDS.split()}
"""Words in the names of such columns."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_COMMA = re.compile(r"[+-]?\d+,\d+")
_WITH_UNIT = re.compile(r"[+-]?\d+([.,]\d+)?\s*[^\W\d_%][\w/²³]*|[+-]?\d+([.,]\d+)?\s*%")
_UNIT = re.compile(
    r"(?:[_ ]|[(\[])(mm|cm|ml|l|kg|g|s|ms|hu|months|weeks|days|years|percent)[)\]]?$", re.I
)
_MOST_CLASSES = 20  # different whole numbers, above which a column of such is one of numbers
_MOSTLY = 0.9


@dataclass(frozen=True)
class Wanted:
    """How a table is to be read, as the user says it, or a bundle.

    Attributes:
        task: of `KINDS`, "" where the table tells it.
        columns: of the labels, () where their names and values tell them.
        names: classes, findings or numbers, () where the table tells them.
        uncertain: what an uncertain finding (-1, ?, u, uncertain) is: of `UNCERTAIN`.
        blank: what a finding is of which a cell says nothing: of `BLANK`.
        roles: file, patient, centre, section -> the column that has it, of those whose columns are named otherwise
            than `FILES` and `CASES`.
    """

    task: str = ""
    columns: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    uncertain: str = "ignore"
    blank: str = "ignore"
    roles: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InputError: one that is none of the allowed.
        """
        for name, value, allowed in (
            ("task", self.task or KINDS[0], KINDS),
            ("uncertain", self.uncertain, tuple(UNCERTAIN)),
            ("blank", self.blank, tuple(BLANK)),
        ):
            if value not in allowed:
                raise InputError(
                    f"{name} {value!r:.40}", f"one of {', '.join(allowed)}", "choose one of them"
                )


@dataclass(frozen=True)
class Meaning:
    """What the columns of labels say.

    Attributes:
        task: of `KINDS`.
        values: of each row its class, "" for none, or its findings or numbers, NaN where unknown, () for none known.
        names: of the findings or numbers, () of classes.
        column: the one that has all findings, or was named by the user; "" otherwise.
        text: in words.
        notes: one line each.
    """

    task: str
    values: Sequence[str] | Sequence[tuple[float, ...]]
    names: tuple[str, ...] = ()
    column: str = ""
    text: str = ""
    notes: tuple[str, ...] = ()


def head(name: str) -> str:
    """Return a column's name in the form that is compared."""
    return re.sub(r"[\s_-]+", "_", composed(str(name)).strip().lower())


def find_column(path: Path, columns: Sequence[str], name: str, flag: str) -> str:
    """Return the column of a table that a user names, whatever its capitals, spaces and underscores.

    Raises:
        InputError: there is none; names the columns and the flag that takes one.
    """
    if name in columns:
        return name

    by_head = {head(column): column for column in reversed(columns)}
    if head(name) not in by_head:
        titles = [column.strip() for column in columns]
        advice = did_you_mean(name, titles, f"give one of them with {flag}")
        raise InputError(f"{path} has no column {name!r}", f"it has {listed(titles, 20)}", advice)

    return by_head[head(name)]


def unit_of(name: str) -> str:
    """Return the unit in a column's name, as of `hc_mm` or `volume (ml)`; "" without one."""
    match = _UNIT.search(name)
    return match[1] if match else ""


def understood(path: Path, rows: Rows, image_column: str, wanted: Wanted) -> Meaning:
    """Return what a table says of each row's image.

    Without columns that are wanted, it is the first of `LABELS`; else columns of 0 and 1, one for each class where each
    row has at most one 1, else one for each finding; else a column with "|" between findings; else the column of
    numbers.

    Raises:
        InputError: no such columns, several where it is not clear which, or a cell that is none of what is read.
    """
    return _Table(path, rows, image_column, wanted).meaning()


class _Table:
    def __init__(self, path: Path, rows: Rows, image_column: str, wanted: Wanted) -> None:
        self._path = path
        self._rows = rows
        self._image_column = image_column
        self._wanted = wanted
        self._columns = [name for name in rows[0] if name] if rows else []
        known_heads = {*FILES, *map(head, wanted.roles.values())}.union(*CASES.values())
        self._free = []
        for name in self._columns:
            spelled = head(name)
            if name != image_column and spelled not in known_heads:
                self._free.append(name)

        self._about = [name for name in self._free if not _is_about_cases(name)]
        self._texts: dict[str, list[str]] = {}

    def meaning(self) -> Meaning:
        requested = self._wanted
        by_head = {head(name): name for name in reversed(self._columns)}
        columns = []
        for name in requested.columns:
            columns.append(find_column(self._path, self._columns, name, "--label-column"))

        label = next((by_head[name] for name in LABELS if name in by_head), None)
        if not columns and label is not None and label != self._image_column:
            columns = [label]

        if requested.task in KINDS[1:] and requested.names and not requested.columns:
            own_columns = [by_head.get(head(name), "") for name in requested.names]
            has_all_in_one = requested.task == "multilabel" and bool(columns)
            if any(own_columns) or not has_all_in_one:
                return self._of_a_bundle(own_columns)

        if len(columns) == 1:
            return self._of_one(columns[0])

        if columns:
            return self._of_several(columns, are_named=True)

        if requested.task == "regression":
            marks = []
        else:
            marks = self._marks()

        if len(marks) > 1 or (marks and requested.task == "multilabel"):
            return self._of_several(marks, are_named=False)

        return self._found()

    # One column

    def _of_one(self, column: str) -> Meaning:
        requested = self._wanted
        cells = self._cells(column)
        task = requested.task or _task_of(cells)
        if task == "classification":
            column_name = column if requested.columns else ""
            note: tuple[str, ...] = ()
            if not requested.task and all(map(_NUMBER.fullmatch, filter(None, cells))):
                note = (
                    f"the numbers in column {column!r} are taken as classes; --task regression takes them as such",
                )

            return Meaning(
                task, cells, column=column_name, text=f"classes by column {column!r}", notes=note
            )

        if task == "regression":
            return self._numbers([column])

        parted = any("|" in cell for cell in cells)
        if not parted and all(cell.lower() in _SURE or _is_unknown(cell) for cell in cells):
            return self._findings([column])

        return self._parted(column, cells)

    def _parted(self, column: str, cells: Sequence[str]) -> Meaning:
        """Return the findings of a column that has "|" between them."""
        sets: list[set[str] | None] = []
        for cell in cells:
            parts = {" ".join(part.split()) for part in cell.split("|")} - {""}
            if not parts or cell.lower() in NOTHING:
                sets.append(None)
            else:
                sets.append({part for part in parts if head(part) not in _NO_FINDING})

        present = set[str]().union(*(entry for entry in sets if entry))
        names = self._wanted.names or tuple(sorted(present))
        if not names:
            raise InputError(
                f"{self._path}: column {column!r} names no finding",
                "names of findings, with | between several of one image",
                "name the column of findings with --label-column",
            )

        for row, entry in enumerate(sets):
            if unknown := sorted((entry or set()) - set(names)):
                raise InputError(
                    f"{self._path}: {unknown[0]!r} in column {column!r}, {self._row(row)}",
                    f"the findings {', '.join(names)}",
                    "correct the cell",
                )

        values = []
        for entry in sets:
            values.append(() if entry is None else tuple(float(name in entry) for name in names))

        text = f"{len(names)} findings by column {column!r}, with | between several: {', '.join(names)}"
        return Meaning("multilabel", values, names, column, text)

    # Several columns

    def _of_several(self, columns: Sequence[str], are_named: bool) -> Meaning:
        requested = self._wanted
        if requested.task == "regression" or (
            are_named and not requested.task and not all(map(self._is_marks, columns))
            and all(map(self._is_numbers, columns))
        ):  # fmt: skip
            return self._numbers(columns)

        full = [name for name in columns if set(self._lower(name)) <= _SURE.keys()]
        counts = [
            sum(_SURE[cell] for cell in cells)
            for cells in zip(*map(self._lower, full), strict=True)
        ]
        has_one = len(full) > 1 and max(counts, default=0) == 1
        if not requested.task and has_one and min(counts) == 1 and len(full) < len(columns):
            remaining = [name for name in columns if name not in full]
            raise InputError(
                f"{self._path}: each row has one 1 in the columns {', '.join(full)}; {', '.join(remaining)} have empty "
                "or uncertain cells",
                "classes or findings",
                "give --task classification for the first, multilabel for all, or name columns with --label-column",
            )

        if requested.task == "classification" or (
            not requested.task and has_one and full == [*columns]
        ):
            return self._exclusive(full, counts)

        findings = columns
        if not are_named:
            findings = [name for name in columns if head(name) not in _NO_FINDING]

        return self._findings(findings)

    def _exclusive(self, columns: Sequence[str], counts: Sequence[float]) -> Meaning:
        """Return the classes of columns of which each row has a 1 in that of its own, as in the tables of ISIC."""
        if len(columns) < 2:
            raise self._nothing()

        values = []
        for row, cells in enumerate(zip(*map(self._lower, columns), strict=True)):
            names = [name for name, cell in zip(columns, cells, strict=True) if _SURE[cell]]
            if len(names) > 1:
                raise InputError(
                    f"{self._path}: {self._rows[row][self._image_column]} is of the classes {', '.join(names)}",
                    "one class an image",
                    "keep one of them, or take --task multilabel, whose images have several",
                )

            values.append(names[0] if names else "")

        notes: tuple[str, ...] = ()
        if not all(counts) and not self._wanted.task:
            notes = (
                f"{sum(not count for count in counts)} rows have no 1: of no class; --task multilabel takes them as "
                "images without any finding",
            )

        return Meaning(
            "classification",
            values,
            text=f"classes by the columns {', '.join(columns)}",
            notes=notes,
        )

    def _of_a_bundle(self, columns: Sequence[str]) -> Meaning:
        """Return the findings or numbers of a bundle, each in a column of its name, "" where there is none."""
        requested = self._wanted
        if not any(columns):
            raise InputError(
                f"{self._path} has no column {', '.join(map(repr, requested.names))}",
                f"a column for each of them; it has {listed(self._columns, 20)}",
                "name the columns so",
            )

        if requested.task == "multilabel":
            return self._findings(columns)

        return self._numbers(columns)

    def _findings(self, columns: Sequence[str]) -> Meaning:
        requested = self._wanted
        names = requested.names or tuple(name.strip() for name in columns)
        if not columns:
            raise self._nothing()
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise InputError(f"{self._path} has two columns {twice[0]!r}", "one", "rename one")

        nothing = set[int]()
        for name in self._free:
            if head(name) in _NO_FINDING and name not in columns and self._is_marks(name):
                nothing |= {row for row, cell in enumerate(self._lower(name)) if _SURE.get(cell)}

        by_column = []
        blanks = Counter[str]()
        unsure = Counter[str]()
        contradicted = set[int]()
        for name, column in zip(names, columns, strict=True):
            numbers = []
            for row, cell in enumerate(self._lower(column)):
                value = _SURE.get(cell)
                if value is None and cell in _UNSURE:
                    unsure[name] += 1
                    value = UNCERTAIN[requested.uncertain]
                elif value is None and cell in _EMPTY:
                    blanks[name] += 1
                    value = (
                        0.0 if row in nothing else BLANK[requested.blank] if column else math.nan
                    )
                elif value is None:
                    raise self._wrong(column, row, "0, 1, -1 (uncertain) or nothing")

                if value == 1 and row in nothing:
                    contradicted.add(row)
                numbers.append(value)

            by_column.append(numbers)

        notes = []
        if contradicted:
            notes.append(
                f"{len(contradicted)} rows have a finding, and a column that says that there is none: the finding "
                f"counts, first {self._row(min(contradicted))}"
            )

        absent = [name for name, column in zip(names, columns, strict=True) if not column]
        if absent:
            notes.append(f"the table has no column {listed([*map(repr, absent)])}: unknown here")

        for counts, subject, choice, flag in (
            (unsure, "uncertain (-1, ?)", requested.uncertain, "--uncertain ignore|zeros|ones"),
            (blanks, "blank", requested.blank, "--blank ignore|zeros"),
        ):
            total = sum(count for name, count in counts.items() if name not in absent)
            if total:
                notes.append(f"{total} cells are {subject}: {_TAKEN[choice]} ({flag})")

        taken = f"{len(names)} findings by the columns {', '.join(names)}"
        return Meaning("multilabel", _rows_of(by_column), names, "", taken, tuple(notes))

    # Numbers

    def _numbers(self, columns: Sequence[str]) -> Meaning:
        names = self._wanted.names or tuple(name.strip() for name in columns)
        by_column = []
        for column in columns:
            numbers = []
            for row, cell in enumerate(self._lower(column)):
                if cell in _EMPTY:
                    numbers.append(math.nan)
                elif _NUMBER.fullmatch(cell) and math.isfinite(float(cell)):
                    numbers.append(float(cell))
                else:
                    raise self._wrong(column, row, "a number with a decimal point, or nothing")

            by_column.append(numbers)

        text = f"numbers by column {listed([*map(repr, names)], 20)}"
        return Meaning("regression", _rows_of(by_column), names, "", text)

    def _found(self) -> Meaning:
        """Return what the only column says that can have findings or numbers."""
        requested = self._wanted
        parted = [name for name in self._about if any("|" in cell for cell in self._cells(name))]
        if len(parted) == 1 and requested.task in ("", "multilabel"):
            return self._parted(parted[0], self._cells(parted[0]))

        numbers = []
        for name in self._about:
            is_free = not self._is_marks(name) or requested.task == "regression"
            if is_free and self._is_numbers(name) and len(set(self._cells(name)) - {""}) > 1:
                numbers.append(name)

        if requested.task in ("", "regression"):
            if len(numbers) == 1:
                return self._numbers(numbers)
            if numbers:
                raise InputError(
                    f"{self._path} has several columns of numbers: {listed(numbers, 20)}",
                    "the one that is to be predicted",
                    f"name it with --label-column, as --label-column {numbers[0]}",
                )

        raise self._nothing()

    def _nothing(self) -> InputError:
        for name in self._about:
            odd = [
                row
                for row, cell in enumerate(self._cells(name))
                if _COMMA.fullmatch(cell) or _WITH_UNIT.fullmatch(cell)
            ]
            filled = sum(bool(cell) for cell in self._cells(name))
            if odd and len(odd) >= _MOSTLY * filled:
                return self._wrong(name, odd[0], "a number with a decimal point, or nothing")

        return InputError(
            f"{self._path} has no column of classes, findings or numbers; it has {listed(self._columns, 20)}",
            f"one called {', '.join(LABELS)}, columns of 0 and 1, one with | between findings, or one of numbers",
            "name it with --label-column",
        )

    # Cells

    def _cells(self, column: str) -> list[str]:
        if column not in self._texts:
            self._texts[column] = [" ".join((row[column] or "").split()) for row in self._rows]

        return self._texts[column]

    def _lower(self, column: str) -> list[str]:
        """Return the cells of a column in lower case, empty ones where the table has none."""
        if not column:
            return [""] * len(self._rows)

        return [cell.lower() for cell in self._cells(column)]

    def _is_marks(self, column: str) -> bool:
        cells = self._lower(column)
        return all(cell in _SURE or _is_unknown(cell) for cell in cells) and any(
            cell in _SURE for cell in cells
        )

    def _is_numbers(self, column: str) -> bool:
        cells = [cell for cell in self._lower(column) if cell not in _EMPTY]
        return bool(cells) and all(map(_NUMBER.fullmatch, cells))

    def _marks(self) -> list[str]:
        """Return the columns of 0 and 1.

        Raises:
            InputError: nearly all cells of a column are such, and another is a text.
        """
        marks = []
        for name in self._about:
            if self._is_marks(name):
                marks.append(name)
                continue

            cells = self._lower(name)
            odd = [
                row
                for row, cell in enumerate(cells)
                if not (cell in _SURE or _is_unknown(cell) or _NUMBER.fullmatch(cell))
            ]
            sure = sum(cell in _SURE for cell in cells)
            if odd and sure >= _MOSTLY * (sure + len(odd)):
                raise self._wrong(name, odd[0], "0, 1, -1 (uncertain) or nothing")

        return marks

    def _row(self, row: int) -> str:
        """Return a row as a spreadsheet counts it, and its image."""
        return f"row {row + 2} ({self._rows[row][self._image_column]})"

    def _wrong(self, column: str, row: int, allowed: str) -> InputError:
        cell = self._cells(column)[row]
        advice = "correct the cell, or leave it empty where nobody knows"
        if _COMMA.fullmatch(cell):
            advice = f"write {cell.replace(',', '.')}, with a decimal point"
        elif allowed.startswith("a number") and _WITH_UNIT.fullmatch(cell):
            advice = "write the number alone, and its unit into the column's name, as hc_mm"

        return InputError(
            f"{self._path}: {cell!r} in column {column!r}, {self._row(row)}", allowed, advice
        )


def _rows_of(columns: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Return the values of each row, () where all are unknown."""
    rows = []
    for values in zip(*columns, strict=True):
        is_known = not all(map(math.isnan, values))
        rows.append(values if is_known else ())

    return rows


def _is_about_cases(name: str) -> bool:
    """Tell whether a column says something of a case or its file, and not of what the image shows."""
    spelled = head(name)
    return spelled in _OF_CASES or not _OF_FILES.isdisjoint(re.split(r"[\W_]+", spelled))


def _is_unknown(cell: str) -> bool:
    return cell in _UNSURE or cell in _EMPTY


def _task_of(cells: Sequence[str]) -> str:
    """Return the task that the cells of a single column tell."""
    if any("|" in cell for cell in cells):
        return "multilabel"

    is_known = {cell for cell in cells if cell.lower() not in _EMPTY}
    if is_known and all(map(_NUMBER.fullmatch, is_known)):
        are_whole = all(float(cell).is_integer() for cell in is_known)
        if not are_whole or len(is_known) > _MOST_CLASSES:
            return "regression"

    return "classification"
