"""The volume data sets: layouts, counts, splits and problems, on phantoms, on published tables and on real images."""

from __future__ import annotations

import csv
import re
import shutil
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

import medfl.datasets as datasets
from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError, RunError
from medfl.datasets import ixi_brain
from medfl.datasets.readers.download import fetch, unpack
from medfl.datasets.readers.splitting import Record
from medfl.datasets.readers.volumes import read_pair
from tests.datasets.test_volumes import save, save_dicom

SECTIONS = ("train", "validate", "test")
SUBJECT = "IXI002-Guys-0828"


@pytest.fixture
def real_folder(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Return the folder of a real data set; skips without it."""
    root: Path = request.getfixturevalue("real_data")

    def folder(name: str) -> Path:
        try:
            return datasets.locate(name, root)
        except InputError:
            pytest.skip(f"no {name} in {root}")

    return folder


def found(name: str, folder: Path, split: str | None = None) -> dict[str, list[datasets.Item]]:
    return {section: datasets.datalist(name, folder, section, split) for section in SECTIONS}


def sizes(name: str, folder: Path, split: str | None = None) -> list[int]:
    return [len(items) for items in found(name, folder, split).values()]


def ids(items: list[datasets.Item]) -> list[str]:
    return [item["id"] for item in items]


def told(name: str) -> dict[str, list[int]]:
    """Return the rows of the count table in a bundle's README."""
    text = (Bundle(name).root / "docs" / "README.md").read_text()
    return {
        row: list(map(int, numbers.split("|")))
        for row, numbers in re.findall(r"^\| (\w+) \|([\d |]+)\|$", text, re.M)
    }


def tiny(path: Path, content: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# Hippocampus


def test_hippocampus_as_published_and_as_plain_folders(
    volumes: dict[str, Path], tmp_path: Path
) -> None:
    expected = found("hippocampus", volumes["hippocampus"])
    assert sizes("hippocampus", volumes["hippocampus"]) == [14, 2, 4]
    nested = Path(shutil.copytree(volumes["hippocampus"], tmp_path / "a" / "Task04_Hippocampus"))
    tiny(nested / "imagesTr" / "._hippocampus_001.nii.gz", b"junk")
    tiny(nested / "dataset.json", b"{}")
    checksum = datasets.checksum("hippocampus", nested)
    for folder in (nested, tmp_path / "a"):
        assert [ids(items) for items in found("hippocampus", folder).values()] == [
            ids(e) for e in expected.values()
        ]
    for published, plain in (("imagesTr", "images"), ("labelsTr", "labels")):
        (nested / published).rename(tmp_path / "a" / plain)
    assert datasets.locate("hippocampus", tmp_path / "a") == tmp_path / "a"
    assert datasets.checksum("hippocampus", tmp_path / "a") == checksum


def test_hippocampus_sizes_are_those_of_the_volumes(volumes: dict[str, Path]) -> None:
    items = datasets.datalist("hippocampus", volumes["hippocampus"], "test")
    assert len({item["size"] for item in items}) > 2
    assert all(item["size"] == nib.load(item["image"]).get_fdata().size for item in items)
    assert {item["centre"] for item in items} == {"unknown"}


def test_images_may_be_dicom_series(tmp_path: Path) -> None:
    voxels = np.random.default_rng(0).integers(0, 99, (5, 6, 7))
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    for number in range(3):
        save_dicom(tmp_path / "images" / f"case{number}", voxels)
        save(tmp_path / "labels" / f"case{number}.nii.gz", (voxels > 50).astype(np.uint8))
    report = datasets.check("hippocampus", tmp_path)
    assert report.ok, report.problems
    assert report.images == 3
    assert datasets.datalist("hippocampus", tmp_path, "train")[0]["size"] == voxels.size
    before = datasets.checksum("hippocampus", tmp_path)
    save_dicom(tmp_path / "images" / "case0", voxels + 1)
    assert datasets.checksum("hippocampus", tmp_path) != before
    save_dicom(tmp_path / "images" / "case1", voxels, uid="1.2.826.0.1.5")
    report = datasets.check("hippocampus", tmp_path)
    assert len(report.problems) == 1
    assert "case1 holds 2 DICOM series" in report.problems[0]


def test_hippocampus_without_its_masks(volumes: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(volumes["hippocampus"], tmp_path / "h"))
    (folder / "labelsTr" / "hippocampus_003.nii.gz").unlink()
    assert any(
        "1 of 20 images have no mask" in note for note in datasets.notes("hippocampus", folder)
    )
    (folder / "imagesTr" / "hippocampus_004.nii.gz").unlink()
    with pytest.raises(InputError, match=r"hippocampus_004\.nii\.gz has no image"):
        datasets.datalist("hippocampus", folder, "train")


def test_check_names_every_bad_case(volumes: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(volumes["hippocampus"], tmp_path / "h"))
    mask = folder / "labelsTr" / "hippocampus_002.nii.gz"
    labels = np.asarray(nib.load(mask).dataobj)
    nib.save(nib.Nifti1Image(labels * np.uint8(2), np.diag((-1, -1, 1, 1))), mask)
    image = folder / "imagesTr" / "hippocampus_005.nii.gz"
    image.write_bytes(image.read_bytes()[:999])
    report = datasets.check("hippocampus", folder)
    assert not report.ok
    assert [("002" in line, "005" in line) for line in report.problems] == [
        (True, False),
        (False, True),
    ]


def test_the_fetched_archive_is_unpacked(volumes: dict[str, Path], tmp_path: Path) -> None:
    data = datasets.get("hippocampus")
    (download,) = data.downloads
    assert download.url.endswith(f"/{download.file}")
    published = replace(data, downloads=(replace(download, digest=None),))
    with tarfile.open(tmp_path / download.file, "w") as file:
        file.add(volumes["hippocampus"], "Task04_Hippocampus")
    said: list[str] = []
    assert fetch(published, tmp_path, show=said.append) == (tmp_path / download.file,)
    assert sizes("hippocampus", tmp_path) == [14, 2, 4]
    (tmp_path / download.file).write_bytes(b"no archive")
    with pytest.raises(RunError, match=r"Task04_Hippocampus\.tar cannot be unpacked"):
        fetch(published, tmp_path, show=said.append)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "way/outside"])
def test_an_archive_writes_nothing_elsewhere(name: str, tmp_path: Path) -> None:
    """By a name that leads there, or by a link that lies there already or comes before; devices are passed over."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for place in (folder, elsewhere):
        place.mkdir()
    (folder / "way").symlink_to(elsewhere)
    with tarfile.open(folder / "a.tar", "w") as archive:
        for kind, member in (
            (tarfile.SYMTYPE, "link"),
            (tarfile.FIFOTYPE, "pipe"),
            (tarfile.REGTYPE, "link/inside"),
        ):
            entry = tarfile.TarInfo(member)
            entry.type, entry.linkname = kind, str(elsewhere)
            archive.addfile(entry)
        archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(RunError, match="outside' lies elsewhere"):
        unpack(folder / "a.tar", folder)
    assert sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*")) == [
        "a.tar", "link", "link/inside", "way",
    ]  # fmt: skip
    assert not list(elsewhere.iterdir())


def test_hippocampus_counts_of_all_260_published_volumes() -> None:
    names = [f"hippocampus_{number:03d}" for number in range(1, 261)]
    records = [Record("", 0, name, "unknown", name) for name in names]
    sections = Counter(datasets.get("hippocampus").rules["seeded"](records))
    assert told("hippocampus")["unknown"] == [*(sections[section] for section in SECTIONS), 260]


def test_real_hippocampus(real_folder: Callable[[str], Path]) -> None:
    """All 174 pairs can be read, and the bundle's patch fits into all of them."""
    folder = real_folder("hippocampus")
    report = datasets.check("hippocampus", folder)
    assert report.ok, report.problems
    assert sizes("hippocampus", folder) == [122, 17, 35]
    shapes = [
        nib.load(item["image"]).shape
        for items in found("hippocampus", folder).values()
        for item in items
    ]
    assert (np.min(shapes, axis=0) >= Bundle("hippocampus").get("patch_size")).all()
    counts = [item["size"] for items in found("hippocampus", folder).values() for item in items]
    assert counts == np.prod(shapes, axis=1).tolist()


# IXI


@pytest.fixture(scope="module")
def fed_ixi(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The tree and the table of Fed-IXI: every subject of FLamby's table, all with the same two small volumes."""
    root: Path = request.getfixturevalue("real_data")
    table = root / "flamby_meta" / "ixi_metadata_tiny.csv"
    if not table.is_file():
        pytest.skip(f"no {table}")
    folder = tmp_path_factory.mktemp("fed_ixi")
    voxels = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    image, mask = (
        Path(save(folder / name, v)) for name, v in (("a.nii.gz", voxels), ("b.nii.gz", voxels % 2))
    )
    contents = image.read_bytes(), mask.read_bytes()
    for path in (image, mask):
        path.unlink()
    with table.open() as file:
        for row in csv.DictReader(file):
            hospital = ("Guys", "HH", "IOP")[int(row["Manufacturer"])]
            name = f"IXI{int(row['Patient ID']):03d}-{hospital}-{int(row['Patient ID']) + 700:04d}"
            tiny(folder / "IXI_sample" / name / "T1" / f"{name}_image.nii.gz", contents[0])
            tiny(folder / "IXI_sample" / name / "label" / f"{name}_label.nii.gz", contents[1])
            tiny(folder / "IXI_sample" / name / "T2" / f"{name}_image.nii.gz", b"not used")
    shutil.copy(table, folder / "metadata_tiny.csv")
    return folder


def published_counts(folder: Path) -> dict[str, tuple[int, int]]:
    """Return (train with validation, test) by hospital."""
    lists = found("ixi_brain", folder, "flamby")
    train = Counter(item["centre"] for section in ("train", "validate") for item in lists[section])
    test = Counter(item["centre"] for item in lists["test"])
    return {centre: (train[centre], test[centre]) for centre in sorted({*train, *test})}


PUBLISHED = {"Guys": (249, 62), "HH": (145, 36), "IOP": (59, 15)}


def test_the_readme_has_the_published_counts() -> None:
    assert {
        row: tuple(numbers[:2]) for row, numbers in told("ixi_brain").items() if row != "all"
    } == PUBLISHED


def test_fed_ixi_counts_are_the_published_ones(fed_ixi: Path) -> None:
    assert datasets.splits("ixi_brain", fed_ixi) == ("flamby", "subject")
    assert published_counts(fed_ixi) == PUBLISHED
    assert Counter(
        item["centre"] for item in datasets.datalist("ixi_brain", fed_ixi, "validate")
    ) == {
        "Guys": 25,
        "HH": 15,
        "IOP": 6,
    }
    items = [item for part in found("ixi_brain", fed_ixi).values() for item in part]
    assert {item["size"] for item in items} == {24}
    assert "/T1/" in items[0]["image"]
    with (fed_ixi / "metadata_tiny.csv").open() as file:
        tests = {int(row["Patient ID"]) for row in csv.DictReader(file) if row["Split"] == "test"}
    assert tests == ixi_brain.TEST
    assert sum(sizes("ixi_brain", fed_ixi, "subject")) == 566


def test_fed_ixi_counts_without_the_table_and_in_the_archive(fed_ixi: Path, tmp_path: Path) -> None:
    """As FLamby's download leaves it: the tree in a folder of the archive's name, or the archive alone, no table."""
    (tmp_path / "7kd5wj7v7p-3").mkdir()
    (tmp_path / "7kd5wj7v7p-3" / "IXI_sample").symlink_to(fed_ixi / "IXI_sample")
    expected = {section: ids(items) for section, items in found("ixi_brain", fed_ixi).items()}
    assert published_counts(tmp_path) == PUBLISHED
    assert {
        section: ids(items) for section, items in found("ixi_brain", tmp_path).items()
    } == expected
    packed = tmp_path / "packed"
    packed.mkdir()
    with zipfile.ZipFile(packed / "7kd5wj7v7p-3.zip", "w") as file:
        for path in sorted((fed_ixi / "IXI_sample").glob("*/*/*.nii.gz")):
            file.write(path, f"7kd5wj7v7p-3/{path.relative_to(fed_ixi)}")
    assert published_counts(packed) == PUBLISHED
    assert datasets.checksum("ixi_brain", packed) == datasets.checksum("ixi_brain", fed_ixi)
    item = datasets.datalist("ixi_brain", packed, "test")[0]
    image, mask = read_pair(item["image"], str(item["label"]), 2)
    assert image.shape == mask.shape == (1, 2, 3, 4)


def pair_of(folder: Path, subject: str = SUBJECT) -> Path:
    voxels = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    for kind, stem, values in (("T1", "image", voxels), ("label", "label", voxels % 2)):
        (folder / subject / kind).mkdir(parents=True)
        save(folder / subject / kind / f"{subject}_{stem}.nii.gz", values)
    return folder / subject


def table(*rows: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "metadata_tiny.csv").write_text(
        "\n".join(("Patient ID,Manufacturer,Split", *rows))
    )


IXI_PROBLEMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no label": (
        lambda f: shutil.rmtree(f / SUBJECT / "label"),
        f"subject {SUBJECT} has no volume in label",
    ),
    "two": (
        lambda f: save(f / SUBJECT / "T1" / "b.nii", np.eye(3)[None]),
        f"{SUBJECT} has two volumes in T1: .*b.nii",
    ),
    "hospital": (
        lambda f: pair_of(f, "IXI003-UCL-0001"),
        "subject IXI003-UCL-0001 is of hospital UCL, .* Guys, HH, IOP",
    ),
    "not listed": (table("7,0,test"), rf"subject {SUBJECT} is not in \S+metadata_tiny\.csv"),
    "other hospital": (
        table("2,1,test"),
        rf"subject {SUBJECT} is of hospital HH in \S+metadata_tiny\.csv",
    ),
    "bad table": (
        table("2,0,train", "3,5,test"),
        "has Patient ID '3', Manufacturer '5', Split 'test'; they are a number",
    ),
    "no column": (
        lambda f: (f / "metadata_tiny.csv").write_text("a,b\n1,2"),
        "has no column 'Patient ID'",
    ),
}


@pytest.mark.parametrize("name", IXI_PROBLEMS)
def test_problems_of_an_ixi_folder(tmp_path: Path, name: str) -> None:
    change, message = IXI_PROBLEMS[name]
    pair_of(tmp_path)
    change(tmp_path)
    with pytest.raises(InputError, match=message):
        datasets.datalist("ixi_brain", tmp_path, "train")


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, (0, 0, 1)), (2, (1, 0, 1)), (3, (1, 1, 1)), (4, (2, 1, 1)), (20, (14, 2, 4))],
)
def test_few_pairs_are_cut_so_that_each_section_gets_one(
    count: int, expected: tuple[int, int, int]
) -> None:
    records = [Record("", 0, f"case{i}", "unknown", f"case{i}") for i in range(count)]
    sections = Counter(ixi_brain.split_few(records))
    assert tuple(sections[section] for section in SECTIONS) == expected
    assert ixi_brain.split_few(records[::-1]) == ixi_brain.split_few(records)[::-1]


def test_whole_heads_name_no_hospital(tmp_path: Path) -> None:
    voxels = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    for name in ("a", "b", "c"):
        save(tmp_path / f"{name}_t1.nii.gz", voxels)
        save(tmp_path / f"{name}_brainmask.nii.gz", voxels % 2)
    report = datasets.check("ixi_brain", tmp_path)
    assert report.ok, report.problems
    assert report.counts == {section: {"unknown": (1,)} for section in SECTIONS}
    assert any("no hospital" in note for note in report.notes)
    with pytest.raises(InputError, match="split 'flamby' is not offered"):
        datasets.datalist("ixi_brain", tmp_path, "train", "flamby")


def test_real_whole_heads(real_folder: Callable[[str], Path]) -> None:
    folder = real_folder("ixi_brain")
    if folder.name != "brain_t1":
        pytest.skip("the folder is not that of the pairs")
    report = datasets.check("ixi_brain", folder)
    assert report.ok, report.problems
    assert report.images == 3


# Brain tissue


def test_tissue_subjects_stay_together_and_old_ones_are_tested_on(volumes: dict[str, Path]) -> None:
    folder = volumes["brain_tissue"]
    with (folder / "subjects.csv").open() as file:
        rows = {f"oasis_{row['id']}": row for row in csv.DictReader(file)}
    for split in ("subject", "age"):
        lists = found("brain_tissue", folder, split)
        groups = [{item["group"] for item in items} for items in lists.values()]
        assert all(groups)
        assert sum(map(len, groups)) == len(set().union(*groups)) < sum(map(len, lists.values()))
        assert all(
            item["group"] == rows[item["id"]]["subject"]
            for items in lists.values()
            for item in items
        )
    assert {float(rows[key]["age"]) >= 40 for key in ids(lists["test"])} == {True}
    assert {float(rows[key]["age"]) < 40 for key in ids(lists["train"] + lists["validate"])} == {
        True
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: (f / "oasis_9001_tissue.nii.gz").unlink(),
            r"oasis_9001_t1ss\.nii\.gz has no mask beside it",
        ),
        (
            lambda f: (f / "oasis_9001_t1ss.nii.gz").unlink(),
            r"oasis_9001_tissue\.nii\.gz has no image beside it",
        ),
        (
            lambda f: (f / "subjects.csv").write_text("id,subject,age\n9000,A,20\n"),
            r"scan 9001 is not in \S+subjects",
        ),
        (
            lambda f: (f / "subjects.csv").write_text("id,subject,age\n9000,A,old\n"),
            "scan 9000 has age 'old'",
        ),
    ],
)
def test_problems_of_a_tissue_folder(
    volumes: dict[str, Path], tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    for name in ("oasis_9000", "oasis_9001"):
        for path in volumes["brain_tissue"].glob(f"{name}_*"):
            shutil.copy(path, tmp_path)
    (tmp_path / "subjects.csv").write_text("id,subject,age\n9000,A,20\n9001,B,30\n")
    assert sum(sizes("brain_tissue", tmp_path)) == 2
    change(tmp_path)
    with pytest.raises(InputError, match=message):
        datasets.datalist("brain_tissue", tmp_path, "train")


def test_real_tissue(real_folder: Callable[[str], Path]) -> None:
    folder = real_folder("brain_tissue")
    report = datasets.check("brain_tissue", folder)
    assert report.ok, report.problems
    assert [*sizes("brain_tissue", folder), 23] == told("brain_tissue")["unknown"]
    assert (
        len({item["group"] for items in found("brain_tissue", folder).values() for item in items})
        == 20
    )
    assert sum(sizes("brain_tissue", folder, "age")[:2]) == 18
    assert sizes("brain_tissue", folder, "age")[2] == 5


# Fed-ISIC2019, whose images are not at hand


def test_fed_isic2019_counts_are_the_published_ones(real_data: Path, tmp_path: Path) -> None:
    source = real_data / "flamby_meta" / "isic2019_train_test_split.csv"
    shutil.copy(source, tmp_path / "train_test_split.csv")
    with (
        source.open() as file,
        zipfile.ZipFile(tmp_path / "ISIC_2019_Training_Input_preprocessed.zip", "w") as archive,
    ):
        for row in csv.DictReader(file):
            archive.writestr(f"ISIC_2019_Training_Input_preprocessed/{row['image']}.jpg", b"")
    lists = found("isic19", tmp_path, "flamby")
    train = Counter(item["centre"] for section in ("train", "validate") for item in lists[section])
    test = Counter(item["centre"] for item in lists["test"])
    assert [(train[centre], test[centre]) for centre in datasets.get("isic19").centres] == [
        (9930, 2483),
        (3163, 791),
        (2691, 672),
        (1807, 452),
        (655, 164),
        (351, 88),
    ]
