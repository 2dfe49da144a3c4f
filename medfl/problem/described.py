"""What metadata.json says of a network's inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from medfl.core.documents import Config as Config, Document as Document
from medfl.core.type_checks import type_errors

MOST_CHANNELS = 1000
CHANNEL_INDEX = re.compile("[0-9]{1,6}")


def tensor_described(metadata: Config, part: str, name: str) -> Config:
    """Return what metadata.json says of one of the network's `inputs` or `outputs`, {} where it says nothing."""
    described: Config = (metadata.get("network_data_format") or {}).get(part) or {}
    return described.get(name) or {}


def channel_names(metadata: Config) -> tuple[str, ...]:
    """Return what metadata.json calls the network's output channels, or some call the labels, in their order."""
    prediction = tensor_described(metadata, "outputs", "pred")
    channels = prediction.get("channel_def") or prediction.get("label_def")
    if channels is None or [*type_errors({"of": channels}, {"of": dict[str, str]})]:
        return ()

    if all(map(CHANNEL_INDEX.fullmatch, channels)):
        order = sorted(channels, key=int)
    else:
        order = []

    return tuple(channels[key] for key in order)


def mask_names(metadata: Config) -> tuple[str, ...]:
    """Return the names of `channel_names`, a single one with the background before it."""
    names = channel_names(metadata)
    return ("background", *names) if len(names) == 1 else names


def mask_values(metadata: Config) -> Sequence[int]:
    """Return the values of the classes in masks, where metadata.json says that they are not 0, 1, 2, ..."""
    values = tensor_described(metadata, "outputs", "pred").get("mask_values")
    if not isinstance(values, list) or not all(
        type(v) is int and v in range(2**16) for v in values
    ):
        return ()

    return values
