"""The phantoms that the tests of data sets read, drawn once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cohorts import Cohorts, common, small_cohorts


@pytest.fixture(scope="session")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return small_cohorts(tmp_path_factory)


@pytest.fixture(scope="session")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A phantom of each volume data set in its default size, with fewer cases."""
    sizes = {"brain_tissue": 16, "hippocampus": 20, "ixi_brain": 21}
    return Cohorts(common(tmp_path_factory, "volumes"), sizes)
