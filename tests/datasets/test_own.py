"""A folder of one's own as a data list: classes, pairs, and what a table says of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfl.core.errors import InputError
from medfl.datasets import own
from medfl.datasets.base import MARKER
from medfl.datasets.own import labelled, paired

SECTIONS = ("train", "validate", "test")


def picture(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), value, dtype=np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        for number in range(20):
            picture(tmp_path / name / f"{name}{number:02d}.png")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_every_image_is_in_one_section_with_its_class(folder: Path) -> None:
    found = {section: labelled(folder, ("a", "b"), section) for section in SECTIONS}
    assert [len(items) for items in found.values()] == [28, 4, 8]
    ids = [item["id"] for items in found.values() for item in items]
    assert len(set(ids)) == 40
    assert all(
        item["label"] == ("a", "b").index(item["id"][0])
        for items in found.values()
        for item in items
    )
    assert (
        labelled(folder, ("z", "a", "b"), "train")[0]["label"] == 1
    )  # another site may have more classes


def test_a_section_does_not_depend_on_the_other_images(folder: Path) -> None:
    before = {item["id"] for item in labelled(folder, ("a", "b"), "test")}
    for number in range(20):
        (folder / "b" / f"b{number:02d}.png").unlink()
    assert {item["id"] for item in labelled(folder, ("a", "b"), "test")} == {
        i for i in before if i.startswith("a")
    }


def test_a_table_keeps_patients_together_and_names_centres(folder: Path) -> None:
    lines = [
        f"{name}{n:02d},p{n % 10},{'north' if n < 10 else 'south'}"
        for name in "ab"
        for n in range(20)
    ]
    (folder / "cases.csv").write_text("\n".join(["file,patient,centre", *lines]) + "\n")
    found = {section: labelled(folder, ("a", "b"), section) for section in SECTIONS}
    patients = [{item["group"] for item in items} for items in found.values()]
    assert sum(len(own) for own in patients) == 10
    assert {item["centre"] for items in found.values() for item in items} == {"north", "south"}


def test_a_table_may_name_the_sections(folder: Path) -> None:
    lines = [f"{name}/{name}{n:02d}.png,{SECTIONS[n % 3]}" for name in "ab" for n in range(20)]
    (folder / "cases.csv").write_text("\n".join(["file,section", *lines]) + "\n")
    assert [len(labelled(folder, ("a", "b"), section)) for section in SECTIONS] == [14, 14, 12]


def test_a_table_takes_pictures_of_pairs_by_path_and_by_name(tmp_path: Path) -> None:
    for number in range(9):
        picture(tmp_path / "images" / f"c{number}.png")
        picture(tmp_path / "masks" / f"c{number}.png")
    rows = {"train": "images/c{}.png", "validate": "c{}.png", "test": "c{}"}
    lines = [
        f"{form.format(n)},{section}"
        for k, (section, form) in enumerate(rows.items())
        for n in range(k, 9, 3)
    ]
    (tmp_path / "cases.csv").write_text("\n".join(["file,section", *lines]) + "\n")
    assert [
        [item["id"] for item in paired(tmp_path, "images", "masks", section)]
        for section in SECTIONS
    ] == [[f"c{n}" for n in range(k, 9, 3)] for k in range(3)]


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (
            "file,section\n" + "".join(f"{c}{n:02d}\n" for c in "ab" for n in range(20)),
            "section '' of a/a00.png",
        ),
        (
            "file\n" + "".join(f"b{n:02d}\n" for n in range(20)),
            "no row for image a/a00.png .*04.png and 15 more images",
        ),
        ("name\na00\n", "has no column 'file'"),
        ("file\na00\n", "no row for image a/a01.png"),
        (
            "file,section\n" + "".join(f"{c}{n:02d},tset\n" for c in "ab" for n in range(20)),
            "section 'tset'",
        ),
    ],
)
def test_a_wrong_table_is_refused(folder: Path, table: str, told: str) -> None:
    (folder / "cases.csv").write_text(table)
    with pytest.raises(InputError, match=told):
        labelled(folder, ("a", "b"), "train")


def test_an_unknown_class_and_an_empty_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"folder 'b' in .*; a folder for each class: a, c"):
        labelled(folder, ("a", "c"), "train")
    with pytest.raises(
        InputError, match=r"folder 'b' in .* is of no class; .*; rename it, or move it away"
    ):
        labelled(folder, ("a", "c"), "train")
    for number in range(7):
        picture(folder / f"z{number}" / "1.png")
    with pytest.raises(
        InputError,
        match=r"folder 'a' \| 'b' \| 'z0' .* and 4 more folders .*give the folder that holds",
    ):
        labelled(folder, ("c", "d"), "train")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="no folder with images"):
        labelled(tmp_path / "none", ("a", "b"), "train")
    with pytest.raises(InputError, match="--data"):
        labelled(tmp_path / "missing", ("a", "b"), "train")


def test_images_and_masks_are_paired_by_name(tmp_path: Path) -> None:
    for number in range(20):
        picture(tmp_path / "images" / f"c{number:02d}.png")
        picture(tmp_path / "masks" / f"c{number:02d}_mask.png")
    found = [item for section in SECTIONS for item in paired(tmp_path, "images", "masks", section)]
    assert len(found) == 20
    assert all(
        Path(str(item["label"])).stem == f"{Path(item['image']).stem}_mask" for item in found
    )
    picture(tmp_path / "masks" / "odd.png")
    with pytest.raises(InputError, match=r"odd\.png has no image"):
        paired(tmp_path, "images", "masks", "train")


def test_the_phantom_cohort_of_a_file_is_found_wherever_it_lies_in_it(tmp_path: Path) -> None:
    drawn, other = tmp_path / "cohort" / "a" / "b" / "1.zip", tmp_path / "mine" / "2.png"
    for path in (drawn, other):
        path.parent.mkdir(parents=True)
        path.touch()
    (tmp_path / "cohort" / MARKER).touch()
    link = tmp_path / "mine" / "link.zip"
    link.symlink_to(drawn)
    cohort = tmp_path / "cohort"
    assert (
        own.cohort_of([other, drawn])
        == own.cohort_of([cohort])
        == own.cohort_of([f"{drawn}!1.png"])
        == cohort
    )
    assert own.cohort_of([link]) == cohort
    assert (
        own.cohort_of([other])
        is own.cohort_of([cohort / "a" / "gone.png", "x" * 5000, "ill"])
        is None
    )


@pytest.mark.parametrize("odd", ["cats\u200b", "\uff43ats", "ca\u00adts"])
def test_class_folders_are_those_of_a_bundle_whatever_nobody_sees(odd: str, tmp_path: Path) -> None:
    picture(tmp_path / odd / "1.png")
    picture(tmp_path / "dogs" / "1.png")
    records = own.in_folders(tmp_path, ["dogs", "cats"]).records
    assert {record.id: record.label for record in records} == {"dogs/1.png": 0, "cats/1.png": 1}
    picture(tmp_path / "cats" / "1.png")
    with pytest.raises(InputError, match="have one name, in characters that look alike"):
        own.in_folders(tmp_path, ["dogs", "cats"])
