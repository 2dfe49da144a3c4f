"""Patients of one's own images: named by a table or by a part of the file names, kept together, never guessed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from medfl.core.errors import InputError
from medfl.datasets.own import labelled, paired
from medfl.datasets.readers.grouping import by_names, offered

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
        with pytest.raises(InputError, match=r"looks for images in .*; a place below"):
            paired(tmp_path / "data", images, masks, "train")
