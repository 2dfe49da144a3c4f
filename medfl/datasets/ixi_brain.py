"""Brain masks on T1 MRI of three London hospitals: IXI, as FLamby's Fed-IXI lays it out; and other whole-head pairs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import LEAST, Case, draw_files, mixed
from medfl.datasets.phantoms.scene import scene_of
from medfl.datasets.readers.matching import Matched
from medfl.datasets.readers.pairs import paired
from medfl.datasets.readers.splitting import (
    Record,
    by_group,
    filled,
    hash_order,
    validation_from_train,
)
from medfl.datasets.readers.tables import Layout, Table, first, read_csv
from medfl.datasets.readers.volumes import count_voxels, volume_files, volume_index

SHEET = sheet("ixi_brain")
CENTRES = SHEET["centres"]  # FLamby's Manufacturer 0, 1, 2
TABLES = ("metadata_tiny.csv", "ixi_metadata_tiny.csv")
# Subjects whose Split is test in FLamby's metadata_tiny.csv, which is in its package and not with the images.
_TEST_SUBJECTS = """
    2 12 15 17 24 27 34 36 49 54 58 63 65 75 97 106 107 111 112 116 118 120 121 127 129 135 141
    145 148 151 153 161 185 189 194 201 211 214 218 229 231 238 240 248 254 256 264 269 270 279
    282 289 291 293 294 310 313 314 319 327 328 329 336 337 362 364 369 383 388 398 401 402 406
    408 415 420 428 430 437 444 451 456 461 470 479 485 492 496 499 502 503 504 511 518 519 523
    524 543 547 571 585 586 589 594 595 598 607 612 626 633 634 635 648
"""
TEST = frozenset(map(int, _TEST_SUBJECTS.split()))
_FILE = re.compile(r"(?:^|/)(IXI\d{3}-[A-Za-z]+-\d+)/(T1|label)/[^/]+$")
_T1 = "_t1"
_MASK = "_brainmask"


def _root(folder: Path) -> Path | None:
    """Return the folder of the subjects, here or in what FLamby's archive unpacks to; else the archive."""
    # Mendeley Data's name of the archive, and its version
    inside = sorted(folder.glob("7kd5wj7v7p-*/IXI_sample"))
    for root in (folder, folder / "IXI_sample", *inside):
        if any(root.glob("IXI???-*-*/T1")):
            return root

    for path in sorted((*folder.glob("7kd5wj7v7p-*.zip"), *folder.glob("IXI*.zip"))):
        if any(_FILE.search(name) for name, _ in volume_files(path)):
            return path

    return None


def _folds(path: Path, table: Table) -> dict[int, tuple[str, str]]:
    """Return subject -> (hospital, fold) from a table of FLamby."""
    folds = {}
    for row in read_csv(path, ("Patient ID", "Manufacturer", "Split")):
        key = row["Patient ID"]
        centre = row["Manufacturer"]
        fold = row["Split"]
        if not key.isdecimal() or centre not in ("0", "1", "2") or fold not in ("train", "test"):
            row_text = f"Patient ID {key!r}, Manufacturer {centre!r}, Split {fold!r}"
            table.problems.append(
                f"{path} has {row_text}; they are a number, 0 to 2, train or test"
            )
        else:
            folds[int(key)] = (CENTRES[int(centre)], fold)

    return folds


def _read_flamby(folder: Path) -> Table:
    table = Table()
    files = dict[str, dict[str, str]]()
    root = _root(folder)
    assert root is not None

    for name, uri in volume_files(root):
        match = _FILE.search(name)
        if match is None:
            continue

        subject, kind = match.groups()
        if kind in files.setdefault(subject, {}):
            table.problems.append(
                f"subject {subject} has two volumes in {kind}: {files[subject][kind]} and {uri}"
            )

        files[subject][kind] = uri

    path = first(folder, *TABLES)
    folds = _folds(path, table) if path else {}
    for subject, volumes in sorted(files.items()):
        number = int(subject[3:6])
        centre = subject.split("-")[1]
        if path:
            listed, fold = folds.get(number, ("", ""))
        else:
            # FLamby's table is rarely at hand: its published fold is above
            listed = centre
            fold = "test" if number in TEST else "train"

        if centre not in CENTRES:
            table.problems.append(
                f"subject {subject} is of hospital {centre}, the hospitals are {', '.join(CENTRES)}"
            )
        elif len(volumes) < 2:
            table.problems.append(
                f"subject {subject} has no volume in {'label' if 'T1' in volumes else 'T1'}"
            )
        elif listed != centre:
            problem = f"is not in {path}"
            if listed:
                problem = f"is of hospital {listed} in {path}"

            table.problems.append(f"subject {subject} {problem}")
        else:
            image = volumes["T1"]
            mask = volumes["label"]
            size = count_voxels(image)
            table.records.append(
                Record(image, 0, subject, centre, subject, {"flamby": fold}, mask=mask, size=size)
            )

    return table


def _pairs(folder: Path) -> Matched:
    """Return name -> URI of the images and of the masks of whole-head pairs."""
    images = {}
    masks = {}
    for stem, uri in volume_index(folder).items():
        if stem.endswith(_T1):
            images[stem.removesuffix(_T1)] = uri
        elif stem.endswith(_MASK):
            masks[stem.removesuffix(_MASK)] = uri

    return images, masks


def split_few(records: Sequence[Record]) -> list[str]:
    """Cut 70/10/20 in hash order, but with at least one test case and, from three cases on, one validation case."""
    order = sorted(range(len(records)), key=lambda i: hash_order("ixi_brain", records[i].id))
    # With few pairs, every section gets a case before the shares are met.
    test = max(1, round(0.2 * len(order)))
    validate = max(1 if len(order) > 2 else 0, round(0.1 * len(order)))
    sections = ["train"] * len(order)

    for position, index in enumerate(order[: test + validate]):
        sections[index] = "test" if position < test else "validate"

    return sections


# Muscle and fat are about as bright as the brain.


def _phantom_path(case: Case, kind: str) -> str:
    subject = f"IXI{901 + case.number}-{CENTRES[case.centre]}-9{case.group:03d}"
    return f"IXI_sample/{subject}/{kind}/{subject}_{'image' if kind == 'T1' else kind}.nii.gz"


_SCENE = scene_of(SHEET)
DATASET = DataSet(
    **SHEET,
    layouts=(
        Layout(
            "[IXI_sample/]IXI<number>-<hospital>-<number>/{T1,label}/*.nii.gz, as folders or in a zip "
            "[+ metadata_tiny.csv (Patient ID, Manufacturer, Split)]",
            ("flamby", "subject"),
            _root,
            _read_flamby,
            notes=(
                "the hospital is in a subject's name; the fold is that of metadata_tiny.csv if it lies in the folder, "
                "else of FLamby's published one, where a subject that FLamby does not list counts as train",
            ),
        ),
        Layout(
            f"whole-head pairs <name>{_T1}.nii.gz + <name>{_MASK}.nii.gz (no hospitals)",
            ("few",),
            lambda folder: all(_pairs(folder)),
            lambda folder: paired(*_pairs(folder)),
            notes=(
                "these pairs name no hospital: divide them with --partition iid; centre makes one site of them",
            ),
        ),
    ),
    rules={
        "flamby": filled(validation_from_train("flamby")),
        "subject": by_group("ixi_brain"),
        "few": split_few,
    },
    draw=draw_files(
        (_SCENE,),
        mixed([[311], [181], [74]], LEAST),
        lambda case: _phantom_path(case, "T1"),
        mask=lambda case: _phantom_path(case, "label"),
        tables={
            TABLES[0]: {
                "Patient ID": lambda case: 901 + case.number,
                "Manufacturer": lambda case: case.centre,
                "Split": lambda case: case.fold,
            }
        },
        sides=((1, 1), (1.25, 1.25), (1, 1)),
        spacing=4.0,
    ),
)
