"""MNIST: handwritten digits, in the idx files that torchvision keeps."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import Stack, draw_stacks
from medfl.datasets.readers import stacks
from medfl.datasets.readers.splitting import validation_from_train
from medfl.datasets.readers.tables import ArrayUris, Layout, first, stacked

STEMS = {"train": "train", "test": "t10k"}
KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")
FILES = "{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]"


def idx_layout(root: str) -> Layout:
    """Return the layout of four idx files in `<root>/raw/`, in `raw/`, or in the folder itself."""

    def find(folder: Path) -> ArrayUris:
        for source in (folder / root / "raw", folder / "raw", folder):
            pairs = {}
            for part, stem in STEMS.items():
                names = [f"{stem}-{kind}" for kind in KINDS]
                images, labels = (first(source, name, f"{name}.gz") for name in names)
                if images and labels:
                    pairs[part] = (f"{images}!idx", f"{labels}!idx")

            if len(pairs) == len(STEMS):
                return pairs

        return {}

    return stacked(
        f"torchvision's {root}/raw/{FILES}, or these files in the folder itself",
        find,
        10,
        "official",
    )


def idx_writer(root: str) -> Callable[[Path, dict[str, Stack]], None]:
    """Return the writer of a phantom's arrays into `<root>/raw/`."""

    def write(folder: Path, parts: dict[str, Stack]) -> None:
        for part, (images, labels) in parts.items():
            for kind, values in ((KINDS[0], images), (KINDS[1], labels)):
                stacks.write_idx(folder / root / "raw" / f"{STEMS[part]}-{kind}.gz", values)

    return write


DATASET = DataSet(
    **sheet("mnist"),
    classes=tuple(string.digits),
    layouts=(idx_layout("MNIST"),),
    rules={"official": validation_from_train("official")},
    draw=draw_stacks(10, 1, idx_writer("MNIST")),
)
