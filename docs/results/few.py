"""Folders of HAM10000 for the runs of docs/results.md: few images a class, or one centre cut into halves.

    python docs/results/few.py FOLDER OUT --most 150             at most so many images of each class
    python docs/results/few.py FOLDER OUT --half vidir_modern    OUT/public: half of its lesions, OUT/private: the rest

Lesions are taken by the hash of their names. Archives are linked, not copied.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path


def few(rows: Sequence[Mapping[str, str]], most: int) -> list[Mapping[str, str]]:
    """Return at most so many rows of each class, those of the lesions with the smallest hashes."""
    counts: Counter[str] = Counter()
    kept = []
    for row in sorted(rows, key=lambda row: (_hash(row), row["image_id"])):
        if counts[row["dx"]] < most:
            counts[row["dx"]] += 1
            kept.append(row)
    return sorted(kept, key=lambda row: row["image_id"])


def halves(rows: Sequence[Mapping[str, str]], centre: str) -> dict[str, list[Mapping[str, str]]]:
    """Return half of the lesions of a centre as public, all other rows as private."""
    made: dict[str, list[Mapping[str, str]]] = {"public": [], "private": []}
    public = {row["lesion_id"] for row in rows if row["centre"] == centre and int(_hash(row), 16) % 2}
    for row in rows:
        made["public" if row["lesion_id"] in public else "private"].append(row)
    return made


def write(folder: Path, rows: list[Mapping[str, str]], out: Path) -> None:
    """Write labels.csv and link the archives of images."""
    out.mkdir(parents=True)
    with (out / "labels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for archive in folder.glob("images_*"):
        (out / archive.name).symlink_to(archive.resolve())


def _hash(row: Mapping[str, str]) -> str:
    return hashlib.sha256(row["lesion_id"].encode()).hexdigest()


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with labels.csv and images_<centre>.zip")
    parser.add_argument("out", type=Path)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--most", type=int, help="images of a class")
    asked.add_argument("--half", metavar="CENTRE", help="centre whose lesions are cut into halves")
    options = parser.parse_args()
    with (options.folder / "labels.csv").open(newline="") as file:
        rows: list[Mapping[str, str]] = list(csv.DictReader(file))
    if options.most:
        write(options.folder, few(rows, options.most), options.out)
    else:
        for name, part in halves(rows, options.half).items():
            write(options.folder, part, options.out / name)


if __name__ == "__main__":
    main()
