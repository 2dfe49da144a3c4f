"""A table of the images' classes, findings or numbers: the row of each image, and what it says."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from medfl.core.errors import InputError
from medfl.core.names import as_number, listed
from medfl.datasets.readers import cases, tables
from medfl.datasets.readers.label_columns import (
    CASES,
    FILES,
    NOTHING,
    Wanted,
    find_column,
    head,
    understood,
)
from medfl.datasets.readers.unlabelled import without_ending


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

    matches = {}
    for name in [head(roles["file"])] if "file" in roles else FILES:
        if name in heads:
            matches[name] = _matched(path, rows, heads[name], images)

    column = next((column for column, index in matches.items() if index), None)
    by_number = (name for name in matches if _by_number(path, rows, heads[name], images, {}))
    column = column or next(by_number, None)
    if column is None:
        raise InputError(
            f"{path} names none of the {len(images)} images in a column {', '.join(map(repr, matches)) or 'of files'}",
            f"a column {', '.join(FILES)} of file names, with or without their endings; it has {listed(columns, 20)}",
            "name the column with --file-column, or check the folder",
        )

    index = matches[column]
    numbers = _by_number(path, rows, heads[column], images, index)
    index |= numbers
    meaning = understood(path, rows, heads[column], wanted)
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
    case_heads = {}
    for name, spellings in CASES.items():
        if spelling := next((text for text in spellings if text in heads), None):
            case_heads[name] = heads[spelling]

    case_heads |= {role: column for role, column in roles.items() if role != "file"}
    rows_left = sorted(set(range(len(rows))) - set(index.values()))
    without_image = [str(rows[number][heads[column]]) for number in rows_left]
    left_out = {
        "images of the folder are not in the table": [i for i in images if i not in index],
        f"images have no {_NOUNS[meaning.task]} in the table": [
            i for i in index if i not in labelled
        ],
        "rows of the table have no image": without_image,
    }
    notes = [*spelled, *meaning.notes]
    if meaning.task == "multilabel":
        notes += _outcomes(meaning.names, targets.values())

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
    if words := [repr(name) for name in names if name.lower() in NOTHING]:
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
        cases_of[image] = {name: (row[key] or "").strip() for name, key in case_heads.items()}

    by = [f"images by column {heads[column]!r}", meaning.text]
    by += [f"{name}s by {key!r}" for name, key in case_heads.items()]
    return Labels(
        meaning.task, classes, targets, meaning.names, meaning.column, cases_of, ", ".join(by), tuple(notes)
    )  # fmt: skip


def _matched(
    path: Path, rows: Sequence[Mapping[str, str]], column: str, images: Sequence[str]
) -> dict[str, int]:
    """Return image -> number of its row, the first of equal ones."""
    forms = [(form, image) for image in images for form in _forms(image)]
    times = Counter(form for form, _ in forms)
    image_of = {form: image for form, image in forms if times[form] == 1}
    row_numbers: dict[str, int] = {}

    for number, row in enumerate(rows):
        names = [form for form in _row_forms(row[column] or "") if form in image_of]
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


def _outcomes(names: Sequence[str], targets: Collection[tuple[float, ...]]) -> list[str]:
    """Return notes on findings that no image has, none is known to lack, or of which nothing is known."""
    missing = defaultdict[str, list[str]](list)
    for name, values in zip(names, zip(*targets, strict=True), strict=bool(targets)):
        is_known = set(values) & {0.0, 1.0}
        if not is_known:
            missing["nothing is known of"].append(repr(name))
        elif is_known == {0.0}:
            missing["no image has"].append(repr(name))
        elif is_known == {1.0}:
            missing["no image is known to lack"].append(repr(name))

    return [f"{text} {listed(entries, 20)}" for text, entries in missing.items()]


def _row_forms(name: str) -> list[str]:
    """Return what a row may mean: the forms of its path, and of each shorter one from a folder within it on."""
    parts = cases.key(name).split("/")
    forms = []
    for start in range(len(parts)):
        path = "/".join(parts[start:])
        forms += [path, without_ending(path)]

    return forms


def _forms(name: str) -> list[str]:
    """Return what an image may be called, the most exact first: its path or name, with its ending or without."""
    path = cases.key(name)
    bare = path.rpartition("/")[2]
    return list(dict.fromkeys([path, without_ending(path), bare, without_ending(bare)]))
