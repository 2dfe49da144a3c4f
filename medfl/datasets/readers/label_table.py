"""A table of the images' classes: find the columns that matter, and the row of each image."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from medfl.core.errors import InputError
from medfl.core.names import as_number, listed
from medfl.datasets.readers import cases, tables
from medfl.datasets.readers.unlabelled import without_ending

FILES = (
    "file",
    "filename",
    "file_name",
    "image",
    "image_id",
    "image_name",
    "isic_id",
    "img",
    "path",
    "id",
    "name",
)
LABELS = (
    "diagnosis",
    "dx",
    "class",
    "class_name",
    "label_name",
    "label",
    "category",
    "target",
    "finding",
)
_CASES = {"patient": ("patient", "patient_id", "subject", "subject_id"), "centre": ("centre", "center", "site"),
          "section": ("section",)}  # fmt: skip
_MARKS = ("0", "1", "0.0", "1.0")


@dataclass(frozen=True)
class Labels:
    """What a table says of the images of a folder.

    Attributes:
        classes: path of an image -> its class.
        rows: path of an image -> its patient, centre and section, of those that the table has.
        columns: in words, which columns were taken.
        notes: images and rows without the other, or without a class.
    """

    classes: Mapping[str, str]
    rows: Mapping[str, Mapping[str, str]]
    columns: str
    notes: tuple[str, ...]


def read(path: Path, images: Sequence[str], known: Collection[str] = ()) -> Labels:
    """Read a table of the classes of images.

    The column of the images is the first of `FILES` that names some, that of the classes the first of `LABELS`; without
    one, columns of zeros and ones count as one class each, as in the tables of ISIC.

    Args:
        path: parted by commas, semicolons or tabs, with a header line.
        images: paths below the folder of all images.
        known: classes; a number in another spelling, as 1.0, is that of these.

    Raises:
        InputError: no such columns, no image in the table, one that several rows fit, or an image of two classes.
    """
    rows = tables.read_csv(path, ())
    heads = {str(name).strip().lower(): name for name in (rows[0] if rows else ()) if name}
    matches = {}
    for head in FILES:
        if head in heads:
            matches[head] = _matched(path, rows, heads[head], images)

    column = next((column for column, index in matches.items() if index), None)
    if column is None:
        column = next(
            (column for column in matches if _by_number(path, rows, heads[column], images, {})),
            None,
        )

    if column is None:
        raise InputError(
            f"{path} names none of the {len(images)} images in a column {', '.join(map(repr, matches)) or 'of files'}",
            f"a column {', '.join(FILES)} of file names, with or without their endings",
            "name the column so, or check the folder",
        )

    index = matches[column]
    numbers = _by_number(path, rows, heads[column], images, index)
    index |= numbers
    label, class_of = _classes(path, rows, heads, heads[column])
    class_of, spelled = _one_spelling(class_of, known)
    classes = {image: class_of[number] for image, number in index.items() if class_of[number]}
    case_heads = {}
    for name, spellings in _CASES.items():
        if spelling := next((text for text in spellings if text in heads), None):
            case_heads[name] = heads[spelling]

    rows_left = sorted(set(range(len(rows))) - set(index.values()))
    without_image = [str(rows[number][heads[column]]) for number in rows_left]
    left_out = {
        "images of the folder are not in the table": [i for i in images if i not in index],
        "images have no class in the table": [image for image in index if image not in classes],
        "rows of the table have no image": without_image,
    }
    notes = [*spelled]
    if numbers:
        image, number = next(iter(numbers.items()))
        notes.append(
            f"{len(numbers)} images are matched by their numbers, whose zeros the table has lost: "
            f"{rows[number][heads[column]]} is {image}"
        )

    for reason, entries in left_out.items():
        if entries:
            notes.append(f"{len(entries)} {reason}: left out, {tables.several(entries, 'such')}")

    names = sorted(set(classes.values()))
    if words := [repr(name) for name in names if name.lower() in cases.NOTHING]:
        notes.append(
            f"taken as names of classes: {listed(words)}; only an empty cell says no class"
        )

    alike = defaultdict(list)
    for name in names:
        alike[name.casefold()].append(name)

    if twice := [" and ".join(map(repr, alike[name])) for name in sorted(alike) if alike[name][1:]]:
        notes.append(
            f"classes that differ in upper and lower case only: {'; '.join(twice)}; they count as different"
        )

    cases_of = {}
    for image, number in index.items():
        row = rows[number]
        cases_of[image] = {name: (row[head] or "").strip() for name, head in case_heads.items()}

    by = [f"images by column {heads[column]!r}", f"classes by {label}"]
    by += [f"{name}s by {head!r}" for name, head in case_heads.items()]

    return Labels(classes, cases_of, ", ".join(by), tuple(notes))


def _matched(
    path: Path, rows: Sequence[Mapping[str, str]], column: str, images: Sequence[str]
) -> dict[str, int]:
    """Return image -> number of its row, the first of equal ones."""
    forms = [(form, image) for image in images for form in _forms(image)]
    times = Counter(form for form, _ in forms)
    image_of = {form: image for form, image in forms if times[form] == 1}
    row_numbers: dict[str, int] = {}

    for number, row in enumerate(rows):
        names = [form for form in _forms(row[column] or "") if form in image_of]
        if names and rows[row_numbers.setdefault(image_of[names[0]], number)] != row:
            image = image_of[names[0]]
            raise InputError(
                f"{path} has two rows for {image}", "a row for each image", "remove one of them"
            )

    return row_numbers


def _by_number(
    path: Path,
    rows: Sequence[Mapping[str, str]],
    column: str,
    images: Sequence[str],
    matched: Mapping[str, int],
) -> dict[str, int]:
    """Return image -> number of its row, of those that are not matched yet and whose name is a number with zeros."""
    images_of = defaultdict(list)
    for image in images:
        if image not in matched and (shown := as_number(_forms(image)[-1])):
            images_of[shown].append(image)

    row_numbers: dict[str, int] = {}
    for number in sorted(set(range(len(rows))) - set(matched.values())):
        text = (rows[number][column] or "").strip()
        fits = [image for image in images_of[as_number(text)] if _forms(image)[-1] != text]
        if not fits:
            continue
        if len(fits) > 1 or rows[row_numbers.setdefault(fits[0], number)] != rows[number]:
            raise InputError(
                f"{path}: {text!r} in column {column!r} has lost its zeros and fits {listed(fits)}",
                "a row for each image, by the name of its file",
                "write the column as text",
            )

    return row_numbers


def _one_spelling(class_of: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the class of each row with numbers in one spelling, and notes where the table has several of one."""
    spelling: dict[str, str] = {}
    for name in known:
        spelling.setdefault(as_number(name), name)

    written = defaultdict(set)
    for name in class_of:
        written[as_number(name)].add(name)

    notes = []
    for number, names in sorted(written.items()):
        if number and len(names) > 1:
            name = spelling.setdefault(number, number)
            notes.append(
                f"one class by its number, {name!r}: {' and '.join(map(repr, sorted(names)))}"
            )

    spelling.pop("", None)
    return [
        name if name in known else spelling.get(as_number(name), name) for name in class_of
    ], notes


def _forms(name: str) -> list[str]:
    """Return what an image may be called, the most exact first: its path or name, with its ending or without."""
    path = cases.key(name)
    bare = path.rpartition("/")[2]
    return list(dict.fromkeys([path, without_ending(path), bare, without_ending(bare)]))


def _classes(
    path: Path, rows: Sequence[Mapping[str, str]], heads: Mapping[str, str], column: str
) -> tuple[str, list[str]]:
    """Return which columns name the classes, in words, and the class of each row, "" where it has none."""
    label = next((heads[name] for name in LABELS if name in heads and heads[name] != column), None)
    if label is not None:
        return f"column {label!r}", [" ".join((row[label] or "").split()) for row in rows]

    known_heads = set(FILES).union(*_CASES.values())
    free = [name for head, name in heads.items() if name != column and head not in known_heads]
    marks = [name for name in free if all((row[name] or "").strip() in _MARKS for row in rows)]
    if len(marks) < 2:
        raise InputError(
            f"{path} has no column of classes; it has {', '.join(heads.values())}",
            f"one called {', '.join(LABELS)}, or one for each class with 0 and 1",
            "name the column so",
        )

    # One column a class, as in the tables of ISIC: a row has a 1 in that of its own.
    class_of = [[name for name in marks if float(row[name])] for row in rows]
    double = next((number for number, names in enumerate(class_of) if len(names) > 1), None)
    if double is not None:
        raise InputError(
            f"{path}: {rows[double][column]} is of the classes {', '.join(class_of[double])}",
            "one class an image",
            "keep one of them, or name the classes in a column 'label'",
        )

    return f"the columns {', '.join(marks)}", [names[0] if names else "" for names in class_of]
