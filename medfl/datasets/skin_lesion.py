"""Lesion masks in dermatoscopic pictures: HAM10000 by its four centres, ISIC 2016 task 1, or any folders of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from medfl.datasets import ham10000
from medfl.datasets.base import DataSet, sheet
from medfl.datasets.ham10000 import (
    CENTRES,
    METADATA,
    centre_roots,
    part_roots,
    phantom_centre,
    phantom_key,
    phantom_lesion,
)
from medfl.datasets.phantoms.phantom import LEAST, draw_files, mixed
from medfl.datasets.phantoms.scene import scene_of
from medfl.datasets.readers.pairs import (
    matched,
    pair_folders,
    paired,
    read_case_table,
    read_pair_folders,
)
from medfl.datasets.readers.splitting import (
    by_group,
    validation_from_test,
    validation_from_train,
)
from medfl.datasets.readers.tables import Layout, Table, first

HAM_MASKS = "HAM10000_segmentations_lesion_tschandl"
ISIC = "ISBI2016_ISIC_Part1"
_PARTS = {"train": "Training", "test": "Test"}


def _read_ham(path: Path, column: str, images: Sequence[Path], masks: Sequence[Path]) -> Table:
    return read_case_table(path, ("image_id", column, "lesion_id"), CENTRES, images, masks)


def _ham_masks(folder: Path) -> Path | None:
    return first(folder, HAM_MASKS, f"{HAM_MASKS}.zip")


def _read_published(folder: Path) -> Table:
    path = first(folder, *METADATA)
    masks = _ham_masks(folder)
    assert path is not None
    assert masks is not None
    return _read_ham(path, "dataset", part_roots(folder), [masks])


def _isic(folder: Path) -> Mapping[str, tuple[Path, Path]]:
    """Return the image and mask folders or archives of each section that a folder has."""
    sections = {}
    for section, part in _PARTS.items():
        stem = f"{ISIC}_{part}"
        images = first(folder, f"{stem}_Data", f"{stem}_Data.zip")
        masks = first(folder, f"{stem}_GroundTruth", f"{stem}_GroundTruth.zip")
        if images and masks:
            sections[section] = images, masks

    return sections


def _read_isic(folder: Path) -> Table:
    table = Table()
    for section, (images, masks) in _isic(folder).items():
        part = paired(*matched(images, masks), sections={"official": section})
        table.records += part.records
        table.problems += part.problems
        table.notes += part.notes

    return table


_CHALLENGE = "https://isic-challenge-data.s3.amazonaws.com/2016"
_LESIONS_UNKNOWN = "neither lesions nor centres are known: an image counts as its own lesion, no partition by centre"

SHEET = sheet("skin_lesion")
_SCENE = scene_of(SHEET)
DATASET = DataSet(
    **SHEET,
    centres=CENTRES,
    layouts=(
        Layout(
            "labels.csv (image_id, lesion_id, centre) + images_<centre>/ and masks_<centre>/ (folders or zips), masks "
            "named <image_id>[_segmentation].png",
            ("lesion",),
            lambda folder: (
                (folder / "labels.csv").is_file()
                and centre_roots(folder)
                and centre_roots(folder, "masks")
            ),
            lambda folder: _read_ham(
                folder / "labels.csv", "centre", centre_roots(folder), centre_roots(folder, "masks")
            ),
        ),
        Layout(
            "HAM10000_metadata[.csv|.tab] (dataset = centre) + HAM10000_images_part_1, _part_2 + "
            f"{HAM_MASKS} (folders or zips)",
            ("lesion",),
            lambda folder: first(folder, *METADATA) and part_roots(folder) and _ham_masks(folder),
            _read_published,
        ),
        Layout(
            f"ISIC 2016 task 1: {ISIC}_{{Training,Test}}_Data + {ISIC}_{{Training,Test}}_GroundTruth (folders or zips)",
            ("official", "whole", "image"),
            lambda folder: len(_isic(folder)) == len(_PARTS),
            _read_isic,
            notes=(
                "split official: the published test pairs; validation is 10 % of train",
                "split whole: all 900 published training pairs train; half of the test pairs validate",
                _LESIONS_UNKNOWN,
            ),
        ),
        Layout(
            f"{ISIC}_Training_Data + {ISIC}_Training_GroundTruth alone (folders or zips)",
            ("image",),
            lambda folder: "train" in _isic(folder),
            _read_isic,
            notes=(_LESIONS_UNKNOWN,),
        ),
        Layout(
            "images/ + masks/ (folders or zips), masks named <image>[_segmentation|_mask].png",
            ("image",),
            pair_folders,
            read_pair_folders,
            notes=(_LESIONS_UNKNOWN,),
        ),
    ),
    rules={
        "lesion": by_group("skin_lesion"),
        "official": validation_from_train("official"),
        "whole": validation_from_test("official"),
        "image": by_group("skin_lesion"),
    },
    draw=draw_files(
        (_SCENE,),
        mixed([[sum(row)] for row in ham10000.MIX], LEAST),
        lambda case: f"images_{phantom_centre(case)}/{phantom_key(case)}.jpg",
        mask=lambda case: f"masks_{phantom_centre(case)}/{phantom_key(case)}.png",
        tables={
            "labels.csv": {
                "lesion_id": phantom_lesion,
                "image_id": phantom_key,
                "centre": phantom_centre,
            }
        },
        sides=((0.75, 0.75), (1, 1)),
        repeats=True,
    ),
)
