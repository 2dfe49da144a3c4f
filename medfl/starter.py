"""A bundle for images of one's own, written by looking at them: what `medfl new` does.

It is configuration only, so that a partner can approve it by reading; it names no file and no patient, so that all
sites of a federation can have the very same one, each with a folder of its own of the same form.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tqdm import tqdm

from medfl import networks
from medfl.datasets import own, pairs, tables, volumes
from medfl.datasets.reading import read_pixels
from medfl.errors import InputError
from medfl.storage import write_atomic

Say = Callable[[str], object]
_FILES = ("train.yaml", "evaluate.yaml", "inference.yaml", "federated.yaml")
_LEAST, _MOST_CLASSES = 2, 100
_PATCH, _STEP = 64, 8  # voxels a side of a patch at most, and what it is a multiple of
_NETWORKS = {"labelled": "small_cnn", "pictures": "unet16", "volumes": "unet8"}
_KINDS = {"labelled": "labelled pictures", "pictures": "pictures with masks", "volumes": "volumes with masks"}


@dataclass(frozen=True)
class Seen:
    """What was seen of a folder of images.

    Attributes:
        kind: "labelled" pictures, or "pictures" or "volumes" with masks.
        folder: what is given with --data.
        classes: names in label order; of masks with the background first.
        counts: images of each class; of masks, images that have some of it.
        channels: of an image.
        brightest: largest value that a picture can have.
        sides: least and largest side of the images, in pixels or voxels.
        patch: of volumes, a training patch.
        images, masks: names of the folders in `folder`, "" of labelled pictures.
        phantom: the phantom cohort that some of them are of, "" where all may be real.
    """

    kind: str
    folder: str
    classes: tuple[str, ...]
    counts: tuple[int, ...]
    channels: int
    brightest: int
    sides: tuple[int, int]
    patch: tuple[int, ...] = ()
    images: str = ""
    masks: str = ""
    phantom: str = ""


def look(images: str | Path, masks: str | Path | None = None, *, progress: bool = False) -> Seen:
    """Read every image, and its mask, once.

    Args:
        images: a folder with a folder of pictures for each class; with `masks` a folder of pictures or NIfTI volumes.
        masks: folder of the masks, of the same names as their images, beside the folder of the images.
        progress: show a bar on stderr.

    Raises:
        InputError: no images, one that cannot be read, fewer than two classes, masks of other shapes; names the file.
    """
    place = Path(images).expanduser().resolve()
    if not place.is_dir():
        raise InputError(f"--images {images} is no folder", "a folder of images", "check the path")
    if masks is None:
        return _labelled(place, progress)
    other = Path(masks).expanduser().resolve()
    if other.parent != place.parent or other == place:
        raise InputError(
            f"--images {images} and --masks {masks}", "two folders beside each other", "lay both into one folder"
        )
    return _segmented(place, other, progress)


def write(target: str | Path, seen: Seen, *, network: str | None = None, size: int | None = None) -> Path:
    """Write a bundle for what was seen and return its folder, whole or not at all.

    Args:
        target: new folder; its name becomes the bundle's.
        seen: the images.
        network: name of a network (`medfl.networks.names()`); default: a small one.
        size: side to which pictures are resized; default: 64 for labelled ones, else 128; at least 16.

    Raises:
        InputError: the folder exists, or no such network or size.
    """
    root = Path(target).expanduser()
    refuse(root)
    chosen = network or _NETWORKS[seen.kind]
    fits = (chosen in networks.SEGMENTERS) == (seen.kind != "labelled")
    if chosen not in networks.names() or not fits:
        allowed = [n for n in networks.names() if (n in networks.SEGMENTERS) == (seen.kind != "labelled")]
        raise InputError(f"--network {chosen}", f"for {_KINDS[seen.kind]}: {', '.join(allowed)}", "choose one of them")
    side = size or (64 if seen.kind == "labelled" else 128)
    if side < 16:
        raise InputError(f"--size {side}", "a whole number of at least 16 pixels", "choose another")
    if seen.kind == "volumes" and size is not None:
        raise InputError(f"--size {size} for volumes", "volumes keep their size; patches are cut", "leave it out")
    words = {**asdict(seen), "name": root.name, "network": chosen, "size": side, "kind_text": _KINDS[seen.kind]}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("medfl"), undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["yaml"] = json.dumps  # a JSON value is a YAML value, whatever a class is called
    made = {f"configs/{name}": environment.get_template(f"new_{name}.j2").render(words) for name in _FILES}
    made["docs/README.md"] = environment.get_template("new_readme.md.j2").render(words)
    made["configs/metadata.json"] = json.dumps(_metadata(root.name, seen, side), indent=2) + "\n"
    try:
        for name, text in made.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(root / name, text.encode())
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)
        raise InputError(f"{root} cannot be written: {error.strerror}", "a new folder", "choose another") from error
    return root


def refuse(root: Path) -> None:
    """Raise an InputError if no bundle can be written into this folder."""
    if root.exists():
        raise InputError(f"{root} exists", "a new folder for the bundle", "choose another name")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", root.name):
        raise InputError(f"bundle name {root.name!r}", "letters, digits, '_', '-' and '.'", "choose another name")


def _labelled(place: Path, progress: bool) -> Seen:
    classes = own.class_folders(place)
    if len(classes) < _LEAST:
        raise InputError(
            f"{place} has {len(classes)} folders with pictures",
            f"a folder for each class, at least {_LEAST}, with pictures ({', '.join(tables.IMAGE_SUFFIXES)})",
            "sort the pictures into folders; with masks instead of classes add --masks DIR",
        )
    reserved = next((name for name in classes if re.search(r"[#@$%]|::", name)), None)
    if reserved is not None:
        raise InputError(
            f"class folder {reserved!r}", "a name without # @ $ % and ::, which mean something in a bundle", "rename it"
        )
    files = [(name, uri) for name in classes for _, uri in tables.image_files(place / name)]
    seen = [read_pixels(uri) for _, uri in _bar(files, progress)]
    counts = tuple(sum(name == other for other, _ in files) for name in classes)
    for section in ("train", "validate", "test"):
        own.labelled(place, classes, section)
    pixels_seen = _pixels([(p.shape, p.dtype) for p in seen])
    drawn = _cohort(uri for _, uri in files)
    return Seen("labelled", str(place), tuple(classes), counts, *pixels_seen, phantom=drawn)


def _segmented(place: Path, other: Path, progress: bool) -> Seen:
    records, solid = own.pairs_of(place, other), own.is_volumes(place)
    found: set[int] = set()
    present: list[set[int]] = []
    shapes: list[Any] = []
    for record in _bar(records, progress):
        if solid:
            values, shape = _volume(record.image, record.mask)
            shapes.append((shape, np.dtype(np.uint8)))
        else:
            pixels = read_pixels(record.image)
            values = _picture_classes(record.mask)
            pairs.read_pair(record.image, record.mask, classes=max(2, max(values) + 1))
            shapes.append((pixels.shape, pixels.dtype))
        present.append(values)
        found |= values
    classes = max(found) + 1
    if not _LEAST <= classes <= _MOST_CLASSES:
        raise InputError(
            f"the masks in {other} have the values {sorted(found)[:5]} to {max(found)}",
            f"0 for the background and a whole number up to {_MOST_CLASSES - 1} for each structure (or 0 and 255)",
            "save class indices",
        )
    for section in ("train", "validate", "test"):
        own.paired(place.parent, place.name, other.name, section)
    names = ("background", *(["structure"] if classes == 2 else [f"structure_{k}" for k in range(1, classes)]))
    counts = tuple(sum(k in values for values in present) for k in range(classes))
    pixels_seen = _pixels(shapes) if not solid else (1, 0, _sides([shape for shape, _ in shapes]))
    patch, kind = (_patch([shape for shape, _ in shapes]), "volumes") if solid else ((), "pictures")
    drawn = _cohort(path for record in records for path in (record.image, record.mask))
    return Seen(kind, str(place.parent), names, counts, *pixels_seen, patch, place.name, other.name, drawn)


def _cohort(files: Iterable[str]) -> str:
    return str(own.cohort_of(files) or "")


def _picture_classes(uri: str) -> set[int]:
    """Return the classes of a mask; 255 in a mask of two values is class 1."""
    values = {int(value) for value in np.unique(read_pixels(uri))}
    return {min(value, 1) for value in values} if values <= {0, 255} else values


def _volume(image: str, mask: str) -> tuple[set[int], tuple[int, ...]]:
    voxels = volumes.read_pair(image, mask, 256)
    return {int(value) for value in np.unique(voxels[1].numpy())}, tuple(int(side) for side in voxels[0].shape[1:])


def _bar(entries: Any, progress: bool) -> Any:
    return tqdm(entries, desc="reading images", unit="image", disable=not progress, leave=False)


def _pixels(seen: list[tuple[tuple[int, ...], Any]]) -> tuple[int, int, tuple[int, int]]:
    """Return channels, largest possible value, and least and largest side of pictures (H, W, C)."""
    channels = 3 if any(shape[-1] > 1 for shape, _ in seen) else 1
    deep = any(dtype == np.uint16 for _, dtype in seen)
    return channels, 65535 if deep else 255, _sides([shape[:2] for shape, _ in seen])


def _sides(shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    sides = [side for shape in shapes for side in shape]
    return min(sides), max(sides)


def _patch(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return a patch that most volumes hold: the median along each axis, a multiple of 8, 16 to 64."""
    median = np.median(np.array(shapes), axis=0)
    return tuple(int(min(_PATCH, max(16, math.floor(side / _STEP) * _STEP))) for side in median)


def _metadata(name: str, seen: Seen, side: int) -> Mapping[str, Any]:
    segments = seen.kind != "labelled"
    shape = list(seen.patch) if seen.kind == "volumes" else [side, side]
    colours = ["red", "green", "blue"] if seen.channels == 3 else ["grey value"]
    numbered = {str(index): text for index, text in enumerate(colours)}
    image = {
        "type": "image", "format": "magnitude", "modality": "n/a", "num_channels": seen.channels,
        "spatial_shape": shape, "dtype": "float32", "value_range": [-10, 10], "is_patch_data": seen.kind == "volumes",
        "channel_def": numbered,
    }  # fmt: skip
    pred = {
        "type": "image" if segments else "probabilities", "format": "segmentation" if segments else "classes",
        "modality": "n/a", "num_channels": len(seen.classes), "spatial_shape": shape if segments else [],
        "dtype": "float32", "value_range": [0, 1], "is_patch_data": seen.kind == "volumes",
        "channel_def": {str(index): text for index, text in enumerate(seen.classes)},
    }  # fmt: skip
    known = {package: metadata.version(package) for package in ("medfl", "monai", "torch", "numpy")}
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/"
        "meta_schema_20240725.json",
        "version": "0.1.0",
        "changelog": {"0.1.0": "written by medfl new"},
        "monai_version": known["monai"],
        "pytorch_version": known["torch"].partition("+")[0],
        "numpy_version": known["numpy"],
        "required_packages_version": {"medfl": known["medfl"]},
        "supported_apps": {},
        "name": name,
        "task": f"{'Segmentation' if segments else 'Classification'}: {', '.join(seen.classes)}",
        "description": f"{_KINDS[seen.kind].capitalize()} of one's own, at each site a folder of the same form.",
        "authors": "to be filled in",
        "copyright": "to be filled in",
        "data_source": "to be filled in",
        "data_type": "NIfTI" if seen.kind == "volumes" else "pictures",
        "intended_use": "Research only: not for diagnosis or any other clinical use.",
        "references": [],
        "network_data_format": {"inputs": {"image": image}, "outputs": {"pred": pred}},
    }
