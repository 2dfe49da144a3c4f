"""Input of frozen teachers: the public items of a run; and the interface of a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from medfl.core import Array, Bytes, Config, InputError, Shape
from medfl.data import Public
from medfl.datasets.readers.reading import read_pixels
from medfl.problem import Problem

Picture = Bytes
"""(H, W, 3), RGB."""


@dataclass(frozen=True)
class Questions:
    """The public items that teachers label, P of them.

    Attributes:
        bundle: the public bundle, open on its data.
        section: train, validate or test.
        indices: the items' indices in that section.
        ids: their ids.
        checksum: of the data.
        public: the same items as sites use them: their targets, and the grid of the images.
    """

    bundle: Problem
    section: str
    indices: tuple[int, ...]
    ids: tuple[str, ...]
    checksum: str
    public: Public

    def __len__(self) -> int:
        """Return P."""
        return len(self.indices)

    @cached_property
    def grid(self) -> Shape:
        """(H, W[, D]) of the images that sites use."""
        x, _ = self.public.at(torch.tensor([0]))
        return tuple(x.shape[2:])

    def entry(self, position: int) -> Config:
        """Return an item's data list entry, with the paths of image and label; InputError if it has none."""
        data = self.bundle.data(self.section)

        item = None
        if isinstance(data, list | tuple):
            item = data[self.indices[position]]

        if not isinstance(item, Mapping) or "image" not in item:
            raise InputError(
                f"public item {self.ids[position]!r} of bundle {self.bundle.name!r} does not say where its image lies",
                "teachers read the image files that a data list names under 'image'",
                "name a bundle with such a list with --set public=BUNDLE",
            )

        return item


class Teacher(Protocol):
    """A frozen model that labels public items.

    Attributes:
        name: as given by the user.
        sha256: of its weights.
        facts: what else its outputs depend on, and its origin, as JSON: class names, prompts, pre-processing,
            library versions.
        batch_size: number of items processed at once.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def sha256(self) -> str: ...  # noqa: D102
    @property
    def facts(self) -> Config: ...  # noqa: D102
    @property
    def batch_size(self) -> int: ...  # noqa: D102

    def answer(self, questions: Questions, positions: Sequence[int]) -> Tensor:
        """Return its outputs for these items.

        For classification distributions over the public classes (B, C) float32, for segmentation logits of the
        foreground (B, H, W[, D]) on the public grid.
        """


def public_classes(bundle: Problem) -> tuple[str, ...]:
    """Return the names of a bundle's classes; for segmentation of the mask's values."""
    return bundle.classes or bundle.structures


def need_task(name: str, bundle: Problem, task: str) -> None:
    """Raise an InputError if a teacher for one task is used on a bundle with another."""
    if bundle.task != task:
        raise InputError(
            f"teacher {name!r} for {bundle.name!r}, a {bundle.task} task",
            f"it is a teacher for {task}",
            f"name a teacher for {bundle.task}, or public data for {task}",
        )


def as_picture(pixels: Array) -> Picture:
    """Return RGB pixels (H, W, 3) as 8-bit; other types are scaled from their own minimum and maximum."""
    if pixels.dtype == np.uint8:
        return pixels

    values = pixels.astype(np.float64)
    low = values.min()
    high = values.max()
    # an image of one value all over becomes black
    picture: Picture = np.rint((values - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)

    return picture


def read_picture(uri: str) -> Picture:
    """Read an image as RGB, whatever its type and channels; InputError if it is a volume or cannot be read."""
    return as_picture(read_pixels(uri, channels=3, convert=True))
