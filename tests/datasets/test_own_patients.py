"""Patients of one's own images: named by a table or by a part of the file names, kept together, never guessed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfl.bundle.open import check_folder
from medfl.core.errors import InputError
from medfl.datasets.own import labelled, listed, paired
from medfl.datasets.readers.grouping import by_names, offered
from medfl.starter import starter
from tests.support.dicom_files import slice_of, write

SECTIONS = ("train", "validate", "test")


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(path)


def folder(root: Path, patients: int = 12, images: int = 4) -> Path:
    for number in range(patients):
        for shot in range(images):
            picture(root / "ab"[number % 2] / f"p{number:02d}_{shot}.png")
    return root


def patients_of(items: Sequence) -> set[str]:
    return {item["group"] for item in items}


def test_patients_of_file_names_stay_in_one_section(tmp_path: Path) -> None:
    folder(tmp_path)
    loose = [patients_of(labelled(tmp_path, "ab", section)) for section in SECTIONS]
    assert sum(map(len, loose)) == 48  # each image counts as a patient of its own
    found = [patients_of(labelled(tmp_path, "ab", section, "^([^_]+)_")) for section in SECTIONS]
    assert set.union(*found) == {f"p{number:02d}" for number in range(12)}
    assert sum(map(len, found)) == 12


def test_an_expression_with_a_slash_sees_folders(tmp_path: Path) -> None:
    for number in range(9):
        for shot in range(2):
            picture(tmp_path / "images" / f"p{number}" / f"{shot}.png")
            picture(tmp_path / "masks" / f"p{number}" / f"{shot}.png")
    found = [
        patients_of(paired(tmp_path, "images", "masks", section, "^(.+)/")) for section in SECTIONS
    ]
    assert set.union(*found) == {f"p{number}" for number in range(9)}
    assert sum(map(len, found)) == 9


def dicom(path: Path, patient: str | None) -> None:
    pixels = np.zeros((8, 8), np.uint16)
    write(path, slice_of(pixels, more={(0x0010, 0x0020): ("LO", patient) if patient else None}))


def series(root: Path, patients: Sequence[str | None]) -> None:
    """Write a series of a slice for each, in two classes, or with masks."""
    for number, patient in enumerate(patients):
        dicom(root / "images" / f"{number:02d}" / "1.dcm", patient)
        dicom(root / "masks" / f"{number:02d}" / "1.dcm", None)
        dicom(root / "classes" / "ab"[number % 2] / f"{number:02d}.dcm", patient)


def test_patients_of_dicom_headers_stay_in_one_section(tmp_path: Path) -> None:
    """Two studies of a patient came into training and test data."""
    series(tmp_path, [f"MRN {number // 4}" for number in range(48)])
    for found in (
        [patients_of(paired(tmp_path, "images", "masks", section)) for section in SECTIONS],
        [patients_of(labelled(tmp_path / "classes", "ab", section)) for section in SECTIONS],
    ):
        assert set.union(*found) == {f"MRN {number}" for number in range(12)}
        assert sum(map(len, found)) == 12

    rows = [f"{number:02d},p{number % 6}" for number in range(48)]
    (tmp_path / "cases.csv").write_text("\n".join(["file,patient", *rows]))
    named = [patients_of(paired(tmp_path, "images", "masks", section)) for section in SECTIONS]
    assert set.union(*named) == {f"p{number}" for number in range(6)}
    assert starter.survey(tmp_path / "classes").patients == 12
    assert starter.survey(tmp_path / "classes", group_by=r"([0-9])\.").patients == 10


@pytest.mark.parametrize("different", [1, 2, 10])
def test_dicom_headers_that_name_no_patients_are_not_taken(tmp_path: Path, different: int) -> None:
    series(tmp_path, [f"ANONYMOUS {number % different}" for number in range(20)])
    if different > 2:
        dicom(tmp_path / "images" / "07" / "1.dcm", None)

    found = [patients_of(paired(tmp_path, "images", "masks", section)) for section in SECTIONS]
    assert sum(map(len, found)) == 20


@pytest.mark.parametrize("place", ["cases.csv", "labels.csv"])
def test_a_patient_whose_number_is_written_in_several_ways_is_one(
    tmp_path: Path, place: str
) -> None:
    """As a spreadsheet and pandas leave it; apart they would be in training and in test images at once."""
    folder(tmp_path / "images")
    spellings = ["007", "7", "7.0", " 007"]
    names = sorted(path.relative_to(tmp_path / "images") for path in tmp_path.rglob("*.png"))
    rows = []
    for number, name in enumerate(names):
        patient = spellings[number % 4] if number < 24 else f"p{number // 2}"
        rows.append(f"{name.as_posix()},{patient},{name.parts[0]}")
    text = "\n".join(["file,patient,label", *rows]) + "\n"
    if place == "cases.csv":
        (tmp_path / "images" / place).write_text(text)
        survey = starter.survey(tmp_path / "images")
        items = [labelled(tmp_path / "images", "ab", section) for section in SECTIONS]
    else:
        (tmp_path / place).write_text(text)
        survey = starter.survey(tmp_path / "images", labels=tmp_path / place)
        items = [listed(tmp_path, "images", place, "ab", section) for section in SECTIONS]

    assert survey.patients == 13
    (said,) = [note for note in survey.notes if "in several ways" in note]
    assert all(repr(name.strip()) in said for name in spellings[:3])
    found = [patients_of(section) for section in items]
    assert sum(map(len, found)) == 13
    assert "007" in set.union(*found)


@pytest.mark.parametrize("name", ["nan", "NA", "None"])
def test_a_word_for_no_patient_is_said_to_be_one(tmp_path: Path, name: str) -> None:
    folder(tmp_path)
    rows = [f"{path.name},{name if i < 5 else i}" for i, path in enumerate(tmp_path.rglob("*.png"))]
    (tmp_path / "cases.csv").write_text("\n".join(["file,patient", *rows]) + "\n")
    told = f"5 images are of a patient '{name}': one, as its cells are not empty"
    survey = starter.survey(tmp_path)
    assert told in survey.notes
    report = check_folder(str(starter.write(tmp_path / "bundle", survey)), tmp_path)
    assert told in report.notes


def test_the_table_says_more_than_the_names(tmp_path: Path) -> None:
    folder(tmp_path, 6, 2)
    rows = [f"{'ab'[n % 2]}/p{n:02d}_{k}.png,same{n // 2}" for n in range(6) for k in range(2)]
    (tmp_path / "cases.csv").write_text("\n".join(["file,patient", *rows]) + "\n")
    found = [patients_of(labelled(tmp_path, "ab", section, "^([^_]+)_")) for section in SECTIONS]
    assert sorted(patient for patients in found for patient in patients) == [
        "same0",
        "same1",
        "same2",
    ]


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("(p", "is no regular expression"),
        ("p", "has no group in parentheses"),
        ("(x)", "matches none of 48 names, as "),
        ("(p)", "makes one patient, p, of all 48 images"),
        ("()", "matches none of 48 names"),
        ("((p+)+)_", "may take long"),
        ("(p|p)*_", "may take long"),
        (r"(p)\1", "may take long"),
        ("(?=(p))", "may take long"),
        ("(p?p?p?p?)_", "may take long"),
        ("(" + "p" * 300 + ")", "may take long"),
        ("(p{99999999999999999999})", "is no regular expression|may take long"),
    ],
)
def test_a_wrong_expression_is_refused_in_one_line(pattern: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^group-by .*({told}).*;.*;") as error:
        labelled(folder(tmp_path), "ab", "train", pattern)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("pattern", [r"(\w*\w*\w*)_$", r"([a-z]+[a-z]+[a-z]+)!", "(.*.*.*)~"])
def test_what_is_accepted_is_quick_on_the_longest_names(pattern: str) -> None:
    """A name has at most 255 characters; so many that do not match take longest."""
    start = time.process_time()
    with pytest.raises(InputError, match="matches none"):
        by_names(pattern, ["a" * 120])
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"p{n}_{k}.png" for n in range(5) for k in range(3)], ("^([^_/]+)_", 5)),
        ([f"p{n}-{k}.png" for n in range(5) for k in range(3)], ("^([^-/]+)-", 5)),
        ([f"ct_p{n}_{k}.png" for n in range(5) for k in range(3)], ("^([^_/]+_[^_/]+)_", 5)),
        ([f"p{n}/{k}.png" for n in range(5) for k in range(3)], ("^([^/]+)/", 5)),
        ([f"cxr_{n}.png" for n in range(15)], None),
        ([f"{n}.png" for n in range(15)], None),
        ([f"p{n}_{n}.png" for n in range(15)], None),
    ],
)
def test_an_expression_is_offered_where_names_share_prefixes(
    names: list[str], expected: tuple[str, int] | None
) -> None:
    assert offered({"a": names}) == expected
    if expected:
        assert len(set(by_names(expected[0], names))) == expected[1]


def test_the_classes_in_the_names_are_no_patients() -> None:
    assert offered({"a": [f"a_{n}" for n in range(9)], "b": [f"b_{n}" for n in range(9)]}) is None


@pytest.mark.parametrize("place", ["/etc", "../other", "images/../../x"])
def test_a_bundle_cannot_look_beside_the_data_folder(place: str, tmp_path: Path) -> None:
    picture(tmp_path / "data" / "images" / "a.png")
    picture(tmp_path / "other" / "a.png")
    for images, masks in ((place, "images"), ("images", place)):
        with pytest.raises(InputError, match=r"images are looked for in .*; a place below"):
            paired(tmp_path / "data", images, masks, "train")
