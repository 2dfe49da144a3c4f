"""One small phantom cohort per data set."""

from __future__ import annotations

from pathlib import Path

import pytest

import medfl.datasets as datasets


@pytest.fixture(scope="session")
def phantoms(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("phantoms")
    counts = {"pneumonia": 150, "femnist": 26, "cifar100": 20}
    return {
        name: datasets.write_phantom(name, root / name, per_class=counts.get(name, 60), size=32)
        for name in datasets.names()
    }


@pytest.fixture(scope="session")
def volumes(tmp_path_factory) -> dict[str, Path]:
    """A phantom of each volume data set in its default size, with fewer cases."""
    root = tmp_path_factory.mktemp("volumes")
    cases = {"brain_tissue": 16, "hippocampus": 20, "ixi_brain": 21}
    return {name: datasets.write_phantom(name, root / name, per_class=count) for name, count in cases.items()}
