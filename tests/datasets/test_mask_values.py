"""What stands in masks: whole numbers within rounding, values with gaps, and what is written of them again."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from monai.data import MetaTensor
from PIL import Image

from medfl.bundle.bundle import Bundle
from medfl.bundle.open import check_folder
from medfl.core.errors import InputError
from medfl.data.prepared import Geometry
from medfl.datasets import ReadPaird, ReadVolumed, WriteMaskd
from medfl.datasets.readers import pairs, volumes
from medfl.evaluation import save_masks
from medfl.starter import starter

VALUES = np.arange(4**3).reshape(4, 4, 4) % 4
PICTURE = np.arange(64, dtype=np.uint8).reshape(8, 8)


def volume(path: Path, voxels: np.ndarray, slope: float | None = None) -> str:
    """Save a volume, with a slope in its header that its stored values are multiplied by."""
    image = nib.Nifti1Image(voxels, np.eye(4))
    if slope is not None:
        raw = bytearray(image.to_bytes())
        raw[112:120] = np.array([slope, 0], np.float32).tobytes()
        path.write_bytes(bytes(raw))
    else:
        nib.save(image, path)
    return str(path)


def scan(path: Path) -> str:
    return volume(path, np.arange(64, dtype=np.float32).reshape(4, 4, 4))


@pytest.mark.parametrize(
    ("stored", "slope"),
    [
        (VALUES.astype(np.uint8) * 85, 1 / 85),
        ((VALUES % 2).astype(np.uint8) * 255, 1 / 255),
        ((VALUES % 2).astype(np.int16) * 1000, 0.001),
        (VALUES + np.float32(4e-4), None),
        (VALUES - 9.9e-4, None),
    ],
)
def test_labels_within_rounding_are_whole_numbers(
    tmp_path: Path, stored: np.ndarray, slope: float | None
) -> None:
    """The right ones are those of SimpleITK, rounded; nibabel gives 0.99999... for them."""
    mask = volume(tmp_path / "m.nii", stored, slope)
    _, read = volumes.read_pair(scan(tmp_path / "i.nii"), mask, 4)
    expected = np.rint(sitk.GetArrayFromImage(sitk.ReadImage(mask, sitk.sitkFloat64))).T
    assert read.dtype == torch.uint8
    assert np.array_equal(read[0].numpy(), expected)


@pytest.mark.parametrize("far", [0.002, 0.5, -0.01])
def test_labels_beyond_rounding_are_refused(tmp_path: Path, far: float) -> None:
    mask = volume(tmp_path / "m.nii", VALUES + far)
    with pytest.raises(InputError, match=r"m\.nii has the values .* whole numbers 0 to 3"):
        volumes.read_pair(scan(tmp_path / "i.nii"), mask, 4)


def test_a_picture_with_infinity_is_refused_without_a_warning(tmp_path: Path) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "i.png")
    Image.fromarray(np.where(PICTURE > 9, np.inf, 0).astype(np.float32)).save(tmp_path / "m.tif")
    with pytest.raises(InputError, match=r"m\.tif has values that are no numbers"):
        pairs.read_pair(f"{tmp_path}/i.png", f"{tmp_path}/m.tif")


def test_a_picture_of_floats_is_read_within_rounding(tmp_path: Path) -> None:
    Image.fromarray(PICTURE).save(tmp_path / "i.png")
    Image.fromarray((PICTURE % 3 - np.float32(1e-4)).astype(np.float32)).save(tmp_path / "m.tif")
    _, mask, _ = pairs.read_pair(f"{tmp_path}/i.png", f"{tmp_path}/m.tif", classes=3)
    assert np.array_equal(mask, PICTURE % 3)


@pytest.mark.parametrize("values", [(0, 1, 2, 4), (0, 7), (0, 50, 100, 255), (0, 205, 420, 65535)])
def test_values_with_gaps_are_classes_and_written_as_values(
    tmp_path: Path, values: tuple[int, ...]
) -> None:
    stored = np.array(values, np.uint16)[VALUES % len(values)]
    item = {"image": scan(tmp_path / "i.nii"), "label": volume(tmp_path / "m.nii", stored)}
    read = ReadVolumed(classes=list(values))(item)["label"]
    assert np.array_equal(read[0].numpy(), VALUES % len(values))
    geometry = Geometry(np.eye(4), np.eye(4), (4, 4, 4), str(tmp_path / "i.nii"))
    written = save_masks.save(read[0], len(values), geometry, tmp_path / "out", values)
    assert np.array_equal(np.asanyarray(nib.load(written).dataobj), stored)
    with pytest.raises(
        InputError,
        match=r"m\.nii has the value.*; its labels are 0, 1, 3;",
    ):
        ReadVolumed(classes=[0, 1, 3])(item)


@pytest.mark.parametrize("values", [(0, 128, 255), (0, 7), (0, 300, 1000)])
def test_pictures_with_gaps_are_written_as_they_were(
    tmp_path: Path, values: tuple[int, ...]
) -> None:
    stored = np.array(values, np.uint8 if values[-1] < 256 else np.uint16)[PICTURE % len(values)]
    Image.fromarray(PICTURE).save(tmp_path / "i.png")
    Image.fromarray(stored).save(tmp_path / "m.png")
    item = ReadPaird(classes=values)({"image": f"{tmp_path}/i.png", "label": f"{tmp_path}/m.png"})
    assert np.array_equal(item["label"][0].numpy(), PICTURE % len(values))
    scores = torch.nn.functional.one_hot(item["label"][0].long(), len(values)).movedim(-1, 0)
    data = {"image": item["image"], "pred": MetaTensor(scores.float())}
    WriteMaskd(output_dir=tmp_path / "out", values=values)(data)
    assert np.array_equal(np.array(Image.open(tmp_path / "out" / "i.png")), stored)


def test_palettes_in_several_orders_are_refused(tmp_path: Path) -> None:
    """Programs that count colours number them by file: index 1 was the liver in one mask, the kidney in the next."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()

    black_red_green = [0, 0, 0, 255, 0, 0, 0, 255, 0]
    for number, palette in enumerate([black_red_green] * 3 + [[0, 0, 0, 0, 255, 0, 255, 0, 0]]):
        Image.fromarray(PICTURE + np.uint8(number)).save(f"{tmp_path}/images/{number}.png")
        mask = Image.fromarray(PICTURE % 3)
        mask.putpalette(palette)
        mask.save(f"{tmp_path}/masks/{number}.png")

    told = r"index 1 is the colour \(255, 0, 0\) in mask \S*/0\.png, index 1 is \(0, 255, 0\) in \S*/3\.png; an"
    with pytest.raises(InputError, match=told):
        starter.survey(tmp_path / "images", tmp_path / "masks")
    mask.putpalette(black_red_green)
    mask.save(f"{tmp_path}/masks/3.png")
    found = starter.survey(tmp_path / "images", tmp_path / "masks")
    assert found.classes == ("background", "structure_1", "structure_2")
    starter.write(tmp_path / "mine", found)
    mask.putpalette(palette)
    mask.save(f"{tmp_path}/masks/3.png")
    assert "index 1 is the colour" in check_folder(str(tmp_path / "mine"), tmp_path).problems[0]


def test_a_colour_under_another_index_is_refused_in_a_folder_and_at_another_hospital(
    tmp_path: Path,
) -> None:
    """Palettes of the colours that occur in a file: red is 1 in one mask, 2 in the next, where green comes first."""
    red, green = (255, 0, 0), (0, 255, 0)

    def folder(place: str, *palettes: tuple[tuple[int, int, int], ...]) -> Path:
        for number, palette in enumerate(palettes):
            for name, values in (("images", PICTURE + np.uint8(number)), ("masks", PICTURE % 3)):
                path = tmp_path / place / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                picture = Image.fromarray(np.where(values == 1, values, values // 2 * 2))
                if name == "masks":
                    used = [0, *(index for index, colour in enumerate(palette, 1) if any(colour))]
                    picture = Image.fromarray(np.array(used, np.uint8)[PICTURE % len(used)])
                    picture.putpalette([0, 0, 0, *sum(palette, ())])
                picture.save(path)

        return tmp_path / place

    nothing = (0, 0, 0)
    mixed = folder("mixed", *[(red, green)] * 3, (nothing, red))
    with pytest.raises(
        InputError, match=r"index 1 is the colour \(255, 0, 0\) in mask .*index 2 is"
    ):
        starter.survey(mixed / "images", mixed / "masks")

    here = folder("here", *[(red, green)] * 4, (red,))
    starter.write(tmp_path / "mine", starter.survey(here / "images", here / "masks"))
    other = folder("other", *[(green, red)] * 5)
    assert check_folder(str(tmp_path / "mine"), here).problems == ()
    problems = check_folder(str(tmp_path / "mine"), other).problems
    assert "index 1 is the colour (255, 0, 0) in the bundle, index 1 is (0, 255, 0)" in problems[0]
    bundle = Bundle(str(tmp_path / "mine"), {"dataset_dir": str(other)})
    with pytest.raises(InputError, match="in the bundle, index 1 is"):
        bundle.prepared("train")


def test_a_jpeg_of_several_shades_is_no_mask(tmp_path: Path) -> None:
    """Without white among them its shades were structures, 30 of three."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()

    Image.fromarray(PICTURE).save(f"{tmp_path}/images/0.png")
    Image.fromarray(PICTURE % 3 * np.uint8(100)).save(f"{tmp_path}/masks/0.jpg")
    with pytest.raises(
        InputError, match="perhaps shades of JPEG or resizing; .*save the masks in black"
    ):
        starter.survey(tmp_path / "images", tmp_path / "masks")


def test_volumes_of_two_scales_have_one_structure(tmp_path: Path) -> None:
    """Some masks have 0 and 1, others 0 and 255, one nothing: no mask has both, so 255 is 1, which is said."""
    draws = np.random.default_rng(0)
    for number in range(9):
        for folder in ("images", "masks"):
            (tmp_path / folder).mkdir(exist_ok=True)
        volume(tmp_path / "images" / f"{number}.nii", draws.normal(size=(8, 8, 8)))
        inside = (draws.random((8, 8, 8)) > 0.5) * (number != 4)
        scale = 255 if number % 2 else 1
        volume(tmp_path / "masks" / f"{number}.nii", (inside * scale).astype(np.uint8))
    survey = starter.survey(tmp_path / "images", tmp_path / "masks")
    assert survey.classes == ("background", "structure")
    assert survey.counts == (9, 8)
    assert survey.mask_values == ()
    assert "the value 255 is read as 1, which others have, in 4 masks" in survey.notes
    bundle = starter.write(tmp_path / "bundle", survey)
    report = check_folder(str(bundle), tmp_path)
    assert report.problems == ()
    image, mask = (str(tmp_path / folder / "1.nii") for folder in ("images", "masks"))
    _, labels = volumes.read_pair(image, mask, 2)
    assert np.array_equal(labels[0].numpy(), np.asanyarray(nib.load(mask).dataobj) // 255)

    both = np.asanyarray(nib.load(mask).dataobj).copy()
    both[0, 0, 0] = 1
    volume(Path(mask), both)
    names = ("left", "right")
    assert len(starter.survey(tmp_path / "images", tmp_path / "masks", names=names).classes) == 3
    with pytest.raises(InputError, match="4 of 9 masks have the value 255, which VOC"):
        starter.survey(tmp_path / "images", tmp_path / "masks")
    with pytest.raises(InputError, match="has the value 255 at .* 0 to 1, or 0 and 255"):
        volumes.read_pair(image, mask, 2)


@pytest.mark.parametrize(
    ("values", "void"),
    [
        ((0, 1, 255), "4 of 4 masks have the value 255, which VOC and Cityscapes call 'void'"),
        ((0, 1, 2, 65535), "4 of 4 masks have the value 65535, which VOC"),
        ((*range(21), 255), "4 of 4 masks have the value 255, which VOC"),  # VOC: 20 kinds
        ((0, 100, 255), ""),
        ((0, 15, 255), "4 of 4 masks have the value 255, which VOC"),  # VOC: persons alone
        ((0, 64, 128, 255), ""),
        ((0, 255), ""),
    ],
)
@pytest.mark.parametrize("ending", ["png", "nii"])
def test_pixels_that_nobody_has_labelled_are_no_class(
    tmp_path: Path, values: tuple[int, ...], void: str, ending: str
) -> None:
    """Of 255 beside 0, 1, ... there was a class, and a note that there is a gap."""
    draws = np.random.default_rng(0)
    for number in range(4):
        image = draws.integers(0, 200, (8, 8, 8))
        mask = np.zeros((8, 8, 8), np.uint16)
        mask.flat[: len(values)] = values
        for folder, voxels in (("images", image), ("masks", mask)):
            (tmp_path / folder).mkdir(exist_ok=True)
            file = tmp_path / folder / f"{number}.{ending}"
            if ending == "nii":
                volume(file, voxels.astype(np.uint16))
            else:
                Image.fromarray(voxels.reshape(16, 32).astype(np.uint16)).save(file)

    folders = tmp_path / "images", tmp_path / "masks"
    if not void:
        assert starter.survey(*folders).classes[0] == "background"
        return

    with pytest.raises(InputError, match=f"{void}.*nobody has labelled"):
        starter.survey(*folders)

    names = [f"kind {value}" for value in range(1, len(values))]
    assert starter.survey(*folders, names=names).mask_values == values


@pytest.mark.parametrize("classes", [[0], [0, 2, 1], [0, 1, 1], [0, 70000], 1, 300])
def test_classes_that_no_mask_can_have_are_refused(classes: int | list[int]) -> None:
    with pytest.raises(InputError, match=r"classes="):
        ReadPaird(classes=classes)


@pytest.mark.parametrize(("ending", "names"), [("jpg", ()), ("png", ()), ("jpg", ("lesion",))])
def test_shades_of_masks_are_no_classes(
    tmp_path: Path, ending: str, names: tuple[str, ...]
) -> None:
    """JPEG and smooth resizing make shades of black and white, which were up to a hundred classes."""
    draws = np.random.default_rng(0)
    for number in range(8):
        disc = np.hypot(*np.indices((24, 24)) - 8 - number % 4) < 7
        mask = Image.fromarray(disc.astype(np.uint8) * 255)
        if ending == "png":
            mask = mask.resize((19, 19)).resize((24, 24))
        for folder, picture in (("images", draws.integers(0, 255, (24, 24))), ("masks", mask)):
            (tmp_path / folder).mkdir(exist_ok=True)
            file = tmp_path / folder / f"{number}.{ending}"
            Image.fromarray(np.asarray(picture).astype(np.uint8)).save(file)
    with pytest.raises(
        InputError,
        match=r"values, as .* up to 255, perhaps shades of JPEG or resizing; .*black and white",
    ):
        starter.survey(tmp_path / "images", tmp_path / "masks", names=names)
    for file in (tmp_path / "masks").iterdir():
        Image.fromarray(np.asarray(Image.open(file)) // 128 * 255).save(file.with_suffix(".png"))
    for file in (tmp_path / "masks").glob("*.jpg"):
        file.unlink()
    assert starter.survey(tmp_path / "images", tmp_path / "masks").counts == (8, 8)


def test_masks_without_a_background_are_said(tmp_path: Path) -> None:
    """Values from 1 on, as of MATLAB: the class 0 has no pixel."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for number in range(8):
        scan(tmp_path / "images" / f"{number}.nii")
        volume(tmp_path / "masks" / f"{number}.nii", (VALUES % 2 + 1).astype(np.uint8))
    assert (
        "no mask has the values 0" in starter.survey(tmp_path / "images", tmp_path / "masks").notes
    )
