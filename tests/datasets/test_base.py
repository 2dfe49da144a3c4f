"""Layouts, data lists, splits and errors on phantoms that are moved into each published layout."""

from __future__ import annotations

import csv
import os
import shutil
import zipfile
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

import medfl.datasets as datasets
from medfl.core.errors import InputError
from medfl.datasets.phantoms.phantom import draw_medmnist, save
from medfl.datasets.readers.checking import read_case
from medfl.datasets.readers.splitting import Record
from medfl.datasets.readers.volumes import is_volume
from medfl.problem.tasks import KINDS
from tests.support.sweeps import mostly_slow

SECTIONS = ("train", "validate", "test")
SEGMENTED = tuple(name for name in datasets.names() if datasets.get(name).task == "segmentation")
FEW = ("ham10000", "mednist", "pneumonia")
NAMES = tuple(name for name in datasets.names() if datasets.get(name).task == "classification")


def lists(name: str, folder: Path, split: str | None = None) -> dict[str, list[dict]]:
    return {section: datasets.datalist(name, folder, section, split) for section in SECTIONS}


def labels(name: str, folder: Path, split: str | None = None) -> dict[str, Counter]:
    return {
        section: Counter(item["label"] for item in items)
        for section, items in lists(name, folder, split).items()
    }


def zip_folder(source: Path, target: Path, *, junk: bool = True) -> None:
    with zipfile.ZipFile(target, "w") as file:
        for path in sorted(source.rglob("*")):
            if path.is_file():
                file.write(path, f"{source.name}/{path.relative_to(source)}")
        if junk:
            file.writestr(f"__MACOSX/{source.name}/polyps/._a.jpg", "junk")
            file.writestr(f"{source.name}/polyps/.hidden.jpg", "junk")
            file.writestr(f"{source.name}/polyps/Thumbs.db", "junk")


def unpack_npz(path: Path, root: Path, folders: tuple[str, ...], sections: bool) -> None:
    with np.load(path) as arrays:
        for part in ("train", "val", "test"):
            for row, (pixels, label) in enumerate(
                zip(arrays[f"{part}_images"], arrays[f"{part}_labels"], strict=True)
            ):
                place = root / part if sections else root
                save(place / folders[int(label[0])] / f"{part}{row:04d}.jpeg", pixels)


def test_every_data_set_is_found_and_described():
    modules = Path(datasets.__file__).parent.glob("*.py")
    assert datasets.names() == tuple(
        sorted(path.stem for path in modules if "\nDATASET = " in path.read_text())
    )
    for name in datasets.names():
        dataset, segments = datasets.get(name), name in SEGMENTED
        assert dataset.name == name
        assert dataset.task in KINDS
        assert segments == (dataset.task == "segmentation")
        assert (dataset.task == "classification") == bool(dataset.concepts)
        assert (
            len(dataset.classes)
            == len(dataset.concepts or dataset.classes)
            == len(set(dataset.classes))
        )
        assert dataset.channels in (1, 3)
        assert dataset.licence
        assert dataset.source.startswith("https://")
        assert dataset.citation
        assert dataset.downloads or dataset.download_note
        assert set().union(*(layout.splits for layout in dataset.layouts)) == set(dataset.splits)


@pytest.mark.parametrize("name", mostly_slow(NAMES, FEW))
def test_items_of_every_split(phantoms, name):
    dataset, folder = datasets.get(name), phantoms[name]
    assert datasets.locate(name, folder) == folder
    layout = dataset.layout(folder)
    for split in layout.splits:
        found = lists(name, folder, split)
        items = [item for section in SECTIONS for item in found[section]]
        assert len({item["id"] for item in items}) == len(items)
        assert {item["label"] for item in items} == set(range(len(dataset.classes)))
        assert all(isinstance(item["label"], int) for item in items)
        centres = {item["centre"] for item in items}
        assert centres == set(dataset.centres) or (
            dataset.centres == ("writers",) and len(centres) >= 50
        )
        assert all(found[section] for section in SECTIONS)
        assert all(
            [item["id"] for item in part] == sorted(item["id"] for item in part)
            for part in found.values()
        )
        assert len(found["train"]) > 3 * len(found["validate"])
    assert lists(name, folder) == lists(name, folder, layout.splits[0])
    reader = datasets.ReadPixelsd("image", channels=dataset.channels, size=24)
    assert reader(datasets.datalist(name, folder, "test")[0])["image"].shape == (
        dataset.channels,
        24,
        24,
    )


@pytest.mark.parametrize("name", SEGMENTED)
def test_cases_of_every_split(phantoms, name):
    dataset, folder = datasets.get(name), phantoms[name]
    for split in dataset.layout(folder).splits:
        found = lists(name, folder, split)
        items = [item for section in SECTIONS for item in found[section]]
        assert (
            len({item["id"] for item in items})
            == len({item["label"] for item in items})
            == len(items)
        )
        assert {item["centre"] for item in items} <= set(dataset.centres)
        assert all(found[section] for section in SECTIONS)
        assert all(
            [item["id"] for item in part] == sorted(item["id"] for item in part)
            for part in found.values()
        )
        image, mask = items[0]["image"], items[0]["label"]
        known = (is_volume(mask), len(dataset.classes), dataset.channels, dataset.mixed_channels)
        read_case(Record(image, 0, "x", "", "x", mask=mask), *known)
        with pytest.raises(InputError):
            read_case(Record(image, 0, "x", "", "x", mask=f"{mask}.gone"), *known)


def test_lesion_split_keeps_lesions_together_and_the_published_ones_do_not(phantoms):
    def leaking(name: str, split: str) -> int:
        seen = defaultdict(set)
        for section, items in lists(name, phantoms[name], split).items():
            for item in items:
                seen[item["group"]].add(section)
        return sum(len(found) > 1 for found in seen.values())

    assert leaking("ham10000", "lesion") == leaking("isic19", "lesion") == 0
    assert leaking("ham10000", "flamby") > 0
    assert leaking("ham10000", "dermamnist") > 0


def test_centres_have_the_real_skew(phantoms):
    found = Counter(
        (i["centre"], i["label"])
        for part in lists("ham10000", phantoms["ham10000"]).values()
        for i in part
    )
    assert found["vidir_molemax", 0] == found["vienna_dias", 0] == 0
    assert found["vidir_molemax", 5] > 5 * found["vidir_molemax", 4] > 0
    found = Counter(
        (i["centre"], i["label"])
        for part in lists("isic19", phantoms["isic19"]).values()
        for i in part
    )
    assert {label for centre, label in found if centre == "MSK"} == {0, 1, 4}


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(datasets.names()), marks=pytest.mark.slow)]
)
def test_locate_looks_below_the_data_folder(phantoms, monkeypatch, names):
    folders = {name: phantoms[name] for name in names}
    root = folders["ham10000"].parent
    monkeypatch.setenv("MEDFL_DATA", str(root))
    for name, folder in folders.items():
        assert datasets.locate(name) == datasets.locate(name, root) == folder
    monkeypatch.delenv("MEDFL_DATA")
    with pytest.raises(InputError, match="MEDFL_DATA is not set.*labels.csv"):
        datasets.locate("ham10000")


def test_locate_says_what_it_looked_for(tmp_path):
    with pytest.raises(
        InputError, match=r"holds no kvasir_v2 data.*kvasir-dataset-v2/<class>"
    ) as caught:
        datasets.locate("kvasir_v2", tmp_path)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(InputError, match="is not a folder"):
        datasets.locate("kvasir_v2", tmp_path / "gone")
    with pytest.raises(
        InputError,
        match="data set 'ham' is not known; data sets: bone_age, brain_age, brain_tissue, chest_xray14",
    ):
        datasets.get("ham")


def test_unknown_split_and_section(phantoms):
    with pytest.raises(
        InputError, match="split 'iid' is not offered.*splits there: lesion, flamby, dermamnist"
    ):
        datasets.datalist("ham10000", phantoms["ham10000"], "train", "iid")
    with pytest.raises(
        InputError, match="section 'val' is not known; sections: train, validate, test"
    ):
        datasets.datalist("ham10000", phantoms["ham10000"], "val")


def test_lists_may_be_changed_by_the_caller(phantoms):
    datasets.datalist("pbc", phantoms["pbc"], "train")[0]["label"] = -1
    assert datasets.datalist("pbc", phantoms["pbc"], "train")[0]["label"] >= 0


@pytest.fixture
def ham(phantoms, tmp_path) -> Path:
    return Path(shutil.copytree(phantoms["ham10000"], tmp_path / "ham"))


def rewrite(path: Path, change) -> None:
    """Pass the rows of a table (dicts) through `change`, a function from the list to a new list."""
    with path.open(newline="") as file:
        rows = change(list(csv.DictReader(file)))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.mark.parametrize("column", ["image_id", "lesion_id", "dx", "centre"])
def test_missing_column(ham, column):
    rewrite(
        ham / "labels.csv",
        lambda rows: [{k: v for k, v in row.items() if k != column} for row in rows],
    )
    with pytest.raises(
        InputError, match=rf"labels.csv has no column '{column}'; it needs image_id, lesion_id, dx"
    ):
        datasets.datalist("ham10000", ham, "train")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dx", "wart", "has label 'wart', the labels are akiec, bcc"),
        ("centre", "rome", "has centre 'rome', the centres are"),
    ],
)
def test_label_and_centre_outside_the_known(ham, key, value, message):
    rewrite(ham / "labels.csv", lambda rows: [{**rows[0], key: value}, *rows[1:]])
    with pytest.raises(InputError, match=message) as caught:
        datasets.datalist("ham10000", ham, "train")
    assert "ISIC_9000000" in str(caught.value)


def test_missing_and_double_images(ham):
    gone = next((ham / "images_rosendahl").iterdir())
    gone.unlink()
    with pytest.raises(InputError, match=rf"{gone.stem} in .*: its image is missing"):
        datasets.datalist("ham10000", ham, "train")
    rewrite(ham / "labels.csv", lambda rows: [row for row in rows if row["image_id"] != gone.stem])
    rewrite(ham / "labels.csv", lambda rows: [rows[0], *rows])
    with pytest.raises(InputError, match="image ISIC_9000000 is listed 2 times"):
        datasets.datalist("ham10000", ham, "train")


def test_unreadable_and_cut_tables(ham):
    (ham / "labels.csv").write_text("image_id,lesion_id,dx,centre\nISIC_9000000,HAM_1\n")
    with pytest.raises(InputError, match=r"labels.csv line 2 is cut off"):
        datasets.datalist("ham10000", ham, "train")
    (ham / "labels.csv").write_bytes(b"\xff\x00bad")
    with pytest.raises(InputError, match=r"labels.csv cannot be read"):
        datasets.datalist("ham10000", ham, "train")


def test_dermamnist_split_needs_its_table(ham):
    (ham / "dermamnist_split.csv").unlink()
    assert len(datasets.datalist("ham10000", ham, "train", "lesion")) > 100
    with pytest.raises(
        InputError, match="split 'dermamnist': the folder's tables give no section for ISIC_9000000"
    ):
        datasets.datalist("ham10000", ham, "train", "dermamnist")


def test_ham10000_zipped_as_in_the_shared_data(ham):
    expected, plain = lists("ham10000", ham), datasets.checksum("ham10000", ham)
    for folder in sorted(ham.glob("images_*")):
        with zipfile.ZipFile(f"{folder}.zip", "w") as file:
            for path in folder.iterdir():
                file.write(path, path.name)
        shutil.rmtree(folder)
    found = lists("ham10000", ham)
    assert ".zip!" in found["train"][0]["image"]
    strip = {section: [{**item, "image": ""} for item in items] for section, items in found.items()}
    assert strip == {
        section: [{**item, "image": ""} for item in items] for section, items in expected.items()
    }
    assert datasets.checksum("ham10000", ham) == plain


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "table", ["HAM10000_metadata.tab", "HAM10000_metadata.csv", "HAM10000_metadata"]
)
def test_ham10000_as_published(ham, zipped, table):
    expected = lists("ham10000", ham, "lesion")
    images = sorted(ham.glob("images_*/*.jpg"))
    for number, path in enumerate(images):
        part = ham / f"HAM10000_images_part_{1 + number * 2 // len(images)}"
        part.mkdir(exist_ok=True)
        path.rename(part / path.name)
    for folder in ham.glob("images_*"):
        folder.rmdir()
    if zipped:
        for part in ham.glob("HAM10000_images_part_?"):
            zip_folder(part, Path(f"{part}.zip"))
            shutil.rmtree(part)
    rewrite(
        ham / "labels.csv", lambda rows: [{"dataset": row.pop("centre"), **row} for row in rows]
    )
    text = (ham / "labels.csv").read_text()
    (ham / table).write_text(text.replace(",", "\t") if table.endswith(".tab") else text)
    (ham / "labels.csv").unlink()
    found = lists("ham10000", ham)
    for section in SECTIONS:
        assert [{**i, "image": ""} for i in found[section]] == [
            {**i, "image": ""} for i in expected[section]
        ]
    assert len(datasets.datalist("ham10000", ham, "test", "dermamnist")) > 50


def test_dermamnist_file(tmp_path):
    draw_medmnist("dermamnist", 7, 3)(tmp_path, np.random.default_rng(0), 10, 28)
    assert {section: len(items) for section, items in lists("ham10000", tmp_path).items()} == {
        "train": 49,
        "validate": 7,
        "test": 14,
    }
    with pytest.raises(InputError, match="split 'lesion' is not offered"):
        datasets.datalist("ham10000", tmp_path, "train", "lesion")
    assert any(
        "neither lesions nor centres" in note for note in datasets.notes("ham10000", tmp_path)
    )


def test_isic19_layouts(phantoms, tmp_path):
    folder = Path(shutil.copytree(phantoms["isic19"], tmp_path / "isic"))
    expected = labels("isic19", folder)
    images = folder / "ISIC_2019_Training_Input_preprocessed"
    images.rename(folder / "ISIC_2019_Training_Input")
    (folder / "train_test_split.csv").rename(folder / "train_test_split")
    assert labels("isic19", folder) == expected
    zip_folder(folder / "ISIC_2019_Training_Input", folder / "ISIC_2019_Training_Input.zip")
    shutil.rmtree(folder / "ISIC_2019_Training_Input")
    assert labels("isic19", folder) == expected
    (folder / "HAM10000_metadata.csv").unlink()
    assert all(item["group"] == item["id"] for item in datasets.datalist("isic19", folder, "train"))
    rewrite(folder / "train_test_split", lambda rows: [{**rows[0], "target": "8"}, *rows[1:]])
    with pytest.raises(InputError, match="has label '8', the labels are 0, 1"):
        datasets.datalist("isic19", folder, "train")


@pytest.mark.parametrize(
    ("name", "root", "packed"),
    [
        ("kvasir_v2", "kvasir-dataset-v2", "kvasir-dataset-v2.zip"),
        ("oct_c8", "RetinalOCT_Dataset", "archive.zip"),
    ],
)
def test_class_folders_plain_zipped_and_one_level_down(phantoms, tmp_path, name, root, packed):
    expected = lists(name, phantoms[name])
    plain = datasets.checksum(name, phantoms[name])
    assert len(datasets.datalist(name, phantoms[name] / root, "train")) == len(expected["train"])
    assert datasets.is_phantom(datasets.locate(name, phantoms[name] / root))
    zip_folder(phantoms[name] / root, tmp_path / packed)
    assert not datasets.is_phantom(tmp_path)
    for section, items in lists(name, tmp_path).items():
        assert [item["id"] for item in items] == [item["id"] for item in expected[section]]
    assert datasets.checksum(name, tmp_path) == plain


def test_hidden_files_are_ignored(phantoms, tmp_path):
    folder = Path(shutil.copytree(phantoms["kvasir_v2"], tmp_path / "k"))
    expected = lists("kvasir_v2", folder)
    (folder / "kvasir-dataset-v2" / "polyps" / "._polyps-0001.jpg").write_text("junk")
    (folder / "kvasir-dataset-v2" / "polyps" / "readme.txt").write_text("junk")
    (folder / "__MACOSX" / "polyps").mkdir(parents=True)
    (folder / "__MACOSX" / "polyps" / "a.jpg").write_text("junk")
    assert lists("kvasir_v2", folder) == expected


@pytest.mark.parametrize(
    ("name", "file", "root"),
    [
        ("pbc", "bloodmnist_32.npz", "PBC_dataset_normal_DIB"),
        ("mednist", "mednist_32.npz", "MedNIST"),
    ],
)
def test_folders_without_sections(phantoms, tmp_path, name, file, root):
    dataset = datasets.get(name)
    unpack_npz(phantoms[name] / file, tmp_path / root, dataset.classes, sections=False)
    assert datasets.splits(name, tmp_path) == ("seeded",)
    total = 30 * len(dataset.classes)
    found = labels(name, tmp_path)
    assert [sum(found[section].values()) for section in SECTIONS] == [
        total * 7 // 10,
        total // 10,
        total // 5,
    ]
    assert all(set(part) == set(range(len(dataset.classes))) for part in found.values())


def test_pneumonia_folders_name_patients(tmp_path):
    pixels = np.zeros((8, 8), np.uint8)
    stems = {
        "NORMAL": ["IM-0001-0001", "IM-0001-0002", "NORMAL2-IM-0001-0001", "odd"],
        "PNEUMONIA": ["person7_bacteria_1", "person7_virus_2", "person70_virus_3"],
    }
    for part in ("train", "val", "test"):
        for kind, names in stems.items():
            for stem in names:
                save(tmp_path / "chest_xray" / part / kind / f"{stem}.jpeg", pixels)
    items = datasets.datalist("pneumonia", tmp_path, "validate")
    assert [item["group"] for item in items] == [
        *("NORMAL/IM-0001", "NORMAL/IM-0001", "NORMAL/NORMAL2-IM-0001", "NORMAL/odd"),
        *("PNEUMONIA/person70", "PNEUMONIA/person7", "PNEUMONIA/person7"),
    ]
    found = lists("pneumonia", tmp_path, "patient")
    groups = [{item["group"] for item in items} for items in found.values()]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 5


def test_medmnist_takes_the_largest_size_and_names_bad_labels(phantoms, tmp_path):
    folder = Path(shutil.copytree(phantoms["pbc"], tmp_path / "pbc"))
    shutil.copy(folder / "bloodmnist_32.npz", folder / "bloodmnist_224.npz")
    assert "bloodmnist_224.npz!" in datasets.datalist("pbc", folder, "train")[0]["image"]
    with np.load(folder / "bloodmnist_32.npz") as arrays:
        changed = dict(arrays)
    changed["val_labels"][3] = 8
    np.savez(folder / "bloodmnist_224.npz", **changed)
    with pytest.raises(
        InputError, match=r"bloodmnist_224.npz: val_labels\[3\] is 8, the labels are 0 to 7"
    ):
        datasets.datalist("pbc", folder, "train")
    del changed["val_labels"]
    np.savez(folder / "bloodmnist_224.npz", **changed)
    with pytest.raises(InputError, match="has no array 'val_labels'"):
        datasets.datalist("pbc", folder, "train")


def test_checksum_sees_content_labels_and_split(ham):
    before = datasets.checksum("ham10000", ham)
    assert before == datasets.checksum("ham10000", Path(os.path.relpath(ham)))
    assert before != datasets.checksum("ham10000", ham, "flamby")
    path = next((ham / "images_rosendahl").iterdir())
    path.write_bytes(path.read_bytes() + b"\0")
    assert datasets.checksum("ham10000", ham) != before
