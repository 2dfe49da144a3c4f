"""Volumes as MONAI's MetaTensors, with their masks, checked when read; here their places become affines in mm.

Volume URIs: `<path>`, `<archive>.zip!<member>` with an ending of `SUFFIXES`, `<folder of a DICOM series>`.
"""

from __future__ import annotations

import gzip
import importlib
import io
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from monai.data import MetaTensor

from medfl.core import Array, Floats, InputError, beginning, composed, refusing, words_of
from medfl.datasets.readers import dicom
from medfl.datasets.readers.mask_values import Classes, class_indices
from medfl.datasets.readers.reading import (
    JOINED,
    Files,
    files_below,
    is_hidden,
    names_other_file,
    read_member,
    split_uri,
)
from medfl.datasets.readers.stacks import check_unpacked, unpacked

NIFTI = (".nii", ".nii.gz")
_ITK = {".nrrd": "NrrdImageIO", ".mha": "MetaImageIO"}
SUFFIXES = (*NIFTI, *_ITK)
CHANGES = "changes"
"""In a volume's meta: what is not as it is stored, each with a semicolon after it."""
TOLERANCE = 1e-3  # mm, on each number of an affine
_MOST_CHANNELS = 32  # of an image of four axes; more are a series in time
_READABLE = f"a volume is a file that ends in {', '.join(SUFFIXES)}, plain or in a zip, or a folder of one DICOM series"
_MILLIMETRES = {
    "": 1.0,
    "?": 1.0,
    "unknown": 1.0,
    "mm": 1.0,
    "millimeter": 1.0,
    "cm": 10.0,
    "m": 1e3,
    "meter": 1e3,
    "um": 1e-3,
    "\u00b5m": 1e-3,
    "\u03bcm": 1e-3,
    "micron": 1e-3,
}
"""Of each unit of length that a header may name; what it leaves open is millimetres, as is the custom."""
_GZIP = b"\x1f\x8b"
_NIFTI_STARTS = {
    size.to_bytes(4, order): version
    for version, size in ((1, 348), (2, 540))
    for order in ("little", "big")
}
"""The size of the header, with which a file begins, in either order of bytes: NIfTI's version."""
_NIFTI_UNITS = {0: "unknown", 1: "meter", 2: "mm", 3: "micron"}
_UNITS = re.compile(
    rb"^(?:space )?units:[ \t]*(.*?)\r?$"  # NRRD: one in quotes for each axis
    rb"|^DistanceUnits[ \t]*=[ \t]*(.*?)\r?$",  # MetaImage
    re.MULTILINE | re.IGNORECASE,
)
_SPACING = re.compile(
    rb"^(?:spacings:|space directions:|Element(?:Spacing|Size)[ \t]*=)(.*)",
    re.MULTILINE | re.IGNORECASE,
)
_SEGMENT = re.compile(
    rb"^Segment(\d+)_LabelValue:=(\d{1,9})\r?\n(?:.*\n){0,9}?Segment\1_Name:=(.*?)\r?$",
    re.MULTILINE,
)
"""What 3D Slicer writes of a structure, in the order of these keys."""
_HEAD = 1 << 16  # bytes at a file's beginning in which its header ends
_PLACE = words_of("""
    xyzt_units qform_code sform_code quatern_b quatern_c quatern_d qoffset_x qoffset_y qoffset_z
    srow_x srow_y srow_z
""")
"""What a NIfTI header says of place, beside pixdim."""
_ROUNDED = np.float64(-1e-5)  # 1 less the squares of a unit quaternion in float32
_ROUNDED_OFF = 1e-3  # of the range of values, a step in float32 that is told
_SCANNER = 1  # NIfTI's code of an affine to the scanner's millimetres


def read_volume(uri: str, channels: int | None = None) -> MetaTensor:
    """Read an image: (C, D1, D2, D3) float32, its affine from index to mm, RAS; `CHANGES` of its meta are said.

    Its channels are a fourth axis, or files of one shape and place, their URIs joined by ` | `. C is `channels`, if
    given.

    Raises:
        InputError: unreadable or truncated; not three axes, or four (others of length 1 are dropped, a single slice is
            given a third); NaN or infinite values; one value everywhere; an affine that cannot be inverted; a unit
            that is no length; a folder with no or several DICOM series; channels that differ in shape or place.
    """
    return _with_channels(_read(uri.split(JOINED)[0]), uri, channels)


def _with_channels(raw: _Raw, image: str, count: int | None) -> MetaTensor:
    uri, *more_uris = image.split(JOINED)
    channels = [_values(uri, raw)]
    for channel_uri in more_uris:
        channel = _aligned(f"channel {channel_uri}", _read(channel_uri), f"channel {uri}", raw)
        channels.append(_values(channel_uri, channel))
        raw = raw._replace(changes=raw.changes + channel.changes)

    voxels = np.concatenate(channels)
    _require_channels(f"image {image}", len(voxels), count or len(voxels))
    if not np.can_cast(raw.voxels.dtype, np.float32):
        digit = np.spacing(np.abs(voxels).max())
        if digit > _ROUNDED_OFF * np.ptp(voxels):
            raw = raw._replace(changes=f"{raw.changes}values lose digits in float32; ")

    return _tensor(uri, voxels, raw)


def read_pair(
    image: str, mask: str, classes: Classes, channels: int | None = None
) -> tuple[MetaTensor, MetaTensor]:
    """Read an image, (C, D1, D2, D3) float32, and its mask, (1, D1, D2, D3) of class indices.

    A mask whose axes have another order or direction is turned to those of its image. C is `channels`, if given.

    Raises:
        InputError: as `read_volume`, or the two differ in shape or place, or the mask has other values, or one of them
            other channels.
    """
    first = image.split(JOINED)[0]
    raw = _read(first)
    labels = _aligned(f"its mask {mask}", _read(mask), f"image {first}", raw)
    _require_channels(f"mask {mask}", labels.voxels.shape[3], 1)
    tensor = _with_channels(raw, image, channels)

    indices = class_indices(mask, labels.voxels[..., 0], classes)[None]
    return tensor, _tensor(mask, indices, labels)


def _require_channels(name: str, count: int, wanted: int) -> None:
    if count != wanted:
        raise InputError(
            f"{name} has {count} channels",
            f"a fourth axis, or files, of {wanted}",
            "convert it, a mask of several structures to one number a voxel, or remove the case",
        )


def _aligned(name: str, raw: _Raw, base_name: str, base: _Raw) -> _Raw:
    """Return a volume on the grid of another one that lies in the same place, its axes turned where they differ."""
    orientations = importlib.import_module("nibabel.orientations")
    shape = base.voxels.shape[:3]
    turned = raw
    if not (raw.voxels.shape[:3] == shape and _is_close(raw.affine, base.affine)):
        before, after = (orientations.io_orientation(volume.affine) for volume in (raw, base))
        turn = orientations.ornt_transform(before, after)
        voxels = orientations.apply_orientation(raw.voxels, turn)
        affine = raw.affine @ orientations.inv_ornt_aff(turn, raw.voxels.shape[:3])
        change = "".join(orientations.ornt2axcodes(before))
        turned = _Raw(
            voxels, affine, f"{raw.changes}axes {change} are turned to those of its image; "
        )

    allowed = "an image, its channels and its mask have one shape"
    advice = "resample the mask to the image, or remove the case"
    if turned.voxels.shape[:3] != shape:
        problem = f"{base_name} is {times(shape)} voxels, {name} {times(raw.voxels.shape[:3])}"
        raise InputError(problem, allowed, advice)

    if not _is_close(turned.affine, base.affine):
        problem = f"{base_name} has the affine {_rows(base.affine)}, {name} {_rows(raw.affine)}"
        raise InputError(problem, f"they lie in one place, to {TOLERANCE} mm", advice)

    return turned._replace(affine=base.affine)


def _is_close(affine: Array, other: Array) -> bool:
    return np.allclose(affine, other, rtol=0, atol=TOLERANCE)


def changes_of(image: object, mask: object = None) -> str:
    """Return what reading changed in a case, or left as odd as it is, each with a semicolon after it."""
    changes = ""
    for part in (image, mask):
        changes += str(getattr(part, "meta", {}).get(CHANGES, ""))

    # a label that is no mask has no axes; values are sorted, which takes long, only where 0 is not most of them
    voxels = np.asarray(mask if getattr(mask, "ndim", 0) > 1 else 0)
    if np.count_nonzero(voxels) > voxels.size / 2:
        values, counts = np.unique(voxels, return_counts=True)
        if values[counts.argmax()]:  # inverted, perhaps
            changes += "a structure is larger than the background: is that 0 in the masks?; "

    return changes


def changes_told(cases: Iterable[str]) -> tuple[str, ...]:
    """Return a line for each kind of change, of the changes of each case."""
    counts = Counter(change for changes in cases for change in changes.split("; ") if change)
    return tuple(f"{change}, in {count} files" for change, count in counts.items())


def count_voxels(uri: str) -> int | None:
    """Return the number of voxels that the header states, without reading them; None if it cannot be read."""
    try:
        if os.path.isdir(uri):
            return dicom.count_voxels(uri)
        return math.prod(_open(uri).shape) or None
    except Exception:  # its reader says what is wrong with it
        return None


def count_channels(uri: str) -> int:
    """Return the number of channels that a file's header states, 1 where it cannot be read or states none."""
    try:
        return math.prod(_open(uri).shape[3:])
    except Exception:  # its reader says what is wrong with it
        return 1


def volume_files(root: Path) -> Files:
    """Return (relative path, URI) of all volumes below a folder or in a zip archive, sorted, but no hidden ones."""
    return files_below(root, SUFFIXES)


def volume_index(folder: Path) -> dict[str, str]:
    """Return the URI of each volume that lies directly in a folder by its name without suffix.

    A folder in it with files other than volumes counts as a DICOM series; beside volumes they must be DICOM.
    """
    index: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if is_hidden(path.name):
            continue
        if path.is_dir():
            if _is_series(path):
                # A file goes before a series of the same name.
                index.setdefault(composed(path.name), str(path))
        elif is_volume(path.name):
            index[composed(bare(path.name))] = str(path)

    return index


def volume_paths(root: Path) -> Files:
    """Return (path without suffix, URI) of all volumes below a folder, and of the DICOM series directly in it."""
    series = {name: uri for name, uri in volume_index(root).items() if os.path.isdir(uri)}
    paths = list(series.items())
    for name, uri in volume_files(root):
        if name.partition("/")[0] not in series:
            paths.append((bare(name), uri))

    return sorted(paths)


def is_volume(name: str) -> bool:
    """Tell whether a name ends as those of files of volumes do, in lower case or upper."""
    return name.lower().endswith(SUFFIXES)


def bare(name: str, endings: Sequence[str] = SUFFIXES) -> str:
    """Return a name without its ending, if it is one of these: by default those of volumes."""
    ending = next((end for end in endings if name.lower().endswith(end)), "")
    return name[: len(name) - len(ending)]


def _is_series(folder: Path) -> bool:
    names = [file.name for file in folder.iterdir() if file.is_file() and not is_hidden(file.name)]
    foreign = [name for name in names if not is_volume(name)]
    return bool(foreign) and (
        len(foreign) == len(names) or any(dicom.is_dicom(str(folder / name)) for name in foreign)
    )


# Files


class _Raw(NamedTuple):
    """Voxels (D1, D2, D3, C) of any number type, the affine (4, 4) from index to mm, RAS, and what is not as stored."""

    voxels: Array
    affine: Floats
    changes: str = ""


def _read(uri: str) -> _Raw:
    path, part = split_uri(uri)
    kind = uri[len(bare(uri)) :].lower()
    with refusing(f"volume {uri} cannot be read", _READABLE, "copy the file again, or convert it"):
        if os.path.isdir(uri):
            raw = _Raw(*dicom.read(uri))
        elif not os.path.exists(path):
            raise ValueError("no such file or folder")
        elif not kind:
            raise ValueError("not such a file by its name")
        elif kind in NIFTI:
            raw = _nifti(uri)
        elif part:
            with tempfile.TemporaryDirectory() as folder:  # SimpleITK reads files only
                copy = Path(folder, f"volume{kind}")
                copy.write_bytes(read_member(path, part))
                raw = _itk(str(copy), kind)
        else:
            raw = _itk(uri, kind)

    voxels = raw.voxels.reshape(_sides(uri, raw.voxels.shape))
    if voxels.dtype.kind not in "biuf":
        raise InputError(
            f"volume {uri} holds {voxels.dtype} values",
            "one real number a voxel",
            "convert the file to such numbers",
        )
    if not np.isfinite(raw.affine).all() or np.linalg.matrix_rank(raw.affine[:3, :3]) < 3:
        raise InputError(
            f"volume {uri} has the affine {_rows(raw.affine)}",
            "an affine can be inverted",
            "write an sform or qform that can be inverted into its header",
        )

    sides = np.linalg.norm(raw.affine[:3, :3], axis=0)
    if not 0.01 <= min(sides) <= max(sides) <= 50:
        raw = raw._replace(
            changes=f"{raw.changes}voxels have sides below 0.01 or above 50 mm: is this their unit?; "
        )

    return raw._replace(voxels=voxels)


def _nifti(uri: str) -> _Raw:
    try:
        image = _open(uri, is_whole=True)
    except ValueError as error:
        if str(error).startswith("w2 "):
            raise ValueError("its quatern_b, quatern_c and quatern_d are no rotation") from error

        raise

    _sides(uri, image.shape)  # before all of a long series is read
    _check_size(uri, image)
    if image.dataobj.offset < image.header.sizeof_hdr:
        raise ValueError("its voxels begin within its header, by vox_offset")

    _require_spacing(image)
    code = int(image.header["xyzt_units"]) % 8  # beside it stands the unit of time
    unit = _NIFTI_UNITS.get(code, f"the unit {code} of xyzt_units")
    raw = _in_mm(np.asanyarray(image.dataobj), np.array(image.affine, np.float64), unit)
    with suppress(ValueError):  # of a qform that is no rotation
        qform = image.get_qform(coded=True)[0]
        if qform is not None and not _is_close(qform, image.affine):
            return raw._replace(
                changes=f"{raw.changes}the place is by the sform, not by the other qform; "
            )

    return raw


def _require_spacing(image: dicom.Untyped) -> None:
    """Raise a ValueError if a place rests on a spacing of 0, of which nibabel makes 1."""
    with image.file_map["image"].get_prepare_fileobj("rb") as file:
        stored = type(image.header).from_fileobj(file, check=False)

    sides = zip(stored["pixdim"][1:4], image.shape, strict=False)
    if not stored["sform_code"] and any(step == 0 and side > 1 for step, side in sides):
        raise ValueError("its pixdim has a spacing of 0")


def _itk(path: str, kind: str) -> _Raw:
    """Read a file of a format of ITK: its axes are those of NIfTI, channels the last one."""
    with open(path, "rb") as file:
        head = file.read(_HEAD)

    if names_other_file(head):
        raise ValueError("its header names another file as its pixels")

    match = _UNITS.search(head)
    text = next(filter(None, match.groups()), b"").decode() if match else ""
    units = {*text.replace('"', " ").split()} or {""}
    if len(units) > 1:
        raise ValueError(f"its axes have the units {', '.join(sorted(units))}")

    sitk = dicom.sitk()
    reader = sitk.ImageFileReader()
    reader.SetImageIO(_ITK[kind])
    reader.SetFileName(path)
    with dicom.itk_errors():
        reader.ReadImageInformation()
        values = math.prod(map(int, reader.GetSize())) * reader.GetNumberOfComponents()
        check_unpacked(8 * values, os.path.getsize(path))
        image = reader.Execute()

    voxels = sitk.GetArrayFromImage(image)
    if image.GetNumberOfComponentsPerPixel() > 1:
        voxels = np.moveaxis(voxels, -1, 0)

    # The arrays of SimpleITK have the slices first.
    raw = _in_mm(voxels.T, dicom.affine_of(image), *units)
    names = [
        (int(value), name.decode(errors="replace")) for _, value, name in _SEGMENT.findall(head)
    ]
    raw = raw._replace(changes=raw.changes + dicom.called(names))

    spacing = _SPACING.search(head)
    steps = spacing[1].lower().split() if spacing else []
    # axes of channels have none; of what lacks it ITK makes 1
    if len(steps) - steps.count(b"nan") - steps.count(b"none") < min(3, image.GetDimension()):
        raw = raw._replace(changes=f"{raw.changes}a spacing that is missing is read as 1; ")

    return raw


def _in_mm(voxels: Array, affine: Floats, unit: str) -> _Raw:
    """Return a volume whose header gives lengths in a unit of this name; a ValueError if it is no known length."""
    if unit not in _MILLIMETRES:
        raise ValueError(f"its lengths are in {unit!r}")

    factor = _MILLIMETRES[unit]
    affine[:3] *= factor
    return _Raw(voxels, affine, f"lengths in {unit} are read as mm; " * (factor != 1))


def _check_size(uri: str, image: dicom.Untyped) -> None:
    """Raise a ValueError if voxels take far more memory than the file has bytes: scaled ones are float64."""
    scaled = (image.dataobj.slope, image.dataobj.inter) != (1, 0)
    bytes_of_voxel = max(image.get_data_dtype().itemsize, 8 * scaled)
    check_unpacked(math.prod(image.shape) * bytes_of_voxel, os.path.getsize(split_uri(uri)[0]))


def _open(uri: str, is_whole: bool = False) -> dicom.Untyped:
    """Open a NIfTI file, packed ones as a whole for the sum at their end, which nibabel does not read."""
    import nibabel as nib

    nib.Nifti1Header.quaternion_threshold = _ROUNDED
    nib.imageglobals.logger.disabled = True  # what it logs of a header is in its errors
    path, part = split_uri(uri)
    if part:
        content = read_member(path, part)
    else:
        with open(path, "rb") as file:
            start = file.read(4)
            is_packed = start.startswith(_GZIP)
            if is_packed == path.lower().endswith(".gz") and (
                start in _NIFTI_STARTS or (is_packed and not is_whole)
            ):
                return nib.load(path)

            # packed or unpacked on its way here, under its old name
            content = start + file.read()

    if content.startswith(_GZIP):
        content = unpacked(content)

    version = _NIFTI_STARTS.get(content[:4])
    if not version:
        raise ValueError(f"it is no NIfTI file; {beginning(io.BytesIO(content))}")

    kind: dicom.Untyped = getattr(nib, f"Nifti{version}Image")
    return kind.from_bytes(content)


def _sides(uri: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the three sides and the channels of a volume: a single slice has a side of 1, other ones are dropped."""
    sides = (*shape, 1, 1)[:3]
    more = [side for side in shape[3:] if side != 1]
    channels = math.prod(more)
    if (
        sorted(sides)[1] < 2
        or min(sides) < 1
        or len(more) > 1
        or not 0 < channels <= _MOST_CHANNELS
    ):
        raise InputError(
            f"volume {uri} has the shape {times(shape)}",
            f"three axes, two of them of at least 2 voxels, and a fourth of up to {_MOST_CHANNELS} channels",
            "take one volume of a series apart, or remove the case",
        )

    return *sides, channels


def as_nifti(mask: Array, affine: Floats, source: str) -> bytes:
    """Return a packed NIfTI file of a mask (D1, D2[, D3]) in the place of the volume that it was made of.

    What a NIfTI source's header says of place (both forms, their codes, spacing, units) is the mask's too; of another
    source, or one of another shape, both forms are its affine from index to mm, RAS.
    """
    import nibabel as nib

    image: dicom.Untyped = nib.Nifti1Image(mask, affine)  # type: ignore[no-untyped-call]
    original = _open(source) if source.lower().endswith(NIFTI) else None
    if original is not None and (*original.shape, 1)[: mask.ndim] == mask.shape:
        header = type(original.header)()
        header["pixdim"][:4] = original.header["pixdim"][:4]
        for name in _PLACE:
            header[name] = original.header[name]

        header.set_data_dtype(mask.dtype)
        image = type(original)(mask, None, header)
    else:
        image.header.set_xyzt_units("mm")
        # Both forms, since viewers differ in which they read.
        image.set_sform(affine, _SCANNER)
        image.set_qform(affine)
        # A qform knows no shear: who reads no sform is to refuse the mask, not to show it elsewhere.
        image.set_qform(affine, _SCANNER * _is_close(image.get_qform(), affine))

    # Without a time in the header, equal masks are equal files.
    return gzip.compress(image.to_bytes(), mtime=0)


# Values


def _values(uri: str, raw: _Raw) -> Array:
    """Return the voxels of an image as float32 (C, D1, D2, D3)."""
    with np.errstate(over="ignore"):
        voxels = raw.voxels.astype(np.float32)

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
        least = raw.voxels.min()
        most = raw.voxels.max()
        problem = f"volume {uri} has the value {least + 0.0:g} at every voxel"
        advice = "remove the case from the data"
        if least != most:
            problem = f"volume {uri} has the values {least} to {most}, all one number in float32"
            advice = "subtract the least value"
        raise InputError(problem, "an image shows something", advice)

    return np.moveaxis(voxels, 3, 0)


def _tensor(uri: str, voxels: Array, raw: _Raw) -> MetaTensor:
    import torch
    from monai.data import MetaTensor
    from monai.utils.enums import MetaKeys, SpaceKeys

    meta = {
        MetaKeys.ORIGINAL_AFFINE: raw.affine.copy(),
        MetaKeys.SPATIAL_SHAPE: np.asarray(voxels.shape[1:]),
        MetaKeys.SPACE: SpaceKeys.RAS,
        "filename_or_obj": uri,
        CHANGES: raw.changes,
    }
    data = torch.from_numpy(np.ascontiguousarray(voxels))

    return MetaTensor(data, affine=torch.as_tensor(raw.affine), meta=meta)


def times(shape: Sequence[int]) -> str:
    """Return sides in words."""
    return " x ".join(str(int(side)) for side in shape)


def _rows(affine: Array) -> str:
    return "[" + " | ".join(" ".join(f"{value:.6g}" for value in row) for row in affine[:3]) + "]"
