"""Check a data set's folder: layout, counts, missing and unreadable images, labels, patients in several sections."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medfl.core import SECTIONS, Document, InputError, bar
from medfl.datasets.base import choose, get, is_phantom, layout_of, notes, read_table
from medfl.datasets.readers import pairs, volumes
from medfl.datasets.readers.mask_values import Classes
from medfl.datasets.readers.reading import read_pixels, turned
from medfl.datasets.readers.splitting import Record


@dataclass(frozen=True)
class CheckReport:
    """What `check` found; `ok` is False if a problem keeps the data from being used.

    Attributes:
        layout: the recognised layout in words.
        split: the split whose sections are counted.
        classes: the columns of `counts`: class names in label order, in segmentation "cases" alone.
        counts: section -> centre -> number of images of each class; centres that the data set does not name are counted
            together.
        problems: one line each, naming the file; the data cannot be used as they are.
        warnings: one line each; the data can be used.
        notes: what a user of these data must know.
    """

    name: str
    folder: Path
    layout: str
    split: str
    phantom: bool
    classes: tuple[str, ...]
    counts: Mapping[str, Mapping[str, tuple[int, ...]]]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    @property
    def images(self) -> int:
        """Number of images counted."""
        return sum(sum(row) for centres in self.counts.values() for row in centres.values())

    def as_dict(self) -> Document:
        """Return everything as JSON-ready values."""
        source = "phantom" if self.phantom else "real"
        values = asdict(self)
        del values["phantom"]
        values |= {"folder": str(self.folder), "source": source}
        return {**values, "images": self.images, "ok": self.ok}


def check(
    name: str, folder: str | Path | None = None, *, split: str | None = None, progress: bool = False
) -> CheckReport:
    """Verify the folder of a data set and decode every image; `progress` shows a bar on stderr.

    Raises:
        InputError: no known layout in the folder, or no such split in it.
    """
    dataset = get(name)
    root, layout = layout_of(name, folder)
    split, rule = choose(name, root, split)
    columns = dataset.classes if dataset.task == "classification" else ("cases",)
    problems = []
    records = []
    assigned = []

    try:
        table = read_table(name, root)
        records = table.records
        problems += table.problems
        assigned = rule(records)
    except InputError as error:
        problems.append(str(error))

    counts = counted(columns, records, assigned, dataset.centres)

    def read(record: Record) -> str:
        """Return what reading a case changed, and forget the case; InputError if it cannot be read."""
        as_volumes = volumes.is_volume(record.mask or record.image)
        return read_case(
            record, as_volumes, len(dataset.classes), dataset.channels, dataset.mixed_channels
        )[1]

    # a table may list a file a million times
    files = {(record.image, record.mask): record for record in records}
    changes, errors = read_all([*files.values()], read, progress)
    problems += map(str, errors)
    warnings = warnings_of(columns, records, assigned, counts)
    return CheckReport(
        name, root, layout.text, split, is_phantom(root), columns, counts, tuple(problems), tuple(warnings),
        (*notes(name, root), *volumes.changes_told(changes)),
    )  # fmt: skip


def counted(
    columns: Sequence[str],
    records: Sequence[Record],
    assigned: Sequence[str],
    centres_named: Sequence[str] = (),
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return section -> centre -> number of images of each column; a single named centre stands for all."""
    # With one name for all centres (writers) records name places that the data set does not.
    has_centres = len(centres_named) != 1 or any(
        record.centre in centres_named for record in records
    )
    counts = Counter[tuple[str, str, int]]()
    for record, section in zip(records, assigned, strict=False):
        centre = record.centre if has_centres else centres_named[0]
        counts[section, centre, record.label] += 1

    present = {centre for _, centre, _ in counts}
    order = [
        *(c for c in centres_named if c in present),
        *sorted(present.difference(centres_named)),
    ]

    table: dict[str, dict[str, tuple[int, ...]]] = {section: {} for section in SECTIONS}
    for section, rows in table.items():
        for centre in order:
            rows[centre] = tuple(counts[section, centre, label] for label in range(len(columns)))

    return table


def targets_told(
    task: str, names: Sequence[str], targets: Sequence[Sequence[float | None]]
) -> list[str]:
    """Return a line for each finding or number of images: how many have it, and of numbers how they are spread.

    Args:
        task: multilabel or regression.
        names: of the findings or numbers, (K,).
        targets: (N, K), None or NaN where unknown.
    """
    lines = []
    table = np.array(targets, np.float64).reshape(len(targets), len(names))
    for name, column in zip(names, table.T, strict=True):
        numbers = column[~np.isnan(column)]
        if task == "multilabel":
            present = int((numbers == 1).sum())
            counts = f"{present} present, {len(numbers) - present} absent"
            lines.append(f"{name}: {counts}, {len(column) - len(numbers)} unknown")
        elif len(numbers):
            spread = f"mean {numbers.mean():.4g}, sd {numbers.std():.4g}, {numbers.min():.4g} to {numbers.max():.4g}"
            lines.append(f"{name}: {len(numbers)} known, {spread}")
        else:
            lines.append(f"{name}: none known")

    return lines


def read_case(
    record: Record,
    as_volumes: bool,
    classes: Classes,
    channels: int | None = None,
    convert: bool = False,
) -> tuple[tuple[object, ...], str]:
    """Return an image with its mask, if it has one, and what reading changed, as `changes_of` has it.

    Args:
        record: the case.
        as_volumes: read (C, D1, D2, D3), not pictures (H, W, C).
        classes: of the mask.
        channels: that the image must have; default: any.
        convert: turn a picture of other channels into one of `channels`.

    Raises:
        InputError: as `read_pair` of volumes or pictures, without a mask as `read_volume` or `read_pixels`.
    """
    uri = record.image
    case: tuple[object, ...]
    change = ""
    if as_volumes and record.mask:
        case = volumes.read_pair(uri, record.mask, classes, channels)
    elif as_volumes:
        case = (volumes.read_volume(uri, channels),)
    elif record.mask:
        case = pairs.read_pair(
            uri, record.mask, channels=channels, classes=classes, convert=convert
        )[:2]
        change = turned(uri)
    else:
        case = (read_pixels(uri, None, channels, convert),)

    return case, change + volumes.changes_of(*case)


def read_all(
    records: Sequence[Record], reader: Callable[[Record], Any], progress: bool
) -> tuple[list[Any], list[InputError]]:
    """Return what `reader` returns of each record, and the errors of those that it cannot read."""
    results = []
    errors = []
    for record in bar(records, desc="reading images", unit="image", shown=progress):
        try:
            results.append(reader(record))
        except InputError as error:
            errors.append(error)

    return results, errors


def warnings_of(
    columns: Sequence[str],
    records: Sequence[Record],
    assigned: Sequence[str],
    counts: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> list[str]:
    """Return a line for each section that lacks images of a class, and one on patients that are in several."""
    warnings = []
    for section, rows in counts.items():
        totals = map(sum, zip(*rows.values(), strict=True))
        empty = [name for name, total in zip(columns, totals, strict=False) if not total]
        if assigned and empty:
            warnings.append(f"section {section} has no image of {', '.join(empty)}")

    sections_of = defaultdict(set)
    for record, section in zip(records, assigned, strict=False):
        sections_of[record.group].add(section)

    if leaking := {group for group, sections in sections_of.items() if len(sections) > 1}:
        pairs = zip(records, assigned, strict=False)
        test = sum(section == "test" and record.group in leaking for record, section in pairs)
        warnings.append(
            f"{len(leaking)} patients or lesions have images in several sections of this split ({test} test images)"
        )

    return warnings
