"""Folders as others leave them: tables of labels, masks beside images, nnU-Net's names and BIDS."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image

from medfl.bundle.bundle import Bundle
from medfl.bundle.open import check_folder
from medfl.cli import main as medfl
from medfl.core.errors import InputError
from medfl.datasets import own
from medfl.datasets.own import listed, paired
from medfl.datasets.readers import conventions, label_columns
from medfl.datasets.readers.volumes import read_pair, read_volume
from medfl.starter import starter

SECTIONS = ("train", "validate", "test")
DRAWS = np.random.default_rng(0)


def picture(path: Path, pixels: np.ndarray | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shown = DRAWS.integers(0, 255, (8, 8)).astype(np.uint8) if pixels is None else pixels
    Image.fromarray(shown).save(path, format="PNG")
    return path


def mask(path: Path) -> Path:
    return picture(path, np.eye(8, dtype=np.uint8))


def volume(path: Path, values: int = 0, affine: float = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    voxels = DRAWS.normal(0, 1, (16, 16, 16)).astype(np.float32)
    if values:
        voxels = (np.arange(16**3).reshape(16, 16, 16) % values).astype(np.uint8)
    nib.save(nib.Nifti1Image(voxels, np.diag([affine, 1, 1, 1])), path)
    return path


# Tables of labels

TABLES = {
    "label": ("image,label", "{stem},{name}", "'image'.*'label'"),
    "diagnosis before label": ("isic_id,label,dx", "{file},7,{name}", "'isic_id'.*'dx'"),
    "semicolons": ("file;class", "{file};{name}", "'file'.*'class'"),
    "tabs and capitals": ("ID\tClass", "{stem}\t{name}", "'ID'.*'Class'"),
    "one-hot": ("image,A,B b", "{stem},{a:.1f},{b:.1f}", "'image'.*columns A, B b"),
    "a column of files that names none": (
        "file,image_id,label",
        "elsewhere,{stem},{name}",
        "'image_id'",
    ),
}


@pytest.mark.parametrize("form", TABLES)
def test_a_table_names_the_classes(form: str, tmp_path: Path) -> None:
    head, row, told = TABLES[form]
    for number in range(20):
        picture(tmp_path / "images" / f"Bild {number:02d} ü.PNG")
    rows = [
        row.format(
            stem=f"Bild {n:02d} ü",
            file=f"Bild {n:02d} ü.png",
            name=("A", "B b")[n % 2],
            a=1 - n % 2,
            b=n % 2,
        )
        for n in range(20)
    ]
    (tmp_path / "t.csv").write_text("\n".join([head, *rows]) + "\n")
    if form == "diagnosis before label":  # .png of the table is .PNG of the file
        assert label_columns.read(tmp_path / "t.csv", ["Bild 00 ü.PNG"]).classes == {
            "Bild 00 ü.PNG": "A"
        }
    seen = starter.survey(tmp_path / "images", labels=tmp_path / "t.csv")
    assert (seen.classes, seen.counts, seen.images, seen.labels) == (
        ("A", "B b"),
        (10, 10),
        "images",
        "t.csv",
    )
    found = label_columns.read(tmp_path / "t.csv", [f"Bild {n:02d} ü.PNG" for n in range(20)])
    assert re.search(told, found.columns)
    items = [
        item
        for section in SECTIONS
        for item in listed(tmp_path, "images", "t.csv", seen.classes, section)
    ]
    assert {item["id"]: item["label"] for item in items} == {
        f"Bild {n:02d} ü.PNG": n % 2 for n in range(20)
    }


@pytest.mark.parametrize(
    ("written", "classes", "said"),
    [
        (("1", "1.0", "2", "02"), ("1", "2"), "one class, '1': '1' and '1.0'"),
        (("0", "00", "1", "x"), ("0", "1", "x"), "one class, '0': '0' and '00'"),
        (("01", "02", "01", "02"), ("01", "02"), ""),
        (
            ("None", "NA", "n/a", "nan"),
            ("NA", "None", "n/a", "nan"),
            "taken as names of classes: 'NA', 'None'",
        ),
        (("null", "a", "null", "a"), ("a", "null"), "only an empty cell says no class"),
    ],
)
def test_classes_called_by_numbers_and_by_nothing(
    written: tuple[str, ...], classes: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    for number in range(12):
        picture(tmp_path / f"{number}.png")
    lines = [f"{number}.png,{written[number % 4]}" for number in range(12)]
    (tmp_path / "t.csv").write_text("\n".join(["file,label", *lines]) + "\n")
    seen = starter.survey(tmp_path, labels=tmp_path / "t.csv")
    assert seen.classes == classes
    assert sum(seen.counts) == 12
    assert said in " ".join(seen.notes)
    other = [re.sub(r",0?1$", ",1.00", line) for line in lines]
    (tmp_path / "t.csv").write_text("\n".join(["file,label", *other]) + "\n")
    assert len(listed(tmp_path, ".", "t.csv", classes, "train")) > 3


@pytest.mark.parametrize("spelled", ["{:d}", "{:d}.0", "{:02d}"])
def test_a_number_that_lost_its_zeros_finds_its_image(spelled: str, tmp_path: Path) -> None:
    for number in range(8, 20):
        picture(tmp_path / "p" / f"{number:04d}.png")
    lines = [f"{spelled.format(number)},{'ab'[number % 2]}" for number in range(8, 20)]
    (tmp_path / "t.csv").write_text("\n".join(["id,label", *lines]) + "\n")
    seen = starter.survey(tmp_path / "p", labels=tmp_path / "t.csv")
    assert seen.counts == (6, 6)
    assert "12 names of images differ from the table's in zeros" in " ".join(seen.notes)
    labels = label_columns.read(tmp_path / "t.csv", [f"{n:04d}.png" for n in range(8, 20)]).classes
    assert all(name == "ab"[int(image[:4]) % 2] for image, name in labels.items())
    picture(tmp_path / "p" / "012.png")
    with pytest.raises(
        InputError, match=r"'12\S*' in column 'id' has lost its zeros and fits 0012.png, 012.png"
    ):
        starter.survey(tmp_path / "p", labels=tmp_path / "t.csv")


def test_a_running_number_is_no_name_where_another_column_has_the_names(tmp_path: Path) -> None:
    images = [f"{number:04d}.png" for number in range(6)]
    lines = [f"{number},{5 - number:04d}.png,{'ab'[number % 2]}" for number in range(6)]
    (tmp_path / "t.csv").write_text("\n".join(["id,name,label", *lines]) + "\n")
    assert label_columns.read(tmp_path / "t.csv", images).classes["0005.png"] == "a"


def test_cases_that_lost_their_zeros_are_refused_with_the_cause(tmp_path: Path) -> None:
    for name in "ab":
        for number in range(6):
            picture(tmp_path / name / f"{name}{number}.png")
    picture(tmp_path / "a" / "007.png")
    lines = [f"{name}{number}.png,p" for name in "ab" for number in range(6)]
    (tmp_path / "cases.csv").write_text("\n".join(["file,patient", *lines, "7,q"]) + "\n")
    with pytest.raises(InputError, match=r"no row for image a/007\.png; .*'7' has lost the zeros"):
        starter.survey(tmp_path)


def decomposed(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def test_names_are_compared_in_composed_characters(tmp_path: Path) -> None:
    """Files as a Mac writes them, a table and masks as others do, and the other way around."""
    for number in range(6):
        picture(tmp_path / "p" / decomposed(f"Müller é{number}.png"))
        mask(tmp_path / "m" / f"Müller é{number}.png")
    lines = [f"Müller é{number}.png,{'ab'[number % 2]}" for number in range(6)]
    for form in (str, decomposed):
        (tmp_path / "t.csv").write_text(form("\n".join(["file,label", *lines]) + "\n"))
        assert starter.survey(tmp_path / "p", labels=tmp_path / "t.csv").counts == (3, 3)
    assert starter.survey(tmp_path / "p", tmp_path / "m").counts == (6, 6)
    items = [item for section in SECTIONS for item in paired(tmp_path, "p", "m", section)]
    assert {item["id"] for item in items} == {f"Müller é{number}" for number in range(6)}


def test_folders_of_classes_are_compared_in_composed_characters(tmp_path: Path) -> None:
    for name in ("gutartig é", "bösartig"):
        for number in range(6):
            picture(tmp_path / decomposed(name) / f"{number}.png")
    assert starter.survey(tmp_path).classes == ("bösartig", "gutartig é")
    for classes in (["bösartig", "gutartig é"], [decomposed("bösartig"), "gutartig é"]):
        assert len(own.labelled(tmp_path, classes, "train")) > 3
    picture(tmp_path / "bösartig" / "9.png")
    with pytest.raises(InputError, match=r"b\\xf6sartig' and '\S*/bo\\u0308sartig' have one name"):
        own.labelled(tmp_path, ["bösartig", "gutartig é"], "train")


def test_two_files_of_one_name_are_shown_as_they_differ(tmp_path: Path) -> None:
    picture(tmp_path / "p" / "é.png")
    picture(tmp_path / "p" / decomposed("é.png"))
    with pytest.raises(InputError, match=r"/\\xe9\.png' and '\S*/e\\u0301\.png' have one name"):
        starter.survey(tmp_path / "p", labels=picture(tmp_path / "t.csv"))


def test_classes_that_differ_in_case_only_are_told(tmp_path: Path) -> None:
    names = ["Benign", "benign", "nevus", "MEL", "mel", "Mel"]
    (tmp_path / "t.csv").write_text(
        "\n".join(["file,label", *(f"{n}.png,{name}" for n, name in enumerate(names))])
    )
    found = label_columns.read(tmp_path / "t.csv", [f"{n}.png" for n in range(6)])
    assert found.notes == (
        "names that may say the same: 'Benign' and 'benign'; 'MEL' and 'Mel' and 'mel'; "
        "they count as different",
    )
    different = label_columns.read(tmp_path / "t.csv", ["0.png", "2.png", "3.png"])
    assert not any("say the same" in note for note in different.notes)


def test_what_lacks_an_image_or_a_class_is_listed(tmp_path: Path) -> None:
    for number in range(12):
        picture(tmp_path / f"{number}.png")
    rows = [f"{n},{'ab'[n % 2]},p{n // 2}" for n in range(9)]
    (tmp_path / "t.csv").write_text(
        "\n".join(["image,label,patient", *rows, "9,", "99,a,p9"]) + "\n"
    )
    seen = starter.survey(tmp_path, labels=tmp_path / "t.csv")
    assert seen.images == "."
    assert seen.patients == 5
    assert [note for note in seen.notes if "left out" in note] == [
        "2 images of the folder are not in the table: left out, 10.png | 11.png",
        "1 images have no class in the table: left out, 9.png",
        "1 rows of the table have no image: left out, 99",
    ]
    patients = [
        {i["group"] for i in listed(tmp_path, ".", "t.csv", "ab", section)} for section in SECTIONS
    ]
    assert sum(map(len, patients)) == len(set.union(*patients)) == 5


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("image,age\n1,3\n", "has no column of classes, findings or numbers; it has image, age"),
        ("image,label\nx,a\n", "names none of the 4 images in a column 'image'"),
        (
            "what,label\n1,a\n",
            "column of files; .*; it has what, label; name the column with --file-column",
        ),
        ("image,label\n1,a\n1,b\n", "has two rows for 1.png"),
        ("image,label\n1,a\n2,a\n", "names 1 classes: a; at least 2"),
        ("image,label\n1,a\n2,b#\n", "class 'b#'"),
        ("", "names none of the 4 images"),
    ],
)
def test_a_wrong_table_of_labels_is_refused(text: str, told: str, tmp_path: Path) -> None:
    for number in range(4):
        picture(tmp_path / "images" / f"{number}.png")
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InputError, match=told):
        starter.survey(tmp_path / "images", labels=tmp_path / "t.csv")


def test_columns_have_the_names_that_are_given(tmp_path: Path) -> None:
    """The bundle keeps them, for the folders of other sites; a wrong name lists the columns and the flag."""
    lines = ["picture no,kind,who,where,label"]
    for number in range(12):
        picture(tmp_path / "i" / f"{number}.png")
        lines.append(f"{number},{'ab'[number % 2]},p{number // 2},{'NS'[number % 2]},unused")

    (tmp_path / "i" / "t.csv").write_text("\n".join(lines) + "\n")
    words = ["--images", str(tmp_path / "i"), "--labels", str(tmp_path / "i/t.csv")]
    words += ["--file-column", "Picture_No", "--label-column", "kind"]
    words += ["--patient-column", "who", "--centre-column", "where"]
    assert medfl(["new", str(tmp_path / "own"), *words]) == 0

    opened = Bundle(str(tmp_path / "own"), {"dataset_dir": str(tmp_path / "i")})
    items = opened.items("train")
    rows = [line.split(",") for line in lines[1:]]
    expected = {f"{row[0]}.png": ("ab".index(row[1]), row[2], row[3]) for row in rows}
    assert items
    for item in items:
        assert (item["label"], item["group"], item["centre"]) == expected[item["id"]]

    report = check_folder(tmp_path / "own", tmp_path / "i")
    assert report.ok
    assert any("6 patients" in note for note in report.notes)


@pytest.mark.parametrize("role", ["file", "patient", "centre", "label"])
def test_a_column_that_is_not_there_is_named_with_its_flag(
    role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(4):
        picture(tmp_path / "i" / f"{number}.png")
    (tmp_path / "t.csv").write_text("image,label\n0,a\n1,b\n2,a\n3,b\n")
    words = ["--images", str(tmp_path / "i"), "--labels", str(tmp_path / "t.csv")]
    assert medfl(["new", str(tmp_path / "own"), *words, f"--{role}-column", "zzz"]) == 2
    assert f"no column 'zzz'; it has image, label; give one of them with --{role}-column" in (
        capsys.readouterr().err
    )
    assert not (tmp_path / "own").exists()


def test_another_site_has_no_other_classes(tmp_path: Path) -> None:
    for number in range(4):
        picture(tmp_path / f"{number}.png")
    (tmp_path / "t.csv").write_text("image,label\n0,a\n1,b\n2,c\n3,a\n")
    with pytest.raises(InputError, match=r"has the class 'c'; the classes a, b"):
        listed(tmp_path, ".", "t.csv", ("a", "b"), "train")


# Masks beside images


@pytest.mark.parametrize("ending", ["_mask", "_seg", "_LABEL", "_segmentation"])
@pytest.mark.parametrize("patients", [False, True])
def test_masks_beside_images_are_told_by_their_endings(
    ending: str, patients: bool, tmp_path: Path
) -> None:
    for number in range(10):
        place = tmp_path / f"p{number}" if patients else tmp_path
        picture(place / f"x{number}.png")
        mask(place / f"x{number}{ending}.png")
    seen = starter.survey(tmp_path)
    assert (seen.kind, seen.images, seen.masks, seen.counts) == ("pictures", ".", ".", (10, 10))
    assert f"end in {ending} are masks" in seen.said[0]
    items = [item for section in SECTIONS for item in paired(tmp_path, ".", ".", section)]
    assert all(
        str(item["label"]) == str(item["image"]).replace(".png", f"{ending}.png") for item in items
    )
    assert len(items) == 10


def test_volumes_and_masks_in_one_folder(tmp_path: Path) -> None:
    for number in range(4):
        volume(tmp_path / f"c{number}.nii.gz")
        volume(tmp_path / f"c{number}_seg.nii.gz", 3)
    volume(tmp_path / "lone.nii.gz")
    seen = starter.survey(tmp_path)
    assert (seen.kind, seen.counts) == ("volumes", (4, 4, 4))
    assert seen.notes == ("1 images without a mask: left out, first lone.nii.gz",)


def test_volumes_of_several_files_a_mask_are_told_what_to_be_called(tmp_path: Path) -> None:
    for number in range(2):
        for kind in ("t1", "flair", "seg"):
            volume(tmp_path / f"B{number}" / f"B{number}_{kind}.nii.gz", 2)
    with pytest.raises(
        InputError,
        match="has volumes whose masks are not found by their names; .*NAME_0000, NAME_0001",
    ):
        starter.survey(tmp_path)


def test_endings_in_upper_case_are_endings(tmp_path: Path) -> None:
    for number in range(3):
        volume(tmp_path / "images" / f"H{number}.nii.gz").rename(
            tmp_path / "images" / f"H{number}.NII.GZ"
        )
        volume(tmp_path / "masks" / f"H{number}.nii.gz", 2).rename(
            tmp_path / "masks" / f"H{number}.NII.GZ"
        )
    lines = [f"H{number}.NII.GZ,p{number}" for number in range(3)]
    (tmp_path / "cases.csv").write_text("\n".join(["file,patient", *lines]) + "\n")
    assert starter.survey(tmp_path / "images", tmp_path / "masks").patients == 3


def test_pictures_that_are_the_same_are_said(tmp_path: Path) -> None:
    for number in range(6):
        picture(tmp_path / "ab"[number % 2] / f"{number}.png")
    assert not any("the same" in note for note in starter.survey(tmp_path).notes)
    (tmp_path / "b" / "copy of 0.png").write_bytes((tmp_path / "a" / "0.png").read_bytes())
    (note,) = (note for note in starter.survey(tmp_path).notes if "the same" in note)
    assert note == (
        "images that are the same as another: 1, 1 of another class; first a/0.png and b/copy of 0.png: "
        "keep one, or name one patient"
    )


# nnU-Net


def nnunet(root: Path, channels: int = 1, **document: Any) -> Path:
    for number in range(4):
        for channel in range(channels):
            volume(root / "imagesTr" / f"c_{number:03d}_{channel:04d}.nii.gz")
        volume(root / "labelsTr" / f"c_{number:03d}.nii.gz", 3)
    if document:
        (root / "dataset.json").write_text(json.dumps(document))
    return root


@pytest.mark.parametrize(
    "labels",
    [{"background": 0, "organ": 1, "tumour": 2}, {"0": "background", "1": "organ", "2": "tumour"}],
)
def test_the_layout_of_nnunet_is_read_with_its_names(labels: dict, tmp_path: Path) -> None:
    nnunet(tmp_path, labels=labels, file_ending=".nii.gz")
    (tmp_path / "imagesTs").mkdir()
    for seen in (
        starter.survey(tmp_path),
        starter.survey(tmp_path / "imagesTr", tmp_path / "labelsTr"),
    ):
        assert (seen.images, seen.masks, seen.classes) == (
            "imagesTr",
            "labelsTr",
            ("background", "organ", "tumour"),
        )
    assert "imagesTs is left out" in starter.survey(tmp_path).said[0]
    assert [
        item["id"]
        for section in SECTIONS
        for item in paired(tmp_path, "imagesTr", "labelsTr", section)
    ]


def test_channels_of_nnunet_are_one_image(tmp_path: Path) -> None:
    seen = starter.survey(nnunet(tmp_path, 2))
    assert (seen.channels, seen.counts) == (2, (4, 4, 4))
    items = [
        item for section in SECTIONS for item in paired(tmp_path, "imagesTr", "labelsTr", section)
    ]
    assert len(items) == 4
    files = items[0]["image"].split(" | ")
    image, labels = read_pair(items[0]["image"], str(items[0]["label"]), 3)
    assert image.shape == (2, 16, 16, 16)
    assert labels.shape == (1, 16, 16, 16)
    assert all((image[k] == read_volume(file)[0]).all() for k, file in enumerate(files))
    assert tuple(image.meta["spatial_shape"]) == (16, 16, 16)
    volume(Path(files[1]), affine=2)
    with pytest.raises(
        InputError, match=r"channel \S+0000\.nii\.gz has the affine .*, channel \S+0001\.nii\.gz"
    ):
        read_volume(items[0]["image"])
    Path(files[1]).unlink()
    with pytest.raises(
        InputError, match="has no channel 0001, which others have; .* --site-channels"
    ):
        starter.survey(tmp_path)
    items = [
        item for section in SECTIONS for item in paired(tmp_path, "imagesTr", "labelsTr", section)
    ]
    assert sorted(len(item["image"].split(" | ")) for item in items) == [
        1,
        2,
        2,
        2,
    ]  # a run asks for the other


@pytest.mark.parametrize(
    "labels",
    [
        {"background": 0, "whole": [1, 2]},
        {"a": 1, "b": 2},
        {},
        [],
        {"0": "a", "1": "a"},
        {"a": 0, "b\u0007": 1},
        5,
    ],
)
def test_names_that_are_none_are_refused(labels: Any, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": labels}))
    with pytest.raises(InputError, match=r"dataset\.json"):
        conventions.mask_labels(tmp_path / "dataset.json")


def test_pixels_that_nnunet_ignores_are_no_class(tmp_path: Path) -> None:
    """Nobody has labelled them: refused by name where masks have them, and no class where none has."""
    labels = {"background": 0, "organ": 1, "ignore": 2}
    nnunet(tmp_path / "with", labels=labels)
    for names in ((), ("organ", "other")):
        with pytest.raises(InputError, match=r"4 of 4 masks have the value 2, .* calls 'ignore'"):
            starter.survey(tmp_path / "with", names=names)
    nnunet(tmp_path / "without", labels={"background": 0, "organ": 1, "rest": 2, "ignore": 3})
    assert starter.survey(tmp_path / "without").classes == ("background", "organ", "rest")


@pytest.mark.parametrize("name", ["Ignore", "IGNORE"])
def test_ignore_in_other_letters_is_no_class_either(name: str, tmp_path: Path) -> None:
    nnunet(tmp_path, labels={"background": 0, "organ": 1, name: 2})
    with pytest.raises(InputError, match=r"4 of 4 masks have the value 2, .* calls 'ignore'"):
        starter.survey(tmp_path)


def test_regions_of_one_value_are_classes(tmp_path: Path) -> None:
    """They were called regions of several values."""
    nnunet(tmp_path, labels={"background": 0, "organ": [1], "tumour": [2]})
    assert starter.survey(tmp_path).classes == ("background", "organ", "tumour")


def test_channels_that_images_lack_are_said(tmp_path: Path) -> None:
    names = {"0": "T1", "1": "T2"}
    nnunet(tmp_path, labels={"background": 0, "a": 1, "b": 2}, channel_names=names)
    said = "dataset.json names the channels T1, T2, images have 1"
    assert said in starter.survey(tmp_path).notes


@pytest.mark.parametrize("stated", [4, 50])
def test_cases_that_nnunet_misses_are_said(stated: int, tmp_path: Path) -> None:
    """A copy that stopped half-way: nnU-Net's own check of a data set refuses another number."""
    labels = {"background": 0, "a": 1, "b": 2}
    nnunet(tmp_path, labels=labels, numTraining=stated, channel_names=["CT"])
    seen = starter.survey(tmp_path)
    said = "dataset.json has numTraining 50, and 4 images have masks"
    assert (said in seen.notes) == (stated != 4)
    assert seen.channel_titles == ("CT",)


def test_an_ending_that_no_file_has_is_told(tmp_path: Path) -> None:
    nnunet(tmp_path, labels={"background": 0, "a": 1, "b": 2}, file_ending=".nrrd")
    with pytest.raises(
        InputError, match=r"files end in \.gz, not in \.nrrd as dataset\.json has it"
    ):
        starter.survey(tmp_path)


def test_a_byte_order_mark_is_no_invisible_character(tmp_path: Path) -> None:
    """Windows' editors write one before a JSON document."""
    nnunet(tmp_path)
    labels = {"labels": {"background": 0, "organ": 1, "tumour": 2}}
    (tmp_path / "dataset.json").write_text(json.dumps(labels), encoding="utf-8-sig")
    assert starter.survey(tmp_path).classes == ("background", "organ", "tumour")


def test_files_that_nnunet_lists_are_read_wherever_they_lie(tmp_path: Path) -> None:
    """Its key `dataset`: the channels and the mask of each case, in any folders; others are left out."""
    root = tmp_path / "d"
    cases = {}
    for number in range(6):
        for name in ("t1/a", "deep/t2/b", "masks/c"):
            volume(root / f"{name}{number}.nii.gz", 2 * (name == "masks/c"))
        images = [f"t1/a{number}.nii.gz", f"./deep/t2/b{number}.nii.gz"]
        cases[f"case {number}"] = {"images": images, "label": f"masks/c{number}.nii.gz"}
    del cases["case 5"]
    document = {"labels": {"background": 0, "organ": 1}, "channel_names": {"0": "T1", "1": "T2"}}
    (root / "dataset.json").write_text(json.dumps({**document, "dataset": cases}))
    seen = starter.survey(root)
    assert (seen.channels, seen.counts, seen.classes) == (2, (5, 5), ("background", "organ"))
    assert seen.channel_titles == ("T1", "T2")
    assert "3 images without a mask: left out, first deep/t2/b5.nii.gz" in seen.notes
    bundle = starter.write(tmp_path / "bundle", seen)
    report = check_folder(str(bundle), root)
    assert (report.problems, report.images) == ((), 5)
    opened = Bundle(str(bundle), {"dataset_dir": str(root)})
    found = [item for section in SECTIONS for item in opened.data(section)]
    assert sorted(item["id"] for item in found) == sorted(cases)
    for item in found:
        image, mask = read_pair(item["image"], item["label"], 2)
        for channel, path in zip(image, cases[item["id"]]["images"], strict=True):
            assert np.array_equal(
                channel.numpy(), nib.load(root / path).get_fdata(dtype=np.float32)
            )
        expected = np.asanyarray(nib.load(root / cases[item["id"]]["label"]).dataobj)
        assert np.array_equal(mask[0].numpy(), expected)


@pytest.mark.parametrize(
    ("cases", "told"),
    [
        ({"c": 5}, "case 'c' of dataset"),
        ({"c": {"images": "a.nii", "label": "b.nii"}}, "case 'c' of dataset"),
        ({"c": {"images": [], "label": "b.nii"}}, "case 'c' of dataset"),
        ({"c": {"images": ["a.nii | /b.nii"], "label": "b.nii"}}, "case 'c' of dataset"),
        (
            {"c": {"images": ["../a.nii"], "label": "b.nii"}},
            "looked for in '../a.nii'; a place below",
        ),
        ({"c": {"images": ["a.nii"], "label": "/etc/b.nii"}}, "looked for in '/etc/b.nii'"),
        ({"c": {"images": ["a.nii"], "label": "b.nii"}}, "a.nii cannot be read"),
    ],
)
def test_a_list_of_nnunet_that_leads_nowhere_or_elsewhere_is_refused(
    cases: Any, told: str, tmp_path: Path
) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {}, "dataset": cases}))
    with pytest.raises(InputError, match=re.escape(told)):
        starter.survey(tmp_path, names=["organ"])
    for other in ({"dataset": "mine"}, {"dataset": cases}, {"labels": {}, "dataset": [1]}):
        (tmp_path / "dataset.json").write_text(json.dumps(other))
        assert conventions.listed_files(tmp_path / "dataset.json") == {}


def test_files_of_nnunet_end_as_it_says(tmp_path: Path) -> None:
    """Other files beside them are left out, as previews or the same volumes in another format; unknown ones refused."""
    nnunet(tmp_path, labels={"background": 0, "a": 1, "b": 2}, file_ending=".nii.gz")
    for path in [*tmp_path.glob("*/*.nii.gz")]:
        nib.save(nib.load(path), str(path).removesuffix(".gz"))
        picture(path.with_suffix(".png"))
    seen = starter.survey(tmp_path)
    assert (seen.kind, seen.counts) == ("volumes", (4, 4, 4))
    items = [i for section in SECTIONS for i in paired(tmp_path, "imagesTr", "labelsTr", section)]
    assert all(item["image"].endswith(".nii.gz") for item in items)
    document = json.loads((tmp_path / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({**document, "file_ending": ".npy"}))
    with pytest.raises(
        InputError, match=r"dataset\.json: file_ending '\.npy'; files that end in \.nii"
    ):
        starter.survey(tmp_path)


@pytest.mark.parametrize(
    ("channels", "otherwise"),
    [
        ({"channel_names": {"0": "CT", "1": "PET"}}, "CT, PET"),
        ({"channel_names": {"0": "CT", "1": "CT"}}, "CT, CT"),
        ({"channel_names": {"1": "noNorm", "0": "T1"}}, "T1, noNorm"),
        ({"modality": {"0": "T2", "1": "ADC"}}, ""),
        ({"modality": {"0": "nonorm", "1": "noNorm"}}, ""),
        ({"modality": {"0": "rescale_to_0_1", "1": "rescale_0_1"}}, ""),
    ],
)
def test_channels_are_called_as_nnunet_does_and_said_where_it_normalises_by_them(
    channels: dict[str, Any], otherwise: str, tmp_path: Path
) -> None:
    nnunet(tmp_path / "d", 2, labels={"background": 0, "a": 1, "b": 2}, **channels)
    seen = starter.survey(tmp_path / "d")
    (names,) = channels.values()
    bundle = starter.write(tmp_path / "b", seen)
    described = json.loads((bundle / "configs" / "metadata.json").read_text())
    assert described["network_data_format"]["inputs"]["image"]["channel_def"] == names
    notes = [note for note in seen.notes if note.startswith("nnU-Net normalises")]
    assert [otherwise in note for note in notes] == [True] * bool(otherwise)
    (image, *_) = (read_volume(str(p)) for p in sorted((tmp_path / "d" / "imagesTr").iterdir()))
    steps = (
        Bundle(str(bundle), {"dataset_dir": str(tmp_path / "d")})
        .get("validate#preprocessing")
        .transforms
    )
    (step,) = [s for s in steps if "Intensity" in type(s).__name__] or [lambda data: data]
    scaled = step({"image": torch.cat([image, 3 * image])})["image"].numpy()
    voxels = np.concatenate([image.numpy(), 3 * image.numpy()])
    if "nonorm" in names.values():
        expected = voxels
    elif "rescale_0_1" in names.values():
        low, high = voxels.min((1, 2, 3), keepdims=True), voxels.max((1, 2, 3), keepdims=True)
        expected = (voxels - low) / (high - low)
    else:
        expected = (voxels - voxels.mean()) / voxels.std()
    np.testing.assert_allclose(scaled, expected, atol=1e-4)


@pytest.mark.parametrize(
    "labels",
    [
        {"background": 0, "whole": [1, 2], "core": 2},
        {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3},
        {"background": [0], "all": [1, 2]},
    ],
)
def test_regions_are_refused_by_name_unless_the_values_are_named(
    labels: dict[str, Any], tmp_path: Path
) -> None:
    nnunet(tmp_path, labels=labels, regions_class_order=[1, 2])
    with pytest.raises(
        InputError, match=r"whole|all.* are regions, of several values; .*--classes"
    ):
        starter.survey(tmp_path)
    seen = starter.survey(tmp_path, names=["edge", "core"])
    assert seen.classes == ("background", "edge", "core")


@pytest.mark.parametrize(
    "labels",
    [
        {"background": 0, "organ": 1, "tumour": 5},
        {"0": "background", "5": "tumour", "1": "organ"},
        {"tumour": "5", "organ": "1", "background": "0"},
    ],
)
def test_names_belong_to_values_with_gaps(labels: dict[str, Any], tmp_path: Path) -> None:
    nnunet(tmp_path, labels=labels)
    for path in (tmp_path / "labelsTr").iterdir():
        voxels = np.asanyarray(nib.load(path).dataobj)
        nib.save(nib.Nifti1Image(np.array([0, 1, 5], np.uint8)[voxels], np.eye(4)), path)
    seen = starter.survey(tmp_path)
    assert seen.classes == ("background", "organ", "tumour")
    assert seen.mask_values == (0, 1, 5)
    assert seen.counts == (4, 4, 4)
    assert "masks have the values 0, 1, 5: classes 0 to 2" in " ".join(seen.notes)


def test_values_without_a_name_are_refused(tmp_path: Path) -> None:
    nnunet(tmp_path, labels={"background": 0, "organ": 1})
    with pytest.raises(
        InputError, match=r"dataset\.json names background, organ, and masks have the value 2 too"
    ):
        starter.survey(tmp_path)


# BIDS


def bids(root: Path, entities: str = "label-lesion_desc-expert") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "dataset_description.json").write_text("{}")
    for subject in range(1, 5):
        for session in (1, 2):
            name = f"sub-{subject:02d}_ses-{session}"
            place = f"sub-{subject:02d}/ses-{session}/anat"
            volume(root / place / f"{name}_T1w.nii.gz")
            volume(root / "derivatives" / "manual" / place / f"{name}_{entities}_dseg.nii.gz", 2)
        (root / f"sub-{subject:02d}" / f"sub-{subject:02d}_sessions.tsv").write_text("session_id\n")
    return root


@pytest.mark.parametrize(
    "entities", ["label-lesion_desc-expert", "space-orig_desc-x", "space-T1w_res-1"]
)
def test_a_bids_data_set_keeps_its_subjects_together(tmp_path: Path, entities: str) -> None:
    seen = starter.survey(bids(tmp_path, entities))
    assert (seen.kind, seen.images, seen.masks) == ("volumes", ".", "derivatives/manual")
    assert (seen.counts, seen.patients) == ((8, 8), 4)
    found = [paired(tmp_path, ".", "derivatives/manual", section) for section in SECTIONS]
    assert sum(map(len, found)) == 8
    assert [len({item["group"] for item in items}) for items in found] == [2, 1, 1]
    for item in (item for items in found for item in items):
        assert Path(item["image"]).name.partition("_T1w")[0] in str(item["label"])


def test_a_mask_in_another_space_is_no_mask_of_an_image(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="space-MNI"):
        starter.survey(bids(tmp_path, "space-MNI152NLin6Asym"))
    assert conventions.bids(
        [("a/sub-1_T1w", "x"), ("a/sub-1_T2w", "y")], [("b/sub-1_space-T2w_mask", "z")]
    )[1] == [("a/sub-1_T2w", "z")]


def test_bids_masks_that_are_not_plain_are_refused(tmp_path: Path) -> None:
    bids(tmp_path)
    volume(tmp_path / "sub-01" / "ses-1" / "anat" / "sub-01_ses-1_T2w.nii.gz")
    with pytest.raises(InputError, match=r"fits the images sub-01/\S+T1w and sub-01/\S+T2w"):
        starter.survey(tmp_path)
    (tmp_path / "sub-01" / "ses-1" / "anat" / "sub-01_ses-1_T2w.nii.gz").unlink()
    other = tmp_path / "derivatives" / "auto" / "sub-01" / "sub-01_ses-1_desc-brain_mask.nii.gz"
    volume(other, 2)
    with pytest.raises(
        InputError, match=r"derivatives auto, manual of .* all have masks; .*; name it: --masks"
    ):
        starter.survey(tmp_path)
    assert (
        starter.survey(tmp_path, tmp_path / "derivatives" / "manual").masks == "derivatives/manual"
    )
    volume(tmp_path / "derivatives" / "manual" / "sub-01" / "sub-01_ses-1_mask.nii.gz", 2)
    with pytest.raises(InputError, match="are both the mask of image"):
        starter.survey(tmp_path, tmp_path / "derivatives" / "manual")
    with pytest.raises(InputError, match="no folder in .*derivatives has files"):
        conventions.bids_masks(tmp_path / "sub-01")


# Where they lie


def test_masks_and_tables_lie_beside_the_images_or_among_them(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "b" / "x.png")
    (tmp_path / "t.csv").write_text("image,label\n")
    (tmp_path / "a" / "t.csv").write_text("image,label\n")
    beside = starter.find_layout(tmp_path / "a" / "b", labels=tmp_path / "a" / "t.csv")
    assert (beside.folder, beside.images, beside.labels) == (tmp_path / "a", "b", "t.csv")
    within = starter.find_layout(tmp_path / "a", labels=tmp_path / "a" / "t.csv")
    assert (within.folder, within.images, within.labels) == (tmp_path / "a", ".", "t.csv")
    with pytest.raises(InputError, match="beside each other, or it among them"):
        starter.find_layout(tmp_path / "a" / "b", labels=tmp_path / "t.csv")
    with pytest.raises(InputError, match="is not there"):
        starter.find_layout(tmp_path / "a", labels=tmp_path / "none.csv")
    with pytest.raises(InputError, match="--labels with --masks"):
        starter.find_layout(tmp_path / "a", tmp_path / "a", tmp_path / "t.csv")


# What somebody else wrote


def test_no_name_becomes_something_that_a_bundle_evaluates(tmp_path: Path) -> None:
    """dataset.json names the background too; and folders are names in a bundle's configuration."""
    expression = '$__import__("os").system("true")'
    for name in (expression, "%x", "@x"):
        root = nnunet(
            tmp_path / str(len([*tmp_path.iterdir()])), labels={name: 0, "tumour": 1, "edge": 2}
        )
        with pytest.raises(InputError, match=r"json: labels|a bundle evaluates these"):
            starter.write(tmp_path / "bundle", starter.survey(root))
    for index in range(10):
        picture(tmp_path / "two" / expression / f"{index}.png")
        mask(tmp_path / "two" / "masks" / f"{index}.png")
    seen = starter.survey(tmp_path / "two" / expression, tmp_path / "two" / "masks")
    with pytest.raises(InputError, match="a bundle evaluates these"):
        starter.write(tmp_path / "bundle", seen)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name", ["=cmd()", "red\x1b[31m", "two\nlines", "x" * 200])
def test_a_class_is_a_line_and_no_formula(name: str, tmp_path: Path) -> None:
    for folder in (name, "other"):
        for index in range(5):
            picture(tmp_path / folder / f"{index}.png")
    with pytest.raises(InputError, match="in one line"):
        starter.survey(tmp_path)


def test_a_table_says_each_thing_once(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a.png")
    (tmp_path / "table.csv").write_text("file,label,label\na.png,A,B\n")
    with pytest.raises(InputError, match="two columns 'label'"):
        label_columns.read(tmp_path / "table.csv", ["a.png"])


def test_pipes_and_files_without_a_text_for_a_name_are_left_out_and_told(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        for index in range(5):
            picture(tmp_path / folder / f"{index}.png")
    plain = starter.survey(tmp_path)
    os.mkfifo(tmp_path / "one" / "pipe.png")
    (tmp_path / "one" / "zero.png").symlink_to("/dev/zero")
    picture(tmp_path / "one" / "two | names.png")
    (tmp_path / "other" / "4.png").rename(tmp_path / "other" / os.fsdecode(b"\xff.png"))
    found = starter.survey(tmp_path)
    assert (found.counts, plain.counts) == ((5, 4), (5, 5))
    told = [note for note in found.notes if note.startswith("4 pipes, devices, or names")]
    assert told[0].endswith("left out, first one/pipe.png")
    found_by = own.found_by(tmp_path, {"classes": ["one", "other"]})
    items = [
        {"id": record.id, "image": record.image, "group": record.group}
        for record in found_by.records
    ]
    assert told[0] in own.notes(tmp_path, items, {"classes": ["one", "other"]})
    for index in range(5):
        (tmp_path / "one" / f"{index}.png").unlink()
    (tmp_path / "one" / "two | names.png").unlink()
    with pytest.raises(InputError, match="a folder for each class"):
        starter.survey(tmp_path)
