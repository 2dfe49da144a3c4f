"""What rows of a table say of images, and what stays where there is no row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from medfl.core.errors import InputError
from medfl.data.prepared import _WithoutLabels
from medfl.datasets.readers import cases
from medfl.datasets.readers.splitting import Record

RECORD = Record("a.png", 0, "a", "north", "a", {"own": "test"})


def test_an_image_without_a_row_stays_as_it_is() -> None:
    row = {"patient": "p", "centre": "", "section": "validate"}
    other = replace(RECORD, id="b")
    kept, told = cases.described(Path("folder"), [RECORD, other], {"b": row})
    assert kept == RECORD
    assert (told.group, told.centre, told.sections) == ("p", "north", {cases.SPLIT: "validate"})


@pytest.mark.parametrize("section", ["", "later"])
def test_a_section_that_is_none_is_refused(section: str) -> None:
    with pytest.raises(InputError, match=r"section '.*' of a; one of train, validate or test"):
        cases.described(Path("folder"), [RECORD], {"a": {"section": section}})


def test_items_without_labels_are_a_sequence_also_in_parts() -> None:
    items = _WithoutLabels([{"id": "a", "label": 2}, {"id": "b", "label": 0}])
    assert items[1] == {"id": "b"}
    assert list(items[:1]) == [{"id": "a"}]


def test_an_id_that_a_spreadsheet_changed_is_told_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / cases.TABLE).write_text("file,patient\n1E+05,p\n")
    record = replace(RECORD, image=str(tmp_path / "100000.png"), id="100000.png")
    with pytest.raises(InputError, match="a spreadsheet may have made '1E\\+05' of a name"):
        cases.read(tmp_path, [record])


@pytest.mark.parametrize("odd", ["p1\u200b", "\uff501", "p\u00ad1", "\ufeffp1", "P1"])
@pytest.mark.parametrize("column", ["patient", "centre"])
def test_a_patient_or_centre_that_differs_by_what_nobody_sees_is_one(column: str, odd: str) -> None:
    """Two patients would be in training and in test, and two centres two sites."""
    rows = {"a": {column: "p1"}, "b": {column: odd}}
    records = cases.described(Path("folder"), [RECORD, replace(RECORD, id="b")], rows)
    names = {record.group if column == "patient" else record.centre for record in records}
    assert len(names) == 1
    assert cases.notes(rows) == [
        f"one {column}, written in several ways: {' and '.join(map(ascii, sorted(['p1', odd])))}"
    ]


@pytest.mark.parametrize(
    ("head", "group", "centre"),
    [
        ("patient,centre", "p", "north"),
        ("patient_id,center", "p", "north"),
        ("Subject ID,Site", "p", "north"),
        ("person,hospital", "a", "unknown"),
    ],
)
def test_columns_are_called_as_in_tables_of_labels(
    tmp_path: Path, head: str, group: str, centre: str
) -> None:
    """A column `patient_id` was passed over: images of a patient were in training and in test."""
    (tmp_path / cases.TABLE).write_text(f"file,{head},Section\na.png,p,north,test\n")
    record = replace(RECORD, image=str(tmp_path / "a.png"), centre="unknown")
    rows = cases.read(tmp_path, [record])
    (found,) = cases.described(tmp_path, [record], rows)
    assert (found.group, found.centre) == (group, centre)
    assert found.sections == {cases.SPLIT: "test"}
    assert cases.notes(rows) == []


def test_a_column_that_seems_to_divide_the_images_is_told(tmp_path: Path) -> None:
    (tmp_path / cases.TABLE).write_text("file,split\na.png,Training set\n")
    rows = cases.read(tmp_path, [replace(RECORD, image=str(tmp_path / "a.png"))])
    assert cases.notes(rows)[0].startswith("column 'split' is not used: to take the sections")
