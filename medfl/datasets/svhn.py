"""SVHN: house numbers in street views, cropped to one digit, in the MATLAB files that torchvision keeps."""

from __future__ import annotations

import string
from pathlib import Path

from medfl.datasets.base import DataSet, sheet
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
    **sheet("svhn"),
    classes=tuple(string.digits),
    layouts=(
        stacked(
            "train_32x32.mat and test_32x32.mat (format 2: cropped digits)", _find, 10, "official"
        ),
    ),
    rules={"official": validation_from_train("official")},
    draw=draw_stacks(10, 3, _write),
)
