"""LEAF's JSON files, writers as centres, the split by writer, and the hands of the phantom."""

from __future__ import annotations

import json
import os
import string
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

import medfl.datasets as datasets
from medfl.core.errors import InputError
from medfl.datasets.femnist import skim


def written(*labels: int, side: int = 2) -> dict[str, list]:
    """A writer's entry; every image is one grey of 255, the number of the image."""
    return {"x": [[number / 255] * side**2 for number in range(len(labels))], "y": list(labels)}


def save(path: Path, data: dict[str, dict[str, list]], **changed: object) -> None:
    content = {
        "users": [*data],
        "num_samples": [len(writer["y"]) for writer in data.values()],
        "user_data": data,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**content, **changed}))


def items(folder: Path, split: str | None = "seeded") -> dict[str, dict]:
    return {
        item["id"]: {**item, "section": section}
        for section, part in datasets.sections("femnist", folder, split).items()
        for item in part
    }


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    """52 writers of 3 images and one of 150, dealt to two files."""
    data = {f"w{number:02d}": written(0, 1, 2) for number in range(52)} | {
        "much": written(*[3] * 150)
    }
    names = [*data]
    for part in (0, 1):
        save(
            tmp_path / "data" / "all_data" / f"all_data_{part}.json",
            {name: data[name] for name in names[part::2]},
        )
    return tmp_path


def test_the_classes_are_in_leafs_order() -> None:
    """LEAF: digits 0 to 9, then A (code 65) is 10, a (code 97) is 36."""
    data = datasets.get("femnist")
    assert (data.classes[65 - 55], data.classes[97 - 61], data.classes[7]) == ("A", "a", "7")
    assert len(data.classes) == 62
    assert (data.concepts[0], data.concepts[10], data.concepts[61]) == (
        "digit 0",
        "uppercase letter A",
        "lowercase letter z",
    )
    assert set(data.classes) == set(string.ascii_letters + string.digits)


def test_images_are_read_where_they_stand_in_the_file(tmp_path: Path) -> None:
    """All 256 grey levels come back exactly as LEAF divided them by 255; 1 is white."""
    every = (np.arange(256) / 255).tolist()
    save(
        tmp_path / "all_data_0.json", {'a "quoted" name': {"x": [every, every[::-1]], "y": [61, 0]}}
    )
    found = items(tmp_path)
    first, second = (found[f'a "quoted" name/{row:04d}'] for row in (0, 1))
    assert (first["label"], second["label"]) == (61, 0)
    assert first["centre"] == 'a "quoted" name'
    assert first["group"] == first["id"]
    pixels = datasets.read_pixels(first["image"])
    assert (pixels.shape, pixels.dtype) == ((16, 16, 1), np.uint8)
    assert pixels.ravel().tolist() == list(range(256))
    assert datasets.read_pixels(second["image"]).ravel().tolist() == list(range(255, -1, -1))
    read = datasets.ReadPixelsd("image", channels=3, convert=True, size=32)(
        {"image": first["image"]}
    )["image"]
    assert read.shape == (3, 32, 32)


@pytest.mark.parametrize("place", [".", "all_data", "data/all_data"])
def test_where_the_files_may_lie(tmp_path: Path, place: str) -> None:
    for number in (0, 2, 10):
        save(tmp_path / place / f"all_data_{number}.json", {f"w{number}": written(number)})
    (tmp_path / place / "all_data_notes.json").write_text("not LEAF's")
    assert [(item["centre"], item["label"]) for item in items(tmp_path).values()] == [
        ("w0", 0),
        ("w10", 10),
        ("w2", 2),
    ]


@pytest.mark.parametrize("place", [".", "data"])
def test_leafs_own_sections_are_read_together(tmp_path: Path, place: str) -> None:
    """`-t sample` puts a writer into both files: the images of test go on where those of train ended."""
    save(tmp_path / place / "train" / "all_data_0_niid_1_keep_0_train_9.json", {"w": written(5, 6)})
    save(
        tmp_path / place / "test" / "all_data_0_niid_1_keep_0_test_9.json",
        {"w": written(7), "v": written()},
    )
    assert {key: item["label"] for key, item in items(tmp_path).items()} == {
        "w/0000": 5,
        "w/0001": 6,
        "w/0002": 7,
    }


def test_checksum_is_that_of_the_images_not_of_the_files(leaf: Path) -> None:
    before = datasets.checksum("femnist", leaf, "seeded")
    files = sorted((leaf / "data" / "all_data").iterdir())
    merged = {
        key: value
        for path in files
        for key, value in json.loads(path.read_text())["user_data"].items()
    }
    for path in files:
        path.unlink()
    save(leaf / "all_data_0.json", merged)
    assert datasets.checksum("femnist", leaf, "seeded") == before
    merged["w07"]["x"][1][2] = 1.0
    save(leaf / "all_data_0.json", merged)
    assert datasets.checksum("femnist", leaf, "seeded") != before


def test_split_writers_holds_out_whole_writers(leaf: Path) -> None:
    """35, 5 and 10 of the 52 writers with fewer than 150 images; writer `much` has 150 and takes part in no trial."""
    drawn = []
    for trial in ("writers", "writers:0", "writers:1"):
        sections = datasets.sections("femnist", leaf, trial)
        writers = {name: {item["centre"] for item in part} for name, part in sections.items()}
        assert {name: len(part) for name, part in writers.items()} == {
            "train": 35,
            "validate": 5,
            "test": 10,
        }
        assert len(set().union(*writers.values())) == 50
        assert all(len(part) == 3 * len(writers[name]) for name, part in sections.items())
        assert "much" not in set().union(*writers.values())
        drawn.append(writers)
    assert drawn[0] == drawn[1] != drawn[2]
    report = datasets.check("femnist", leaf)
    assert report.ok
    assert (report.images, report.split) == (150, "writers")
    assert {centre for rows in report.counts.values() for centre in rows} == {"writers"}
    assert len(items(leaf)) == 52 * 3 + 150


def test_split_seeded_cuts_every_class(phantoms: dict[str, Path]) -> None:
    counts = Counter(
        (item["section"], item["label"]) for item in items(phantoms["femnist"]).values()
    )
    assert {counts["train", label] for label in range(62)} == {18}
    assert {counts["validate", label] for label in range(62)} <= {2, 3}


def test_a_trial_belongs_to_the_split_that_is_drawn(leaf: Path) -> None:
    assert datasets.trial("femnist", "writers", 3) == "writers:3"
    assert datasets.trial("femnist", "writers:1", 3) == "writers:1"
    assert datasets.trial("femnist", "seeded", 3) == "seeded"
    assert datasets.trial("ham10000", "lesion", 3) == "lesion"
    for split in ("seeded:1", "writers:", "writers:one", "authors"):
        with pytest.raises(
            InputError,
            match=rf"split '{split}' is not offered.*splits there: writers\[:TRIAL\], seeded",
        ):
            datasets.sections("femnist", leaf, split)


def test_too_few_writers_are_told(tmp_path: Path) -> None:
    save(
        tmp_path / "all_data_0.json",
        {f"w{number}": written(1) for number in range(49)} | {"v": written(*[2] * 150)},
    )
    with pytest.raises(
        InputError, match="49 of 50 writers or centres have fewer than 150 images; .* draws 50"
    ) as caught:
        datasets.datalist("femnist", tmp_path, "train")
    assert "\n" not in str(caught.value)
    assert len(items(tmp_path)) == 199


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_samples": [3]}, r"w has 2 images, 2 labels, num_samples 3"),
        (
            {"user_data": {"w": {"x": [[0.0]], "y": [1, 2]}}},
            r"w has 1 images, 2 labels, num_samples 2",
        ),
        ({"user_data": {"w": written(1, 62)}}, r"w has label 62, the labels are 0 to 61"),
        (
            {"user_data": {"w": written(1, 2), "v": written(1)}},
            r"1 users, 1 num_samples and 2 entries in user_data",
        ),
        ({"user_data": {}}, r"1 users, 1 num_samples and 0 entries|no key 'w'"),
        (
            {"users": ["v"]},
            r"all_data_0.json cannot be read \(no key 'v'\); LEAF's JSON: users, num_samples",
        ),
        ({"user_data": {"w": {"x": 3, "y": [1]}}}, r"all_data_0.json cannot be read"),
        ({"num_samples": 2}, r"all_data_0.json cannot be read"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(tmp_path: Path, changed: dict, message: str) -> None:
    save(tmp_path / "all_data_0.json", {"w": written(1, 2)}, **changed)
    with pytest.raises(InputError, match=message) as caught:
        datasets.datalist("femnist", tmp_path, "train", "seeded")
    assert "all_data_0.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 1, 30, -1, -40])
def test_cut_files_are_told(tmp_path: Path, keep: int) -> None:
    save(tmp_path / "all_data_0.json", {"w": written(1, 2)})
    path = tmp_path / "all_data_0.json"
    path.write_text(path.read_text()[:keep])
    with pytest.raises(InputError, match=r"all_data_0.json cannot be read \(.+\)"):
        datasets.datalist("femnist", tmp_path, "train", "seeded")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "all_data_0.json")
    with pytest.raises(InputError, match="all_data_0.json cannot be read .*no plain file"):
        items(tmp_path)


@pytest.mark.parametrize(
    "image", [[0.5] * 3, [0.5] * 3 + [1.5], [0.5] * 3 + [-0.1], [0.5] * 3 + [float("nan")], []]
)
def test_a_damaged_image_is_named(tmp_path: Path, image: list[float]) -> None:
    save(tmp_path / "all_data_0.json", {"w": {"x": [image, [0.5] * 4], "y": [1, 2]}})
    report = datasets.check("femnist", tmp_path, split="seeded")
    assert len(report.problems) == 1
    assert "all_data_0.json!" in report.problems[0]
    assert "cannot be read" in report.problems[0]


def test_skim_is_json_with_slices() -> None:
    text = rb' {"a": [1, 2.5e-3 ,-4], "b\"]": [[], [7]], "c": {"d": null, "e": "[1,{"}, "f": [ {"g": []} ] } '
    found = skim(text)
    assert json.loads(text[found["a"]]) == [1, 0.0025, -4]
    assert [json.loads(text[place]) for place in found['b"]']] == [[], [7]]
    assert found["c"] == {"d": None, "e": "[1,{"}
    assert isinstance(found["f"][0]["g"], slice)
    with pytest.raises(ValueError, match="':' delimiter"):
        skim(b'{"a"}')


# The phantom


def test_any_35_writers_of_the_phantom_have_every_class(tmp_path: Path) -> None:
    """26 different writers a class: of 60, at most 25 are not among the training writers of a trial."""
    data = datasets.get("femnist")
    assert data.per_class == 60 - 35 + 1
    folder = datasets.write_phantom("femnist", tmp_path / "p", size=16)
    by_class = defaultdict(set)
    for item in items(folder).values():
        by_class[item["label"]].add(item["centre"])
    assert {len(writers) for writers in by_class.values()} == {26}
    assert len(set().union(*by_class.values())) == 60


def test_a_writer_is_recognised_and_the_background_is_light(phantoms: dict[str, Path]) -> None:
    """The brightness of images varies less within a writer than between writers."""
    brightness = defaultdict(list)
    for item in datasets.datalist("femnist", phantoms["femnist"], "train"):
        pixels = datasets.read_pixels(item["image"])
        assert np.median(pixels) > 128
        brightness[item["centre"]].append(np.median(pixels))
    within = np.mean([np.var(values) for values in brightness.values()])
    assert np.var([np.mean(values) for values in brightness.values()]) > 4 * within
