"""What tables beside the images say of the cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from medfl import datasets
from medfl.bundle.case_metadata import _by_name, _columns, band, read
from medfl.bundle.open import open_problem, with_data


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"Age": "70.0", "sex": "Male", "localization": "back"},
            {"age": 70.0, "sex": "male", "localisation": "back"},
        ),
        (
            {"age_approx": "", "anatom_site_general": "nan"},
            {"age": None, "localisation": "not stated"},
        ),
        ({"patient_age": "034Y", "gender": "F"}, {"age": 34.0, "sex": "f"}),
        ({"age": "-3", "dx": "mel"}, {"age": "-3"}),
    ],
)
def test_columns_are_known_by_the_names_that_tables_give_them(
    row: dict[str, str], expected: dict[str, object]
) -> None:
    assert _columns(row) == expected


@pytest.mark.parametrize(
    ("written", "years"),
    [
        ("045Y", 45), ("018M", 1.5), ("052W", 52 * 7 / 365.25), ("030D", 30 / 365.25), ("70", 70), ("6 months", 0.5),
        ("3 yrs.", 3), ("70-79", 74.5), ("70–79", 74.5), ("0 to 4 years", 2), (">89", 90), ("89+", 89), (">= 90", 90),
        ("<1", 0), ("<=18", 9), ("12,5", 12.5),
    ],
)  # fmt: skip
def test_ages_are_read_as_tables_and_dicom_write_them(written: str, years: float) -> None:
    assert _columns({"age": written})["age"] == pytest.approx(years)


@pytest.mark.parametrize(
    "written", ["adult", "7O", "200", "-3", "55-65", ">60", "79-70", "045Z", "1e3"]
)
def test_what_is_no_age_or_fits_several_bands_is_kept_as_text(written: str) -> None:
    age = _columns({"age": written})["age"]
    assert age == written.lower()
    assert band(age) == "not stated"


@pytest.mark.parametrize("lost", ["12", "12.0", "012"])
def test_a_row_is_found_by_its_number(lost: str) -> None:
    found = _by_name(
        [{"id": lost, "age": "3"}, {"id": "1000", "age": "4"}], ["a/0012.png", "a/1000.png"]
    )
    assert found["a/0012.png"]["age"] == "3"
    assert found["a/1000.png"]["age"] == "4"


@pytest.mark.parametrize("named", ["mel/a.png", "a.png", "a"])
def test_a_row_is_found_by_path_file_name_or_stem(named: str) -> None:
    found = _by_name(
        [{"file": named, "age": "3"}, {"file": "other", "age": "4"}], ["mel/a.png", "nv/b.png"]
    )
    assert {ident: row["age"] for ident, row in found.items()} == {"mel/a.png": "3"}


def test_file_names_that_stand_for_two_items_are_not_taken() -> None:
    assert _by_name([{"file": "a.png"}], ["mel/a.png", "nv/a.png"]) == {}


@pytest.mark.parametrize("other", ["1.png", "01.png"])
def test_an_item_whose_rows_differ_has_none(other: str) -> None:
    """As the visits of a patient: the last row's age was taken."""
    rows = [
        {"file": "1.png", "age": "70", "visit": "1"},
        {"file": other, "age": "20", "visit": "2"},
    ]
    items = ["x/001.png", "x/002.png"]
    assert _by_name([*rows, {"file": "2.png", "age": "30", "visit": "1"}], items).keys() == {
        "x/002.png"
    }
    same = [{**row, "age": "70"} for row in rows]
    assert _by_name(same, items[:1])["x/001.png"]["age"] == "70"


def test_a_table_in_the_data_folder_is_joined_to_the_items(tmp_path: Path) -> None:
    folder = datasets.write_phantom("ham10000", tmp_path / "data", per_class=10, size=16)
    bundle = with_data(open_problem("ham10000", {}), str(folder), {}).bundle
    items = bundle.items("test")
    lines = [f"{item['id']},{20 + i},female" for i, item in enumerate(items)]
    (folder / "people.csv").write_text("\n".join(["image_id,age,sex", *lines[1:]]) + "\n")
    (folder / "notes").write_bytes(b"\xff\xfe no table")
    found = read(bundle, "test", str(folder))
    assert list(found) == [item["id"] for item in items]
    assert found[items[1]["id"]] == {
        "centre": items[1]["centre"], "group": items[1]["group"], "age": 21.0, "sex": "female"
    }  # fmt: skip
    assert (found[items[0]["id"]]["age"], found[items[0]["id"]]["sex"]) == (None, "not stated")
