"""Folders for the runs of docs/results.md: few images a class, or a part of them cut off as public images.

    python docs/results/few.py HAM10000 OUT --most 150           at most so many images of each class
    python docs/results/few.py HAM10000 OUT --most 300 --without vienna_dias    without the images of one centre
    python docs/results/few.py MEDNIST OUT --every 2             OUT/public: every second image, OUT/private: the rest
    python docs/results/few.py HAM10000 OUT --most 500 --every 4    both: every fourth lesion is public
    python docs/results/few.py HIPPOCAMPUS OUT --every 4         every fourth volume with its mask is public

Lesions are taken by the hash of their names. Archives and volumes are linked, not copied.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def few(rows: Sequence[Mapping[str, str]], most: int) -> list[Mapping[str, str]]:
    """Return at most so many rows of each class, those of the lesions with the smallest hashes."""
    counts: Counter[str] = Counter()
    kept = []
    for row in sorted(rows, key=lambda row: (_hash(row), row["image_id"])):
        if counts[row["dx"]] < most:
            counts[row["dx"]] += 1
            kept.append(row)
    return sorted(kept, key=lambda row: row["image_id"])


def write(folder: Path, rows: list[Mapping[str, str]], out: Path) -> None:
    """Write labels.csv and link the archives of images."""
    out.mkdir(parents=True)
    with (out / "labels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for archive in folder.glob("images_*"):
        (out / archive.name).symlink_to(archive.resolve())


def cut(file: Path, every: int, out: Path) -> None:
    """Write an archive of `train_images`, `train_labels` … as two: one image of `every`, and the others."""
    arrays = dict(np.load(file))
    for name, public in (("public", True), ("private", False)):
        (out / name).mkdir(parents=True)
        kept = {
            key: values[(np.arange(len(values)) % every == 0) == public]
            if key.endswith(("images", "labels"))
            else values
            for key, values in arrays.items()
        }
        np.savez_compressed(out / name / file.name, **kept)


def cut_volumes(folder: Path, every: int, out: Path) -> None:
    """Link `images` and `labels` into two folders: one volume of `every` in the order of names, and the others."""
    for kind in ("images", "labels"):
        for name in ("public", "private"):
            (out / name / kind).mkdir(parents=True)

        for index, file in enumerate(sorted((folder / kind).iterdir())):
            name = "private" if index % every else "public"
            (out / name / kind / file.name).symlink_to(file.resolve())


def _hash(row: Mapping[str, str]) -> str:
    return hashlib.sha256(row["lesion_id"].encode()).hexdigest()


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="with labels.csv and images_<centre>.zip, with mednist_<side>.npz, or with images and labels of volumes",
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--most", type=int, help="images of a class")
    parser.add_argument("--every", type=int, help="one image or lesion of so many is public")
    parser.add_argument("--without", help="a centre of HAM10000 that is left out")
    options = parser.parse_args()
    if not options.most and not options.every:
        parser.error("give --most, --every or both")
    table = options.folder / "labels.csv"
    if (options.folder / "labels").is_dir():
        cut_volumes(options.folder, options.every, options.out)
        return
    if not table.exists():
        (archive,) = options.folder.glob("*.npz")
        cut(archive, options.every, options.out)
        return
    with table.open(newline="") as file:
        rows: list[Mapping[str, str]] = [
            row for row in csv.DictReader(file) if row["centre"] != options.without
        ]
    rows = few(rows, options.most) if options.most else rows
    if not options.every:
        write(options.folder, rows, options.out)
        return
    for name, public in (("public", True), ("private", False)):
        kept = [row for row in rows if (int(_hash(row)[-8:], 16) % options.every == 0) == public]
        write(options.folder, kept, options.out / name)


if __name__ == "__main__":
    main()
