"""`medfl data check` of a bundle that `medfl new` wrote: layout, counts, patients and unreadable images."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from medfl.bundle.bundle import Bundle
from medfl.core.documents import Config, Document
from medfl.core.errors import InputError
from medfl.core.task import SECTIONS
from medfl.core.terminal import bar
from medfl.datasets import own
from medfl.datasets.readers import cases, conventions, pairs, volumes
from medfl.datasets.readers.checking import CheckReport, counted, targets_told, warnings_of
from medfl.datasets.readers.reading import read_pixels
from medfl.datasets.readers.splitting import Record
from medfl.problem.problem import Problem

_IDS = (
    "dataset_dir images masks labels labels_are label_column uncertain blank columns classes "
    "mask_values group_by split in_channels"
)


def check(where: str | Path, folder: str | Path | None, *, progress: bool = False) -> CheckReport:
    """Verify a folder of images for a bundle that `medfl new` wrote; `progress` shows a bar on stderr.

    Raises:
        InputError: no folder, or another kind of bundle.
    """
    bundle = Bundle(str(where))
    ids = ids_of(bundle)
    if not isinstance(ids["classes"], list) or "split" not in ids:
        raise InputError(
            f"bundle {bundle.name!r} looks for its images by itself",
            "a shipped bundle, or one that medfl new wrote",
            f"run medfl site check {where} --data DIR, which knows any",
        )

    if folder is None or not Path(folder).expanduser().is_dir():
        problem = "no --data" if folder is None else f"--data {folder}"
        raise InputError(
            problem, f"the folder of the images of {bundle.name}", "give it with --data DIR"
        )

    root = Path(folder).expanduser().resolve()
    problems = []
    dataset = own.OwnImages([], [], {})
    divided = []

    try:
        dataset = own.found_by(root, ids)
        divided = own.sections_of(root, dataset, ids["group_by"], ids["split"])
    except InputError as error:
        problems.append(str(error))

    classes = tuple(ids["classes"])
    task = str(ids.get("labels_are") or "classification")
    columns = classes if not ids.get("masks") and task == "classification" else ("cases",)
    records = [record for record, _ in divided]
    assigned = [section for _, section in divided]
    counts = counted(columns, records, assigned)

    changes = []
    for record in bar(dataset.records, desc="reading images", unit="image", shown=progress):
        try:
            changes.append(volumes.changes_of(_read(root, ids)(record)))
        except InputError as error:
            problems.append(str(error))

    shown = list[str]()
    missing = list[str]()
    if task != "classification":
        shown = targets_told(task, classes, [record.target for record in dataset.records])
        missing = _lacking(classes, divided) if task == "multilabel" else []

    warnings = warnings_of(columns, records, assigned, counts)
    return CheckReport(
        name=bundle.name,
        folder=root,
        layout=_layout(ids),
        split=str(ids["split"] or "own"),
        phantom=own.cohort_of([root, *(record.image for record in dataset.records)]) is not None,
        classes=columns,
        counts=counts,
        problems=tuple(problems),
        warnings=(*missing, *warnings),
        notes=(*shown, *_notes(root, ids, dataset, records), *volumes.changes_told(changes)),
    )


def _lacking(names: Sequence[str], divided: Sequence[tuple[Record, str]]) -> list[str]:
    """Return a line for each section in which no image has a finding."""
    lines = []
    for section in SECTIONS if divided else ():
        targets = [record.target for record, its_section in divided if its_section == section]
        absent = [name for k, name in enumerate(names) if not any(row[k] == 1 for row in targets)]
        if absent:
            lines.append(f"section {section} has no image of {', '.join(absent)}")

    return lines


def ids_of(bundle: Problem) -> Document:
    """Return the ids of a bundle that say where its images are, those that it has."""
    values: Document = {}
    for name in _IDS.split():
        try:
            values[name] = bundle.get(name)
        except InputError:
            continue

    return {"classes": None, "group_by": None, "in_channels": None, **values}


def _layout(ids: Config) -> str:
    images, masks = (f"{ids.get(name) or '.'}/".removeprefix("./") for name in ("images", "masks"))
    files = "<class>/<picture>"
    if ids.get("masks") == conventions.NNUNET_FILE:
        files = f"files that {conventions.NNUNET_FILE} lists"
    elif ids.get("masks"):
        files = f"{images}<name> + {masks}<name>{'_mask' * (images == masks)}"
    elif ids.get("labels"):
        files = f"{images}<picture> + {ids['labels']}"

    return f"{files} [+ cases.csv]"


def _read(root: Path, ids: Config) -> Callable[[Record], Iterable[object]]:
    """Return what reads an image, with its mask where it has one."""
    if not ids.get("masks"):
        return lambda record: read_pixels(record.image)
    classes = ids.get("mask_values") or len(ids["classes"])
    if own.is_volumes(own.path_below(root, str(ids["images"]))):
        channels = ids["in_channels"]
        return lambda record: volumes.read_pair(record.image, record.mask, classes, channels)
    return lambda record: pairs.read_pair(record.image, record.mask, classes=classes)


def _notes(
    root: Path, ids: Config, dataset: own.OwnImages, records: Sequence[Record]
) -> tuple[str, ...]:
    """Return what is left out, and what is known of patients."""
    notes = list(dataset.notes)
    if not (ids.get("masks") or ids.get("labels")):
        notes += own.beside_classes(root, dataset.records)

    notes += [*own.odd(root), *cases.notes(dataset.rows)]
    groups = {record.group for record in records}
    if any(record.group != record.id for record in records):
        notes.append(f"{len(groups)} patients, each in one section")
    elif records:
        notes.append(own.UNKNOWN_PATIENTS)

    return tuple(notes)
