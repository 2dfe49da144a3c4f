"""The real images as they lie in the data folder; the numbers are those of its README."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

import medfl.datasets as datasets

SECTIONS = ("train", "validate", "test")
HAM = {
    "rosendahl": (295, 296, 490, 30, 342, 803, 3),
    "vidir_modern": (32, 211, 475, 51, 680, 1832, 82),
    "vidir_molemax": (0, 2, 124, 30, 24, 3720, 54),
    "vienna_dias": (0, 5, 10, 4, 67, 350, 3),
}


def counts(name: str, folder: Path, split: str, key: str = "label") -> dict[str, Counter]:
    return {
        s: Counter(item[key] for item in datasets.datalist(name, folder, s, split))
        for s in SECTIONS
    }


def groups(folder: Path, split: str) -> dict[str, set[str]]:
    return {
        s: {item["group"] for item in datasets.datalist("ham10000", folder, s, split)}
        for s in SECTIONS
    }


def test_ham10000_counts(real_data):
    folder = datasets.locate("ham10000", real_data)
    assert folder == real_data / "ham10000"
    assert not datasets.is_phantom(folder)
    items = [item for s in SECTIONS for item in datasets.datalist("ham10000", folder, s)]
    assert len(items) == len({item["id"] for item in items}) == 10015
    found = Counter((item["centre"], item["label"]) for item in items)
    assert {c: tuple(found[c, label] for label in range(7)) for c in HAM} == HAM


def test_ham10000_lesion_split(real_data):
    folder = real_data / "ham10000"
    found = groups(folder, "lesion")
    assert sum(map(len, found.values())) == len(set().union(*found.values())) == 7470
    sizes = [sum(part.values()) for part in counts("ham10000", folder, "lesion").values()]
    assert [round(size / 10015, 2) for size in sizes] == [0.7, 0.1, 0.2]
    by_class = counts("ham10000", folder, "lesion")
    for label, total in enumerate(map(sum, zip(*HAM.values(), strict=True))):
        assert by_class["test"][label] / total == pytest.approx(0.2, abs=0.03)


def test_ham10000_flamby_split(real_data):
    folder = real_data / "ham10000"
    found = counts("ham10000", folder, "flamby", "centre")
    assert found["test"] == {
        "rosendahl": 452,
        "vidir_modern": 672,
        "vidir_molemax": 791,
        "vienna_dias": 88,
    }
    train = found["train"] + found["validate"]
    assert train == {
        "rosendahl": 1807,
        "vidir_modern": 2691,
        "vidir_molemax": 3163,
        "vienna_dias": 351,
    }
    parts = groups(folder, "flamby")
    assert len((parts["train"] | parts["validate"]) & parts["test"]) == 696
    assert not parts["train"] & parts["validate"]
    assert sum(found["validate"].values()) == pytest.approx(801, abs=5)


def test_ham10000_dermamnist_split(real_data):
    folder = real_data / "ham10000"
    found = counts("ham10000", folder, "dermamnist")
    expected = {
        "train": (228, 359, 769, 80, 779, 4693, 99),
        "validate": (33, 52, 110, 12, 111, 671, 14),
        "test": (66, 103, 220, 23, 223, 1341, 29),
    }
    assert {s: tuple(found[s][label] for label in range(7)) for s in SECTIONS} == expected
    train = groups(folder, "dermamnist")["train"]
    test = datasets.datalist("ham10000", folder, "test", "dermamnist")
    assert sum(item["group"] in train for item in test) == 693


def test_isic19_is_found_as_four_of_six_centres(real_data):
    assert datasets.locate("isic19", real_data) == real_data
    found = counts("isic19", real_data, "flamby", "centre")
    assert found["test"] == {
        "rosendahl": 452,
        "vidir_modern": 672,
        "vidir_molemax": 791,
        "vienna_dias": 88,
    }
    labels = sum(counts("isic19", real_data, "flamby").values(), Counter())
    assert labels == {0: 1113, 1: 6705, 2: 514, 3: 130, 4: 1099, 5: 115, 6: 142, 7: 197}
    notes = datasets.notes("isic19", real_data)
    assert "ONLY FOUR OF SIX CENTRES" in notes[0]
    assert "BCN" in notes[0]
    assert "MSK" in notes[0]


def test_pneumonia_and_mednist_counts(real_data):
    folder = datasets.locate("pneumonia", real_data)
    assert counts("pneumonia", folder, "official") == {
        "train": {0: 1214, 1: 3494},
        "validate": {0: 135, 1: 389},
        "test": {0: 234, 1: 390},
    }
    folder = datasets.locate("mednist", real_data)
    found = counts("mednist", folder, "file")
    assert [found["train"][label] for label in range(6)] == [415, 405, 430, 434, 406, 430]
    assert [found["validate"][label] for label in range(6)] == [61, 68, 55, 54, 65, 57]
    assert [found["test"][label] for label in range(6)] == [124, 127, 115, 112, 129, 113]


def test_real_images_are_read_fast(real_data):
    """Well under 10 ms an image from the archives at 64 pixels, one thread; the table in under a second."""
    folder = real_data / "ham10000"
    items = datasets.datalist("ham10000", folder, "test")[::20]
    reader = datasets.ReadPixelsd("image", channels=3, size=64)
    start = time.process_time()
    shapes = {tuple(reader(item)["image"].shape) for item in items}
    assert (time.process_time() - start) / len(items) < 0.01
    assert shapes == {(3, 64, 64)}


def test_check_of_real_images(real_data):
    for name, images in (("pneumonia", 5856), ("mednist", 3600)):
        report = datasets.check(name, real_data)
        assert report.ok, report.problems
        assert report.images == images
        assert not report.phantom


@pytest.mark.slow
def test_check_of_all_ham10000_images(real_data):
    report = datasets.check("ham10000", real_data, split="flamby")
    assert report.ok, report.problems
    assert report.images == 10015
    assert any(
        "patients or lesions have images in several sections" in line for line in report.warnings
    )
