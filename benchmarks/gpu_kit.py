"""Collect what `gpu_day.py` needs on a machine with a GPU that reaches no network: wheels and small images.

    make gpu-kit                  or: python benchmarks/gpu_kit.py [--data DIR] [--out build/gpu-kit] [--python 3.12]

The machine has PyTorch, torchvision and the usual scientific packages; the kit has the others, without their own
dependencies, and the METADATA of medfl, which runs from the working tree. Of the images it has all of HAM10000, resized
to the protocol's 128 pixels by medfl's own reader, as JPEG of quality 85, MedNIST at 64 pixels as it is, and some
hippocampus volumes, from the folder that --data or $MEDFL_DATA names. SimpleITK and pydicom are left out: only DICOM
and formats of SimpleITK's own need them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

from PIL import Image

from medfl.core.errors import InputError
from medfl.datasets.ham10000 import CENTRES
from medfl.datasets.readers.reading import read_pixels

ROOT = Path(__file__).resolve().parents[1]
WHEELS = (
    "monai", "pytorch-ignite", "nibabel", "fire", "termcolor", "jsonschema", "jsonschema-specifications", "referencing",
    "rpds-py",
)  # fmt: skip
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
PIXELS, QUALITY, HIPPOCAMPI = 128, 85, 40
LIMIT = 50 * 2**20  # with the working tree below 64 MiB


def wheels(out: Path, python: str) -> None:
    """Download the wheels, for Linux on x86-64, and put what says that medfl is installed beside them."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    target = [
        "--python-version",
        python,
        "--implementation",
        "cp",
        *(f"--platform={name}" for name in PLATFORMS),
    ]
    subprocess.run(
        [*pip, "download", "--no-deps", "--only-binary=:all:", *target, "-d", str(out), *WHEELS],
        check=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, str(ROOT)], check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as made:
            made.extract(
                next(name for name in made.namelist() if name.endswith(".dist-info/METADATA")), out
            )


def skin(source: Path, out: Path) -> None:
    """Write HAM10000 in its own layout, small."""
    out.mkdir(parents=True)
    for name in ("labels.csv", "dermamnist_split.csv"):
        shutil.copyfile(source / name, out / name)
    for centre in CENTRES:
        archive = source / f"images_{centre}.zip"
        with zipfile.ZipFile(archive) as given, zipfile.ZipFile(out / archive.name, "w") as made:
            for member in sorted(given.namelist()):
                pixels, written = read_pixels(f"{archive}!{member}", (PIXELS, PIXELS), 3), BytesIO()
                Image.fromarray(pixels).save(written, "JPEG", quality=QUALITY, optimize=True)
                made.writestr(member, written.getvalue())


def volumes(source: Path, out: Path) -> None:
    """Copy the first hippocampus volumes with their labels."""
    for kind in ("images", "labels"):
        (out / kind).mkdir(parents=True)
        for path in sorted((source / kind).glob("*.nii.gz"))[:HIPPOCAMPI]:
            shutil.copyfile(path, out / kind / path.name)


def size(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def mib(count: int) -> str:
    """Return bytes as MiB."""
    return f"{count / 2**20:.1f} MiB"


def main() -> int:
    """Make the kit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the real images; default $MEDFL_DATA")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-kit")
    parser.add_argument("--python", default="3.12", help="Python of the machine with the GPU")
    options = parser.parse_args()
    try:
        data = options.data or os.environ.get("MEDFL_DATA")
        make(Path(data) if data else None, options.out, options.python)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def make(data: Path | None, out: Path, python: str) -> None:
    """Make the kit anew.

    Raises:
        InputError: a data set is missing, or the kit is larger than what may travel.
    """
    needed = (
        "ham10000/labels.csv",
        "flamby_meta/isic2019_train_test_split.csv",
        "mednist/mednist_64.npz",
        "msd_hippocampus/images",
    )
    missing = [name for name in needed if data is None or not (data / name).exists()]
    if data is None or missing:
        raise InputError(
            f"--data {data}", f"a folder with {', '.join(needed)}", f"add {missing[0]}"
        )
    shutil.rmtree(out, ignore_errors=True)
    (out / "wheels").mkdir(parents=True)
    wheels(out / "wheels", python)
    skin(data / "ham10000", out / "data" / "ham10000")
    volumes(data / "msd_hippocampus", out / "data" / "msd_hippocampus")
    (out / "data" / "mednist").mkdir()
    shutil.copyfile(
        data / "mednist" / "mednist_64.npz", out / "data" / "mednist" / "mednist_64.npz"
    )
    # FLamby's centres and folds of the same images
    table = "flamby_meta/isic2019_train_test_split.csv"
    (out / "data" / "flamby_meta").mkdir()
    shutil.copyfile(data / table, out / "data" / table)
    for part in ("wheels", "data/ham10000", "data/mednist", "data/msd_hippocampus"):
        print(f"{part:<22} {mib(size(out / part))}")
    print(f"{'all':<22} {mib(size(out))} in {out}")
    if size(out) > LIMIT:
        raise InputError(
            f"a kit of {mib(size(out))}", f"at most {mib(LIMIT)} travel", "lower the JPEG quality"
        )


if __name__ == "__main__":
    sys.exit(main())
