"""Masks find the images of their own patient: by path, by a name that is one image's, never by a guess."""

from __future__ import annotations

import zipfile
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from medfl.core.errors import InputError
from medfl.datasets import own, sections
from medfl.datasets.readers.matching import match
from medfl.datasets.readers.pairs import mask_index, matched
from medfl.datasets.readers.volumes import volume_paths

PAIRED = {
    "patients": (
        ["p1/t1", "p2/t1"],
        ["p2/t1", "p1/t1_mask"],
        {"p1/t1": "p1/t1_mask", "p2/t1": "p2/t1"},
    ),
    "called mask": (
        ["p1/image", "p2/image"],
        ["p1/mask", "p2/Segmentation"],
        {"p1/image": "p1/mask"},
    ),
    "flat masks": (["p1/a", "p2/b"], ["a_mask", "b_SEG"], {"a": "a_mask", "b": "b_SEG"}),
    "other words": (
        ["a", "b", "c"],
        ["a_gt", "b-mask", "c_groundtruth"],
        {"a": "a_gt", "b": "b-mask", "c": "c_groundtruth"},
    ),
    "look-alikes": (["a\u200b/x", "\uff42"], ["a/x", "b_mask"], {"x": "a/x", "\uff42": "b_mask"}),
    "folders of other names": (["part1/a", "part2/b"], ["x/a", "x/b"], {"a": "x/a", "b": "x/b"}),
    "images that end so": (
        ["a_seg", "b_seg"],
        ["a_seg", "b_seg_mask"],
        {"a_seg": "a_seg", "b_seg": "b_seg_mask"},
    ),
    "a name of several": (
        ["a", "p1/a", "p1/b"],
        ["a", "p1/a", "p1/b"],
        {"a": "a", "p1/a": "p1/a", "b": "p1/b"},
    ),
}


@pytest.mark.parametrize("name", PAIRED)
def test_a_mask_finds_its_image(name: str) -> None:
    images, masks, expected = PAIRED[name]
    shown, found = match(
        [(path, f"i:{path}") for path in images], [(path, f"m:{path}") for path in masks]
    )
    assert len(found) == len(images)
    assert found.keys() == shown.keys()
    assert {key: found[key] for key in expected} == {
        key: f"m:{path}" for key, path in expected.items()
    }


def test_a_mask_of_one_patient_is_never_anothers() -> None:
    shown, found = match(
        [(f"p{n}/t1", f"i{n}") for n in (1, 2, 3)], [(f"p{n}/t1", f"m{n}") for n in (2, 3, 4)]
    )
    assert {shown[name]: found[name] for name in shown.keys() & found.keys()} == {
        "i2": "m2",
        "i3": "m3",
    }
    shown, found = match(
        [("p1/t1", "i1"), ("p2/flair", "i2")], [("p1/t1", "m1"), ("p3/flair", "m3")]
    )
    assert shown.keys() & found.keys() == {
        "t1"
    }  # flair is the name of one image, but p1 says that folders count


@pytest.mark.parametrize(
    ("images", "masks", "told"),
    [
        (["p1/a", "p2/a"], ["a"], r"mask m:a fits the images i:p1/a and i:p2/a;"),
        (
            ["p1/t1", "p1/t2", "p1/t3"],
            ["p1/mask"],
            r"m:p1/mask fits the images i:p1/t1 and i:p1/t2 and 1 more;",
        ),
        (["a", "a"], ["a"], r"mask m:a fits the images i:a and i:a;"),
        (["a"], ["a", "a_mask"], r"masks m:a and m:a_mask are both the mask of image i:a;"),
    ],
)
def test_what_fits_twice_is_refused_with_both_files(
    images: list[str], masks: list[str], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        match([(path, f"i:{path}") for path in images], [(path, f"m:{path}") for path in masks])


def picture(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(path)


def test_pictures_in_a_folder_a_patient_keep_their_masks(tmp_path: Path) -> None:
    for number in range(20):
        picture(tmp_path / "images" / f"p{number}" / "image.png")
        if number != 3:
            picture(tmp_path / "masks" / f"p{number}" / "image.png")
    found = own.with_masks(tmp_path, "images", "masks").records
    assert len(found) == len({record.id for record in found}) == 19
    assert all(Path(record.image).parent.name == Path(record.mask).parent.name for record in found)
    lines = [
        f"images/p{n}/image.png,{n % 4},{('train', 'validate', 'test')[n % 3]}" for n in range(20)
    ]
    (tmp_path / "cases.csv").write_text("\n".join(["file,patient,section", *lines]) + "\n")
    items = own.paired(tmp_path, "images", "masks", "validate")
    assert [(item["id"], item["group"]) for item in items] == [
        (f"p{n}/image", str(n % 4)) for n in (1, 10, 13, 16, 19, 4, 7)
    ]


def test_volumes_in_a_folder_a_patient_keep_their_masks(tmp_path: Path) -> None:
    for number in range(3):
        for folder, name in (("images", "image"), ("labels", "mask")):
            path = tmp_path / folder / f"p{number}" / f"{name}.nii.gz"
            path.parent.mkdir(parents=True)
            nib.save(nib.Nifti1Image(np.full((2, 2, 2), number, np.uint8), np.eye(4)), path)
    (tmp_path / "images" / "p1" / "image.json").write_text(
        "{}"
    )  # beside NIfTI files no DICOM series
    (tmp_path / "images" / "series").mkdir()
    (tmp_path / "images" / "series" / "1").write_text("")
    assert [name for name, _ in volume_paths(tmp_path / "images")] == [
        "p0/image",
        "p1/image",
        "p2/image",
        "series",
    ]
    found = own.with_masks(tmp_path, "images", "labels").records
    assert [(record.id, Path(record.mask).parent.name) for record in found] == [
        (f"p{number}/image", f"p{number}") for number in range(3)
    ]


def test_archives_count_from_their_own_folder(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    for kind, ending in (("images", ""), ("masks", "_mask")):
        with zipfile.ZipFile(tmp_path / f"{kind}.zip", "w") as file:
            for number in range(2):
                file.write(tmp_path / "a.png", f"{kind}/p{number}/scan{ending}.png")
    shown, masks = matched(tmp_path / "images.zip", tmp_path / "masks.zip")
    assert shown.keys() == masks.keys() == {"p0/scan", "p1/scan"}


def test_two_masks_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a", "a_mask"):
        picture(tmp_path / "masks" / f"{name}.png")
    with pytest.raises(
        InputError, match=r"masks \S+/a\.png and \S+/a_mask\.png are both of image a;"
    ):
        mask_index([tmp_path / "masks"])


def test_a_row_of_the_table_is_one_images(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(2):
            picture(tmp_path / name / f"{number}.png")
    (tmp_path / "cases.csv").write_text("file,patient\n0.png,x\n1.png,y\n")
    with pytest.raises(
        InputError, match=r"row 0\.png fits the images a/0\.png and b/0\.png; .*paths"
    ):
        own.labelled(tmp_path, ("a", "b"), "train")
    (tmp_path / "cases.csv").write_text("file,patient\na/0.png,x\na/0.png,y\n")
    with pytest.raises(InputError, match=r"two rows for a/0\.png"):
        own.labelled(tmp_path, ("a", "b"), "train")


def test_masks_in_the_folder_of_the_images_are_told(tmp_path: Path) -> None:
    for number in range(7):
        picture(tmp_path / "images" / f"c{number}_mask.png")
        picture(tmp_path / "masks" / f"c{number}.png")
    with pytest.raises(
        InputError, match=r"c4\.png has no image and 2 more masks; .*swap the two folders"
    ):
        own.with_masks(tmp_path, "images", "masks")


def test_why_masks_have_no_image_is_said(tmp_path: Path) -> None:
    for number in range(3):
        picture(tmp_path / "images" / f"C{number}.png")
        picture(tmp_path / "masks" / f"c{number}.png")
        for structure in ("liver", "spleen"):
            picture(tmp_path / "by ending" / f"C{number}_{structure}.png")
            picture(tmp_path / "by folder" / structure / f"C{number}.png")

    with pytest.raises(InputError, match=r"c0\.png has no image .* in the same capitals;"):
        own.with_masks(tmp_path, "images", "masks")
    for masks in ("by ending", "by folder"):
        with pytest.raises(
            InputError, match=r"merge the masks of an image into one, with the values 1, 2, …"
        ):
            own.with_masks(tmp_path, "images", masks)


@pytest.mark.parametrize("name", ["lung_cxr", "skin_lesion"])
def test_folders_of_pairs_of_a_data_set_keep_patients_apart(name: str, tmp_path: Path) -> None:
    for number in range(12):
        picture(tmp_path / "images" / f"p{number}" / "scan.png")
        picture(tmp_path / "masks" / f"p{number}" / "scan_mask.png")
    found = [item for items in sections(name, tmp_path).values() for item in items]
    assert len(found) == 12
    assert all(
        Path(item["image"]).parent.name == Path(str(item["label"])).parent.name for item in found
    )
    for number in range(7):
        picture(tmp_path / "masks" / f"odd{number}" / "scan.png")
    (tmp_path / "images" / "p0" / "scan.png").unlink()
    (tmp_path / "seen").mkdir()  # the folder is read again when its direct contents change
    with pytest.raises(
        InputError,
        match=r"odd3/scan\.png has no image \| .*odd4/scan\.png has no image and 3 more problems;",
    ):
        sections(name, tmp_path)


def test_masks_that_match_by_look_alikes_alone_are_said(tmp_path: Path) -> None:
    for number in range(3):
        picture(tmp_path / "images" / f"p{number}.png")
        picture(tmp_path / "masks" / f"p\u200b{number}_mask.png")
    picture(tmp_path / "images" / "q.png")
    picture(tmp_path / "masks" / "q_mask.png")
    found = own.with_masks(tmp_path, "images", "masks")
    assert len(found.records) == 4
    (note,) = found.notes
    assert note.startswith("3 names of masks differ")
    assert note.endswith(r"'p0' and 'p\u200b0_mask.png'")
