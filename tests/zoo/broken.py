"""Bundles that a loader must refuse: each function of `BROKEN` spoils one bundle of the zoo."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .build import seg2d_csv_flat, seg2d_opaque_dataset, seg3d_decathlon_json
from .record import BrokenBundle, ZooBundle, write_json


def no_trainer(folder: Path) -> BrokenBundle:
    """A bundle without a trainer, as inference-only bundles are."""
    bundle = seg3d_decathlon_json(folder)
    config = json.loads(bundle.config_file.read_text())
    del config["train"]["trainer"]
    return _break(
        bundle, config, ("trainer", "train.json"), "there is no trainer", "'train::trainer'"
    )


def no_loss(folder: Path) -> BrokenBundle:
    """A bundle whose trainer refers to a loss that is not there."""
    bundle = seg2d_csv_flat(folder)
    config = json.loads(bundle.config_file.read_text())
    del config["lossfn"]
    reason = "the trainer's loss_function refers to an id that is missing"
    return _break(bundle, config, ("lossfn", "train.json"), reason, "'lossfn'")


def empty_data(folder: Path) -> BrokenBundle:
    """A bundle whose glob finds nothing, because the data are somewhere else."""
    bundle = seg2d_opaque_dataset(folder)
    config = json.loads(bundle.config_file.read_text())
    config["dataset_dir"] = "$os.path.join(@bundle_root, 'data', 'elsewhere')"
    del config["train"]["camera_b"], config["train"]["camera_a"]
    config["train"]["dataset"] = {
        "_target_": "Dataset",
        "data": "$[{'image': i, 'label': l} for i, l in zip(@images_a, @labels_a)]",
        "transform": "@train#preprocessing",
    }
    return _break(
        bundle,
        config,
        ("train#dataset", "train.json"),
        "the training data list is empty",
        "num_samples=0",
    )


def bad_json(folder: Path) -> BrokenBundle:
    """A bundle whose configuration does not parse."""
    bundle = seg2d_csv_flat(folder)
    text = bundle.config_file.read_text()
    bundle.config_file.write_text(text[: len(text) // 2])
    reason = "the configuration ends in the middle"
    return BrokenBundle(
        bundle.path, bundle.config, ("train.json",), reason, "Unterminated string", bundle.run_id
    )


def other_trainer(folder: Path) -> BrokenBundle:
    """A bundle whose trainer is none."""
    bundle = seg3d_decathlon_json(folder)
    config = json.loads(bundle.config_file.read_text())
    config["train"]["trainer"] = {**config["train"]["trainer"], "_target_": "torch.nn.Identity"}
    return _break(
        bundle, config, ("torch.nn.Identity", "train.json"), "the trainer is a network", "'run'"
    )


BROKEN: dict[str, Callable[[Path], BrokenBundle]] = {
    function.__name__: function
    for function in (no_trainer, no_loss, empty_data, bad_json, other_trainer)
}


def _break(
    bundle: ZooBundle, config: dict[str, Any], names: tuple[str, ...], reason: str, monai: str
) -> BrokenBundle:
    """Overwrite the bundle's training configuration by `config`."""
    write_json(bundle.config_file, config)
    return BrokenBundle(bundle.path, bundle.config, names, reason, monai, bundle.run_id)
