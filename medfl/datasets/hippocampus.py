"""Hippocampus in two parts on T1 MRI: task 4 of the Medical Segmentation Decathlon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from medfl.datasets.base import DataSet, Download
from medfl.datasets.phantoms import scenes_volumes
from medfl.datasets.phantoms.phantom import Generator
from medfl.datasets.readers.pairs import paired
from medfl.datasets.readers.splitting import by_group
from medfl.datasets.readers.tables import Layout, Table
from medfl.datasets.readers.volumes import count_voxels, read_pair, volume_index

CLASSES = ("background", "anterior", "posterior")
ROOT = "Task04_Hippocampus"
PUBLISHED = ("imagesTr", "labelsTr")
PLAIN = ("images", "labels")


def _root(folder: Path, names: tuple[str, str]) -> Path | None:
    """Return the folder that holds both folders: this one, or the archive's own in it."""
    for root in (folder, folder / ROOT):
        images, masks = (root / name for name in names)
        if images.is_dir() and masks.is_dir() and volume_index(images) and volume_index(masks):
            return root
    return None


def _layout(text: str, names: tuple[str, str]) -> Layout:
    def read(folder: Path) -> Table:
        root = _root(folder, names)
        assert root is not None
        table = paired(volume_index(root / names[0]), volume_index(root / names[1]))
        table.records = [replace(record, size=count_voxels(record.image)) for record in table.records]
        return table

    return Layout(text, ("seeded",), lambda folder: _root(folder, names), read)


def draw(folder: Path, rng: Generator, cases: int, side: int) -> int:
    """Write a phantom as published: imagesTr and labelsTr, about 0.9 x 1.25 x 0.9 sides at 1 mm.

    Intensities differ by orders of magnitude from case to case, and their types, as in the real files.
    """
    for number in range(1, cases + 1):
        sides = np.rint(np.array((0.9, 1.25, 0.9)) * side * rng.uniform(0.93, 1.12, 3)).astype(int)
        image, labels = scenes_volumes.hippocampus(rng, (int(sides[0]), int(sides[1]), int(sides[2])))
        small = rng.uniform() < 0.2
        scaled = np.clip(image * 200, 0, 255) if small else np.rint(image * 10 ** rng.uniform(2.3, 6))
        name = f"hippocampus_{number:03d}.nii.gz"
        scenes_volumes.save(folder / PUBLISHED[0] / name, scaled.astype(np.uint8 if small else np.float32), 1.0)
        scenes_volumes.save(folder / PUBLISHED[1] / name, labels, 1.0)
    return cases


DATASET = DataSet(
    name="hippocampus",
    title="Hippocampus on T1 MRI: anterior and posterior part (Medical Segmentation Decathlon, task 4)",
    classes=CLASSES,
    channels=1,
    folders=("hippocampus", "msd_hippocampus", ROOT),
    layouts=(
        _layout(f"[{ROOT}/]imagesTr/<name>.nii.gz + labelsTr/<name>.nii.gz", PUBLISHED),
        _layout("images/<name>.nii[.gz], or a folder of one DICOM series, + labels/<name>.nii[.gz]", PLAIN),
    ),
    rules={"seeded": by_group((0.7, 0.1, 0.2), "hippocampus")},
    licence="CC BY-SA 4.0",
    source="https://medicaldecathlon.com",
    citation="Antonelli et al.: The Medical Segmentation Decathlon. Nature Communications 13, 4128 (2022); "
    "Simpson et al., arXiv:1902.09063",
    draw=draw,
    per_class=40,
    size=40,
    open_pair=lambda image, mask: read_pair(image, mask, len(CLASSES)),
    notes=(
        "the source names no subject: a volume counts as its own, and both sides of one brain may be in two sections",
        "intensities are not normalised: maxima go from about 100 to over a million",
    ),
    downloads=(
        Download(
            f"https://msd-for-monai.s3-us-west-2.amazonaws.com/{ROOT}.tar",
            f"{ROOT}.tar",
            "md5:9d24dba78a72977dbd1d2e110310f31b",
        ),
    ),
    download_note="27 MB; 260 volumes with masks, and 130 without, which are not used",
)
