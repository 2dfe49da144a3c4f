"""Open a bundle on its images: the given folder, one below $MEDFL_DATA, or the phantom cohort."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from medfl import datasets
from medfl.bundle.bundle import Bundle, read_protocol, shipped
from medfl.bundle.files import find, sha256_of, shipped_folders, shipped_root
from medfl.bundle.new_images import channels_of, is_volumes
from medfl.bundle.sections import UnlabelledEntries
from medfl.core import (
    SECTIONS,
    Config,
    DataRecord,
    Document,
    InputError,
    Print,
    Run,
    RunError,
    stream,
)
from medfl.data import NO_LABEL, Item
from medfl.datasets import own
from medfl.datasets.base import item_of, read_table
from medfl.datasets.phantoms.phantom import PHANTOM_VERSION
from medfl.datasets.readers import cases, conventions, matching, pairs, tables, volumes
from medfl.datasets.readers.checking import (
    CheckReport,
    counted,
    read_all,
    read_case,
    targets_told,
    warnings_of,
)
from medfl.datasets.readers.reading import JOINED
from medfl.datasets.readers.splitting import Record
from medfl.datasets.readers.unlabelled import joined, named
from medfl.policy.policy import Policy
from medfl.problem import Problem, parts
from medfl.problem.parts import PartsProblem
from medfl.storage import PHANTOM, required_cache

OWN_SPLIT = "bundle"
"""The split of a third-party bundle: its own."""

_INSTEAD = {
    "dataset_dir": "--data",
    "batch_size": "--batch-size",
    "learning_rate": "--lr",
    "device": "--device",
    "max_epochs": "--rounds and --local-epochs",
}
"""Ids of the shipped bundles that a federated run sets itself, and the user's alternative."""


def phantom_folder(name: str) -> Path:
    """Return the phantom cohort of a data set, drawn once per user into the cache folder ($XDG_CACHE_HOME/medfl)."""
    folder = required_cache("phantom") / f"{name}-{PHANTOM_VERSION}"
    if not datasets.is_phantom(folder):
        try:
            datasets.write_phantom(name, folder)
        except (InputError, RunError):
            # another command, started beside this one, may have been faster
            if not datasets.is_phantom(folder):
                raise
    return folder


def open_problem(
    name: str,
    config: Config | None = None,
    device: torch.device | str = "cpu",
    policy: Policy | None = None,
) -> Problem:
    """Return the problem of a bundle's name or folder, or of parts in Python by name, without its data.

    Raises:
        InputError: as for `Bundle` and `parts.known`, or an override of parts.
    """
    if parts.is_parts(name):
        return PartsProblem(parts.known(name), device).variant(config or {})
    return Bundle(name, config, device, policy)


def require_buildable(problem: Problem, config: Config) -> None:
    """Build a shipped bundle's network once with `config`, so that a bad setting is reported early.

    A third-party network may need the data folder, which is not known yet.

    Raises:
        InputError: an id that a federated run sets itself, or a network that cannot be built.
    """
    if not problem.dataset:
        return
    for key, instead in _INSTEAD.items():
        if key in config:
            raise InputError(
                f"--config {key}={config[key]}",
                f"a federated run sets this id by {instead}",
                "use that",
            )

    with stream(0, "trial network"):
        problem.network()


def protocol_of(name: str) -> Config:
    """Return the protocol of a bundle, or of parts in Python."""
    if parts.is_parts(name):
        return parts.protocol_of_parts(name)

    return read_protocol(name)


def bundle_of(run: Run) -> str:
    """Return how to open the bundle of a recorded run: a shipped one's name, another's folder."""
    if run.bundle in shipped() and run.data.split != OWN_SPLIT:
        return run.bundle

    return run.bundle_path


def is_recorded(name_or_path: str, run: Run) -> bool:
    """Tell whether a bundle's name or folder is the recorded bundle, by its hash; InputError if there is none."""
    if parts.is_parts(name_or_path):
        return name_or_path == run.bundle_path
    return sha256_of(find(name_or_path), read_protocol(name_or_path)) == run.bundle_sha256


def reopened(
    run: Run,
    config: Config,
    device: torch.device | str,
    policy: Policy | None = None,
    *,
    given: str | None = None,
    folder: Path | None,
    allow_changed: bool = False,
) -> Problem:
    """Open a recorded run's bundle without its data: today's if it is unchanged, else the recorded folder.

    `given` is a folder to use instead; `allow_changed` uses today's version of a shipped bundle that has changed.

    Raises:
        InputError: there is no bundle, or it has changed since the run.
    """
    name = bundle_of(run)
    current = given or name
    is_shipped = name in shipped()

    if not is_recorded(current, run):
        if (
            is_shipped
            and not given
            and (Path(run.bundle_path) / "configs").is_dir()
            and is_recorded(run.bundle_path, run)
        ):
            current = run.bundle_path
        elif not (is_shipped and allow_changed and not given):
            raise _changed_error(run, current, folder)

    if is_shipped:
        return Bundle(current, config, device, policy, known_as=name)

    return open_problem(current, config, device, policy)


def _changed_error(run: Run, current: str, folder: Path | None) -> InputError:
    """Return the error for a run whose bundle is not the recorded one; it says how to give that."""
    where = f" in {folder}" if folder else ""
    out = folder or "DIR"
    place = "the folder of the recorded one"
    if (root := shipped_root()) and bundle_of(run) in shipped():
        path = shipped_folders()[run.bundle].relative_to(root)
        place = f"bundles/{path} of medfl {run.versions.get('medfl')}, unpacked to FOLDER"

    return InputError(
        f"bundle {run.bundle!r} has changed since the run{where}: that of {current} has another configuration hash",
        f"the recorded one is {run.bundle_sha256[:12]}",
        f"restore it; to train, name {place}: medfl run FOLDER --resume --out {out}, or medfl run FOLDER "
        f"--from {out}/run.json",
    )


@dataclass(frozen=True)
class WithData:
    """A problem open on its data: their folder ("" if the bundle names it), their split, and notes for the user."""

    bundle: Problem
    folder: str
    split: str
    notes: tuple[str, ...]

    def record(self) -> DataRecord:
        """Describe the images; this hashes them, so it comes after quick checks."""
        problem = self.bundle
        counts = {section: len(problem.data(section)) for section in SECTIONS}
        if isinstance(problem, Bundle) and problem.dataset and not problem.sections.images_only:
            is_drawn = datasets.is_phantom(self.folder)
            notes = tuple(datasets.notes(problem.dataset, self.folder))
            checksum = datasets.checksum(problem.dataset, self.folder, self.split)
            if any(NO_LABEL in item for item in problem.items("train")):
                checksum = hashlib.sha256(
                    f"{checksum} {problem.data_checksum()}".encode()
                ).hexdigest()
        else:
            is_drawn = problem.is_drawn(self.folder)
            notes = self.notes
            checksum = problem.data_checksum()

        return DataRecord(
            PHANTOM if is_drawn else "real", self.folder, checksum, self.split, counts, notes
        )


def with_data(
    problem: Problem,
    data: str | None,
    config: Config,
    *,
    say: Print = str,
    seed: int = 0,
    preferred: str | None = None,
    unlabelled: bool = False,
) -> WithData:
    """Open a problem on its images.

    Args:
        problem: opened without its data, which must not have been accessed.
        data: a folder, "phantom", or None for a folder below $MEDFL_DATA, else the phantom with a message.
        config: given ids of the configuration.
        say: reports what is used if no real data are found.
        seed: of random splits.
        preferred: the split to use if the folder offers it.
        unlabelled: include images without a label in the training images.

    Raises:
        InputError: no such images, or another bundle's phantom is requested.
    """
    name = problem.dataset
    if not (isinstance(problem, Bundle) and name):
        return _of_own_data(problem, data, config, unlabelled)

    # images alone, in a folder without the layout by which a data set is known
    if unlabelled and data is not None and _is_unknown(name, data):
        images = Path(data).absolute()
        bundle, notes = _take_unlabelled(problem, {"dataset_dir": str(images)}, images)
        return WithData(bundle, str(images), "", notes)

    # a bundle searches below folders given by full path
    folder = _folder(name, data, say).absolute()
    split = datasets.trial(name, str(config.get("split") or _split(name, folder, preferred)), seed)
    overrides = {"dataset_dir": str(folder), "split": split}
    if unlabelled:
        bundle, unlabelled_notes = _take_unlabelled(problem, overrides, folder)
    else:
        bundle = problem.variant(overrides)
        unlabelled_notes = ()

    return WithData(
        bundle,
        str(folder),
        split,
        (f"split: {split}", *datasets.notes(name, folder), *unlabelled_notes),
    )


def _is_unknown(name: str, data: str) -> bool:
    """Tell whether a folder does not have the layout of a shipped bundle's data set."""
    try:
        datasets.locate(name, data)
    except InputError:
        return Path(data).is_dir()
    return False


def _take_unlabelled(
    bundle: Bundle, overrides: Config, folder: Path
) -> tuple[Bundle, tuple[str, ...]]:
    """Return a bundle with a folder's unlabelled images among the training items, and a note on them."""
    bundle = bundle.variant(overrides, partial(find_unlabelled, folder=folder))
    count = sum(NO_LABEL in item for item in bundle.items("train"))
    return bundle, (f"{count} training images have no label",) if count else ()


def _folder(name: str, data: str | None, say: Print) -> Path:
    """Return the folder of a shipped bundle's images: the given one, one below $MEDFL_DATA, or the phantom cohort."""
    if data == PHANTOM:
        return phantom_folder(name)

    if data is not None or os.environ.get("MEDFL_DATA"):
        try:
            return datasets.locate(name, data)
        except InputError:
            if data is not None:
                raise

    say(
        f"NO REAL DATA for {name}: neither --data nor $MEDFL_DATA holds it; using a PHANTOM cohort of drawn images"
    )
    return phantom_folder(name)


def _split(name: str, folder: Path, preferred: str | None) -> str:
    """Return the protocol's split if this folder offers it, else the folder's own default."""
    offered = datasets.splits(name, folder)
    if preferred in offered:
        return str(preferred)

    return offered[0]


def _of_own_data(problem: Problem, data: str | None, config: Config, unlabelled: bool) -> WithData:
    """Open a problem whose data are not one of medfl's data sets."""
    if data == PHANTOM:
        raise InputError(
            "--data phantom",
            "phantoms exist for the shipped bundles",
            "give this bundle's data folder, or omit --data",
        )

    folder = str(config.get("dataset_dir", ""))
    overrides = {}
    if data is not None:
        folder = str(Path(data).expanduser().resolve())
        overrides = {"dataset_dir": folder}

    # unlabelled images are found in the folder that the configuration names, given or its own
    problem = problem.variant(overrides)
    notes: tuple[str, ...] = ()
    if unlabelled and isinstance(problem, Bundle) and "dataset_dir" in problem:
        problem, notes = _take_unlabelled(problem, {}, Path(str(problem.get("dataset_dir"))))

    # the problem's notes open its training data, so unlabelled images have been added by now
    notes = (*problem.notes, *notes)
    if problem.is_drawn(folder):
        notes += ("the images are of a PHANTOM cohort: drawn, not real ones",)

    if not problem.has_test:
        why = "this bundle names no test data"
        if error := problem.sections.test_error:
            why = f"its test data cannot be read ({error})"

        notes += (f"{why}: the validation items serve as test items, so 'best' is optimistic",)

    return WithData(problem, folder, OWN_SPLIT, notes)


# Images in a data folder without labels: training images of sites that are named with `--unlabelled`.


def find_unlabelled(bundle: Bundle, folder: Path) -> UnlabelledEntries:
    """Return the images in a folder that have no label; all of them if the folder has no labels at all.

    For a bundle of `medfl new` they are those without a mask, those that the table does not list or gives no class, or
    those in a folder `unlabelled` beside the classes'. For other bundles they are in such a folder, by centre if known,
    or have no mask if a shipped data set has masks.
    """
    ids = ids_of(bundle)
    channels = channels_of(bundle.metadata)
    if not bundle.dataset and isinstance(ids["classes"], list) and "split" in ids:
        return _of_own(folder, ids, channels)

    if bundle.dataset:
        alone = not datasets.get(bundle.dataset).layout(folder)
    else:
        alone = not bundle.sections.has_training_items

    images = folder if alone else folder / own.UNLABELLED
    entries = []
    if images.is_dir():
        files = joined(named([images], is_volumes(bundle.metadata)), channels)
        prefix = "" if alone else f"{own.UNLABELLED}/"
        for name, uri in files.items():
            entries.append(_entry(bundle, prefix + name, uri))

    if bundle.dataset and not alone:
        for name, uri in read_table(bundle.dataset, folder).unlabelled.items():
            entries.append(_entry(bundle, name, uri))

    return UnlabelledEntries(entries, alone)


def _entry(bundle: Bundle, ident: str, uri: str) -> Item:
    files = uri.split(JOINED)
    first, *below = ident.split("/")
    # below `unlabelled` a folder stands for a centre, as elsewhere for a class
    centre = below[0] if first == own.UNLABELLED and len(below) > 1 else "unknown"
    # a data set's own reader takes joined names, another loader a list of files
    image = uri if bundle.dataset or len(files) == 1 else files
    return {"image": image, "id": ident, "centre": centre, "group": ident}


def _of_own(root: Path, ids: Config, channels: int) -> UnlabelledEntries:
    """Return the images of a folder in the layouts known to `medfl new`.

    Images that a table puts into another section, or whose patient has images there, are excluded.
    """
    images = own.path_below(root, str(ids.get("images") or "."))
    images = images if images.is_dir() else root
    group_by = ids.get("group_by")
    train = SECTIONS[0]
    held_out = set[str]()

    if unlabelled := _alone(root, images, ids, channels):
        dataset = own.OwnImages([], [], cases.read(root, (), unlabelled), unlabelled=unlabelled)
    else:
        dataset = own.found_by(root, ids, lacking=True)
        divided = own.sections_of(root, dataset, group_by, ids.get("split"))
        # a patient who is tested must not be learned from, not even without a label
        held_out = {record.group for record, section in divided if section != train}

    records = own.grouped(
        dataset.unlabelled,
        [own.path_in(images, record) for record in dataset.unlabelled],
        group_by,
    )
    records = cases.described(root, records, dataset.rows)
    entries = []
    for record in records:
        if record.sections.get(cases.SPLIT, train) == train and record.group not in held_out:
            entry = {**item_of(record)}
            # the record has 0 there, which would be the first class
            entry.pop("label", None)
            entries.append(entry)

    return UnlabelledEntries(entries, bool(unlabelled))


def _alone(root: Path, images: Path, ids: Config, channels: int) -> tuple[Record, ...]:
    """Return the images of a folder if none has a label; otherwise none."""
    if ids.get("masks"):
        masks = own.path_below(root, str(ids["masks"]))
        table = pairs.paired(*matching.match(*own.paths(images, masks, channels > 1)))
        if table.records or table.problems:
            return ()

        return own.unlabelled(table.unlabelled.items())

    if ids.get("labels"):
        if own.path_below(root, str(ids["labels"])).is_file():
            return ()

        pictures = tables.image_files(images)
        return own.unlabelled(pictures or joined(named([images]), channels).items())

    has_class = any(name in ids["classes"] for name in own.image_folders(root))
    if has_class:
        return ()

    return own.unlabelled(tables.image_files(root))


# `medfl data check` for a bundle written by `medfl new`: layout, counts, patients and unreadable images

_IDS = (
    "dataset_dir images masks labels labels_are label_column uncertain blank columns classes "
    "mask_values mask_colours group_by split in_channels"
)


def check_folder(
    where: str | Path, folder: str | Path | None, *, progress: bool = False
) -> CheckReport:
    """Verify a folder of images for a bundle written by `medfl new`; `progress` shows a bar on stderr.

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
    # what was found until the error is read and counted all the same
    except InputError as error:
        problems.append(str(error))

    classes = tuple(ids["classes"])
    task = str(ids.get("labels_are") or "classification")
    columns = classes if not ids.get("masks") and task == "classification" else ("cases",)
    records = [record for record, _ in divided]
    assigned = [section for _, section in divided]
    counts = counted(columns, records, assigned)

    as_volumes = is_volumes(bundle.metadata)
    # pictures are converted to those of the network
    channels = ids["in_channels"] if as_volumes else None

    def read(record: Record) -> str:
        """Return what reading a case changed in it; InputError if it cannot be read."""
        return read_case(record, as_volumes, ids.get("mask_values") or len(classes), channels)[1]

    changes, errors = read_all(dataset.records, read, progress)
    problems += map(str, errors)

    if ids.get("masks") and not as_volumes:
        try:
            masks = (record.mask for record in dataset.records)
            pairs.check_palettes(masks, ids.get("mask_colours") or ())
        except InputError as error:
            problems.append(str(error))

    shown = []
    if task != "classification":
        shown = targets_told(task, classes, [record.target for record in dataset.records])

    names = columns
    present = counts
    if task == "multilabel":
        names = classes
        present = {}
        for section in SECTIONS:
            targets = [record.target for record, its_section in divided if its_section == section]
            totals = tuple(column.count(1) for column in zip(*targets, strict=True))
            present[section] = {"": totals}

    return CheckReport(
        name=bundle.name,
        folder=root,
        layout=_layout(ids, as_volumes),
        split=str(ids["split"] or "own"),
        phantom=own.cohort_of([root, *(record.image for record in dataset.records)]) is not None,
        classes=columns,
        counts=counts,
        problems=tuple(problems),
        warnings=tuple(warnings_of(names, records, assigned, present)),
        notes=(*shown, *_notes(root, ids, dataset, records), *volumes.changes_told(changes)),
    )


def notes_on_images(problem: Problem) -> tuple[str, ...]:
    """Return notes on a user's images: which are left out or named otherwise in a table, whether patients are known.

    Only bundles that name their folders as `medfl new` does have such notes: dataset_dir, images, masks, labels,
    classes.
    """
    if problem.dataset:
        return ()

    ids = ids_of(problem)
    # `medfl new` writes the folder and the class names as plain values
    if not (isinstance(ids.get("dataset_dir"), str) and isinstance(ids["classes"], list)):
        return ()

    items = []
    for data in map(problem.data, SECTIONS):
        if not isinstance(data, list):
            return ()
        items += [item for item in data if isinstance(item, Mapping)]

    return own.notes(ids["dataset_dir"], items, ids)


def ids_of(bundle: Problem) -> Document:
    """Return the ids of a bundle that locate its images, as far as it has them."""
    values = {}
    for name in _IDS.split():
        try:
            values[name] = bundle.get(name)
        except InputError:
            continue

    return {"classes": None, "group_by": None, "in_channels": None, **values}


def _layout(ids: Config, as_volumes: bool) -> str:
    images, masks = (f"{ids.get(name) or '.'}/".removeprefix("./") for name in ("images", "masks"))
    files = "<class>/<picture>"
    if ids.get("masks") == conventions.NNUNET_FILE:
        files = f"files that {conventions.NNUNET_FILE} lists"
    elif ids.get("masks"):
        files = f"{images}<name> + {masks}<name>{'_mask' * (images == masks)}"
    elif ids.get("labels"):
        files = f"{images}<{'volume' if as_volumes else 'picture'}> + {ids['labels']}"

    return f"{files} [+ cases.csv]"


def _notes(
    root: Path, ids: Config, dataset: own.OwnImages, records: Sequence[Record]
) -> tuple[str, ...]:
    """Return what is excluded, and what is known about patients."""
    notes = list(dataset.notes)
    if not (ids.get("masks") or ids.get("labels")):
        notes += own.beside_classes(root, dataset.records)

    notes += [*own.odd(root), *cases.notes(dataset.rows)]
    groups = {record.group for record in records}
    if own.are_patients_known(map(item_of, records), dataset.rows):
        notes.append(f"{len(groups)} patients, each in one section")
    elif records:
        notes.append(own.UNKNOWN_PATIENTS)

    return tuple(notes)
