"""Phantom cohorts: drawn images in the real layout of a data set, so that everything runs without the real data."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from medfl.core import Bytes, InputError, Integers
from medfl.core.seeding import derive
from medfl.datasets.base import MARKER, get
from medfl.datasets.phantoms.scene import Array, Mask, Scene, Shape, class_scenes, photograph
from medfl.storage import new_folder, require_unused

PHANTOM_VERSION = 2
"""To be raised whenever the images of a seed change: cohorts in the cache are then drawn anew."""

Generator = np.random.Generator
Counts = Callable[[Generator, int], Integers]
"""(generator, images per class) -> number of images of each centre and class, (centres, classes)."""
Sides = Sequence[tuple[float, float]]
"""Least and greatest length of each side of an image, as shares of the size asked for."""

SQUARE: Sides = ((1, 1), (1, 1))
LEAST = 5
"""Cases a centre from which every section of a segmentation gets one."""
MINIMUM_PER_CLASS = 10  # of which a section with a tenth gets one
MINIMUM_SIZE = 16  # pixels, which a network halves four times
_FOLDS = {"train": 0.8, "test": 0.2}
_PARTS = {"train": 0.7, "val": 0.1, "test": 0.2}
# every fifth image of a class at a centre shows the patient or lesion of the one before
_REPEAT = 5
_FEW = 10  # but where fewer are, none does: sections that keep patients together would be empty


def write_phantom(
    name: str,
    folder: str | Path,
    *,
    seed: int = 0,
    per_class: int | None = None,
    size: int | None = None,
) -> Path:
    """Write a phantom cohort of data set `name` into a new or empty folder and return the folder; all or nothing.

    Args:
        name: data set.
        folder: is created with its parents.
        seed: the same seed gives the same files.
        per_class: images per class, on average over the classes where the real mix is skewed; from 10.
        size: pixels per side, from 16.

    Raises:
        InputError: the folder is not empty, or a number is out of range.
        RunError: the files cannot be written.
    """
    dataset = get(name)
    target = Path(folder)
    count = dataset.per_class if per_class is None else per_class
    side = dataset.size if size is None else size

    if count < MINIMUM_PER_CLASS or side < MINIMUM_SIZE:
        raise InputError(
            f"{count} images per class of {side} pixels",
            f"from {MINIMUM_PER_CLASS} images, so that each section gets some, from {MINIMUM_SIZE} pixels",
            "raise --per-class or --size",
        )

    require_unused(target, advice="give a new one, or remove this")
    with new_folder(target) as partial:
        images = dataset.draw(
            partial, np.random.default_rng(derive(seed, "phantom", name)), count, side
        )
        write_marker(partial, name, images, seed, size=side)

    return target


def write_marker(folder: Path, name: str, images: int, seed: int, **more: int) -> None:
    """Mark a folder as a phantom cohort: every run on it says so."""
    marker = {
        "data_set": name,
        "kind": "phantom: drawn images, not real ones",
        "images": images,
        "seed": seed,
        **more,
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Case:
    """One image of a cohort.

    Attributes:
        number: its place in the cohort, which tells neither class nor centre.
        label: number of its class.
        centre: number of its centre.
        group: number of its patient or lesion.
        shot: its number among the images of the group.
        seed: of what the images of the group share.
        shape: sides in pixels or voxels.
        fold: train or test, 80 to 20 within each class and centre.
        part: train, val or test, 70 to 10 to 20 within each class.
    """

    number: int
    label: int
    centre: int
    group: int
    shot: int
    seed: int
    shape: Shape
    fold: str
    part: str

    def render(self, scenes: Sequence[Scene]) -> tuple[Array, Mask]:
        """Return the image and the reference mask of the case; `scenes` are those of the classes."""
        image, mask = scenes[self.label].draw(np.random.default_rng(self.seed), self.shape)
        light = np.random.default_rng(derive(self.seed, "shot", self.shot))
        return photograph(image, self.centre, light), mask


def even(classes: int, centres: int = 1) -> Counts:
    """Return counts of as many images of each class, dealt to the centres: each gets one before any gets two."""

    def counts(rng: Generator, per_class: int) -> Integers:
        table = np.zeros((centres, classes), np.int64)
        for label in range(classes):
            rounds = [rng.permutation(centres) for _ in range(per_class // centres + 1)]
            table[:, label] = np.bincount(np.concatenate(rounds)[:per_class], minlength=centres)

        return table

    return counts


def mixed(real: Sequence[Sequence[int]], least: int = 1) -> Counts:
    """Return counts that follow the square roots of the real ones (centre, class): rare classes can be learned.

    A real zero stays zero; anything else is at least `least`.
    """
    weights = np.sqrt(np.array(real, dtype=np.float64))

    def counts(rng: Generator, per_class: int) -> Integers:
        shares = weights / weights.sum() * per_class * weights.shape[1]
        return np.where(weights > 0, np.maximum(np.rint(shares), least), 0).astype(np.int64)

    return counts


def cohort(
    rng: Generator,
    counts: Integers,
    size: int,
    sides: Sides = SQUARE,
    *,
    repeats: bool = False,
) -> list[Case]:
    """Return the cases of a cohort by their numbers.

    Args:
        rng: draws all that is random.
        counts: of each centre and class.
        size: of a side, in pixels or voxels.
        sides: of the images.
        repeats: some patients or lesions have two images.
    """
    total = int(counts.sum())
    numbers = rng.permutation(total)
    labels = np.concatenate([np.repeat(np.arange(len(row)), row) for row in counts])
    centres = np.repeat(np.arange(len(counts)), counts.sum(1))
    folds = _cut(rng, labels + centres * counts.shape[1], _FOLDS)
    parts = _cut(rng, labels, _PARTS)

    cases = []
    before = (-1, -1)
    group = place = shot = seed = 0
    shape: Shape = ()

    for index in range(total):
        cell = (int(centres[index]), int(labels[index]))
        # Images of one centre and class follow each other; the last of each five repeats its group.
        place = place + 1 if cell == before else 0
        before = cell
        if repeats and counts[cell] >= _FEW and place % _REPEAT == _REPEAT - 1:
            shot += 1
        else:
            shot = 0
            group += 1
            seed = int(rng.integers(2**62))
            shape = tuple(round(size * rng.uniform(least, most)) for least, most in sides)

        centre, label = cell
        cases.append(
            Case(
                int(numbers[index]),
                label,
                centre,
                group,
                shot,
                seed,
                shape,
                folds[index],
                parts[index],
            )
        )

    return sorted(cases, key=lambda case: case.number)


def _cut(rng: Generator, kinds: Integers, shares: Mapping[str, float]) -> list[str]:
    """Draw a section for each image at random within its kind, ignoring groups, as published splits do."""
    sections = np.empty(len(kinds), dtype=object)
    edges = np.cumsum(list(shares.values()))[:-1]
    for kind in np.unique(kinds):
        positions = rng.permutation(np.flatnonzero(kinds == kind))
        pieces = np.split(positions, np.rint(edges * len(positions)).astype(int))
        for section, piece in zip(shares, pieces, strict=True):
            sections[piece] = section

    return list(map(str, sections))


# Writers of phantom cohorts in the layouts of real data sets: image files with tables, and files of arrays

Draw = Callable[[Path, Generator, int, int], int]
"""(folder, generator, images per class, size) -> number of images written."""
Columns = Mapping[str, Callable[[Case], object]]
Stack = tuple[Bytes, Integers]
"""Images (N, H, W[, C]) and their labels (N)."""


def draw_files(
    counts: Counts,
    image: Callable[[Case], str],
    scenes: Sequence[Scene],
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
        counts: of centres and classes.
        image: path of a case's image in the folder.
        scenes: of the classes.
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
