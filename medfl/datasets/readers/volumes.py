"""Volumes: NIfTI files and folders of one DICOM series as MONAI's MetaTensors, with their masks, checked when read.

Volume URIs: `<path>.nii[.gz]`, `<archive>.zip!<member>.nii[.gz]`, `<folder of a DICOM series>`.
"""

from __future__ import annotations

import gzip
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from monai.data import MetaTensor

from medfl.core.errors import InputError
from medfl.core.names import composed
from medfl.datasets.readers import dicom
from medfl.datasets.readers.mask_values import Classes, class_indices
from medfl.datasets.readers.reading import (
    JOINED,
    UNREADABLE,
    Files,
    archive,
    files_below,
    read_member,
    split_uri,
)
from medfl.datasets.readers.stacks import check_unpacked, unpacked

Array = NDArray[Any]
SUFFIXES = (".nii", ".nii.gz")
TOLERANCE = 1e-3  # mm, on each number of an affine
_READABLE = "a volume is a .nii or .nii.gz file, plain or in a zip, or a folder of one DICOM series"


def _nifti_errors() -> tuple[type[BaseException], ...]:
    from nibabel.filebasedimages import ImageFileError
    from nibabel.spatialimages import HeaderDataError, HeaderTypeError

    return ImageFileError, HeaderDataError, HeaderTypeError, OverflowError, MemoryError, *UNREADABLE


def read_volume(uri: str) -> MetaTensor:
    """Read an image: (C, D1, D2, D3) float32, its affine from index to mm, RAS, as MONAI's LoadImage gives it.

    Its channels are files of one shape and affine, their URIs joined by ` | `.

    Raises:
        InputError: unreadable or truncated; not three axes (trailing axes of length 1 are dropped); NaN or infinite
            values; one value everywhere; an affine that cannot be inverted; a folder with no or several DICOM series;
            channels that differ in shape or affine.
    """
    first, *more_uris = uri.split(JOINED)
    return _with_channels(_read(first), first, more_uris)


def _with_channels(raw: _Raw, uri: str, more_uris: Sequence[str]) -> MetaTensor:
    channels = [_values(uri, raw)]
    for channel_uri in more_uris:
        channel = _read(channel_uri)
        _require_one_place(f"channel {uri}", raw, f"channel {channel_uri}", channel)
        channels.append(_values(channel_uri, channel))
    return _tensor(uri, np.stack(channels), raw.affine)


def read_pair(image: str, mask: str, classes: Classes) -> tuple[MetaTensor, MetaTensor]:
    """Read an image, (C, D1, D2, D3) float32, and its mask, (1, D1, D2, D3) of class indices.

    Raises:
        InputError: as `read_volume`, or the two differ in shape or affine, or the mask has other values.
    """
    first, *more_uris = image.split(JOINED)
    raw = _read(first)
    labels = _read(mask)
    _require_one_place(f"image {first}", raw, f"its mask {mask}", labels)

    return _with_channels(raw, first, more_uris), _tensor(
        mask, class_indices(mask, labels.voxels, classes)[None], raw.affine
    )


def _require_one_place(name: str, raw: _Raw, other_name: str, other_raw: _Raw) -> None:
    allowed = "an image, its channels and its mask have one shape"
    advice = "resample the mask to the image, or remove the case"
    if raw.voxels.shape != other_raw.voxels.shape:
        problem = f"{name} is {times(raw.voxels.shape)} voxels, {other_name} {times(other_raw.voxels.shape)}"
        raise InputError(problem, allowed, advice)

    if not np.allclose(raw.affine, other_raw.affine, rtol=0, atol=TOLERANCE):
        problem = (
            f"{name} has the affine {_rows(raw.affine)}, {other_name} {_rows(other_raw.affine)}"
        )
        raise InputError(problem, f"they lie in one place, to {TOLERANCE} mm", advice)


def count_voxels(uri: str) -> int | None:
    """Return the number of voxels that the header states, without reading them; None if it cannot be read."""
    try:
        if os.path.isdir(uri):
            return dicom.count_voxels(uri)
        return math.prod(map(int, _header(uri).get_data_shape())) or None
    except InputError:
        return None
    except _nifti_errors():
        return None


def volume_files(root: Path) -> Files:
    """Return (relative path, URI) of all NIfTI files below a folder or in a zip archive, sorted, but no hidden ones."""
    return files_below(root, SUFFIXES)


def volume_index(folder: Path) -> dict[str, str]:
    """Return the URI of each volume that lies directly in a folder by its name without suffix.

    A folder in it with files other than NIfTI counts as a DICOM series; beside NIfTI files they must be DICOM.
    """
    index: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__MACOSX":
            continue
        if path.is_dir():
            if _is_series(path):
                # A NIfTI file goes before a series of the same name.
                index.setdefault(composed(path.name), str(path))
        elif is_nifti(path.name):
            index[composed(bare(path.name))] = str(path)

    return index


def volume_paths(root: Path) -> Files:
    """Return (path without suffix, URI) of all NIfTI files below a folder, and of the DICOM series directly in it."""
    series = {name: uri for name, uri in volume_index(root).items() if os.path.isdir(uri)}
    paths = list(series.items())
    for name, uri in volume_files(root):
        if name.partition("/")[0] not in series:
            paths.append((bare(name), uri))

    return sorted(paths)


def is_nifti(name: str) -> bool:
    """Tell whether a name ends as those of NIfTI files do, in lower case or upper."""
    return name.lower().endswith(SUFFIXES)


def bare(name: str, endings: Sequence[str] = SUFFIXES) -> str:
    """Return a name without its ending, if it is one of these: by default those of NIfTI files."""
    ending = next((end for end in endings if name.lower().endswith(end)), "")
    return name[: len(name) - len(ending)]


def _is_series(folder: Path) -> bool:
    names = [
        file.name for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")
    ]
    foreign = [name for name in names if not is_nifti(name)]
    return bool(foreign) and (
        len(foreign) == len(names) or any(dicom.is_dicom(str(folder / name)) for name in foreign)
    )


# Files


class _Raw(NamedTuple):
    """Voxels (D1, D2, D3) of any number type as stored, and the affine (4, 4) from index to mm, RAS."""

    voxels: Array
    affine: NDArray[np.float64]


def _read(uri: str) -> _Raw:
    voxels, affine = _series(uri) if os.path.isdir(uri) else _nifti(uri)
    raw = _Raw(voxels.reshape(_sides(uri, voxels.shape)), affine)
    if not np.isfinite(affine).all() or np.linalg.matrix_rank(affine[:3, :3]) < 3:
        raise InputError(
            f"volume {uri} has the affine {_rows(affine)}",
            "an affine can be inverted",
            "write an sform or qform that can be inverted into its header",
        )

    return raw


def _series(uri: str) -> tuple[Array, NDArray[np.float64]]:
    try:
        return dicom.read(uri)
    except UNREADABLE as error:
        raise InputError(
            f"DICOM series {uri} cannot be read ({error})", _READABLE, "copy the series again"
        ) from error


def _nifti(uri: str) -> tuple[Array, NDArray[np.float64]]:
    if not is_nifti(uri):
        is_there = os.path.exists(split_uri(uri)[0])
        reason = "not a NIfTI file by its name" if is_there else "no such file or folder"
        raise InputError(
            f"volume {uri} cannot be read ({reason})", _READABLE, "check the path, or convert it"
        )

    from nibabel.imageglobals import LoggingOutputSuppressor

    try:
        with LoggingOutputSuppressor():  # what it logs of a header is in its errors
            image = _open(uri)

        _sides(uri, image.shape)  # before all of a long series is read
        _check_size(uri, image)
        voxels = np.asanyarray(image.dataobj)
        affine = np.asarray(image.affine, dtype=np.float64)
    except _nifti_errors() as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"volume {uri} cannot be read ({reason})", _READABLE, "copy the file again"
        ) from error

    if voxels.dtype.kind not in "biuf":
        raise InputError(
            f"volume {uri} holds {voxels.dtype} values",
            "one real number a voxel",
            "convert the file to such numbers",
        )

    return voxels, affine


def _check_size(uri: str, image: Any) -> None:
    """Raise a ValueError if voxels take far more memory than the file has bytes: scaled ones are float64."""
    scaled = (image.dataobj.slope, image.dataobj.inter) != (1, 0)
    bytes_of_voxel = max(image.get_data_dtype().itemsize, 8 * scaled)
    check_unpacked(
        math.prod(map(int, image.shape)) * bytes_of_voxel, os.path.getsize(split_uri(uri)[0])
    )


def _open(uri: str) -> Any:
    import nibabel as nib

    path, part = split_uri(uri)
    if not part:
        return nib.load(path)

    content = read_member(path, part)
    if part.endswith(".gz"):
        content = unpacked(content)

    return nib.Nifti1Image.from_bytes(content)


def _header(uri: str) -> Any:
    import nibabel as nib

    path, part = split_uri(uri)
    if not part:
        return nib.load(path).header

    with archive(path).open(part) as member:
        content: Any = gzip.GzipFile(fileobj=member) if part.endswith(".gz") else member
        return nib.Nifti1Header.from_fileobj(io.BytesIO(content.read(1024)))  # type: ignore[no-untyped-call]


def _sides(uri: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the three sides of a volume, without trailing axes of length 1."""
    sides = tuple(shape)
    if len(shape) > 3 and math.prod(shape[3:]) == 1:
        sides = sides[:3]

    if len(sides) != 3 or min(sides) < 2:
        raise InputError(
            f"volume {uri} has the shape {times(shape)}",
            "a volume has three axes, each of at least 2 voxels",
            "take one volume of a series apart, or remove the case",
        )

    return sides


# Values


def _values(uri: str, raw: _Raw) -> Array:
    with np.errstate(over="ignore"):
        voxels: Array = raw.voxels.astype(np.float32)

    beyond = raw.voxels[np.isinf(voxels) & np.isfinite(raw.voxels)]
    if beyond.size:
        raise InputError(
            f"volume {uri} has the value {beyond[0]:g} at {beyond.size} of {voxels.size} voxels, beyond float32",
            f"every voxel has a value up to {np.finfo(np.float32).max:.3g}",
            "divide the values, or replace these",
        )
    if wrong := voxels.size - int(np.isfinite(voxels).sum()):
        raise InputError(
            f"volume {uri} has NaN or infinite values at {wrong} of {voxels.size} voxels",
            "every voxel has a finite value",
            "replace these values, or remove the volume from the data",
        )
    if voxels.min() == voxels.max():
        raise InputError(
            f"volume {uri} has the value {voxels.min() + 0.0:g} at every voxel",
            "an image shows something",
            "remove the case from the data",
        )

    return voxels


def _tensor(uri: str, voxels: Array, affine: NDArray[np.float64]) -> MetaTensor:
    import torch
    from monai.data import MetaTensor
    from monai.utils.enums import MetaKeys, SpaceKeys

    meta = {
        MetaKeys.ORIGINAL_AFFINE: affine.copy(),
        MetaKeys.SPATIAL_SHAPE: np.asarray(voxels.shape[1:]),
        MetaKeys.SPACE: SpaceKeys.RAS,
        "filename_or_obj": uri,
    }
    data = torch.from_numpy(np.ascontiguousarray(voxels))

    return MetaTensor(data, affine=torch.as_tensor(affine), meta=meta)


def times(shape: Sequence[int]) -> str:
    """Return sides in words."""
    return " x ".join(str(int(side)) for side in shape)


def _rows(affine: Array) -> str:
    return "[" + " | ".join(" ".join(f"{value:.6g}" for value in row) for row in affine[:3]) + "]"
