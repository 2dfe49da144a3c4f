"""Fed-ISIC2019: dermatoscopic pictures of eight kinds of skin lesion from six centres, as FLamby lays them out."""

from __future__ import annotations

from pathlib import Path

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.ham10000 import by_image, centre_roots, phantom_key, phantom_lesion
from medfl.datasets.phantoms.phantom import Case, draw_files, mixed
from medfl.datasets.phantoms.scene import class_scenes
from medfl.datasets.readers.splitting import Record, by_group, validation_from_train
from medfl.datasets.readers.tables import (
    Layout,
    Table,
    check_row,
    first,
    image_index,
    label_of,
    read_csv,
)

# FLamby's targets 0 to 7 and centres 0 to 5.
SHEET = sheet("isic19")
CLASSES = SHEET["classes"]
CENTRES = SHEET["centres"]
# Images of each centre (row) and class (column).
MIX = SHEET.pop("mix")
TABLES = ("train_test_split.csv", "train_test_split", "isic2019_train_test_split.csv")
METADATA = ("HAM10000_metadata.csv", "HAM10000_metadata", "ham10000_metadata.csv")
IMAGES = "ISIC_2019_Training_Input"


def _image_roots(folder: Path) -> list[Path]:
    names = (f"{IMAGES}_preprocessed", f"{IMAGES}_preprocessed.zip", IMAGES, f"{IMAGES}.zip")
    return [folder / name for name in names if (folder / name).exists()]


def _read(
    path: Path | None, roots: list[Path], metadata: Path | None, absent: tuple[str, ...] = ()
) -> Table:
    assert path is not None  # by it the layout was found
    images = image_index(roots)
    lesions = by_image(metadata, "lesion_id")
    table = Table()
    labels = {str(number): number for number in range(len(CLASSES))}
    centres = {str(number): name for number, name in enumerate(CENTRES)}
    for row in read_csv(path, ("image", "target", "center", "fold")):
        key = row["image"]
        where = f"{key} in {path}"
        label = label_of(row["target"], labels, where, table)

        if row["fold"] not in ("train", "test"):
            table.problems.append(f"{where} has fold {row['fold']!r}, the folds are train, test")
        # FLamby's table lists the images of all six centres, whichever of them the folder has.
        elif centres.get(row["center"]) in absent:
            continue
        elif check_row(table, where, key, row["center"], centres, images) and label is not None:
            # The tables of HAM10000 list its images without the suffix that ISIC gave to scaled ones.
            group = lesions.get(key.removesuffix("_downsampled"), key)
            table.records.append(
                Record(
                    images[key],
                    label,
                    key,
                    centres[row["center"]],
                    group,
                    {"flamby": row["fold"]},
                )
            )

    return table


def _read_flamby(folder: Path) -> Table:
    return _read(first(folder, *TABLES), _image_roots(folder), first(folder, *METADATA))


def _read_subset(folder: Path) -> Table:
    ham = folder / "ham10000"
    path = first(folder / "flamby_meta", *TABLES)
    return _read(path, centre_roots(ham), first(ham, "labels.csv"), absent=("BCN", "MSK"))


def _known_lesion(case: Case) -> str | None:
    if CENTRES[case.centre] in ("BCN", "MSK"):
        return None

    return phantom_lesion(case)


_FLAMBY = "https://raw.githubusercontent.com/owkin/FLamby/main/flamby/datasets/fed_isic2019/dataset_creation_scripts"

DATASET = DataSet(
    **SHEET,
    layouts=(
        Layout(
            f"{IMAGES}_preprocessed or {IMAGES} (folder or zip) + train_test_split[.csv] (image, target, center, fold) "
            "[+ HAM10000_metadata[.csv]]",
            ("flamby", "lesion"),
            lambda folder: first(folder, *TABLES) and _image_roots(folder),
            _read_flamby,
        ),
        Layout(
            "ham10000/images_<centre>[.zip] + ham10000/labels.csv + flamby_meta/isic2019_train_test_split.csv "
            "(four of the six centres)",
            ("flamby", "lesion"),
            lambda folder: (
                (folder / "ham10000" / "labels.csv").is_file()
                and first(folder / "flamby_meta", *TABLES)
                and centre_roots(folder / "ham10000")
            ),
            _read_subset,
            notes=(
                "ONLY FOUR OF SIX CENTRES: the images of BCN (12,413) and MSK (819) are absent; "
                "numbers from this subset are not Fed-ISIC2019 numbers",
            ),
        ),
    ),
    rules={
        "flamby": validation_from_train("flamby"),
        "lesion": by_group("isic19"),
    },
    draw=draw_files(
        class_scenes(len(CLASSES), 3),
        mixed(MIX),
        lambda case: f"{IMAGES}_preprocessed/{phantom_key(case)}.jpg",
        tables={
            TABLES[0]: {
                "image": phantom_key,
                "target": lambda case: case.label,
                "center": lambda case: case.centre,
                "fold": lambda case: case.fold,
                "fold2": lambda case: f"{case.fold}_{case.centre}",
            },
            METADATA[0]: {"lesion_id": _known_lesion, "image_id": phantom_key},
        },
        repeats=True,
    ),
)
