"""CIFAR-10: small colour pictures of ten kinds of animal and vehicle, in the batches that torchvision keeps."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from medfl.datasets.base import DataSet, sheet
from medfl.datasets.phantoms.phantom import draw_stacks
from medfl.datasets.readers.splitting import validation_from_train
from medfl.datasets.readers.stacks import ARCHIVES, CIFAR10, write_cifar
from medfl.datasets.readers.tables import ArrayUris, Layout, first, stacked

SHEET = sheet("cifar10")
CLASSES = SHEET["classes"]


def batches_layout(kind: str, classes: int) -> Layout:
    """Return the layout of one of the CIFARs: its folder of batches, or the archive with it."""

    def find(folder: Path) -> ArrayUris:
        is_inside = folder.name == kind and (folder / "batches.meta").exists()
        source = folder if is_inside else first(folder, kind, ARCHIVES[kind])
        parts = ("train", "test") if source else ()
        return {part: (f"{source}!{part}_images", f"{source}!{part}_labels") for part in parts}

    return stacked(
        f"torchvision's {kind}/ (Python pickles), or {ARCHIVES[kind]}", find, classes, "official"
    )


DATASET = DataSet(
    **SHEET,
    layouts=(batches_layout(CIFAR10, len(CLASSES)),),
    rules={"official": validation_from_train("official")},
    draw=draw_stacks(len(CLASSES), 3, partial(write_cifar, CIFAR10)),
)
