"""Lungs in chest radiographs: four sources of COVID-19 images, or the Montgomery and Shenzhen sets."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import LEAST, Case, draw_files, mixed
from medfl.datasets.phantoms.scene import scene_of
from medfl.datasets.readers.pairs import (
    pair_folders,
    paired,
    read_case_table,
    read_pair_folders,
)
from medfl.datasets.readers.reading import JOINED, archive
from medfl.datasets.readers.splitting import by_group
from medfl.datasets.readers.tables import (
    Layout,
    Table,
    image_files,
)

SITES = {
    "other_publications": 20,
    "radiopaedia": 25,
    "rsna_journals": 12,
    "sirm_italy": 12,
}  # images of each
NAMED = {"MCUCXR": "montgomery", "CHNCXR": "shenzhen"}  # how the files of a set begin
SPLITS = ("patient", "fedhelp")

# Images and masks of the Montgomery and Shenzhen sets, wherever they were unpacked to.
_FILE = re.compile(
    rf"(?:^|/)(CXR_png|leftMask|rightMask|masks?)/(?:[^/]+/)*((?:{'|'.join(NAMED)})_\d+_\d)(?:_mask)?\.png$"
)
_SUBFOLDERS = (
    "",
    "MontgomerySet",
    "ChinaSet_AllFiles",
    "Lung Segmentation",
    "data/Lung Segmentation",
)
_FOLDERS = ("CXR_png", "ManualMask", "mask", "masks")
_ZIPS = (
    "*Montgomery*.zip",
    "*ChinaSet*.zip",
    "*ChinaCXR*.zip",
    "*shcxr*.zip",
    "*chest-xray-masks*.zip",
    "archive.zip",
)


def _centre(name: str) -> str:
    return NAMED.get(name.partition("_")[0], "unknown")


def _read_sources(folder: Path) -> Table:
    images, masks = pair_folders(folder)
    columns = ("file", "site", "patient")
    return read_case_table(folder / "labels.csv", columns, SITES, [images], [masks])


def _roots(folder: Path) -> list[Path]:
    plain = [folder / subfolder / name for subfolder in _SUBFOLDERS for name in _FOLDERS]
    # A set, as an archive may fit several patterns.
    packed = {path for pattern in _ZIPS for path in folder.glob(pattern)}
    return [path for path in plain if path.is_dir()] + sorted(filter(Path.is_file, packed))


def _has_sets(folder: Path) -> bool:
    def has_images(root: Path) -> bool:
        if root.is_dir():
            return root.name == "CXR_png"

        return any("CXR_png/" in name for name in archive(root).namelist())

    return any(map(has_images, _roots(folder)))


def _read_sets(folder: Path) -> Table:
    uris: dict[str, dict[str, str]] = {"CXR_png": {}, "leftMask": {}, "rightMask": {}, "mask": {}}
    for root in _roots(folder):
        for name, uri in image_files(root):
            if match := _FILE.search(f"{root.name}/{name}"):
                # A tree that occurs twice in a published archive counts once.
                uris["mask" if match[1] == "masks" else match[1]].setdefault(match[2], uri)

    left = uris["leftMask"]
    right = uris["rightMask"]
    masks = uris["mask"]
    for key in left.keys() & right.keys():
        masks.setdefault(key, JOINED.join((left[key], right[key])))

    table = paired(uris["CXR_png"], masks, _centre)
    for key in sorted(left.keys() ^ right):
        table.problems.append(f"{(left | right)[key]} has no mask of the other lung")

    return table


def _phantom_name(case: Case) -> str:
    return f"cxr_{case.number:03d}.png"


_NLM = "https://openi.nlm.nih.gov/imgs/collections"

SHEET = sheet("lung_cxr")
_SCENE = scene_of(SHEET)
DATASET = DataSet(
    **SHEET,
    centres=(*SITES, *NAMED.values()),
    layouts=(
        Layout(
            "labels.csv (file, site, patient[, width, height]) + images/ + masks/ (folders or zips) of the same names",
            SPLITS,
            lambda folder: (folder / "labels.csv").is_file() and pair_folders(folder),
            _read_sources,
            notes=(
                "an image's licence is that of its source, see the column licence of labels.csv",
            ),
        ),
        Layout(
            "CXR_png/{MCUCXR,CHNCXR}_*.png + ManualMask/{leftMask,rightMask}/, mask/ or masks/, here or in "
            "MontgomerySet/, ChinaSet_AllFiles/ or Lung Segmentation/; also in their zips",
            SPLITS,
            _has_sets,
            _read_sets,
            notes=("an image counts as its own patient",),
        ),
        Layout(
            "images/ + masks/ (folders or zips), masks named <image>[_mask].png",
            SPLITS,
            pair_folders,
            functools.partial(read_pair_folders, centre=_centre),
            notes=(
                "neither patients nor, but for names in MCUCXR_ and CHNCXR_, centres are known",
            ),
        ),
    ),
    rules={
        "patient": by_group("lung_cxr"),
        "fedhelp": by_group("lung_cxr", (571 / 704, 64 / 704, 69 / 704)),
    },
    draw=draw_files(
        (_SCENE,),
        mixed([[count] for count in SITES.values()], LEAST),
        lambda case: f"images/{_phantom_name(case)}",
        mask=lambda case: f"masks/{_phantom_name(case)}",
        tables={
            "labels.csv": {
                "file": _phantom_name,
                "site": lambda case: tuple(SITES)[case.centre],
                "patient": lambda case: case.group,
                "width": lambda case: case.shape[1],
                "height": lambda case: case.shape[0],
            }
        },
        sides=((0.8, 1), (1, 1)),
        repeats=True,
    ),
)
