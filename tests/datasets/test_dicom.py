"""Values, lookup tables, padding and places of DICOM files: PS3.3 C.7.6 and C.11, computed here by NumPy."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
from PIL import Image
from pydicom.encaps import encapsulate

from medfl.core.errors import InputError
from medfl.datasets.readers.dicom import own_locale, picture_affine, read_picture
from medfl.datasets.readers.reading import read_pixels
from medfl.datasets.readers.volumes import CHANGES, count_voxels, read_pair, read_volume
from tests.support.dicom_files import BIG_ENDIAN, EXPLICIT, IMPLICIT, slice_of, write

INTERCEPT, SLOPE = (0x0028, 0x1052), (0x0028, 0x1053)
POSITION, ORIENTATION, SPACING = (0x0020, 0x0032), (0x0020, 0x0037), (0x0028, 0x0030)
THICKNESS = (0x0018, 0x0050)
PADDING, LIMIT = (0x0028, 0x0120), (0x0028, 0x0121)
CENTRE, WIDTH, FUNCTION = (0x0028, 0x1050), (0x0028, 0x1051), (0x0028, 0x1056)
MODALITY_LUT, VOI_LUT = (0x0028, 0x3000), (0x0028, 0x3010)
KIND, SHAPE_OF_LUT = (0x0028, 0x0004), (0x2050, 0x0020)
PIXELS = np.arange(12, dtype=np.uint16).reshape(3, 4)


def lut(first: int, entries: Sequence[int] | bytes, bits: int = 16) -> tuple[str, Any]:
    data = ("OW", entries) if isinstance(entries, bytes) else ("US", entries)
    return "SQ", [{(0x0028, 0x3002): ("US", [len(entries), first, bits]), (0x0028, 0x3006): data}]


def series(folder: Path, *slices: tuple[np.ndarray, dict[Any, Any]], syntax: str = EXPLICIT) -> str:
    for index, (pixels, more) in enumerate(slices):
        write(folder / f"{9 - index}.dcm", slice_of(pixels, index, more), syntax)
    return str(folder)


def scaled(slope: str | None, intercept: str | None) -> dict[Any, Any]:
    return {SLOPE: slope and ("DS", slope), INTERCEPT: intercept and ("DS", intercept)}


# Values of volumes


@pytest.mark.parametrize("syntax", [EXPLICIT, IMPLICIT, BIG_ENDIAN])
def test_each_slice_has_its_own_scale(tmp_path: Path, syntax: str) -> None:
    """The first slice's number type decided for all: fractions were cut off, negative values wrapped."""
    scales = [("1", "0"), ("0.25", "-3"), ("2.5", "0.125"), ("3", "-1024"), (None, None)]
    folder = series(tmp_path / "s", *((PIXELS, scaled(*scale)) for scale in scales), syntax=syntax)
    volume = read_volume(folder)
    expected = [PIXELS * float(slope or 1) + float(intercept or 0) for slope, intercept in scales]
    assert np.array_equal(volume[0].numpy(), np.stack(expected, -1).transpose(1, 0, 2))
    assert count_voxels(folder) == 60
    for index, slice_ in enumerate(expected):
        alone = sitk.ReadImage(f"{folder}/{9 - index}.dcm")
        assert np.allclose(sitk.GetArrayFromImage(alone)[0], slice_)


@pytest.mark.parametrize("first", ["uint16", "int16", "uint8", "int8"])
def test_slices_may_differ_in_how_they_are_stored(tmp_path: Path, first: str) -> None:
    kinds = [first, "int16", "uint16", "uint8"]
    stored = [
        (PIXELS.astype(float) + 100 - 200 * kind.startswith("i")).astype(kind) for kind in kinds
    ]
    folder = series(tmp_path / "s", *((pixels, scaled("0.5", "-7")) for pixels in stored))
    expected = np.stack([pixels * 0.5 - 7 for pixels in stored], -1).transpose(1, 0, 2)
    assert np.array_equal(read_volume(folder)[0].numpy(), expected)


@own_locale()
def test_packed_pixels_are_scaled_slice_by_slice(tmp_path: Path) -> None:
    """Compressed by SimpleITK, which would scale them by itself; a MONOCHROME1 series keeps its values."""
    pixels = np.random.default_rng(0).integers(0, 4000, (2, 16, 16)).astype(np.int16)
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    writer.UseCompressionOn()
    (tmp_path / "s").mkdir()
    for index, plane in enumerate(pixels):
        picture = sitk.GetImageFromArray(plane)
        tags = {
            "0008|0060": "CT", "0020|000e": "1.2.3", "0020|0032": f"0\\0\\{index}", "0020|0037": "1\\0\\0\\0\\1\\0",
            "0028|1052": "-1024", "0028|1053": "1.0",
        }  # fmt: skip
        for tag, value in tags.items():
            picture.SetMetaData(tag, value)
        file = tmp_path / "s" / f"{index}.dcm"
        writer.SetFileName(str(file))
        writer.Execute(picture)
        content = file.read_bytes()
        assert len(content) < 2000 + plane.nbytes
        assert b"1.2.840.10008.1.2.4." in content
        assert content.count(b"MONOCHROME2") == content.count(b"-1024") == 1
        content = content.replace(b"-1024", b"-10.5") if index else content
        file.write_bytes(content.replace(b"MONOCHROME2", b"MONOCHROME1"))
    # ITK takes the intercept from what it writes
    expected = (pixels + 1024) + np.array([-1024, -10.5])[:, None, None]
    assert np.array_equal(read_volume(str(tmp_path / "s"))[0].numpy(), expected.transpose(2, 1, 0))


# of 12 bits: JPEG-LS by CharLS, the other two by GDCM's libjpeg; libjpeg of T. Richter decodes all three to these
_LOSSLESS_JPEG = """
    |JeV-01FTR1po&D0TBTI!~hon0RaI40000000000000002?zxc|Jncu0RaF3008a%{r&y@^s<1UC<+3Apc2c5;ka%ahT%&TB?&@MlqCr)XxcW7qi
    EVc|Je
"""
LOSSLESS = {
    "1.2.840.10008.1.2.4.80": """
        |JeWc01FHN1po&D0TBTI+5iXv0RR910KWbA_ur5OfPnsfKA!;q0bm3t0lse=pb(0&dM^dox)&n^0I(whgwPrDJOBh>|Je
    """,
    "1.2.840.10008.1.2.4.57": _LOSSLESS_JPEG,
    "1.2.840.10008.1.2.4.70": _LOSSLESS_JPEG,
}


@pytest.mark.parametrize("syntax", LOSSLESS)
def test_pixels_of_lossless_jpegs_are_those_of_another_decoder(tmp_path: Path, syntax: str) -> None:
    down, right = np.mgrid[:5, :7]
    pixels = ((down * right * 97 + right * 31 + down * 300) % 4096).astype(np.int16)
    bits = {
        (0x0028, 0x0101): ("US", [12]),
        (0x0028, 0x0102): ("US", [11]),
        (0x0028, 0x0103): ("US", [0]),
    }
    file = write(tmp_path / "s" / "x.dcm", slice_of(pixels, 0, {**bits, **scaled("0.5", "-3.25")}))
    dataset = pydicom.dcmread(file)
    dataset.file_meta.TransferSyntaxUID = syntax
    dataset.PixelData = encapsulate([base64.b85decode("".join(LOSSLESS[syntax].split()))])
    dataset["PixelData"].VR = "OB"
    dataset["PixelData"].is_undefined_length = True
    dataset.save_as(file)
    assert np.array_equal(
        read_volume(str(tmp_path / "s"))[0, ..., 0].numpy(), pixels.T * 0.5 - 3.25
    )
    assert np.array_equal(read_picture(file), np.rint(pixels / pixels.max() * 255))


@pytest.mark.parametrize("syntax", [EXPLICIT, IMPLICIT, BIG_ENDIAN])
@pytest.mark.parametrize("shared", [False, True])
def test_frames_of_an_enhanced_file_have_their_own_scale_and_place(
    tmp_path: Path, syntax: str, shared: bool
) -> None:
    """Frames in any order, their tags in functional groups (C.7.6.16)."""
    frames = np.random.default_rng(1).integers(0, 99, (4, 3, 5)).astype(np.uint16)
    order, slopes = [2, 0, 3, 1], ["0.5", "1.5", "2", "0.25"]
    measures = {(0x0028, 0x9110): ("SQ", [{SPACING: ("DS", "0.5\\0.75")}])}
    turned = {(0x0020, 0x9116): ("SQ", [{ORIENTATION: ("DS", "0\\1\\0\\0\\0\\-1")}])}
    groups = []
    for place, slope in zip(order, slopes, strict=True):
        scale = {SLOPE: ("DS", slope), INTERCEPT: ("DS", f"{-place}")}
        groups.append(
            {
                (0x0020, 0x9113): ("SQ", [{POSITION: ("DS", f"{-2 * place}\\5\\6")}]),
                (0x0028, 0x9145): ("SQ", [scale]),
                **({} if shared else {**measures, **turned}),
            }
        )
    more: dict[Any, Any] = {
        (0x0028, 0x0008): ("IS", "4"),
        **{tag: None for tag in (POSITION, ORIENTATION, SPACING, THICKNESS)},
        (0x5200, 0x9230): ("SQ", groups),
    }
    if shared:
        more[0x5200, 0x9229] = ("SQ", [{**measures, **turned}])
    write(tmp_path / "s" / "all.dcm", slice_of(frames, 0, more), syntax)
    volume = read_volume(str(tmp_path / "s"))
    for frame, place, slope in zip(frames, order, slopes, strict=True):
        assert np.array_equal(volume[0, :, :, place].numpy(), (frame * float(slope) - place).T)
    lps = np.array([[0, 0, -2, 0], [0.75, 0, 0, 5], [0, -0.5, 0, 6], [0, 0, 0, 1]])
    assert np.allclose(volume.affine, np.diag([-1, -1, 1, 1]) @ lps)


def test_a_falling_table_of_the_modality_is_applied(tmp_path: Path) -> None:
    signed = PIXELS.astype(np.int16) - 6
    tables = [lut(3, [50, 40, 30, 20]), lut(-2 % 65536, [9, 8, 7, 6])]
    folder = series(
        tmp_path / "s",
        (PIXELS, {MODALITY_LUT: tables[0], **scaled("9", "9")}),
        (signed, {MODALITY_LUT: tables[1]}),
    )
    expected = [
        np.array([50, 40, 30, 20])[np.clip(PIXELS.astype(int) - 3, 0, 3)],
        np.array([9, 8, 7, 6])[np.clip(signed + 2, 0, 3)],
    ]
    assert np.array_equal(read_volume(folder)[0].numpy(), np.stack(expected, -1).transpose(1, 0, 2))


@pytest.mark.parametrize("written_as", ["US", "SS"])
def test_padding_of_a_volume_is_its_least_other_value_and_said(
    tmp_path: Path, written_as: str
) -> None:
    pixels = PIXELS.astype(np.int16) + 5
    pixels[0, :2] = -2000
    folder = series(
        tmp_path / "s",
        (pixels, {PADDING: (written_as, [-2000]), **scaled("1", "-24")}),
        (pixels + 1, scaled("1", "-24")),
    )
    volume = read_volume(folder)
    expected = np.stack([pixels - 24, pixels - 23], -1)
    expected[0, :2, 0] = expected[0, :2, 1].min()
    assert np.array_equal(volume[0].numpy(), expected.transpose(1, 0, 2))
    assert "(0028,0120) PixelPaddingValue" in volume.meta[CHANGES]


@pytest.mark.parametrize(("value", "limit"), [(60, 70), (70, 60)])
def test_padding_has_a_range(tmp_path: Path, value: int, limit: int) -> None:
    pixels = PIXELS.copy()
    pixels[0, :3] = 60, 65, 70
    ends = {PADDING: ("US", [value]), LIMIT: ("US", [limit])}
    folder = series(tmp_path / "s", (pixels, ends), (pixels, ends))
    assert np.array_equal(
        read_volume(folder)[0, ..., 0].numpy().T, np.where(pixels >= 60, 3, pixels)
    )


# Pictures


@pytest.mark.parametrize("padding", [63536, 65535, 32768, 0x0830, 4095])
@pytest.mark.parametrize("signed", [0, 1])
def test_padding_may_need_more_bits_than_are_stored(
    tmp_path: Path, padding: int, signed: int
) -> None:
    """12 bits are stored, and an overlay in the highest: the padding is a whole word of 16 bits."""
    words = np.random.default_rng(0).integers(0, 2000, (2, 6, 8)).astype(np.uint16)
    least = int(words.min())
    words[0, 0, :2] = padding
    words[1, :, 3] |= 0x8000
    stored = {(0x0028, 0x0101): ("US", [12]), (0x0028, 0x0102): ("US", [11])}
    stored |= {(0x0028, 0x0103): ("US", [signed]), PADDING: ("US", [padding])}
    volume = read_volume(series(tmp_path / "s", *((plane, stored) for plane in words)))
    right = (words & 0x0FFF).astype(np.int32)
    right[0, 0, :2] = least
    assert np.array_equal(volume[0], right.T)


def shown(folder: Path, pixels: np.ndarray, **tags: Any) -> np.ndarray:
    more = {key: value for key, value in tags["more"].items()}
    return read_picture(write(folder / "x.dcm", slice_of(pixels, 0, more)))


RAMP = np.array([[0, 1000], [2000, 3000]], np.uint16)
HIGH = 65535
LOOKS: dict[str, tuple[dict[Any, Any], list[float]]] = {
    "as it is": ({}, [0, 1 / 3, 2 / 3, 1]),
    "falling modality table": ({MODALITY_LUT: lut(0, range(3000, -1, -1))}, [1, 2 / 3, 1 / 3, 0]),
    "falling slope": (scaled("-1", "3000"), [1, 2 / 3, 1 / 3, 0]),
    "falling table": (
        {VOI_LUT: lut(1000, range(HIGH, HIGH - 2001, -1))},
        [1, 1, (HIGH - 1e3) / HIGH, (HIGH - 2e3) / HIGH],
    ),
    "table of 12 bits": ({VOI_LUT: lut(0, [*range(4001)], 12)}, [0, 1000 / 4095, 2000 / 4095, 3000 / 4095]),
    "table of bytes": (
        {VOI_LUT: lut(0, bytes(range(250, 240, -1)), 8), **scaled("0.003", "0")},
        [250 / 255, 247 / 255, 244 / 255, 241 / 255],
    ),
    "table before window": (
        {VOI_LUT: lut(0, [HIGH, 0]), CENTRE: ("DS", "1500"), WIDTH: ("DS", "100")},
        [1, 0, 0, 0],
    ),
    "table after a negative intercept": (
        {VOI_LUT: lut(-1000 % 65536, [*range(0, 40010, 10)]), **scaled("1", "-1000")},
        [0, 1e4 / HIGH, 2e4 / HIGH, 3e4 / HIGH],
    ),
    "window": ({CENTRE: ("DS", "1500"), WIDTH: ("DS", "2001")}, [0, 500.5 / 2000, 1500.5 / 2000, 1]),
    "window of one": ({CENTRE: ("DS", "1001"), WIDTH: ("DS", "1")}, [0, 0, 1, 1]),
    "narrow window": (
        {CENTRE: ("DS", "1.5"), WIDTH: ("DS", "4"), **scaled("0.001", "0")}, [1 / 6, 1 / 2, 5 / 6, 1],
    ),
    "exact window": (
        {CENTRE: ("DS", "1.5"), WIDTH: ("DS", "4"), FUNCTION: ("CS", "LINEAR_EXACT"), **scaled("0.001", "0")},
        [1 / 8, 3 / 8, 5 / 8, 7 / 8],
    ),
    "sigmoid": (
        {CENTRE: ("DS", "1500"), WIDTH: ("DS", "2000"), FUNCTION: ("CS", "SIGMOID")},
        [1 / (1 + np.exp(-4 * (x - 1500) / 2000)) for x in (0, 1000, 2000, 3000)],
    ),
    "MONOCHROME1": ({KIND: ("CS", "MONOCHROME1")}, [1, 2 / 3, 1 / 3, 0]),
    "inverse": ({SHAPE_OF_LUT: ("CS", "INVERSE")}, [1, 2 / 3, 1 / 3, 0]),
    "both": ({KIND: ("CS", "MONOCHROME1"), SHAPE_OF_LUT: ("CS", "INVERSE")}, [1, 2 / 3, 1 / 3, 0]),
    "falling table of MONOCHROME1": (
        {KIND: ("CS", "MONOCHROME1"), VOI_LUT: lut(0, range(3000, -1, -1), 12)},
        [1 - 3000 / 4095, 1 - 2000 / 4095, 1 - 1000 / 4095, 1],
    ),
    "padding": ({PADDING: ("US", [3000])}, [0, 0.5, 1, 0]),
    "padding of MONOCHROME1": ({PADDING: ("US", [0]), KIND: ("CS", "MONOCHROME1")}, [0, 1, 0.5, 0]),
    "range of padding": ({PADDING: ("US", [0]), LIMIT: ("US", [1000])}, [0, 0, 0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKS)
def test_a_picture_is_as_a_viewer_shows_it(tmp_path: Path, name: str) -> None:
    more, expected = LOOKS[name]
    pixels = shown(tmp_path, RAMP, more=more)
    assert pixels.ravel().tolist() == np.rint(np.array(expected) * 255).tolist()


@pytest.mark.parametrize("count", [2, 3, 100])
def test_a_picture_of_several_frames_is_refused(tmp_path: Path, count: int) -> None:
    frames = np.zeros((count, 3, 4), np.uint16)
    path = write(tmp_path / "x.dcm", slice_of(frames, 0, {(0x0028, 0x0008): ("IS", str(count))}))
    with pytest.raises(InputError, match="has several frames; one picture in a file; save each"):
        read_picture(path)


# Places


MISSING = {
    "position": (POSITION, None, r"has no \(0020,0032\) ImagePositionPatient"),
    "empty position": (POSITION, ("DS", ""), r"has no \(0020,0032\) ImagePositionPatient"),
    "orientation": (ORIENTATION, None, r"has no \(0020,0037\) ImageOrientationPatient"),
    "spacing": (SPACING, None, r"has no \(0028,0030\) PixelSpacing"),
    "half a spacing": (SPACING, ("DS", "1"), r"has no \(0028,0030\) PixelSpacing"),
    "another orientation": (
        ORIENTATION, ("DS", "0\\1\\0\\0\\0\\-1"),
        r"\(0020,0037\) ImageOrientationPatient is \[0, 1, 0, 0, 0, -1\] in .*7\.dcm and \[1, 0, 0, 0, 1, 0\] in .*8\.",
    ),
    "another spacing": (
        SPACING, ("DS", "1\\1.1"), r"\(0028,0030\) PixelSpacing is \[1, 1\.1\] in .*7\.dcm and \[1, 1\] in",
    ),
    "another size": (None, None, r"\(0028,0010\) Rows is 2 in .*7\.dcm and 3 in .*8\.dcm"),
    "a gap": (POSITION, ("DS", "0\\0\\7"), r"1 to 6 mm apart; .*\(0020,0032\) ImagePositionPatient"),
    "twice one place": (POSITION, ("DS", "0\\0\\1"), r"0 to 1 mm apart; .*ImagePositionPatient, one at each place"),
    "no number": (POSITION, ("DS", "0\\0\\a"), r"s cannot be read \(its \(0020,0032\) .* is \['0', '0', 'a'\]\)"),
    "a decimal comma": (SLOPE, ("DS", "0,5"), r"s cannot be read \(its \(0028,1053\) RescaleSlope is \['0,5'\]\)"),
    "a slope of 0": (SLOPE, ("DS", "0"), r"s cannot be read \(its \(0028,1053\) RescaleSlope is 0\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSING)
def test_a_place_that_is_absent_or_differs_is_refused_by_its_tag(tmp_path: Path, name: str) -> None:
    tag, element, message = MISSING[name]
    third = (PIXELS, {tag: element}) if tag else (PIXELS[:2], {})
    folder = series(tmp_path / "s", (PIXELS, {}), (PIXELS, {}), third)
    with pytest.raises(InputError, match=message) as caught:
        read_volume(folder)
    assert "\n" not in str(caught.value)


MIXED = {
    "photometric": (
        (0x0028, 0x0004),
        "CS",
        "MONOCHROME1",
        "MONOCHROME2",
        "PhotometricInterpretation",
    ),
    "units": ((0x0054, 0x1001), "CS", "BQML", "CNTS", "Units"),
    "kind of values": ((0x0028, 0x1054), "LO", "HU", "US", "RescaleType"),
    "frame of reference": ((0x0020, 0x0052), "UI", "1.2.3", "1.2.4", "FrameOfReferenceUID"),
    "patient": ((0x0010, 0x0020), "LO", "a", "b", "PatientID"),
    "modality": ((0x0008, 0x0060), "CS", "CT", "PT", "Modality"),
}


@pytest.mark.parametrize("name", MIXED)
def test_slices_that_mean_different_things_are_refused_by_their_tag(
    tmp_path: Path, name: str
) -> None:
    tag, kind, first, second, keyword = MIXED[name]
    slices = [(PIXELS, {tag: (kind, value)}) for value in (first, first, second)]
    folder = series(tmp_path / "s", *slices)
    assert {pydicom.dcmread(p)[keyword].value for p in Path(folder).iterdir()} == {first, second}
    with pytest.raises(
        InputError, match=rf"{keyword} is {second} in .*7\.dcm and {first} in .*8\."
    ):
        read_volume(folder)
    slices[2] = (PIXELS, {tag: (kind, first)})
    assert read_volume(series(tmp_path / "t", *slices)).shape == (1, 4, 3, 3)


def test_slices_of_two_acquisitions_are_one_volume_and_it_is_said(tmp_path: Path) -> None:
    numbers = [{(0x0020, 0x0012): ("IS", number)} for number in "112"]
    folder = series(tmp_path / "s", *((PIXELS + index, more) for index, more in enumerate(numbers)))
    volume = read_volume(folder)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(folder))
    assert np.array_equal(volume[0], sitk.GetArrayFromImage(reader.Execute()).T)
    assert volume.meta[CHANGES].startswith("slices that differ in (0020,0012) AcquisitionNumber")


@pytest.mark.parametrize(
    ("tag", "kind", "values"),
    [
        ((0x0008, 0x0008), "CS", ("ORIGINAL\\PRIMARY\\WATER", "ORIGINAL\\PRIMARY\\FAT")),
        ((0x0018, 0x0081), "DS", ("10", "90")),
        ((0x0018, 0x0060), "DS", ("80", "140")),
        ((0x0018, 0x1210), "SH", ("B30f", "B70f")),
    ],
)
def test_slices_of_two_contrasts_in_one_series_are_told(
    tmp_path: Path, tag: Any, kind: str, values: tuple[str, str]
) -> None:
    """What is left of two volumes in a folder may fit together as one."""
    slices = [(PIXELS, {tag: (kind, values[index % 2])}) for index in range(4)]
    volume = read_volume(series(tmp_path / "s", *slices))
    assert "slices that differ in" in volume.meta[CHANGES]


def test_a_single_slice_is_as_thick_as_it_says(tmp_path: Path) -> None:
    folder = series(tmp_path / "s", (PIXELS, {THICKNESS: ("DS", "2.5")}))
    volume = read_volume(folder)
    assert volume.shape == (1, 4, 3, 1)
    assert np.allclose(volume.affine, np.diag([-1, -1, 2.5, 1]))
    for number, element in enumerate((None, ("DS", "0"), ("DS", "-3"))):
        folder = series(tmp_path / f"t{number}", (PIXELS, {THICKNESS: element}))
        with pytest.raises(InputError, match=r"has no \(0018,0050\) SliceThickness"):
            read_volume(folder)


@pytest.mark.parametrize("spacing", ["0\\0", "-1\\1", "1\\0"])
def test_a_spacing_that_is_no_length_is_refused_by_its_tag(tmp_path: Path, spacing: str) -> None:
    """-1 was called a tilted gantry, 0 an affine that cannot be inverted."""
    folder = series(tmp_path / "s", *[(PIXELS, {SPACING: ("DS", spacing)})] * 2)
    with pytest.raises(InputError, match=r"no \(0028,0030\) PixelSpacing but \["):
        read_volume(folder)


def test_directions_that_are_none_are_shown_as_numbers(tmp_path: Path) -> None:
    folder = series(tmp_path / "s", (PIXELS, {ORIENTATION: ("DS", "2\\0\\0\\0\\2\\0")}))
    with pytest.raises(
        InputError,
        match=r"ImageOrientationPatient of .* is \[2\. 0\. 0\. 0\. 2\. 0\.\];",
    ):
        read_volume(folder)


@pytest.mark.parametrize("modality", ["CT", "MR"])
@pytest.mark.parametrize("lacking", [(), (1,), (0, 1)])
def test_values_without_a_slope_are_said(
    tmp_path: Path, modality: str, lacking: tuple[int, ...]
) -> None:
    """Among others, and of a modality whose slices have one: they are 1,024 units off where it was lost."""
    kind = {(0x0008, 0x0060): ("CS", modality)}
    slices = [(PIXELS, {} if n in lacking else scaled("1", "-1024")) for n in range(2)]
    volume = read_volume(series(tmp_path / "s", *((p, {**kind, **more}) for p, more in slices)))
    said = bool(lacking) and (len(lacking) == 1 or modality == "CT")
    line = "values without (0028,1053) RescaleSlope are read as stored; "
    assert volume.meta[CHANGES] == line * said
    assert volume[0, 0, 0].tolist() == [0 if n in lacking else -1024 for n in range(2)]


def test_a_file_with_fewer_pixels_than_it_says_is_refused(tmp_path: Path) -> None:
    """What stood in memory was read for the rest."""
    frames = {(0x0028, 0x0008): ("IS", "2"), (0x5200, 0x9230): ("SQ", [
        {(0x0020, 0x9113): ("SQ", [{POSITION: ("DS", f"0\\0\\{z}")}])} for z in range(2)
    ])}  # fmt: skip
    folder = series(tmp_path / "s", (PIXELS, frames))
    with pytest.raises(InputError, match=r"its \(7FE0,0010\) PixelData is cut off"):
        read_volume(folder)


def test_a_mosaic_is_no_slice(tmp_path: Path) -> None:
    """Siemens: all slices as tiles of one picture; it was read as a volume one slice thick (dcm2niix 364)."""
    kind = {(0x0008, 0x0008): ("CS", "ORIGINAL\\PRIMARY\\M\\ND\\MOSAIC")}
    folder = series(tmp_path / "s", (PIXELS, kind))
    with pytest.raises(InputError, match=r"many slices in one picture by \(0008,0008\) ImageType"):
        read_volume(folder)


def test_colours_are_shares_of_the_bits_that_are_stored(tmp_path: Path) -> None:
    """12 of 16 bits: they were nearly black."""
    colours = np.random.default_rng(0).integers(0, 4096, (5, 6, 3)).astype(np.uint16)
    more = {(0x0028, 0x0002): ("US", [3]), KIND: ("CS", "RGB"), (0x0028, 0x0006): ("US", [0]),
            (0x0028, 0x0010): ("US", [5]), (0x0028, 0x0011): ("US", [6]),
            (0x0028, 0x0101): ("US", [12]), (0x0028, 0x0102): ("US", [11])}  # fmt: skip
    picture = read_picture(write(tmp_path / "x.dcm", slice_of(colours, 0, more)))
    assert np.array_equal(picture, np.rint(colours / 4095 * 255))


@pytest.mark.parametrize("tag", ["RGB", "YBR_FULL", "YBR_FULL_422"])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_colours_of_a_jpeg_are_what_the_jpeg_says(
    tmp_path: Path, tag: str, subsampling: int
) -> None:
    """One tagged RGB that has YCbCr, as scanners of slides and ultrasound write, was red for blue."""
    colours = np.zeros((32, 32, 3), np.uint8)
    colours[:, :16] = 200, 30, 40
    colours[:, 16:] = 20, 160, 220
    jpeg = io.BytesIO()
    Image.fromarray(colours).save(jpeg, "JPEG", quality=95, subsampling=subsampling)
    more = {(0x0028, 0x0002): ("US", [3]), KIND: ("CS", tag), (0x0028, 0x0006): ("US", [0]),
            (0x0028, 0x0010): ("US", [32]), (0x0028, 0x0011): ("US", [32])}  # fmt: skip
    path = write(tmp_path / "x.dcm", slice_of(colours, 0, more))
    dataset = pydicom.dcmread(path)
    dataset.file_meta.TransferSyntaxUID = pydicom.uid.JPEGBaseline8Bit
    dataset.PixelData = encapsulate([jpeg.getvalue()])
    dataset["PixelData"].VR = "OB"
    dataset["PixelData"].is_undefined_length = True
    dataset.save_as(path)
    with Image.open(jpeg) as picture:
        assert np.array_equal(read_picture(path), np.array(picture))


@pytest.mark.parametrize("table", [MODALITY_LUT, VOI_LUT])
def test_tables_that_are_not_whole_are_refused_by_their_tag(tmp_path: Path, table: Any) -> None:
    """Half of the entries of 16 bits were read as twice as many of 8."""
    whole = np.arange(12, dtype="<u2").tobytes()
    for number, (item, told) in enumerate((
        ({(0x0028, 0x3002): ("US", [12, 0, 16]), (0x0028, 0x3006): ("OW", whole[:12])},
         r"its \(0028,3006\) LUTData has 6 of 12 entries"),
        ({(0x0028, 0x3003): ("LO", "x")}, r"table without \(0028,3002\) LUTDescriptor or \(0028,3006\)"),
    )):  # fmt: skip
        file = write(tmp_path / f"{number}.dcm", slice_of(PIXELS, 0, {table: ("SQ", [item])}))
        with pytest.raises(InputError, match=told):
            read_pixels(file)


def test_a_mask_of_bits_is_read_as_zero_and_one(tmp_path: Path) -> None:
    mask = np.random.default_rng(2).integers(0, 2, (2, 8, 16))
    for index, plane in enumerate(mask):
        packed = np.packbits(plane.ravel(), bitorder="little")
        more = {
            (0x0028, 0x0100): ("US", [1]),
            (0x0028, 0x0101): ("US", [1]),
            (0x0028, 0x0102): ("US", [0]),
        }
        elements = {
            **slice_of(plane.astype(np.uint8), index, more),
            (0x7FE0, 0x0010): ("OB", packed.tobytes()),
        }
        write(tmp_path / "mask" / f"{index}.dcm", elements)
    pixels = np.random.default_rng(3).integers(0, 99, (2, 8, 16)).astype(np.uint16)
    image = series(tmp_path / "image", *((plane, {}) for plane in pixels))
    _, labels = read_pair(image, str(tmp_path / "mask"), 2)
    assert np.array_equal(labels[0].numpy(), mask.transpose(2, 1, 0))


@pytest.mark.parametrize("syntax", [EXPLICIT, BIG_ENDIAN])
def test_bits_that_fill_no_byte_and_numbers_of_32_bits_are_as_pydicom_reads_them(
    tmp_path: Path, syntax: str
) -> None:
    """GDCM lost the bits in the last byte, and changed the order of bytes in the numbers of a big-endian dose."""
    bits = np.random.default_rng(2).integers(0, 2, (3, 5, 3)).astype(np.uint8)
    bits[-1, -1] = 1
    numbers = np.arange(12, dtype=np.uint32).reshape(3, 4) * 70000
    groups = [
        {(0x0020, 0x9113): ("SQ", [{POSITION: ("DS", f"0\\0\\{place}")}])} for place in range(3)
    ]
    frames = {
        (0x0028, 0x0008): ("IS", "3"), POSITION: None, (0x5200, 0x9230): ("SQ", groups),
        (0x0028, 0x0100): ("US", [1]), (0x0028, 0x0101): ("US", [1]), (0x0028, 0x0102): ("US", [0]),
        (0x7FE0, 0x0010): ("OB", np.packbits(bits.ravel(), bitorder="little").tobytes()),
    }  # fmt: skip
    # a label map, whose class GDCM does not know
    labels = {(0x0008, 0x0016): ("UI", "1.2.840.10008.5.1.4.1.1.66.7")}
    for name, stored, more in (("bits", bits, {**frames, **labels}), ("dose", numbers, {})):
        file = write(tmp_path / name / "x.dcm", slice_of(stored, 0, more), syntax)
        expected = pydicom.dcmread(file).pixel_array.reshape(-1, *stored.shape[-2:])
        assert np.array_equal(expected.squeeze(), stored)
        read = read_volume(str(tmp_path / name))
        assert np.array_equal(read[0].numpy(), expected.transpose(2, 1, 0))


def test_a_label_map_of_a_class_that_gdcm_does_not_know_is_read(tmp_path: Path) -> None:
    """It said "Cannot read requested file"."""
    file = write(tmp_path / "s" / "x.dcm", slice_of(PIXELS))
    data = pydicom.dcmread(file)
    data.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.66.7"
    data.save_as(file)
    assert np.array_equal(read_volume(str(tmp_path / "s"))[0, ..., 0].numpy(), PIXELS.T)


def test_colours_of_16_bits_in_rle_are_as_pydicom_reads_them(tmp_path: Path) -> None:
    """GDCM took bytes of the channels for each other."""
    colours = np.random.default_rng(1).integers(0, 2**16, (8, 9, 3)).astype(np.uint16)
    more = {KIND: ("CS", "RGB"), (0x0028, 0x0002): ("US", [3]), (0x0028, 0x0006): ("US", [0])}
    sides = {(0x0028, 0x0010): ("US", [8]), (0x0028, 0x0011): ("US", [9])}
    file = write(tmp_path / "x.dcm", slice_of(colours, 0, {**more, **sides}))
    data = pydicom.dcmread(file)
    data.compress(pydicom.uid.RLELossless)
    data.save_as(file)
    assert np.array_equal(read_picture(file), np.rint(colours / 65535 * 255).astype(np.uint8))


@pytest.mark.parametrize("first", [0, 5])
def test_a_palette_may_begin_at_any_index(tmp_path: Path, first: int) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (3, 10), np.uint16) * 257
    indices = np.arange(12, dtype=np.uint8).reshape(3, 4) % 10
    tags: dict[Any, Any] = {(0x0028, 0x0004): ("CS", "PALETTE COLOR")}
    for channel in range(3):
        tags[0x0028, 0x1101 + channel] = ("US", [10, first, 16])
        tags[0x0028, 0x1201 + channel] = ("OW", colours[channel])
    path = write(tmp_path / "x.dcm", slice_of(indices + np.uint8(first), 0, tags))
    assert np.array_equal(read_picture(path), colours.T[indices] // 257)


def test_colours_and_packed_headers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"colours by \(0028,0004\) PhotometricInterpretation"):
        read_volume(series(tmp_path / "s", (PIXELS, {KIND: ("CS", "PALETTE COLOR")})))
    file = write(tmp_path / "x.dcm", slice_of(PIXELS), "1.2.840.10008.1.2.1.99")
    with pytest.raises(
        InputError,
        match=r"x\.dcm cannot be read \(its header is packed by \(0002,0010\)",
    ):
        read_picture(file)


ODD: dict[str, tuple[dict[Any, Any], str]] = {
    "bits beside the lowest": (
        {(0x0028, 0x0101): ("US", [12]), (0x0028, 0x0102): ("US", [15])},
        r"\(0028,0102\) HighBit is not \(0028,0101\) BitsStored less one",
    ),
    "numbers of floating point": (
        {(0x7FE0, 0x0010): None, (0x7FE0, 0x0008): ("OW", PIXELS.astype("<f4"))},
        r"it has no \(7FE0,0010\) PixelData",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_pixels_that_are_stored_in_another_way_are_refused_by_the_tag(
    tmp_path: Path, name: str
) -> None:
    """GDCM and pydicom take the lowest bits whatever HighBit says."""
    more, message = ODD[name]
    file = write(tmp_path / "s" / "x.dcm", slice_of(PIXELS, 0, more))
    for read in (lambda: read_volume(str(tmp_path / "s")), lambda: read_pixels(file)):
        with pytest.raises(InputError, match=message):
            read()


@pytest.mark.parametrize("more", [{}, {(0x3004, 0x000C): ("DS", "0\\3\\6\\9")}])
def test_frames_without_a_place_are_refused_by_the_tag(tmp_path: Path, more: Any) -> None:
    """Cine, nuclear medicine and doses: one position for all frames."""
    frames = np.arange(48, dtype=np.uint16).reshape(4, 3, 4)
    write(tmp_path / "s" / "x.dcm", slice_of(frames, 0, {(0x0028, 0x0008): ("IS", "4"), **more}))
    told = r"has several frames and no \(5200,9230\) PerFrameFunctionalGroupsSequence"
    with pytest.raises(InputError, match=told):
        read_volume(str(tmp_path / "s"))


HOSTILE: dict[str, tuple[dict[Any, Any], str]] = {
    "no rows": ({(0x0028, 0x0010): ("US", [0])}, "ends before its .* Rows"),
    "frames without end": ({(0x0028, 0x0008): ("IS", "999999999")}, "more than 65536 frames"),
    "fewer than no frames": ({(0x0028, 0x0008): ("IS", "-1")}, "holds no|cannot be read"),
    "an empty table": ({VOI_LUT: ("SQ", [{CENTRE: ("DS", "1")}]), MODALITY_LUT: ("SQ", [{}])}, "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_lies_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    more, message = HOSTILE[name]
    file = write(tmp_path / "s" / "x.dcm", slice_of(PIXELS, 0, more))
    for read in (lambda: read_volume(str(tmp_path / "s")), lambda: read_pixels(file)):
        with pytest.raises(InputError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value)


def test_a_header_that_is_cut_anywhere_is_refused_in_one_line(tmp_path: Path) -> None:
    file = Path(write(tmp_path / "s" / "x.dcm", slice_of(PIXELS, 0, {VOI_LUT: lut(0, [1, 2, 3])})))
    content = file.read_bytes()
    for end in range(133, len(content) - PIXELS.nbytes, 7):
        file.write_bytes(content[:end])
        with pytest.raises(InputError, match=r"x\.dcm|holds no DICOM series"):
            read_volume(str(tmp_path / "s"))


DEEP = {
    "before the pixels": (VOI_LUT, True), "of no known kind": ((0x0029, 0x1010), True),
    "after the pixels": ((0xFFFC, 0x0001), True), "without an end": (VOI_LUT, False),
    "after the pixels, without an end": ((0xFFFC, 0x0001), False),
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
def test_what_would_crash_simpleitk_never_reaches_it(tmp_path: Path, name: str) -> None:
    """Twenty thousand sequences in each other: a series is read without them or refused, a place is refused."""
    tag, ends = DEEP[name]
    file = write(tmp_path / "s" / "x.dcm", slice_of(PIXELS, 0, {tag: ("SQ", b"")}))
    lengths = [
        (20 * level + 8, 20 * level) if ends else (2**32 - 1, 2**32 - 1) for level in range(20_000)
    ]
    deep = b"".join(
        struct.pack("<HH2sHIHHI", *tag, b"SQ", 0, sequence, 0xFFFE, 0xE000, item)
        for sequence, item in reversed(lengths)
    )
    content = Path(file).read_bytes()
    assert content.count(empty := struct.pack("<HH2sHI", *tag, b"SQ", 0, 0)) == 1
    Path(file).write_bytes(content.replace(empty, deep))
    if ends:
        assert np.array_equal(read_volume(str(tmp_path / "s"))[0, ..., 0].numpy(), PIXELS.T)
    else:
        with pytest.raises(InputError, match=r"x\.dcm cannot be read \("):
            read_volume(str(tmp_path / "s"))
    with pytest.raises(InputError, match=r"x\.dcm cannot be read \(") as caught:
        picture_affine(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("first", [b"UL", b"ZZ"])
def test_a_packed_header_is_refused_before_it_is_unpacked(tmp_path: Path, first: bytes) -> None:
    """Many zeros in few bytes; with a first element of no known kind pydicom reads the elements in another way."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = b"".join(packer.compress(bytes(2**20)) for _ in range(64)) + packer.flush()
    syntax = b"1.2.840.10008.1.2.1.99"
    if first == b"UL":
        meta = (
            struct.pack("<HH2sHI", 2, 0, b"UL", 4, 30)
            + struct.pack("<HH2sH", 2, 0x10, b"UI", 22)
            + syntax
        )
    else:
        length = int.from_bytes(first + b"\0\0", "little")
        meta = (
            struct.pack("<HH2sH", 2, 1, first, 0)
            + bytes(length)
            + struct.pack("<HHI", 2, 0x10, 22)
            + syntax
        )
    (tmp_path / "x.dcm").write_bytes(bytes(128) + b"DICM" + meta + packed)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"x\.dcm cannot be read \("):
            read_picture(str(tmp_path / "x.dcm"))
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_a_copy_of_a_slice_is_called_one(tmp_path: Path) -> None:
    folder = series(tmp_path / "s", *((PIXELS, {}) for _ in range(3)))
    (tmp_path / "s" / "copy.dcm").write_bytes((tmp_path / "s" / "8.dcm").read_bytes())
    told = r"files \S+/8\.dcm and \S+/copy\.dcm are copies: .* SOPInstanceUID 1\.2\.3\.1001; .*; remove one"
    with pytest.raises(InputError, match=told):
        read_volume(folder)


def test_folders_in_the_folder_of_a_series_are_named(tmp_path: Path) -> None:
    series(tmp_path / "s" / "below", (PIXELS, {}))
    (tmp_path / "s" / "notes.txt").write_text("none")
    with pytest.raises(InputError, match="no DICOM series in its 1 files, and 1 folders, which"):
        read_volume(str(tmp_path / "s"))


def frames_with(folder: Path, attributes: Sequence[Any], group: tuple[int, int]) -> str:
    """Write a file of a frame a mm, each with elements in a functional group."""
    groups = []
    for place, elements in enumerate(attributes):
        position = {POSITION: ("DS", f"0\\0\\{place}")}
        groups.append({(0x0020, 0x9113): ("SQ", [position]), group: ("SQ", [elements])})

    more = {(0x0028, 0x0008): ("IS", str(len(groups))), POSITION: None}
    pixels = np.stack([PIXELS % 2] * len(groups))
    write(folder / "x.dcm", slice_of(pixels, 0, {**more, (0x5200, 0x9230): ("SQ", groups)}))
    return str(folder)


@pytest.mark.parametrize(
    ("group", "tag", "kind", "values", "told"),
    [
        ((0x0062, 0x000A), (0x0062, 0x000B), "US", ([1], [2]), r"\(0062,000B\) ReferencedSegmentNumber is 1 .* 2"),
        ((0x0018, 0x9226), (0x0008, 0x9208), "CS", ("MAGNITUDE", "PHASE"), "ComplexImageComponent is MAGNITUDE"),
    ],
)  # fmt: skip
def test_frames_of_two_structures_or_components_are_no_volume(
    tmp_path: Path,
    group: tuple[int, int],
    tag: tuple[int, int],
    kind: str,
    values: tuple[Any, Any],
    told: str,
) -> None:
    """One behind the other they had one value, or one meaning."""
    elements = [{tag: (kind, values[place // 2])} for place in range(4)]
    with pytest.raises(InputError, match=told):
        read_volume(frames_with(tmp_path / "s", elements, group))

    assert read_volume(frames_with(tmp_path / "t", elements[:2], group)).shape == (1, 4, 3, 2)


def test_frames_of_two_b_values_or_stacks_are_said(tmp_path: Path) -> None:
    b_values = [{(0x0018, 0x9087): ("FD", struct.pack("<d", b))} for b in (0, 0, 1000, 1000)]
    volume = read_volume(frames_with(tmp_path / "b", b_values, (0x0018, 0x9117)))
    assert "differ in (0018,9087) DiffusionBValue are read as one" in volume.meta[CHANGES]
    stacks = [{(0x0020, 0x9056): ("SH", name)} for name in "1122"]
    volume = read_volume(frames_with(tmp_path / "s", stacks, (0x0020, 0x9111)))
    assert "differ in (0020,9056) StackID" in volume.meta[CHANGES]


@pytest.mark.parametrize("end", [0, 160, 220, -30])
def test_a_slice_whose_file_is_empty_or_cut_in_its_header_is_not_passed_over(
    tmp_path: Path, end: int
) -> None:
    """The last one was missing in the volume, without a word."""
    folder = series(tmp_path / "s", *((PIXELS, {}) for _ in range(3)))
    file = tmp_path / "s" / "7.dcm"
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(InputError, match=r"7\.dcm"):
        read_volume(folder)


def test_dicom_files_that_are_no_images_are_no_series(tmp_path: Path) -> None:
    structures = {
        (0x0008, 0x0016): ("UI", "1.2.840.10008.5.1.4.1.1.481.3"),
        (0x0008, 0x0060): ("CS", "RTSTRUCT"),
    }
    write(tmp_path / "m" / "x.dcm", structures)
    with pytest.raises(InputError, match="no DICOM series in its 1 files; .* which RTSTRUCT"):
        read_volume(str(tmp_path / "m"))

    folder = series(tmp_path / "s", (PIXELS, {}))
    write(tmp_path / "s" / "x.dcm", structures)
    assert read_volume(folder).shape == (1, 4, 3, 1)


def test_segments_are_said_by_name_and_fractions_are_no_mask(tmp_path: Path) -> None:
    """Of one file the liver is 1, of another the tumour: the number says nothing of which."""
    segments = [
        {(0x0062, 0x0004): ("US", [number]), (0x0062, 0x0005): ("LO", label)}
        for number, label in enumerate(("liver", "tumour; left"), 1)
    ]
    kind, names = (0x0062, 0x0001), (0x0062, 0x0002)
    of_one = {(0x0062, 0x000A): ("SQ", [{(0x0062, 0x000B): ("US", [2])}])}
    groups = {
        (0x5200, 0x9230): (
            "SQ",
            [{(0x0020, 0x9113): ("SQ", [{POSITION: ("DS", "0\\0\\0")}]), **of_one}],
        )
    }
    for name, more, told in (
        ("one", {(0x0028, 0x0008): ("IS", "1"), **groups}, "its header calls 1 'tumour, left'"),
        ("map", {}, "its header calls 1 'liver', 2 'tumour, left'"),
    ):
        file = slice_of(PIXELS % 2, 0, {kind: ("CS", "BINARY"), names: ("SQ", segments), **more})
        write(tmp_path / name / "x.dcm", file)
        assert read_volume(str(tmp_path / name)).meta[CHANGES].partition("; ")[0] == told

    write(tmp_path / "f" / "x.dcm", slice_of(PIXELS, 0, {kind: ("CS", "FRACTIONAL")}))
    with pytest.raises(InputError, match=r"fractions by \(0062,0001\) SegmentationType"):
        read_volume(str(tmp_path / "f"))
