"""Which of the pictures in a run folder its report shows, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from medfl.report.picture import Picture

WORST = 12
"""Test images that a run keeps of those that its judged model gets most wrong."""
_FEATURES = ("features-pca", "features-tsne", "spectrum")
_MAX_GRIDS = 4  # grids of generated images
_MAX_MASK_SITES = 6  # sites with segmented cases
T = TypeVar("T")


def grid_name(round_: int) -> str:
    """Return the name of the grid of images that were generated after a round."""
    return f"generated-{round_:04d}"


def generated_grids(folder: Path) -> list[Path]:
    """Return the grids of generated images in a run folder, by round."""
    # by length first: rounds from 10,000 on have a digit more
    return sorted(
        (folder / "pictures").glob("generated-[0-9]*.png"),
        key=lambda path: (len(path.stem), path.stem),
    )


def model_pictures(folder: Path) -> tuple[list[Picture], int]:
    """Read the pictures of text embeddings, generated images and features.

    Returns:
        The pictures, and how many more grids of generated images the folder has.

    Raises:
        OSError: a picture cannot be read.
    """
    grids = generated_grids(folder)
    shown = _spaced(grids, _MAX_GRIDS)
    features = [folder / "pictures" / f"{name}.png" for name in _FEATURES]
    paths = [folder / "pictures" / "text-embeddings.png", *shown, *features]
    pictures = [Picture.read(path) for path in paths if path.is_file()]
    return pictures, len(grids) - len(shown)


def mask_pictures(folder: Path) -> tuple[list[Picture], int]:
    """Read the strips of Dice and the pictures of segmented cases, of sites from the worst to the best.

    Returns:
        The pictures, and how many more sites have cases.

    Raises:
        OSError: a picture cannot be read.
        ValueError: the mark of one is no number.
    """
    strips = _read_all(folder, "dice*.png")
    sites = _read_all(folder, "masks-*.png")
    # the mark is the site's median Dice
    shown = _spaced(sorted(sites, key=lambda picture: float(picture.mark or 0)), _MAX_MASK_SITES)
    return [*strips, *shown], len(sites) - len(shown)


def worst_images(folder: Path) -> list[Picture]:
    """Read the images of the worst classified test cases, the worst first.

    Raises:
        OSError: one cannot be read.
    """
    return _read_all(folder, "worst-[0-9]*.png")


def _read_all(folder: Path, pattern: str) -> list[Picture]:
    return list(map(Picture.read, sorted((folder / "pictures").glob(pattern))))


def _spaced(entries: Sequence[T], count: int) -> Sequence[T]:
    """Return at most `count` entries at equal distances, the first and the last among them."""
    last = len(entries) - 1
    if len(entries) > count:
        return [entries[i * last // (count - 1)] for i in range(count)]

    return entries
