"""Hippocampus in two parts on T1 MRI: task 4 of the Medical Segmentation Decathlon."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import Case, draw_files, even
from medfl.datasets.phantoms.scene import scene_of
from medfl.datasets.readers.pairs import paired
from medfl.datasets.readers.splitting import by_group
from medfl.datasets.readers.tables import Layout, Table
from medfl.datasets.readers.volumes import count_voxels, volume_index

ROOT = "Task04_Hippocampus"
PUBLISHED = ("imagesTr", "labelsTr")
PLAIN = ("images", "labels")


def _root(folder: Path, names: tuple[str, str]) -> Path | None:
    """Return the folder that holds both folders: this one, or the archive's own folder in it."""
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
        table.records = [
            replace(record, size=count_voxels(record.image)) for record in table.records
        ]
        return table

    return Layout(text, ("seeded",), lambda folder: _root(folder, names), read)


# Both parts have the same shade, so that only a voxel's position tells them apart.


def _phantom_name(case: Case) -> str:
    return f"hippocampus_{case.number + 1:03d}.nii.gz"


SHEET = sheet("hippocampus")
_SCENE = scene_of(SHEET)
DATASET = DataSet(
    **SHEET,
    layouts=(
        _layout(f"[{ROOT}/]imagesTr/<name>.nii.gz + labelsTr/<name>.nii.gz", PUBLISHED),
        _layout(
            "images/<name>.nii[.gz], or a folder of one DICOM series, + labels/<name>.nii[.gz]",
            PLAIN,
        ),
    ),
    rules={"seeded": by_group("hippocampus")},
    draw=draw_files(
        (_SCENE,),
        even(1),
        lambda case: f"{PUBLISHED[0]}/{_phantom_name(case)}",
        mask=lambda case: f"{PUBLISHED[1]}/{_phantom_name(case)}",
        sides=((0.84, 1.0), (1.16, 1.4), (0.84, 1.0)),
        digits=(2.3, 6),
    ),
)
