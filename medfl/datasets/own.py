"""A user's own folder: pictures in one folder per class, images with a table of labels, or images with masks.

An optional table `cases.csv` at its top describes the images: a column `file` (path in the folder, or file name if
it is unique, with or without its ending), and any of `patient` (whose images stay in one section), `centre`
(where it was taken) and `section` (train, validate, test). Patients may also be extracted from the file names by a
regular expression `group_by`. Without sections, the images of each class are divided 70/10/20 into train, validate
and test by a hash of the patient or file name, hence always in the same way; each section gets at least one.
`split="fold:2/5"` is the second of five folds of a cross-validation.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from medfl.core import (
    SECTIONS,
    Config,
    InputError,
    alike,
    composed,
    folders_below,
    not_among,
    printable,
    words_of,
)
from medfl.datasets.base import MARKER, Item, item_of
from medfl.datasets.readers import (
    cases,
    conventions,
    dicom,
    grouping,
    label_columns,
    matching,
    pairs,
    tables,
)
from medfl.datasets.readers.label_columns import Wanted
from medfl.datasets.readers.reading import (
    JOINED,
    by_name,
    files_of,
    is_hidden,
    is_odd,
    is_text,
    shown_files,
    split_uri,
)
from medfl.datasets.readers.splitting import (
    Record,
    Rule,
    are_findings,
    by_findings,
    by_group,
    filled,
    fold_of,
    published,
    stratified,
)
from medfl.datasets.readers.volumes import SUFFIXES, bare, is_volume, volume_files, volume_paths

UNLABELLED = "unlabelled"
"""Folder beside the class folders, with images of unknown class."""
_ALONE = ", or name a site that has images alone with --unlabelled"


@dataclass(frozen=True)
class OwnImages:
    """The images of a folder.

    Attributes:
        records: the images' records.
        names: for each image, the path that contains its patient, below the folder of all images.
        rows: from the table: id -> patient, centre, section.
        notes: one line each: what is left out.
        columns: which columns of a table were used, in words.
        classes: classes of labelled images, in label order; names of findings or numbers.
        task: classification, multilabel or regression, if a table gives the labels.
        column: the table's column with all findings, or the class column if the user named it.
        unlabelled: images without a label or mask.
    """

    records: list[Record]
    names: list[str]
    rows: cases.Rows
    notes: tuple[str, ...] = ()
    columns: str = ""
    classes: tuple[str, ...] = ()
    unlabelled: tuple[Record, ...] = ()
    task: str = ""
    column: str = ""


def labelled(
    folder: str | Path,
    classes: Sequence[str],
    section: str,
    group_by: str | None = None,
    split: str | None = None,
) -> list[Item]:
    """Return the items of a section of `<folder>/<class>/<image>`; classes may be missing, but others may not occur.

    Args:
        folder: of the folders of classes.
        classes: names in label order.
        section: train, validate or test.
        group_by: expression whose group in a file's name is the patient (`medfl.datasets.readers.grouping`).
        split: None, or `fold:NUMBER/COUNT` of a cross-validation.

    Raises:
        InputError: no images, a folder that is not a class, a wrong table or expression.
    """
    root = _root(folder)
    return _items(root, in_folders(root, classes), section, group_by, split)


def listed(
    folder: str | Path,
    images: str,
    labels: str,
    classes: Sequence[str],
    section: str,
    group_by: str | None = None,
    split: str | None = None,
    labels_are: str = "classification",
    label_column: str | None = None,
    uncertain: str = "ignore",
    blank: str = "ignore",
    columns: Mapping[str, str] | None = None,
) -> list[Item]:
    """Return the items of a section of the images below `<folder>/<images>` with a label in `<folder>/<labels>`.

    The table is read as `medfl.datasets.readers.label_columns.read` does; the other arguments are those of `labelled`.

    Args:
        folder: contains the images and the table.
        images: path of the images in it.
        labels: path of the table in it.
        classes: names in label order; for findings or numbers, the column names.
        section: train, validate or test.
        group_by: expression whose group in a file's name is the patient.
        split: None, or `fold:NUMBER/COUNT` of a cross-validation.
        labels_are: classification (one class each), multilabel (findings, 1 and 0) or regression (numbers).
        label_column: the table's column of classes, or of all findings separated by |; None: found by name.
        uncertain: ignore, zeros or ones: how to read a finding -1, ?, u or uncertain; ignored ones are NaN.
        blank: ignore or zeros: how to read an empty cell of a finding.
        columns: file, patient, centre, section -> the table's name for that column, if it differs.

    Raises:
        InputError: no images, a class that is none, a wrong table or expression.
    """
    root = _root(folder)
    named = (label_column,) if label_column else ()
    requested = Wanted(labels_are, named, tuple(classes), uncertain, blank, columns or {})
    return _items(root, in_table(root, images, labels, requested), section, group_by, split)


def paired(
    folder: str | Path,
    images: str,
    masks: str,
    section: str,
    group_by: str | None = None,
    split: str | None = None,
) -> list[Item]:
    """Return the items of a section of `<folder>/<images>/<name>` and `<folder>/<masks>/<name>`.

    They are pictures or volumes, also in subfolders; a mask's name may end in _mask, _segmentation, _seg or
    _label, and must if both are in one folder. `medfl.datasets.readers.matching.match` finds the image of a mask, also
    by the names of nnU-Net and BIDS; the channels of nnU-Net form one image, and BIDS subjects are patients.

    Raises:
        InputError: a folder is missing, there are no pairs, a mask is not that of one image, or a wrong table or
            expression.
    """
    root = _root(folder)
    return _items(root, with_masks(root, images, masks, lacking=True), section, group_by, split)


def in_folders(root: Path, classes: Sequence[str]) -> OwnImages:
    """Return the images of the class folders."""
    classes = [*map(composed, classes)]
    spelling = dict(zip(map(alike, classes), classes, strict=True))
    images = {}
    for name, folder in image_folders(root).items():
        images[spelling.get(alike(name), name)] = tables.image_files(folder)

    bare: tuple[Record, ...] = ()
    # a class may be called so; then the folder is one of the classes'
    if UNLABELLED not in classes:
        bare = unlabelled(images.pop(UNLABELLED, ()), f"{UNLABELLED}/")

    unknown = not_among(images, classes)
    if unknown or not images:
        foreign = tables.several(list(map(repr, unknown)), "folders")
        problem = f"{root} has no folder with images"
        if unknown:
            problem = f"folder {foreign} in {root} is of no class"

        advice = f"give the folder that holds these folders with --data{_ALONE}"
        # where some folders are of classes, the others are the mistake, not the path
        if any(name in classes for name in images):
            advice = "rename it, or move it away"

        raise InputError(problem, f"a folder for each class: {', '.join(classes)}", advice)

    records = []
    names = []
    for name, files in images.items():
        for path, uri in files:
            records.append(_record(uri, classes.index(name), f"{name}/{path}"))
            names.append(path)

    empty = not_among(classes, images)
    notes = label_columns.repeated(images)
    if empty:
        notes.append(f"no image of class {', '.join(map(repr, empty))}")
    if bare:
        notes.append(f"{len(bare)} images in folder {UNLABELLED!r} have no class and are left out")

    rows = cases.read(root, records, bare)
    return OwnImages(records, names, rows, tuple(notes), "", tuple(classes), bare)


def in_table(root: Path, images: str, labels: str, wanted: Wanted) -> OwnImages:
    """Return the images of a folder that a table lists; without wanted names the classes are the table's, sorted.

    Raises:
        InputError: the table has other classes, or as `medfl.datasets.readers.label_columns.read`.
    """
    table = path_below(root, labels)
    if not table.is_file():
        raise InputError(
            f"{table} is not there", "the table of the images' labels", f"restore it{_ALONE}"
        )

    folder = path_below(root, images)
    # of volumes x_0000, x_0001, ... are the channels of x
    files = tables.image_files(folder) or conventions.channels(volume_paths(folder), [], True)

    labelling = label_columns.read(table, [path for path, _ in files], wanted)
    names = list(labelling.names or wanted.names) or sorted(set(labelling.classes.values()))
    if unknown := sorted(set(labelling.classes.values()) - set(names)):
        raise InputError(
            f"{table} has the class {tables.several(list(map(repr, unknown)), 'classes')}",
            f"the classes {', '.join(names)}",
            "change these rows",
        )

    used = []
    records = []
    bare = []
    for path, uri in files:
        if path in labelling.classes:
            records.append(_record(uri, names.index(labelling.classes[path]), path))
        elif path in labelling.targets:
            records.append(replace(_record(uri, 0, path), target=labelling.targets[path]))
        else:
            bare.append((path, uri))
            continue

        used.append(path)

    if not records and labelling.task != "classification":
        raise InputError(
            f"{table}: nothing is known of any image, {labelling.columns}",
            "an image at least with a known label",
            "check the column",
        )

    unlabelled_records = unlabelled(bare)
    # cases.csv counts more than further columns of the table of labels
    rows = cases.read(root, records, unlabelled_records) or {
        path: row for path, row in labelling.rows.items() if row
    }
    return OwnImages(
        records,
        used,
        rows,
        labelling.notes,
        labelling.columns,
        tuple(names),
        unlabelled_records,
        labelling.task,
        labelling.column,
    )


def with_masks(root: Path, images: str, masks: str, *, lacking: bool = False) -> OwnImages:
    """Return the images of a folder that have masks in another or the same folder; some of them may lack channels."""
    image_folder = path_below(root, images)
    mask_folder = path_below(root, masks)
    table = _pairs(image_folder, mask_folder, lacking)
    if image_folder.is_file():  # of nnU-Net, which lists the files beside it
        image_folder = root

    records = table.records
    bare = unlabelled(table.unlabelled.items())
    if (image_folder / conventions.BIDS_FILE).is_file():
        records = _of_subjects(records)
        bare = tuple(_of_subjects(bare))

    return OwnImages(
        records,
        [path_in(image_folder, record) for record in records],
        cases.read(root, records, bare),
        tuple(table.notes),
        unlabelled=bare,
    )


def unlabelled(files: Iterable[tuple[str, str]], folder: str = "") -> tuple[Record, ...]:
    """Return images without labels, by their paths in a folder."""
    return tuple(_record(uri, 0, folder + path) for path, uri in files)


def _of_subjects(records: Iterable[Record]) -> list[Record]:
    return [replace(record, group=conventions.subject(record.image)) for record in records]


def path_in(folder: Path, record: Record) -> str:
    """Return an image's path below the folder of all images."""
    return composed(os.path.relpath(record.image.split(JOINED)[0], folder).replace(os.sep, "/"))


def _record(uri: str, label: int, ident: str) -> Record:
    return Record(uri, label, ident, "unknown", ident)


def notes(
    folder: str | Path, items: Sequence[Mapping[str, object]], ids: Config
) -> tuple[str, ...]:
    """Return notes on the folder from which the items of all sections come: what is left out, unknown patients.

    Items of other kinds of data lists have no notes. `ids` are `images`, `masks`, `labels`, `classes` of the bundle.
    """
    root = Path(folder)
    used_images = {str(item.get("image")) for item in items}
    try:
        dataset = found_by(root, ids)
    except InputError:
        return ()

    images = {record.image for record in dataset.records}
    # the folder has changed since, or the bundle takes other images than this finds: notes would be of others
    if not {str(item.get("image")) for item in items if "label" in item} <= images <= used_images:
        return ()

    lines = [*odd(root), *cases.notes(dataset.rows)]
    # a site that trains on its unlabelled images does not leave them out
    if used_images == images:
        lines = [*dataset.notes, *lines]
    if not are_patients_known(items, dataset.rows):
        lines.append(UNKNOWN_PATIENTS)

    return tuple(lines)


def are_patients_known(items: Iterable[Mapping[str, object]], rows: cases.Rows) -> bool:
    """Tell whether a table or file names say whose images these are, even if each has one of its own name."""
    has_column = any(row.get("patient") for row in rows.values())
    return has_column or any(item.get("group") != item["id"] for item in items)


NO_PATIENTS = (
    "patients are not known: images of one may be in training and in test data, and the scores then too high; "
    "name them in column 'patient' of cases.csv"
)
UNKNOWN_PATIENTS = (
    f"{NO_PATIENTS}, or as a part of the file names with --config group_by=EXPRESSION"
)


def found_by(root: Path, ids: Config, *, lacking: bool = False) -> OwnImages:
    """Return the images of a folder as a bundle of `medfl new` with these ids takes them; some may lack channels."""
    if ids.get("masks"):
        return with_masks(root, str(ids["images"]), str(ids["masks"]), lacking=lacking)
    if ids.get("labels"):
        return in_table(root, str(ids["images"]), str(ids["labels"]), wanted_by(ids))
    return in_folders(root, ids["classes"])


def wanted_by(ids: Config) -> Wanted:
    """Return how a bundle of `medfl new` with these ids has its table of labels read."""
    column = ids.get("label_column")
    return Wanted(
        ids.get("labels_are") or "classification",
        (str(column),) if column else (),
        tuple(ids["classes"]),
        ids.get("uncertain") or "ignore",
        ids.get("blank") or "ignore",
        ids.get("columns") or {},
    )


def above(items: Iterable[Mapping[str, object]]) -> str:
    """Return the deepest folder above all images of a data list; predictions keep their paths below it."""
    files = (split_uri(str(item["image"]).split(JOINED)[0])[0] for item in items)
    return os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])


def class_folders(root: Path) -> dict[str, Path]:
    """Return the folders that hold images by their names, sorted, except that of images of unknown class."""
    folders = image_folders(root)
    folders.pop(UNLABELLED, None)
    return folders


def image_folders(root: Path) -> dict[str, Path]:
    """Return all folders that hold images by their names, sorted."""
    return {name: path for name, path in _folders(root).items() if tables.image_files(path)}


def beside_classes(root: Path, records: Sequence[Record]) -> list[str]:
    """Return notes on other contents of class folders beside their pictures, and on folders without pictures."""
    pictures = (record.image for record in records)
    lines = [*left_out(root, pictures, tables.IMAGE_SUFFIXES, "in no class folder")]
    if empty := list(map(repr, _folders(root).keys() - image_folders(root))):
        lines.append(f"no class, as there is no picture in it: folder {', '.join(sorted(empty))}")

    return lines


def _folders(root: Path) -> dict[str, Path]:
    shown = []
    for path in root.iterdir():
        if path.is_dir() and path.name[0] not in "._":
            shown.append(path)

    by_name((alike(path.name), str(path)) for path in shown)  # which refuses those that look alike
    return {name: Path(path) for name, path in by_name((path.name, str(path)) for path in shown)}


def cohort_of(uris: Iterable[str | Path]) -> Path | None:
    """Return the phantom cohort that holds one of these folders or files, or None.

    Missing files are skipped; a link counts as its target too.
    """
    folders = set()
    for path in map(Path, files_of(map(str, uris))):
        if os.path.exists(path):
            # as it is named and as links lead: a cohort may be linked to, whole or image by image
            for place in (path.absolute(), path.resolve()):
                folders |= {place, *place.parents}

    return next((folder for folder in sorted(folders) if (folder / MARKER).is_file()), None)


def _pairs(images: Path, masks: Path, lacking: bool) -> tables.Table:
    """Return a record for each image that has a mask."""
    for folder in (images, masks):
        if not folder.is_dir() and folder.name != conventions.NNUNET_FILE:
            raise InputError(
                f"{folder} is no folder",
                "a folder of images and one of their masks",
                f"give the paths of both folders{_ALONE}",
            )

    image_paths, mask_paths = paths(images, masks, lacking)
    stated = ""
    if ending := conventions.file_ending(images):
        stated = f", not in {ending} as {conventions.NNUNET_FILE} has it"

    of_masks = SUFFIXES if is_volumes(images) else tables.IMAGE_SUFFIXES
    for folder, files, kinds in (
        (images, image_paths, tables.IMAGE_SUFFIXES + SUFFIXES),
        (masks, mask_paths, of_masks),
    ):
        if not files:
            series = ", or folders of a DICOM series each" * (kinds[-1] == SUFFIXES[-1])
            raise InputError(
                f"{folder} has no image: {endings_in(folder)}{stated}",
                f"files that end in {', '.join(kinds)}{series}",
                f"convert them{_ALONE}",
            )

    table = pairs.paired(*matching.match(image_paths, mask_paths))
    if table.problems:
        problem = tables.several(table.problems, "masks")
        advice = f"name each mask as its image, and move other files away{_ALONE}"
        ends_so = matching.MASK_END.search
        image_names = dict(image_paths)
        if all(name.rpartition("_")[0] in image_names for name, _ in mask_paths):
            advice = matching.MERGE
        if all(map(ends_so, image_names)) and not any(map(ends_so, dict(mask_paths))):
            advice = f"the masks seem to be in {images}: swap the two folders"

        raise InputError(
            problem, "an image and its mask have the same name, in the same capitals", advice
        )

    return table


def paths(images: Path, masks: Path, lacking: bool) -> tuple[matching.Named, matching.Named]:
    """Return the images and masks of two folders, or of one, by matching paths; no masks if their folder is missing."""
    if images.name == conventions.NNUNET_FILE:
        return _listed(images)

    if (images / conventions.BIDS_FILE).is_file():
        # derivatives are made of raw images, and are named as these are
        raw = []
        for name, uri in volume_files(images):
            if name.partition("/")[0] not in conventions.DERIVED:
                raw.append((bare(name), uri))

        return conventions.bids(raw, [(bare(name), uri) for name, uri in volume_files(masks)])

    index = pairs.picture_paths
    if is_volumes(images):
        index = volume_paths

    if images == masks:
        return conventions.apart(index(images))

    mask_paths = []
    if masks.is_dir():
        mask_paths = index(masks)

    ending = conventions.file_ending(images)
    mask_paths = [(name, uri) for name, uri in mask_paths if uri.lower().endswith(ending)]
    image_paths = []
    for name, uri in index(images):
        # masks may lie in a folder among the images
        if uri.lower().endswith(ending) and not PurePath(uri).is_relative_to(masks):
            image_paths.append((name, uri))

    return conventions.channels(image_paths, mask_paths, lacking), mask_paths


def _listed(file: Path) -> tuple[matching.Named, matching.Named]:
    """Return the images and masks that nnU-Net's dataset.json lists, each by the name of its case."""
    images = []
    masks = []
    for name, (channels, mask) in conventions.listed_files(file).items():
        uris = [str(path_below(file.parent, path)) for path in channels]
        images.append((name, JOINED.join(uris)))
        masks.append((name, str(path_below(file.parent, mask))))

    return images, masks


def is_volumes(images: Path) -> bool:
    """Tell whether a folder, or a list of nnU-Net, holds volumes or DICOM series, and no pictures."""
    if images.name == conventions.NNUNET_FILE:
        return any(is_volume(mask) for _, mask in conventions.listed_files(images).values())
    if ending := conventions.file_ending(images):
        return is_volume(ending)
    if any(is_volume(path.name) for path in images.iterdir()):
        return True
    return not tables.image_files(images) and any(path.is_dir() for path in images.iterdir())


def _root(folder: str | Path) -> Path:
    root = Path(folder)
    if not root.is_dir():
        raise InputError(
            f"the bundle's images are to lie in {root}, which is no folder",
            "a folder of images as docs/README.md of the bundle has it",
            "give it with --data DIR",
        )

    return root


def path_below(root: Path, name: str) -> Path:
    """Return a path in the data folder that a bundle names.

    Raises:
        InputError: it is outside the folder.
    """
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise InputError(
            f"images are looked for in {name!r}",
            f"a place below {root}",
            f"put them there, and change the bundle's ids, or {conventions.NNUNET_FILE}",
        )
    place = root
    for part in PurePath(name).parts:
        place /= part
        if not place.exists():
            # macOS writes an accent as a character of its own: the same name in other bytes
            fits = (p for p in place.parent.glob("*") if composed(p.name) == composed(part))
            place = next(fits, place)

    return place


def _items(
    root: Path, dataset: OwnImages, section: str, group_by: str | None, split: str | None
) -> list[Item]:
    divided = sections_of(root, dataset, group_by, split)
    chosen = [record for record, its_section in divided if its_section == section]
    # By id, so that a data list does not depend on the order in which files are found.
    return list(map(item_of, sorted(chosen, key=lambda record: record.id)))


def sections_of(
    root: Path, dataset: OwnImages, group_by: str | None = None, split: str | None = None
) -> list[tuple[Record, str]]:
    """Return each image with its section; its group is its patient, or the image itself if that is unknown.

    Raises:
        InputError: a wrong table, expression or split, or a section without images.
    """
    records = grouped(dataset.records, dataset.names, group_by)
    records = cases.described(root, records, dataset.rows)
    has_sections = any("section" in row for row in dataset.rows.values())
    if split:
        rule = _fold(split, has_sections)
    elif has_sections:
        rule = published(cases.SPLIT)
    else:
        rule = filled(
            by_findings("own") if are_findings(records) else by_group("own", at_centres=False)
        )

    sections = rule(stratified(records))
    if empty := not_among(SECTIONS, sections):
        of_patients = ""
        if are_patients_known(map(item_of, records), dataset.rows):
            of_patients = f" of {len({record.group for record in records})} patients"

        raise InputError(
            f"{len(records)} images{of_patients} in {root}, none of them in section {empty[0]!r}",
            f"sections are {', '.join(SECTIONS)}: at least 3 images of one class, of as many patients",
            f"add images, or name their sections in column 'section' of {cases.TABLE}",
        )

    return list(zip(records, sections, strict=True))


def grouped(
    records: Sequence[Record], names: Sequence[str], group_by: str | None
) -> Sequence[Record]:
    """Return records with the patients that an expression finds in their names, or else that DICOM headers state."""
    if group_by and records:
        patients = grouping.by_names(group_by, names)
    else:
        patients = [dicom.patient(record.image.split(JOINED)[0]) for record in records]
        # two for many images are no patients, but what a program wrote for all
        if None in patients or len({*patients}) < len(SECTIONS):
            return records

    of_patients = []
    for record, patient in zip(records, patients, strict=True):
        of_patients.append(replace(record, group=patient or record.group))

    return of_patients


def _fold(split: str, has_sections: bool) -> Rule:
    rule = fold_of(split, "own-fold")
    if rule is None or has_sections:
        advice = "take the column 'section' out of the table, or leave --folds out"
        raise InputError(
            f"split {split!r}{' of images whose table names their sections' * has_sections}",
            "fold:NUMBER/COUNT, as fold:2/5, of images without sections of their own",
            advice if has_sections else "write it like that, or leave it out",
        )

    return rule


# Checks of a user's own folder: unused files, and folders whose names are not class names

_TABLES = (cases.TABLE, conventions.NNUNET_FILE, conventions.BIDS_FILE)
_IMAGES = {"image", "images", "img", "imgs"}
_MASKS = {
    *words_of("""
    mask masks label labels seg segs segmentation segmentations annotations ground_truth groundtruth
    gt
""")
}


def refuse_other_folders(folder: Path, names: Iterable[str]) -> None:
    """Raise an InputError if the picture folders are named like sections, or images and masks, not like classes."""
    lower = {name.lower(): name for name in names}
    sections = [lower[name] for name in lower if name in cases.SECTION_NAMES]
    # `test` or `validation` alone may be a class; `train` is not
    if {"train", "training"} & lower.keys() or len(sections) == len(lower):
        raise InputError(
            f"folders {', '.join(sections)} in {folder} are named as sections, not classes",
            "a folder for each class, with its images of all sections",
            "put each class's into one folder and say their sections in column 'section' of cases.csv",
        )

    images = [lower[name] for name in lower if name in _IMAGES]
    masks = [lower[name] for name in lower if name in _MASKS]
    # among many folders two classes may be called so
    if images and masks and 2 * len(images + masks) > len(lower):
        raise InputError(
            f"folders {images[0]} and {masks[0]} in {folder} are named as images and their masks, not classes",
            "a folder for each class, or images with masks",
            f"give --images {folder / images[0]} --masks {folder / masks[0]}",
        )


def refuse_masks_among(folders: Iterable[Path]) -> None:
    """Raise an InputError if a class folder holds a picture and its mask: the mask would count as a picture."""
    for folder in folders:
        _, masks = conventions.apart(pairs.picture_paths(folder))
        if masks:
            raise InputError(
                f"class folder {folder} holds pictures and their masks, as {masks[0][1]}",
                "pictures only, or images and their masks in two folders",
                "move the masks elsewhere; with masks instead of classes give --images DIR --masks DIR",
            )


def left_out(
    folder: Path, used: Iterable[str], endings: Collection[str], what: str
) -> tuple[str, ...]:
    """Return a line about unused images of a folder, and one about its other files, if it has any.

    Args:
        folder: the folder; its hidden files, its cases.csv and the files of nnU-Net and BIDS do not count.
        used: files, and folders of a DICOM series.
        endings: of images, in lower case.
        what: describes unused images, as in "3 images {what}: left out".
    """
    used_paths = set(used)
    images = list[str]()
    other_files = list[str]()
    tables_there = [folder / name for name in _TABLES]
    # A folder's own files before those of its subfolders.
    for path in sorted(shown_files(folder), key=lambda path: (path.parent, path)):
        # a DICOM series is used as a folder: so are its files
        is_used = not used_paths.isdisjoint(map(str, (path, *path.parents)))
        if not is_used and path not in tables_there:
            is_image = path.name.lower().endswith(tuple(endings))
            (images if is_image else other_files).append(path.relative_to(folder).as_posix())

    lines = []
    if images:
        lines.append(f"{len(images)} images {what}: left out, first {images[0]}")
    if other_files:
        kind = f"files that do not end in {', '.join(endings)}"
        lines.append(f"{len(other_files)} {kind}: left out, first {other_files[0]}")

    return tuple(lines)


def endings_in(folder: Path) -> str:
    """Return in words how the files of a folder end."""
    endings = {path.suffix or "no dot" for path in shown_files(folder)} or {"nothing"}
    return f"its files end in {tables.several(sorted(endings), 'endings')}"


def odd(folder: Path) -> tuple[str, ...]:
    """Return a line about entries of a folder that no reader accepts, if any: pipes, and names that are not text."""
    paths = []
    for base, folders, files in folders_below(folder):
        paths += [os.path.join(base, name) for name in folders if not is_text(name)]
        # in place, so that the walk does not go into the others
        folders[:] = [name for name in folders if not is_hidden(name) and is_text(name)]
        shown = (os.path.join(base, name) for name in files if not is_hidden(name))
        paths += filter(is_odd, shown)

    if not paths:
        return ()

    note = f"{len(paths)} pipes, devices, or names that are not in UTF-8 or have '.zip!' or {JOINED!r}: left out"
    return (f"{note}, first {printable(os.path.relpath(min(paths), folder))}",)


def of_pairs(
    images: Path, masks: Path, records: Sequence[Record], endings: Collection[str]
) -> tuple[str, ...]:
    """Return lines about files of two folders, or of one, that form no pair."""
    shown = files_of(record.image for record in records)
    if images.is_file():  # which lists both
        images = masks = images.parent
    # a folder within the other: what is left out is told once
    if images == masks or masks.is_relative_to(images):
        return left_out(
            images, [*shown, *(record.mask for record in records)], endings, "without a mask"
        )
    return (
        *left_out(images, shown, endings, "without a mask"),
        *left_out(masks, (record.mask for record in records), endings, "of no image"),
    )
