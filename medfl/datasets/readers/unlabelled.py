"""Images without labels, given for prediction: files, folders, archives, DICOM series."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from medfl.core import InputError, printable
from medfl.datasets.readers import dicom
from medfl.datasets.readers.reading import (
    IMAGE_SUFFIXES,
    JOINED,
    Files,
    archive,
    array,
    by_name,
    files_below,
    shown_files,
)
from medfl.datasets.readers.volumes import SUFFIXES, bare, count_channels, is_volume
from medfl.storage import require_there

ENDINGS = (*IMAGE_SUFFIXES, *SUFFIXES)
_CHANNEL = re.compile(r"(.+)_(\d{4})((?:\.\w+)*)")
_MOST_ROWS = 2_000_000
_ARCHIVES = (".zip", ".npz")
_READ = f"files that end in {', '.join(ENDINGS)}, DICOM series, .zip archives of these, .npz arrays of images"


def named(sources: Iterable[str | Path], series: bool = True) -> dict[str, str]:
    """Return id -> URI of all images at files, folders and archives.

    An image is named by its path below the folder or in the archive that was given, a file by its name. Where several
    have one name, each has the folder's that it was given with before it, or else its whole path.

    Args:
        sources: files, folders and archives.
        series: a folder of DICOM files is one volume, and each file stands for it; else each file is a picture.

    Raises:
        InputError: a source that is not there, or holds no image.
    """
    forms = []
    volumes = set()
    for source in map(Path, sources):
        above = source if source.is_dir() else source.absolute().parent
        for name, uri in images_at(source, series):
            if uri not in volumes:  # of several files of one the first stands for it
                forms.append((name, f"{above.absolute().name}/{name}", uri))
            volumes |= {uri} if os.path.isdir(uri) else set()

    # An image has the shortest of its forms that no other image shares.
    times = [Counter(form[level] for form in forms) for level in range(3)]
    names: dict[str, str] = {}
    for form in forms:
        ident = next((text for level, text in enumerate(form) if times[level][text] == 1), form[2])
        names[f"{ident}#{len(names)}" if ident in names else ident] = form[2]

    return names


def joined(files: Mapping[str, str], channels: int) -> dict[str, str]:
    """Return id -> URI with the volumes <name>_0000, <name>_0001, ... of so many channels as one image, as in nnU-Net.

    They are that if all of them are there, none is beyond, and each has one channel; pictures have theirs in one file.
    """
    parts: dict[str, dict[int, str]] = defaultdict(dict)
    for ident, uri in files.items():
        if channels > 1 and is_volume(uri) and (match := _CHANNEL.fullmatch(ident)):
            parts[match[1] + match[3]][int(match[2])] = ident

    # An image stands where its first file did.
    name_of: dict[str, str] = {}
    for name, idents in parts.items():
        is_complete = idents.keys() == {*range(channels)} and name not in files
        if is_complete and all(count_channels(files[ident]) == 1 for ident in idents.values()):
            name_of |= dict.fromkeys(idents.values(), name)

    images = {}
    for ident, uri in files.items():
        if ident not in name_of:
            images[ident] = uri
        elif (name := name_of[ident]) not in images:
            images[name] = JOINED.join(files[parts[name][channel]] for channel in range(channels))

    return images


def is_channel(ident: str) -> bool:
    """Tell whether a file is named like a channel of an image, as <name>_0000."""
    return _CHANNEL.fullmatch(ident) is not None


def images_at(source: Path, series: bool) -> Files:
    """Return (name, URI) of the images at one source, sorted; a file of another kind is for its reader to refuse.

    Raises:
        InputError: it is not there, or holds no image.
    """
    require_there(source)
    if source.is_dir():
        images = _below(source, series)
    elif source.suffix in _ARCHIVES:
        images = _inside(source)
    elif series and _is_dicom(source):
        images = [(source.absolute().parent.name, str(source.parent))]
    else:
        images = [(source.name, str(source))]

    if not images:
        raise InputError(f"{source} holds no image", _READ, "check the path")

    return by_name(images)


def without_ending(name: str) -> str:
    """Return an image's name without the ending of its file."""
    return bare(name, (*ENDINGS, *dicom.SUFFIXES))


def other_kinds(folder: Path, used: Path | None) -> tuple[str, ...]:
    """Return a line about files below a folder that are of no readable kind; `used` is one that has another purpose."""
    names = sorted(
        path.relative_to(folder).as_posix()
        for path in shown_files(folder)
        if not path.name.lower().endswith(ENDINGS)
        and path.suffix not in _ARCHIVES
        and path not in (used, path.with_name("DICOMDIR"))
        and not _is_dicom(path)
    )
    note = f"{len(names)} file{'s' if len(names) > 1 else ''} of another kind: left out, first "

    return (note + printable(names[0]),) if names else ()


def _below(root: Path, series: bool) -> Files:
    images = []
    for path in shown_files(root):
        name = path.relative_to(root).as_posix()
        if name.lower().endswith(ENDINGS):
            images.append((name, str(path)))
        elif path.suffix in _ARCHIVES:
            images += _packed(name, path)
        elif _is_dicom(path) and not series:
            images.append((name, str(path)))
        elif _is_dicom(path):
            images.append((name.rpartition("/")[0] or root.absolute().name, str(path.parent)))

    return images


def _packed(name: str, file: Path) -> Files:
    """Return the images in an archive of a folder; itself where it cannot be opened, for its reader to refuse."""
    try:
        return [(f"{name}/{member}", uri) for member, uri in _inside(file)]
    except InputError:
        return [(name, str(file))]


def _inside(file: Path) -> Files:
    if file.suffix == ".npz":
        return _rows(file)

    return files_below(file, ENDINGS)


def _rows(file: Path) -> Files:
    """Return the rows (H, W) or (H, W, C) of the stacked images in an .npz file; labels have fewer axes."""
    arrays = [name.removesuffix(".npy") for name in sorted(archive(file).namelist())]
    counts = {}
    for name in arrays:
        values = array(file, name)
        if values.ndim in (3, 4):
            counts[name] = len(values)

    if sum(counts.values()) > _MOST_ROWS:
        raise InputError(
            f"{file} with more than {_MOST_ROWS} images", "fewer in an archive", "divide it"
        )

    images = []
    for name, count in counts.items():
        for row in range(count):
            images.append((f"{name}_{row:06d}", f"{file}!{name}#{row}"))

    return images


def _is_dicom(path: Path) -> bool:
    return path.name != "DICOMDIR" and dicom.is_named_or_begins_so(str(path))
