"""Entries of a data list that lack a label, or channels: the deterministic transforms do with what they have.

A mask of zeros, or class -1, then stands where the label would; nothing reads it (`medfl.data.unlabelled`). Channels
that an entry names under `LACKS` are zero from the first transform on, so that none sees what a file has there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from monai.data import MetaTensor
from monai.transforms import Compose, MapTransform, RandomizableTrait
from monai.transforms import Transform as MonaiTransform
from torch import Tensor

from medfl.data.prepared import Item, Sample, Transform
from medfl.data.source import LACKS, NO_LABEL, Source
from medfl.datasets.readers.reading import JOINED

_NUMBERED = re.compile(r"_(\d{4})\.nii(?:\.gz)?$", re.IGNORECASE)


def is_unlabelled(entry: object) -> bool:
    """Tell whether an entry of a data list has an image and no label."""
    return isinstance(entry, Mapping) and "image" in entry and entry.get("label") in (None, "")


def drop_label(entry: Item) -> dict[str, Any]:
    """Return an entry whose label is not read, nor looked for."""
    return {**{key: value for key, value in entry.items() if key != "label"}, NO_LABEL: True}


def allow_missing_labels(chain: Sequence[Transform]) -> Compose:
    """Return a copy of transforms as one, which lets an entry without a label pass."""
    transforms = deepcopy(Compose(chain).flatten())  # type: ignore[no-untyped-call]
    for transform in transforms.transforms:
        if isinstance(transform, MapTransform):
            transform.allow_missing_keys = True
    return transforms  # type: ignore[no-any-return]


def first_random(steps: Sequence[Transform]) -> int:
    """Return the position of the first transform that draws, or may as it is not MONAI's; their number if none does."""
    for position, step in enumerate(steps):
        if isinstance(step, RandomizableTrait) or not isinstance(step, MonaiTransform):
            return position

    return len(steps)


def with_all_channels(entry: Sample, channels: int, numbered: bool) -> Sample:
    """Return an entry whose image, where its channels are files, has one for each: another stands for one not there.

    Args:
        entry: its image is a list of files in the channels' order, or their URIs joined by ` | `.
        channels: of an image.
        numbered: joined ones are volumes <name>_0000, <name>_0001, ... of one channel.
    """
    image = entry.get("image") if isinstance(entry, Mapping) else None
    if isinstance(image, list | tuple):
        if len(image) != channels:
            return entry

        there = {i: file for i, file in enumerate(image) if os.path.exists(file)}
    elif isinstance(image, str) and numbered:
        matches = [(_NUMBERED.search(file), file) for file in image.split(JOINED)]
        there = {int(match[1]): file for match, file in matches if match}
        there = there if len(there) == len(matches) and max(there) < channels else {}
    else:
        return entry

    if not 0 < len(there) < channels:
        return entry

    files = [there.get(channel, min(there.items())[1]) for channel in range(channels)]
    complete = JOINED.join(files) if isinstance(image, str) else files
    lacking = sorted(set(range(channels)) - set(there))
    return {**entry, "image": complete, LACKS: tuple(lacking)}


def fill_missing(source: Source, channels: int = 0) -> Source:
    """Return a source whose transforms know what entries may lack.

    Args:
        source: its entries are a list of mappings; those without a label have no such key.
        channels: of an image; 0: none of them is lacking.
    """
    steps = list(allow_missing_labels(source.transforms).transforms)
    if any(isinstance(step, ZeroChannels if channels else StandInLabel) for step in steps):
        return source

    first = first_random(steps)
    zero = [ZeroChannels(channels)] if channels else []
    fixed: list[Transform] = []
    for step in steps[:first]:
        fixed += [step, *zero]

    example = next((entry for entry in source.entries if "label" in entry), None)

    return replace(
        source,
        transforms=(Compose([*fixed, StandInLabel(Compose(fixed), example), *steps[first:]]),),
    )


class ZeroChannels(MonaiTransform):
    """Make the channels that an entry lacks zero in its image (C, H, W[, D]); another image passes as it is."""

    keys = ()

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def __call__(self, data: Item) -> Item:
        """Return the entry, its image changed in a copy."""
        image = data["image"]
        absent = list(data.get(LACKS, ()))
        if (
            not absent
            or not isinstance(image, Tensor)
            or image.ndim < 3
            or len(image) != self.channels
        ):
            return data

        image = image.clone()
        image[absent] = 0
        return {**data, "image": image}


class StandInLabel(MonaiTransform):
    """Give an image without a label one that stands for it, of the form that labels have here.

    Args:
        before: the transforms that an entry has passed.
        example: an entry with a label; None: an image has a mask where the first transform would read one.
    """

    keys = ()

    def __init__(self, before: Compose, example: Item | None) -> None:
        self.before = before
        self.example = example

    @cached_property
    def like(self) -> Any:
        """A label as the transforms make it."""
        if self.example is not None:
            return self.before(dict(self.example))["label"]

        # Without an example the first transform, which reads files, tells masks from classes.
        for step in self.before.transforms:
            if isinstance(step, MapTransform):
                return torch.zeros((1, 1, 1), dtype=torch.uint8) if "label" in step.keys else -1

        return -1

    def __call__(self, data: Item) -> dict[str, Any]:
        """Return the entry with a label, and without the keys that say what it lacks."""
        sample = {key: value for key, value in data.items() if key not in (LACKS, NO_LABEL)}
        if "label" in sample:
            return sample

        return {**sample, "label": self._empty(sample["image"])}

    def _empty(self, image: Sample) -> Any:
        like = self.like
        if not isinstance(like, Tensor):
            return -1
        if like.ndim < 2:
            return torch.full_like(like, -1)

        mask = torch.zeros((len(like), *image.shape[1:]), dtype=like.dtype)
        if isinstance(like, MetaTensor):
            return MetaTensor(mask, meta=image.meta)

        return mask
