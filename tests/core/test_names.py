"""Names that come from outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from medfl.core.errors import InputError
from medfl.core.names import (
    as_cell,
    check_name,
    from_cell,
    is_name,
    readable_file_name,
    respelled,
)
from medfl.runs import launch
from medfl.storage.places import default_run_folder

GOOD = ["north", "site-1", "b_2", "9a", "all-MiniLM-L6-v2", "v1.2", "x" * 64]
BAD = [
    "", ".", "..", "../../x", "a/b", "a\\b", "/etc", "~", "-x", "_x", ".x", "a..b", "a b", "a\n", "é", "a\x00",
    "x" * 65, "$x", "@x", "a:b", "a,b", None, 3, ["a"],
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_name_is_taken_as_it_is(name: str) -> None:
    assert is_name(name)
    assert check_name(name, "site") == name


@pytest.mark.parametrize("name", BAD, ids=repr)
def test_anything_else_is_refused_in_one_line(name: object) -> None:
    assert not is_name(name)
    with pytest.raises(InputError, match="^site .*; letters, digits, ") as caught:
        check_name(name, "site")
    assert str(caught.value).isprintable()


def test_a_bundles_folder_gives_a_run_folder_its_name_only_if_it_is_one() -> None:
    assert default_run_folder("my-bundle", "package.method", 3).name == "my-bundle-method-3"
    with pytest.raises(InputError, match="^bundle 'a b'; letters, digits"):
        default_run_folder("a b", "fedavg", 0)


@pytest.mark.parametrize("name", ["../x", "a/b", ""])
def test_a_site_for_a_host_has_a_name(name: str) -> None:
    with pytest.raises(InputError, match="^site '.*'; letters, digits"):
        launch.site_algo("mednist", name)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("Köln Süd", "Köln Süd"), ("scan 1.5T.nii", "scan 1.5T.nii"), ("病例 7", "病例 7"), ("a/b", "a%2Fb"),
        ("a%2Fb", "a%252Fb"), ("..", "%2E%2E"), (".hidden", "%2Ehidden"), ("end. ", "end.%20"),
        ("C:\\x*?", "C%3A%5Cx%2A%3F"),
        ("tab\t", "tab%09"), ("", "%"),
    ],
)  # fmt: skip
def test_a_file_name_keeps_all_that_can_stand_in_one(name: str, file: str, tmp_path: Path) -> None:
    assert readable_file_name(name) == file
    (tmp_path / file).write_text("")
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_long_names_become_files_and_stay_apart(tmp_path: Path) -> None:
    names = [f"{letter * 300}{end}" for letter in "aö" for end in "12"]
    for name in names:
        (tmp_path / f"{readable_file_name(name)}.nii.gz").write_text(name)
    assert len(list(tmp_path.iterdir())) == len(names)


@pytest.mark.parametrize(
    "text", ["=1+1", "@x", " =1", "-2+cmd|' /C x'!A0", "+a(1)", "'=1", "''@", "-x;y(1)"]
)
def test_a_cell_of_a_table_is_no_formula_and_is_read_back(text: str) -> None:
    written = as_cell(text)
    assert written == f"'{text}"
    assert from_cell(written) == text


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a;=x|y", "a;'=x|y"), ("a; +x(1);@b", "a;' +x(1);'@b"), ("＝1", "'＝1"), ("=a;'=b", "'=a;''=b"),
        (";-" * 10_000, ";-" * 10_000),
        ("a\t=x", "a\t'=x"), ("\t=1", "\t'=1"), ("a\n@x", "a\n'@x"), 
        ("a\r+x(1)\n'=b", "a\r'+x(1)\n''=b"), ("a\n\n\t-b|c", "a\n\n\t'-b|c"),
    ],
)  # fmt: skip
def test_no_part_of_a_cell_is_a_formula_where_other_signs_part_cells(
    text: str, written: str
) -> None:
    """Many spreadsheets part cells at semicolons or tabs, and what no quotes hold together falls apart."""
    assert as_cell(text) == written
    assert from_cell(written) == text


@pytest.mark.parametrize("value", ["-1.5", "+3", "north", "'quoted'", "", 7, None, -0.5])
def test_other_cells_stay(value: object) -> None:
    assert as_cell(value) == value
    assert not isinstance(value, str) or from_cell(value) == value


@pytest.mark.parametrize(
    "cell",
    ["1E+05", "1.00E+05", "1.23457E+11", "100,000", "1.000.000", "2-Jan", "02. Jan", "01/02/2024"]
    + ["2024-01-02", "Mar-01", "1-Mar", "01. Mrz", "d\u00e9c-22", "02.01.2024"],
)
def test_what_a_spreadsheet_makes_of_names_is_recognised(cell: str) -> None:
    """100000, 1E5, 1-2, MAR1 and DEC22 as Excel and R write them."""
    assert repr(cell) in respelled(["p1", cell])


@pytest.mark.parametrize("cell", ["100000", "p-12", "0012", "mar", "img_1", "a.b", "1.5", "12-x"])
def test_other_names_are_taken_as_they_are(cell: str) -> None:
    assert respelled([cell]) == ""
