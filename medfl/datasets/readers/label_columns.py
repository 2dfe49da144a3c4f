"""A table of labels: which columns describe an image (a class, findings, a number), and the row of each image."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from medfl.core import (
    Floats,
    InputError,
    alike,
    as_number,
    composed,
    did_you_mean,
    either,
    listed,
    not_among,
    respelled,
    without,
    words_of,
)
from medfl.datasets.readers import cases, tables
from medfl.datasets.readers.cases import head
from medfl.datasets.readers.unlabelled import without_ending

Rows = Sequence[Mapping[str, str]]

FILES = words_of("""
    file filename file_name image image_id image_name image_index isic_id img path id name
""")
LABELS = words_of("""
    diagnosis dx class class_name label_name label category target finding finding_labels findings
    labels
""")
KINDS = ("classification", "multilabel", "regression")
UNCERTAIN = {"ignore": math.nan, "zeros": 0.0, "ones": 1.0}
BLANK = {"ignore": math.nan, "zeros": 0.0}
_TAKEN = {
    "ignore": "unknown: no part of loss and scores",
    "zeros": "taken as absent",
    "ones": "taken as present",
}
_NO = """
    0 0.0 false no n absent negative neg nein falsch non faux falso nee onwaar não nej falskt falsk nei
    usann ei epätosi nie fałsz ne nepravda nem hamis nu fals hayır hayir yanlış yanliş όχι οχι ψευδής
    ψευδης нет ложь ні хибність
"""
_YES = """
    1 1.0 true yes y present positive pos ja wahr oui vrai sí sì si verdadero vero waar sim verdadeiro
    sant sand sann kyllä tosi tak prawda ano pravda igen igaz da adevărat cert evet doğru ναι αληθής
    αληθης да истина так істина
"""
"""What people and spreadsheets write for no and yes, in lower case."""
_SURE = dict.fromkeys(_NO.split(), 0.0) | dict.fromkeys(_YES.split(), 1.0)
_UNSURE = {"-1", "-1.0", "?", "u", "uncertain", "unklar"}
_EMPTY = {"", "unknown", "unbekannt", *cases.NOTHING}
_NO_FINDING = {"no_finding", "no_findings", "nofinding", "normal", "none"}
_OF_CASES = {
    *words_of("""
    age age_approx age_at_diagnosis age_years patient_age sex gender patient_sex patient_gender male
    female race view view_position laterality hospital institution year number alter geschlecht
""")
}
"""What tables call columns about a case, and not about what its image shows."""
_OF_FILES = {
    *words_of("""
    id patient file path index pixel spacing width height split fold follow date unnamed
""")
}
"""Words in the names of such columns."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_CODE = re.compile(r"(-9+|9{3,})(\.0*)?")
"""What stands in some tables for a number that nobody knows."""
_ALONE = re.compile(r"(-[0-9]+|9{3,})(\.0*)?")
"""The same where only one number is below 0."""
_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d+),\d+")
_WITH_UNIT = re.compile(r"[+-]?\d+([.,]\d+)?\s*[^\W\d_%][\w/²³]*|[+-]?\d+([.,]\d+)?\s*%")
_UNIT = re.compile(
    r"(?:[_ ]|[(\[])(mm|cm|ml|l|kg|g|s|ms|hu|months|weeks|days|years|percent)[)\]]?$", re.I
)
_MOST_CLASSES = 20  # different whole numbers, above which a column of such is one of numbers
_LARGEST = float(np.finfo(np.float32).max)
_A_NUMBER = f"a number with a decimal point, up to {_LARGEST:.2g}, or nothing"
_NUMBERED = "/"  # before a number, as no name begins
_MOSTLY = 0.9  # of the cells, from which on the others are taken for mistakes


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
            than `FILES` and `cases.COLUMNS`.
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
                    f"{name} {value!r:.40}", f"one of {either(allowed)}", "choose one of them"
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
        known_heads = {*FILES, *map(head, wanted.roles.values())}.union(*cases.COLUMNS.values())
        self._free = []
        for name in self._columns:
            if name != image_column and head(name) not in known_heads:
                self._free.append(name)

        self._about = [name for name in self._free if not _is_about_cases(name)]
        self._texts: dict[str, list[str]] = {}

    def meaning(self) -> Meaning:
        requested = self._wanted
        by_head = {head(name): name for name in reversed(self._columns)}
        columns = [
            find_column(self._path, self._columns, name, "--label-column")
            for name in requested.columns
        ]

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

        notes: list[str] = []
        marks = []
        if requested.task != "regression":
            marks = self._marks(notes)

        if len(marks) > 1 or (marks and requested.task == "multilabel"):
            meaning = self._of_several(marks, are_named=False)
            return replace(meaning, notes=(*meaning.notes, *notes))

        return self._found()

    # One column

    def _of_one(self, column: str) -> Meaning:
        requested = self._wanted
        cells = self._cells(column)
        task = requested.task or _task_of(cells)
        if task == "classification":
            note: tuple[str, ...] = ()
            if not requested.task and all(map(_NUMBER.fullmatch, filter(None, cells))):
                note = (
                    f"the numbers in column {column!r} are taken as classes; --task regression takes them as such",
                )

            return Meaning(
                task,
                cells,
                column=column * bool(requested.columns),
                text=f"classes by column {column!r}",
                notes=note,
            )

        if task == "regression":
            return self._numbers([column])

        has_outcomes = {"0", "1"} <= {*cells} and "|" not in "".join(cells)
        if has_outcomes or all(map(_is_mark, self._lower(column))):
            return self._findings([column])

        return self._parted(column, cells)

    def _parted(self, column: str, cells: Sequence[str]) -> Meaning:
        """Return the findings of a column that has "|" between them."""
        sets: list[set[str] | None] = []
        for cell in cells:
            parts = {" ".join(part.split()) for part in cell.split("|")} - {""}
            if not parts or cell.lower() in cases.NOTHING:
                sets.append(None)
            else:
                sets.append({part for part in parts if head(part) not in _NO_FINDING})

        present = sorted(set[str]().union(*filter(None, sets)))
        spelled, notes = _one_spelling(present, self._wanted.names)
        form = dict(zip(present, spelled, strict=True))
        sets = [entry and {*map(form.__getitem__, entry)} for entry in sets]
        names = self._wanted.names or tuple(sorted({*spelled}))
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

        values = [
            () if entry is None else tuple(float(name in entry) for name in names) for entry in sets
        ]
        return Meaning(
            "multilabel",
            values,
            names,
            column,
            f"{len(names)} findings by column {column!r}, with | between several: {', '.join(names)}",
            tuple(notes),
        )

    # Several columns

    def _of_several(self, columns: Sequence[str], are_named: bool) -> Meaning:
        requested = self._wanted
        if requested.task == "regression" or (
            are_named and not requested.task and not all(map(self._is_marks, columns))
            and all(map(self._is_numbers, columns))
        ):  # fmt: skip
            return self._numbers(columns)

        # classes have no unknown cells, so only columns without any can be of them
        full = [name for name in columns if set(self._lower(name)) <= _SURE.keys()]
        marks = np.array([[_SURE[cell] for cell in self._lower(name)] for name in full])
        counts = marks.sum(0)
        # a class has an image where not each image has one; a finding may have none
        has_one = len(full) > 1 and counts.max() == 1 and (counts.all() or marks.any(1).all())
        if not requested.task and has_one and counts.all() and len(full) < len(columns):
            remaining = not_among(columns, full)
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

    def _exclusive(self, columns: Sequence[str], counts: Floats) -> Meaning:
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

            values.append("".join(names))

        notes: tuple[str, ...] = ()
        if not counts.all() and not self._wanted.task:
            notes = (
                f"{(counts == 0).sum()} rows have no 1: of no class; --task multilabel takes them as "
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

        nothing = set()
        for name in self._free:
            if head(name) in _NO_FINDING and name not in columns and self._is_marks(name):
                nothing |= {row for row, cell in enumerate(self._lower(name)) if _SURE.get(cell)}

        by_column = []
        blanks = 0
        unsure = 0
        contradicted = set()
        for column in columns:
            numbers = []
            for row, cell in enumerate(self._lower(column)):
                value = _SURE.get(cell)
                if value is None and cell in _UNSURE:
                    unsure += 1
                    value = UNCERTAIN[requested.uncertain]
                elif value is None and cell in _EMPTY:
                    blanks += bool(column)
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

        for total, subject, choice, flag in (
            (unsure, "uncertain (-1, ?)", requested.uncertain, "--uncertain ignore|zeros|ones"),
            (blanks, "blank", requested.blank, "--blank ignore|zeros"),
        ):
            if total:
                notes.append(f"{total} cells are {subject}: {_TAKEN[choice]} ({flag})")

        return Meaning(
            "multilabel",
            _rows_of(by_column),
            names,
            "",
            f"{len(names)} findings by the columns {', '.join(names)}",
            tuple(notes),
        )

    # Numbers

    def _numbers(self, columns: Sequence[str]) -> Meaning:
        names = self._wanted.names or tuple(name.strip() for name in columns)
        notes = []
        by_column = []
        for column in columns:
            numbers = []
            for row, cell in enumerate(self._lower(column)):
                if cell in _EMPTY:
                    numbers.append(math.nan)
                elif _NUMBER.fullmatch(cell) and abs(float(cell)) <= _LARGEST:
                    numbers.append(float(cell))
                else:
                    raise self._wrong(column, row, _A_NUMBER)

            by_column.append(numbers)
            below = {cell for cell in self._lower(column) if cell.startswith("-")}
            pattern = _CODE if len(below) > 1 else _ALONE
            codes = filter(pattern.fullmatch, self._lower(column))
            for code, count in Counter(codes).items():
                notes.append(
                    f"column {column!r} has {code} in {count} rows: leave these empty if nobody knows"
                )

        return Meaning(
            "regression",
            _rows_of(by_column),
            names,
            "",
            f"numbers by column {listed([*map(repr, names)], 20)}",
            tuple(notes),
        )

    def _found(self) -> Meaning:
        """Return what the only column says that can have findings or numbers."""
        requested = self._wanted
        parted = [name for name in self._about if any("|" in cell for cell in self._cells(name))]
        if len(parted) == 1 and requested.task in ("", "multilabel"):
            return self._parted(parted[0], self._cells(parted[0]))

        numbers = []
        for name in self._about:
            is_asked = requested.task == "regression"
            is_free = is_asked or (
                not self._is_marks(name) and len(set(self._cells(name)) - {""}) > 1
            )
            if is_free and self._is_numbers(name):
                numbers.append(name)

        if requested.task in ("", "regression"):
            if len(numbers) == 1:
                meaning = self._numbers(numbers)
                return replace(meaning, notes=(*meaning.notes, *self._also(numbers[0])))
            if numbers:
                raise InputError(
                    f"{self._path} has several columns of numbers: {listed(numbers, 20)}",
                    "the one that is to be predicted",
                    f"name it with --label-column, as --label-column {numbers[0]}",
                )

        raise self._nothing()

    def _also(self, column: str) -> Iterator[str]:
        """Yield notes on what a table has beside the column of numbers that was found, or else could say by it."""
        if self._wanted.task:
            return
        if _task_of(self._cells(column)) == "classification":
            yield f"column {column!r} is taken as numbers; --label-column {column} takes it as classes"
        if marks := [name for name in self._about if self._is_marks(name)]:
            yield f"not taken: columns of 0 and 1, {listed(marks)}; --label-column takes them as findings"

    def _nothing(self) -> InputError:
        for name in self._about:
            cells = not_among(self._lower(name), _EMPTY)
            odd = [*itertools.filterfalse(_NUMBER.fullmatch, cells)]
            numeric = len(cells) - len(odd)
            for pattern in (_COMMA, _WITH_UNIT):
                numeric += len([*filter(pattern.fullmatch, odd)])

            if odd and 2 * numeric >= len(cells):
                return self._wrong(name, self._lower(name).index(odd[0]), _A_NUMBER)

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
        return all(map(_is_mark, cells)) and any(cell in _SURE for cell in cells)

    def _is_numbers(self, column: str) -> bool:
        cells = not_among(self._lower(column), _EMPTY)
        return bool(cells) and all(map(_NUMBER.fullmatch, cells))

    def _marks(self, notes: list[str]) -> list[str]:
        """Return the columns of 0 and 1; a note says which column has something else beside them.

        Raises:
            InputError: nearly all cells of a column are such, and another is not.
        """
        marks = []
        for name in self._about:
            if self._is_marks(name):
                marks.append(name)
                continue

            cells = self._lower(name)
            odd = [row for row, cell in enumerate(cells) if not _is_mark(cell)]
            sure = sum(cell in _SURE for cell in cells)
            if odd and sure >= _MOSTLY * (sure + len(odd)):
                raise self._wrong(
                    name, odd[0], "0, 1, -1 (uncertain) or nothing; numbers with --task regression"
                )

            if odd and {"0", "1"} <= {*cells}:
                notes.append(
                    f"not taken: {cells[odd[0]]!r} in column {name!r}; --label-column names the columns"
                )

        return marks

    def _row(self, row: int) -> str:
        """Return a row as a spreadsheet counts it, and its image."""
        return f"row {row + 2} ({self._rows[row][self._image_column]})"

    def _wrong(self, column: str, row: int, allowed: str) -> InputError:
        cell = self._cells(column)[row]
        advice = "correct the cell, or leave it empty where nobody knows"
        if _COMMA.fullmatch(cell):
            advice = f"write {cell.replace('.', '').replace(',', '.')}, with a decimal point"
            if cell[-4:-3] == "," and "." not in cell:
                advice += f", or {cell.replace(',', '')} if the comma parts thousands"
        elif allowed == _A_NUMBER and _WITH_UNIT.fullmatch(cell) and not _NUMBER.fullmatch(cell):
            advice = "write the number alone, and its unit into the column's name, as hc_mm"

        return InputError(
            f"{self._path}: {cell!r} in column {column!r}, {self._row(row)}", allowed, advice
        )


def _rows_of(columns: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Return the values of each row, () where all are unknown."""
    rows = []
    for values in zip(*columns, strict=True):
        rows.append(() if all(map(math.isnan, values)) else values)

    return rows


def _is_about_cases(name: str) -> bool:
    """Tell whether a column says something of a case or its file, and not of what the image shows."""
    spelled = head(name)
    if spelled in _OF_CASES or cases.DIVIDING.fullmatch(spelled):
        return True

    return not _OF_FILES.isdisjoint(re.split(r"[\W_]+", spelled))


def _is_mark(cell: str) -> bool:
    """Tell whether a cell says yes, no, or that nobody knows."""
    return cell in _SURE or cell in _UNSURE or cell in _EMPTY


def _task_of(cells: Sequence[str]) -> str:
    """Return the task that the cells of a single column tell."""
    if any("|" in cell for cell in cells):
        return "multilabel"

    filled = {cell for cell in cells if cell.lower() not in _EMPTY}
    numbers = [*filter(_NUMBER.fullmatch, filled)]
    if len(numbers) >= _MOSTLY * len(filled):
        are_whole = all(float(cell).is_integer() for cell in numbers)
        if not are_whole or len(numbers) > _MOST_CLASSES:
            return "regression"

    return "classification"


# The rows: that of each image, and what it says.


@dataclass(frozen=True)
class Labels:
    """What a table says of the images of a folder.

    Attributes:
        task: classification, multilabel or regression.
        classes: path of an image -> its class.
        targets: path of an image -> its findings (1, 0) or numbers, NaN where unknown; none of which all are unknown.
        names: of the findings or numbers.
        column: the one of all findings, or of the classes where the user named it; "" otherwise.
        rows: path of an image -> its patient, centre and section, of those that the table has.
        columns: in words, which columns were taken.
        notes: images and rows without the other, or without a label.
    """

    task: str
    classes: Mapping[str, str]
    targets: Mapping[str, tuple[float, ...]]
    names: tuple[str, ...]
    column: str
    rows: Mapping[str, Mapping[str, str]]
    columns: str
    notes: tuple[str, ...]


_NOUNS = {"classification": "class", "multilabel": "known finding", "regression": "number"}


def read(path: Path, images: Sequence[str], wanted: Wanted | None = None) -> Labels:
    """Read a table of the classes, findings or numbers of images.

    The column of the images is the wanted one, or the first of `label_columns.FILES` that names some;
    `label_columns.understood` finds those of the labels. Of classes that are wanted, a number in another spelling, as
    1.0, is that of these.

    Args:
        path: parted by commas, semicolons or tabs, with a header line.
        images: paths below the folder of all images.
        wanted: how the user or a bundle has it read.

    Raises:
        InputError: no such columns, no image in the table, one that several rows fit, or labels that cannot be read.
    """
    wanted = wanted or Wanted()
    rows = tables.read_csv(path, ())
    columns = [name for name in (rows[0] if rows else ()) if name]
    heads = {head(name): name for name in columns}
    roles = {}
    for role, name in wanted.roles.items():
        roles[role] = find_column(path, columns, name, f"--{role}-column")

    candidates = [head(roles["file"])] if "file" in roles else [*filter(heads.__contains__, FILES)]
    # names as they are before numbers: another column may count the rows
    present = map(heads.__getitem__, filter(heads.__contains__, candidates))
    ways = itertools.product((False, True), present)
    column = next((name for way, name in ways if _matched(path, rows, name, images, way)), None)
    if column is None:
        shown = listed(columns, 20) or "no rows below a header"
        cells = [row[heads[name]] or "" for row in rows for name in candidates]
        example = ""
        if cells and images:
            example = f", which has {cells[0]!a}, and the folder {images[0]!a}"

        raise InputError(
            f"{path} names none of the {len(images)} images in a column "
            f"{', '.join(map(repr, candidates)) or 'of files'}{example}",
            f"a column {', '.join(FILES)} of file names, with or without their endings; it has {shown}",
            respelled(cells) or "name the column with --file-column, or check the folder",
        )

    index = _matched(path, rows, column, images, True)
    meaning = understood(path, rows, column, wanted)
    spelled: list[str] = []
    classes = {}
    targets = {}
    if meaning.task == "classification":
        class_of, spelled = _one_spelling([str(value) for value in meaning.values], wanted.names)
        classes = {image: class_of[number] for image, number in index.items() if class_of[number]}
    else:
        for image, number in index.items():
            if meaning.values[number]:
                targets[image] = tuple(map(float, meaning.values[number]))

    labelled = classes.keys() | targets.keys()
    case_heads = cases.columns_of(columns)
    case_heads |= without(roles, ["file"])
    used = set()
    cases_of = {}
    pairs = []
    for image, number in index.items():
        row = rows[number]
        used.add(str(row))  # a row may be there twice
        cases_of[image] = {name: (row[key] or "").strip() for name, key in case_heads.items()}
        if _stem(row[column]) != _stem(image):
            pairs.append((row[column], image))

    absent = {case.get("centre", "") for case in cases_of.values()}
    absent -= {cases_of[image].get("centre", "") for image in labelled}
    absent.discard("")
    without_image = [str(row[column]) for row in rows if str(row) not in used]
    left_out = {
        "images of the folder are not in the table": not_among(images, index),
        f"images have no {_NOUNS[meaning.task]} in the table": not_among(index, labelled),
        "rows of the table have no image": without_image,
    }
    notes = [*spelled, *meaning.notes]
    if absent:
        notes.append(
            f"no image of {listed(sorted(absent))} has a {_NOUNS[meaning.task]}: it is no site"
        )

    if pairs:
        notes.append(
            f"{len(pairs)} names of images differ from the table's in zeros before a number, which spreadsheets take, "
            f"or in characters that are invisible or look alike: {' and '.join(map(ascii, pairs[0]))}"
        )

    if advice := respelled(without_image):
        notes.append(advice)
    if meaning.task == "multilabel":
        notes += outcomes(meaning.names, targets.values())

    for reason, entries in left_out.items():
        if entries:
            notes.append(f"{len(entries)} {reason}: left out, {tables.several(entries, 'such')}")

    notes += cases.unused_sections(rows, case_heads.values())
    names = sorted({*classes.values(), *meaning.names})
    # a sign alone is no name either
    if words := [
        repr(name) for name in names if name.lower() in _EMPTY or not re.search(r"\w", name)
    ]:
        notes.append(
            f"taken as names of classes: {listed(words)}; only an empty cell says no class"
        )

    notes += [*repeated(names), *filter(None, [respelled(names)])]
    parts_of = {name: {*re.split(r"\s*[;,/+]\s*", name)} for name in names}
    counts = Counter(itertools.chain(*parts_of.values()))
    for name, parts in parts_of.items():
        if len(parts) > 1 and max(map(counts.__getitem__, parts)) > 1:
            notes.append(f"class {name!r} may be several findings: | between them makes them such")
            break

    by = [f"images by column {column!r}", meaning.text]
    by += [f"{name}s by {key!r}" for name, key in case_heads.items()]
    return Labels(
        meaning.task,
        classes,
        targets,
        meaning.names,
        meaning.column,
        cases_of,
        ", ".join(by),
        tuple(notes),
    )


def _matched(
    path: Path, rows: Rows, column: str, images: Sequence[str], by_number: bool
) -> dict[str, int]:
    """Return image -> number of its row, the first of equal ones; `by_number`: also where zeros before it are lost."""
    forms = [(form, image) for image in images for form in _forms(image, by_number)]
    times = Counter(form for form, _ in forms)
    image_of = {form: image for form, image in forms if times[form] == 1}
    row_numbers: dict[str, int] = {}

    for number, row in enumerate(rows):
        cell = row[column] or ""
        names = [*filter(times.__contains__, _row_forms(cell, by_number))]
        if names and names[0].startswith(_NUMBERED) and names[0] not in image_of:
            fits = [image for form, image in forms if form == names[0]]
            raise InputError(
                f"{path}: {cell!r} in column {column!r} has lost its zeros and fits {listed(fits)}",
                "a row for each image, by the name of its file",
                "write the column as text",
            )

        names = [*filter(image_of.__contains__, names)]
        if names and rows[row_numbers.setdefault(image_of[names[0]], number)] != row:
            image = image_of[names[0]]
            raise InputError(
                f"{path} has two rows for {image}", "a row for each image", "remove one of them"
            )

    return row_numbers


def _one_spelling(class_of: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the class of each row in one spelling (numbers, look-alikes), and notes where the table has several."""
    spelling: dict[str, str] = {}
    for name in known:
        spelling.setdefault(_plain(name), name)

    written = defaultdict(set)
    for name in class_of:
        written[_plain(name)].add(name)

    notes = []
    for plain, names in sorted(written.items()):
        if len(names) > 1:
            name = spelling.setdefault(plain, plain)
            notes.append(f"one class, {name!r}: {' and '.join(map(ascii, sorted(names)))}")

    return [name if name in known else spelling.get(_plain(name), name) for name in class_of], notes


def repeated(names: Iterable[str]) -> list[str]:
    """Return a note on names of classes that may say the same, as `Benign` and `benign`, none without such."""
    same = defaultdict(list)
    for name in names:
        plain = _plain(name).strip()
        same[_SURE.get(plain.lower(), plain.casefold())].append(name)

    twice = [" and ".join(map(repr, group)) for group in same.values() if group[1:]]
    if not twice:
        return []

    return [f"names that may say the same: {'; '.join(twice)}; they count as different"]


def _plain(name: str) -> str:
    return as_number(alike(name)) or alike(name)


def outcomes(names: Sequence[str], targets: Collection[Sequence[float]]) -> list[str]:
    """Return notes on findings that no image has, none is known to lack, or of which nothing is known."""
    missing = defaultdict(list)
    for name, values in zip(names, zip(*targets, strict=True), strict=bool(targets)):
        is_known = set(values) & {0.0, 1.0}
        if not is_known:
            missing["nothing is known of"].append(repr(name))
        elif is_known == {0.0}:
            missing["no image has"].append(repr(name))
        elif is_known == {1.0}:
            missing["no image is known to lack"].append(repr(name))

    return [f"{text} {listed(entries, 20)}" for text, entries in missing.items()]


def _row_forms(name: str, by_number: bool) -> list[str]:
    """Return what a row may mean: the forms of its path, and of each shorter one from a folder within it on."""
    parts = cases.key(name).split("/")
    forms = []
    for start in range(len(parts)):
        path = "/".join(parts[start:])
        forms += [path, without_ending(path)]

    return forms + _numbers(name, by_number)


def _forms(name: str, by_number: bool) -> list[str]:
    """Return what an image may be called, the most exact first: its path or name, with its ending or without."""
    path = cases.key(name)
    bare = path.rpartition("/")[2]
    forms = dict.fromkeys([path, without_ending(path), bare, without_ending(bare)])
    return [*forms, *_numbers(without_ending(bare), by_number)]


def _numbers(name: str, by_number: bool) -> list[str]:
    number = as_number(name.strip())
    return [_NUMBERED + number] if by_number and number else []


def _stem(name: str) -> str:
    """Return a name as it is stored, without folder and ending."""
    return without_ending(composed(name).strip().replace("\\", "/").rpartition("/")[2])
