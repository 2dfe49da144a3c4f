"""What the columns of a table say: classes, findings, numbers; as spreadsheets, NIH, CheXpert and RSNA write them."""

from __future__ import annotations

import gzip
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from medfl.core.errors import InputError
from medfl.datasets.readers import label_columns
from medfl.datasets.readers.label_columns import Labels, Wanted, unit_of
from medfl.datasets.readers.splitting import (
    Record,
    by_findings,
    stratified,
)

IMAGES = [f"{n}.png" for n in range(6)]
NAN = math.nan


def read(folder: Path, text: str, images: list[str] | None = None, **wanted: Any) -> Labels:
    (folder / "t.csv").write_text(text, encoding="utf-8")
    return label_columns.read(folder / "t.csv", images or IMAGES, Wanted(**wanted))


def column(found: Labels, k: int = 0) -> list[float]:
    return [found.targets[image][k] for image in sorted(found.targets)]


FINDINGS = "file,patient,age,Mass,Effusion\n0,a,3,1,1\n1,a,4,0,1\n2,b,5,0,0\n3,b,60,,-1\n4,c,7,,\n"


def test_columns_of_zeros_and_ones_with_several_in_a_row_are_findings(tmp_path: Path) -> None:
    found = read(tmp_path, FINDINGS)
    assert (found.task, found.names, found.column) == ("multilabel", ("Mass", "Effusion"), "")
    assert column(found) == pytest.approx([1, 0, 0])  # rows 3 and 4 know nothing
    assert found.rows["3.png"] == {"patient": "b"}
    assert "2 findings by the columns Mass, Effusion" in found.columns
    assert (
        "3 cells are blank: unknown: no part of loss and scores (--blank ignore|zeros)"
        in found.notes
    )
    assert (
        "1 cells are uncertain (-1, ?): unknown: no part of loss and scores (--uncertain ignore|zeros|ones)"
        in (found.notes)
    )


@pytest.mark.parametrize(
    ("uncertain", "blank", "third", "fourth"),
    [
        ("ignore", "zeros", (0, NAN), (0, 0)),
        ("zeros", "ignore", (NAN, 0), None),
        ("ones", "ignore", (NAN, 1), None),
        ("ones", "zeros", (0, 1), (0, 0)),
    ],
)
def test_what_is_uncertain_and_what_is_blank_are_told_apart(
    uncertain: str, blank: str, third: Any, fourth: Any, tmp_path: Path
) -> None:
    found = read(tmp_path, FINDINGS, uncertain=uncertain, blank=blank)
    assert found.targets["3.png"] == pytest.approx(third, nan_ok=True)
    assert found.targets.get("4.png") == fourth


def test_a_few_words_among_numbers_make_no_classes(tmp_path: Path) -> None:
    rows = [f"{n},{n + 0.5}" for n in range(2, 20)]
    text = "\n".join(["file,ef", "0,30.5", "1,inf", *rows]) + "\n"
    with pytest.raises(InputError, match=r"'inf' in column 'ef', row 3 \(1\); a number"):
        read(tmp_path, text, columns=("ef",))


def test_a_finding_that_nobody_has_is_no_class(tmp_path: Path) -> None:
    """Of classes each row has one, as in ISIC's table, whose class UNK has no image."""
    found = read(tmp_path, "file,Mass,Edema\n0,1,0\n1,0,0\n")
    assert found.targets == {"0.png": (1, 0), "1.png": (0, 0)}
    assert read(tmp_path, "file,MEL,NV,UNK\n0,1,0,0\n1,0,1,0\n").task == "classification"


@pytest.mark.parametrize("cell", ["-1", "-1.0", "?", "u", "Uncertain", "unklar"])
def test_spellings_of_uncertain(cell: str, tmp_path: Path) -> None:
    text = f"file,Mass,Effusion\n0,1,1\n1,{cell},0\n"
    assert read(tmp_path, text, uncertain="ones").targets["1.png"] == (1, 0)


@pytest.mark.parametrize("cell", ["", "NaN", "NA", "None", "unknown", "unbekannt"])
def test_spellings_of_nothing(cell: str, tmp_path: Path) -> None:
    text = f"file,Mass,Effusion\n0,1,1\n1,{cell},0\n"
    assert read(tmp_path, text, blank="zeros").targets["1.png"] == (0, 0)


def test_a_row_without_finding_says_that_blanks_are_absent(tmp_path: Path) -> None:
    """As CheXpert's: 1 in "No Finding", and nothing in the others."""
    text = "Path,No Finding,Mass,Edema\n0,,1,1\n1,1,,\n2,1,1,\n"
    found = read(tmp_path, text)
    assert found.names == ("Mass", "Edema")
    assert found.targets["1.png"] == (0, 0)
    assert any(
        "1 rows have a finding, and a column that says that there is none" in n for n in found.notes
    )
    assert read(tmp_path, text, columns=("No Finding", "Mass")).names == ("No Finding", "Mass")


def test_columns_with_one_1_a_row_are_classes(tmp_path: Path) -> None:
    text = "image,MEL,NV\n0,1.0,0.0\n1,0.0,1.0\n"
    found = read(tmp_path, text)
    assert (found.task, found.classes) == ("classification", {"0.png": "MEL", "1.png": "NV"})
    assert read(tmp_path, text, task="multilabel").targets["0.png"] == (1, 0)
    none = read(tmp_path, text + "2,0,0\n")
    assert none.classes.keys() == {"0.png", "1.png"}
    assert any("1 rows have no 1: of no class; --task multilabel" in note for note in none.notes)


def test_nih_writes_findings_with_bars(tmp_path: Path) -> None:
    text = (
        "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,View Position,OriginalImage[Width\n"
        "0.png,Effusion|Mass,0,1,58,PA,2682\n1.png,No Finding,1,1,59,PA,2500\n2.png,Mass,0,2,7,AP,2400\n"
        "3.png,,0,3,8,AP,2500\n"
    )
    found = read(tmp_path, text)
    assert (found.names, found.column) == (("Effusion", "Mass"), "Finding Labels")
    assert found.targets == {"0.png": (1, 1), "1.png": (0, 0), "2.png": (0, 1)}
    assert found.rows["2.png"] == {"patient": "2"}
    with pytest.raises(
        InputError,
        match=r"'Mass' in column 'Finding Labels', row 2 \(0.png\); the findings Effusion",
    ):
        read(tmp_path, text, task="multilabel", columns=("Finding Labels",), names=("Effusion",))


def test_the_only_column_of_numbers_is_the_number(tmp_path: Path) -> None:
    found = read(tmp_path, "id,boneage,male\n0,180,True\n1,12,False\n2,,True\n3,94,True\n")
    assert (found.task, found.names, column(found)) == ("regression", ("boneage",), [180, 12, 94])
    assert "1 images have no number in the table: left out, 2.png" in found.notes


def test_several_columns_of_numbers_have_to_be_told(tmp_path: Path) -> None:
    text = "file,patient,pixel_mm,width,hc_mm,other_mm\n0,a,0.1,9,44.3,1\n1,a,0.2,9,60,2.5\n"
    with pytest.raises(
        InputError, match="columns of numbers: hc_mm, other_mm; .*--label-column hc_mm"
    ):
        read(tmp_path, text)
    assert column(read(tmp_path, text, columns=("hc_mm",))) == [44.3, 60]
    two = read(tmp_path, text, columns=("HC mm", "other_mm"))
    assert (two.task, two.targets["1.png"]) == ("regression", (60, 2.5))


def test_whole_numbers_are_classes_unless_there_are_many_or_the_user_says_so(
    tmp_path: Path,
) -> None:
    text = "file,label\n" + "".join(f"{n},{n % 3}\n" for n in range(6))
    assert read(tmp_path, text).task == "classification"
    assert any(
        "--task regression takes them as such" in note for note in read(tmp_path, text).notes
    )
    assert column(read(tmp_path, text, task="regression")) == [0, 1, 2, 0, 1, 2]
    many = "file,label\n" + "".join(f"{n},{n}\n" for n in range(30))
    assert read(tmp_path, many, [f"{n}.png" for n in range(30)]).task == "regression"
    assert read(tmp_path, "file,label\n0,1.5\n1,2\n").task == "regression"


@pytest.mark.parametrize(
    "text",
    [
        "\ufefffile;Mass;Edema\n0;1;1\n1;0;1\n",
        '"file"\t"Mass"\t"Edema"\n"0"\t"1"\t"1"\n"1"\t"0"\t"1"\n',
        "file,Mass,Edema\r\nimages/0.png,1,1\r\nimages\\1.png,0,1\r\n",
        "file,Mass ,Edema\n/data/study/0.png,1.0,1\n/data/study/1.png,0.0,1\n,,\n",
        "file,Mass,Edema\n0,TRUE,1\n1,false,1\n",
        "file,Mass,Edema\n0,yes,Yes\n1,No,yes\n",
        "file;Mass;Edema\n0;Ja;ja\n1;nein;ja\n",
        "file,Mass,Edema\n0,1,1\n0,1,1\n1,0,1\n",
    ],
)
def test_tables_as_programs_write_them(text: str, tmp_path: Path) -> None:
    found = read(tmp_path, text)
    assert (found.names, found.targets) == (("Mass", "Edema"), {"0.png": (1, 1), "1.png": (0, 1)})


def test_a_path_from_another_folder_on_is_an_image(tmp_path: Path) -> None:
    """CheXpert's table has CheXpert-v1.0/train/patient1/study1/view1.jpg, and each study has a view1."""
    images = ["patient1/study1/view1.jpg", "patient2/study1/view1.jpg"]
    text = "Path,Mass,Edema\n" + "".join(
        f"C-v1.0/train/{name},1,{k}\n" for k, name in enumerate(images)
    )
    assert read(tmp_path, text, images).targets == {images[0]: (1, 0), images[1]: (1, 1)}


@pytest.mark.parametrize(
    ("text", "wanted", "told"),
    [
        ("file,Mass,Edema\n0,1,1\n1,x,0\n", {"columns": ("Mass", "Edema")},
         r"'x' in column 'Mass', row 3 \(1\); 0, 1, -1 \(uncertain\) or nothing; correct the cell"),
        ("file,Mass,Edema\n0,1,1\n1,2,0\n", {"columns": ("Mass", "Edema"), "task": "multilabel"},
         "'2' in column 'Mass'"),
        ("file,Mass,Edema\n" + "0,1,1\n" + "9,0,1\n" * 20 + "1,yes?,0\n", {}, "'yes\\?' in column 'Mass', row 23"),
        ("file,hc\n0,12 mm\n1,13 mm\n", {},
         "'12 mm' in column 'hc', row 2 .*write the number alone, and its unit into"),
        ("file,hc\n0,12 mm\n1,13\n", {"columns": ("hc",), "task": "regression"}, "'12 mm' in column 'hc'"),
        ("file;hc\n0;12,5\n1;13,25\n", {}, r"'12,5' in column 'hc', row 2 \(0\).*write 12.5, with a decimal point"),
        ("file,hc\n0,inf\n1,2.5\n", {"columns": ("hc",), "task": "regression"}, "'inf' in column 'hc'"),
        ("file,hc\n0,1.5\n0,2.5\n", {}, "two rows for 0.png"),
        ("file,a,b\n0,1,1\n1,0,1\n", {"columns": ("aa", "b")}, "no column 'aa'; it has file, a, b; did you mean a"),
        ("file,age\n0,1.5\n1,2\n", {}, "no column of classes, findings or numbers; it has file, age; .*--label-column"),
        ("file,x\n0,\n1,\n", {"columns": ("x",), "task": "multilabel", "names": ()}, ""),
        ("file,c\n0,No Finding\n1,No Finding|Normal\n", {}, "column 'c' names no finding"),
        ("file,c\n0,1\n", {"task": "multilabel", "names": ("a", "b")}, "has no column 'a', 'b'; a column for each"),
        ("file,a,b,c\n0,0,1,1\n1,1,0,\n", {}, "each row has one 1 in the columns a, b; .*--task classification"),
        ("file,Mass,Mass \n0,1,1\n1,0,1\n", {}, "two columns 'Mass'"),
        # a code for unknown made numbers of the one finding, and nothing of the other
        ("file,Mass,Edema\n0,1,1\n" + "9,0,1\n" * 20 + "1,99,0\n", {},
         "'99' in column 'Mass', row 23 .*; numbers with --task regression"),
        # three findings 0, 1 and maybe, of one that has two outcomes
        ("file,Mass\n0,1\n1,maybe\n2,0\n", {"columns": ("Mass",), "task": "multilabel"},
         "'maybe' in column 'Mass', row 3"),
        ("file,hc\n0,1.5\n1,1e39\n", {}, "'1e39' in column 'hc', row 3 .* up to 3.4e.38, or nothing; correct"),
        ("file,hc\n0,1.5\n1,inf\n", {}, "'inf' in column 'hc', row 3"),
        ("file;ml\n0;1.000,5\n1;2.000,5\n", {}, "'1.000,5' in column 'ml'.*write 1000.5, with a decimal point"),
    ],
)  # fmt: skip
def test_wrong_tables_are_refused_in_one_line(
    text: str, wanted: dict[str, Any], told: str, tmp_path: Path
) -> None:
    if not told:
        assert not read(tmp_path, text, **wanted).targets
        return

    with pytest.raises(InputError, match=told) as caught:
        read(tmp_path, text, **wanted)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"file,ef\n0,12,5\n1,13,5\n", "line 2 has more cells than the header: '5'"),
        (b"label\n0,a\n1,b\n", "line 2 has more cells than the header: 'a'"),
        ("file,label\n0,a\n".encode("utf-16-le"), "bytes of 0, as of UTF-16"),
        (b"file,label\n", "it has no rows below a header"),
    ],
)
def test_tables_that_would_be_read_wrongly_are_refused(
    content: bytes, told: str, tmp_path: Path
) -> None:
    """A decimal comma made 12 of 12,5; R writes names of rows without a head, and each column had the next one's."""
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=told):
        label_columns.read(path, ["0.png", "1.png"])


def test_utf_16_is_read_by_its_mark_and_empty_cells_at_the_end_are_none(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("file;label;\n0;maligné;;\n1;bénin\n".encode("utf-16"))
    assert label_columns.read(path, ["0.png", "1.png"]).classes == {
        "0.png": "maligné",
        "1.png": "bénin",
    }


def test_findings_with_one_outcome_are_told(tmp_path: Path) -> None:
    found = read(tmp_path, "file,a,b,c\n0,0,1,1\n1,0,1,0\n2,0,1,\n", task="multilabel")
    assert "no image has 'a'" in found.notes
    assert "no image is known to lack 'b'" in found.notes


def test_a_finding_that_a_site_has_no_column_of_is_unknown_there(tmp_path: Path) -> None:
    found = read(tmp_path, "file,a\n0,1\n1,0\n", task="multilabel", names=("a", "b"))
    assert found.targets["0.png"] == pytest.approx((1, NAN), nan_ok=True)
    assert "the table has no column 'b': unknown here" in found.notes
    assert "nothing is known of 'b'" in found.notes
    zeros = read(tmp_path, "file,a\n0,1\n1,0\n", task="multilabel", names=("a", "b"), blank="zeros")
    assert math.isnan(zeros.targets["0.png"][1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sep=;\nfile;label\n0;a\n1;b\n", "classes by column 'label'"),
        ("file,Mass,Flu\n0,Y,n\n1,positive,present\n2,neg,absent\n", "2 findings by"),
    ],
)
def test_further_spellings(text: str, words: str, tmp_path: Path) -> None:
    assert words in read(tmp_path, text).columns


@pytest.mark.parametrize(
    "words",
    [
        "WAHR FALSCH",
        "VRAI FAUX",
        "OUI NON",
        "JA NEIN",
        "VERDADERO FALSO",
        "VERO FALSO",
        "WAAR ONWAAR",
        "s\u00ed no",
        "s\u00ec no",
        "JA NEE",
        "VERDADEIRO FALSO",
        "SANT FALSKT",
        "SAND FALSK",
        "SANN USANN",
        "TOSI EPÄTOSI",
        "PRAWDA FAŁSZ",
        "PRAVDA NEPRAVDA",
        "IGAZ HAMIS",
        "ADEVĂRAT FALS",
        "DOĞRU YANLIŞ",
        "ΑΛΗΘΗΣ ΨΕΥΔΗΣ",
        "ИСТИНА ЛОЖЬ",
        "ІСТИНА ХИБНІСТЬ",
    ],
)
def test_yes_and_no_as_spreadsheets_of_other_languages_write_them(
    words: str, tmp_path: Path
) -> None:
    """They were no findings: "no column of classes, findings or numbers"."""
    yes, no = words.split()
    found = read(
        tmp_path, f"file;Mass;Flu\n0;{yes};{yes}\n1;{no};{yes.title()}\n2;{no.lower()};{no}\n"
    )
    assert found.task == "multilabel"
    assert [*found.targets.values()] == [(1, 1), (0, 1), (0, 0)]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("file,n,Mass\n0,2,1\n1,3,0\n2,4,0\n", "not taken: columns of 0 and 1, Mass; --label-column takes them"),
        ("file,grade\n0,2\n1,3\n2,4\n", "'grade' is taken as numbers; --label-column grade takes it as classes"),
        ("file,finding\n0,a;b\n1,a\n2,b\n", "class 'a;b' may be several findings: | between them makes them such"),
        ("file,finding\n0,A|b\n1,a\n", "may say the same: 'A' and 'a'; they count as different"),
        ("file,label\n0,TRUE\n1,1\n2,0\n3,FALSE\n", "may say the same: '0' and 'FALSE'; '1' and 'TRUE'; they"),
        ("file,label\n0,ja\n1,Yes\n2,nein\n3,oui\n", "may say the same: 'Yes' and 'ja' and 'oui'; they"),
    ],
)  # fmt: skip
def test_what_a_table_could_say_too_is_said(text: str, note: str, tmp_path: Path) -> None:
    assert any(note in line for line in read(tmp_path, text).notes)


def test_a_finding_with_more_than_two_outcomes_is_said_not_to_be_taken(tmp_path: Path) -> None:
    """It was left out without a word."""
    found = read(tmp_path, "file,Mass,Flu,Edema\n0,1,1,0\n1,1,1,1\n2,0,0,severe\n")
    assert found.names == ("Mass", "Flu")
    assert "not taken: 'severe' in column 'Edema'; --label-column names the columns" in found.notes


@pytest.mark.parametrize(
    ("head", "unknown", "known", "noun"),
    [
        ("Mass,Edema", ",", "1,0", "known finding"),
        ("Mass,Edema", "-1,?", "1,0", "known finding"),
        ("months", "nan", "7.5", "number"),
        ("label", "", "a", "class"),
    ],
)
def test_a_centre_of_which_nothing_is_known_is_said_to_be_no_site(
    head: str, unknown: str, known: str, noun: str, tmp_path: Path
) -> None:
    """A federation of two hospitals became one of a single one without a word."""
    text = f"file,{head},centre\n0,{unknown},north\n1,{known},south\n2,{known},south\n"
    found = read(tmp_path, text.replace("\n2,1,0", "\n2,0,1").replace("2,7.5", "2,8.25"))
    assert f"no image of north has a {noun}: it is no site" in found.notes
    assert not any("south" in note for note in found.notes)


@pytest.mark.parametrize("choice", [{"task": "ordinal"}, {"uncertain": "half"}, {"blank": "ones"}])
def test_other_choices_are_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(choice))} '"):
        Wanted(**choice)


@pytest.mark.parametrize(
    ("name", "unit"),
    [("hc_mm", "mm"), ("EF (percent)", "percent"), ("volume [ml]", "ml"), ("lvef", ""), ("age_months", "months")],
)  # fmt: skip
def test_a_unit_is_read_from_the_end_of_a_columns_name(name: str, unit: str) -> None:
    assert unit_of(name) == unit


def records(targets: Any) -> list[Record]:
    return [
        Record(f"{n}.png", 0, str(n), "x", f"p{n // 2}", target=tuple(row))
        for n, row in enumerate(targets)
    ]


def test_sections_have_some_of_each_finding_and_of_each_part_of_a_number() -> None:
    draws = np.random.default_rng(0)
    findings = records((draws.random((400, 3)) < [0.04, 0.2, 0.5]).astype(float))
    sections = by_findings("own")(findings)
    assert all(sections[n] == sections[n + 1] for n in range(0, 400, 2))
    assert sections == [*reversed(by_findings("own")(findings[::-1]))]
    for name, share in zip(("train", "validate", "test"), (0.7, 0.1, 0.2), strict=True):
        chosen = np.array([r.target for r, s in zip(findings, sections, strict=True) if s == name])
        assert abs(len(chosen) - 400 * share) <= 4
        totals = np.array([record.target for record in findings]).sum(0)
        assert (np.abs(chosen.sum(0) - share * totals) <= 3).all()

    numbers = records(draws.normal(0, 1, (100, 1)))
    assert sorted({record.label for record in stratified(numbers)}) == [0, 1, 2, 3, 4]
    few = records([[NAN], [1.5], [2.5]])
    assert {record.label for record in stratified(few)} == {0}


UNSEEN = "\u200b"
TWO = pd.DataFrame({"file": ["0.png", "1.png"], "label": ["a", "b"]})
NO_TABLES = {
    "page": (TWO.to_html().encode(), "begins '<table border"),
    "list": (TWO.to_json(orient="records").encode(), 'begins \'.{"file"'),
    "packed": (gzip.compress(TWO.to_csv().encode()), "1f 8b 08 00: packed by gzip"),
    "spreadsheet": (
        b"PK\x03\x04\x14\x00\x06\x00\xff",
        "50 4b 03 04: a zip archive, as is a spreads",
    ),
    "old spreadsheet": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "d0 cf 11 e0: a file of an Office"),
    "UTF-16 without mark": (
        TWO.to_csv().encode("utf-16-le"),
        "UTF-16 without its mark; it begins with the",
    ),
}


@pytest.mark.parametrize("kind", NO_TABLES)
def test_what_is_called_csv_and_is_something_else_is_said(kind: str, tmp_path: Path) -> None:
    content, told = NO_TABLES[kind]
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(InputError, match=rf"t\.csv cannot be read \(it.*{told}"):
        label_columns.read(tmp_path / "t.csv", IMAGES)


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    "above", ["", "\n", ",\r\n", "\nsep=,\n", '"sep=,"\r\n', "# of R\n# 2020\n"]
)
def test_empty_rows_above_the_header_and_marks_are_passed_over(
    codec: str, above: str, tmp_path: Path
) -> None:
    (tmp_path / "t.csv").write_bytes((above + TWO.to_csv(index=False)).encode(codec))
    found = label_columns.read(tmp_path / "t.csv", IMAGES)
    assert found.classes == dict(TWO.itertuples(index=False))


@pytest.mark.parametrize(
    "odd", ["b\u200be", "be\ufeff", "\u00adbe", "b\u200ee", "\uff42e", "be\u00a0"]
)
def test_a_class_whose_name_differs_by_what_nobody_sees_is_one(odd: str, tmp_path: Path) -> None:
    text = f"file,label\n0,be\n1,{odd}\n2,c\n"
    found = read(tmp_path, text)
    assert found.classes == {"0.png": "be", "1.png": "be", "2.png": "c"}
    assert odd.isspace() or odd[-1] == "\xa0" or any(ascii(odd) in note for note in found.notes)
    several = read(tmp_path, text.replace("label", "findings").replace(",c", ",c|be"))
    assert several.names == ("be", "c")
    known = read(tmp_path, f"file,label\n0,be\n1,{odd}\n", task="classification", names=(odd, "c"))
    assert {*known.classes.values()} <= {odd, "be"}


@pytest.mark.parametrize("stem", ["a\u200b1", "\uff411", "\ufeffa1", "a1\u00ad"])
@pytest.mark.parametrize("in_table", [True, False])
def test_an_id_that_differs_by_what_nobody_sees_finds_its_image(
    stem: str, in_table: bool, tmp_path: Path
) -> None:
    cell, image = (stem, "a1.png") if in_table else ("a1", f"{stem}.png")
    found = read(tmp_path, f"\ufefffile,label\n{cell},x\nb,y\n", [image, "b.png"])
    assert found.classes == {image: "x", "b.png": "y"}
    [note] = [note for note in found.notes if "invisible" in note]
    assert note.endswith(f": {ascii(cell)} and {ascii(image)}")
    both = read(tmp_path, f"file,label\n{stem},x\nb,y\n", [f"{stem}.png", "b.png"])
    assert both.classes == {f"{stem}.png": "x", "b.png": "y"}
    assert "invisible" not in str(both.notes)


@pytest.mark.parametrize(
    ("name", "cell"), [("100000", "1E+05"), ("100000", "100,000"), ("1-2", "02. Jan")]
)
def test_an_id_that_a_spreadsheet_changed_is_told_with_the_cause(
    name: str, cell: str, tmp_path: Path
) -> None:
    text = f'file,label\n"{cell}",x\n'
    told = f"a spreadsheet may have made {cell!r} of a name"
    with pytest.raises(InputError, match=re.escape(told)):
        read(tmp_path, text, [f"{name}.png"])
    found = read(tmp_path, f"{text}b,y\n", [f"{name}.png", "b.png"])
    assert any(told in note for note in found.notes)


@pytest.mark.parametrize("cell", ["A1.PNG", "a\u20131.png", "'a1.png'", "a1.png;a2.png"])
def test_names_that_fit_no_image_are_shown_beside_one(cell: str, tmp_path: Path) -> None:
    told = f"in a column 'file', which has {cell!a}, and the folder 'a1.png'"
    with pytest.raises(InputError, match=re.escape(told)):
        read(tmp_path, f'file,label\n"{cell}",x\n', ["a1.png", "a-1.png"])


def test_a_row_that_is_there_twice_is_no_row_without_an_image(tmp_path: Path) -> None:
    found = read(tmp_path, "file,label\na,x\na,x\nb,y\nc,y\n", ["a.png", "b.png"])
    assert found.notes == ("1 rows of the table have no image: left out, c",)


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ("train test  val train test", True),
        ("Training_set Test_set Test_set val_1 Train test", True),
        ("0 1 0 1 0 1", False),
        ("testicular train test val train test", False),
    ],
)
def test_a_column_that_seems_to_divide_the_images_is_told(
    tmp_path: Path, cells: str, told: bool
) -> None:
    """One with an empty cell, or other words than `train`, was passed over without a word."""
    splits = cells.split(" ")
    rows = [f"{n},{'ab'[n % 2]},{splits[n]}" for n in range(6)]
    found = read(tmp_path, "\n".join(["file,label,part", *rows]))
    assert any("column 'part' is not used" in note for note in found.notes) == told


@pytest.mark.parametrize("code", ["-999", "-9", "9999.0", "-1", "-88", "-1.0"])
def test_a_number_that_says_unknown_is_told(tmp_path: Path, code: str) -> None:
    """It was learned as a measurement."""
    rows = [f"{n},{n + 0.5 if n % 3 else code}" for n in range(6)]
    found = read(tmp_path, "\n".join(["file,volume_ml", *rows]))
    assert f"column 'volume_ml' has {code} in 2 rows: leave these empty if nobody knows" in (
        found.notes
    )
    rows = [f"{n},{n + 99.5}" for n in range(6)]
    assert read(tmp_path, "\n".join(["file,volume_ml", *rows])).notes == ()


@pytest.mark.parametrize(
    ("cell", "advice"),
    [
        ("1,200", "write 1.200, with a decimal point, or 1200 if the comma parts thousands"),
        ("1.200,500", "write 1200.500, with a decimal point$"),
        ("12,5", "write 12.5, with a decimal point$"),
    ],
)
def test_a_comma_that_may_part_thousands_is_told_as_such(
    tmp_path: Path, cell: str, advice: str
) -> None:
    """The advice made 1.2 of 1200."""
    with pytest.raises(InputError, match=advice):
        read(tmp_path, f'file,volume\n0,"{cell}"\n1,999.5\n2,998\n')


@pytest.mark.parametrize("between", [", ", ";", " / "])
def test_findings_in_one_cell_are_told_also_if_none_is_alone(tmp_path: Path, between: str) -> None:
    rows = [f'{n},"A{between}{"BC"[n % 2]}"' for n in range(6)]
    found = read(tmp_path, "\n".join(["file,label", *rows]))
    assert any("may be several findings: | between them" in note for note in found.notes)


@pytest.mark.parametrize("name", ["unknown", "-", ".", "?"])
def test_a_name_that_says_nothing_is_told(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, f"file,label\n0,a\n1,b\n2,{name}\n")
    assert f"taken as names of classes: {name!r}; only an empty cell says no class" in found.notes


def test_the_only_number_below_0_is_no_code_where_others_are(tmp_path: Path) -> None:
    rows = [f"{n},{-n}.5" for n in range(6)]
    rows[1] = "1,-1"
    assert not any("nobody knows" in n for n in read(tmp_path, "\n".join(["file,z", *rows])).notes)


@pytest.mark.parametrize("name", ["fold", "is_train", "Split", "kfold", "test", "val_set"])
def test_a_column_that_divides_the_images_by_numbers_is_no_finding(
    tmp_path: Path, name: str
) -> None:
    """`is_train` became a finding to be predicted, and beside classes it was passed over without a word."""
    rows = [f"{n},{n % 2},{int(n % 3 == 0)},{int(n < 4)}" for n in range(6)]
    found = read(tmp_path, "\n".join([f"file,Mass,Effusion,{name}", *rows]))
    assert found.names == ("Mass", "Effusion")
    assert any(note.startswith(f"column {name!r} is not used") for note in found.notes)

    rows = [f"{n},{'ab'[n % 2]},{n % 3}" for n in range(6)]
    found = read(tmp_path, "\n".join([f"file,label,{name}", *rows]))
    assert any(note.startswith(f"column {name!r} is not used") for note in found.notes)


def test_a_column_of_tests_is_a_finding(tmp_path: Path) -> None:
    rows = [f"{n},{n % 2},{int(n % 3 == 0)}" for n in range(6)]
    found = read(tmp_path, "\n".join(["file,covid_test,Mass", *rows]))
    assert found.names == ("covid_test", "Mass")
    assert not any("is not used" in note for note in found.notes)


@pytest.mark.parametrize(
    ("end", "line"), [('2,"odd\n3,b\n4,a\n5,b\n', 4), ('2,"odd\n3,b\n4,"odd\n5,b\n', 4)]
)
def test_a_quotation_mark_without_its_other_takes_no_rows(
    tmp_path: Path, end: str, line: int
) -> None:
    """All rows up to the next mark, or the end, became one cell, a class of its own."""
    with pytest.raises(InputError, match=rf"a quotation mark in line {line}"):
        read(tmp_path, f"file,label\n0,a\n1,b\n{end}")

    text = 'file,label\n0,"a ""x"" b"\n1,"two\nlines"\n2,5" lesion\n3,"a ""x"" b"\n'
    assert {*read(tmp_path, text).classes.values()} == {'a "x" b', "two lines", '5" lesion'}


@pytest.mark.parametrize("name", ["4-Mar", "2024-03-04", "2024-03-04 00:00:00"])
def test_names_of_classes_that_a_program_respelled_are_told(tmp_path: Path, name: str) -> None:
    names = (name, "none", "3-4")
    rows = [f"{n},{names[n % 3]}" for n in range(6)]
    told = read(tmp_path, "\n".join(["file,label", *rows])).notes
    assert any(f"a spreadsheet may have made {name!r}" in note for note in told)
