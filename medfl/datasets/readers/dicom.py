"""DICOM series as volumes and DICOM files as pictures: headers are read here, pixels by SimpleITK.

Values, lookup tables and padding are those of PS3.3 C.11 and C.7.5.1.1.2, places those of C.7.6; files are laid out as
in PS3.5 and PS3.10.
"""

from __future__ import annotations

import importlib
import locale
import math
import mmap
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medfl.core.errors import InputError
from medfl.datasets.readers.stacks import check_unpacked

Array = NDArray[Any]
Affine = NDArray[np.float64]
Untyped = Any
"""Of a library that has no types."""

SUFFIX = ".dcm"
_FORMAT = "GDCMImageIO"  # others, which SimpleITK takes by a file's ending, read what their header names elsewhere
_ALIKE = 1e-3  # of orientations, and of distances in mm
_PREAMBLE = 128
_MAGIC = b"DICM"
_DEFLATED = b"1.2.840.10008.1.2.1.99"
_BIG_ENDIAN = b"1.2.840.10008.1.2.2"
_LONG = {
    b"OB",
    b"OD",
    b"OF",
    b"OL",
    b"OV",
    b"OW",
    b"SQ",
    b"SV",
    b"UC",
    b"UN",
    b"UR",
    b"UT",
    b"UV",
}
"""Kinds of values whose length has four bytes."""
_PACKED = {b"OB", b"OW"}
_UNDEFINED = 0xFFFFFFFF
_PIXELS = 0x7FE0  # group
_DEEPEST = 16  # sequences in sequences
_MOST_FRAMES = 2**16


class Tag(IntEnum):
    """Tags that are read, by keyword."""

    TransferSyntaxUID = 0x00020010
    SeriesDescription = 0x0008103E
    SliceThickness = 0x00180050
    SeriesInstanceUID = 0x0020000E
    ImagePositionPatient = 0x00200032
    ImageOrientationPatient = 0x00200037
    PlanePositionSequence = 0x00209113
    PlaneOrientationSequence = 0x00209116
    SamplesPerPixel = 0x00280002
    PhotometricInterpretation = 0x00280004
    NumberOfFrames = 0x00280008
    Rows = 0x00280010
    Columns = 0x00280011
    PixelSpacing = 0x00280030
    BitsAllocated = 0x00280100
    PixelRepresentation = 0x00280103
    PixelPaddingValue = 0x00280120
    PixelPaddingRangeLimit = 0x00280121
    WindowCenter = 0x00281050
    WindowWidth = 0x00281051
    RescaleIntercept = 0x00281052
    RescaleSlope = 0x00281053
    VOILUTFunction = 0x00281056
    ModalityLUTSequence = 0x00283000
    LUTDescriptor = 0x00283002
    LUTData = 0x00283006
    VOILUTSequence = 0x00283010
    PixelMeasuresSequence = 0x00289110
    FrameVOILUTSequence = 0x00289132
    PixelValueTransformationSequence = 0x00289145
    PresentationLUTShape = 0x20500020
    SharedFunctionalGroupsSequence = 0x52009229
    PerFrameFunctionalGroupsSequence = 0x52009230
    Item = 0xFFFEE000
    ItemDelimitationItem = 0xFFFEE00D
    SequenceDelimitationItem = 0xFFFEE0DD

    def __str__(self) -> str:
        """Return number and keyword."""
        return f"({self >> 16:04X},{self & 0xFFFF:04X}) {self.name}"


_TAGS = frozenset(Tag)
_NUMBERS = {
    Tag.SamplesPerPixel,
    Tag.Rows,
    Tag.Columns,
    Tag.BitsAllocated,
    Tag.PixelRepresentation,
    Tag.PixelPaddingValue,
    Tag.PixelPaddingRangeLimit,
    Tag.LUTDescriptor,
    Tag.LUTData,
}
"""Tags of whole numbers of two bytes; those of others are text."""
_SEQUENCES = frozenset(tag for tag in Tag if tag.name.endswith("Sequence"))
_NEUTRAL: Mapping[int, bytes] = {
    Tag.RescaleIntercept: b"0",
    Tag.RescaleSlope: b"1",
    Tag.PhotometricInterpretation: b"MONOCHROME2",
}
"""With these SimpleITK returns pixels as they are stored."""


class Header(dict[Tag, Any]):
    """What a header says: text, an array of whole numbers (without a sign), or the headers of a sequence's items."""

    def text(self, tag: Tag) -> str:
        """Return the text of a tag, "" where there is none."""
        return str(self.get(tag, ""))

    def numbers(self, tag: Tag) -> Affine:
        """Return the numbers of a tag, none where it is missing or empty."""
        value = self.get(tag, "")
        if isinstance(value, str):
            value = [float(part) for part in value.split("\\") if part.strip()]

        return np.asarray(value, np.float64)

    def number(self, tag: Tag, default: float) -> float:
        """Return the first number of a tag, the default where there is none."""
        return next(iter(self.numbers(tag).tolist()), default)

    def whole(self, tag: Tag, default: int = 0, signed: bool = False) -> int:
        """Return the first number of a tag as a whole one; with `signed` two bytes that were read without a sign."""
        value = int(self.number(tag, default))
        return (value + 2**15) % 2**16 - 2**15 if signed else value

    @property
    def is_coloured(self) -> bool:
        """Whether a pixel has a colour."""
        palette = "PALETTE" in self.text(Tag.PhotometricInterpretation)
        return palette or self.whole(Tag.SamplesPerPixel, 1) != 1

    @property
    def is_signed(self) -> bool:
        """Whether stored pixels have a sign."""
        return self.whole(Tag.PixelRepresentation) == 1

    @property
    def voxels(self) -> int:
        """How many pixels all frames have."""
        return self.whole(Tag.Rows) * self.whole(Tag.Columns) * self.whole(Tag.NumberOfFrames, 1)


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
    frames = [frame for file, header in headers.items() for frame in _frames(file, header)]
    places, affine = _placed(folder, frames)
    (columns,), (rows,) = (_require_equal(frames, tag) for tag in (Tag.Columns, Tag.Rows))
    voxels = np.empty((len(frames), int(rows), int(columns)), np.float32)
    padded = np.zeros(voxels.shape, bool)

    stored = np.empty(0)
    for place, (file, number, header) in zip(places, frames, strict=True):
        if number == 0:
            stored = _stored(file)

        with np.errstate(over="ignore"):
            voxels[place] = _modality(stored[number], header)

        padded[place] = _padding(stored[number], header)

    changes = ""
    if padded.any() and not padded.all():
        voxels[padded] = voxels[~padded].min()
        changes = f"{Tag.PixelPaddingValue} is read as the least other value"

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
            series[header.text(Tag.SeriesInstanceUID)][file] = header

    if len(series) == 1:
        return next(iter(series.values()))

    descriptions = []
    for uid, headers in series.items():
        text = next(iter(headers.values())).text(Tag.SeriesDescription)
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
    header = Header()
    try:
        with (
            open(file, "rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            _Parser(content).read(header)
    except (IndexError, OSError, ValueError) as error:
        if is_dicom(file):
            raise _damaged(file, error) from error

        return None

    return header if header.voxels else None


def _damaged(file: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[-200:] or type(error).__name__
    return InputError(
        f"DICOM file {file} cannot be read ({reason})", "a complete image", "copy the file again"
    )


class _Parser:
    """Reads the elements of a file one after the other, up to its pixels; what is not of `Tag` is passed over.

    Attributes:
        spans: tag, start and length of each value.
    """

    def __init__(self, content: mmap.mmap | bytearray) -> None:
        self.content = content
        self.spans: list[tuple[int, int, int]] = []
        self.at = 0
        self.order: Literal["little", "big"] = "little"
        self.explicit = True

    def read(self, header: Header) -> None:
        """Read a file; a ValueError or IndexError if it is no DICOM file, or is packed."""
        content = self.content
        if content[_PREAMBLE : _PREAMBLE + 4] == _MAGIC:
            self.at = _PREAMBLE + 4
            while content[self.at : self.at + 2] == b"\2\0":
                self._element(header, 0)

        syntax = header.text(Tag.TransferSyntaxUID).encode()
        if syntax == _DEFLATED:
            raise ValueError("its header is packed: save it uncompressed")

        self.order = "big" if syntax == _BIG_ENDIAN else "little"
        self.explicit = content[self.at + 4 : self.at + 6].isalpha()
        self._elements(header, len(content), 0)

    def _elements(self, header: Header, end: int, depth: int) -> None:
        """Read elements up to a position, or to what ends an item."""
        if depth > _DEEPEST:
            raise ValueError("its sequences are too deep")

        while self.at < end and self._element(header, depth):
            pass

    def _element(self, header: Header, depth: int) -> bool:
        """Read an element; return whether others may follow."""
        number = self._whole(2) << 16 | self._whole(2)
        if number == Tag.ItemDelimitationItem or (number >> 16 == _PIXELS and not depth):
            self.at += 4
            return False

        kind = self._bytes(2 * self.explicit)
        has_gap = kind in _LONG
        self.at += 2 * has_gap
        length = self._whole(4 if has_gap or not self.explicit else 2)
        if length == _UNDEFINED or kind == b"SQ" or number in _SEQUENCES:
            explicit = self.explicit
            self.explicit &= kind != b"UN"
            items = self._items(length, depth, is_packed=kind in _PACKED)
            self.explicit = explicit
            if number in _TAGS:
                header[Tag(number)] = items

            return True

        self.spans.append((number, self.at, length))
        value = self._bytes(length)
        if number in _TAGS:
            tag = Tag(number)
            if tag in _NUMBERS:
                header[tag] = np.frombuffer(value, "<u2" if self.order == "little" else ">u2")
            else:
                header[tag] = value.decode("latin-1").strip(" \0")

        return True

    def _items(self, length: int, depth: int, is_packed: bool) -> list[Header]:
        items = []
        end = len(self.content) if length == _UNDEFINED else self.at + length
        while self.at < end:
            number = self._whole(2) << 16 | self._whole(2)
            size = self._whole(4)
            if number != Tag.Item:
                break

            items.append(Header())
            item_end = end if size == _UNDEFINED else self.at + size
            if not is_packed:
                self._elements(items[-1], item_end, depth + 1)
            if size != _UNDEFINED:
                self.at = item_end

        return items

    def _whole(self, count: int) -> int:
        """Read a whole number of so many bytes."""
        return int.from_bytes(self._bytes(count), self.order)

    def _bytes(self, count: int) -> bytes:
        value = bytes(self.content[self.at : self.at + count])
        if len(value) < count:
            raise ValueError("it is cut off")

        self.at += count
        return value


def _frames(file: str, header: Header) -> Iterator[Frame]:
    """Yield the frames of a file; what a functional group says of one goes before what all have."""
    shared = header.get(Tag.SharedFunctionalGroupsSequence, [])[:1]
    groups = header.get(Tag.PerFrameFunctionalGroupsSequence, [])
    for number in range(header.whole(Tag.NumberOfFrames, 1)):
        flat = Header()
        flat.update(header)
        for group in (*shared, *groups[number : number + 1]):
            for items in group.values():
                if isinstance(items, list):
                    flat.update(*items[:1])

        yield Frame(file, number, flat)


def _numbers(frame: Frame, tag: Tag, count: int) -> Affine:
    """Return the numbers of a tag; an InputError names it where a frame lacks them."""
    numbers = frame.header.numbers(tag)
    if len(numbers) != count or not np.isfinite(numbers).all():
        where = f"DICOM file {frame.file}" + f", frame {frame.number + 1}," * bool(frame.number)
        raise InputError(
            f"{where} has no {tag}",
            "each slice of a volume says where it lies",
            "export the series again with this tag, or convert it to NIfTI with its true place",
        )

    return numbers


def _require_equal(frames: Sequence[Frame], tag: Tag, count: int = 1) -> Affine:
    """Return the numbers of a tag that all frames have alike; an InputError names the tag where they differ."""
    first = _numbers(frames[0], tag, count)
    for frame in frames:
        numbers = _numbers(frame, tag, count)
        if not np.allclose(numbers, first, rtol=0, atol=_ALIKE):
            raise InputError(
                f"{tag} is {frames[0].header.text(tag)} in DICOM file {frames[0].file} and "
                f"{frame.header.text(tag)} in {frame.file}",
                "the slices of a volume have one grid",
                "keep slices of one orientation, size and spacing in each folder",
            )

    return first


# Places


def _placed(folder: str, frames: Sequence[Frame]) -> tuple[Sequence[int], Affine]:
    """Return each frame's place in the order of their positions, and the affine from index to mm, RAS."""
    right, down = _require_equal(frames, Tag.ImageOrientationPatient, 6).reshape(2, 3)
    rows, columns = _require_equal(frames, Tag.PixelSpacing, 2)
    normal = np.cross(right, down)
    if not math.isclose(float(np.linalg.norm(normal)), 1, abs_tol=0.01):
        raise InputError(
            f"{Tag.ImageOrientationPatient} of DICOM file {frames[0].file} is {[*right, *down]}",
            "two directions of length 1 at a right angle",
            "export the series again",
        )

    positions = np.stack([_numbers(frame, Tag.ImagePositionPatient, 3) for frame in frames])
    order = np.argsort(positions @ normal, kind="stable")
    positions = positions[order]
    if len(frames) == 1:
        step = normal * _numbers(frames[0], Tag.SliceThickness, 1)
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
            f"slices lie at equal distances by {Tag.ImagePositionPatient}, one at each place",
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
            f"slices lie straight above each other by {Tag.ImagePositionPatient}",
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
    reader = _reader(file)
    reader.ReadImageInformation()
    return affine_of(reader)


# Values


def _stored(file: str) -> Array:
    """Return the stored pixels (frames, H, W) of a file in shades of grey."""
    with open(file, "rb") as opened:
        content = bytearray(opened.read())

    header = Header()
    parser = _Parser(content)
    parser.read(header)
    if header.is_coloured:
        raise InputError(
            f"DICOM file {file} has colours by {Tag.PhotometricInterpretation}",
            "one number a voxel",
            "export the series in shades of grey",
        )

    for number, start, length in parser.spans:
        if value := _NEUTRAL.get(number):
            content[start : start + length] = value.ljust(length)[:length]

    with tempfile.TemporaryDirectory() as folder:  # SimpleITK reads files only
        copy = os.path.join(folder, "slice")
        with open(copy, "wb") as opened:
            opened.write(content)

        pixels = _pixels(copy, file)

    if header.whole(Tag.BitsAllocated) == 1:  # SimpleITK makes 255 of 1
        pixels = pixels // 255

    return pixels.reshape(-1, header.whole(Tag.Rows), header.whole(Tag.Columns))


@own_locale()
def _pixels(file: str, name: str) -> Array:
    """Return what SimpleITK reads of a file: (frames, H, W[, colours])."""
    try:
        pixels: Array = sitk().GetArrayFromImage(_reader(file).Execute())
    except RuntimeError as error:
        raise _damaged(name, error) from error

    return pixels


def _modality(pixels: Array, header: Header) -> Array:
    """Return stored pixels as what they stand for: by a table, or times slope plus intercept."""
    if table := header.get(Tag.ModalityLUTSequence):
        return _through(pixels, table[0], header.is_signed)

    scaled: Array = pixels * header.number(Tag.RescaleSlope, 1)
    return scaled + header.number(Tag.RescaleIntercept, 0)


def _through(values: Array, table: Header, is_signed: bool) -> Array:
    """Return values by a lookup table; its first entry below it, its last above it."""
    count, first, _ = table.numbers(Tag.LUTDescriptor)
    entries = table[Tag.LUTData]
    if len(entries) < count:  # two entries of 8 bits a word
        entries = entries.astype("<u2").view(np.uint8)

    if first >= 2**15 and (is_signed or values.min() < 0):
        first -= 2**16

    index = np.clip(np.rint(values) - first, 0, len(entries) - 1)
    return np.asarray(entries[index.astype(np.intp)], np.float64)


def _padding(pixels: Array, header: Header) -> Array:
    """Tell which stored pixels only fill the frame."""
    if not len(header.numbers(Tag.PixelPaddingValue)):
        return np.zeros(pixels.shape, bool)

    value = header.whole(Tag.PixelPaddingValue, 0, header.is_signed)
    limit = value
    if len(header.numbers(Tag.PixelPaddingRangeLimit)):
        limit = header.whole(Tag.PixelPaddingRangeLimit, 0, header.is_signed)

    return (pixels >= min(value, limit)) & (pixels <= max(value, limit))


def read_picture(file: str) -> NDArray[np.uint8]:
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
        colours = _pixels(file, file)[0]
        return np.asarray(np.rint(colours / np.iinfo(colours.dtype).max * 255), np.uint8)

    header = frame.header
    pixels = _stored(file)[0]
    padded = _padding(pixels, header)
    values = _modality(pixels, header)
    shown = _shown(values, values if padded.all() else values[~padded], header)
    if (
        header.text(Tag.PhotometricInterpretation) == "MONOCHROME1"
        or header.text(Tag.PresentationLUTShape) == "INVERSE"
    ):
        shown = 1 - shown

    return np.asarray(np.rint(np.where(padded, 0, shown) * 255), np.uint8)


def _shown(values: Array, of_image: Array, header: Header) -> Array:
    """Return values as shades from 0 to 1; `of_image` are those of them that are no padding."""
    if table := header.get(Tag.VOILUTSequence):
        bits = table[0].numbers(Tag.LUTDescriptor)[2]
        looked_up = _through(values, table[0], header.is_signed)
        return looked_up / float(2**bits - 1)

    centre = header.number(Tag.WindowCenter, 0)
    width = header.number(Tag.WindowWidth, 0)
    function = header.text(Tag.VOILUTFunction)
    if width > 0 and function == "SIGMOID":
        return np.asarray(1 / (1 + np.exp(-4 * (values - centre) / width)))

    low = float(of_image.min())
    high = float(of_image.max())
    if width > 0 and function == "LINEAR_EXACT":
        low = centre - width / 2
        high = centre + width / 2
    elif width > 1:
        low = centre - 0.5 - (width - 1) / 2
        high = centre - 0.5 + (width - 1) / 2
    elif header.whole(Tag.BitsAllocated) == 8 and low >= 0 and high <= 255:
        low = 0.0
        high = 255.0

    shades: Array = (values - low) / max(high - low, 1e-9)
    return shades.clip(0, 1)


# Files


def _check_size(headers: Mapping[str, Header]) -> None:
    """Raise a ValueError if headers state far more pixels, float64 at most, than their files can hold."""
    if any(header.whole(Tag.NumberOfFrames, 1) > _MOST_FRAMES for header in headers.values()):
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
