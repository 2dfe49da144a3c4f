"""What is true of a bundle of the zoo, and the files that every bundle has."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "bundles"
LICENSE = "SPDX-License-Identifier: Apache-2.0\nhttps://www.apache.org/licenses/LICENSE-2.0\n"


@dataclass(frozen=True)
class ZooBundle:
    """A bundle on disk and what is true of it.

    Attributes:
        path: the bundle's folder.
        config: its training configuration, relative to `path`.
        task: "segmentation" or "classification".
        dims: spatial dimensions of the images.
        in_channels: channels of the network's input.
        outputs: channels (or classes) of the network's output.
        train: items that are trained on, as the bundle splits them.
        validate: items that are validated on.
        test: items of a test list that `configs/evaluate.json` names; 0 if there is none.
        steps: optimiser steps of one epoch as the bundle's own trainer counts them.
        loss: class name of the loss.
        optimizer: class name of the optimiser.
        key_metric: name of the first validation metric.
        higher_is_better: whether larger values of `key_metric` are better.
        sections: whether the ids are `train#…` and `validate#…`; flat ids otherwise.
        trainer: id of the trainer.
        evaluator: id of the evaluator.
        run_id: the list that plain MONAI runs.
        items: whether the training data set is a transform over a plain list of items; otherwise it is opaque.
        overrides: ids that a user of this bundle has to set, as `--config id=value` or, for `dataset_dir`, `--data`.
        idioms: what the bundle is in the zoo for.
    """

    path: Path
    config: str
    task: str
    dims: int
    in_channels: int
    outputs: int
    train: int
    validate: int
    steps: int
    loss: str
    optimizer: str
    key_metric: str
    idioms: tuple[str, ...]
    test: int = 0
    higher_is_better: bool = True
    sections: bool = True
    trainer: str = "train#trainer"
    evaluator: str = "validate#evaluator"
    run_id: str = "run"
    items: bool = True
    overrides: dict[str, str] = field(default_factory=dict)

    @property
    def config_file(self) -> Path:
        """The training configuration."""
        return self.path / self.config

    @property
    def side_effects(self) -> tuple[Path, ...]:
        """Files that the `initialize`, `run` or `training` lists write; a loader that executes none leaves none."""
        return self.path / "INITIALIZED", self.path / "RAN"


@dataclass(frozen=True)
class BrokenBundle:
    """A bundle that cannot be federated.

    Attributes:
        path: the bundle's folder.
        config: its training configuration, relative to `path`.
        names: texts that a good error message contains: the missing id or empty list, and the file.
        reason: what is wrong, in words.
        monai: part of what MONAI itself, or what it calls, says at the root of its traceback.
        run_id: the list that plain MONAI runs.
    """

    path: Path
    config: str
    names: tuple[str, ...]
    reason: str
    monai: str
    run_id: str = "run"


def copy_bundle(name: str, folder: Path) -> Path:
    """Copy the bundle's own files to `folder/name`."""
    path = folder.resolve() / name
    shutil.copytree(SOURCES / name, path, ignore=shutil.ignore_patterns("__pycache__"))
    (path / "LICENSE").write_text(LICENSE)
    return path


def describe(record: ZooBundle, channels: list[str]) -> ZooBundle:
    """Write `metadata.json` for the bundle; `channels` names what the network's outputs mean."""
    picture = {"type": "image", "format": "magnitude", "dtype": "float32", "is_patch_data": False}
    spatial = ["*"] * record.dims
    write_json(
        record.path / "configs" / "metadata.json",
        {
            "version": "0.1.0",
            "changelog": {"0.1.0": "initial version"},
            "monai_version": "1.6.1",
            "pytorch_version": "2.8.0",
            "numpy_version": "1.26.0",
            "required_packages_version": {"pytorch-ignite": "0.5.3"},
            "task": f"Synthetic {record.task}",
            "description": f"A tiny {record.dims}D {record.task} bundle on synthetic images",
            "authors": "medfl",
            "copyright": "Copyright (c) the medfl authors",
            "network_data_format": {
                "inputs": {
                    "image": {
                        **picture,
                        "num_channels": record.in_channels,
                        "spatial_shape": spatial,
                    }
                },
                "outputs": {
                    "pred": {
                        **picture,
                        "num_channels": record.outputs,
                        "channel_def": {str(n): name for n, name in enumerate(channels)},
                    }
                },
            },
        },
    )
    return record


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path`, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=4) + "\n")
