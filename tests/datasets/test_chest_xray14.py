"""ChestX-ray14 in the NIH's layout: findings, lists of patients, views, archives in part; the phantom is learned."""

from __future__ import annotations

import csv
import math
import shutil
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import roc_auc_score

import medfl.datasets as datasets
from medfl.bundle import case_metadata
from medfl.bundle.open import open_problem, with_data
from medfl.core.errors import InputError

NAME = "chest_xray14"
SECTIONS = ("train", "validate", "test")
TABLE = "Data_Entry_2017_v2020.csv"
HEAD = (
    "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,"
    "OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y]"
)
ROWS = (
    "00000001_000.png,Cardiomegaly|Emphysema,0,1,57,M,PA,2682,2749,0.143,0.143",
    "00000001_001.png,No Finding,1,1,58,M,AP,2894,2729,0.143,0.143",
    "00000002_000.png,Hernia,0,2,81,F,PA,2500,2048,0.171,0.171",
    "00000003_000.png,Pleural_Thickening|Mass|Nodule,0,3,74,F,PA,2582,2991,0.143,0.143",
)


def written(folder: Path, rows: tuple[str, ...] = ROWS, head: str = HEAD) -> Path:
    (folder / "images_001" / "images").mkdir(parents=True)
    (folder / TABLE).write_text("\n".join([head, *rows]) + "\n")
    for row in ROWS:
        Image.fromarray(np.full((20, 16), 90, np.uint8)).save(
            folder / "images_001" / "images" / row.partition(",")[0]
        )
    (folder / "train_val_list.txt").write_text(
        "00000001_000.png\n00000001_001.png\n00000003_000.png"
    )
    (folder / "test_list.txt").write_text("00000002_000.png")
    return folder


def items_of(folder: Path, split: str | None = None) -> dict[str, datasets.Item]:
    items = {}
    for section in SECTIONS:
        for item in datasets.datalist(NAME, folder, section, split):
            items[item["id"]] = item
    return items


def test_a_row_is_read_as_published(tmp_path: Path) -> None:
    folder = written(tmp_path / "NIH")
    assert datasets.locate(NAME, tmp_path) == folder
    items = items_of(folder)
    names = datasets.get(NAME).classes
    found = {
        key: [name for name, value in zip(names, item["label"], strict=True) if value == 1.0]
        for key, item in items.items()
    }
    assert found == {
        "00000001_000": ["Cardiomegaly", "Emphysema"],
        "00000001_001": [],
        "00000002_000": ["Hernia"],
        "00000003_000": ["Mass", "Nodule", "Pleural_Thickening"],
    }
    second = items["00000001_001"]
    assert (second["group"], second["centre"], second["sex"], second["age"]) == (
        "1",
        "AP",
        "M",
        "58",
    )
    assert set(second["label"]) == {0.0}
    tested = datasets.datalist(NAME, folder, "test")
    assert [item["id"] for item in tested] == ["00000002_000"]


def test_the_older_head_and_zips_are_read_alike(tmp_path: Path) -> None:
    """The table of 2017 ends its lines with a comma, and mirrors call the column Patient Sex."""
    expected = {
        key: {**item, "image": ""} for key, item in items_of(written(tmp_path / "a")).items()
    }
    head = HEAD.replace("Gender", "Sex") + ","
    folder = written(tmp_path / "b", tuple(f"{row}," for row in ROWS), head)
    (folder / TABLE).rename(folder / "Data_Entry_2017.csv")
    with zipfile.ZipFile(folder / "images.zip", "w") as file:
        for path in sorted((folder / "images_001" / "images").iterdir()):
            file.write(path, f"images/{path.name}")
    shutil.rmtree(folder / "images_001")
    found = {key: {**item, "image": ""} for key, item in items_of(folder).items()}
    assert found == expected
    assert datasets.check(NAME, folder).ok


def test_some_of_the_archives_are_enough(tmp_path: Path) -> None:
    folder = written(tmp_path / "part")
    (folder / "images_001" / "images" / "00000003_000.png").unlink()
    assert sorted(items_of(folder)) == ["00000001_000", "00000001_001", "00000002_000"]
    assert any(
        "1 images of Data_Entry_2017_v2020.csv are not in the folder: 00000003_000.png" in note
        for note in datasets.notes(NAME, folder)
    )


def test_without_the_lists_patients_are_cut_anew(tmp_path: Path) -> None:
    folder = written(tmp_path / "bare")
    (folder / "test_list.txt").unlink()
    assert datasets.splits(NAME, folder) == ("patient",)
    with pytest.raises(InputError, match="split 'official' is not offered"):
        datasets.datalist(NAME, folder, "train", "official")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("00000001_000.png,Cardiomegaly|Cough,0,1,57,M,PA,1,1,1,1", "has finding 'Cough'"),
        ("00000001_000.png,Mass,0,1,57,M,LL,1,1,1,1", "has centre 'LL', the centres are PA, AP"),
    ],
)
def test_what_the_source_does_not_have_is_refused(tmp_path: Path, row: str, problem: str) -> None:
    folder = written(tmp_path / "odd", (row, *ROWS[1:]))
    with pytest.raises(InputError, match=problem) as caught:
        datasets.datalist(NAME, folder, "train")
    assert "00000001_000.png" in str(caught.value)


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chests") / NAME
    return datasets.write_phantom(NAME, folder, per_class=20, size=32)


@pytest.mark.parametrize("split", ["official", "patient"])
def test_patients_are_in_one_section(phantom: Path, split: str) -> None:
    places = defaultdict(set)
    for section in SECTIONS:
        for item in datasets.datalist(NAME, phantom, section, split):
            places[item["group"]].add(section)
    assert {len(sections) for sections in places.values()} == {1}
    assert set().union(*places.values()) == set(SECTIONS)
    assert len(places) < len(items_of(phantom, split))  # some have several images


def test_sex_and_age_are_those_of_the_table(phantom: Path) -> None:
    bundle = with_data(open_problem(NAME, {}), str(phantom), {}).bundle
    cases = case_metadata.read(bundle, "test", str(phantom))
    with (phantom / TABLE).open() as file:
        rows = {row["Image Index"].removesuffix(".png"): row for row in csv.DictReader(file)}
    for ident, case in cases.items():
        assert case["age"] == float(rows[ident]["Patient Age"])
        assert case["sex"] == rows[ident]["Patient Gender"].lower()
        assert case["centre"] == rows[ident]["View Position"]


def test_findings_can_be_learned(phantom: Path) -> None:
    """A forest on 16 x 16 thumbnails tells most findings of the test images."""
    reader = datasets.ReadPixelsd("image", channels=1, size=16)

    def arrays(section: str) -> tuple[np.ndarray, np.ndarray]:
        items = datasets.datalist(NAME, phantom, section)
        images = np.stack([reader(item)["image"].numpy().ravel() for item in items])
        return images, np.array([item["label"] for item in items])

    images, truth = arrays("train")
    tested, expected = arrays("test")
    forest = RandomForestClassifier(200, random_state=0).fit(images, truth)
    areas = []
    for k, column in enumerate(forest.predict_proba(tested)):
        areas.append(roc_auc_score(expected[:, k], column[:, 1]))
    assert np.mean(areas) > 0.75
    assert not math.isnan(min(areas))


def test_real_images_in_the_layout_of_the_nih(real_data: Path, tmp_path: Path) -> None:
    """The shared images have a table of their own; written as the NIH's, the reader finds the same findings."""
    source = real_data / "nih_cxr64"
    with (source / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = datasets.get(NAME).classes
    folder = tmp_path / NAME
    (folder / "images").mkdir(parents=True)
    table = []
    with np.load(source / "images_64.npz") as arrays:
        for row, pixels in zip(rows, arrays["images"], strict=True):
            Image.fromarray(pixels).save(folder / "images" / row["file"])
            findings = "|".join(name for name in names if row[name] == "1") or "No Finding"
            table.append(
                f"{row['file']},{findings},{row['follow_up']},{row['patient']},{row['age']},{row['sex']},{row['view']}"
            )
    head = HEAD.partition(",OriginalImage")[0]
    (folder / TABLE).write_text("\n".join([head, *table]) + "\n")

    items = items_of(folder)
    assert len(items) == len(rows)
    for row in rows:
        item = items[row["file"].removesuffix(".png")]
        assert list(item["label"]) == [float(row[name]) for name in names]
        assert (item["group"], item["centre"]) == (row["patient"], row["view"])
    report = datasets.check(NAME, folder)
    assert report.ok
    assert not any("several sections" in line for line in report.warnings)
