"""NCT-CRC-HE-100K: nine kinds of tissue in stained sections of colorectal cancer; CRC-VAL-HE-7K has other patients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medfl.datasets.base import DataSet, sheet
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

SHEET = sheet("nct_crc")
CLASSES = SHEET["classes"]
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
    **SHEET,
    layouts=tuple(
        _layout(root, tested=tested) for root in (PLAIN, RAW) for tested in (True, False)
    ),
    rules={"seeded": filled(seeded), "official": validation_from_train("official")},
    draw=draw_files(class_scenes(len(CLASSES), 3), even(len(CLASSES)), _phantom_path),
)
