"""Fixtures for all tests: one thread, a cache of the session's own, and the real images where they are at hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.toy import Toy

# torch is imported in the fixtures: the process that hands the tests out to workers runs none and has to start quickly.


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums of several threads may differ in the last bits."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Point the cache at a temporary folder: a phantom is drawn once a session, and the user's cache is left alone."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of the real images; skips without it."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("MEDFL_DATA", default))
    if not (folder / "ham10000" / "labels.csv").is_file():
        pytest.skip(f"no real images in {folder}; set MEDFL_DATA")
    return folder


@pytest.fixture
def lines() -> Toy:
    """Four sites with a linear regression each: quadratics with different minimisers, float64, one full batch."""
    from tests.support.toy import Toy, regression, sgd

    return Toy(regression({"a": 6, "b": 12, "c": 18, "d": 24}), optimizer=sgd(0.1))


@pytest.fixture
def classes() -> Toy:
    """Three sites with three classes, a float32 network with BatchNorm and dropout; batches of 4, so some are short.

    The public data are of four other classes.
    """
    from tests.support.toy import Toy, blobs, classifier, cross_entropy, public_blobs, sgd

    network, public = classifier(norm=True, dropout=0.3), public_blobs()
    return Toy(blobs({"a": 9, "b": 6, "c": 11}), network, cross_entropy, sgd(0.1), batch_size=4, public=public)
