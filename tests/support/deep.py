"""Folders within each other, more than Python calls within calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def deep_folder(root: Path, levels: int = 1_500) -> Iterator[None]:
    """Make them in a folder, and take them away: pytest's own removal of a test's folder would not reach their end."""
    before = os.getcwd()
    try:
        os.chdir(root)
        for _ in range(levels):
            os.mkdir("d")
            os.chdir("d")
        os.chdir(before)
        yield
    finally:
        os.chdir(before)
        os.chdir(root)
        for _ in range(levels):
            os.chdir("d")
        for _ in range(levels):
            os.chdir("..")
            os.rmdir("d")
        os.chdir(before)
