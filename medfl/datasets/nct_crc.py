"""NCT-CRC-HE-100K: nine kinds of tissue in stained sections of colorectal cancer; CRC-VAL-HE-7K has other patients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medfl.datasets.base import DataSet, Download
from medfl.datasets.phantoms.phantom import Case, draw_files, even
from medfl.datasets.phantoms.scene import class_scenes
from medfl.datasets.readers.splitting import (
    LEFT_OUT,
    Record,
    by_group,
    cut_part,
    filled,
    validation_from_train,
)
from medfl.datasets.readers.tables import Layout, Table, class_folders

CLASSES = ("ADI", "BACK", "DEB", "LYM", "MUC", "MUS", "NORM", "STR", "TUM")
PLAIN = "NCT-CRC-HE-100K"
RAW = "NCT-CRC-HE-100K-NONORM"
OTHERS = "CRC-VAL-HE-7K"


def _tree(root: str) -> Layout:
    return class_folders(root, ("seeded",), root, (f"{root}.zip",), CLASSES)


def _others(folder: Path) -> Table | None:
    """Return the images of CRC-VAL-HE-7K, which lie in a folder or a zip of that name."""
    tree = _tree(OTHERS)
    inside = folder / OTHERS
    if inside.is_dir() and tree.find(inside):
        return tree.read(inside)
    if (folder / f"{OTHERS}.zip").is_file() and tree.find(folder):
        return tree.read(folder)

    return None


def _layout(root: str, *, tested: bool) -> Layout:
    """Return the layout with the images of `root`, and with those of the other patients if `tested`."""
    tree = _tree(root)

    def read(folder: Path) -> Table:
        test_table = _others(folder) if tested else None
        parts = {"train": tree.read(folder), "test": test_table or Table()}
        records = []
        for part, table in parts.items():
            records += [replace(record, sections={"official": part}) for record in table.records]

        return Table(records)

    return Layout(
        f"{root}/<class>/*.tif"
        + (f" + {OTHERS}/<class>/*.tif" if tested else "")
        + ", as folders or zips",
        ("seeded", "official") if tested else ("seeded",),
        lambda folder: tree.find(folder) and (not tested or _others(folder)),
        read,
        notes=("the colours are as scanned, not normalised",) if root == RAW else (),
    )


def seeded(records: Sequence[Record]) -> list[str]:
    """Cut NCT-CRC-HE-100K 70/10/20 within each class in the order of a hash; CRC-VAL-HE-7K is left out."""
    # The cut sees these images alone, so it is the same with and without the other patients.
    sections = cut_part("official", "train", by_group("nct_crc"))(records)
    for index, record in enumerate(records):
        if record.sections["official"] == "test":
            sections[index] = LEFT_OUT

    return sections


def _phantom_path(case: Case) -> str:
    """Return a phantom image's path: a fifth of them belong to the other patients."""
    kind = CLASSES[case.label]
    if case.fold == "test":
        return f"{OTHERS}/{kind}/{kind}-TCGA-{case.number:06d}.tif"
    return f"{PLAIN}/{kind}/{kind}-{case.number:06d}.tif"


_RECORD = "https://zenodo.org/records/1214456"

DATASET = DataSet(
    name="nct_crc",
    title="NCT-CRC-HE-100K: nine kinds of tissue in sections of colorectal cancer",
    classes=CLASSES,
    concepts=(
        "adipose tissue",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    ),
    channels=3,
    folders=("nct_crc", "nct-crc", "NCT-CRC-HE", "crc", "kather"),
    layouts=tuple(
        _layout(root, tested=tested) for root in (PLAIN, RAW) for tested in (True, False)
    ),
    rules={"seeded": filled(seeded), "official": validation_from_train("official")},
    licence="CC BY 4.0",
    source=_RECORD,
    citation="Kather, Halama, Marx: 100,000 histological images of human colorectal cancer and healthy tissue (v0.1). "
    "Zenodo, doi:10.5281/zenodo.1214456 (2018); Kather et al.: Predicting survival from colorectal cancer histology "
    "slides using deep learning. PLOS Medicine 16, e1002730 (2019)",
    draw=draw_files(class_scenes(len(CLASSES), 3), even(len(CLASSES)), _phantom_path),
    per_class=75,
    notes=(
        f"split seeded: 70/10/20 of {PLAIN} within each class by image, in the order of a hash of the file name; "
        f"{OTHERS} is left out",
        f"split official, where {OTHERS} is there: its patients, who are others, to test; 10 % of {PLAIN} to validate",
        "the files name neither the patient nor the hospital, so patches of one patient are in several sections",
    ),
    downloads=(
        Download(
            f"{_RECORD}/files/{PLAIN}.zip?download=1",
            f"{PLAIN}.zip",
            "md5:6fd702d11df6292bc054397ae038a464",
            11690284003,
        ),
        Download(
            f"{_RECORD}/files/{OTHERS}.zip?download=1",
            f"{OTHERS}.zip",
            "md5:2fd1651b4f94ebd818ebf90ad2b6ce06",
            800276929,
        ),
    ),
    download_note=f"12.5 GB; {RAW}.zip of the same page has the colours as scanned and is read too",
)
