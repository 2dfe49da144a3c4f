"""Folders of real images with their hospitals, for the tables of hospitals left out.

    python docs/results/hospitals.py DATA OUT

OUT/wbc and OUT/findings: `images` and `labels.csv`; OUT/nuclei, OUT/monuseg, OUT/fundus, OUT/lungs,
OUT/boxes: `images`, `masks` and `cases.csv`; OUT/acdc: `images` and `masks`. Images and masks are those of
DATA, but for:

- wbc: without the four basophils, which are too few for a class.
- boxes: the mask of a radiograph is its two lungs' boxes.
- findings: the radiographs of boxes whose finding is known, as three findings of 0 and 1.
- nuclei: a pixel is a nucleus or not; sources of at least 50 images.
- monuseg: a pixel is a nucleus or not; hospitals of one or two images are one group by the first, one by the second
  half of the alphabet of their codes.
- acdc: the volumes at the end of diastole, as NIfTI with voxels of 1 mm, since their source states no spacing.
"""

from __future__ import annotations

import csv
import io
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image, ImageDraw

Row = Mapping[str, str]

BACTERIA = {"E.Coli", "Klebsiella", "Legionella", "Mycoplasma Bacterial Pneumonia", "Streptococcus"}
OTHERS = {"ARDS", "Influenza", "Lipoid", "Pneumocystis", "Pneumonia", "Varicella"}
"""Findings of covid_cxr_boxes beside COVID-19, which are too rare one by one."""


def read(folder: Path) -> list[Row]:
    """Return the rows of a set's table."""
    with (folder / "labels.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write a table."""
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def packed(archives: Iterable[Path]) -> dict[str, bytes]:
    """Return the files of archives by name."""
    found = {}
    for archive in archives:
        with zipfile.ZipFile(archive) as opened:
            found.update({name: opened.read(name) for name in opened.namelist()})
    return found


def opened(content: bytes) -> Image.Image:
    """Return an image."""
    return Image.open(io.BytesIO(content))


def nuclei(content: bytes) -> Image.Image:
    """Return a mask of 0 and 1 from one of numbered nuclei."""
    return Image.fromarray((np.asarray(opened(content)) > 0).astype(np.uint8))


def save(content: bytes | Image.Image, path: Path) -> None:
    """Write an image."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content.save(path)


def cells(data: Path, out: Path) -> None:
    """Write the white blood cells."""
    images = packed(sorted((data / "wbc").glob("images_*.zip")))
    rows = [row for row in read(data / "wbc") if row["class"] != "basophil"]
    for row in rows:
        save(images[row["file"]], out / "images" / row["file"])
    write(
        out / "labels.csv", ({key: row[key] for key in ("file", "class", "source")} for row in rows)
    )


def pairs(
    rows: Iterable[Row],
    images: Mapping[str, bytes],
    mask_of: Callable[[Row], Image.Image],
    centre_of: Callable[[Row], str],
    out: Path,
) -> None:
    """Write images with masks, and cases.csv with each one's centre, and its patient where one is known."""
    cases = []
    for row in rows:
        stem = Path(row["file"]).stem
        save(images[row["file"]], out / "images" / row["file"])
        save(mask_of(row), out / "masks" / f"{stem}.png")
        cases.append(
            {"file": row["file"], "patient": row.get("patient", stem), "centre": centre_of(row)}
        )
    write(out / "cases.csv", cases)


def findings(data: Path, out: Path) -> None:
    """Write the radiographs whose finding is known, with the findings as columns of 0 and 1."""
    covid = data / "covid_cxr_boxes"
    images = packed([covid / "images.zip"])
    rows = []
    for row in read(covid):
        named = {*row["finding"].split("|")}
        if not row["finding"]:
            continue

        save(images[row["file"]], out / "images" / row["file"])
        rows.append({
            "file": row["file"], "patient": row["patient"], "source": row["site"], "covid": int("COVID-19" in named),
            "bacterial": int(bool(named & BACTERIA)), "other": int(bool(named & OTHERS)),
        })  # fmt: skip

    write(out / "labels.csv", rows)


def boxes(row: Row) -> Image.Image:
    """Return the mask of two boxes."""
    mask = Image.new("L", (int(row["width"]), int(row["height"])))
    for side in ("left", "right"):
        corners = [float(row[f"{side}_{key}"]) for key in ("x0", "y0", "x1", "y1")]
        ImageDraw.Draw(mask).rectangle(corners, fill=1)
    return mask


def hearts(data: Path, out: Path) -> None:
    """Write the volumes of hearts and their masks, axes in the order (width, height, slices)."""
    for folder in ("images", "masks"):
        (out / folder).mkdir(parents=True)

    for path in sorted((data / "acdc_ef" / "volumes").iterdir()):
        arrays = np.load(path)
        for folder, name in (("images", "ed_image"), ("masks", "ed_label")):
            volume = nibabel.nifti1.Nifti1Image(arrays[name].transpose(2, 1, 0), np.eye(4))
            nibabel.loadsave.save(volume, out / folder / f"{path.stem}.nii.gz")


def main() -> None:
    """Write all folders."""
    data, out = map(Path, sys.argv[1:])
    hearts(data, out / "acdc")
    cells(data, out / "wbc")
    findings(data, out / "findings")

    covid = data / "covid_cxr_boxes"
    pairs(
        read(covid), packed([covid / "images.zip"]), boxes, lambda row: row["site"], out / "boxes"
    )

    lungs = data / "covid_cxr_lungs"
    content = {path.name: path.read_bytes() for path in (lungs / "images").iterdir()}
    pairs(
        read(lungs),
        content,
        lambda row: Image.open(lungs / "masks" / row["file"]),
        lambda row: row["site"],
        out / "lungs",
    )

    fundus = data / "fundus_disc_cup"
    masks = packed([fundus / "masks.zip"])
    pairs(
        read(fundus),
        packed([fundus / "images.zip"]),
        lambda row: opened(masks[f"{Path(row['file']).stem}.png"]),
        lambda row: row["site"],
        out / "fundus",
    )

    for name, source in (("nuclei", "dsb2018_nuclei"), ("monuseg", "monuseg")):
        labels = packed([data / source / "labels.zip"])
        rows = read(data / source)
        column = "source" if name == "nuclei" else "site"
        counts = Counter(row[column] for row in rows)
        if name == "nuclei":
            rows = [row for row in rows if counts[row[column]] >= 50]

        def centre_of(row: Row, column: str = column, counts: Counter[str] = counts) -> str:
            if counts[row[column]] > 2:
                return row[column]
            return "codes_0_to_D" if row[column] < "E" else "codes_E_to_Z"

        pairs(
            rows,
            packed([data / source / "images.zip"]),
            lambda row, labels=labels: nuclei(labels[f"{Path(row['file']).stem}.png"]),
            centre_of,
            out / name,
        )


if __name__ == "__main__":
    main()
