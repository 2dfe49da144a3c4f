"""Conventions of the zoo's bundles: folders with a slash, data lists beside the bundle, devices by name, Dice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medfl.core import Config
from medfl.policy.components import READERS

_LIST = re.compile(
    r"\$.*@bundle_root\b.*['\"]/?([\w./ -]+\.(?:json|csv|tsv|txt|npz|npy|ya?ml))['\"]\s*\)?\s*"
)
"""An expression for a file below the bundle's folder that may be a data list."""
_OF_DICE = ("include_background", "reduction", "num_classes", "return_with_label")
_CUDA = re.compile(r"(?<!==)(?<!== )(['\"])cuda(:\d+)?\1")


def folder_like(before: object, folder: object) -> str:
    """Return a folder that ends in a slash if the previous one did: `@dataset_dir + 'train.csv'` needs it."""
    slash = str(before).rstrip("'\"").endswith("/")
    if slash and str(folder)[:1] not in ("$", "@", "%"):
        return f"{str(folder).rstrip('/')}/"

    return str(folder)


def data_lists(content: Config, root: Path, folder: str) -> dict[str, str]:
    """Return id -> file for data lists that are missing in the bundle's folder but exist in the data folder.

    A list is searched for at the same relative path in the data folder, then by its name alone.
    """
    list_files = {}
    for key, text in content.items():
        match = _LIST.fullmatch(text) if isinstance(text, str) else None
        if match and not (root / match[1]).is_file():
            candidates = Path(folder, match[1]), Path(folder, Path(match[1]).name)
            if there := next((path for path in candidates if path.is_file()), None):
                list_files[key] = str(there)

    return list_files


def without_fetching(node: Any) -> Any:
    """Return an inference configuration whose networks fetch no weights: those of models/ are loaded anyway."""
    if isinstance(node, list):
        return list(map(without_fetching, node))
    if not isinstance(node, Mapping):
        return node

    content = {}
    for key, value in node.items():
        fetches = value is True and re.split("#|::", str(key))[-1] == "pretrained"
        content[key] = False if fetches else without_fetching(value)

    return content


def with_missing(node: Config) -> Config:
    """Return a MONAI Dice that counts structures missing in a reference; any other component unchanged."""
    target = re.sub(r"monai\..*\.", "", str(node.get("_target_", "")))
    if target == "DiceMetric":
        return {**node, "ignore_empty": False}
    if target != "MeanDice":
        return node

    # the handler has no such argument, but its metric does
    metric = {"_target_": "DiceMetric", "ignore_empty": False}
    handler = {"_target_": "IgniteMetricHandler", "metric_fn": metric}
    for key, value in node.items():
        if key in _OF_DICE:
            metric[key] = value
        elif key != "_target_":
            handler[key] = value

    return handler


def rewritten(key: str, text: str, device: torch.device) -> str:
    """Replace CUDA devices in a text by the run's, and a reader's class by its name."""
    if key == "reader" and text.removeprefix("$monai.data.") in READERS:
        return text.removeprefix("$monai.data.")
    if text.startswith("$"):
        return _CUDA.sub(f"'{device}'", text).replace(".cuda()", f".to('{device}')")
    if key in ("device", "map_location") and re.fullmatch(r"cuda(:\d+)?", text):
        return str(device)

    return text
