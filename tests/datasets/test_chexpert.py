"""CheXpert in Stanford's layout: 1, 0, -1 and nothing in a cell, views, patients; what uncertain findings are."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import roc_auc_score

import medfl.datasets as datasets
from medfl.bundle.open import open_problem, with_data
from medfl.core.errors import InputError

NAME = "chexpert"
SECTIONS = ("train", "validate", "test")
HEAD = (
    "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Enlarged Cardiomediastinum,Cardiomegaly,Lung Opacity,Lung Lesion,"
    "Edema,Consolidation,Pneumonia,Atelectasis,Pneumothorax,Pleural Effusion,Pleural Other,Fracture,Support Devices"
)
TRAIN = (
    "CheXpert-v1.0-small/train/patient00001/study1/view1_frontal.jpg,Female,68,Frontal,AP,1.0,,,,,,,,,0.0,,,,1.0",
    "CheXpert-v1.0-small/train/patient00002/study2/view1_frontal.jpg,Female,87,Frontal,PA,,,-1.0,1.0,,-1.0,-1.0,,-1.0,,-1.0,,1.0,",
    "CheXpert-v1.0-small/train/patient00002/study1/view2_lateral.jpg,Female,83,Lateral,,,,1.0,1.0,,,-1.0,,,,,,1.0,",
    "CheXpert-v1.0-small/train/patient00005/study1/view1_frontal.jpg,Male,33,Frontal,LL,1.0,,0.0,,,1.0,,,,0.0,,,,1.0",
)
VALID = (
    "CheXpert-v1.0-small/valid/patient64541/study1/view1_frontal.jpg,Male,73,Frontal,AP,0.0,1.0,1.0,1.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,0.0",
)


def written(folder: Path, train: tuple[str, ...] = TRAIN) -> Path:
    for name, rows in (("train.csv", train), ("valid.csv", VALID)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("\n".join([HEAD, *rows]) + "\n")
    for row in (*TRAIN, *VALID):
        path = folder / row.partition(",")[0].partition("/")[2]
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 16), 90, np.uint8)).save(path)
    return folder


def items_of(folder: Path, split: str | None = None) -> dict[str, datasets.Item]:
    items = {}
    for section in SECTIONS:
        for item in datasets.datalist(NAME, folder, section, split):
            items[item["id"]] = item
    return items


def test_rows_are_read_as_published(tmp_path: Path) -> None:
    """Atelectasis, Cardiomegaly, Consolidation, Edema, Pleural Effusion, wherever their columns stand."""
    folder = written(tmp_path / "CheXpert-v1.0-small")
    assert datasets.locate(NAME, tmp_path) == folder
    items = items_of(folder, "all")
    found = {
        key: (item["label"], item["centre"], item["group"], item["sex"], item["age"])
        for key, item in items.items()
    }
    assert found == {
        "train/patient00001/study1/view1_frontal": (
            (0.0, 0.0, 0.0, 0.0, 0.0), "AP", "patient00001", "Female", "68",
        ),
        "train/patient00002/study2/view1_frontal": (
            (-1.0, -1.0, -1.0, -1.0, -1.0), "PA", "patient00002", "Female", "87",
        ),
        "train/patient00002/study1/view2_lateral": (
            (0.0, 1.0, -1.0, 0.0, 0.0), "lateral", "patient00002", "Female", "83",
        ),
        "train/patient00005/study1/view1_frontal": (
            (0.0, 0.0, 0.0, 1.0, 0.0), "AP", "patient00005", "Male", "33",
        ),
        "valid/patient64541/study1/view1_frontal": (
            (0.0, 1.0, 0.0, 0.0, 0.0), "AP", "patient64541", "Male", "73",
        ),
    }  # fmt: skip
    assert [item["id"] for item in datasets.datalist(NAME, folder, "test", "all")] == [
        "valid/patient64541/study1/view1_frontal"
    ]


def test_frontal_views_alone_unless_asked(tmp_path: Path) -> None:
    folder = written(tmp_path / NAME)
    lateral = items_of(folder, "all").keys() - items_of(folder).keys()
    assert lateral == {"train/patient00002/study1/view2_lateral"}


def test_some_of_the_parts_are_enough(tmp_path: Path) -> None:
    folder = written(tmp_path / NAME)
    (folder / "train/patient00001/study1/view1_frontal.jpg").unlink()
    assert len(items_of(folder, "all")) == 4
    assert any(
        "1 images of train.csv are not in the folder" in n for n in datasets.notes(NAME, folder)
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("Frontal,AP,1.0,,,", "Frontal,AP,1.0,,2,", "has finding '2'; 1, 0, -1 or nothing"),
        ("/train/patient00001/", "/train/someone/", "is no .../patient<number>/<study>/<view>"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    folder = written(tmp_path / "odd", (TRAIN[0].replace(old, new), *TRAIN[1:]))
    with pytest.raises(InputError, match=problem):
        datasets.datalist(NAME, folder, "train")


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chests") / NAME
    return datasets.write_phantom(NAME, folder, per_class=30, size=32)


@pytest.mark.parametrize("split", ["frontal", "all"])
def test_patients_are_in_one_section(phantom: Path, split: str) -> None:
    places = defaultdict(set)
    for section in SECTIONS:
        for item in datasets.datalist(NAME, phantom, section, split):
            places[item["group"]].add(section)
    assert {len(sections) for sections in places.values()} == {1}
    assert set().union(*places.values()) == set(SECTIONS)


@pytest.mark.parametrize(
    ("uncertain", "value"), [("ignore", math.nan), ("zeros", 0.0), ("ones", 1.0)]
)
def test_uncertain_findings_are_what_the_configuration_says(
    phantom: Path, uncertain: str, value: float
) -> None:
    """By stock transforms; where they are ignored, the loss has no gradient of them."""
    config = {"uncertain": uncertain, "image_size": 16, "network": "small_cnn"}
    bundle = with_data(open_problem(NAME, config), str(phantom), config).bundle
    entries = bundle.data("train")
    told = np.array([entry["label"] for entry in entries])
    row = int((told == -1).any(1).argmax())
    label = bundle.get("train#preprocessing")(entries[row])["label"]
    expected = torch.from_numpy(np.where(told[row] == -1, value, told[row])).float()
    torch.testing.assert_close(label, expected, equal_nan=True)

    prediction = torch.zeros(1, 5, requires_grad=True)
    bundle.loss(prediction, label[None]).backward()
    gradient = prediction.grad
    assert gradient is not None
    assert (gradient[0] == 0).tolist() == label.isnan().tolist()


def test_findings_can_be_learned(phantom: Path) -> None:
    """A forest a finding, on 16 x 16 thumbnails of the images of which it is known."""
    reader = datasets.ReadPixelsd("image", channels=1, size=16)

    def arrays(section: str) -> tuple[np.ndarray, np.ndarray]:
        items = datasets.datalist(NAME, phantom, section)
        images = np.stack([reader(item)["image"].numpy().ravel() for item in items])
        return images, np.array([item["label"] for item in items])

    images, truth = arrays("train")
    tested, expected = arrays("test")
    assert (truth == -1).any()
    assert not (expected == -1).any()
    areas = []
    for k in range(5):
        known = truth[:, k] >= 0
        forest = RandomForestClassifier(100, random_state=0).fit(images[known], truth[known, k])
        areas.append(roc_auc_score(expected[:, k], forest.predict_proba(tested)[:, 1]))
    assert np.mean(areas) > 0.75
