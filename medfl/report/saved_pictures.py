"""Which of the pictures in a run folder its report shows, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from medfl.report.picture import Picture

WORST = 12
"""Test images that a run keeps of those that its judged model gets most wrong."""
_BEFORE, _AFTER = (
    ("text-embeddings",),
    ("features-pca", "features-tsne", "spectrum"),
)  # the generated grids lie between
_MAX_GRIDS = 4  # grids of generated images
_MAX_MASK_SITES = 6  # sites with segmented cases
T = TypeVar("T")


def grid_name(round_: int) -> str:
    """Return the name of the grid of images that were generated after a round."""
    return f"generated-{round_:04d}"


def generated_grids(folder: Path) -> list[Path]:
    """Return the grids of generated images in a run folder, by round."""
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
    before, after = (
        [folder / "pictures" / f"{name}.png" for name in names] for names in (_BEFORE, _AFTER)
    )
    pictures = [Picture.read(path) for path in [*before, *shown, *after] if path.is_file()]
    return pictures, len(grids) - len(shown)


def mask_pictures(folder: Path) -> tuple[list[Picture], int]:
    """Read the strips of Dice and the pictures of segmented cases, of sites from the worst to the best.

    Returns:
        The pictures, and how many more sites have cases.

    Raises:
        OSError: a picture cannot be read.
    """
    files = (sorted((folder / "pictures").glob(name)) for name in ("dice*.png", "masks-*.png"))
    strips, sites = ([Picture.read(path) for path in paths] for paths in files)
    shown = _spaced(sorted(sites, key=lambda picture: float(picture.mark or 0)), _MAX_MASK_SITES)
    return [*strips, *shown], len(sites) - len(shown)


def worst_images(folder: Path) -> list[Picture]:
    """Read the images of the worst classified test cases, the worst first.

    Raises:
        OSError: one cannot be read.
    """
    return [Picture.read(path) for path in sorted((folder / "pictures").glob("worst-[0-9]*.png"))]


def _spaced(entries: Sequence[T], count: int) -> Sequence[T]:
    """Return at most `count` entries at equal distances, the first and the last among them."""
    last = len(entries) - 1
    if len(entries) > count:
        return [entries[i * last // (count - 1)] for i in range(count)]

    return entries
