"""Lesion masks: HAM10000 by centre and as published, ISIC 2016, plain folders; phantom and real."""

from __future__ import annotations

import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import medfl.datasets as datasets
from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError
from medfl.datasets.ham10000 import CENTRES
from medfl.methods import load
from medfl.runs.public_data import plan_public

SECTIONS = ("train", "validate", "test")
ISIC = "ISBI2016_ISIC_Part1"


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "skin_lesion", tmp_path_factory.mktemp("skin") / "skin_lesion", size=32
    )


def lists(folder: Path, split: str | None = None) -> dict[str, list[datasets.Item]]:
    return {
        section: datasets.datalist("skin_lesion", folder, section, split) for section in SECTIONS
    }


def all_items(folder: Path, split: str | None = None) -> list[datasets.Item]:
    return [item for part in lists(folder, split).values() for item in part]


def zip_folder(folder: Path, inside: str = "") -> None:
    """Replace a folder by an archive of its files, with what macOS puts beside them."""
    with zipfile.ZipFile(f"{folder}.zip", "w") as file:
        for path in folder.rglob("*.*"):
            file.write(path, f"{inside}{path.relative_to(folder)}")
        file.writestr(f"__MACOSX/{inside}._x.png", "junk")
    shutil.rmtree(folder)


def test_the_phantom_is_ham10000_with_masks(phantom: Path) -> None:
    items = all_items(phantom)
    assert len(items) == pytest.approx(100, abs=3)
    centres = Counter(item["centre"] for item in items)
    assert set(centres) == set(CENTRES)
    assert centres["vidir_molemax"] > centres["vienna_dias"]
    assert set(Counter(item["group"] for item in items).values()) == {1, 2}
    pairs = [datasets.read_pair(item["image"], str(item["label"]), channels=3) for item in items]
    assert {shape for _, _, shape in pairs} == {(24, 32)}
    assert all(0.02 < mask.mean() < 0.9 for _, mask, _ in pairs)
    contrast = [
        picture[mask > 0].mean(0) - picture[mask == 0].mean(0) for picture, mask, _ in pairs
    ]
    assert np.mean([change.min() < -10 for change in contrast]) > 0.8
    assert datasets.check("skin_lesion", phantom).ok


def test_lesions_stay_together_at_every_centre(phantom: Path) -> None:
    found = lists(phantom)
    groups = [{item["group"] for item in part} for part in found.values()]
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert all(
        {item["centre"] for item in found[section]} == set(CENTRES) for section in ("train", "test")
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_phantom_has_all_sections(tmp_path: Path, seed: int) -> None:
    folder = datasets.write_phantom("skin_lesion", tmp_path / "p", per_class=10, size=16, seed=seed)
    assert all(lists(folder).values())


@pytest.fixture
def ham(phantom: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(phantom, tmp_path / "ham"))


def facts(items: list[datasets.Item]) -> list[tuple[str, str, str]]:
    return [(item["id"], item["centre"], item["group"]) for item in items]


def test_ham10000_zipped_as_in_the_shared_data(ham: Path) -> None:
    expected, plain = facts(all_items(ham)), datasets.checksum("skin_lesion", ham)
    for centre in CENTRES:
        zip_folder(ham / f"images_{centre}")
        zip_folder(ham / f"masks_{centre}")
    assert facts(all_items(ham)) == expected
    assert datasets.checksum("skin_lesion", ham) == plain
    assert datasets.check("skin_lesion", ham).ok


def test_a_changed_mask_changes_the_checksum(ham: Path) -> None:
    before = datasets.checksum("skin_lesion", ham)
    path = next((ham / "masks_rosendahl").iterdir())
    path.write_bytes(path.read_bytes() + b"\0")
    assert datasets.checksum("skin_lesion", ham) != before


@pytest.mark.parametrize("zipped", [False, True])
def test_ham10000_as_published(ham: Path, zipped: bool) -> None:
    expected = facts(all_items(ham))
    parts = [ham / f"HAM10000_images_part_{number}" for number in (1, 2)]
    masks = ham / "HAM10000_segmentations_lesion_tschandl"
    for folder in (*parts, masks):
        folder.mkdir()
    for number, path in enumerate(sorted(ham.glob("images_*/*.jpg"))):
        path.rename(parts[number % 2] / path.name)
    for path in ham.glob("masks_*/*.png"):
        path.rename(masks / f"{path.stem}_segmentation.png")
    if zipped:
        for folder in parts:
            zip_folder(folder)
        zip_folder(masks, f"{masks.name}/")
    text = (ham / "labels.csv").read_text().replace("centre", "dataset", 1)
    (ham / "HAM10000_metadata.tab").write_text(text.replace(",", "\t"))
    (ham / "labels.csv").unlink()
    assert facts(all_items(ham)) == expected
    assert datasets.splits("skin_lesion", ham) == ("lesion",)
    assert datasets.check("skin_lesion", ham).ok


def test_bad_rows_and_missing_files_are_told(ham: Path) -> None:
    items = sorted(all_items(ham), key=lambda item: item["id"])
    table = ham / "labels.csv"
    table.write_text(
        table.read_text().replace(
            f"{items[0]['id']},{items[0]['centre']}", f"{items[0]['id']},rome"
        )
    )
    Path(str(items[1]["label"])).unlink()
    Path(items[2]["image"]).unlink()
    shutil.copy(items[3]["image"], Path(str(items[3]["label"])).with_suffix(".jpg"))
    Path(str(items[3]["label"])).unlink()
    problems = datasets.check("skin_lesion", ham).problems
    ids = [item["id"] for item in items]
    assert (
        f"{ids[0]} in {table} has centre 'rome', the centres are {', '.join(CENTRES)}" in problems
    )
    assert f"{ids[1]} in {table}: its mask is missing" in problems
    assert f"{ids[2]} in {table}: its image is missing" in problems
    assert any(
        f"{ids[3]}.jpg of image" in line and "channels that differ" in line for line in problems
    )
    assert len(problems) == 4
    with pytest.raises(InputError, match="has centre 'rome'"):
        datasets.datalist("skin_lesion", ham, "train")


def isic(ham: Path, folder: Path, tests: bool = True) -> Path:
    """Lay the phantom out as ISIC 2016, three quarters of it for training; return the folder."""
    for number, item in enumerate(sorted(all_items(ham), key=lambda item: item["id"])):
        part = "Test" if number % 4 == 0 else "Training"
        if part == "Test" and not tests:
            continue
        for kind, uri, suffix in (
            ("Data", item["image"], ".jpg"),
            ("GroundTruth", item["label"], "_Segmentation.png"),
        ):
            place = folder / f"{ISIC}_{part}_{kind}"
            place.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(uri), place / f"{item['id']}{suffix}")
    return folder


@pytest.mark.parametrize("zipped", [False, True])
def test_isic_2016(ham: Path, tmp_path: Path, zipped: bool) -> None:
    folder, total = isic(ham, tmp_path / "isic2016"), len(all_items(ham))
    if zipped:
        for place in sorted(folder.iterdir()):
            zip_folder(place, f"{place.name}/")
    assert datasets.splits("skin_lesion", folder) == ("official", "whole", "image")
    found = lists(folder)
    assert len(found["test"]) == -(-total // 4)
    assert all(
        "_Test_" in item["image"] and "_Test_" in str(item["label"]) for item in found["test"]
    )
    train, validate = len(found["train"]), len(found["validate"])
    assert validate / (train + validate) == pytest.approx(0.1, abs=0.02)
    assert {len(part) for part in lists(folder, "image").values()} != {
        len(part) for part in found.values()
    }
    assert {item["centre"] for item in all_items(folder)} == {"unknown"}
    assert datasets.check("skin_lesion", folder).ok
    assert datasets.locate("skin_lesion", tmp_path) == folder


def test_all_training_pairs_of_isic_2016_may_be_public_data(ham: Path, tmp_path: Path) -> None:
    """Split whole: none of them validates; as public data it is taken without being named."""
    folder = isic(ham, tmp_path / "isic2016")
    published = len([*(folder / f"{ISIC}_Training_Data").iterdir()])
    sections = {
        name: datasets.datalist("skin_lesion", folder, name, "whole")
        for name in ("train", "validate", "test")
    }
    assert len(sections["train"]) == published
    assert sum(map(len, sections.values())) == len(all_items(ham))
    assert abs(len(sections["validate"]) - len(sections["test"])) <= 1
    options = {
        "public": f"skin_lesion:{folder}", "public_section": "", "public_items": 0, "public_size": 0, "lift": "refuse",
    }  # fmt: skip
    found = plan_public(load("fedhelp"), options, Bundle("lung_cxr"), "cpu", say=str)
    assert found is not None
    assert (found.section, found.record.items, found.record.data.split) == (
        "train",
        published,
        "whole",
    )


def test_the_training_pairs_of_isic_2016_alone(ham: Path, tmp_path: Path) -> None:
    folder = isic(ham, tmp_path / "isic", tests=False)
    assert datasets.splits("skin_lesion", folder) == ("image",)
    assert all(lists(folder).values())
    gone = next((folder / f"{ISIC}_Training_GroundTruth").iterdir())
    gone.unlink()
    shutil.copytree(folder, tmp_path / "again")
    found = datasets.notes("skin_lesion", tmp_path / "again")
    assert any(
        gone.name.removesuffix("_Segmentation.png") in note and "have no mask" in note
        for note in found
    )


def test_plain_folders(ham: Path, tmp_path: Path) -> None:
    folder = isic(ham, tmp_path / "plain", tests=False)
    (folder / f"{ISIC}_Training_Data").rename(folder / "images")
    (folder / f"{ISIC}_Training_GroundTruth").rename(folder / "masks")
    expected = [item["id"] for item in all_items(folder)]
    zip_folder(folder / "masks")
    assert datasets.splits("skin_lesion", folder) == ("image",)
    assert [item["id"] for item in all_items(folder)] == expected
    assert datasets.check("skin_lesion", folder).ok


# The real images


def test_real_counts_are_those_of_the_readme(real_data: Path) -> None:
    folder = datasets.locate("skin_lesion", real_data)
    assert folder == real_data / "ham10000"
    found = lists(folder)
    counts = Counter((item["centre"], section) for section, part in found.items() for item in part)
    readme = (
        Path(__file__).parents[2] / "bundles" / "skin_lesion" / "docs" / "README.md"
    ).read_text()
    for centre in CENTRES:
        row = [counts[centre, section] for section in SECTIONS]
        assert f"| {centre} | {' | '.join(map(str, [*row, sum(row)]))} |" in readme
    groups = [{item["group"] for item in part} for part in found.values()]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 7470
    for item in found["test"][::40]:
        assert datasets.read_pair(item["image"], str(item["label"]), channels=3)[2] == (150, 200)


@pytest.mark.slow
def test_all_real_pairs_are_in_order(real_data: Path) -> None:
    report = datasets.check("skin_lesion", real_data)
    assert report.ok, report.problems
    assert report.images == 10015
