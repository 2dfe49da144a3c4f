"""Small phantom cohorts in the place of the default ones, for commands that say `--data phantom` or have no data."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from medfl import datasets
from medfl.storage.places import cache_folder

PER_CLASS = {
    "bone_age": 10, "chest_xray14": 10, "chexpert": 10, "fmnist": 20, "ham10000": 20, "hippocampus": 10, "isic19": 20,
    "kvasir_v2": 20, "mednist": 20, "mnist": 20, "oct_c8": 20, "pneumonia": 30,
}  # fmt: skip
"""Images, or volumes, per class; FEMNIST has one of each writer anyway."""


def small_by_default(patch: pytest.MonkeyPatch, sizes: Mapping[str, int] = PER_CLASS) -> None:
    """Draw the phantoms of the cache in these sizes; cohorts that tests write for themselves have their own."""
    write = datasets.write_phantom

    def small(name: str, folder: Path, *, per_class: int | None = None, **given: int) -> Path:
        if Path(folder).parent == cache_folder("phantom"):
            per_class = per_class or sizes.get(name)
        return write(name, folder, per_class=per_class, **given)

    patch.setattr(datasets, "write_phantom", small)


def draw_small(patch: pytest.MonkeyPatch, **otherwise: int) -> None:
    """Draw phantoms in these sizes into a cache of their own, which the tests of a process share."""
    cache = "-".join(["small", *(f"{name}-{count}" for name, count in sorted(otherwise.items()))])
    patch.setenv("XDG_CACHE_HOME", str(Path(os.environ["XDG_CACHE_HOME"]) / cache))
    small_by_default(patch, PER_CLASS | otherwise)


DRAWING = {"datasets", "tools"}
"""Folders whose tests are of the drawing itself."""

SMALL = 64
"""Pixels per side up to which a cohort is kept."""


def are_drawn_once(path: Path) -> bool:
    """Tell whether the small cohorts of a test file are copied where they were drawn before."""
    return path.as_posix().rpartition("tests/")[2].partition("/")[0] not in DRAWING


def draw_once(patch: pytest.MonkeyPatch, place: Path) -> None:
    """Copy a cohort of a given size that was drawn before into a new folder; `place` is where they are kept."""
    write = datasets.write_phantom

    def once(name: str, folder: Path, **given: Any) -> Path:
        target = Path(folder)
        if target.exists() or not 0 < (given.get("size") or 0) <= SMALL:
            return write(name, folder, **given)

        drawn = place / "-".join([name, *(f"{key}-{given[key]}" for key in sorted(given))])
        if drawn.is_dir():
            shutil.copytree(drawn, target, copy_function=shutil.copyfile)
            return target

        made = write(name, folder, **given)
        with tempfile.TemporaryDirectory(dir=place) as beside:
            copy = shutil.copytree(made, Path(beside) / name, copy_function=shutil.copyfile)
            if not drawn.is_dir():  # another process may have been faster
                os.rename(copy, drawn)
        return made

    patch.setattr(datasets, "write_phantom", once)
