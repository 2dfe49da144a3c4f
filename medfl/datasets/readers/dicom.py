"""Folders of one DICOM series, and DICOM files of one picture, read with SimpleITK."""

from __future__ import annotations

import importlib
import locale
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfl.core.errors import InputError
from medfl.datasets.readers.stacks import check_unpacked

Array = NDArray[Any]
Sitk = Any
"""Of SimpleITK, which has no types."""

SUFFIX = ".dcm"
_FORMAT = "GDCMImageIO"  # others, which SimpleITK takes by a file's ending, read what their header names elsewhere
_DESCRIPTION = "0008|103e"
_POSITION = "0020|0032"
_PHOTOMETRIC = "0028|0004"
_BITS = "0028|0101"
_SIGNED = "0028|0103"
_CENTRE = "0028|1050"
_WIDTH = "0028|1051"
_INTERCEPT = "0028|1052"
_SLOPE = "0028|1053"


@contextmanager
def own_locale() -> Iterator[None]:
    """Put the process's locale back at the end: GDCM leaves it at "C", in which Python reads text files as ASCII."""
    before = locale.setlocale(locale.LC_ALL)
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, before)


@own_locale()
def read(folder: str) -> tuple[Array, NDArray[np.float64]]:
    """Return the voxels (D1, D2, D3[, colours]) of the series in a folder, and its affine from index to mm, RAS.

    Raises:
        InputError: no series or several, a file that cannot be read or has several frames, slices at unequal distances
            or shifted within their plane (a tilted gantry).
    """
    files = _files(folder)
    _check_size(files)
    reader = _sitk().ImageSeriesReader()
    reader.SetImageIO(_FORMAT)
    reader.SetFileNames(files)
    reader.MetaDataDictionaryArrayUpdateOn()
    image = _executed(
        reader, f"series {folder}", "all its files are complete", "copy the series again"
    )
    voxels: Array = _sitk().GetArrayFromImage(image)

    # Frames may lie anywhere or be points in time, which no affine can say.
    if image.GetDimension() != 3:
        raise InputError(
            f"DICOM file {files[0]} has {image.GetSize()[2]} frames",
            "a file for each slice",
            "convert it to NIfTI",
        )

    direction = np.reshape(image.GetDirection(), (3, 3))
    spacing = image.GetSpacing()
    _check_positions(folder, reader, len(files), direction[:, 2], min(spacing[:2]))
    # SimpleITK's arrays have the slices first, the affine the columns.
    return np.moveaxis(voxels, (0, 2), (2, 0)), _affine(image)


def _check_positions(folder: str, reader: Sitk, slices: int, normal: Array, pixel: float) -> None:
    """Refuse a series whose voxels would not lie where the affine has them: slices are missing, or the gantry tilted.

    `normal` (3,) is that of the slices, which may be shifted by half the side of a pixel, in mm.
    """
    if slices < 2 or not all(reader.HasMetaDataKey(index, _POSITION) for index in range(slices)):
        return

    texts = (reader.GetMetaData(index, _POSITION) for index in range(slices))
    positions = np.array([[float(number) for number in text.split("\\")] for text in texts])
    if positions.shape != (slices, 3):
        raise ValueError("the position of a slice is not three numbers")

    steps = np.linalg.norm(np.diff(positions, axis=0), axis=1)
    if not np.ptp(steps) <= 0.01 * np.median(steps) or not steps.any():  # or NaN
        raise InputError(
            f"DICOM series {folder}: its {slices} slices lie {steps.min():.4g} to {steps.max():.4g} mm apart",
            "slices lie at equal distances",
            "add the missing slices, or resample the series",
        )

    moved = positions - positions[0]
    above = moved @ normal
    shifts = np.linalg.norm(moved - np.outer(above, normal), axis=1)
    if not shifts[-1] <= 0.5 * pixel:
        angle = math.degrees(math.atan2(shifts[-1], abs(above[-1])))
        raise InputError(
            f"DICOM series {folder}: its slices are shifted within their plane, the last by {shifts[-1]:.3g} mm: "
            f"a gantry tilted by {angle:.1f} degrees",
            "slices lie straight above each other",
            "resample the series upright",
        )


@own_locale()
def read_picture(file: str) -> NDArray[np.uint8]:
    """Return a picture (H, W) or (H, W, 3) as a viewer shows it.

    It is shown in its first window; without one from its least to its largest value, or as stored in 8 bits.

    Raises:
        InputError: it cannot be read, or has several frames.
    """
    image = _execute(file)
    pixels: Array = _sitk().GetArrayFromImage(image)[0]
    if pixels.ndim == 3:
        return pixels.astype(np.uint8)

    low = float(pixels.min())
    high = float(pixels.max())
    centre = _number(image, _CENTRE)
    width = _number(image, _WIDTH)

    if width > 1:
        low = centre - 0.5 - (width - 1) / 2
        high = centre - 0.5 + (width - 1) / 2
        # SimpleITK has inverted the pixels of such a picture, but not its window.
        if _text(image, _PHOTOMETRIC) == "MONOCHROME1":
            # Sum of the least and the largest value that can be stored.
            ends = -1 if _number(image, _SIGNED) else 2 ** _number(image, _BITS) - 1
            turned = _number(image, _SLOPE, 1) * ends + 2 * _number(image, _INTERCEPT)
            low, high = turned - high, turned - low
    elif pixels.dtype == np.uint8:
        low = 0.0
        high = 255.0

    return np.rint(np.clip((pixels - low) / max(high - low, 1e-9), 0, 1) * 255).astype(np.uint8)


def _text(image: Sitk, tag: str) -> str:
    if image.HasMetaDataKey(tag):
        return str(image.GetMetaData(tag)).strip()

    return ""


def _number(image: Sitk, tag: str, default: float = 0) -> float:
    """Return the first number of a tag, the default where there is none."""
    text = _text(image, tag).split("\\")[0]
    try:
        return float(text) if text else default
    except ValueError:
        return default


@own_locale()
def picture_affine(file: str) -> NDArray[np.float64]:
    """Return the affine (4, 4) of a picture from (column, row, 0) to mm, RAS."""
    return _affine(_execute(file))


def _reader(file: str) -> Sitk:
    reader = _sitk().ImageFileReader()
    reader.SetImageIO(_FORMAT)
    reader.SetFileName(file)
    return reader


def _check_size(files: Sequence[str]) -> None:
    """Raise a ValueError if the first file states far more pixels, float64 at most, than it can hold."""
    with suppress(RuntimeError):  # told where it is read
        first = _information(files[0])
        values = math.prod(map(int, first.GetSize())) * first.GetNumberOfComponents()
        check_unpacked(8 * values * len(files), sum(map(os.path.getsize, files)))


def _execute(file: str) -> Sitk:
    _check_size([file])
    image = _executed(_reader(file), f"file {file}", "a complete image", "copy the file again")
    if image.GetDimension() != 3 or image.GetSize()[2] != 1:
        raise InputError(
            f"DICOM file {file} has several frames", "one picture in a file", "save each as a file"
        )
    return image


def _executed(reader: Sitk, source: str, allowed: str, advice: str) -> Sitk:
    try:
        return reader.Execute()
    except RuntimeError as error:
        reason = str(error).strip().rpartition("\n")[2]
        raise InputError(f"DICOM {source} cannot be read ({reason})", allowed, advice) from error


def _affine(image: Sitk) -> NDArray[np.float64]:
    """Return the affine from index to mm, RAS."""
    from monai.data.utils import orientation_ras_lps

    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    return np.asarray(orientation_ras_lps(affine), dtype=np.float64)


@own_locale()
def count_voxels(folder: str) -> int:
    """Return the number of voxels of the series in a folder, by the size of its first slice.

    Raises:
        InputError: no series or several.
        RuntimeError: the first slice cannot be read.
    """
    files = _files(folder)
    return math.prod(map(int, _information(files[0]).GetSize())) * len(files)


def _sitk() -> Sitk:
    """Import SimpleITK, which is slow and not needed for NIfTI."""
    module = importlib.import_module("SimpleITK")
    module.ProcessObject.SetGlobalWarningDisplay(False)  # what it warns of is refused here
    return module


def _files(folder: str) -> tuple[str, ...]:
    """Return the files of the one series in a folder, in the order of their position."""
    reader = _sitk().ImageSeriesReader
    uids = reader.GetGDCMSeriesIDs(folder)
    series = {uid: reader.GetGDCMSeriesFileNames(folder, uid) for uid in uids}
    if len(series) == 1:
        files: tuple[str, ...] = next(iter(series.values()))
        other_names = (
            set(os.listdir(folder)) - {os.path.basename(file) for file in files} - {"DICOMDIR"}
        )
        damaged = sorted(name for name in other_names if is_dicom(os.path.join(folder, name)))
        if not damaged:
            return files

        raise InputError(
            f"DICOM file {os.path.join(folder, damaged[0])} cannot be read, nor can {len(damaged) - 1} more there",
            "all files of a series are complete images",
            "copy them again, or remove them",
        )

    if series:
        names = []
        for uid, files in series.items():
            names.append(f"{uid} ({_description(files[0])}{len(files)} files)")

        problem = f"folder {folder} holds {len(series)} DICOM series: {' and '.join(names)}"
    else:
        problem = f"folder {folder} holds no DICOM series in its {len(os.listdir(folder))} files"

    raise InputError(
        problem, "a folder holds the files of one series", "keep one series in each folder"
    )


def is_named_or_begins_so(file: str) -> bool:
    """Tell whether a file is to be read as DICOM, by its ending or its first bytes."""
    return file.lower().endswith(SUFFIX) or is_dicom(file)


def is_dicom(file: str) -> bool:
    """Tell whether a file begins as DICOM files do; SimpleITK passes over damaged ones in silence."""
    if not os.path.isfile(file):
        return False
    try:
        with open(file, "rb") as opened:
            return opened.read(132)[128:] == b"DICM"
    except OSError:  # told by what reads it
        return False


def _information(file: str) -> Sitk:
    reader = _reader(file)
    reader.ReadImageInformation()
    return reader


def _description(file: str) -> str:
    text = _text(_information(file), _DESCRIPTION)
    return f"{text!r}, " if text else ""
