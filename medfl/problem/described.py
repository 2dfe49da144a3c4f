"""What metadata.json declares about a network's inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from medfl.core import Config as Config, Document as Document, type_errors

MOST_CHANNELS = 1000
LARGEST_COMPONENT = "largest_component"
"""In federated.yaml and in the configuration of an evaluation; a decision's name in a summary."""
CHANNEL_INDEX = re.compile("[0-9]{1,6}")


def tensor_described(metadata: Config, part: str, name: str) -> Config:
    """Return the metadata.json entry of one of the network's `inputs` or `outputs`, {} if there is none."""
    described = (metadata.get("network_data_format") or {}).get(part) or {}
    return described.get(name) or {}


def channel_names(metadata: Config) -> tuple[str, ...]:
    """Return the names of the network's output channels in metadata.json, in order; some bundles name the labels."""
    prediction = tensor_described(metadata, "outputs", "pred")
    channels = prediction.get("channel_def") or prediction.get("label_def")
    if channels is None or [*type_errors({"of": channels}, {"of": dict[str, str]})]:
        return ()

    order = []
    if all(map(CHANNEL_INDEX.fullmatch, channels)):
        order = sorted(channels, key=int)

    return tuple(channels[key] for key in order)


def mask_names(metadata: Config) -> tuple[str, ...]:
    """Return `channel_names`; a single name is preceded by the background."""
    names = channel_names(metadata)
    return ("background", *names) if len(names) == 1 else names


def mask_values(metadata: Config) -> Sequence[int]:
    """Return the class values in masks if metadata.json declares them to be other than 0, 1, 2, ..."""
    values = tensor_described(metadata, "outputs", "pred").get("mask_values")
    if not isinstance(values, list) or not all(
        type(v) is int and v in range(2**16) for v in values
    ):
        return ()

    return values


def largest_components(metadata: Config) -> list[str]:
    """Return the structures of which an exported model keeps only the largest component."""
    entry = metadata.get("medfl")
    # the file may come from anybody
    if isinstance(entry, Mapping) and isinstance(entry.get("largest_components"), list):
        return [*entry["largest_components"]]

    return []
