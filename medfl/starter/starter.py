"""`medfl new`: creates a bundle for a folder of images from their contents.

It is configuration only, so that a partner can approve it by reading; it names no file and no patient, so that all
sites of a federation can use the same one, each with its own folder of the same form.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import jinja2
import numpy as np
from numpy.typing import NDArray

from medfl.core import Document, InputError, is_plain_text, listed, slug
from medfl.datasets import own
from medfl.datasets.base import item_of
from medfl.datasets.readers import (
    cases,
    conventions,
    grouping,
    matching,
    pairs,
    tables,
    volumes,
)
from medfl.datasets.readers.checking import read_all, read_case
from medfl.datasets.readers.label_columns import Wanted, unit_of
from medfl.datasets.readers.mask_values import ANY
from medfl.datasets.readers.reading import is_text
from medfl.datasets.readers.splitting import Record
from medfl.starter.survey import (
    PictureFacts,
    Survey,
    common_facts,
    depth_notes,
    duplicate_notes,
    metadata_of,
)
from medfl.storage import new_folder, require_new_bundle


@dataclass(frozen=True)
class UserLayout:
    """Location of images, and of masks or a table of labels.

    Attributes:
        folder: the value of --data.
        images, masks, labels: paths in it, "." for the folder itself and "" if there is none.
        classes: value -> name of the masks' classes, if a file gives them.
        ignored: value of unlabelled pixels, given by that file.
        channels: names of the images' channels, given by that file.
        note: their layout, if it is more than folders of their own.
        stated: number of cases for training, given by that file.
    """

    folder: Path
    images: str = ""
    masks: str = ""
    labels: str = ""
    classes: Mapping[int, str] = field(default_factory=dict)
    ignored: int | None = None
    channels: tuple[str, ...] = ()
    note: str = ""
    stated: int | None = None


def find_layout(
    images: str | Path,
    masks: str | Path | None = None,
    labels: str | Path | None = None,
    named: bool = False,
) -> UserLayout:
    """Return the layout of folders.

    Args:
        images: folder of the images; without `masks` and `labels` it contains a folder for each class, images beside
            their masks, nnU-Net's layout or BIDS.
        masks: folder of the masks, beside that of the images or in it.
        labels: table of the classes, beside the folder of the images or in it.
        named: the user names the structures, overriding any file in the folder.

    Raises:
        InputError: no such folder, or one that is elsewhere.
    """
    root = Path(images).expanduser().resolve()
    if not root.is_dir():
        raise InputError(f"--images {images} is no folder", "a folder of images", "check the path")

    if labels is not None:
        if masks is not None:
            raise InputError(
                "--labels with --masks",
                "labelled pictures, or images with masks",
                "leave one out; patients and centres of images with masks stand in a table cases.csv beside them",
            )
        return _beside(root, Path(labels), "--labels", "table of the classes")

    if masks is not None:
        return _with_names(_beside(root, Path(masks), "--masks", "folder of the masks"), named)

    listed = conventions.NNUNET_FILE
    # a list of files decides before the names of folders do
    if conventions.listed_files(root / listed):
        return _with_names(
            UserLayout(root, listed, listed, note=f"nnU-Net's layout: files by {listed}"), named
        )

    names = conventions.NNUNET_FOLDERS
    if all((root / name).is_dir() for name in names):
        left_out = "; imagesTs is left out" * (root / "imagesTs").is_dir()
        return _with_names(
            UserLayout(root, *names, note=f"nnU-Net's layout: imagesTr and labelsTr{left_out}"),
            named,
        )

    if (root / conventions.BIDS_FILE).is_file():
        where = conventions.bids_masks(root)
        return UserLayout(
            root, ".", where, note=f"a BIDS data set: masks of {where}, patients are its subjects"
        )

    if note := _together(root):
        return UserLayout(root, ".", ".", note=note)

    return UserLayout(root)


def _beside(root: Path, place: Path, flag: str, kind: str) -> UserLayout:
    """Return the layout of images and a folder or table in the same folder, or in that of the images."""
    path = place.expanduser().resolve()
    if not (path.is_file() if flag == "--labels" else path.is_dir()):
        raise InputError(f"{flag} {place} is not there", f"the {kind}", "check the path")

    if path != root and path.is_relative_to(root):
        folder = root
        images = "."
    elif path.parent == root.parent and path != root:
        folder = root.parent
        images = root.name
    else:
        raise InputError(
            f"--images {root} and {flag} {place}",
            f"the {kind} and the images beside each other, or it among them",
            "put both into one folder",
        )

    where = path.relative_to(folder).as_posix()
    if flag == "--labels":
        return UserLayout(folder, images, labels=where)

    return UserLayout(folder, images, where)


def _with_names(layout: UserLayout, named: bool) -> UserLayout:
    """Return a layout with the names that nnU-Net's dataset.json has, if it is one of nnU-Net."""
    path = layout.folder / conventions.NNUNET_FILE
    of_nnunet = (conventions.NNUNET_FOLDERS[1], conventions.NNUNET_FILE)
    if layout.masks not in of_nnunet or not path.is_file():
        return layout
    names, ignored = conventions.mask_labels(path, named)
    note = layout.note + f"; names of the structures by {conventions.NNUNET_FILE}" * bool(
        layout.note and names
    )
    channels = conventions.channel_names(path)
    stated = conventions.stated_cases(path)
    return replace(
        layout, classes=names, ignored=ignored, channels=channels, note=note, stated=stated
    )


def _together(root: Path) -> str:
    """Return the suffix of masks in a folder with images beside their masks, which most images have; else ""."""
    images, masks = own.paths(root, root, lacking=False)
    if not masks or 2 * len(masks) < len(images):
        return ""

    endings = sorted({end for path, _ in masks for end in matching.MASK_END.findall(path)})
    return f"images and masks in one folder: files that end in {', '.join(endings)} are masks"


# The survey, and the bundle

_BEYOND = re.compile(r"\\ud[89ab]..\\ud[c-f]..")
_FILES = ("train.yaml", "evaluate.yaml", "inference.yaml", "federated.yaml")
_LEAST = 2
_MOST_CLASSES = 100
_MOST_SHADES = 20  # unnamed structures of pictures up to white; more are shades
_VOID = {255, 65535}
"""Largest values of 8 and 16 bits: beside small ones they say that a pixel has no class."""
_MOST_KINDS = 50  # of which such data sets have less; shades of grey are larger
_LOSSY = (".jpg", ".jpeg")  # which keep no values
_FEW = 10  # test images, below which folds are offered
_FOLDS = 5
_NETWORKS = {"labelled": "small_cnn", "pictures": "unet16", "volumes": "unet8"}
_LABELLED = {
    "classification": "labelled pictures",
    "multilabel": "pictures with findings",
    "regression": "pictures with numbers",
}
_SOURCES = {"classification": "class", "multilabel": "finding", "regression": "column"}
_KINDS = {
    "labelled": "labelled pictures",
    "pictures": "pictures with masks",
    "volumes": "volumes with masks",
}


def survey(
    images: str | Path,
    masks: str | Path | None = None,
    *,
    names: Sequence[str] = (),
    labels: str | Path | None = None,
    group_by: str | None = None,
    wanted: Wanted | None = None,
    progress: bool = False,
) -> Survey:
    """Read every image, and its mask, once.

    Args:
        images: a folder with a folder of pictures for each class; with `masks` a folder of pictures or volumes;
            or of both, as in `medfl.starter.find`.
        masks: folder of the masks, named like their images, beside the folder of the images or in it.
        names: of the masks' structures, for the values 1, 2, ...; default: structure_1, structure_2, ...
        labels: table of the images' classes, findings or numbers, likewise.
        group_by: expression whose group in a file name is the patient.
        wanted: how to read the table.
        progress: show a bar on stderr.

    Raises:
        InputError: no images, unreadable ones, fewer than two classes, masks of other shapes; names the files.
            Or invalid names of structures, or fewer than the masks have.
    """
    _check_structures(names)
    layout = find_layout(images, masks, labels, bool(names))
    if names and not layout.masks:
        raise InputError(
            "--classes without --masks",
            "folders of pictures, or their table, name their classes",
            "rename these",
        )
    if wanted not in (None, Wanted()) and not layout.labels:
        raise InputError(
            "--task, --uncertain, --blank or the name of a column without --labels",
            "they say how the table of labels is read",
            "add --labels FILE, or leave them out",
        )

    if layout.masks:
        return _segmented(layout, names, group_by, progress)

    return _labelled(layout, group_by, wanted or Wanted(), progress)


def write(
    target: str | Path, content: Survey, *, network: str | None = None, size: int | None = None
) -> Path:
    """Write a bundle for a survey and return its folder; after an error nothing of it remains.

    Args:
        target: new folder; its name becomes the bundle's.
        content: the survey of the folder of images.
        network: name of a network (`medfl.networks.names()`); default: a small one.
        size: side to which pictures are resized; default: 64 for labelled ones, else 128; at least 16.

    Raises:
        InputError: the folder exists, or no such network or size.
        RunError: it cannot be written.
    """
    root = Path(target).expanduser()
    require_new_bundle(root, size)
    from medfl import (
        networks,  # imported here because PyTorch takes seconds: problems with the images are reported first
    )
    from medfl.problem.tasks import KINDS

    chosen = network or _NETWORKS[content.kind]
    segments = content.kind != "labelled"
    allowed = [name for name in networks.names() if (name in networks.SEGMENTERS) == segments]
    if chosen not in allowed:
        raise InputError(
            f"--network {chosen}",
            f"for {_KINDS[content.kind]}: {', '.join(allowed)}",
            "choose one of them",
        )

    side = size or (128 if segments else 64)
    if content.plan:
        _check_structures(content.classes[1:])  # named by sites
        side = content.patch[0]

    if content.has_volumes and size is not None:
        raise InputError(
            f"--size {size} for volumes",
            "a size of pictures; the configurations have that of volumes",
            "leave it out",
        )

    places = (content.images, content.masks, content.labels, content.label_column)
    for text in (*content.classes, *places, *content.columns.values(), content.group_by or ""):
        if text[:1] in ("$", "@", "%") or not is_text(text):
            raise InputError(
                f"{text!r}",
                "names in UTF-8 that do not begin with $ @ %: a bundle evaluates these",
                "rename it",
            )

    kind_text = _LABELLED[content.task] if not segments else _KINDS[content.kind]
    if content.has_volumes:
        kind_text = kind_text.replace("pictures", "volumes")

    words = dict(
        asdict(content), kind_text=kind_text, items_call=content.items_call,
        key_metric=KINDS["segmentation" if segments else content.task].key_metric,
        noun={"multilabel": "findings", "regression": "numbers"}.get(content.task, "classes"),
        items_end=content.items_end, name=root.name, network=chosen, size=side,
        plan=content.plan,  # with its properties
    )  # fmt: skip
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("medfl.starter"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["yaml"] = _yaml
    files = {}
    for name in _FILES:
        files[f"configs/{name}"] = environment.get_template(f"new_{name}.j2").render(words)

    if content.plan:
        files["docs/plan.json"] = json.dumps(content.plan.record(), indent=2) + "\n"

    files["docs/README.md"] = environment.get_template("new_readme.md.j2").render(words)
    metadata = metadata_of(root.name, content, side, kind_text)
    files["configs/metadata.json"] = json.dumps(metadata, indent=2) + "\n"

    with new_folder(root) as partial:
        for name, text in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_text(text, encoding="utf-8", newline="")

    return root


def _yaml(value: object) -> str:
    """Return a JSON value, which is a YAML value, but for the two escapes of a character beyond 16 bits."""
    return _BEYOND.sub(lambda match: json.loads(f'"{match[0]}"'), json.dumps(value))


def _check_structures(names: Sequence[str]) -> None:
    """Raise an InputError unless names of metrics can distinguish structures with these names."""
    slugs = [*map(slug, names)]
    for name, name_slug in zip(names, slugs, strict=True):
        unreadable = re.search(r"[#@$%]|::", name) or not is_plain_text(name)
        if name_slug in ("", "background") or slugs.count(name_slug) > 1 or unreadable:
            raise InputError(
                f"structures {', '.join(names)}: {name!r}",
                "names that differ in letters or digits, without # @ $ % and ::, none for the background, no formula",
                "choose other names",
            )


def _labelled(layout: UserLayout, group_by: str | None, wanted: Wanted, progress: bool) -> Survey:
    root = layout.folder
    if layout.labels:
        index = own.in_table(root, layout.images, layout.labels, wanted)
    else:
        index = _class_folders(root)

    task = index.task or "classification"
    if task == "classification" and len(index.classes) < _LEAST:
        raise InputError(
            f"{root / layout.labels} names {len(index.classes)} classes: {', '.join(index.classes)}",
            f"at least {_LEAST}",
            "check which column has the classes",
        )

    for name in index.classes:
        if re.search(r"[#@$%]|::", name) or not is_plain_text(name):
            source = _SOURCES[task] if layout.labels else "class folder"
            raise InputError(
                f"{source} {name!r}",
                "a name in one line without # @ $ % and ::, which mean something in a bundle, and no formula",
                "rename it",
            )

    # folders of classes hold pictures
    as_volumes = bool(layout.labels) and not tables.image_files(own.path_below(root, layout.images))
    facts = _read_all(index.records, as_volumes, progress)
    counts = _counts(index.records, len(index.classes), task)
    divided = own.sections_of(root, index, group_by)
    tested = _counts(
        [record for record, section in divided if section == "test"], len(index.classes), task
    )
    untested = []
    for name, count, count_in_test in zip(index.classes, counts, tested, strict=True):
        if count and not count_in_test:
            untested.append(f"{name} ({count})")

    notes = [*index.notes, *own.odd(root), *cases.notes(index.rows)]
    notes += [*depth_notes(facts), *duplicate_notes(facts, index.records)]
    notes += volumes.changes_told(image.changes for image in facts)
    if not layout.labels:
        notes = [*own.beside_classes(root, index.records), *notes]

    if untested:
        notes.append(f"no test image of {', '.join(untested)}: too few images or patients")

    fields = _patients(index, divided, group_by) | common_facts(facts)
    if task == "regression":
        training = [record.target for record, section in divided if section == "train"]
        fields |= _scale(index.classes, training)

    return Survey(
        "labelled",
        str(root),
        index.classes,
        counts,
        images=layout.images,
        labels=layout.labels,
        phantom=str(own.cohort_of(record.image for record in index.records) or ""),
        notes=tuple(notes),
        said=(f"{task}: {index.columns}",) if index.columns else (),
        task=task,
        label_column=index.column,
        uncertain=wanted.uncertain,
        blank=wanted.blank,
        columns=wanted.roles,
        **fields,
    )


def _counts(records: Sequence[Record], count: int, task: str) -> tuple[int, ...]:
    """Return how many images have each class, finding or number."""
    if task == "classification":
        by_label = Counter(record.label for record in records)
        return tuple(by_label[label] for label in range(count))

    targets = np.array([record.target for record in records], np.float64).reshape(-1, count)
    has = targets == 1
    if task == "regression":
        has = ~np.isnan(targets)

    return tuple(has.sum(0).tolist())


def _scale(names: Sequence[str], targets: Sequence[tuple[float, ...]]) -> Document:
    """Return mean, standard deviation and range of the training images' numbers.

    Raises:
        InputError: a number that no training image has, or that is constant.
    """
    columns = np.array(targets, np.float64).T
    for name, column in zip(names, columns, strict=True):
        is_known = column[~np.isnan(column)]
        if len(set(is_known.tolist())) < 2:
            has = f"all {len(is_known)} have {is_known[0]:g}" if len(is_known) else "none has it"
            raise InputError(
                f"number {name!r} of the training images: {has}",
                "numbers that differ from image to image",
                "check the column",
            )

    def rounded(values: NDArray[np.float64]) -> tuple[float, ...]:
        return tuple(float(f"{value:.6g}") for value in values)

    return {
        "mean": rounded(np.nanmean(columns, axis=1)),
        "sd": rounded(np.nanstd(columns, axis=1)),
        "units": tuple(map(unit_of, names)),
    }


def _class_folders(root: Path) -> own.OwnImages:
    classes = own.class_folders(root)
    if classes:
        own.refuse_other_folders(root, classes)
    elif any(volumes.is_volume(path.name) for path in root.rglob("*")):
        raise InputError(
            f"{root} has volumes whose masks are not found by their names",
            "masks in a folder of their own (--masks DIR), or NAME.nii.gz beside NAME_seg.nii.gz",
            "name them so, and the channels of one image NAME_0000, NAME_0001, ...",
        )

    if len(classes) < _LEAST:
        raise InputError(
            f"{root} has {len(classes)} folders with pictures, {own.endings_in(root)}",
            f"a folder for each class, at least {_LEAST}, with pictures ({', '.join(tables.IMAGE_SUFFIXES)})",
            "sort the pictures into folders, or name their classes in a table with --labels FILE; with masks add "
            "--masks DIR",
        )

    own.refuse_masks_among(classes.values())
    return own.in_folders(root, [*classes])


def _patients(
    dataset: own.OwnImages, divided: Sequence[tuple[Record, str]], group_by: str | None
) -> Document:
    """Return the fields of a survey about patients, centres and folds."""
    fields: Document = {
        "group_by": group_by,
        "tested": sum(section == "test" for _, section in divided),
    }
    groups = {record.group for record, _ in divided}
    # a site needs a patient for training even if one fold tests and another patient validates
    trained = len(groups) - math.ceil(len(groups) / _FOLDS) - 1
    fields["sites"] = min(3, max(1, trained))

    centres = {record.centre for record, _ in divided}
    trained_at = {record.centre for record, section in divided if section == "train"}
    if len(centres) > 1 and "unknown" not in centres and centres == trained_at:
        fields["centres"] = tuple(sorted(centres))

    patients = {(record.group, record.label) for record, _ in divided}
    fewest = min(Counter(label for _, label in patients).values())  # patients of a class
    divides_itself = any("section" in row for row in dataset.rows.values())
    if fields["tested"] < _FEW and fewest > 1 and not divides_itself:
        fields["folds"] = min(_FOLDS, len(groups))

    if own.are_patients_known((item_of(record) for record, _ in divided), dataset.rows):
        return {**fields, "patients": len(groups)}

    names = defaultdict[str, list[str]](list)
    for (record, _), name in zip(divided, dataset.names, strict=True):
        names[str(record.label)].append(name)

    return {**fields, "offer": grouping.offered(names)}


def _segmented(
    layout: UserLayout, structures: Sequence[str], group_by: str | None, progress: bool
) -> Survey:
    images = own.path_below(layout.folder, layout.images)
    masks = own.path_below(layout.folder, layout.masks)
    _check_structures([*layout.classes.values()][1:])
    dataset = own.with_masks(layout.folder, layout.images, layout.masks)
    records = dataset.records
    as_volumes = own.is_volumes(images)
    endings = volumes.SUFFIXES if as_volumes else tables.IMAGE_SUFFIXES

    # swapped folders fail as bad masks do: the error tells which it was
    try:
        facts = _read_all(records, as_volumes, progress)
        present = stored = [picture.values for picture in facts]
        name_count = max(len(structures), len(layout.classes) - 1)
        # with names for several structures, 255 is one of their values
        if name_count < 2:
            present = _white_as_one(present, as_volumes)

        values = set[int]().union(*present)
        is_lossy = any(record.mask.lower().endswith(_LOSSY) for record in records)
        # volumes are never JPEG: many values are many structures
        most_shades = ANY if as_volumes else max(name_count, 1 if is_lossy else _MOST_SHADES)
        ignored = layout.ignored
        origin = f"which {conventions.NNUNET_FILE} calls 'ignore'"
        ordinary = {0} | values - _VOID
        if not name_count and max(values) in _VOID and 0 < max(ordinary) < _MOST_KINDS:
            ignored = max(values)
            origin = "which VOC and Cityscapes call 'void' (name each value with --classes where it is a structure)"

        # they would become a class, or background
        if count := sum(ignored in values for values in present):
            raise InputError(
                f"{count} of {len(present)} masks have the value {ignored}, {origin}: pixels that nobody has labelled",
                "masks that say a class of each pixel: neither loss nor scores here leave some out",
                "label these pixels, cut them off, or move the cases away",
            )

        _check_values(masks, values, most_shades, is_lossy)
        # a volume has no palette
        colours = pairs.check_palettes(record.mask for record in records if not as_volumes)
    except InputError as error:
        if images != masks and _swapped(records[0], as_volumes):
            raise InputError(
                f"the files in {images} look like masks, those in {masks} like their images",
                "--images is the folder of the images, --masks that of the masks",
                "swap the two",
            ) from error

        raise

    divided = own.sections_of(layout.folder, dataset, group_by)
    names = _names_of_values(layout, structures, values)
    counts = tuple(sum(value in values for values in present) for value in names)
    absent = [str(value) for value in names if value not in values]
    notes = (
        *own.of_pairs(images, masks, records, endings),
        *own.odd(layout.folder),
        *cases.notes(dataset.rows),
    )
    if {1, 255} <= set[int]().union(*stored) and 255 not in values:
        count = sum(255 in values for values in stored)
        notes += (f"the value 255 is read as 1, which others have, in {count} masks",)
    # who names several values knows that they are structures
    are_numbered = name_count < 2 and all(2 * len(values | {0}) > max(values) for values in present)
    if are_numbered and len({*map(max, present)}) > 3:
        notes += (
            "masks have the values 1, 2, ... up to a number of their own, as numbered objects (cells, nuclei) do: here "
            "each value is a class; write 1 for all objects of a kind",
        )
    if absent:
        notes += (f"no mask has the values {', '.join(absent)}",)

    mask_values = () if [*names] == [*range(len(names))] else tuple(names)
    if mask_values:
        notes += (
            f"masks have the values {listed([*map(str, names)], _MOST_CLASSES)}: classes 0 to {len(names) - 1} in "
            "training, and these values again in what medfl predict writes; a site's masks may have no others",
        )

    way = conventions.normalised(layout.channels)
    if way != "zscore" and not (way and as_volumes):
        notes += (otherwise_normalised(layout.channels),)

    notes += duplicate_notes(facts, records)
    notes += volumes.changes_told(picture.changes for picture in facts)
    paths = [*(record.image for record in records), *(record.mask for record in records)]
    fields: Document = {
        "images": layout.images,
        "masks": layout.masks,
        "said": (layout.note,) if layout.note else (),
        "phantom": str(own.cohort_of(paths) or ""),
        "mask_values": mask_values,
        "mask_colours": colours,
        "channel_titles": layout.channels,
        "normalised": way,
        **_patients(dataset, divided, group_by),
        **common_facts(facts),
    }
    if as_volumes and layout.channels and fields["channels"] != len(layout.channels):
        notes += (
            f"{conventions.NNUNET_FILE} names the channels {listed(layout.channels)}, "
            f"images have {fields['channels']}",
        )

    if layout.stated not in (None, len(records)):
        notes += (
            f"{conventions.NNUNET_FILE} has numTraining {layout.stated}, and {len(records)} images have masks",
        )

    fields["notes"] = notes + depth_notes(facts)
    return Survey(
        "volumes" if as_volumes else "pictures",
        str(layout.folder),
        tuple(names.values()),
        counts,
        **fields,
    )


def otherwise_normalised(channels: Sequence[str]) -> str:
    """Say that nnU-Net normalises images differently from the small bundle."""
    return (
        f"nnU-Net normalises the channels {listed(channels)} otherwise; here each image is by its own mean and "
        "standard deviation: change NormalizeIntensityd in train.yaml and inference.yaml"
    )


def _names_of_values(
    layout: UserLayout, structures: Sequence[str], values: set[int]
) -> Mapping[int, str]:
    """Return value -> name of the classes in masks, ascending, background first.

    Names of structures belong to the values 1, 2, ... or, if these have gaps, to the existing ones.
    """
    shown = sorted(values - {0})
    if layout.classes:
        if unknown := [str(value) for value in shown if value not in layout.classes]:
            problem = f"{conventions.NNUNET_FILE} names {', '.join(layout.classes.values())}, and masks have "
            raise InputError(
                problem + f"the value {listed(unknown)} too",
                "a name for each value of the masks",
                "add it there, or change the masks",
            )

        return layout.classes

    # other sites' masks may have the values that none here has
    if structures and max(shown) <= len(structures):
        shown = [*range(1, len(structures) + 1)]
    elif structures and len(shown) != len(structures):
        raise InputError(
            f"--classes names {', '.join(structures)}, and masks have the values {listed([*map(str, shown)])}",
            "a name for each value of the masks but 0, in their order",
            f"give {len(shown)} names",
        )

    names = structures or [f"structure_{value}" for value in shown]
    if len(shown) == 1 and not structures:
        names = ["structure"]

    return {0: "background", **dict(zip(shown, names, strict=True))}


def _white_as_one(present: list[Set[int]], as_volumes: bool) -> list[Set[int]]:
    """Replace 255 by 1 in masks with only 0 and 255, or 0 and 1; for volumes some must have the latter."""
    is_binary = all(values <= {0, 255} or values <= {0, 1} for values in present)
    if is_binary and (not as_volumes or any(1 in values for values in present)):
        return [{min(value, 1) for value in values} for values in present]

    return present


def _read_all(records: Sequence[Record], as_volumes: bool, progress: bool) -> list[PictureFacts]:
    """Read all images; unreadable ones are reported together."""
    results, errors = read_all(records, partial(_read, as_volumes), progress)
    if len(errors) > 1:
        problems, allowed, advice = zip(*(error._parts for error in errors), strict=True)
        details = tables.several(problems, "files")
        one_advice = advice[0] if len({*advice}) == 1 else "restore or remove these"
        raise InputError(
            f"{len(errors)} of {len(records)} images: {details}", allowed[0], one_advice
        )

    if errors:
        raise errors[0]

    return results


def _check_values(masks: Path, values: set[int], shades: int, is_lossy: bool) -> None:
    """Refuse values that are no classes: more than these up to white are shades that JPEG or resizing makes."""
    most = len(values | {0})
    text = f"{most} values, as {', '.join(map(str, sorted(values)[:5]))}"
    if values == {0}:
        problem = "no value but 0"
        advice = "check that these are the masks"
    elif most - 1 > shades and (is_lossy or max(values) == 255):
        problem = f"{text} up to {max(values)}, perhaps shades of JPEG or resizing"
        advice = "save the masks in black and white, or a value a class, as PNG, or name each class with --classes"
    elif most > _MOST_CLASSES:
        problem = text
        advice = "save a value a class; of numbered objects, as cells, 1 for all"
    else:
        return

    raise InputError(
        f"the masks in {masks} have {problem}",
        f"0 for the background and a whole number for each structure, at most {_MOST_CLASSES - 1} of them",
        advice,
    )


def _swapped(record: Record, as_volumes: bool) -> bool:
    """Tell whether an image has few values, like a mask, and its mask many."""

    def values(uri: str) -> int:
        (pixels,), _ = read_case(replace(record, image=uri, mask=""), as_volumes, ANY)
        return len(np.unique(np.asarray(pixels)))

    try:
        return values(record.image) <= _MOST_CLASSES < values(record.mask)
    except InputError:  # reported elsewhere
        return False


def _read(as_volumes: bool, record: Record) -> PictureFacts:
    """Return facts about an image, and about its mask if there is one."""
    case, changes = read_case(record, as_volumes, ANY)
    facts = PictureFacts.of(np.asarray(case[0]))._replace(changes=changes)
    if not record.mask:
        return facts

    return facts._replace(values=frozenset(np.unique(np.asarray(case[1])).tolist()))
