"""NCT-CRC-HE: its folders and zips, with the other patients and without, and its splits."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

import medfl.datasets as datasets
from medfl.core.errors import InputError

SECTIONS = ("train", "validate", "test")
PLAIN, RAW, OTHERS = "NCT-CRC-HE-100K", "NCT-CRC-HE-100K-NONORM", "CRC-VAL-HE-7K"


@pytest.fixture
def tissue(phantoms, tmp_path) -> Path:
    return Path(shutil.copytree(phantoms["nct_crc"], tmp_path / "tissue"))


def ids(folder: Path, split: str | None = None) -> dict[str, list[str]]:
    return {
        part: [item["id"] for item in datasets.datalist("nct_crc", folder, part, split)]
        for part in SECTIONS
    }


def pack(folder: Path, root: str) -> None:
    with zipfile.ZipFile(folder / f"{root}.zip", "w") as file:
        for path in sorted((folder / root).rglob("*.tif")):
            file.write(path, path.relative_to(folder))
    shutil.rmtree(folder / root)


def test_both_sets_are_written_as_published(tissue):
    """60 phantom patches of each class, a fifth of them of the other patients."""
    for root, number in ((PLAIN, 48), (OTHERS, 12)):
        assert sorted(path.name for path in (tissue / root).iterdir()) == sorted(
            datasets.get("nct_crc").classes
        )
        assert {
            len(list(path.glob(f"{path.name}-*.tif"))) for path in (tissue / root).iterdir()
        } == {number}
    item = datasets.datalist("nct_crc", tissue, "train")[0]
    assert datasets.read_pixels(item["image"]).shape == (32, 32, 3)


def test_other_patients_are_the_test_set_of_one_split_and_left_out_of_the_other(tissue):
    assert datasets.splits("nct_crc", tissue) == ("seeded", "official")
    seeded, official = ids(tissue), ids(tissue, "official")
    assert all("TCGA" in name for name in official["test"])
    assert len(official["test"]) == 108
    assert not any("TCGA" in name for part in SECTIONS for name in seeded[part])
    own = sorted(seeded["train"] + seeded["validate"] + seeded["test"])
    assert own == sorted(official["train"] + official["validate"])
    assert [len(seeded[part]) for part in SECTIONS] == [306, 36, 90]
    assert [len(official[part]) for part in SECTIONS] == [387, 45, 108]


def test_the_seeded_split_is_the_same_without_the_other_patients(tissue):
    expected = ids(tissue)
    shutil.rmtree(tissue / OTHERS)
    assert datasets.splits("nct_crc", tissue) == ("seeded",)
    assert ids(tissue) == expected
    with pytest.raises(InputError, match="split 'official' is not offered by nct_crc"):
        datasets.datalist("nct_crc", tissue, "test", "official")


@pytest.mark.parametrize("zipped", [(PLAIN,), (OTHERS,), (PLAIN, OTHERS)])
def test_zips_are_read_as_the_folders_are(tissue, zipped):
    expected, checksum = ids(tissue, "official"), datasets.checksum("nct_crc", tissue, "official")
    for root in zipped:
        pack(tissue, root)
    assert ids(tissue, "official") == expected
    assert datasets.checksum("nct_crc", tissue, "official") == checksum


def test_the_folder_of_the_classes_itself_can_be_given(tissue):
    assert ids(tissue / PLAIN) == ids(tissue)
    assert datasets.splits("nct_crc", tissue / PLAIN) == ("seeded",)


@pytest.mark.parametrize("packed", [False, True])
def test_images_without_normalised_colours_are_read_and_said(tissue, packed):
    expected = ids(tissue, "official")
    assert not any("as scanned" in note for note in datasets.notes("nct_crc", tissue))
    (tissue / PLAIN).rename(tissue / RAW)
    if packed:
        pack(tissue, RAW)
    assert ids(tissue, "official") == expected
    assert any("as scanned" in note for note in datasets.notes("nct_crc", tissue))


def test_normalised_colours_come_first_where_both_are_there(tissue):
    shutil.copytree(tissue / PLAIN, tissue / RAW)
    for item in datasets.datalist("nct_crc", tissue, "train"):
        assert RAW not in item["image"]


def test_the_other_patients_alone_are_no_data_set(tissue):
    shutil.rmtree(tissue / PLAIN)
    with pytest.raises(InputError, match="holds no nct_crc data"):
        datasets.datalist("nct_crc", tissue, "train")
