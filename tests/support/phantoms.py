"""Small phantom cohorts in the place of the default ones, for commands that say `--data phantom`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from medfl import datasets

PER_CLASS = {
    "fmnist": 20, "ham10000": 20, "hippocampus": 10, "isic19": 20, "mednist": 20, "mnist": 20,
    "oct_c8": 20, "pneumonia": 30,
}  # fmt: skip
"""Images, or volumes, per class of the cohorts that the docs' commands use; FEMNIST has one of each writer anyway."""


def draw_small(patch: pytest.MonkeyPatch, **otherwise: int) -> None:
    """Draw phantoms in these sizes or others, into a cache of their own that the tests of a process share."""
    sizes = PER_CLASS | otherwise
    cache = "-".join(["small", *(f"{name}-{count}" for name, count in sorted(otherwise.items()))])
    patch.setenv("XDG_CACHE_HOME", str(Path(os.environ["XDG_CACHE_HOME"]) / cache))
    write = datasets.write_phantom

    def small(name: str, folder: Path, *, per_class: int | None = None, **given: int) -> Path:
        return write(name, folder, per_class=per_class or sizes.get(name), **given)

    patch.setattr(datasets, "write_phantom", small)
