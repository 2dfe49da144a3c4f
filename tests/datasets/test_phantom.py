from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import balanced_accuracy_score

import medfl.datasets as datasets
import medfl.datasets.phantoms.phantom as layouts
from medfl.core.errors import InputError, RunError
from tests.support.sweeps import mostly_slow

NAMES = tuple(name for name in datasets.names() if datasets.get(name).task == "classification")


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def pixels(name: str, folder: Path, section: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return images (N, 8 * 8 * C) in 0..1, labels and centres of a section."""
    items = datasets.datalist(name, folder, section)
    reader = datasets.ReadPixelsd("image", channels=datasets.get(name).channels, size=8)
    images = np.stack([reader(item)["image"].numpy().ravel() / 255 for item in items])
    return (
        images,
        np.array([item["label"] for item in items]),
        np.array([item["centre"] for item in items]),
    )


def test_the_same_seed_gives_the_same_files(tmp_path):
    for name in ("ham10000", "pbc", "oct_c8"):
        first, second, other = (
            files(
                datasets.write_phantom(
                    name, tmp_path / f"{name}{run}", seed=seed, per_class=12, size=16
                )
            )
            for run, seed in enumerate((3, 3, 4))
        )
        assert first == second
        assert first != other


@pytest.mark.parametrize("name", mostly_slow(NAMES, ("ham10000", "mednist", "pneumonia")))
def test_classes_can_be_learned_but_not_from_a_glance(phantoms, name):
    """A forest on 8 x 8 thumbnails, which see little texture, is clearly above chance on the test section."""
    train, labels, _ = pixels(name, phantoms[name], "train")
    test, expected, _ = pixels(name, phantoms[name], "test")
    forest = RandomForestClassifier(100, class_weight="balanced", random_state=0).fit(train, labels)
    chance = 1 / len(datasets.get(name).classes)
    assert balanced_accuracy_score(expected, forest.predict(test)) > chance + 0.25 * (1 - chance)


@pytest.mark.parametrize("name", ["ham10000", "isic19"])
def test_centres_differ_in_colour_and_brightness(phantoms, name):
    """The nearest mean colour of a centre's training images tells the centre of test images above chance."""

    def colours(section: str) -> tuple[np.ndarray, np.ndarray]:
        images, _, centres = pixels(name, phantoms[name], section)
        return images.reshape(len(images), 3, -1).mean(-1), centres

    (train, known), (test, expected) = colours("train"), colours("test")
    centres = np.unique(known)
    means = np.stack([train[known == centre].mean(0) for centre in centres])
    guessed = centres[np.linalg.norm(test[:, None] - means, axis=-1).argmin(1)]
    assert balanced_accuracy_score(expected, guessed) > 1 / len(centres) + 0.2


def test_lesions_with_two_images_show_the_same_lesion(phantoms):
    """Two images of a lesion lie closer together than images of two lesions of its class and centre."""
    folder = phantoms["ham10000"]
    reader = datasets.ReadPixelsd("image", size=16)
    groups: dict[tuple, dict[str, list[np.ndarray]]] = {}
    for section in ("train", "validate", "test"):
        for item in datasets.datalist("ham10000", folder, section):
            colour = reader(item)["image"].numpy().astype(float).reshape(3, -1).std(-1)
            groups.setdefault((item["label"], item["centre"]), {}).setdefault(
                item["group"], []
            ).append(colour)
    pairs = [
        np.linalg.norm(a[0] - a[1])
        for kind in groups.values()
        for a in kind.values()
        if len(a) == 2
    ]
    others = [
        np.linalg.norm(a[0] - b[0])
        for kind in groups.values()
        for a, b in itertools.pairwise(kind.values())
    ]
    assert len(pairs) > 30
    assert np.median(pairs) < 0.5 * np.median(others)


def test_real_layouts(phantoms):
    ham = phantoms["ham10000"]
    assert {path.name for path in ham.iterdir()} == {
        *(f"images_{centre}" for centre in datasets.get("ham10000").centres),
        *("labels.csv", "dermamnist_split.csv", "PHANTOM.json"),
    }
    with (phantoms["isic19"] / "train_test_split.csv").open() as file:
        assert next(csv.reader(file)) == ["image", "target", "center", "fold", "fold2"]
    assert (phantoms["oct_c8"] / "RetinalOCT_Dataset/val/DRUSEN").is_dir()
    with np.load(phantoms["pbc"] / "bloodmnist_32.npz") as arrays:
        assert arrays["train_images"].shape[1:] == (32, 32, 3)
        assert arrays["train_labels"].shape == (len(arrays["train_images"]), 1)
        assert arrays["test_images"].dtype == arrays["test_labels"].dtype == np.uint8
    marker = json.loads((ham / "PHANTOM.json").read_text())
    assert marker["images"] == len(list(ham.glob("images_*/*.jpg")))
    assert marker["data_set"] == "ham10000"
    assert datasets.is_phantom(ham)
    assert not datasets.is_phantom(ham.parent)


def test_default_is_small():
    for name in datasets.names():
        dataset = datasets.get(name)
        if name not in NAMES:
            assert 10 <= dataset.per_class <= 150
            assert dataset.size <= 64
            continue
        assert (
            500
            <= dataset.per_class * len(dataset.classes)
            <= {"femnist": 1650, "cifar100": 1200}.get(name, 750)
        )
        assert 28 <= dataset.size <= 64


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "a.txt").write_text("mine")
    with pytest.raises(InputError, match="used exists and is not empty"):
        datasets.write_phantom("pbc", tmp_path / "used", per_class=10, size=16)
    with pytest.raises(InputError, match="a.txt exists and is not empty"):
        datasets.write_phantom("pbc", tmp_path / "used" / "a.txt", per_class=10, size=16)
    assert files(tmp_path / "used") == {"a.txt": b"mine"}
    (tmp_path / "empty").mkdir()
    folder = datasets.write_phantom("pbc", tmp_path / "empty", per_class=10, size=16)
    assert datasets.check("pbc", folder).ok
    assert {path.name for path in tmp_path.iterdir()} == {"used", "empty"}


@pytest.mark.parametrize(
    ("numbers", "message"),
    [({"per_class": 9}, "9 images per class"), ({"size": 15}, "of 15 pixels")],
)
def test_numbers_out_of_range(tmp_path, numbers, message):
    with pytest.raises(InputError, match=message):
        datasets.write_phantom("pbc", tmp_path / "p", **numbers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_phantom_that_failed(tmp_path, monkeypatch, error):
    written = []

    def fail(path, image):
        written.append(path)
        if len(written) == 20:
            raise error
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")

    monkeypatch.setattr(layouts, "save", fail)
    with pytest.raises(RunError if isinstance(error, OSError) else KeyboardInterrupt):
        datasets.write_phantom("kvasir_v2", tmp_path / "p", per_class=10, size=16)
    assert len(written) == 20
    assert list(tmp_path.iterdir()) == []
