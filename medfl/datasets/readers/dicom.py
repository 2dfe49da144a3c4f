"""DICOM series as volumes and DICOM files as pictures: headers are read by pydicom, pixels by SimpleITK.

Values, lookup tables and padding are those of PS3.3 C.11 and C.7.5.1.1.2, places those of C.7.6.
"""

from __future__ import annotations

import importlib
import locale
import math
import os
import re
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from medfl.core import Array, Bytes, Floats, InputError, not_among, words_of
from medfl.datasets.readers.stacks import check_unpacked

Affine = Floats
Untyped = Any
"""Of a library that has no types."""

SUFFIXES = (".dcm", ".dicom")
_FORMAT = "GDCMImageIO"  # others, which SimpleITK takes by a file's ending, read what their header names elsewhere
_ALIKE = 1e-3  # of orientations, and of distances in mm
_PREAMBLE = 128  # bytes before the magic word (PS3.10, 7.1)
_MAGIC = b"DICM"
_LENGTHS = ("PixelSpacing", "SliceThickness")
_DEFLATED = "1.2.840.10008.1.2.1.99"
_JPEG = ("1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51")
_RLE = "1.2.840.10008.1.2.5"
_SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
_PER_FRAME = "PerFrameFunctionalGroupsSequence"
_LARGE = 2**16  # bytes of a value that stays in its file until it is asked for
_MOST_FRAMES = 2**16  # a header may claim any number, and each frame takes a record
_UNDEFINED = 2**32 - 1  # length of pixels that are compressed
_DEEPEST = 16  # sequences in sequences
_ITK_SOURCE = re.compile(r".*ERROR: (\w+\(0x\w+\): )?")
_METAIO = re.compile(
    r"^(Meta\w+: |Uncompress |\w+ required and not defined).*\n(   .*\n)*", re.MULTILINE
)
_SAME = words_of("""
    Modality PatientID FrameOfReferenceUID PhotometricInterpretation RescaleType Units
    ReferencedSegmentNumber ComplexImageComponent
""")
"""What slices of one volume may leave out, and not state differently."""
_SAID = words_of("""
    AcquisitionNumber StackID TemporalPositionIndex EffectiveEchoTime DiffusionBValue ImageType
    FrameType EchoTime EchoNumbers KVP ConvolutionKernel
""")
"""What slices of one volume may state differently, which is told."""
_SCALED = ("CT", "PT")  # modalities whose slices have a RescaleSlope (PS3.3, C.8.2.1 and C.8.9.1)
_STORED = words_of("""
    SamplesPerPixel PhotometricInterpretation NumberOfFrames Rows Columns BitsAllocated BitsStored
    HighBit PixelRepresentation PixelData
""")
"""What says how pixels are stored; of these alone SimpleITK returns them as they are."""


class Header(tuple[Untyped, ...]):
    """The attributes of a frame: data sets of pydicom, of which the first that has a tag takes precedence."""

    def get(self, keyword: str) -> Untyped:
        """Return the value of a tag, None if it is missing or empty."""
        return next((part[keyword].value for part in self if keyword in part), None)

    def text(self, keyword: str) -> str:
        """Return the text of a tag, "" if there is none."""
        value = self.get(keyword)
        return str(value) if value or value == 0 else ""

    def numbers(self, keyword: str) -> Affine:
        """Return the numbers of a tag, none if it is missing or empty; a ValueError names it if not numeric."""
        values = np.atleast_1d(np.array(self.get(keyword), object))
        filled = not_among(values, (None, ""))
        try:
            return np.array(filled, np.float64)
        except ValueError as error:
            raise ValueError(f"its {_named(keyword)} is {filled}") from error

    def number(self, keyword: str, default: float) -> float:
        """Return the first number of a tag, or the default if there is none."""
        return next(iter(self.numbers(keyword).tolist()), default)

    def whole(self, keyword: str, default: int = 0) -> int:
        """Return the first number of a tag as an integer."""
        return int(self.number(keyword, default))

    def items(self, keyword: str) -> Sequence[Header]:
        """Return the headers in a sequence."""
        return [Header((item,)) for item in self.get(keyword) or ()]

    @property
    def is_coloured(self) -> bool:
        """Whether pixels are in colour."""
        palette = "PALETTE" in self.text("PhotometricInterpretation")
        return palette or self.whole("SamplesPerPixel", 1) != 1

    @property
    def is_signed(self) -> bool:
        """Whether stored pixels are signed."""
        return self.whole("PixelRepresentation") == 1

    @property
    def is_scaled(self) -> bool:
        """Whether it says what stored pixels stand for."""
        return bool(self.text("RescaleSlope") or self.items("ModalityLUTSequence"))

    @property
    def voxels(self) -> int:
        """Number of pixels of all frames."""
        return self.whole("Rows") * self.whole("Columns") * self.whole("NumberOfFrames", 1)


class Frame(NamedTuple):
    """A frame of a file: its number in the file, and its header, with functional groups beside the other tags."""

    file: str
    number: int
    header: Header


@contextmanager
def own_locale() -> Iterator[None]:
    """Restore the process's locale at the end: GDCM leaves it at "C", in which Python reads text files as ASCII."""
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
        problem = ""
        if header.whole("NumberOfFrames", 1) > 1:
            if not header.items(_PER_FRAME):
                problem = f"several frames and no {_named(_PER_FRAME)}"
        elif "MOSAIC" in header.text("ImageType"):
            problem = f"many slices in one picture by {_named('ImageType')} MOSAIC"

        if problem:
            raise InputError(
                f"DICOM file {file} has {problem}",
                "each frame of a volume says where it lies",
                "export it as single slices, or convert it to NIfTI with its true place",
            )

        if header.text("SegmentationType") == "FRACTIONAL":
            raise ValueError(f"its values are fractions by {_named('SegmentationType')}")

    frames = [frame for file, header in headers.items() for frame in _frames(file, header)]
    for keyword in _SAME:
        stated = _stated(frames, keyword)
        if len(stated) > 1:
            raise _different(keyword, *stated[:2])

    places, affine = _placed(folder, frames)
    (columns,), (rows,) = (_require_equal(frames, keyword) for keyword in ("Columns", "Rows"))
    voxels = np.empty((len(frames), int(rows), int(columns)), np.float32)
    padded = np.zeros(voxels.shape, bool)

    stored = np.empty(0)
    for place, (file, number, header) in zip(places, frames, strict=True):
        if number == 0:
            stored = _stored(file, header)

        # a value beyond float32 becomes infinite here, and is refused with the volume
        with np.errstate(over="ignore"):
            voxels[place] = _modality(stored[number], header)

        padded[place] = _padding(stored[number], header)

    changes = called(_segments(frames[0].header))
    if padded.any() and not padded.all():
        voxels[padded] = voxels[~padded].min()
        changes += f"{_named('PixelPaddingValue')} is read as the least other value; "

    for keyword in _SAID:
        if len(_stated(frames, keyword)) > 1:
            changes += f"slices that differ in {_named(keyword)} are read as one volume; "

    are_scaled = {frame.header.is_scaled for frame in frames}
    if False in are_scaled and (True in are_scaled or frames[0].header.text("Modality") in _SCALED):
        changes += f"values without {_named('RescaleSlope')} are read as stored; "

    # Slices and rows come first in files, columns in a volume.
    return voxels.T, affine, changes


def called(names: Iterable[tuple[int, str]]) -> str:
    """Return which structure has which value by its header, in which files may differ, and a semicolon after it."""
    texts = [f"{value} {name.replace(';', ',')!r}" for value, name in sorted(names)]
    return f"its header calls {', '.join(texts)}; " * bool(texts)


def _segments(header: Header) -> Iterator[tuple[int, str]]:
    """Yield the values and names of a segmentation's structures: 1 for one in bits, of a label map their numbers."""
    referenced = header.whole("ReferencedSegmentNumber")
    for segment in header.items("SegmentSequence"):
        number = segment.whole("SegmentNumber")
        if number == (referenced or number):
            yield 1 if referenced else number, segment.text("SegmentLabel")


# Headers


def _series(folder: str) -> Mapping[str, Header]:
    """Return the files of the one series in a folder with their headers."""
    series = defaultdict[str, dict[str, Header]](dict)
    paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
    files = [file for file in paths if os.path.isfile(file) and os.path.basename(file)[0] != "."]
    for file in files:
        header = _header(file) if os.path.basename(file) != "DICOMDIR" else None
        if header is not None:
            series[header.text("SeriesInstanceUID")][file] = header

    if len(series) == 1:
        return next(iter(series.values()))

    descriptions = []
    for uid, headers in series.items():
        text = next(iter(headers.values())).text("SeriesDescription")
        descriptions.append(f"{uid} ({f'{text!r}, ' * bool(text)}{len(headers)} files)")

    problem = f"folder {folder} holds no DICOM series in its {len(files)} files"
    if folders := len(paths) - len(files):
        problem += f", and {folders} folders, which are not looked into"
    if series:
        problem = f"folder {folder} holds {len(series)} DICOM series: {' and '.join(descriptions)}"

    raise InputError(
        problem,
        "a folder holds the files of one series of images, which RTSTRUCT, reports and presentation states are not",
        "keep one series in each folder, or convert what has no image",
    )


def _header(file: str) -> Header | None:
    """Return the header of a DICOM image, None for a file of another kind.

    Raises:
        InputError: it begins as DICOM, but cannot be read, or its header is packed; it is empty, or should be an image
            and has no size, as if cut off.
    """
    try:
        header = Header((_dataset(file, stop_before_pixels=True, defer_size=_LARGE),))
        voxels = header.voxels
        kind = header.get("SOPClassUID")
        should_be_image = kind is None or "Image" in kind.name
    except Exception as error:  # whatever pydicom stumbles over
        if is_dicom(file):
            raise _damaged(file, error) from error

        return None

    if not voxels and (should_be_image if is_dicom(file) else not os.path.getsize(file)):
        raise _damaged(file, ValueError(f"it is empty, or ends before its {_named('Rows')}"))

    return header if voxels else None


def _damaged(file: str, error: Exception) -> InputError:
    reason = reason_of(error)[-200:] or type(error).__name__
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
    # Its warnings are either errors here or irrelevant.
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
    """Yield the frames of a file; a functional group of one frame takes precedence over the shared ones."""
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
    """Return the numbers of a tag; an InputError names it if a frame lacks them, or a length is not above 0."""
    numbers = frame.header.numbers(keyword)
    least = 0 if keyword in _LENGTHS else -np.inf
    if len(numbers) != count or not np.isfinite(numbers).all() or min(numbers) <= least:
        text = frame.header.text(keyword)
        where = f"DICOM file {frame.file}" + f", frame {frame.number + 1}," * bool(frame.number)
        raise InputError(
            f"{where} has no {_named(keyword)}" + f" but {text}" * bool(text),
            "each slice of a volume says where it lies",
            "export the series again with this tag, or convert it to NIfTI with its true place",
        )

    return numbers


def _require_equal(frames: Sequence[Frame], keyword: str, count: int = 1) -> Affine:
    """Return the numbers of a tag that must be equal in all frames; an InputError names the tag if they differ."""
    first = _numbers(frames[0], keyword, count)
    for frame in frames:
        if not np.allclose(_numbers(frame, keyword, count), first, rtol=0, atol=_ALIKE):
            raise _different(keyword, frames[0], frame)

    return first


def _stated(frames: Sequence[Frame], keyword: str) -> list[Frame]:
    """Return the first frame of each text that a tag has."""
    frame_of: dict[str, Frame] = {}
    for frame in frames:
        frame_of.setdefault(frame.header.text(keyword), frame)

    frame_of.pop("", None)
    return [*frame_of.values()]


def _different(keyword: str, frame: Frame, other: Frame) -> InputError:
    return InputError(
        f"{_named(keyword)} is {frame.header.text(keyword)} in DICOM file {frame.file} and "
        f"{other.header.text(keyword)} in {other.file}",
        "the slices of a volume have one grid, and one meaning of their values",
        "keep slices in which this tag is equal in each folder",
    )


# Places


def _placed(folder: str, frames: Sequence[Frame]) -> tuple[Sequence[int], Affine]:
    """Return each frame's place in the order of their positions, and the affine from index to mm, RAS."""
    right, down = _require_equal(frames, "ImageOrientationPatient", 6).reshape(2, 3)
    rows, columns = _require_equal(frames, "PixelSpacing", 2)
    normal = np.cross(right, down)
    if not math.isclose(float(np.linalg.norm(normal)), 1, abs_tol=0.01):
        raise InputError(
            f"{_named('ImageOrientationPatient')} of DICOM file {frames[0].file} is {np.append(right, down)}",
            "two directions of length 1 at a right angle",
            "export the series again",
        )

    positions = np.stack([_numbers(frame, "ImagePositionPatient", 3) for frame in frames])
    # by the distance along the normal: numbers and names of files are in any order
    order = np.argsort(positions @ normal, kind="stable")
    positions = positions[order]
    if len(frames) == 1:
        step = normal * _numbers(frames[0], "SliceThickness", 1)
    else:
        step = (positions[-1] - positions[0]) / (len(frames) - 1)
        _check_positions(
            folder, [frames[place] for place in order], positions, normal, min(rows, columns)
        )

    affine = np.eye(4)
    affine[:3, :3] = np.stack([right * columns, down * rows, step], axis=1)
    affine[:3, 3] = positions[0]
    return np.argsort(order).tolist(), to_ras(affine)


def _check_positions(
    folder: str, frames: Sequence[Frame], positions: Affine, normal: Affine, pixel: float
) -> None:
    """Refuse a series whose voxels would not lie where the affine has them: slices are missing, or the gantry tilted.

    `frames` and their `positions` (N, 3) are in order, `normal` (3,) is that of the slices, which may be shifted by
    half the side of a pixel, in mm.
    """
    steps = np.linalg.norm(np.diff(positions, axis=0), axis=1)
    pair = frames[steps.argmin() :][:2]
    uids = {frame.header.text("SOPInstanceUID") for frame in pair}
    files = [frame.file for frame in pair]
    if not steps.all() and len(uids) == 1 and files[0] != files[1]:
        raise InputError(
            f"DICOM files {' and '.join(files)} are copies: both lie in one place and have the "
            f"{_named('SOPInstanceUID')} {uids.pop()}",
            "a file for each slice",
            "remove one of them",
        )
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
    """Convert an affine whose x and y point left and back (LPS, of DICOM and ITK) to RAS."""
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
    """Return the affine (4, 4) of a picture from (column, row, 0) to mm, RAS; missing values are as in ITK."""
    _require_shallow(file)
    reader = _reader(file)
    reader.ReadImageInformation()
    return affine_of(reader)


# Values


def _stored(file: str, header: Header) -> Array:
    """Return the pixels (frames, H, W) of a file in shades of grey, with all bits of their words."""
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
        least = max(element.length, header.voxels * header.whole("BitsAllocated") // 8)
        if len(element.value) < least and element.length < _UNDEFINED:
            raise ValueError(f"its {_named('PixelData')} is cut off")

        plain.PhotometricInterpretation = "MONOCHROME2"
        syntax = plain.file_meta.get("TransferSyntaxUID")
        if header.whole("BitsAllocated") == 16 and syntax and not syntax.is_compressed:
            # padding may need bits above those of other pixels
            plain.BitsStored = 16
            plain.HighBit = 15

        # GDCM loses the last bits where frames fill no bytes, and swaps 32-bit numbers in big-endian order wrongly
        if header.whole("BitsAllocated") in (1, 32) and syntax and not syntax.is_compressed:
            pixels = plain.pixel_array
        else:
            # of a class that is new to it GDCM reads nothing
            plain.file_meta.MediaStorageSOPClassUID = _SECONDARY_CAPTURE
            with tempfile.TemporaryDirectory() as folder:  # SimpleITK reads files only
                copy = os.path.join(folder, "slice")
                plain.save_as(copy)
                pixels = _pixels(copy)
    except Exception as error:  # whatever pydicom and SimpleITK stumble over
        raise _damaged(file, error) from error

    frames: Array = pixels.reshape(-1, header.whole("Rows"), header.whole("Columns"))
    return frames


@own_locale()
def _pixels(file: str) -> Array:
    """Return what SimpleITK reads of a file: (frames, H, W[, colours])."""
    pixels: Array = sitk().GetArrayFromImage(_reader(file).Execute())
    return pixels


def _modality(pixels: Array, header: Header) -> Array:
    """Return stored pixels as physical values: by a table, or times slope plus intercept."""
    pixels = _without_unused_bits(pixels, header)
    if tables := header.items("ModalityLUTSequence"):
        return _through(pixels, tables[0], header.is_signed)

    slope = header.number("RescaleSlope", 1)
    if not slope:
        raise ValueError(f"its {_named('RescaleSlope')} is 0")

    return pixels * slope + header.number("RescaleIntercept", 0)


def _through(values: Array, table: Header, is_signed: bool) -> Array:
    """Map values by a lookup table; values below it get its first entry, values above it its last."""
    descriptor = table.numbers("LUTDescriptor")
    entries = table.get("LUTData")
    if len(descriptor) != 3 or entries is None:
        raise ValueError(f"it has a table without {_named('LUTDescriptor')} or {_named('LUTData')}")

    count, first, bits = descriptor % 2**16  # which may be written with a sign
    if isinstance(entries, bytes):
        entries = np.frombuffer(entries, "<u2" if table[0].original_encoding[1] else ">u2")

    entries = np.atleast_1d(entries)
    if len(entries) < count and bits == 8:  # two entries a word
        entries = entries.astype("<u2").view(np.uint8)
    if len(entries) < count:
        raise ValueError(f"its {_named('LUTData')} has {len(entries)} of {count:g} entries")

    if first >= 2**15 and (is_signed or values.min() < 0):
        first -= 2**16

    index = np.clip(np.rint(values) - first, 0, len(entries) - 1)
    return np.asarray(entries[index.astype(np.intp)], np.float64)


def _padding(pixels: Array, header: Header) -> Array:
    """Tell which stored pixels are padding."""
    ends = header.numbers("PixelPaddingValue")
    if not len(ends):
        return np.zeros(pixels.shape, bool)

    # Two bytes, written with a sign or without (C.7.5.1.1.2).
    ends = np.append(ends, header.numbers("PixelPaddingRangeLimit")) % 2**16
    if header.is_signed:
        ends = (ends + 2**15) % 2**16 - 2**15

    padded = np.zeros(pixels.shape, bool)
    for values in (pixels, _without_unused_bits(pixels, header)):
        padded |= (values >= ends.min()) & (values <= ends.max())

    return padded


def _without_unused_bits(pixels: Array, header: Header) -> Array:
    unused = 16 - header.whole("BitsStored", 16)
    if pixels.itemsize != 2 or unused <= 0:
        return pixels

    return np.right_shift(np.left_shift(pixels, unused), unused)  # which keeps the sign


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
        colours, most = _coloured(file, header)
        return np.asarray(np.rint(colours / most * 255), np.uint8)

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


def _coloured(file: str, header: Header) -> tuple[Array, int]:
    """Return the colours (H, W, 3) of a picture, and their largest possible value."""
    _require_shallow(file)
    if "PALETTE" in header.text("PhotometricInterpretation"):
        # GDCM fails where a table's first index is not 0
        pydicom = importlib.import_module("pydicom")
        grey = pydicom.Dataset()
        grey.PhotometricInterpretation = "MONOCHROME2"
        indices = _without_unused_bits(_stored(file, Header((grey, *header)))[0], header)
        colours = pydicom.pixels.apply_color_lut(indices, _dataset(file))
        return colours, np.iinfo(colours.dtype).max

    plain = _dataset(file)
    syntax = plain.file_meta.get("TransferSyntaxUID")
    # by what a JPEG says of its colours: GDCM trusts the tag, and in RLE of 16 bits it mixes up bytes
    if syntax in _JPEG or (syntax == _RLE and header.text("PhotometricInterpretation") == "RGB"):
        colours = plain.pixel_array
    else:
        colours = _pixels(file)[0]

    return colours, 2 ** header.whole("BitsStored", 8) - 1


def _shown(values: Array, of_image: Array, header: Header) -> Array:
    """Return values as shades from 0 to 1; `of_image` are the values that are not padding."""
    if tables := header.items("VOILUTSequence"):
        looked_up = _through(values, tables[0], header.is_signed)
        bits = tables[0].numbers("LUTDescriptor")[2]
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
    elif width >= 1:  # C.11.2.1.2.1: a window of W values has W - 1 steps
        low = centre - 0.5 - (width - 1) / 2
        high = centre - 0.5 + (width - 1) / 2
    elif header.whole("BitsAllocated") == 8 and low >= 0 and high <= 255:
        low = 0.0
        high = 255.0

    shades = (values - low) / max(high - low, 1e-9)
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


@contextmanager
def itk_errors() -> Iterator[None]:
    """Turn what SimpleITK raises in the block, or MetaIO writes to stderr and goes on from, into a ValueError."""
    sys.stderr.flush()
    stderr = os.dup(2)
    reason = ""
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        except RuntimeError as error:
            reason = reason_of(error)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)

        caught.seek(0)
        text = caught.read().decode(errors="replace")

    sys.stderr.write(_METAIO.sub("", text))  # of other threads
    if first := _METAIO.search(text):
        reason = first[0].strip()
    if reason:
        raise ValueError(reason)


def reason_of(error: Exception) -> str:
    """Return what an error of a library says, without the source lines and addresses of ITK's."""
    return _ITK_SOURCE.sub("", " ".join(str(error).split()))


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


def patient(image: str) -> str | None:
    """Return the PatientID of a DICOM file, or of the series in a folder; None if it has none, or for other images."""
    files = [image]
    if os.path.isdir(image):
        files = [os.path.join(image, name) for name in sorted(os.listdir(image))]

    with suppress(InputError):  # told by what reads the pixels
        for header in filter(None, map(_header, filter(is_named_or_begins_so, files))):
            return header.text("PatientID").strip() or None

    return None


def is_named_or_begins_so(file: str) -> bool:
    """Tell whether a file is to be read as DICOM, by its ending or its first bytes."""
    return file.lower().endswith(SUFFIXES) or is_dicom(file)


def is_dicom(file: str) -> bool:
    """Tell whether a file begins like a DICOM file."""
    if not os.path.isfile(file):
        return False
    try:
        with open(file, "rb") as opened:
            return opened.read(_PREAMBLE + 4)[_PREAMBLE:] == _MAGIC
    except OSError:  # told by what reads it
        return False
