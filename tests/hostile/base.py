"""A small bundle with nothing wrong, and how one is written with something changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METADATA: dict[str, Any] = {
    "version": "0.1.0",
    "changelog": {"0.1.0": "first"},
    "task": "none",
    "network_data_format": {"outputs": {"pred": {"channel_def": {"0": "nothing"}}}},
}
TRAIN: dict[str, Any] = {
    "imports": ["$import glob", "$import os"],
    "bundle_root": ".",
    "dataset_dir": "/workspace/data/none",
    "images": "$sorted(glob.glob(os.path.join(@dataset_dir, '*.png')))",
    "network_def": {"_target_": "UNet", "spatial_dims": 2, "in_channels": 1, "out_channels": 2},
    "train": {"dataset": {"_target_": "Dataset", "data": "$[{'image': i} for i in @images]"}},
    "run": ["$@train#trainer.run()"],
}


def write(
    root: Path,
    train: Mapping[str, Any] | None = None,
    files: Mapping[str, str | bytes] | None = None,
) -> Path:
    """Write the bundle with further ids in its training configuration and further files; return its folder."""
    content: dict[str, str | bytes] = {
        "configs/train.json": json.dumps({**TRAIN, **(train or {})}),
        "configs/metadata.json": json.dumps(METADATA),
        "LICENSE": "none\n",
        **(files or {}),
    }
    for name, text in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return root
