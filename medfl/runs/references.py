"""Reference masks, classes, findings or numbers of new images, found by the images' names, to score with."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from medfl.core.errors import InputError
from medfl.core.names import as_number
from medfl.datasets import own
from medfl.datasets.readers import (
    conventions,
    label_table,
    matching,
    pairs,
    tables,
)
from medfl.datasets.readers.label_columns import Wanted
from medfl.datasets.readers.unlabelled import without_ending
from medfl.datasets.readers.volumes import volume_paths


def masks_of(path: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Return id -> URI of its reference mask, of the images that have one.

    Args:
        path: a folder of masks, named as data sets of one's own name them (`medfl.datasets.own.paired`).
        files: id -> URI of the images.

    Raises:
        InputError: it is no folder, no mask in it is of an image, or one fits several.
    """
    if not path.is_dir():
        raise InputError(f"--reference {path} is no folder", "a folder of masks", "check the path")

    masks = [*pairs.picture_paths(path), *volume_paths(path)]
    images = conventions.channels(
        [(without_ending(ident), uri) for ident, uri in files.items()], masks
    )
    names, matched = matching.match(images, masks)
    mask_of = {uri: matched[name] for name, uri in names.items() if name in matched}
    mask_uris = {ident: mask_of[uri] for ident, uri in files.items() if uri in mask_of}

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
    """Return id -> index of its reference class, of the images that have one.

    Args:
        path: a folder with one of images for each class, or a table as `label_table.read` reads it, with id and label,
            where a label is the name or the index of a class. An image has its path there, or its file's name where
            only one has it, with or without the ending.
        files: id -> URI of the images.
        classes: names in label order.
        columns: "file" and "label" -> the table's column of it, of those that it calls otherwise.

    Raises:
        InputError: it is neither, names another class, gives an image two, or has none of the images.
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
        # files of one name in several folders are told apart by their paths alone
        if bare[forms[-1]] > 1:
            forms = forms[:2]

        # the most exact form comes last, and so counts
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
    """Return id -> true findings (1 or 0) or numbers, NaN where unknown, of the images of which one is known.

    Args:
        path: a table as `label_table.read` reads it, with a column for each name, or of findings one with | between.
        files: id -> URI of the images.
        names: of findings or numbers.
        task: multilabel or regression.
        columns: "file" and "label" -> the table's column of it, of those that it calls otherwise.

    Raises:
        InputError: no such table or column, a cell that is none of these, or a row for none of the images.
    """
    if not path.is_file():
        raise InputError(f"--reference {path} is no table", "a table", "check the path")

    vectors = label_table.read(path, [*files], _wanted(task, names, columns)).targets
    if not vectors:
        raise _no_match(path, "rows", "the path or the name of its image, and something known")

    return dict(vectors)


def _wanted(task: str, names: Sequence[str], columns: Mapping[str, str]) -> Wanted:
    labels = (columns["label"],) if "label" in columns else ()
    roles = {role: name for role, name in columns.items() if role != "label"}
    return Wanted(task, labels, (*names,), roles=roles)


def _in_folders(root: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    folders = own.class_folders(root)
    unknown = [name for name in folders if name not in classes]
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

    label_of = label_table.read(
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
    """Return what an image may be called, the most exact first."""
    bare = name.rpartition("/")[2]
    return name, without_ending(name), bare, without_ending(bare)


def _no_match(path: Path, references: str, allowed: str) -> InputError:
    return InputError(
        f"--reference {path} has {references}, but for none of the images",
        allowed,
        "check the names",
    )
