"""Lung masks: the four sources, Montgomery and Shenzhen in their forms, plain folders; phantom and real."""

from __future__ import annotations

import csv
import re
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import medfl.datasets as datasets
from medfl.core.errors import InputError
from medfl.datasets.readers.reading import JOINED

SECTIONS = ("train", "validate", "test")
SITES = ("other_publications", "radiopaedia", "rsna_journals", "sirm_italy")


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "lung_cxr", tmp_path_factory.mktemp("lungs") / "lung_cxr", size=32
    )


def items(folder: Path) -> dict[str, datasets.Item]:
    found = datasets.sections("lung_cxr", folder)
    return {item["id"]: item for section in SECTIONS for item in found[section]}


def pair(item: datasets.Item, size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    return datasets.read_pair(
        item["image"], str(item["label"]), channels=1, convert=True, size=size and (size, size)
    )[:2]


# The phantom


def test_the_phantom_has_the_layout_sites_and_patients_of_the_four_sources(phantom: Path) -> None:
    assert {path.name for path in phantom.iterdir()} == {
        "labels.csv",
        "images",
        "masks",
        "PHANTOM.json",
    }
    found = items(phantom)
    assert len(found) == pytest.approx(100, abs=3)
    sites = Counter(item["centre"] for item in found.values())
    assert tuple(sorted(sites)) == SITES
    assert sites["radiopaedia"] > sites["sirm_italy"]
    pictures = Counter(item["group"] for item in found.values())
    assert set(pictures.values()) == {1, 2}
    shapes = {pair(item)[1].shape for item in found.values()}
    assert len(shapes) > 2
    assert {width for _, width in shapes} == {32}
    for item in found.values():
        assert item["size"] == pair(item)[1].size
        assert 0.05 < pair(item)[1].mean() < 0.5
    assert datasets.check("lung_cxr", phantom).ok


def test_sections_keep_patients_together_at_every_site(phantom: Path) -> None:
    found = datasets.sections("lung_cxr", phantom)
    groups = [{item["group"] for item in found[section]} for section in SECTIONS]
    assert sum(map(len, groups)) == len(set().union(*groups))
    for section in ("train", "test"):
        assert {item["centre"] for item in found[section]} == set(SITES)
    assert len(found["train"]) / len(items(phantom)) == pytest.approx(0.7, abs=0.06)


@pytest.mark.parametrize("seed", range(5))
def test_the_smallest_phantom_has_all_sections(tmp_path: Path, seed: int) -> None:
    folder = datasets.write_phantom("lung_cxr", tmp_path / "p", per_class=10, size=16, seed=seed)
    assert all(datasets.sections("lung_cxr", folder).values())


def test_lungs_can_be_learned_but_not_from_brightness_alone(phantom: Path) -> None:
    """Where lungs lie in training pictures, and how dark, finds those of the test pictures well; a threshold does not.

    A pixel's score is its mean mask in training times its darkness in its own picture.
    """
    train, test = (
        [pair(item, 16) for item in datasets.datalist("lung_cxr", phantom, section)]
        for section in ("train", "test")
    )
    where = np.mean([mask for _, mask in train], axis=0)

    def dark(picture: np.ndarray) -> np.ndarray:
        return 1 - np.argsort(np.argsort(picture[..., 0].ravel())).reshape(16, 16) / 255

    def dice(scores: list[np.ndarray]) -> float:
        share = np.mean([mask.mean() for _, mask in train])
        found = [score >= np.quantile(score, 1 - share) for score in scores]
        pairs = zip(found, (mask for _, mask in test), strict=True)
        return float(
            np.mean(
                [2 * (one & (mask > 0)).sum() / (one.sum() + mask.sum()) for one, mask in pairs]
            )
        )

    assert dice([where * dark(picture) for picture, _ in test]) > 0.75
    assert dice([dark(picture) for picture, _ in test]) < 0.6


def test_sites_differ_in_their_look(phantom: Path) -> None:
    """The mean grey value of the sites' pictures spreads much more than those of halves of one site."""
    means = {
        site: [pair(item)[0].mean() for item in items(phantom).values() if item["centre"] == site]
        for site in SITES
    }
    between = np.std([np.mean(values) for values in means.values()])
    within = np.mean(
        [abs(np.mean(values[::2]) - np.mean(values[1::2])) for values in means.values()]
    )
    assert between > 3 * within


# The four sources


def rewrite(path: Path, change) -> None:
    with path.open(newline="") as file:
        rows = change(list(csv.DictReader(file)))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_zipped_sources_are_the_same_data(phantom: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(phantom, tmp_path / "lungs"))
    expected, plain = items(folder), datasets.checksum("lung_cxr", folder)
    for kind in ("images", "masks"):
        with zipfile.ZipFile(folder / f"{kind}.zip", "w") as file:
            for path in (folder / kind).iterdir():
                file.write(path, f"{kind}/{path.name}")
        shutil.rmtree(folder / kind)
    found = items(folder)
    assert [(item["id"], item["centre"], item["group"]) for item in found.values()] == [
        (item["id"], item["centre"], item["group"]) for item in expected.values()
    ]
    assert ".zip!" in next(iter(found.values()))["label"]
    assert datasets.checksum("lung_cxr", folder) == plain


def test_bad_rows_and_missing_files_are_told(phantom: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(phantom, tmp_path / "lungs"))
    rewrite(folder / "labels.csv", lambda rows: [{**rows[0], "site": "rome"}, *rows[1:]])
    (folder / "masks" / "cxr_001.png").unlink()
    (folder / "images" / "cxr_002.png").unlink()
    png(folder / "masks" / "cxr_003.png", np.zeros((10, 32), bool))
    report = datasets.check("lung_cxr", folder)
    for line, parts in zip(
        report.problems,
        (
            ("cxr_000.png", "has centre 'rome'"),
            ("cxr_001.png", "mask is missing"),
            ("cxr_002.png", "image is missing"),
            ("masks/cxr_003.png", "has 10 x 32 pixels"),
        ),
        strict=True,
    ):
        assert all(part in line for part in parts)
    rewrite(
        folder / "labels.csv",
        lambda rows: [{k: v for k, v in row.items() if k != "site"} for row in rows],
    )
    with pytest.raises(InputError, match="has no column 'site'; it needs file, site, patient"):
        datasets.datalist("lung_cxr", folder, "train")


def test_the_size_is_left_out_where_the_table_does_not_say_it(
    phantom: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(phantom, tmp_path / "lungs"))
    rewrite(folder / "labels.csv", lambda rows: [{**row, "width": ""} for row in rows])
    assert not any("size" in item for item in items(folder).values())


# Montgomery and Shenzhen

MONTGOMERY, SHENZHEN, MASKED = 138, 662, 566
LEFT, RIGHT = np.zeros((2, 8, 8), bool)
LEFT[2:6, 1:3] = RIGHT[2:6, 5:7] = True


def png(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def published(folder: Path, montgomery: int, shenzhen: int, masked: int) -> Path:
    """Write the two sets as their authors do, small."""
    picture = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for number in range(1, montgomery + 1):
        name = f"MCUCXR_{number:04d}_{number % 2}.png"
        png(folder / "MontgomerySet/CXR_png" / name, picture)
        png(folder / "MontgomerySet/ManualMask/leftMask" / name, LEFT)
        png(folder / "MontgomerySet/ManualMask/rightMask" / name, RIGHT)
    for number in range(1, shenzhen + 1):
        name = f"CHNCXR_{number:04d}_{number % 2}"
        png(folder / f"ChinaSet_AllFiles/CXR_png/{name}.png", np.repeat(picture[..., None], 3, -1))
        if number <= masked:
            png(folder / f"ChinaSet_AllFiles/mask/{name}_mask.png", (LEFT | RIGHT) * np.uint8(255))
    return folder


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("sets"), MONTGOMERY, SHENZHEN, MASKED)


def test_the_published_sets_have_704_pairs(sets: Path) -> None:
    found = items(sets)
    assert Counter(item["centre"] for item in found.values()) == {
        "montgomery": MONTGOMERY,
        "shenzhen": MASKED,
    }
    assert "96 of 800 images have no mask and are left out, first CHNCXR_0567_1" in datasets.notes(
        "lung_cxr", sets
    )
    report = datasets.check("lung_cxr", sets)
    assert report.ok
    assert report.images == 704
    for centre, total in (("montgomery", MONTGOMERY), ("shenzhen", MASKED)):
        shares = [report.counts[section][centre][0] / total for section in SECTIONS]
        assert shares == pytest.approx([0.7, 0.1, 0.2], abs=0.01)
    assert JOINED in found["MCUCXR_0001_1"]["label"]
    for name in ("MCUCXR_0001_1", "CHNCXR_0001_1"):
        assert np.array_equal(pair(found[name])[1], LEFT | RIGHT)
    assert datasets.locate("lung_cxr", sets / "MontgomerySet") == sets / "MontgomerySet"
    assert len(items(sets / "MontgomerySet")) == MONTGOMERY


def joined(source: Path, folder: Path) -> Path:
    """Lay the two sets out in the common joined form: CXR_png/ and masks/, Montgomery's without a suffix."""
    for part in ("MontgomerySet", "ChinaSet_AllFiles"):
        shutil.copytree(source / part / "CXR_png", folder / "CXR_png", dirs_exist_ok=True)
    shutil.copytree(source / "ChinaSet_AllFiles" / "mask", folder / "masks")
    for path in (source / "MontgomerySet/ManualMask/leftMask").iterdir():
        png(folder / "masks" / path.name, (LEFT | RIGHT) * np.uint8(255))
    return folder


@pytest.mark.parametrize("form", ["joined", "one level down", "one zip", "their own zips"])
def test_every_form_of_the_sets_has_the_same_cases(tmp_path: Path, form: str) -> None:
    source, folder = published(tmp_path / "source", 12, 14, 11), tmp_path / "data"
    folder.mkdir()
    if form == "their own zips":
        for part, name in (
            ("MontgomerySet", "NLM-MontgomeryCXRSet"),
            ("ChinaSet_AllFiles/CXR_png", "ChinaSet"),
        ):
            with zipfile.ZipFile(folder / f"{name}.zip", "w") as file:
                for path in (source / part).rglob("*.png"):
                    file.write(path, path.relative_to(source))
        shutil.copytree(source / "ChinaSet_AllFiles/mask", folder / "mask" / "mask")
    elif form == "one zip":  # such archives hold the tree twice
        tree = joined(source, tmp_path / "tree")
        with zipfile.ZipFile(folder / "archive.zip", "w") as file:
            for path in tree.rglob("*.png"):
                file.write(path, f"Lung Segmentation/{path.relative_to(tree)}")
                file.write(path, f"data/Lung Segmentation/{path.relative_to(tree)}")
    else:
        joined(source, folder if form == "joined" else folder / "Lung Segmentation")
    expected, found = items(source), items(folder)
    assert datasets.check("lung_cxr", folder).ok
    assert {key: (item["centre"], item["group"]) for key, item in found.items()} == {
        key: (item["centre"], item["group"]) for key, item in expected.items()
    }
    assert len(found) == 12 + 11
    assert np.array_equal(pair(found["MCUCXR_0002_0"])[1], LEFT | RIGHT)


def test_half_a_pair_of_lungs_and_a_mask_without_its_image_are_problems(tmp_path: Path) -> None:
    folder = published(tmp_path, 3, 3, 3)
    (folder / "MontgomerySet/ManualMask/leftMask/MCUCXR_0002_0.png").unlink()
    (folder / "ChinaSet_AllFiles/CXR_png/CHNCXR_0003_1.png").unlink()
    problems = datasets.check("lung_cxr", folder).problems
    assert any(
        re.search(r"rightMask/MCUCXR_0002_0\.png has no mask of the other lung", line)
        for line in problems
    )
    assert any(re.search(r"mask .*CHNCXR_0003_1_mask\.png has no image", line) for line in problems)
    assert len(problems) == 2


def test_plain_folders_know_no_sites(phantom: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(phantom, tmp_path / "plain"))
    (folder / "labels.csv").unlink()
    (folder / "masks" / "cxr_000.png").rename(folder / "masks" / "cxr_000_mask.png")
    found = items(folder)
    assert len(found) == len(items(phantom))
    assert {item["centre"] for item in found.values()} == {"unknown"}
    assert any("neither patients" in note for note in datasets.notes("lung_cxr", folder))


# The real images


def test_real_counts_are_those_of_the_readme(real_data: Path) -> None:
    folder = datasets.locate("lung_cxr", real_data)
    assert folder == real_data / "covid_cxr_lungs"
    report = datasets.check("lung_cxr", real_data)
    assert report.ok, report.problems
    assert (report.images, report.phantom) == (69, False)
    readme = (Path(__file__).parents[2] / "bundles" / "lung_cxr" / "docs" / "README.md").read_text()
    for site in SITES:
        row = [report.counts[section][site][0] for section in SECTIONS]
        assert f"| {site} | {' | '.join(map(str, [*row, sum(row)]))} |" in readme
    assert len({item["group"] for item in items(folder).values()}) == 50
    assert "69 of 50 patients" in readme


def test_the_demo_folder_is_taken_only_where_it_is_named(real_data: Path) -> None:
    found = items(real_data / "montgomery_jsrt_demo")
    assert {item["centre"] for item in found.values()} == {"unknown"}
    assert all(pair(item)[1].shape == (256, 256) for item in found.values())
    assert len(found) == 4
