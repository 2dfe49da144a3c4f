"""A bundle for images of one's own, written by looking at them: what `medfl new` does.

It is configuration only, so that a partner can approve it by reading; it names no file and no patient, so that all
sites of a federation can have the very same one, each with a folder of its own of the same form.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from tqdm import tqdm

from medfl import networks
from medfl.core.errors import InputError
from medfl.core.names import check_name
from medfl.core.storage import write_atomic
from medfl.datasets import own
from medfl.datasets.readers import own_folder, pairs, tables, volumes
from medfl.datasets.readers.reading import Pixels, read_pixels
from medfl.datasets.readers.splitting import Record
from medfl.evaluation.mask_metrics import check_structures

_FILES = ("train.yaml", "evaluate.yaml", "inference.yaml", "federated.yaml")
_LEAST, _MOST_CLASSES = 2, 100
_PATCH, _STEP = 64, 8  # voxels a side of a patch at most, and what it is a multiple of
_NETWORKS = {"labelled": "small_cnn", "pictures": "unet16", "volumes": "unet8"}
_KINDS = {"labelled": "labelled pictures", "pictures": "pictures with masks", "volumes": "volumes with masks"}


@dataclass(frozen=True)
class Survey:
    """What a folder of images holds.

    Attributes:
        kind: "labelled" pictures, or "pictures" or "volumes" with masks.
        folder: what is given with --data.
        classes: names in label order; of masks with the background first.
        counts: images of each class; of masks, images that have some of it.
        channels: of an image.
        brightest: largest value that a picture can have: of 255 or 65535 by its type; of other types that they have;
            1 with `own_depth`.
        sides: least and largest side of the images, in pixels or voxels.
        patch: of volumes, a training patch.
        images, masks: names of the folders in `folder`, "" of labelled pictures.
        phantom: the phantom cohort that some of them are of, "" where all may be real.
        notes: what the user should know, as of files that are left out.
        own_depth: pictures of 8 and of 16 bits stand beside each other; each is read by its own depth.
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
    notes: tuple[str, ...] = ()
    own_depth: bool = False


def survey(
    images: str | Path, masks: str | Path | None = None, *, names: Sequence[str] = (), progress: bool = False
) -> Survey:
    """Read every image, and its mask, once.

    Args:
        images: a folder with a folder of pictures for each class; with `masks` a folder of pictures or NIfTI volumes.
        masks: folder of the masks, of the same names as their images, beside the folder of the images.
        names: of the masks' structures, for the values 1, 2, ...; default: structure_1, structure_2, ...
        progress: show a bar on stderr.

    Raises:
        InputError: no images, some that cannot be read, fewer than two classes, masks of other shapes; names the files.
            Or names that are no names of structures, or fewer than the masks have.
    """
    check_structures(names)
    if names and masks is None:
        raise InputError("--classes without --masks", "folders of pictures name their classes", "rename the folders")
    place = Path(images).expanduser().resolve()
    if not place.is_dir():
        raise InputError(f"--images {images} is no folder", "a folder of images", "check the path")
    if masks is None:
        return _labelled(place, progress)
    other = Path(masks).expanduser().resolve()
    if other.parent != place.parent or other == place:
        raise InputError(f"--images {images} and --masks {masks}", "two folders beside each other", "put both into one")
    return _segmented(place, other, names, progress)


def write(target: str | Path, seen: Survey, *, network: str | None = None, size: int | None = None) -> Path:
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
    check_target(root)
    chosen = network or _NETWORKS[seen.kind]
    fits = (chosen in networks.SEGMENTERS) == (seen.kind != "labelled")
    if chosen not in networks.names() or not fits:
        allowed = [n for n in networks.names() if (n in networks.SEGMENTERS) == (seen.kind != "labelled")]
        raise InputError(f"--network {chosen}", f"for {_KINDS[seen.kind]}: {', '.join(allowed)}", "choose one of them")
    side = size or (64 if seen.kind == "labelled" else 128)
    if side < 16:
        raise InputError(f"--size {side}", "a whole number of at least 16 pixels", "give 16 or more")
    if seen.kind == "volumes" and size is not None:
        raise InputError(f"--size {size} for volumes", "volumes keep their size; patches are cut", "leave it out")
    words = {**asdict(seen), "name": root.name, "network": chosen, "size": side, "kind_text": _KINDS[seen.kind]}
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("medfl.bundle"),
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["yaml"] = json.dumps  # a JSON value is a YAML value, whatever a class is called
    files = {f"configs/{name}": environment.get_template(f"new_{name}.j2").render(words) for name in _FILES}
    files["docs/README.md"] = environment.get_template("new_readme.md.j2").render(words)
    files["configs/metadata.json"] = json.dumps(_metadata(root.name, seen, side), indent=2) + "\n"
    try:
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(root / name, text.encode())
    except OSError as error:
        shutil.rmtree(root, ignore_errors=True)
        raise InputError(f"{root} cannot be files: {error.strerror}", "a new folder", "check its rights") from error
    return root


def check_target(root: Path) -> None:
    """Raise an InputError if no bundle can be written into this folder."""
    if root.exists():
        raise InputError(f"{root} exists", "a new folder for the bundle", "give a path that does not exist")
    check_name(root.name, "bundle name")


def _labelled(place: Path, progress: bool) -> Survey:
    classes = own.class_folders(place)
    if classes:
        own_folder.refuse_other_folders(place, classes)
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
    own_folder.refuse_masks_among(place, classes)
    files = [(name, uri) for name in classes for _, uri in tables.image_files(place / name)]
    seen = _each(files, lambda file: _Picture.of(read_pixels(file[1])), progress)
    counts = tuple(sum(name == other for other, _ in files) for name in classes)
    for section in ("train", "validate", "test"):
        own.labelled(place, classes, section)
    drawn = str(own.cohort_of(uri for _, uri in files) or "")
    left = own_folder.left_out(place, (uri for _, uri in files), tables.IMAGE_SUFFIXES, "in no class folder")
    notes = (*left, *_depths(seen))
    return Survey(
        "labelled",
        str(place),
        tuple(classes),
        counts,
        *_pixels(seen),
        phantom=drawn,
        notes=notes,
        own_depth=_mixed(seen),
    )


def _segmented(place: Path, other: Path, named: Sequence[str], progress: bool) -> Survey:
    records, solid = own.pairs_of(place, other), own.is_volumes(place)
    try:
        seen = _each(records, _volume if solid else partial(_picture, several=len(named) > 1), progress)
        present = [values for values, _ in seen]
        found = set[int]().union(*present)
        _check_values(other, found)
    except InputError as error:
        if _swapped(records[0], solid):
            raise InputError(
                f"the files in {place} look like masks, those in {other} like their images",
                "--images is the folder of the images, --masks that of the masks",
                "swap the two",
            ) from error
        raise
    for section in ("train", "validate", "test"):
        own.paired(place.parent, place.name, other.name, section)
    if named and max(found) > len(named):
        raise InputError(
            f"--classes {','.join(named)}, and masks with values up to {max(found)}",
            "a name for each value of the masks but 0, in their order",
            f"give {max(found)} names",
        )
    classes = 1 + (len(named) or max(found))
    names = (
        "background",
        *(named or (["structure"] if classes == 2 else [f"structure_{k}" for k in range(1, classes)])),
    )
    counts = tuple(sum(k in values for values in present) for k in range(classes))
    absent = [str(k) for k, count in enumerate(counts) if k and not count]
    endings = volumes.SUFFIXES if solid else tables.IMAGE_SUFFIXES
    notes = (
        *own_folder.left_out(place, (record.image for record in records), endings, "without a mask"),
        *own_folder.left_out(other, (record.mask for record in records), endings, "of no image"),
        *([f"no mask has the values {', '.join(absent)}"] if absent else []),
    )
    drawn = str(own.cohort_of(path for record in records for path in (record.image, record.mask)) or "")
    where, shown = str(place.parent), [one for _, one in seen]
    if solid:
        shapes = [one.shape for one in shown]
        about = (1, 0, _sides(shapes), _patch(shapes), place.name, other.name, drawn, notes)
        return Survey("volumes", where, names, counts, *about)
    notes += _depths(shown)
    mixed = _mixed(shown)
    return Survey(
        "pictures", where, names, counts, *_pixels(shown),
        images=place.name, masks=other.name, phantom=drawn, notes=notes, own_depth=mixed,
    )  # fmt: skip


class _Picture(NamedTuple):
    """Of a picture or volume: its shape, type and largest value."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    largest: float

    @classmethod
    def of(cls, pixels: Pixels) -> _Picture:
        return cls(pixels.shape, pixels.dtype, float(pixels.max()))

    @property
    def brightest(self) -> int:
        """Largest value that pictures like it can have; floats in 0 to 1 have 1."""
        if self.dtype in (np.uint8, np.uint16):
            return int(np.iinfo(self.dtype).max)
        usual = (1, 255, 65535) if self.dtype.kind == "f" else (255, 65535)
        return next((value for value in usual if self.largest <= value), math.ceil(self.largest))


def _each(entries: Sequence[Any], read: Callable[[Any], Any], progress: bool) -> list[Any]:
    """Read each of them; those that cannot be read are told together."""
    found, errors = [], []
    for entry in tqdm(entries, desc="reading images", unit="image", disable=not progress, leave=False):
        try:
            found.append(read(entry))
        except InputError as error:
            errors.append(error)
    if len(errors) > 1:
        told = tables.several([error._parts[0] for error in errors], "files")
        allowed = errors[0]._parts[1]
        raise InputError(f"{len(errors)} of {len(entries)} images: {told}", allowed, "restore or remove these")
    if errors:
        raise errors[0]
    return found


def _check_values(masks: Path, found: set[int]) -> None:
    if found == {0}:
        told, advice = f"the masks in {masks} have no value but 0", "check that these are the masks"
    elif len(found) < _LEAST or max(found) >= _MOST_CLASSES:
        some = ", ".join(map(str, sorted(found)[:5])) + (", ..." if len(found) > 5 else "")
        told, advice = f"the masks in {masks} have the values {some}, the largest {max(found)}", "save class indices"
    else:
        return
    raise InputError(
        told,
        f"0 for the background and a whole number up to {_MOST_CLASSES - 1} for each structure (or 0 and 255)",
        advice,
    )


def _swapped(record: Record, solid: bool) -> bool:
    """Tell whether an image has few values, as masks have, and its mask many."""

    def values(uri: str) -> int:
        return len(np.unique(volumes.read_volume(uri).numpy() if solid else read_pixels(uri)))

    try:
        return values(record.image) <= _MOST_CLASSES < values(record.mask)
    except InputError:  # told as it is
        return False


def _picture(record: Record, several: bool) -> tuple[set[int], _Picture]:
    """Return the classes of a mask, and its picture; 255 in a mask of two values is class 1, unless it has several."""
    values = {int(value) for value in np.unique(read_pixels(record.mask))}
    values = {min(value, 1) for value in values} if values <= {0, 255} and not several else values
    pixels, _, _ = pairs.read_pair(record.image, record.mask, classes=max(2, max(values) + 1))
    return values, _Picture.of(pixels)


def _volume(record: Record) -> tuple[set[int], _Picture]:
    image, mask = volumes.read_pair(record.image, record.mask, 256)
    return {int(value) for value in np.unique(mask.numpy())}, _Picture.of(image[0].numpy())


def _pixels(seen: Sequence[_Picture]) -> tuple[int, int, tuple[int, int]]:
    """Return channels, largest possible value, and least and largest side of pictures (H, W, C)."""
    channels = 3 if any(one.shape[-1] > 1 for one in seen) else 1
    brightest = 1 if _mixed(seen) else max(one.brightest for one in seen)
    return channels, brightest, _sides([one.shape[:2] for one in seen])


def _mixed(seen: Sequence[_Picture]) -> bool:
    """Tell whether pictures have different depths.

    Raises:
        InputError: some have neither 8 nor 16 bits.
    """
    found = Counter(one.brightest for one in seen)
    if len(found) > 1 and {one.dtype.name for one in seen} - {"uint8", "uint16"}:
        told = ", ".join(f"{count} of at most {value}" for value, count in sorted(found.items()))
        raise InputError(
            f"pictures of several depths: {told}",
            "one depth, or 8 and 16 bits beside each other",
            "save them as pictures of 8 or 16 bits",
        )
    return len(found) > 1


def _depths(seen: Sequence[_Picture]) -> tuple[str, ...]:
    found = Counter(one.brightest for one in seen)
    told = ", ".join(f"{count} of at most {value}" for value, count in sorted(found.items()))
    return (f"pictures of several depths, each divided by its own: {told}",) if len(found) > 1 else ()


def _sides(shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    sides = [side for shape in shapes for side in shape]
    return min(sides), max(sides)


def _patch(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return a patch that most volumes hold: the median along each axis, a multiple of 8, 16 to 64."""
    median = np.median(np.array(shapes), axis=0)
    return tuple(int(min(_PATCH, max(16, math.floor(side / _STEP) * _STEP))) for side in median)


def _metadata(name: str, seen: Survey, side: int) -> Mapping[str, Any]:
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
