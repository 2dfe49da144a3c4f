"""DICOM series as volumes and DICOM files as pictures: headers are read by pydicom, pixels by SimpleITK.

Values, lookup tables and padding are those of PS3.3 C.11 and C.7.5.1.1.2, places those of C.7.6.
"""

from __future__ import annotations

import importlib
import locale
import math
import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from medfl.core.arrays import Array, Bytes, Floats
from medfl.core.errors import InputError
from medfl.datasets.readers.stacks import check_unpacked

Affine = Floats
Untyped = Any
"""Of a library that has no types."""

SUFFIX = ".dcm"
_FORMAT = "GDCMImageIO"  # others, which SimpleITK takes by a file's ending, read what their header names elsewhere
_ALIKE = 1e-3  # of orientations, and of distances in mm
_PREAMBLE = 128
_MAGIC = b"DICM"
_DEFLATED = "1.2.840.10008.1.2.1.99"
_PER_FRAME = "PerFrameFunctionalGroupsSequence"
_LARGE = 2**16  # bytes of a value that stays in its file until it is asked for
_MOST_FRAMES = 2**16
_UNDEFINED = 2**32 - 1  # length of pixels that are compressed
_DEEPEST = 16  # sequences in sequences
_STORED = [
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "NumberOfFrames",
    "Rows",
    "Columns",
    "BitsAllocated",
    "BitsStored",
    "HighBit",
    "PixelRepresentation",
    "PixelData",
]
"""What says how pixels are stored; of these alone SimpleITK returns them as they are."""


class Header(tuple[Untyped, ...]):
    """What a file says of a frame: data sets of pydicom, of which the first that has a tag goes before the others."""

    def get(self, keyword: str) -> Untyped:
        """Return the value of a tag, None where it is missing or empty."""
        return next((part[keyword].value for part in self if keyword in part), None)

    def text(self, keyword: str) -> str:
        """Return the text of a tag, "" where there is none."""
        return str(self.get(keyword) or "")

    def numbers(self, keyword: str) -> Affine:
        """Return the numbers of a tag, none where it is missing or empty."""
        values = np.atleast_1d(np.array(self.get(keyword), object))
        filled = [value for value in values if value not in (None, "")]
        return np.array(filled, np.float64)

    def number(self, keyword: str, default: float) -> float:
        """Return the first number of a tag, the default where there is none."""
        return next(iter(self.numbers(keyword).tolist()), default)

    def whole(self, keyword: str, default: int = 0) -> int:
        """Return the first number of a tag as a whole one."""
        return int(self.number(keyword, default))

    def items(self, keyword: str) -> Sequence[Header]:
        """Return the headers that a sequence has."""
        return [Header((item,)) for item in self.get(keyword) or ()]

    @property
    def is_coloured(self) -> bool:
        """Whether a pixel has a colour."""
        palette = "PALETTE" in self.text("PhotometricInterpretation")
        return palette or self.whole("SamplesPerPixel", 1) != 1

    @property
    def is_signed(self) -> bool:
        """Whether stored pixels have a sign."""
        return self.whole("PixelRepresentation") == 1

    @property
    def voxels(self) -> int:
        """How many pixels all frames have."""
        return self.whole("Rows") * self.whole("Columns") * self.whole("NumberOfFrames", 1)


class Frame(NamedTuple):
    """A frame of a file: its number there, and its header, in which functional groups stand beside the other tags."""

    file: str
    number: int
    header: Header


@contextmanager
def own_locale() -> Iterator[None]:
    """Put the process's locale back at the end: GDCM leaves it at "C", in which Python reads text files as ASCII."""
    before = locale.setlocale(locale.LC_ALL)
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, before)


def read(folder: str) -> tuple[Array, Affine, str]:
    """Return the voxels (D1, D2, D3) of the series in a folder, its affine from index to mm, RAS, and what was changed.

    Raises:
        InputError: no series or several, a file that cannot be read, colours, slices without a place, with different
            ones in their plane or at unequal distances, or shifted within their plane (a tilted gantry).
    """
    headers = _series(folder)
    _check_size(headers)
    for file, header in headers.items():
        if header.whole("NumberOfFrames", 1) > 1 and not header.items(_PER_FRAME):
            raise InputError(
                f"DICOM file {file} has several frames and no {_named(_PER_FRAME)}",
                "each frame of a volume says where it lies",
                "export it as single slices, or convert it to NIfTI with its true place",
            )

    frames = [frame for file, header in headers.items() for frame in _frames(file, header)]
    places, affine = _placed(folder, frames)
    (columns,), (rows,) = (_require_equal(frames, keyword) for keyword in ("Columns", "Rows"))
    voxels = np.empty((len(frames), int(rows), int(columns)), np.float32)
    padded = np.zeros(voxels.shape, bool)

    stored = np.empty(0)
    for place, (file, number, header) in zip(places, frames, strict=True):
        if number == 0:
            stored = _stored(file, header)

        with np.errstate(over="ignore"):
            voxels[place] = _modality(stored[number], header)

        padded[place] = _padding(stored[number], header)

    changes = ""
    if padded.any() and not padded.all():
        voxels[padded] = voxels[~padded].min()
        changes = f"{_named('PixelPaddingValue')} is read as the least other value"

    # Slices and rows come first in files, columns in a volume.
    return voxels.T, affine, changes


# Headers


def _series(folder: str) -> Mapping[str, Header]:
    """Return the files of the one series in a folder with their headers."""
    series = defaultdict[str, dict[str, Header]](dict)
    names = sorted(os.listdir(folder))
    for file in (os.path.join(folder, name) for name in names if name != "DICOMDIR"):
        header = _header(file) if os.path.isfile(file) else None
        if header is not None:
            series[header.text("SeriesInstanceUID")][file] = header

    if len(series) == 1:
        return next(iter(series.values()))

    descriptions = []
    for uid, headers in series.items():
        text = next(iter(headers.values())).text("SeriesDescription")
        descriptions.append(f"{uid} ({f'{text!r}, ' * bool(text)}{len(headers)} files)")

    problem = f"folder {folder} holds no DICOM series in its {len(names)} files"
    if series:
        problem = f"folder {folder} holds {len(series)} DICOM series: {' and '.join(descriptions)}"

    raise InputError(
        problem, "a folder holds the files of one series", "keep one series in each folder"
    )


def _header(file: str) -> Header | None:
    """Return the header of a DICOM image, None for a file of another kind.

    Raises:
        InputError: it begins as DICOM, but cannot be read, or its header is packed.
    """
    try:
        header = Header((_dataset(file, stop_before_pixels=True, defer_size=_LARGE),))
        voxels = header.voxels
    except Exception as error:  # whatever pydicom stumbles over
        if is_dicom(file):
            raise _damaged(file, error) from error

        return None

    return header if voxels else None


def _damaged(file: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[-200:] or type(error).__name__
    return InputError(
        f"DICOM file {file} cannot be read ({reason})", "a complete image", "copy the file again"
    )


def _named(keyword: str) -> str:
    """Return number and keyword of a tag."""
    tag = importlib.import_module("pydicom.tag").Tag(keyword)
    return f"{tag} {keyword}"


def _dataset(file: str, **options: Untyped) -> Untyped:
    """Return what pydicom reads of a file; a ValueError if the header is packed, which it would unpack without end."""
    pydicom = importlib.import_module("pydicom")
    # What it warns of is refused here, or no matter.
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    pydicom.config.convert_wrong_length_to_UN = True
    warnings.filterwarnings("ignore", module="pydicom")
    with open(file, "rb") as opened:
        pydicom.filereader.read_preamble(opened, force=True)
        about = pydicom.filereader.read_dataset(
            opened, False, True, stop_when=lambda tag, *_: tag.group != 2
        )
        # All are looked at: of a kind that it does not know pydicom would read them in another way.
        if _DEFLATED in [element.value for element in about]:
            raise ValueError(
                f"its header is packed by {_named('TransferSyntaxUID')}: save it uncompressed"
            )

        opened.seek(0)
        return pydicom.dcmread(opened, force=True, **options)


def _require_shallow(file: str) -> None:
    """Refuse a file with sequences so deep in others that SimpleITK would crash."""
    try:
        _check_depth(_dataset(file, defer_size=_LARGE))
    except Exception as error:  # whatever pydicom stumbles over
        raise _damaged(file, error) from error


def _check_depth(dataset: Untyped, depth: int = 0) -> None:
    if depth > _DEEPEST:
        raise ValueError("its sequences are too deep")

    for tag in list(dataset.keys()):
        try:
            element = dataset[tag]
        except (ArithmeticError, NotImplementedError, TypeError, ValueError):
            continue  # no sequence

        if element.VR == "SQ":
            for item in element.value:
                _check_depth(item, depth + 1)


def _frames(file: str, header: Header) -> Iterator[Frame]:
    """Yield the frames of a file; what a functional group says of one goes before what all have."""
    shared = header.items("SharedFunctionalGroupsSequence")[:1]
    groups = header.items(_PER_FRAME)
    for number in range(header.whole("NumberOfFrames", 1)):
        parts = []
        for (group,) in (*groups[number : number + 1], *shared):
            for element in group:
                if element.VR == "SQ":
                    parts += element.value[:1]

        yield Frame(file, number, Header((*parts, *header)))


def _numbers(frame: Frame, keyword: str, count: int) -> Affine:
    """Return the numbers of a tag; an InputError names it where a frame lacks them."""
    numbers = frame.header.numbers(keyword)
    if len(numbers) != count or not np.isfinite(numbers).all():
        where = f"DICOM file {frame.file}" + f", frame {frame.number + 1}," * bool(frame.number)
        raise InputError(
            f"{where} has no {_named(keyword)}",
            "each slice of a volume says where it lies",
            "export the series again with this tag, or convert it to NIfTI with its true place",
        )

    return numbers


def _require_equal(frames: Sequence[Frame], keyword: str, count: int = 1) -> Affine:
    """Return the numbers of a tag that all frames have alike; an InputError names the tag where they differ."""
    first = _numbers(frames[0], keyword, count)
    for frame in frames:
        numbers = _numbers(frame, keyword, count)
        if not np.allclose(numbers, first, rtol=0, atol=_ALIKE):
            raise InputError(
                f"{_named(keyword)} is {frames[0].header.text(keyword)} in DICOM file {frames[0].file} and "
                f"{frame.header.text(keyword)} in {frame.file}",
                "the slices of a volume have one grid",
                "keep slices of one orientation, size and spacing in each folder",
            )

    return first


# Places


def _placed(folder: str, frames: Sequence[Frame]) -> tuple[Sequence[int], Affine]:
    """Return each frame's place in the order of their positions, and the affine from index to mm, RAS."""
    right, down = _require_equal(frames, "ImageOrientationPatient", 6).reshape(2, 3)
    rows, columns = _require_equal(frames, "PixelSpacing", 2)
    normal = np.cross(right, down)
    if not math.isclose(float(np.linalg.norm(normal)), 1, abs_tol=0.01):
        raise InputError(
            f"{_named('ImageOrientationPatient')} of DICOM file {frames[0].file} is {[*right, *down]}",
            "two directions of length 1 at a right angle",
            "export the series again",
        )

    positions = np.stack([_numbers(frame, "ImagePositionPatient", 3) for frame in frames])
    order = np.argsort(positions @ normal, kind="stable")
    positions = positions[order]
    if len(frames) == 1:
        step = normal * _numbers(frames[0], "SliceThickness", 1)
    else:
        step = (positions[-1] - positions[0]) / (len(frames) - 1)
        _check_positions(folder, positions, normal, min(rows, columns))

    affine = np.eye(4)
    affine[:3, :3] = np.stack([right * columns, down * rows, step], axis=1)
    affine[:3, 3] = positions[0]
    return np.argsort(order).tolist(), to_ras(affine)


def _check_positions(folder: str, positions: Affine, normal: Affine, pixel: float) -> None:
    """Refuse a series whose voxels would not lie where the affine has them: slices are missing, or the gantry tilted.

    `positions` (N, 3) are in order, `normal` (3,) is that of the slices, which may be shifted by half the side of a
    pixel, in mm.
    """
    steps = np.linalg.norm(np.diff(positions, axis=0), axis=1)
    if np.ptp(steps) > 0.01 * np.median(steps) or not steps.all():
        raise InputError(
            f"DICOM series {folder}: its {len(positions)} slices lie {steps.min():.4g} to {steps.max():.4g} mm apart",
            f"slices lie at equal distances by {_named('ImagePositionPatient')}, one at each place",
            "add the missing slices, take what else is there apart, or resample the series",
        )

    moved = positions - positions[0]
    above = moved @ normal
    shifts = np.linalg.norm(moved - np.outer(above, normal), axis=1)
    if not shifts[-1] <= 0.5 * pixel:
        angle = math.degrees(math.atan2(shifts[-1], abs(above[-1])))
        raise InputError(
            f"DICOM series {folder}: its slices are shifted within their plane, the last by {shifts[-1]:.3g} mm: "
            f"a gantry tilted by {angle:.1f} degrees",
            f"slices lie straight above each other by {_named('ImagePositionPatient')}",
            "resample the series upright",
        )


def to_ras(affine: Affine) -> Affine:
    """Return an affine whose x and y point left and back (LPS, of DICOM and ITK) as one to RAS."""
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine


def affine_of(image: Untyped) -> Affine:
    """Return the affine of a SimpleITK image, of its first three axes, from index to mm, RAS."""
    axes = min(image.GetDimension(), 3)
    direction = np.reshape(image.GetDirection(), (image.GetDimension(), -1))[:axes, :axes]
    affine = np.eye(4)
    affine[:axes, :axes] = direction * image.GetSpacing()[:axes]
    affine[:axes, 3] = image.GetOrigin()[:axes]
    return to_ras(affine)


@own_locale()
def picture_affine(file: str) -> Affine:
    """Return the affine (4, 4) of a picture from (column, row, 0) to mm, RAS; what it does not say is as in ITK."""
    _require_shallow(file)
    reader = _reader(file)
    reader.ReadImageInformation()
    return affine_of(reader)


# Values


def _stored(file: str, header: Header) -> Array:
    """Return the stored pixels (frames, H, W) of a file in shades of grey."""
    if header.is_coloured:
        raise InputError(
            f"DICOM file {file} has colours by {_named('PhotometricInterpretation')}",
            "one number a voxel",
            "export the series in shades of grey",
        )

    try:
        plain = _dataset(file, specific_tags=_STORED)
        if "PixelData" not in plain:
            raise ValueError(f"it has no {_named('PixelData')}")
        highest = header.whole("BitsStored") - 1  # PS3.5, 8.1.1
        if header.whole("HighBit", highest) != highest:
            raise ValueError(f"{_named('HighBit')} is not {_named('BitsStored')} less one")

        element = plain.get_item("PixelData")
        if len(element.value) < element.length < _UNDEFINED:
            raise ValueError("it is cut off")

        plain.PhotometricInterpretation = "MONOCHROME2"
        with tempfile.TemporaryDirectory() as folder:  # SimpleITK reads files only
            copy = os.path.join(folder, "slice")
            plain.save_as(copy)
            pixels = _pixels(copy)
    except Exception as error:  # whatever pydicom and SimpleITK stumble over
        raise _damaged(file, error) from error

    if header.whole("BitsAllocated") == 1:  # SimpleITK makes 255 of 1
        pixels = pixels // 255

    return pixels.reshape(-1, header.whole("Rows"), header.whole("Columns"))


@own_locale()
def _pixels(file: str) -> Array:
    """Return what SimpleITK reads of a file: (frames, H, W[, colours])."""
    pixels: Array = sitk().GetArrayFromImage(_reader(file).Execute())
    return pixels


def _modality(pixels: Array, header: Header) -> Array:
    """Return stored pixels as what they stand for: by a table, or times slope plus intercept."""
    if tables := header.items("ModalityLUTSequence"):
        return _through(pixels, tables[0], header.is_signed)

    scaled: Array = pixels * header.number("RescaleSlope", 1)
    return scaled + header.number("RescaleIntercept", 0)


def _through(values: Array, table: Header, is_signed: bool) -> Array:
    """Return values by a lookup table; its first entry below it, its last above it."""
    count, first, _ = table.numbers("LUTDescriptor") % 2**16  # which may be written with a sign
    entries = table.get("LUTData")
    if isinstance(entries, bytes):
        entries = np.frombuffer(entries, "<u2" if table[0].original_encoding[1] else ">u2")

    entries = np.atleast_1d(entries)
    if len(entries) < count:  # two entries of 8 bits a word
        entries = entries.astype("<u2").view(np.uint8)

    if first >= 2**15 and (is_signed or values.min() < 0):
        first -= 2**16

    index = np.clip(np.rint(values) - first, 0, len(entries) - 1)
    return np.asarray(entries[index.astype(np.intp)], np.float64)


def _padding(pixels: Array, header: Header) -> Array:
    """Tell which stored pixels only fill the frame."""
    ends = header.numbers("PixelPaddingValue")
    if not len(ends):
        return np.zeros(pixels.shape, bool)

    # Two bytes, written with a sign or without.
    ends = np.append(ends, header.numbers("PixelPaddingRangeLimit")) % 2**16
    if header.is_signed:
        ends = (ends + 2**15) % 2**16 - 2**15

    padded: Array = (pixels >= ends.min()) & (pixels <= ends.max())
    return padded


def read_picture(file: str) -> Bytes:
    """Return a picture (H, W) or (H, W, 3) as a viewer shows it.

    It is shown by its first lookup table, else in its first window; without these from its least to its largest value,
    or as stored in 8 bits. Padding is black.

    Raises:
        InputError: it cannot be read, or has several frames.
    """
    header = _header(file)
    if header is None:
        raise _damaged(file, ValueError("it holds no image"))

    _check_size({file: header})
    frame, *more = _frames(file, header)
    if more:
        raise InputError(
            f"DICOM file {file} has several frames", "one picture in a file", "save each as a file"
        )

    if header.is_coloured:
        _require_shallow(file)
        colours = _pixels(file)[0]
        return np.asarray(np.rint(colours / np.iinfo(colours.dtype).max * 255), np.uint8)

    header = frame.header
    pixels = _stored(file, header)[0]
    padded = _padding(pixels, header)
    values = _modality(pixels, header)
    shown = _shown(values, values if padded.all() else values[~padded], header)
    if (
        header.text("PhotometricInterpretation") == "MONOCHROME1"
        or header.text("PresentationLUTShape") == "INVERSE"
    ):
        shown = 1 - shown

    return np.asarray(np.rint(np.where(padded, 0, shown) * 255), np.uint8)


def _shown(values: Array, of_image: Array, header: Header) -> Array:
    """Return values as shades from 0 to 1; `of_image` are those of them that are no padding."""
    if tables := header.items("VOILUTSequence"):
        bits = tables[0].numbers("LUTDescriptor")[2]
        looked_up = _through(values, tables[0], header.is_signed)
        return looked_up / float(2**bits - 1)

    centre = header.number("WindowCenter", 0)
    width = header.number("WindowWidth", 0)
    function = header.text("VOILUTFunction")
    if width > 0 and function == "SIGMOID":
        return np.asarray(1 / (1 + np.exp(-4 * (values - centre) / width)))

    low = float(of_image.min())
    high = float(of_image.max())
    if width > 0 and function == "LINEAR_EXACT":
        low = centre - width / 2
        high = centre + width / 2
    elif width >= 1:
        low = centre - 0.5 - (width - 1) / 2
        high = centre - 0.5 + (width - 1) / 2
    elif header.whole("BitsAllocated") == 8 and low >= 0 and high <= 255:
        low = 0.0
        high = 255.0

    shades: Array = (values - low) / max(high - low, 1e-9)
    return shades.clip(0, 1)


# Files


def _check_size(headers: Mapping[str, Header]) -> None:
    """Raise a ValueError if headers state far more pixels, float64 at most, than their files can hold."""
    if any(header.whole("NumberOfFrames", 1) > _MOST_FRAMES for header in headers.values()):
        raise ValueError(f"more than {_MOST_FRAMES} frames")

    voxels = sum(header.voxels for header in headers.values())
    check_unpacked(8 * voxels, sum(map(os.path.getsize, headers)))


def count_voxels(folder: str) -> int:
    """Return the number of voxels of the series in a folder, by the headers.

    Raises:
        InputError: no series or several, or a damaged file.
    """
    return sum(header.voxels for header in _series(folder).values())


def _reader(file: str) -> Untyped:
    reader = sitk().ImageFileReader()
    reader.SetImageIO(_FORMAT)
    reader.SetFileName(file)
    return reader


def sitk() -> Untyped:
    """Import SimpleITK, which is slow and not needed for NIfTI."""
    module = importlib.import_module("SimpleITK")
    module.ProcessObject.SetGlobalWarningDisplay(False)  # what it warns of is refused here
    return module


def is_named_or_begins_so(file: str) -> bool:
    """Tell whether a file is to be read as DICOM, by its ending or its first bytes."""
    return file.lower().endswith(SUFFIX) or is_dicom(file)


def is_dicom(file: str) -> bool:
    """Tell whether a file begins as DICOM files do."""
    if not os.path.isfile(file):
        return False
    try:
        with open(file, "rb") as opened:
            return opened.read(_PREAMBLE + 4)[_PREAMBLE:] == _MAGIC
    except OSError:  # told by what reads it
        return False
