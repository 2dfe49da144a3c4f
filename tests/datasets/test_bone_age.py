"""Bone age in the RSNA's layout: three tables with names of their own, months as numbers; the phantom is learned."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.ensemble import RandomForestRegressor
from sklearn.metrics import r2_score

import medfl.datasets as datasets
from medfl.bundle import case_metadata
from medfl.bundle.open import open_problem, with_data
from medfl.core.errors import InputError

NAME = "bone_age"
SECTIONS = ("train", "validate", "test")
SETS = {
    "boneage-training-dataset.csv": "id,boneage,male\n1377,180,False\n1378,12,False\n1379,94,True\n",
    "Validation Dataset.csv": "Image ID,male,Bone Age (months)\n1386,TRUE,30\n",
    "test.csv": "Case ID,Sex,Ground truth bone age (months)\n4360,M,168.9321\n4361,F,169.61\n",
}
IMAGES = {
    "boneage-training-dataset/boneage-training-dataset": (1377, 1378, 1379),
    "Bone Age Validation Set/boneage-validation-dataset-1": (1386,),
    "Bone Age Test Set/Test Set Images": (4360, 4361),
}


def written(folder: Path) -> Path:
    for place, numbers in IMAGES.items():
        (folder / place).mkdir(parents=True)
        for number in numbers:
            Image.fromarray(np.full((20, 16), 90, np.uint8)).save(folder / place / f"{number}.png")
    for name, text in SETS.items():
        (folder / name).write_text(text)
    return folder


def test_the_three_tables_are_read_as_published(tmp_path: Path) -> None:
    folder = written(tmp_path / "rsna-bone-age")
    assert datasets.locate(NAME, tmp_path) == folder
    found = {}
    for section in SECTIONS:
        for item in datasets.datalist(NAME, folder, section):
            found[item["id"]] = (section, item["label"], item["sex"])
    assert found == {
        "1377": ("train", (180.0,), "female"),
        "1378": ("train", (12.0,), "female"),
        "1379": ("train", (94.0,), "male"),
        "1386": ("validate", (30.0,), "male"),
        "4360": ("test", (168.9321,), "male"),
        "4361": ("test", (169.61,), "female"),
    }


def test_the_training_set_alone_is_cut_anew(tmp_path: Path) -> None:
    folder = written(tmp_path / "kaggle")
    (folder / "test.csv").unlink()
    (folder / "Validation Dataset.csv").rename(
        folder / "Bone Age Validation Set/Validation Dataset.csv"
    )
    shutil.rmtree(folder / "Bone Age Test Set")
    assert datasets.splits(NAME, folder) == ("image",)
    items = [item for part in datasets.sections(NAME, folder).values() for item in part]
    assert sorted(item["id"] for item in items) == ["1377", "1378", "1379", "1386"]
    with pytest.raises(InputError, match="split 'official' is not offered"):
        datasets.datalist(NAME, folder, "train", "official")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "1377,180,False",
            "1377,adult,False",
            "image 1377 has bone age 'adult', which is no number",
        ),
        (
            "1377,180,False",
            "1377,-1,False",
            "image 1377 has bone age '-1', which is no number from 0",
        ),
        ("1377,180,False", "1377,nan,False", "image 1377 has bone age 'nan', which is no number"),
        ("1377,180,False", "1999,180,False", "image 1999: its image is missing"),
        ("id,boneage,male", "id,age,male", "has no column 'boneage'"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    folder = written(tmp_path / "odd")
    table = folder / "boneage-training-dataset.csv"
    table.write_text(table.read_text().replace(old, new))
    with pytest.raises(InputError, match=problem):
        datasets.datalist(NAME, folder, "train")


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hands") / NAME
    return datasets.write_phantom(NAME, folder, per_class=12, size=32)


def test_the_phantom_has_all_sets_and_sexes(phantom: Path) -> None:
    assert all(datasets.sections(NAME, phantom).values())
    bundle = with_data(open_problem(NAME, {}), str(phantom), {}).bundle
    cases = case_metadata.read(bundle, "test", str(phantom))
    with (phantom / "test.csv").open() as file:
        sexes = {row["Case ID"]: row["Sex"] for row in csv.DictReader(file)}
    told = {ident: {"male": "M", "female": "F"}[case["sex"]] for ident, case in cases.items()}
    assert told == sexes
    assert bundle.classes == ("bone age",)
    assert all("target" in item and "label" not in item for item in bundle.items("train"))


def test_ages_can_be_learned(phantom: Path) -> None:
    reader = datasets.ReadPixelsd("image", channels=1, size=16)

    def arrays(section: str) -> tuple[np.ndarray, np.ndarray]:
        items = datasets.datalist(NAME, phantom, section)
        images = np.stack([reader(item)["image"].numpy().ravel() for item in items])
        return images, np.array([item["label"][0] for item in items])

    images, months = arrays("train")
    tested, expected = arrays("test")
    forest = RandomForestRegressor(100, random_state=0)
    assert r2_score(expected, forest.fit(images, months).predict(tested)) > 0.5
