from __future__ import annotations

import csv
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import medfl.datasets as datasets
from medfl.core.errors import InputError


@pytest.mark.parametrize("name", datasets.names())
def test_phantoms_pass(phantoms, name):
    report = datasets.check(name, phantoms[name])
    assert report.ok
    assert report.problems == ()
    assert report.phantom
    assert "phantom" in report.notes[0]
    assert report.images == sum(
        len(datasets.datalist(name, phantoms[name], s)) for s in ("train", "validate", "test")
    )
    found = json.loads(json.dumps(report.as_dict()))
    assert found["ok"]
    assert found["source"] == "phantom"
    for section, centres in report.counts.items():
        items = datasets.datalist(name, phantoms[name], section)
        for centre, row in centres.items():
            here = [i["label"] for i in items if centre in (i["centre"], "writers")]
            for label, count in enumerate(row):  # the label of a case is where its mask lies
                assert count == sum(known == label or not isinstance(known, int) for known in here)


def test_leakage_is_a_warning_with_its_numbers(phantoms):
    folder = phantoms["ham10000"]
    assert not any(
        "several sections" in line for line in datasets.check("ham10000", folder).warnings
    )
    report = datasets.check("ham10000", folder, split="dermamnist")
    assert report.ok
    train = {
        i["group"]
        for s in ("train", "validate")
        for i in datasets.datalist("ham10000", folder, s, "dermamnist")
    }
    test = datasets.datalist("ham10000", folder, "test", "dermamnist")
    line = next(line for line in report.warnings if "several sections" in line)
    assert (
        int(line.split(" test images")[0].rpartition("(")[2])
        >= sum(i["group"] in train for i in test)
        > 0
    )


def test_every_problem_is_one_line_naming_the_file(phantoms, tmp_path):
    folder = Path(shutil.copytree(phantoms["ham10000"], tmp_path / "ham"))
    with (folder / "labels.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    rows[1][2] = "wart"
    images = {path.stem: path for path in folder.glob("images_*/*.jpg")}
    cut, gone, grey, text = (images[row[1]] for row in rows[2:6])
    cut.write_bytes(cut.read_bytes()[:700])
    gone.unlink()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(grey)
    text.write_text("no image")
    rows.append(rows[6])
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    report = datasets.check("ham10000", folder)
    assert not report.ok
    assert len(report.problems) == 6
    expected = (
        (rows[1][1], "has label 'wart'"),
        (gone.stem, "is missing"),
        (rows[6][1], "is listed 2 times"),
        (cut.name, "cannot be read"),
        (grey.name, "has 1 channels; the data set has 3"),
        (text.name, "cannot be read"),
    )
    for name, problem in expected:
        assert sum(name in line and problem in line for line in report.problems) == 1, (
            name,
            problem,
            report.problems,
        )
    assert not any("\n" in line for line in report.problems)


def test_a_table_without_a_column_is_a_problem(phantoms, tmp_path):
    folder = Path(shutil.copytree(phantoms["ham10000"], tmp_path / "ham"))
    text = (folder / "labels.csv").read_text()
    (folder / "labels.csv").write_text(text.replace("dx,", "diagnosis,", 1))
    report = datasets.check("ham10000", folder)
    assert len(report.problems) == 1
    assert "has no column 'dx'" in report.problems[0]


def test_a_class_without_images_and_a_damaged_archive(phantoms, tmp_path):
    source = phantoms["kvasir_v2"] / "kvasir-dataset-v2"
    with zipfile.ZipFile(tmp_path / "kvasir-dataset-v2.zip", "w") as file:
        for path in sorted(source.rglob("*.jpg")):
            if path.parent.name != "polyps":
                file.write(path, f"{source.name}/{path.parent.name}/{path.name}")
    data = bytearray((tmp_path / "kvasir-dataset-v2.zip").read_bytes())
    data[data.index(b"JFIF") + 200] ^= 0xFF
    (tmp_path / "kvasir-dataset-v2.zip").write_bytes(data)
    report = datasets.check("kvasir_v2", tmp_path)
    assert report.warnings == tuple(
        f"section {s} has no image of polyps" for s in ("train", "validate", "test")
    )
    assert len(report.problems) == 1
    first = min(source.rglob("*.jpg"))
    assert (
        f"kvasir-dataset-v2.zip!kvasir-dataset-v2/{first.parent.name}/{first.name}"
        in report.problems[0]
    )


def test_no_layout_and_no_split(tmp_path, phantoms):
    with pytest.raises(InputError, match="known layouts"):
        datasets.check("pbc", tmp_path)
    with pytest.raises(InputError, match="split 'x' is not offered"):
        datasets.check("pbc", phantoms["pbc"], split="x")


def test_progress_goes_to_stderr(phantoms, capsys):
    datasets.check("pneumonia", phantoms["pneumonia"], progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "reading images" in shown.err


def test_an_array_without_rows_is_named(phantoms, tmp_path):
    folder = Path(shutil.copytree(phantoms["mednist"], tmp_path / "mednist"))
    (file,) = folder.glob("*.npz")
    with np.load(file) as held:
        arrays = dict(held)
    np.savez(file, **{**arrays, "test_images": np.float32(1)})
    (problem,) = datasets.check("mednist", folder).problems
    assert problem.startswith(f"array 'test_images' of {file} cannot be read (it has no rows)")


def test_an_image_that_is_listed_often_is_read_once(phantoms, tmp_path, monkeypatch):
    folder = Path(shutil.copytree(phantoms["lung_cxr"], tmp_path / "lungs"))
    table = folder / "labels.csv"
    head, *rows = table.read_text().splitlines()
    table.write_text("\n".join([head, *rows, *rows[:1] * 500]) + "\n")
    read = []
    monkeypatch.setattr(
        "medfl.datasets.readers.checking.read_case",
        lambda record, *_: (read.append(record.image), ""),
    )
    (problem,) = datasets.check("lung_cxr", folder).problems
    assert "is listed 501 times" in problem
    assert len(read) == len(set(read)) == len(rows)
