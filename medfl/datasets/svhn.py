"""SVHN: house numbers in street views, cropped to one digit, in the MATLAB files that torchvision keeps."""

from __future__ import annotations

import string
from pathlib import Path

from medfl.datasets.base import DataSet
from medfl.datasets.phantoms.phantom import Stack, draw_stacks
from medfl.datasets.readers.splitting import validation_from_train
from medfl.datasets.readers.stacks import write_svhn
from medfl.datasets.readers.tables import ArrayUris, stacked

FILES = {"train": "train_32x32.mat", "test": "test_32x32.mat"}


def _find(folder: Path) -> ArrayUris:
    if not all((folder / file).is_file() for file in FILES.values()):
        return {}
    return {part: (f"{folder / file}!X", f"{folder / file}!y") for part, file in FILES.items()}


def _write(folder: Path, stacks: dict[str, Stack]) -> None:
    for part, (images, labels) in stacks.items():
        write_svhn(folder / FILES[part], images, labels)


DATASET = DataSet(
    name="svhn",
    title="SVHN: house numbers in street views",
    classes=tuple(string.digits),
    concepts=tuple(f"digit {text}" for text in string.digits),
    channels=3,
    folders=("svhn", "SVHN"),
    layouts=(
        stacked(
            "train_32x32.mat and test_32x32.mat (format 2: cropped digits)", _find, 10, "official"
        ),
    ),
    rules={"official": validation_from_train("official")},
    licence="for non-commercial use only, as its page says",
    source="https://ufldl.stanford.edu/housenumbers",
    citation="Netzer, Wang, Coates, Bissacco, Wu, Ng: Reading digits in natural images with unsupervised feature "
    "learning. NIPS Workshop on Deep Learning and Unsupervised Feature Learning (2011)",
    draw=draw_stacks(10, 3, _write),
    per_class=60,
    size=32,
    notes=(
        "73,257 training images, of which 10 % become validation, and 26,032 test images; extra_32x32.mat is not used",
    ),
    download_note="fetch train_32x32.mat (MD5 e26dedcc434d2e4c54c9b2d4a06d8373) and test_32x32.mat (MD5 "
    "eb5a983be6a315427106f1b164d9cef3) from the source page and put both into one folder",
)
