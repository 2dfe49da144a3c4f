"""HAM10000: dermatoscopic pictures of pigmented skin lesions from four centres."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import Case, draw_files, mixed
from medfl.datasets.phantoms.scene import class_scenes
from medfl.datasets.readers.splitting import Record, by_group, published, validation_from_train
from medfl.datasets.readers.tables import (
    SECTION_NAMES,
    Layout,
    Table,
    check_row,
    first,
    folders_and_zips,
    image_index,
    label_of,
    medmnist,
    read_csv,
)

SHEET = sheet("ham10000")
CLASSES = SHEET["classes"]
CENTRES: tuple[str, ...] = SHEET["centres"]
# Images of each centre (row) and class (column).
MIX = SHEET.pop("mix")
METADATA = ("HAM10000_metadata.csv", "HAM10000_metadata.tab", "HAM10000_metadata")
SPLIT_TABLE = "dermamnist_split.csv"


def centre_roots(folder: Path, kind: str = "images") -> list[Path]:
    """Return the folders and archives `<kind>_<centre>[.zip]` of a folder, folders first."""
    paths = [folder / f"{kind}_{centre}" for centre in CENTRES]
    paths += [folder / f"{kind}_{centre}.zip" for centre in CENTRES]
    return [path for path in paths if path.exists()]


def part_roots(folder: Path) -> list[Path]:
    """Return the image folders and archives `HAM10000_images*[.zip]` of a folder as published."""
    return folders_and_zips(folder, "HAM10000_images*")


def by_image(path: Path | None, column: str) -> Mapping[str, str]:
    """Return image_id -> value of a table's column, empty if there is no table."""
    rows = read_csv(path, ("image_id", column)) if path else ()
    return {row["image_id"]: row[column] for row in rows}


def _read(folder: Path, table_path: Path | None, centre_column: str, roots: list[Path]) -> Table:
    assert table_path is not None  # by it the layout was found
    rows = read_csv(table_path, ("image_id", "lesion_id", "dx", centre_column))
    images = image_index(roots)
    derma = by_image(first(folder, SPLIT_TABLE), "split")
    table = Table()
    labels = {name: number for number, name in enumerate(CLASSES)}

    for row in rows:
        key = row["image_id"]
        centre = row[centre_column]
        where = f"{key} in {table_path}"
        label = label_of(row["dx"], labels, where, table)
        # each check tells its own problem
        if check_row(table, where, key, centre, CENTRES, images) and label is not None:
            sections = {}
            if derma.get(key) in SECTION_NAMES:
                sections["dermamnist"] = SECTION_NAMES[derma[key]]
            if row.get("flamby_fold") in ("train", "test"):
                sections["flamby"] = row["flamby_fold"]
            table.records.append(
                Record(images[key], label, key, centre, row["lesion_id"], sections)
            )

    return table


def phantom_key(case: Case) -> str:
    """Return the image_id of a phantom's image."""
    return f"ISIC_9{case.number:06d}"


def phantom_lesion(case: Case) -> str:
    """Return the lesion_id of a phantom's image."""
    return f"HAM_9{case.group:06d}"


def phantom_centre(case: Case) -> str:
    """Return the centre of a phantom's image."""
    return CENTRES[case.centre]


DATASET = DataSet(
    **SHEET,
    layouts=(
        Layout(
            "labels.csv (image_id, lesion_id, dx, centre[, flamby_fold]) + images_<centre>/ or images_<centre>.zip "
            "[+ dermamnist_split.csv]",
            ("lesion", "flamby", "dermamnist"),
            lambda folder: (folder / "labels.csv").is_file() and centre_roots(folder),
            lambda folder: _read(folder, folder / "labels.csv", "centre", centre_roots(folder)),
        ),
        Layout(
            "HAM10000_metadata[.csv|.tab] (dataset = centre) + HAM10000_images_part_1, _part_2 as folders or zips "
            "[+ dermamnist_split.csv]",
            ("lesion", "dermamnist"),
            lambda folder: first(folder, *METADATA) and part_roots(folder),
            lambda folder: _read(folder, first(folder, *METADATA), "dataset", part_roots(folder)),
        ),
        medmnist(
            "MedMNIST dermamnist[_64|_128|_224].npz",
            "dermamnist",
            len(CLASSES),
            "dermamnist",
            notes=(
                "MedMNIST's file names neither lesions nor centres: no lesion-disjoint split, no partition by centre",
            ),
        ),
    ),
    rules={
        "lesion": by_group("ham10000"),
        "flamby": validation_from_train("flamby"),
        "dermamnist": published("dermamnist"),
    },
    draw=draw_files(
        class_scenes(len(CLASSES), 3),
        mixed(MIX),
        lambda case: f"images_{phantom_centre(case)}/{phantom_key(case)}.jpg",
        tables={
            "labels.csv": {
                "lesion_id": phantom_lesion,
                "image_id": phantom_key,
                "dx": lambda case: CLASSES[case.label],
                "centre": phantom_centre,
                "flamby_fold": lambda case: case.fold,
            },
            SPLIT_TABLE: {"image_id": phantom_key, "split": lambda case: case.part},
        },
        repeats=True,
    ),
)
