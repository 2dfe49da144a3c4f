"""Entries of a data list without a label, or without some channels: let the deterministic transforms accept them.

A missing label becomes a mask of zeros or class -1, which nothing reads (`LabelsHidden`). Channels that an
entry lists under `LACKS` are set to zero after each transform, so that what a file holds there has no influence.
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
from monai.transforms import Compose, MapTransform, RandomizableTrait, Transform as MonaiTransform
from torch import Tensor

from medfl.data.prepared import Item, Sample, Transform
from medfl.data.source import LACKS, NO_LABEL, Source
from medfl.datasets.readers.reading import JOINED

_NUMBERED = re.compile(r"_(\d{4})\.nii(?:\.gz)?$", re.IGNORECASE)


def is_unlabelled(entry: object) -> bool:
    """Tell whether an entry of a data list has an image and no label."""
    return isinstance(entry, Mapping) and "image" in entry and entry.get("label") in (None, "")


def drop_label(entry: Item) -> dict[str, Any]:
    """Return the entry without its label, marked so that nothing looks for one."""
    return {**{key: value for key, value in entry.items() if key != "label"}, NO_LABEL: True}


def allow_missing_labels(chain: Sequence[Transform]) -> Compose:
    """Return a copy of the transforms, composed, that accepts entries without a label."""
    transforms = deepcopy(Compose(chain).flatten())  # type: ignore[no-untyped-call]
    for transform in transforms.transforms:
        if isinstance(transform, MapTransform):
            transform.allow_missing_keys = True
    return transforms  # type: ignore[no-any-return]


def first_random(steps: Sequence[Transform]) -> int:
    """Return the position of the first transform that is random, or not of MONAI; the number of steps if none is."""
    for position, step in enumerate(steps):
        if isinstance(step, RandomizableTrait) or not isinstance(step, MonaiTransform):
            return position

    return len(steps)


def with_all_channels(entry: Sample, channels: int, numbered: bool) -> Sample:
    """Return an entry whose image has a file for every channel: where one is missing, another stands in for it.

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
    """Return a source whose transforms accept entries without labels or channels.

    Args:
        source: its entries are a list of mappings; those without a label have no such key.
        channels: of an image; 0: none of them is lacking.
    """
    steps = list(allow_missing_labels(source.transforms).transforms)
    if any(isinstance(step, ZeroChannels if channels else StandInLabel) for step in steps):
        return source

    first = first_random(steps)
    zero = [ZeroChannels(channels)] if channels else []
    fixed = []
    for step in steps[:first]:
        fixed += [step, *zero]

    example = next((entry for entry in source.entries if "label" in entry), None)

    return replace(
        source,
        transforms=(Compose([*fixed, StandInLabel(Compose(fixed), example), *steps[first:]]),),
    )


class ZeroChannels(MonaiTransform):
    """Set the channels that an entry lacks to zero in its image (C, H, W[, D]); other images pass unchanged."""

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
    """Give an image without a label a placeholder of the form that the labels have.

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
        steps = (step for step in self.before.transforms if isinstance(step, MapTransform))
        first = next(steps, None)
        if first is not None and "label" in first.keys:
            return torch.zeros((1, 1, 1), dtype=torch.uint8)

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
