"""Writers of phantom cohorts in the layouts of real data sets: image files with tables, and files of arrays."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from medfl.core.arrays import Bytes, Integers
from medfl.datasets.phantoms.phantom import SQUARE, Case, Counts, Generator, Sides, cohort, even
from medfl.datasets.phantoms.scene import Array, Mask, Scene, class_scenes

Draw = Callable[[Path, Generator, int, int], int]
"""(folder, generator, images per class, size) -> number of images written."""
Columns = Mapping[str, Callable[[Case], object]]
Stack = tuple[Bytes, Integers]
"""Images (N, H, W[, C]) and their labels (N)."""


def draw_files(
    scenes: Sequence[Scene],
    counts: Counts,
    image: Callable[[Case], str],
    *,
    mask: Callable[[Case], str] | None = None,
    tables: Mapping[str, Columns] | None = None,
    sides: Sides = SQUARE,
    spacing: float = 1.0,
    digits: tuple[float, float] = (3, 3),
    repeats: bool = False,
) -> Draw:
    """Return the writer of a file an image, by its ending a picture or a NIfTI volume.

    Args:
        scenes: of the classes.
        counts: of centres and classes.
        image: path of a case's image in the folder.
        mask: path of its reference mask.
        tables: file name -> column -> value of a case; a row with a None is left out, a head without a name, too.
        sides: of the images.
        spacing: of volumes, in mm.
        digits: volumes are stored multiplied by 10 to the power of a number between these two.
        repeats: some patients or lesions have two images.
    """

    def draw(folder: Path, rng: Generator, per_class: int, size: int) -> int:
        cases = cohort(rng, counts(rng, per_class), size, sides, repeats=repeats)
        for case in cases:
            pixels, labels = case.render(scenes)
            if len(case.shape) == 3:
                save_volume(
                    folder / image(case), _stored(pixels * 10 ** rng.uniform(*digits)), spacing
                )
                if mask:
                    save_volume(folder / mask(case), labels, spacing)
            else:
                save(folder / image(case), to_bytes(pixels))
                if mask:
                    # Two classes as pictures of masks have them, black and white.
                    save(folder / mask(case), labels * np.uint8(255))

        for name, columns in (tables or {}).items():
            rows = [[value(case) for value in columns.values()] for case in cases]
            head = [list(columns)] if any(columns) else []
            write_csv(folder / name, [*head, *(row for row in rows if None not in row)])

        return len(cases)

    return draw


def draw_stacks(
    classes: int,
    channels: int,
    write: Callable[[Path, dict[str, Stack]], object],
    *,
    part: Callable[[Case], str] = lambda case: case.fold,
    centres: int = 1,
) -> Draw:
    """Return the writer of arrays, as many images of each class; `write(folder, stacks)` gets a stack of each part."""

    def draw(folder: Path, rng: Generator, per_class: int, size: int) -> int:
        cases = cohort(rng, even(classes, centres)(rng, per_class), size)
        images = np.stack(
            [to_bytes(case.render(class_scenes(classes, channels))[0]) for case in cases]
        )
        labels = np.array([case.label for case in cases])
        parts = np.array(list(map(part, cases)))
        stacks = {}
        for name in np.unique(parts):
            stacks[str(name)] = (images[parts == name], labels[parts == name])

        write(folder, stacks)
        return len(cases)

    return draw


def draw_medmnist(stem: str, classes: int, channels: int, class_names: Sequence[str] = ()) -> Draw:
    """Return the writer of `<stem>[_<size>].npz` with the arrays of MedMNIST."""

    def write(folder: Path, stacks: dict[str, Stack]) -> None:
        arrays: dict[str, Any] = {}  # as numpy wants them
        for part, (images, labels) in stacks.items():
            arrays[f"{part}_images"] = images
            arrays[f"{part}_labels"] = labels.astype(np.uint8)[:, None]

        if class_names:
            arrays["class_names"] = np.array(class_names)

        size = stacks["train"][0].shape[1]
        np.savez_compressed(
            folder / (f"{stem}.npz" if size == 28 else f"{stem}_{size}.npz"), **arrays
        )

    return draw_stacks(classes, channels, write, part=lambda case: case.part)


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write a table, its first row the header."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def to_bytes(picture: Array) -> Bytes:
    """Return the 8-bit pixels of values 0 to 1."""
    return np.rint(picture * 255).astype(np.uint8)


def save(path: Path, pixels: Bytes) -> None:
    """Write a picture, making its folder; JPEG at quality 92."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=92)


def _stored(voxels: Array) -> NDArray[np.generic]:
    if voxels.max() < np.iinfo(np.int16).max:
        return np.rint(voxels).astype(np.int16)
    return voxels.astype(np.float32)


def save_volume(
    path: Path, voxels: NDArray[np.generic] | Mask, spacing: float | Sequence[float]
) -> None:
    """Write a NIfTI file of two, three or, with channels, four axes, making its folder.

    The first axes point to the right, front and top, with `spacing` in mm.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    affine = np.diag([*np.broadcast_to(spacing, 3), 1.0])
    affine[:3, 3] = -affine[:3, :3] @ (np.array([*voxels.shape, 1])[:3] / 2)
    import nibabel as nib

    nib.save(nib.Nifti1Image(voxels, affine), path)  # type: ignore[no-untyped-call]
