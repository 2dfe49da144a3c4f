"""What tables beside the images say of the cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from medfl import datasets
from medfl.bundle.case_metadata import _by_name, _columns, read
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


@pytest.mark.parametrize("named", ["mel/a.png", "a.png", "a"])
def test_a_row_is_found_by_path_file_name_or_stem(named: str) -> None:
    found = _by_name(
        [{"file": named, "age": "3"}, {"file": "other", "age": "4"}], ["mel/a.png", "nv/b.png"]
    )
    assert {ident: row["age"] for ident, row in found.items()} == {"mel/a.png": "3"}


def test_file_names_that_stand_for_two_items_are_not_taken() -> None:
    assert _by_name([{"file": "a.png"}], ["mel/a.png", "nv/a.png"]) == {}


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
