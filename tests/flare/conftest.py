"""FLARE's processes are many, and each imports MONAI."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.programs import python_path


@pytest.fixture(scope="package", autouse=True)
def lean() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path())
        yield
