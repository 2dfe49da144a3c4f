"""One small phantom cohort per data set, drawn when the first test asks for it, once for all processes of a session."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from medfl import datasets

SIZES = {
    "pneumonia": 150, "femnist": 26, "cifar100": 10, "brain_age": 10, "bone_age": 10, "chest_xray14": 10,
    "chexpert": 10, "svhn": 20, "cifar10": 20, "ham10000": 60, "isic19": 60,
    "nct_crc": 60,
}  # fmt: skip
"""Images per class of `small_cohorts`, where they are not the usual number."""


class Cohorts(dict[str, Path]):
    """Name -> folder; a cohort that is missing is drawn.

    Args:
        root: their folder.
        sizes: name -> images, or cases, per class.
        side: pixels per side; None takes the data set's own.
        usual: images per class where `sizes` has none.
    """

    def __init__(
        self, root: Path, sizes: dict[str, int], side: int | None = None, usual: int | None = None
    ) -> None:
        super().__init__()
        self.root, self.sizes, self.side, self.usual = root, sizes, side, usual

    def __missing__(self, name: str) -> Path:
        folder = self.root / name
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=self.root) as place:
                count = self.sizes.get(name, self.usual)
                made = datasets.write_phantom(
                    name, Path(place) / name, per_class=count, size=self.side
                )
                if not folder.is_dir():  # another process may have been faster
                    os.rename(made, folder)
        self[name] = folder
        return folder


def common(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that the processes of a session have in common."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


def small_cohorts(factory: pytest.TempPathFactory) -> Cohorts:
    """Return the cohorts of 32 pixels, which tests of several folders read and none changes."""
    return Cohorts(common(factory, "phantoms"), SIZES, 32, 30)
