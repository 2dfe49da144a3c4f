"""Reference masks, classes, findings or numbers for new images, matched by the images' names, for scoring."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from medfl.core import InputError, as_number, without
from medfl.datasets import own
from medfl.datasets.readers import (
    conventions,
    label_columns,
    matching,
    pairs,
    tables,
)
from medfl.datasets.readers.label_columns import Wanted
from medfl.datasets.readers.unlabelled import without_ending
from medfl.datasets.readers.volumes import volume_paths


def masks_of(path: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Return id -> URI of its reference mask, for images that have one.

    Args:
        path: a folder of masks, named as in users' data sets (`medfl.datasets.own.paired`).
        files: id -> URI of the images.

    Raises:
        InputError: it is not a folder, no mask in it belongs to an image, or one fits several.
    """
    if not path.is_dir():
        raise InputError(f"--reference {path} is no folder", "a folder of masks", "check the path")

    masks = [*pairs.picture_paths(path), *volume_paths(path)]
    images = conventions.channels(
        [(without_ending(ident), uri) for ident, uri in files.items()], masks
    )
    names, matched = matching.match(images, masks)
    # `match` identifies an image by its name alone, and names by their URIs
    mask_of = {}
    for name, uri in names.items():
        if name in matched:
            mask_of[uri] = matched[name]

    mask_uris = {}
    for ident, uri in files.items():
        if uri in mask_of:
            mask_uris[ident] = mask_of[uri]

    if not mask_uris:
        raise _no_match(
            path,
            f"{len(masks)} masks",
            "the name of its image, with or without _mask, _seg or _label",
        )

    return mask_uris


def labels_of(
    path: Path, files: Mapping[str, str], classes: Sequence[str], columns: Mapping[str, str]
) -> dict[str, int]:
    """Return id -> index of its reference class, for images that have one.

    Args:
        path: a folder with one folder of images per class, or a table as read by `label_columns.read`, with id and
            label, where a label is the name or the index of a class. An image is given by its path there, or by its
            file name if that is unique, with or without extension.
        files: id -> URI of the images.
        classes: names in label order.
        columns: "file" and "label" -> the table's column, if it has another name.

    Raises:
        InputError: it is neither, names another class, gives an image two classes, or matches none of the images.
    """
    if not path.is_dir():
        return _in_table(path, files, classes, columns)

    form_labels = defaultdict(set)
    for name, label in _in_folders(path, classes):
        for form in _forms(name):
            form_labels[form].add(label)

    class_indices = {}
    bare = Counter(_forms(ident)[-1] for ident in files)
    for ident in files:
        forms = _forms(ident)
        # files with the same name in several folders are distinguished only by their paths
        if bare[forms[-1]] > 1:
            forms = forms[:2]

        # the most exact form comes last, and so takes precedence
        labels = set[int]()
        for form in reversed(forms):
            labels = form_labels.get(form, labels)

        if len(labels) > 1:
            several = ", ".join(sorted(classes[label] for label in labels))
            raise InputError(
                f"--reference {path} has image {ident} as {several}",
                "one class an image",
                "give its path",
            )

        if labels:
            class_indices[ident] = min(labels)

    if not class_indices:
        raise _no_match(path, "labels", "the path or the name of its image")

    return class_indices


def vectors_of(
    path: Path,
    files: Mapping[str, str],
    names: Sequence[str],
    task: str,
    columns: Mapping[str, str],
) -> dict[str, tuple[float, ...]]:
    """Return id -> true findings (1 or 0) or numbers, NaN if unknown, for images with a known one.

    Args:
        path: a table as read by `label_columns.read`, with a column for each name, or one of findings separated by |.
        files: id -> URI of the images.
        names: of findings or numbers.
        task: multilabel or regression.
        columns: "file" and "label" -> the table's column, if it has another name.

    Raises:
        InputError: no such table or column, an invalid cell, or rows that match none of the images.
    """
    if not path.is_file():
        raise InputError(f"--reference {path} is no table", "a table", "check the path")

    vectors = label_columns.read(path, [*files], _wanted(task, names, columns)).targets
    if not vectors:
        raise _no_match(path, "rows", "the path or the name of its image, and something known")

    return dict(vectors)


def _wanted(task: str, names: Sequence[str], columns: Mapping[str, str]) -> Wanted:
    labels = (columns["label"],) if "label" in columns else ()
    return Wanted(task, labels, (*names,), roles=without(columns, ["label"]))


def _in_folders(root: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    folders = own.class_folders(root)
    unknown = list(without(folders, classes))
    if unknown or not folders:
        unknown = unknown or ["none"]
        raise InputError(
            f"--reference {root} has the folders {tables.several(unknown, 'folders')}",
            f"a folder of images for each class: {', '.join(classes)}",
            "give such a folder, or a table with the columns id and label",
        )

    labels = []
    for name, folder in folders.items():
        label = classes.index(name)
        for path, _ in tables.image_files(folder):
            # by its path with the class's folder, and without: the images to predict may not be in such folders
            labels += [(f"{name}/{path}", label), (path, label)]

    return labels


def _in_table(
    file: Path, files: Mapping[str, str], classes: Sequence[str], columns: Mapping[str, str]
) -> dict[str, int]:
    if not file.is_file():
        raise InputError(
            f"--reference {file} is not there", "a folder of classes or a table", "check the path"
        )

    labels = {name: index for index, name in enumerate(classes)}
    # classes may be named by numbers: their names then count, not their indices
    if not any(map(as_number, classes)):
        labels |= {str(index): index for index in range(len(classes))}

    label_of = label_columns.read(
        file, [*files], _wanted("classification", [*labels], columns)
    ).classes
    for ident, label in label_of.items():
        if label not in labels:
            raise InputError(
                f"{file}: label {label!r} of {ident}",
                f"one of {', '.join(classes)}, or their index from 0",
                "use one of these, or remove the row",
            )

    return {ident: labels[label] for ident, label in label_of.items()}


def _forms(name: str) -> tuple[str, ...]:
    """Return the possible names of an image, the most exact first."""
    bare = name.rpartition("/")[2]
    return name, without_ending(name), bare, without_ending(bare)


def _no_match(path: Path, references: str, allowed: str) -> InputError:
    return InputError(
        f"--reference {path} has {references}, but for none of the images",
        allowed,
        "check the names",
    )
