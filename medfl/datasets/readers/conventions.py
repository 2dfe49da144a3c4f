"""Naming conventions for images, masks and classes: images and masks in one folder, nnU-Net, BIDS.

Each function renames masks to the paths of their images, which `medfl.datasets.readers.matching` then compares.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from medfl.core import InputError, Plain, is_plain_text, listed, not_among, printable, read_json
from medfl.datasets.readers import matching, volumes
from medfl.datasets.readers.matching import Named
from medfl.datasets.readers.reading import IMAGE_SUFFIXES, JOINED, is_text

NNUNET_FILE = "dataset.json"
BIDS_FILE = "dataset_description.json"
NNUNET_FOLDERS = ("imagesTr", "labelsTr")
DERIVED = ("derivatives", "sourcedata", "code")
_CHANNEL = re.compile(r"(.+)_(\d{4})")
_BIDS_RE = re.compile(r"(sub-[A-Za-z0-9]+)((?:_[a-z]+-[A-Za-z0-9+]+)*)_([A-Za-z0-9]+)")
_MASKS = ("dseg", "mask")
_OF_MASKS = ("label", "desc", "res", "den")
"""Entities that a mask has beside those of its image."""
_NATIVE = ("orig", "individual")
"""Values of the entity `space` that say the grid of the image itself."""
_LONGEST = 60  # characters of a name in a file of others
_LABELS = 'labels as {"background": 0, "tumour": 1}'
_ADVICE = "change its labels, or move the file away"
_WAYS = {
    "ct": "",
    "nonorm": "nonorm",
    "rescale_0_1": "rescale_to_0_1",
    "rescale_to_0_1": "rescale_to_0_1",
    "rgb_to_0_1": "",
}
"""Name of a channel -> how nnU-Net normalises it, "" in a way that needs the values of all images."""
_IGNORE = "ignore"
"""What nnU-Net calls pixels of unknown class."""


def apart(files: Named) -> tuple[Named, Named]:
    """Return the images and the masks of one folder: a mask's name is that of an image and `_mask`, `_seg` or so."""
    paths = {path for path, _ in files}
    images = list[tuple[str, str]]()
    masks = list[tuple[str, str]]()
    for path, uri in files:
        is_mask = matching.MASK_END.sub("", path) in paths - {path}
        (masks if is_mask else images).append((path, uri))

    return images, masks


def channels(images: Named, masks: Named, lacking: bool = False) -> Named:
    """Return images with the channels of each together where they are named `<mask>_0000`, `<mask>_0001`, ...

    Args:
        images: path and URI of each file.
        masks: of the masks.
        lacking: an image may lack channels that others have; images without a mask are named so as well, if any is.

    Raises:
        InputError: an image lacks a channel; names both.
    """
    image_paths = dict(images)
    of_mask = dict(masks).keys() - image_paths
    complete = []
    parts: dict[str, dict[str, str]] = defaultdict(dict)
    for path, uri in images:
        match = _CHANNEL.fullmatch(path)
        if match and (match[1] in of_mask or (lacking and match[1] not in image_paths)):
            parts[match[1]][match[2]] = uri
        else:
            complete.append((path, uri))

    if of_mask.isdisjoint(parts) and (masks or not lacking):
        return images

    channel_numbers = sorted(set().union(*parts.values()))
    for path, numbers in parts.items():
        missing = not_among(channel_numbers, numbers)
        if missing and not lacking:
            raise InputError(
                f"image {path} has no channel {missing[0]}, which others have",
                f"of each image the channels {', '.join(channel_numbers)}, as files {path}_{channel_numbers[0]} ...",
                "add the file, remove the case, or have the run say by --site-channels which channels its site has",
            )

    for path, numbers in parts.items():
        complete.append((path, JOINED.join(numbers[number] for number in sorted(numbers))))

    return sorted(complete)


def bids(images: Named, masks: Named) -> tuple[Named, Named]:
    """Return the images and masks of a BIDS data set; a mask has the path of the image with the same entities.

    An image has these entities, a mask besides `label`, `desc`, `res` or `den`, and the suffix `dseg` or `mask`; with
    `space-orig`, `space-individual` or the image's suffix, as in `space-T1w`, it is on the image's grid.

    Raises:
        InputError: several images have the entities of a mask; names them.
    """
    images_of = defaultdict(list)
    for path, _ in images:
        match = _parsed(path)
        if match and match[3] not in _MASKS:
            images_of[match[1] + match[2]].append(path)

    renamed = []
    for path, uri in masks:
        match = _parsed(path)
        if not match or match[3] not in _MASKS:
            continue

        entities = [part for part in match[2].split("_") if part.partition("-")[0] not in _OF_MASKS]
        fits = images_of.get("_".join([match[1], *filter(None, entities)]), [])
        if not fits and (
            space := next((part[6:] for part in entities if part.startswith("space-")), "")
        ):
            native = [part for part in entities if part and not part.startswith("space-")]
            fits = images_of.get("_".join([match[1], *native]), [])
            fits = [path for path in fits if space in _NATIVE or path.endswith(f"_{space}")]

        if len(fits) > 1:
            raise InputError(
                f"mask {uri} fits the images {' and '.join(fits)}",
                "one image with the entities (sub, ses, run, ...) of a mask",
                "move the images of other kinds into another folder",
            )

        renamed.append((fits[0] if fits else path, uri))

    used = {path for path, _ in renamed}
    bids_images = []
    for path, uri in images:
        if path in used or _parsed(path):
            bids_images.append((path, uri))

    return bids_images, renamed


def subject(path: str) -> str:
    """Return the subject of a file of a BIDS data set, as `sub-01`."""
    return path.rpartition("/")[2].partition("_")[0]


def bids_masks(root: Path) -> str:
    """Return the one folder of a BIDS data set's derivatives that has masks, as a path in it.

    Raises:
        InputError: none has, or several.
    """
    folders = sorted(path for path in (root / "derivatives").glob("*") if path.is_dir())
    having = []
    for folder in folders:
        if any(_is_mask(name) for name, _ in volumes.volume_files(folder)):
            having.append(folder)

    if len(having) == 1:
        return f"derivatives/{having[0].name}"

    place = root / "derivatives"
    problem = f"no folder in {place} has files ..._dseg.nii.gz or ..._mask.nii.gz"
    place /= "NAME"
    if having:
        names = ", ".join(folder.name for folder in having)
        problem = f"the derivatives {names} of {root} all have masks"
        place = having[0]

    raise InputError(
        problem,
        "a BIDS data set with the masks of one pipeline in derivatives/<pipeline>/",
        f"name it: --masks {place}",
    )


def _is_mask(name: str) -> bool:
    match = _parsed(volumes.bare(name))
    return bool(match and match[3] in _MASKS)


def mask_labels(path: Path, named: bool = False) -> tuple[dict[int, str], int | None]:
    """Return value -> name of what an nnU-Net `dataset.json` has under `labels`, {} where it has none, and "ignore".

    Both forms are read: `{"tumour": 1}`, and `{"1": "tumour"}` of nnU-Net 1 and the Decathlon.

    Args:
        path: of the file.
        named: the user names the structures; the names of the file are left out.

    Returns:
        The names, the background's first, and the value of pixels that nobody has labelled, None without one.

    Raises:
        InputError: they are regions, of several values each, or not one name for each value.
    """
    labels = _document(path).get("labels")
    if labels is None:
        return {}, None

    values_of = labels if isinstance(labels, dict) else {"": ""}
    for name, value in values_of.items():
        match value:
            case [single]:  # a region of one value
                values_of[name] = single

    if all(_index(name) is not None and isinstance(v, str) for name, v in values_of.items()):
        values_of = {name: number for number, name in values_of.items()}

    ignored = next((_index(v) for name, v in values_of.items() if name.lower() == _IGNORE), None)
    regions = [name for name, value in values_of.items() if isinstance(value, list)]
    if named:
        return {}, ignored
    if regions:
        raise InputError(
            f"{path}: the labels {listed([*map(printable, regions)])} are regions, of several values",
            "one value a class, and one class a pixel",
            "name the structures of the values 1, 2, ... with --classes, which the file's names give way to",
        )

    names = {}
    for name, value in values_of.items():
        number = _index(value)
        if (
            name.lower() != _IGNORE
            and number is not None
            and is_plain_text(name)
            and 0 < len(name) <= _LONGEST
        ):
            names[number] = name

    if 0 not in names or len(names) + (ignored is not None) != len(labels):
        raise InputError(f"{path}: labels {printable(labels, 120)}", _LABELS, _ADVICE)

    return dict(sorted(names.items())), ignored


def file_ending(images: Path) -> str:
    """Return how files end in nnU-Net's imagesTr or labelsTr by its `dataset.json`, in lower case; "" where unsaid.

    Raises:
        InputError: they are of a kind that is not read.
    """
    path = images.parent / NNUNET_FILE
    if images.name not in NNUNET_FOLDERS or not path.is_file():
        return ""

    ending = str(_document(path).get("file_ending", "")).lower()
    kinds = (*volumes.SUFFIXES, *IMAGE_SUFFIXES)
    if ending and ending not in kinds:
        raise InputError(
            f"{path}: file_ending {printable(ending, _LONGEST)!r}",
            f"files that end in {', '.join(kinds)}",
            "convert images and masks, and change it there",
        )

    return ending


def listed_files(path: Path) -> dict[str, tuple[list[str], str]]:
    """Return case -> the files of its channels and of its mask, as nnU-Net's `dataset.json` lists them in `dataset`.

    Raises:
        InputError: the list has another form.
    """
    if not path.is_file():
        return {}

    document = _document(path)
    cases = document.get("dataset")
    if "labels" not in document or not isinstance(cases, dict):  # of another program, perhaps
        return {}

    files = {}
    for name, case in cases.items():
        match case:
            case {"images": [_, *_] as images, "label": mask} if all(
                map(_is_path, [*images, mask])
            ):
                files[name] = images, mask
            case _:
                raise InputError(
                    f"{path}: case {printable(name, _LONGEST)!r} of dataset",
                    'as {"case": {"images": ["case_0000.nii.gz"], "label": "case.nii.gz"}}, paths beside this file',
                    "write it so, or leave the list out",
                )

    return files


def _is_path(value: object) -> bool:
    return isinstance(value, str) and bool(value) and is_text(value)


def channel_names(path: Path) -> tuple[str, ...]:
    """Return the channels' names by `channel_names` or `modality` of nnU-Net's `dataset.json`, () where it has none."""
    document = _document(path)
    names = document.get("channel_names", document.get("modality"))
    if isinstance(names, list):
        names = {str(number): name for number, name in enumerate(names)}
    if not isinstance(names, dict) or None in map(_index, names):
        return ()

    return tuple(printable(names[number], _LONGEST) for number in sorted(names, key=int))


def stated_cases(path: Path) -> int | None:
    """Return how many cases for training nnU-Net's `dataset.json` says that there are, None where it does not."""
    return _index(_document(path).get("numTraining"))


def normalised(names: Sequence[str]) -> str:
    """Return how nnU-Net normalises channels of these names: "nonorm", "rescale_to_0_1" or "zscore".

    It is "" where channels differ in it, or where the values of all images are needed, as of CT.
    """
    ways = {_WAYS.get(name.casefold(), "zscore") for name in names or ("",)}
    return ways.pop() if len(ways) == 1 else ""


def _parsed(path: str) -> re.Match[str] | None:
    """Return subject, entities and kind of a file's name, None where it is not one of BIDS."""
    return _BIDS_RE.fullmatch(path.rpartition("/")[2])


def _document(path: Path) -> Plain:
    document = read_json(path, _LABELS, _ADVICE, 2**24)
    return document if isinstance(document, dict) else {}


def _index(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 6:
        return int(value)

    return None
