"""`medfl new` and runs on folders of DICOM pictures, as radiographs come from an archive."""

from __future__ import annotations

import csv
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from medfl.cli import verbs as cli
from medfl.core import InputError
from medfl.datasets import own
from medfl.runs.predict import predict
from medfl.starter import starter
from tests.support.dicom_files import slice_of, write

COUNT = 24


def radiograph(path: Path, number: int, bright: bool) -> np.ndarray:
    """Write a picture of 12 bits, every second one of MONOCHROME1, with a bright disc or without; return the disc."""
    rng = np.random.default_rng(number)
    y, x = np.mgrid[:30, :40]
    disc = (y - rng.integers(10, 20)) ** 2 + (x - rng.integers(10, 30)) ** 2 < 60
    pixels = rng.integers(200, 900, disc.shape) + 1500 * disc * bright
    inverted = number % 2 == 1
    if inverted:
        pixels = 4095 - pixels

    more = {
        (0x0028, 0x0004): ("CS", f"MONOCHROME{2 - inverted}"),
        (0x0028, 0x1050): ("DS", str(4095 - 1200 if inverted else 1200)),
        (0x0028, 0x1051): ("DS", "2400"),
        (0x0020, 0x000E): ("UI", f"1.2.3.{number}"),
        (0x0020, 0x0032): None,
    }
    write(path, slice_of(pixels.astype(np.uint16), more=more))
    return disc


def new(bundle: Path, *folders: str) -> Path:
    assert cli.main(["new", str(bundle), "--size", "32", *folders]) == 0
    return bundle


def run(bundle: Path, data: Path, out: Path, *more: str) -> Path:
    command = f"run {bundle} --data {data} --sites 2 --rounds 3 --lr 0.005 --batch-size 4 --no-sandbox --out {out}"
    assert cli.main([*command.split(), *more]) == 0
    return out


def test_classes_by_folder_and_by_table_train_alike_and_are_predicted(tmp_path: Path) -> None:
    rows = []
    for number in range(COUNT):
        name = ("well", "ill")[number // 2 % 2]
        radiograph(tmp_path / "folders" / name / f"{number:02}.dcm", number, name == "ill")
        radiograph(tmp_path / "table" / "images" / f"{number:02}.DICOM", number, name == "ill")
        rows.append(f"{number:02},{name}\n")

    (tmp_path / "table" / "labels.csv").write_text("id,diagnosis\n" + "".join(rows))
    images = ["--images", str(tmp_path / "table" / "images")]
    labels = ["--labels", str(tmp_path / "table" / "labels.csv")]
    bundle = new(tmp_path / "b", *images, *labels)
    out = run(bundle, tmp_path / "table", tmp_path / "run")
    told = predict(out, tmp_path / "table" / "images", tmp_path / "told")
    assert told["failed"] == []
    with (tmp_path / "told" / "predictions.csv").open() as file:
        right = [
            row["prediction"] == ("well", "ill")[int(row["id"][:2]) // 2 % 2]
            for row in csv.DictReader(file)
        ]

    assert len(right) == COUNT
    assert np.mean(right) > 0.9, "MONOCHROME1 is turned, so that bright is bright"

    seen = starter.survey(tmp_path / "folders")
    assert dict(zip(seen.classes, seen.counts, strict=True)) == {"ill": 12, "well": 12}
    assert (seen.channels, seen.sides) == (1, (30, 40))


@pytest.mark.slow
def test_masks_of_pictures_are_learned_and_written_in_their_place(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "masks").mkdir(parents=True)
    discs = {}
    for number in range(COUNT):
        name = f"{number:02}"
        discs[name] = radiograph(data / "images" / f"{name}.dcm", number, True)
        Image.fromarray(discs[name].astype(np.uint8) * 255).save(data / "masks" / f"{name}.png")

    bundle = new(tmp_path / "b", "--images", str(data / "images"), "--masks", str(data / "masks"))
    out = run(bundle, data, tmp_path / "run", "--save-predictions")
    written = sorted((out / "predictions").rglob("*.nii.gz"))
    assert written
    for file in written:
        mask = np.asarray(nib.load(file).dataobj)[..., 0].T > 0
        disc = discs[file.name[:2]]
        assert 2 * (mask & disc).sum() > 0.85 * (mask.sum() + disc.sum())


def test_series_in_subfolders_stay_volumes_and_no_dicom_file_is_a_pictures_mask(
    tmp_path: Path,
) -> None:
    for case in ("a", "b"):
        for z in range(3):
            pixels = np.full((8, 8), z + 1, np.uint16) * np.arange(8, dtype=np.uint16)
            write(tmp_path / "series" / case / f"{z}.dcm", slice_of(pixels, z))

    assert own.is_volumes(tmp_path / "series")
    with pytest.raises(InputError, match="0 folders with pictures"):
        starter.survey(tmp_path)

    for name in ("images", "masks"):
        radiograph(tmp_path / "two" / name / "a.dcm", 0, True)

    with pytest.raises(InputError, match=r"mask .*a\.dcm is a DICOM file; .*3D Slicer"):
        starter.survey(tmp_path / "two" / "images", tmp_path / "two" / "masks")

    (tmp_path / "two" / "masks" / "a.dcm").rename(tmp_path / "two" / "masks" / "a.txt")
    with pytest.raises(
        InputError,
        match=r"masks has no image: its files end in \.txt; files that end in \.jpg, .*\.tiff; convert",
    ):
        starter.survey(tmp_path / "two" / "images", tmp_path / "two" / "masks")
