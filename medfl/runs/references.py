"""The references that predictions of new images are scored by: masks, or classes, found by the images' names."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from medfl.core.errors import InputError
from medfl.datasets import own
from medfl.datasets.readers import conventions, label_table, matching, pairs, tables
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
    of_uri = {uri: matched[name] for name, uri in names.items() if name in matched}
    mask_uris = {ident: of_uri[uri] for ident, uri in files.items() if uri in of_uri}

    if not mask_uris:
        raise _no_match(
            path,
            f"{len(masks)} masks",
            "the name of its image, with or without _mask, _seg or _label",
        )

    return mask_uris


def labels_of(path: Path, files: Mapping[str, str], classes: Sequence[str]) -> dict[str, int]:
    """Return id -> index of its reference class, of the images that have one.

    Args:
        path: a folder with one of images for each class, or a table as `label_table.read` reads it, with id and label,
            where a label is the name or the index of a class. An image has its path there, or its file's name where
            only one has it, with or without the ending.
        files: id -> URI of the images.
        classes: names in label order.

    Raises:
        InputError: it is neither, names another class, gives an image two, or has none of the images.
    """
    if not path.is_dir():
        return _in_table(path, files, classes)

    form_labels = defaultdict[str, set[int]](set)
    for name, label in _in_folders(path, classes):
        for form in _forms(name):
            form_labels[form].add(label)

    class_indices = {}
    bare = Counter(_forms(ident)[-1] for ident in files)
    for ident in files:
        forms = _forms(ident)
        forms = forms if bare[forms[-1]] == 1 else forms[:2]
        labels = set(next((form_labels[form] for form in forms if form in form_labels), ()))
        if len(labels) > 1:
            named = ", ".join(sorted(classes[label] for label in labels))
            raise InputError(
                f"--reference {path} has image {ident} as {named}",
                "one class an image",
                "give its path",
            )

        if labels:
            class_indices[ident] = labels.pop()

    if not class_indices:
        raise _no_match(path, "labels", "the path or the name of its image")

    return class_indices


def _in_folders(root: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    named = own.class_folders(root)
    if unknown := [name for name in named if name not in classes] or ([] if named else ["none"]):
        raise InputError(
            f"--reference {root} has the folders {tables.several(unknown, 'folders')}",
            f"a folder of images for each class: {', '.join(classes)}",
            "give such a folder, or a table with the columns id and label",
        )

    below = [(name, path) for name in named for path, _ in tables.image_files(root / name)]
    return [
        (form, classes.index(name)) for name, path in below for form in (f"{name}/{path}", path)
    ]


def _in_table(file: Path, files: Mapping[str, str], classes: Sequence[str]) -> dict[str, int]:
    if not file.is_file():
        raise InputError(
            f"--reference {file} is not there", "a folder of classes or a table", "check the path"
        )

    labels = {str(index): index for index in range(len(classes))} | {
        name: at for at, name in enumerate(classes)
    }
    given_labels = label_table.read(file, [*files]).classes
    for ident, label in given_labels.items():
        if label not in labels:
            raise InputError(
                f"{file}: label {label!r} of {ident}",
                f"one of {', '.join(classes)}, or their index from 0",
                "use one of these, or remove the row",
            )

    return {ident: labels[label] for ident, label in given_labels.items()}


def _forms(name: str) -> tuple[str, ...]:
    """Return what an image may be called, the most exact first."""
    bare = name.rpartition("/")[2]
    return name, without_ending(name), bare, without_ending(bare)


def _no_match(path: Path, what: str, allowed: str) -> InputError:
    return InputError(
        f"--reference {path} has {what}, but for none of the images", allowed, "check the names"
    )
