"""Where volumes lie: units, orders of axes, forms of NIfTI, ITK's formats; checked in nibabel and in SimpleITK."""

from __future__ import annotations

import gzip
import itertools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from monai.data import MetaTensor
from monai.transforms import Orientationd

from medfl.bundle.bundle import Bundle
from medfl.bundle.open import check_folder
from medfl.core.errors import InputError
from medfl.data.prepared import Geometry
from medfl.datasets import ReadVolumed, WriteMaskd
from medfl.datasets.readers.volumes import CHANGES, as_nifti, read_pair, read_volume
from medfl.evaluation.save_masks import save
from medfl.partner.case_findings import Findings
from medfl.partner.scanning import scan
from medfl.starter import starter

SHAPE = (7, 8, 9)
IMAGE = np.random.default_rng(0).integers(0, 1000, SHAPE).astype(np.int16)
MASK = (IMAGE > 700).astype(np.uint8)
TURN = nib.eulerangles.euler2mat(0.2, -0.3, 0.1)
AFFINE = nib.affines.from_matvec(TURN @ np.diag([-1.5, 2, 3]), [10, -20, 30])
FLIP = np.diag([-1.0, -1, 1, 1])


def nifti(
    path: Path, voxels: np.ndarray = IMAGE, affine: np.ndarray = AFFINE, unit: Any = "mm"
) -> str:
    image = nib.Nifti1Image(voxels, affine)
    image.header.set_xyzt_units(unit)
    nib.save(image, path)
    return str(path)


def itk(path: Path, voxels: np.ndarray = IMAGE, affine: np.ndarray = AFFINE) -> str:
    """Write (D1, D2, D3[, C]) by SimpleITK."""
    array = np.moveaxis(voxels, (0, 1, 2), (2, 1, 0))
    image = sitk.GetImageFromArray(array, isVector=voxels.ndim == 4)
    lps = FLIP @ affine
    spacing = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(spacing.tolist())
    image.SetDirection((lps[:3, :3] / spacing).ravel().tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    sitk.WriteImage(image, str(path))
    return str(path)


# Units


UNITS = {"micron": 1e-3, "meter": 1e3, "mm": 1.0, "unknown": 1.0}


@pytest.mark.parametrize("unit", UNITS)
def test_lengths_are_millimetres_whatever_the_unit_of_the_header(tmp_path: Path, unit: str) -> None:
    stored = AFFINE.copy()
    stored[:3] /= UNITS[unit]
    volume = read_volume(nifti(tmp_path / "x.nii", affine=stored, unit=unit))
    assert np.allclose(volume.affine, AFFINE, atol=1e-4)
    assert np.allclose(volume.meta["original_affine"], AFFINE, atol=1e-4)
    assert (unit in volume.meta[CHANGES]) == (UNITS[unit] != 1)


def test_an_image_and_a_mask_in_two_units_are_compared_in_one(tmp_path: Path) -> None:
    image = nifti(tmp_path / "x.nii")
    in_micron = AFFINE.copy()
    in_micron[:3] *= 1000
    _, labels = read_pair(image, nifti(tmp_path / "m.nii", MASK, in_micron, "micron"), 2)
    assert np.array_equal(labels[0].numpy(), MASK)
    for unit in ("micron", "meter"):
        with pytest.raises(InputError, match="they lie in one place"):
            read_pair(image, nifti(tmp_path / "m.nii", MASK, unit=unit), 2)


@pytest.mark.parametrize(
    ("name", "line", "factor"),
    [
        ("x.nrrd", b'space units: "um" "um" "um"\n', 1e-3),
        ("x.nrrd", b'space units: "mm" "mm" "mm"\n', 1),
        ("x.nrrd", 'space units: "\u00b5m" "\u00b5m" "\u00b5m"\n'.encode(), 1e-3),
        ("x.mha", b"DistanceUnits = um\n", 1e-3),
        ("x.mha", b"DistanceUnits = cm\n", 10),
        ("x.mha", b"DistanceUnits = ?\n", 1),
    ],
)
def test_units_of_other_headers(tmp_path: Path, name: str, line: bytes, factor: float) -> None:
    path = Path(itk(tmp_path / name))
    content = path.read_bytes()
    end = content.index(b"kinds:" if name == "x.nrrd" else b"TransformMatrix")
    path.write_bytes(content[:end] + line + content[end:])
    expected = AFFINE.copy()
    expected[:3] *= factor
    assert np.allclose(read_volume(str(path)).affine, expected, atol=1e-4)


def test_a_unit_that_is_no_length_is_refused(tmp_path: Path) -> None:
    path = Path(itk(tmp_path / "x.nrrd"))
    content = path.read_bytes()
    for units in (b'"mm" "mm" "um"', b'"pixel" "pixel" "pixel"'):
        path.write_bytes(content.replace(b"kinds:", b"space units: " + units + b"\nkinds:", 1))
        with pytest.raises(InputError, match=r"x\.nrrd cannot be read \(its .*(um|'pixel')"):
            read_volume(str(path))
    header = nib.load(nifti(tmp_path / "x.nii")).header
    content = bytearray((tmp_path / "x.nii").read_bytes())
    content[123] = 5  # xyzt_units: no code of NIfTI
    assert header["xyzt_units"] == 2
    (tmp_path / "x.nii").write_bytes(content)
    with pytest.raises(InputError, match=r"x\.nii cannot be read \(.* 'the unit 5 of xyzt_units'"):
        read_volume(str(tmp_path / "x.nii"))


def without_third_spacing(voxels: np.ndarray, form: str) -> bytes:
    """Return a NIfTI file with 0 in pixdim[3] and the code of this form alone, by the bytes of its header."""
    content = bytearray(nib.Nifti1Image(voxels, AFFINE).to_bytes())
    content[76 + 3 * 4 : 76 + 4 * 4] = bytes(4)
    content[252:256] = bytes([form == "qform", 0, form == "sform", 0])
    return bytes(content)


@pytest.mark.parametrize("form", ["neither", "qform", "sform"])
@pytest.mark.parametrize("ending", [".nii", ".nii.gz", ".zip"])
def test_a_spacing_of_zero_is_refused_where_a_place_rests_on_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], form: str, ending: str
) -> None:
    """Nibabel makes it 1 and prints a line; with an sform, or along an axis of one slice, nothing rests on it."""
    content = without_third_spacing(IMAGE, form)
    path = tmp_path / f"x{ending}"
    uri = str(path)
    if ending == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.nii.gz", gzip.compress(content))
        uri = f"{path}!x.nii.gz"
    else:
        path.write_bytes(gzip.compress(content) if ending == ".nii.gz" else content)
    if form == "sform":
        assert np.allclose(read_volume(uri).affine, AFFINE, atol=1e-4)
    else:
        with pytest.raises(InputError, match=r"cannot be read \(its pixdim has a spacing of 0\)"):
            read_volume(uri)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("side", "told"), [(0.001, True), (0.05, False), (8, False), (1000, True)])
def test_voxels_that_are_too_small_or_large_are_told(
    tmp_path: Path, side: float, told: bool
) -> None:
    """Micrometres or metres without a unit in the header are taken as millimetres."""
    path = tmp_path / "x.nii"
    nib.save(nib.Nifti1Image(IMAGE, np.diag([side, side, side, 1])), path)
    assert ("is this their unit?" in read_volume(str(path)).meta[CHANGES]) == told


def test_a_slice_may_have_no_spacing_along_its_only_voxel(tmp_path: Path) -> None:
    (tmp_path / "x.nii").write_bytes(without_third_spacing(IMAGE[..., :1], "neither"))
    assert np.array_equal(read_volume(str(tmp_path / "x.nii"))[0].numpy(), IMAGE[..., :1])


# Formats and axes


@pytest.mark.parametrize("name", ["x.nrrd", "x.mha", "X.MHA"])
def test_formats_of_itk_lie_where_simpleitk_has_them(tmp_path: Path, name: str) -> None:
    path = itk(tmp_path / name.lower())
    if name.isupper():
        path = str(Path(path).rename(tmp_path / name))
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.write(path, f"in/{name}")
    for uri in (path, f"{tmp_path}/z.zip!in/{name}"):
        volume = read_volume(uri)
        assert np.array_equal(volume[0].numpy(), IMAGE)
        assert np.allclose(volume.affine, AFFINE, atol=1e-5)
    _, labels = read_pair(path, nifti(tmp_path / "m.nii.gz", MASK), 2)
    assert np.array_equal(labels[0].numpy(), MASK)


@pytest.mark.parametrize(
    ("damage", "packed"), [("cut", False), ("cut", True), ("header", False), ("changed", True)]
)
def test_a_damaged_file_of_itk_is_refused_in_one_line(
    tmp_path: Path, capfd: Any, packed: bool, damage: str
) -> None:
    """MetaIO wrote to stderr by itself, and of packed voxels that are changed read the rest from memory."""
    path = tmp_path / "x.mha"
    voxels = np.random.default_rng(0).normal(size=(8, 7, 6)).astype(np.float32)
    sitk.WriteImage(sitk.GetImageFromArray(voxels), str(path), packed)
    content = path.read_bytes()
    damaged = {
        "cut": content[:-100],
        "header": content.replace(b"DimSize", b"DimSise"),
        "changed": content[:-80] + b"\xff" * 40 + content[-40:],
    }
    path.write_bytes(damaged[damage])
    reason = "Meta|Uncompress failed|NDims|DimSize|ElementType"
    with pytest.raises(InputError, match=rf"x\.mha cannot be read \(({reason})") as raised:
        read_volume(str(path))
    assert ".cxx" not in str(raised.value)
    assert "0x" not in str(raised.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["x.nii.gz", "x.nrrd", "x.mha"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_fourth_axis_are_channels(tmp_path: Path, name: str, count: int) -> None:
    voxels = np.stack([IMAGE + channel for channel in range(count)], -1)
    path = (nifti if name == "x.nii.gz" else itk)(tmp_path / name, voxels)
    image, labels = read_pair(path, nifti(tmp_path / "m.nii", MASK), 2)
    assert np.array_equal(image.numpy(), np.moveaxis(voxels, -1, 0))
    assert image.meta["spatial_shape"].tolist() == list(SHAPE)
    with pytest.raises(InputError, match=rf"mask .* has {count} channels"):
        read_pair(nifti(tmp_path / "y.nii"), path, 2)


@pytest.mark.parametrize(
    "shape", [(7, 8, 1), (1, 7, 8), (7, 1, 8), (7, 8), (7, 8, 1, 1), (7, 8, 1, 3)]
)
def test_a_single_slice_is_a_volume(tmp_path: Path, shape: tuple[int, ...]) -> None:
    voxels = np.random.default_rng(1).integers(0, 99, shape).astype(np.int16)
    volume = read_volume(nifti(tmp_path / "x.nii", voxels))
    spatial = (*shape, 1)[:3]
    assert volume.shape == (3 if shape[3:] == (3,) else 1, *spatial)
    assert np.array_equal(np.moveaxis(volume.numpy(), 0, -1).reshape(shape), voxels)
    assert np.allclose(volume.affine, AFFINE, atol=1e-5)


ORDERS = [
    *itertools.product(itertools.permutations(range(3)), itertools.product((1, -1), repeat=3))
]


@pytest.mark.parametrize("order", ORDERS[::5])
def test_a_mask_in_another_order_of_axes_is_turned_to_its_image(tmp_path: Path, order: Any) -> None:
    turn = np.stack([np.array(part, float) for part in order], 1)
    turned = nib.Nifti1Image(MASK, AFFINE).as_reoriented(turn)
    nib.save(turned, tmp_path / "m.nii")
    image, labels = read_pair(nifti(tmp_path / "x.nii"), str(tmp_path / "m.nii"), 2)
    assert np.array_equal(labels[0].numpy(), MASK)
    assert torch.equal(image.affine, labels.affine)
    names = "".join(nib.aff2axcodes(turned.affine))
    same = np.allclose(turned.affine, AFFINE)
    assert labels.meta[CHANGES] == (
        "" if same else f"axes {names} are turned to those of its image; "
    )


def test_a_turned_mask_elsewhere_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    image = nifti(tmp_path / "x.nii")
    turned = nib.Nifti1Image(MASK, AFFINE).as_reoriented(np.array([[1, -1], [0, 1], [2, 1]]))
    moved = turned.affine.copy()
    moved[1, 3] += 0.5
    for voxels, affine, message in (
        (np.asarray(turned.dataobj), moved, "they lie in one place"),
        (np.asarray(turned.dataobj)[1:], turned.affine, "7 x 8 x 9 voxels, its mask .* 7 x 7 x 9"),
    ):
        with pytest.raises(InputError, match=message):
            read_pair(image, nifti(tmp_path / "m.nii", voxels, affine), 2)


# Masks that are written


def with_forms(
    path: Path, sform: int, qform: int, unit: str = "mm", kind: Any = nib.Nifti1Image
) -> str:
    """Write a volume with an sform beside another qform."""
    image = kind(IMAGE, None)
    image.header.set_xyzt_units(unit, "sec")
    image.header.set_zooms((1.5, 2, 3))
    image.header.set_qform(
        nib.affines.from_matvec(TURN.T @ np.diag([1.5, 2, 3]), [-90, 40, 50]), qform
    )
    image.header.set_sform(AFFINE, sform)
    nib.save(kind(IMAGE, None, image.header), path)
    return str(path)


SOURCES: dict[str, Callable[[Path], str]] = {
    "sform beside another qform": lambda root: with_forms(root / "x.nii.gz", 1, 1),
    "qform alone": lambda root: with_forms(root / "x.nii.gz", 0, 1),
    "sform alone": lambda root: with_forms(root / "x.nii", 4, 0),
    "no code": lambda root: with_forms(root / "x.nii", 0, 0),
    "micron": lambda root: with_forms(root / "x.nii", 2, 1, "micron"),
    "NIfTI-2": lambda root: with_forms(root / "x.nii.gz", 1, 1, kind=nib.Nifti2Image),
    "channels": lambda root: nifti(root / "x.nii.gz", np.stack([IMAGE, IMAGE + 1], -1)),
    "nrrd": lambda root: itk(root / "x.nrrd"),
    "mha": lambda root: itk(root / "x.mha"),
}
FIELDS = ("qform_code", "sform_code", "srow_x", "srow_y", "srow_z", "quatern_b", "qoffset_x", "xyzt_units")  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_a_mask_lies_where_its_source_does(tmp_path: Path, name: str) -> None:
    """In nibabel and in SimpleITK, which differ in the form that they take."""
    source = SOURCES[name](tmp_path)
    volume = read_volume(source)
    geometry = Geometry(volume.affine.numpy(), volume.affine.numpy(), SHAPE, source)
    written = save(torch.from_numpy(MASK), 2, geometry, tmp_path / "mask")
    if name != "NIfTI-2":  # which SimpleITK does not read
        mask, here = sitk.ReadImage(str(written)), sitk.ReadImage(source)
        assert np.array_equal(sitk.GetArrayFromImage(mask).transpose(2, 1, 0), MASK)
        if here.GetDimension() == 4:
            here = here[..., 0]
        for part in ("GetSize", "GetSpacing", "GetOrigin", "GetDirection"):
            assert getattr(mask, part)() == pytest.approx(getattr(here, part)(), abs=1e-4)
    if not source.endswith((".nrrd", ".mha")):
        before, after = nib.load(source), nib.load(written)
        assert np.array_equal(before.affine, after.affine)
        assert np.array_equal(before.header["pixdim"][:4], after.header["pixdim"][:4])
        for field in FIELDS:
            assert np.array_equal(before.header[field], after.header[field])
    again, labels = read_pair(source, str(written), 2)
    assert np.array_equal(labels[0].numpy(), MASK)
    assert isinstance(again, MetaTensor)


@pytest.mark.parametrize("name", SOURCES)
def test_exports_write_masks_where_their_source_lies(tmp_path: Path, name: str) -> None:
    """As `medfl.datasets.WriteMaskd` of an exported bundle does, from scores on a turned grid or from a mask."""
    source = SOURCES[name](tmp_path)
    item = {
        "image": source,
        "label": nifti(tmp_path / "m.nii.gz", MASK, read_volume(source).affine.numpy()),
    }
    turned = Orientationd(["image", "label"], "LSP", labels=None)(ReadVolumed(classes=2)(item))
    scores = torch.cat([1 - turned["label"].float(), turned["label"].float()])
    WriteMaskd(output_dir=tmp_path / "out")({**turned, "pred": scores})
    WriteMaskd(output_dir=tmp_path / "bare")({**turned, "pred": torch.from_numpy(MASK)[None]})
    geometry = Geometry(AFFINE, read_volume(source).affine.numpy(), SHAPE, source)
    expected = as_nifti(MASK, geometry.original_affine, source)
    for folder in ("out", "bare"):
        assert (tmp_path / folder / "x_seg.nii.gz").read_bytes() == expected


def test_what_reading_changes_is_said(tmp_path: Path) -> None:
    """By `medfl new`, `medfl data check` and `medfl site check`, once for each kind of change."""
    turn = np.array([[1, -1], [0, 1], [2, 1]])
    for number in range(4):
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir(exist_ok=True)
        voxels = np.roll(IMAGE, number, 0)
        nifti(tmp_path / "images" / f"{number}.nii", voxels, np.diag([1e3, 1e3, 1e3, 1]), "micron")
        turned = nib.Nifti1Image((voxels > 700).astype(np.uint8), np.eye(4)).as_reoriented(turn)
        nib.save(turned, tmp_path / "masks" / f"{number}.nii")
    lines = (
        "lengths in micron are read as mm, in 4 files",
        f"axes {''.join(nib.aff2axcodes(turned.affine))} are turned to those of its image, in 4 files",
    )
    survey = starter.survey(tmp_path / "images", tmp_path / "masks")
    assert set(lines) <= set(survey.notes)
    bundle = starter.write(tmp_path / "bundle", survey)
    assert set(lines) <= set(check_folder(bundle, tmp_path).notes)
    opened = Bundle(str(bundle), {"dataset_dir": str(tmp_path)})
    findings = Findings(opened)
    for section in ("train", "validate", "test"):
        for item in scan(opened, section):
            findings.add(item)
    assert set(lines) <= {line.text for line in findings.lines() if line.topic == "reading"}


def test_what_is_changed_of_a_further_channel_is_said(tmp_path: Path) -> None:
    in_micron = np.diag([1e3, 1e3, 1e3, 1]) @ AFFINE
    uris = [nifti(tmp_path / "a.nii"), nifti(tmp_path / "b.nii", IMAGE * 2, in_micron, "micron")]
    volume = read_volume(" | ".join(uris))
    assert np.array_equal(volume[1].numpy(), IMAGE * 2)
    assert volume.meta[CHANGES] == "lengths in micron are read as mm; "


def test_a_mask_has_nothing_else_of_its_source(tmp_path: Path) -> None:
    """No scale, no window, no intent, no description and no extension: these are of the image, or of the patient."""
    image = nib.Nifti1Image(IMAGE, AFFINE)
    image.header.set_slope_inter(0.5, 3)
    image.header["cal_max"] = 40
    image.header["descrip"] = b"Jane Doe"
    image.header.set_intent("z score")
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"Jane Doe"))
    nib.save(image, tmp_path / "x.nii")
    geometry = Geometry(AFFINE, AFFINE, SHAPE, str(tmp_path / "x.nii"))
    written = save(torch.from_numpy(MASK), 2, geometry, tmp_path / "mask")
    assert b"Jane" not in gzip.decompress(written.read_bytes())
    header = nib.load(written).header
    assert (header["cal_max"], header.get_intent()[0], len(header.extensions)) == (0, "none", 0)
    assert np.array_equal(np.asarray(nib.load(written).dataobj), MASK)


def test_a_mask_of_two_axes_keeps_the_forms_of_its_source(tmp_path: Path) -> None:
    """As of a bundle that segments slices; also where the source has a third axis of one voxel."""
    for shape in ((7, 8), (7, 8, 1)):
        source = with_forms(tmp_path / "x.nii", 1, 1)
        header = nib.load(source).header
        nib.save(nib.Nifti1Image(IMAGE[..., 0].reshape(shape), None, header), source)
        geometry = Geometry(AFFINE, AFFINE, (7, 8), source)
        written = nib.load(
            save(torch.from_numpy(MASK[..., 0].copy()), 2, geometry, tmp_path / "mask")
        )
        assert np.array_equal(np.asarray(written.dataobj).reshape(7, 8), MASK[..., 0])
        for field in FIELDS:
            assert np.array_equal(written.header[field], nib.load(source).header[field])


def test_segmentations_as_slicer_names_them_are_masks(tmp_path: Path) -> None:
    for number in range(4):
        itk(tmp_path / f"c{number}.nrrd", np.roll(IMAGE, number, 0))
        itk(tmp_path / f"c{number}.seg.nrrd", np.roll(MASK, number, 0))
    survey = starter.survey(tmp_path)
    assert (survey.kind, survey.counts) == ("volumes", (4, 4))


def with_quaternion(path: Path, *numbers: float) -> str:
    """Write a file whose place is by its qform, with these numbers of its quaternion in the header."""
    image = nib.Nifti1Image(IMAGE, np.diag([1.0, 2, 3, 1]))
    image.set_sform(None, 0)
    image.set_qform(image.affine, 1)
    content = bytearray(image.to_bytes())
    content[256:268] = np.array(numbers, np.float32).tobytes()
    path.write_bytes(content)
    return str(path)


def test_a_quaternion_within_rounding_is_read_and_one_that_is_none_is_refused(
    tmp_path: Path,
) -> None:
    """SimpleITK normalises both; of the second nibabel says "w2 should be positive"."""
    uri = with_quaternion(tmp_path / "x.nii", 1.0000005, 0, 0)
    direction = np.reshape(sitk.ReadImage(uri).GetDirection(), (3, 3))
    assert np.allclose(read_volume(uri).affine[:3, :3], FLIP[:3, :3] @ direction * [1, 2, 3])
    with pytest.raises(InputError, match=r"\(its quatern_b, quatern_c and quatern_d are no rot"):
        read_volume(with_quaternion(tmp_path / "y.nii", 1.2, 0.3, 0))


def test_two_forms_that_differ_are_said(tmp_path: Path) -> None:
    """An sform in steps of 2 mm counts, a qform of 1 mm gives an eighth of each volume in SimpleITK."""
    image = nib.Nifti1Image(IMAGE, np.eye(4))
    image.set_qform(np.eye(4), 1)
    for step, code, told in ((2, 2, True), (1, 1, False), (2, 0, False)):
        image.set_sform(np.diag([step, step, step, 1]), code)
        nib.save(image, tmp_path / "x.nii")
        volume = read_volume(str(tmp_path / "x.nii"))
        assert np.allclose(volume.affine, nib.load(tmp_path / "x.nii").affine)
        assert ("by the sform, not by the other qform" in volume.meta[CHANGES]) == told


def test_a_mask_in_a_sheared_place_is_there_or_refused(tmp_path: Path) -> None:
    """A qform cannot say a shear: SimpleITK showed the mask elsewhere, by it."""
    (tmp_path / "x.mha").write_bytes(
        b"ObjectType = Image\nNDims = 3\nTransformMatrix = 1 0 0 0.3 1 0 0 0 1\nOffset = 0 0 0\n"
        b"ElementSpacing = 1 1 2\nDimSize = 7 8 9\nElementType = MET_SHORT\nElementDataFile = LOCAL\n"
        + IMAGE.astype("<i2").tobytes("F")
    )
    volume = read_volume(str(tmp_path / "x.mha"))
    end = sitk.ReadImage(str(tmp_path / "x.mha")).TransformIndexToPhysicalPoint((6, 7, 8))
    assert np.allclose(FLIP @ volume.affine.numpy() @ [6, 7, 8, 1], [*end, 1])
    mask = tmp_path / "m.nii.gz"
    mask.write_bytes(as_nifti(MASK, volume.affine.numpy(), str(tmp_path / "x.mha")))
    assert np.allclose(nib.load(mask).affine, volume.affine)
    with pytest.raises(RuntimeError, match="orthonormal"):
        sitk.ReadImage(str(mask))


@pytest.mark.parametrize("number", [2**40, 2**53])
def test_values_that_float32_does_not_tell_apart_are_not_called_one(
    tmp_path: Path, number: int
) -> None:
    voxels = number + IMAGE.astype(np.int64) * 2
    assert len(np.unique(voxels.astype(np.float32))) == 1
    nib.save(nib.Nifti1Image(voxels, AFFINE, dtype=np.int64), tmp_path / "x.nii")
    with pytest.raises(InputError, match=rf"values {voxels.min()} to {voxels.max()}, all one num"):
        read_volume(str(tmp_path / "x.nii"))


@pytest.mark.parametrize("line", [b"", b"spacings: nan nan nan\n", b"spacings: 2 3 4\n"])
def test_an_nrrd_without_spacings_is_said(tmp_path: Path, line: bytes) -> None:
    head = b"NRRD0004\ntype: short\ndimension: 3\nsizes: 7 8 9\nendian: little\nencoding: raw\n"
    path = tmp_path / "x.nrrd"
    path.write_bytes(head + line + b"\n" + IMAGE.T.tobytes())
    volume = read_volume(str(path))
    assert np.allclose(
        np.diag(volume.affine)[:3], np.array(sitk.ReadImage(path).GetSpacing()) * [-1, -1, 1]
    )
    assert volume.meta[CHANGES] == "a spacing that is missing is read as 1; " * (b"2" not in line)


def test_digits_that_float32_loses_are_said(tmp_path: Path) -> None:
    """Of 1e9 ± 1000 float32 keeps steps of 64; what it holds exactly is not told."""
    values = np.random.default_rng(0).normal(1e9, 1000, SHAPE)
    assert np.unique(values.astype(np.float32)).size < 200
    stored = nifti(tmp_path / "x.nii.gz", values)
    assert read_volume(stored).meta[CHANGES] == "values lose digits in float32; "
    for exact in (values - 1e9, values.astype(np.float32), IMAGE.astype(np.int32)):
        assert read_volume(nifti(tmp_path / "y.nii.gz", exact)).meta[CHANGES] == ""


def test_the_names_of_structures_in_a_header_are_said(tmp_path: Path) -> None:
    """3D Slicer numbers them in the order of drawing: 1 may be the liver in one file, the tumour in another."""
    path = Path(itk(tmp_path / "x.seg.nrrd"))
    content = path.read_bytes()
    end = content.index(b"kinds:")
    text = b"Segment0_LabelValue:=2\nSegment0_Name:=tumour\nSegment1_LabelValue:=1\nSegment1_Name:=liver\n"
    path.write_bytes(content[:end] + text + content[end:])
    assert read_volume(str(path)).meta[CHANGES] == "its header calls 1 'liver', 2 'tumour'; "
