"""Volumes with masks: where their voxels lie, every form that is read, everything that is refused in one line."""

from __future__ import annotations

import gzip
import locale
import pickle
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from monai.data import Dataset, MetaTensor
from monai.transforms import Compose, LoadImage

from medfl.core.errors import InputError
from medfl.data.prepare import prepare
from medfl.data.source import take_apart
from medfl.datasets import CheckPatchd, ReadVolumed
from medfl.datasets.readers import reading, stacks
from medfl.datasets.readers.dicom import own_locale
from medfl.datasets.readers.reading import content_key
from medfl.datasets.readers.volumes import (
    count_voxels,
    read_pair,
    read_volume,
    volume_files,
    volume_index,
)

SHAPE = (9, 12, 10)
IMAGE = np.random.default_rng(0).integers(0, 1000, SHAPE).astype(np.int16)
MASK = (IMAGE > 700).astype(np.uint8) + (IMAGE > 900)
TURN = 0.3
AFFINE = np.array(
    [
        [-1.5 * np.cos(TURN), 2 * np.sin(TURN), 0, 10],
        [-1.5 * np.sin(TURN), -2 * np.cos(TURN), 0, -20],
        [0, 0, 3, 30],
        [0, 0, 0, 1],
    ]
)
FORMS = ("a.nii", "a.nii.gz", "z.zip!in/a.nii", "z.zip!in/a.nii.gz", "dicom")


def save(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE) -> str:
    nib.save(nib.Nifti1Image(voxels, affine), path)
    return str(path)


@own_locale()
def save_dicom(
    folder: Path,
    voxels: np.ndarray,
    uid: str = "1.2.826.0.1.1",
    name: str = "T1",
    skip: Sequence[int] = (),
    step: Sequence[float] = (0, 0, 1),
) -> str:
    """Write one file for each slice, as a scanner does, of the volume that lies where AFFINE has it.

    `step` leads from a slice to the next, in voxels.
    """
    folder.mkdir(exist_ok=True)
    lps = np.diag((-1, -1, 1, 1)) @ AFFINE
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    right, down = (lps[:3, axis] / spacing[axis] for axis in (0, 1))
    writer = sitk.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    for index in set(range(voxels.shape[2])) - set(skip):
        picture = sitk.GetImageFromArray(
            np.ascontiguousarray(voxels[:, :, index].T).astype(np.int16)
        )
        picture.SetSpacing(spacing[:2].tolist())
        tags = {
            "0008|0060": "MR",
            "0008|103e": name,
            "0020|000d": "1.2.826.0.2",
            "0020|000e": uid,
            "0020|0013": str(index),
            "0020|0032": "\\".join(f"{v:.9g}" for v in lps[:3] @ (*(index * np.array(step)), 1)),
            "0020|0037": "\\".join(f"{v:.9g}" for v in (*right, *down)),
            "0018|0050": f"{spacing[2]:g}",
        }
        for tag, value in tags.items():
            picture.SetMetaData(tag, value)
        # The names run against the position: the order must come from inside the files.
        writer.SetFileName(str(folder / f"{uid[-1]}-{99 - index:02d}.dcm"))
        writer.Execute(picture)
    return str(folder)


@pytest.fixture
def forms(tmp_path: Path) -> Path:
    """A folder with the same volume in every form."""
    files = [Path(save(tmp_path / name, IMAGE)) for name in FORMS[:2]]
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as file:
        for path in files:
            file.write(path, f"in/{path.name}")
        file.writestr("in/._a.nii", "junk")
        file.writestr("__MACOSX/in/a.nii", "junk")
    save_dicom(tmp_path / "dicom", IMAGE)
    return tmp_path


# What is read


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_volume_in_the_same_place(forms: Path, form: str) -> None:
    """Voxels and affine are those that MONAI reads of the NIfTI file, of a tilted, anisotropic volume."""
    volume, expected = read_volume(f"{forms}/{form}"), LoadImage()(forms / "a.nii")
    assert isinstance(volume, MetaTensor)
    assert (volume.shape, volume.dtype) == ((1, *SHAPE), torch.float32)
    assert torch.equal(volume[0].as_tensor(), expected.as_tensor())
    assert np.allclose(volume.affine, expected.affine, atol=1e-5)
    assert np.allclose(volume.affine, AFFINE, atol=1e-5)
    assert np.allclose(volume.meta["original_affine"], AFFINE, atol=1e-5)
    assert volume.meta["spatial_shape"].tolist() == list(SHAPE)
    assert volume.meta["filename_or_obj"] == f"{forms}/{form}"
    assert volume.meta["space"] == expected.meta["space"]
    assert count_voxels(f"{forms}/{form}") == IMAGE.size


def test_reading_dicom_leaves_the_locale_as_it_was(forms: Path) -> None:
    """Else every text file with a letter outside ASCII, opened later without naming its encoding, could not be read."""
    before = locale.setlocale(locale.LC_ALL, "C.UTF-8")
    try:
        read_volume(str(forms / "dicom"))
        count_voxels(str(forms / "dicom"))
        assert locale.getpreferredencoding(False) == "UTF-8"
        with pytest.raises(InputError):
            read_volume(str(forms))
        assert locale.getpreferredencoding(False) == "UTF-8"
    finally:
        locale.setlocale(locale.LC_ALL, before)


def test_a_checksum_knows_the_files_of_a_series(forms: Path) -> None:
    before = content_key(f"{forms}/dicom")
    assert len(before.split(",")) == SHAPE[2]
    next((forms / "dicom").iterdir()).unlink()
    assert content_key(f"{forms}/dicom") != before


def test_a_pair_has_one_affine_and_class_indices(tmp_path: Path, forms: Path) -> None:
    mask = save(tmp_path / "m.nii.gz", MASK.astype(np.float32), AFFINE + 5e-4)
    for form in FORMS:
        image, labels = read_pair(f"{forms}/{form}", mask, 3)
        assert (labels.dtype, labels.shape) == (torch.uint8, image.shape)
        assert np.array_equal(labels[0].numpy(), MASK)
        assert torch.equal(image.affine, labels.affine)
        assert labels.meta["filename_or_obj"] == mask
    assert np.array_equal(
        read_pair(mask, save_dicom(tmp_path / "labels", MASK), 3)[1][0].numpy(), MASK
    )


@pytest.mark.parametrize("inside", ["", "z.zip!"])
@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize(("stored", "called"), [("a.nii.gz", "b.nii"), ("a.nii", "b.nii.gz")])
def test_a_file_packed_or_unpacked_under_its_old_name_is_read(
    tmp_path: Path, stored: str, called: str, kind: Any, inside: str
) -> None:
    nib.save(kind(IMAGE, AFFINE), tmp_path / stored)
    (tmp_path / stored).rename(tmp_path / called)
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.write(tmp_path / called, called)

    uri = f"{tmp_path}/{inside}{called}"
    assert np.array_equal(read_volume(uri)[0].numpy(), IMAGE.astype(np.float32))
    assert count_voxels(uri) == IMAGE.size


def _flipped(packed: bytes) -> bytes:
    middle = len(packed) // 2
    return packed[:middle] + bytes([packed[middle] ^ 0xFF]) + packed[middle + 1 :]


@pytest.mark.parametrize("name", ["damaged.nii.gz", "damaged.nii"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_flipped, "invalid|CRC check failed"),
        (lambda packed: packed[:-5] + bytes(5), "CRC check failed|Incorrect length"),
        (lambda packed: packed[:-5], "ended before"),
        (lambda packed: packed[: len(packed) // 2], "ended before"),
        (lambda packed: packed[:20], "ended before"),
        (gzip.compress, "no NIfTI file"),
        (lambda packed: packed + b"more", "Not a gzipped file"),
    ],
    ids=["bits", "sum", "without its sum", "half", "start", "packed twice", "more behind it"],
)
def test_a_damaged_packed_file_is_refused_as_python_unpacks_it(
    damage: Callable[[bytes], bytes], reason: str, name: str, tmp_path: Path
) -> None:
    """Python's gzip compares the sum at the end of the file, up to which nibabel does not read."""
    voxels = np.random.default_rng(0).integers(0, 1000, (8, 9, 10)).astype(np.int16)
    packed = gzip.compress(nib.Nifti1Image(voxels, AFFINE).to_bytes())
    path = tmp_path / name
    path.write_bytes(packed)
    assert np.array_equal(read_volume(str(path))[0].numpy(), voxels)

    path.write_bytes(damage(packed))
    with pytest.raises(InputError, match=reason):
        read_volume(str(path))


@pytest.mark.parametrize(("kind", "field"), [(nib.Nifti1Image, 108), (nib.Nifti2Image, 168)])
def test_voxels_that_begin_within_the_header_are_refused(
    kind: Any, field: int, tmp_path: Path
) -> None:
    """With `vox_offset` 0 nibabel takes the header for voxels, and ITK what follows it: they do not agree."""
    content = bytearray(kind(np.arange(720, dtype=np.int16).reshape(8, 9, 10), AFFINE).to_bytes())
    content[field : field + (4 if field == 108 else 8)] = bytes(4 if field == 108 else 8)
    path = tmp_path / "x.nii"
    path.write_bytes(content)
    with pytest.raises(InputError, match="vox_offset"):
        read_volume(str(path))


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.png", "a.tif"])
def test_a_page_or_pointer_in_the_place_of_an_image_is_shown(tmp_path: Path, name: str) -> None:
    read = read_volume if ".nii" in name else reading.read_pixels
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(InputError, match="it begins 'version https://git-lfs"):
        read(str(tmp_path / name))

    (tmp_path / name).write_bytes(b"\0\1\2\3")
    with pytest.raises(InputError, match="it begins with the bytes 00 01 02 03"):
        read(str(tmp_path / name))


def test_trailing_axes_of_length_one_are_dropped_and_values_scaled(tmp_path: Path) -> None:
    image = nib.Nifti1Image(IMAGE[..., None, None], AFFINE)
    image.header.set_slope_inter(0.5, 10)
    nib.save(image, tmp_path / "a.nii")
    volume = read_volume(str(tmp_path / "a.nii"))
    assert torch.equal(
        volume[0].as_tensor(), LoadImage()(tmp_path / "a.nii")[..., 0, 0].as_tensor()
    )
    assert volume.max() == IMAGE.max() * 0.5 + 10
    assert count_voxels(str(tmp_path / "a.nii")) == IMAGE.size


def test_an_empty_mask_is_allowed(tmp_path: Path, forms: Path) -> None:
    assert not read_pair(f"{forms}/a.nii", save(tmp_path / "m.nii", MASK * 0), 2)[1].any()


def test_files_are_found_but_for_hidden_ones(forms: Path) -> None:
    (forms / "._a.nii").write_text("junk")
    (forms / "notes.txt").write_text("junk")
    (forms / "deep").mkdir()
    save(forms / "deep" / "b.nii", IMAGE)
    assert [name for name, _ in volume_files(forms)] == ["a.nii", "a.nii.gz", "deep/b.nii"]
    assert [name for name, _ in volume_files(forms / "z.zip")] == ["in/a.nii", "in/a.nii.gz"]
    assert volume_index(forms) == {"a": f"{forms}/a.nii.gz", "dicom": f"{forms}/dicom"}


# What is refused


def stored(
    voxels: np.ndarray, name: str = "x.nii.gz", affine: np.ndarray = AFFINE
) -> Callable[[Path], str]:
    return lambda folder: save(folder / name, voxels, affine)


def content(value: bytes, name: str = "x.nii.gz") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).write_bytes(value)
        return str(folder / name)

    return write


def cut(name: str, share: float) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        path = Path(save(folder / name, IMAGE))
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        return str(path)

    return write


def flat(folder: Path) -> str:
    image = nib.Nifti1Image(IMAGE, None)
    image.header.set_sform(AFFINE * (1, 1, 0, 1), code=1)
    nib.save(nib.Nifti1Image(IMAGE, None, image.header), folder / "x.nii")
    return str(folder / "x.nii")


def two_series(folder: Path) -> str:
    save_dicom(folder / "d", IMAGE, "1.2.826.0.1.7", "T1 sagittal")
    return save_dicom(folder / "d", IMAGE, "1.2.826.0.1.8", "T2", skip=(9,))


def no_series(folder: Path) -> str:
    (folder / "d").mkdir()
    (folder / "d" / "readme.txt").write_text("no image")
    return str(folder / "d")


def damaged_series(folder: Path) -> str:
    made = Path(save_dicom(folder / "d", IMAGE))
    slice_ = sorted(made.iterdir())[4]
    slice_.write_bytes(slice_.read_bytes()[:-40])
    return str(made)


def frames(folder: Path) -> str:
    """Frames without places: SimpleITK gives those of CT and MR."""
    (folder / "d").mkdir()
    picture = sitk.GetImageFromArray(IMAGE)
    picture.SetMetaData("0008|0060", "US")
    with own_locale():
        sitk.WriteImage(picture, str(folder / "d" / "m.dcm"))
    return str(folder / "d")


def with_values(*values: float) -> np.ndarray:
    image = IMAGE.astype(np.float32)
    image.flat[5 : 5 + len(values)] = values
    return image


REFUSED = {
    "a series in time": (
        stored(np.stack([IMAGE] * 33, -1)),
        r"x\.nii\.gz has the shape 9 x 12 x 10 x 33; .* a fourth of up to 32 channels",
    ),
    "5D": (
        stored(np.zeros((9, 12, 10, 2, 2), np.int16)),
        r"x\.nii\.gz has the shape 9 x 12 x 10 x 2 x 2; three axes",
    ),
    "1D": (stored(IMAGE[:, 0, 0]), r"x\.nii\.gz has the shape 9; three axes"),
    "a line": (stored(IMAGE[:, :1, :1]), r"has the shape 9 x 1 x 1; .* at least 2 voxels"),
    "NaN": (
        stored(with_values(np.nan, np.inf)),
        r"x\.nii\.gz has NaN or infinite values at 2 of 1080 voxels",
    ),
    "too large": (
        stored(IMAGE * 1e300),
        r"x\.nii\.gz has the value \S+e\+30\d at \d+ of 1080 voxels, beyond float32",
    ),
    "zero": (stored(IMAGE * 0), r"x\.nii\.gz has the value 0 at every voxel"),
    "constant": (
        stored(IMAGE * 0 + np.float32(2.5)),
        r"x\.nii\.gz has the value 2\.5 at every voxel",
    ),
    "complex": (stored(IMAGE * 1j), r"x\.nii\.gz holds complex128 values; one real number a voxel"),
    "flat affine": (
        flat,
        r"x\.nii has the affine \[-1\.433 .* \| 0 0 0 30\]; an affine can be inverted",
    ),
    "cut gz": (cut("x.nii.gz", 0.5), r"x\.nii\.gz cannot be read \(Compressed file ended"),
    "cut": (cut("x.nii", 0.5), r"x\.nii cannot be read \(Expected 2160 bytes, got \d+"),
    "cut header": (cut("x.nii", 0.05), r"x\.nii cannot be read"),
    "text": (
        content(b"hello"),
        r"x\.nii\.gz cannot be read \(it is no NIfTI file; it begins 'hello'",
    ),
    "header": (content(b"\x5c\x01\0\0" + b"\xff" * 600, "x.nii"), r"x\.nii cannot be read"),
    "empty": (content(b""), r"x\.nii\.gz cannot be read \(it is no NIfTI file; it is empty"),
    "picture": (content(b"x", "x.png"), r"x\.png cannot be read \(not such a file by its name\)"),
    "absent": (
        lambda folder: f"{folder}/gone.nii.gz",
        r"gone\.nii\.gz cannot be read \(no such file or folder",
    ),
    "absent folder": (
        lambda folder: f"{folder}/gone",
        r"gone cannot be read \(no such file or folder\)",
    ),
    "two series": (
        two_series,
        r"d holds 2 DICOM series: \S+\.7 \('T1 sagittal', 10 files\) and \S+\.8 \('T2', 9 files\); .* one series",
    ),
    "no series": (no_series, r"d holds no DICOM series in its 1 files"),
    "missing slice": (
        lambda folder: save_dicom(folder / "d", IMAGE, skip=(4,)),
        r"d: its 9 slices lie 3 to 6 mm apart; slices lie at equal distances",
    ),
    "tilted gantry": (
        lambda folder: save_dicom(folder / "d", IMAGE, step=(0, 0.4, 1)),
        r"d: its slices are shifted within their plane, the last by 7\.2 mm: a gantry tilted by 14\.9 degrees; .*above",
    ),
    "slices in one place": (
        lambda folder: save_dicom(folder / "d", IMAGE, step=(0, 0, 0)),
        r"d: its 10 slices lie 0 to 0 mm apart",
    ),
    "frames": (
        frames,
        r"DICOM file \S+/d/m\.dcm has several frames and no \(5200,9230\) PerFrame.*; .* convert it to NIfTI",
    ),
    "damaged series": (damaged_series, r"DICOM file \S+/d/1-94\.dcm cannot be read \("),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_volume_is_one_line_with_its_file(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write, message = REFUSED[name]
    uri = write(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        read_volume(uri)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


MOVED = AFFINE.copy()
MOVED[0, 3] += 0.5
BAD_MASKS = {
    "shape": (
        stored(MASK[1:], "m.nii"),
        r"image \S+/i\.nii is 9 x 12 x 10 voxels, its mask \S+/m\.nii 8 x 12 x 10; .* one shape",
    ),
    "affine": (
        stored(MASK, "m.nii", MOVED),
        r"image \S+/i\.nii has the affine \[-1\.433 .* 10 \| .*\], its mask \S+/m\.nii \[.* 10\.5 \| .*\]; .* place",
    ),
    "labels": (
        stored(MASK + (MASK > 1) * np.uint8(5), "m.nii"),
        r"m\.nii has the value 7 at \d+ voxels; .* 0 to 2",
    ),
    "many": (
        stored(IMAGE, "m.nii"),
        r"m\.nii has the values 3, 4, 5, 6, 8 and \d+ more at 1078 voxels",
    ),
    "halves": (stored(MASK * np.float32(0.5), "m.nii"), r"m\.nii has the value 0\.5 at \d+ voxels"),
    "NaN": (
        stored(np.where(MASK > 1, np.nan, MASK), "m.nii"),
        r"m\.nii has the value nan at \d+ voxels",
    ),
    "negative": (
        stored(-MASK.astype(np.int16), "m.nii"),
        r"m\.nii has the values -2, -1 at \d+ voxels",
    ),
    "cut": (cut("m.nii", 0.5), r"m\.nii cannot be read"),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_a_bad_mask_is_one_line_with_its_file(tmp_path: Path, name: str) -> None:
    write, message = BAD_MASKS[name]
    image, mask = save(tmp_path / "i.nii", IMAGE), write(tmp_path)
    with pytest.raises(InputError, match=message) as caught:
        ReadVolumed(classes=3)({"image": image, "label": mask})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["gone.nii", "text.nii.gz", "gone.zip!a.nii", "empty"])
def test_an_unknown_size_is_none(tmp_path: Path, uri: str) -> None:
    (tmp_path / "text.nii.gz").write_text("hello")
    (tmp_path / "empty").mkdir()
    assert count_voxels(f"{tmp_path}/{uri}") is None


# Transforms


def test_an_item_without_a_mask_gives_the_image_alone(forms: Path) -> None:
    reader = pickle.loads(pickle.dumps(ReadVolumed(classes=2)))
    item = reader({"image": f"{forms}/a.nii", "id": "a"})
    assert set(item) == {"image", "id"}
    assert torch.equal(item["image"], ReadVolumed("image")({"image": f"{forms}/a.nii"})["image"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "classes=None"),
        ({"classes": 1}, "classes=1"),
        ({"classes": 257}, "classes=257"),
        ({"keys": ("a", "b", "c"), "classes": 2}, "keys a, b, c"),
    ],
)
def test_wrong_arguments_of_the_reader(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ReadVolumed(**arguments)


@pytest.mark.parametrize("patch", [None, 9, [9, 12, 10], (1, 1, 1)])
def test_a_volume_that_holds_the_patch_passes(forms: Path, patch: Any) -> None:
    item = ReadVolumed("image")({"image": f"{forms}/a.nii"})
    assert CheckPatchd("image", patch)(item)["image"] is item["image"]


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (
            [9, 12, 11],
            r"a\.nii is 9 x 12 x 10 voxels, smaller than the patch of 9 x 12 x 11; .*patch_size=\[9,12,10\]",
        ),
        (
            12,
            r"a\.nii is 9 x 12 x 10 voxels, smaller than the patch of 12 x 12 x 12; .*patch_size=\[9,12,10\]",
        ),
        ([9, 12], r"patch_size 9 x 12 for volumes of 3 axes"),
    ],
)
def test_a_volume_smaller_than_the_patch_is_refused_before_training(
    forms: Path, patch: Any, message: str
) -> None:
    """The two transforms are deterministic: all items go through them when a run prepares its data."""
    data = [{"image": f"{forms}/{name}", "id": name} for name in ("a.nii.gz", "a.nii")]
    chain = [ReadVolumed("image"), CheckPatchd("image", patch)]

    with pytest.raises(InputError, match=message.replace(r"a\.nii", r"a\.nii\.gz", 1)):
        prepare(data, take_apart(Dataset(data, Compose(chain))))


def test_a_header_that_states_more_than_its_file_can_hold_is_refused_before_it_is_read(
    tmp_path: Path,
) -> None:
    header = nib.Nifti1Header()
    header.set_data_shape((2, 2, 2))
    content = bytearray(header.binaryblock)
    struct.pack_into("<4h", content, 40, 3, 2000, 2000, 2000)
    for name, data in (
        ("a.nii.gz", gzip.compress(bytes(content) + bytes(4))),
        ("a.nii", bytes(content) + bytes(4)),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match="would unpack to"):
            read_volume(str(tmp_path / name))


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_scaled_voxels_count_as_the_numbers_that_they_become(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """A byte a voxel in the file, eight in memory."""
    import nibabel as nib

    monkeypatch.setattr(stacks, "_UNPACKED", 2**19)
    voxels = np.zeros((64, 64, 64), np.uint8)
    voxels[3, 3, 3] = 1
    for slope, raises in ((1.0, False), (1.5, True)):
        image = nib.Nifti1Image(voxels, np.eye(4))
        image.header.set_slope_inter(slope, 0.0)
        file = tmp_path / f"{slope}{ending}"
        nib.save(image, file)
        if raises and ending == ".nii.gz":
            with pytest.raises(InputError, match="would unpack to"):
                read_volume(str(file))
        else:
            assert read_volume(str(file)).shape[1:] == voxels.shape


def test_an_archive_does_not_unpack_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_UNPACKED", 2**20)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.png", bytes(2**24))
        file.writestr("b.nii.gz", gzip.compress(bytes(2**24)))
    for uri, read in (("a.png", reading.read_pixels), ("b.nii.gz", read_volume)):
        with pytest.raises(InputError, match="would unpack to"):
            read(f"{tmp_path / 'a.zip'}!{uri}")
