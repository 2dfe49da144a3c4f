"""Phantom cohorts: drawn images in the real layout of a data set, so that everything runs without the real data."""

from __future__ import annotations

import csv
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from medfl.core.errors import InputError, RunError
from medfl.core.seeding import derive
from medfl.datasets.base import MARKER, get
from medfl.datasets.phantoms.drawing import Scene, centre_look, to_bytes

Generator = np.random.Generator
Draw = Callable[[Path, Generator, int, int], int]
Labels = NDArray[np.int64]
SHARES = {"train": 0.7, "val": 0.1, "test": 0.2}
MINIMUM_PER_CLASS, MINIMUM_SIZE = 10, 16


def write_phantom(
    name: str, folder: str | Path, *, seed: int = 0, per_class: int | None = None, size: int | None = None
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
    dataset, target = get(name), Path(folder)
    count, side = dataset.per_class if per_class is None else per_class, dataset.size if size is None else size
    if count < MINIMUM_PER_CLASS:
        raise InputError(
            f"{count} images per class",
            f"from {MINIMUM_PER_CLASS}, so that each section gets some",
            "raise --per-class",
        )
    if side < MINIMUM_SIZE:
        raise InputError(f"image size {side}", f"from {MINIMUM_SIZE} pixels", "raise --size")
    empty_folder(target)
    partial = target.with_name(f".{target.name}-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        images = dataset.draw(partial, np.random.default_rng(derive(seed, "phantom", name)), count, side)
        write_marker(partial, name, images, seed, size=side)
        if target.exists():
            target.rmdir()
        os.rename(partial, target)
    except OSError as error:
        raise RunError(f"the phantom cohort cannot be written to {target}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def empty_folder(folder: str | Path) -> Path:
    """Return the path of a folder to draw into; InputError if something is there that is no empty folder."""
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(
            f"{target} exists and is not an empty folder", "a new or empty folder", "give a new one, or remove this"
        )
    return target


def write_marker(folder: Path, name: str, images: int, seed: int, **more: int) -> None:
    """Mark a folder as a phantom cohort: every run on it says so."""
    marker = {"data_set": name, "kind": "phantom: drawn images, not real ones", "images": images, "seed": seed, **more}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Case:
    """One phantom image.

    Attributes:
        group: its patient or lesion.
        shape: seeds what the images of a group share.
        shot: its number among them.
    """

    label: int
    centre: int
    group: int
    shape: int
    shot: int

    def drawing(self) -> Generator:
        """Return the generator of what the images of a group share."""
        return np.random.default_rng(self.shape)

    def light(self) -> Generator:
        """Return the generator of what differs between the images of a group."""
        return np.random.default_rng(derive(self.shape, "shot", self.shot))


def mixed_cases(rng: Generator, mix: Sequence[Sequence[int]], total: int) -> list[Case]:
    """Return about `total` cases, one group after the other; `mix` holds the real counts (centre, class).

    Counts follow the square root of the real ones, so that rare classes stay rare but can be learned; a real zero stays
    zero. A quarter of the groups that could have two images has them.
    """
    weight = np.sqrt(np.asarray(mix, dtype=np.float64))
    shares = weight / weight.sum() * total
    counts = np.ceil(shares - 0.5).astype(int) + ((weight > 0) & (shares < 0.5))
    cases: list[Case] = []
    for centre, row in enumerate(counts):
        for label, left in enumerate(row.tolist()):
            while left:
                shots = 2 if left > 1 and rng.uniform() < 0.25 else 1
                group, shape = len(cases), int(rng.integers(2**62))
                cases += [Case(label, centre, group, shape, shot) for shot in range(shots)]
                left -= shots
    return cases


def render(scene: Scene, case: Case, size: int) -> NDArray[np.uint8]:
    """Draw a case: shots of one group show the same shape, turned, under another light, with the look of the centre."""
    picture, light = scene(case.drawing(), case.label, size), case.light()
    picture = np.rot90(picture, case.shot) + (light.normal(0, 0.03) if case.shot else 0)
    return to_bytes(centre_look(picture, case.centre), light)


def cut(rng: Generator, labels: Sequence[int], shares: Mapping[str, float]) -> list[str]:
    """Draw a section for each image at random within its class, ignoring groups, as published splits by image do."""
    sections, values = np.empty(len(labels), dtype=object), np.asarray(labels)
    edges = np.cumsum(list(shares.values()))[:-1]
    for label in np.unique(values):
        positions = rng.permutation(np.flatnonzero(values == label))
        for part, chosen in zip(shares, np.split(positions, np.rint(edges * len(positions)).astype(int)), strict=True):
            sections[chosen] = part
    return [str(section) for section in sections]


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write a table, its first row the header."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def save(path: Path, pixels: NDArray[np.uint8]) -> None:
    """Write an image file, making its folder; JPEG at quality 92."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=92)


def _plain(rng: Generator, classes: int, per_class: int) -> list[Case]:
    shapes = rng.integers(2**62, size=(per_class, classes)).tolist()
    return [Case(label, 0, index, shape, 0) for index, row in enumerate(shapes) for label, shape in enumerate(row)]


def draw_folders(
    root: str, classes: Sequence[str], scene: Scene, name: Callable[[str, str, int], str], *, sections: bool = False
) -> Draw:
    """Return the writer of `<root>/[train|val|test/]<class>/<name(section, class, number)>`, as many of each class."""

    def draw(folder: Path, rng: Generator, per_class: int, size: int) -> int:
        cases = _plain(rng, len(classes), per_class)
        parts = cut(rng, [case.label for case in cases], SHARES) if sections else [""] * len(cases)
        for case, part in zip(cases, parts, strict=True):
            kind = classes[case.label]
            save(folder / root / part / kind / name(part, kind, case.group), render(scene, case, size))
        return len(cases)

    return draw


def draw_stacked(classes: int, scene: Scene, write: Callable[[Path, str, NDArray[np.uint8], Labels], object]) -> Draw:
    """Return the writer of the parts "train" and "test" as stacks: write(folder, part, images, labels) keeps one."""

    def draw(folder: Path, rng: Generator, per_class: int, size: int) -> int:
        for part, stacks in _stacks(rng, classes, per_class, size, scene, {"train": 0.8, "test": 0.2}).items():
            write(folder, part, *stacks)
        return per_class * classes

    return draw


def _stacks(
    rng: Generator, classes: int, per_class: int, size: int, scene: Scene, shares: Mapping[str, float]
) -> dict[str, tuple[NDArray[np.uint8], Labels]]:
    """Draw as many images of each class; return images and labels of each part."""
    cases = _plain(rng, classes, per_class)
    labels = np.asarray([case.label for case in cases])
    parts = np.asarray(cut(rng, labels.tolist(), shares))
    images = np.stack([render(scene, case, size) for case in cases])
    return {part: (images[parts == part], labels[parts == part]) for part in shares}


def draw_medmnist(stem: str, classes: int, scene: Scene, class_names: Sequence[str] = ()) -> Draw:
    """Return the writer of `<stem>[_<size>].npz` with the arrays of MedMNIST, the classes equally often."""

    def draw(folder: Path, rng: Generator, per_class: int, size: int) -> int:
        arrays: dict[str, Any] = {}
        for part, (images, labels) in _stacks(rng, classes, per_class, size, scene, SHARES).items():
            arrays[f"{part}_images"], arrays[f"{part}_labels"] = images, labels.astype(np.uint8)[:, None]
        if class_names:
            arrays["class_names"] = np.asarray(class_names)
        np.savez_compressed(folder / (f"{stem}.npz" if size == 28 else f"{stem}_{size}.npz"), **arrays)
        return per_class * classes

    return draw
