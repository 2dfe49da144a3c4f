"""Bundles whose trainer takes its steps by itself, and tiny data in the layout of the public zoo's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from PIL import Image

SIDE = 8
TWICE = '''"""A click on the brightest pixel, then MONAI's own step."""

from __future__ import annotations

import torch
from monai.transforms import RandomizableTransform


class Clicks(RandomizableTransform):
    """Adds noise of a state of its own."""

    def __call__(self, image):
        return image + float(self.R.normal()) * self.strength

    def __init__(self, strength):
        super().__init__()
        self.strength = strength


class Interaction:
    """Changes the images before the trainer's own step."""

    def __init__(self, strength):
        self.transforms = Clicks(strength)

    def __call__(self, engine, batch):
        assert isinstance(batch, dict)
        return engine._iteration(engine, {**batch, "image": self.transforms(batch["image"])})
'''


def images(folder: Path, count: int) -> None:
    """Write grey squares whose brightness is their label, 0 to 9."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        pixels = np.random.default_rng(index).integers(0, 20, (SIDE, SIDE)) + 20 * (index % 10)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index:02}_{index % 10}.png")


def _loader(data: str, batch: int = 2) -> dict[str, Any]:
    load = {"_target_": "LoadImaged", "keys": "@key", "image_only": True}
    steps = [load, {"_target_": "EnsureChannelFirstd", "keys": "@key"}, {"_target_": "ScaleIntensityd", "keys": "@key"}]
    dataset = {
        "_target_": "CacheDataset",
        "data": data,
        "transform": {"_target_": "Compose", "transforms": steps},
    }
    return {"_target_": "DataLoader", "dataset": dataset, "batch_size": batch}


def _bundle(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "configs").mkdir(parents=True)
    images(folder / "data", 8)
    (folder / "configs" / "train.json").write_text(json.dumps(config))
    return folder


def _with_scripts(path: Path, **modules: str) -> Path:
    (path / "scripts").mkdir()
    (path / "scripts" / "__init__.py").write_text("".join(f"from . import {name}\n" for name in modules))
    for name, text in modules.items():
        (path / "scripts" / f"{name}.py").write_text(text)
    return path


def regression(folder: Path, **trainer: Any) -> Path:
    """A bundle that predicts the brightness of squares, by a SupervisedTrainer with these further arguments."""
    files = "$sorted(glob.glob(@dataset_dir + '/*.png'))"
    items = "[{'image': p, 'label': torch.tensor([float(p[-5]) + 0.5])} for p in @files"
    engine = {"device": "@device", "network": "@network"}
    config: dict[str, Any] = {
        "imports": ["$import glob", "$import torch", *(["$import scripts"] if trainer else [])],
        "bundle_root": ".", "device": "cpu", "dataset_dir": str(folder / "data"), "files": files, "key": "image",
        "network": {"_target_": "FullyConnectedNet", "in_channels": SIDE * SIDE, "out_channels": 1,
                    "hidden_channels": [5]},
        "optimizer": {"_target_": "torch.optim.SGD", "params": "$@network.parameters()", "lr": 0.001, "momentum": 0.9},
        "train": {
            "trainer": {
                "_target_": "SupervisedTrainer", **engine, "max_epochs": 1, "optimizer": "@optimizer",
                "loss_function": {"_target_": "torch.nn.MSELoss"}, "train_data_loader": _loader(f"${items}[:6]]"),
                "prepare_batch": "$lambda b, device=None, non_blocking=False, **k: (b['image'].flatten(1), b['label'])",
                "train_handlers": [{"_target_": "CheckpointSaver", "save_dir": str(folder / "saved"),
                                    "save_dict": {"net": "@network"}, "save_final": True}],
                **trainer,
            },
        },
        "validate": {
            "evaluator": {
                "_target_": "SupervisedEvaluator", **engine, "val_data_loader": _loader(f"${items}[6:]]"),
                "prepare_batch": "@train#trainer#prepare_batch",
                "key_val_metric": {"error": {"_target_": "ignite.metrics.MeanAbsoluteError",
                                   "output_transform": "$monai.handlers.from_engine(['pred', 'label'])"}},
            },
        },
    }  # fmt: skip
    path = _bundle(folder, config)
    return _with_scripts(path, clicks=TWICE) if trainer else path


def clicking(folder: Path, strength: float) -> Path:
    """The same with an iteration_update of its own, which makes no difference at strength 0."""
    return regression(folder, iteration_update=f"$scripts.clicks.Interaction({strength})")


def adversarial(folder: Path, batch: int = 2) -> Path:
    """A bundle with MONAI's GanTrainer, without validation data."""
    config = {
        "imports": ["$import glob", "$import functools", "$import torch", "$import scripts"],
        "bundle_root": ".", "device": "cpu", "dataset_dir": str(folder / "data"), "key": "reals",
        "generator": {"_target_": "Generator", "latent_shape": 4, "start_shape": [4, 4, 4], "channels": [4, 1],
                      "strides": [2, 1]},
        "discriminator": {"_target_": "Discriminator", "in_shape": [1, SIDE, SIDE], "channels": [4, 1],
                          "strides": [2, 1], "num_res_units": 1},
        "trainer": {
            "_target_": "GanTrainer", "device": "$torch.device('cpu')", "max_epochs": 3, "latent_shape": 4,
            "train_data_loader": _loader("$[{'reals': p} for p in sorted(glob.glob(@dataset_dir + '/*.png'))]", batch),
            "g_network": "@generator", "d_network": "@discriminator",
            "g_optimizer": {"_target_": "torch.optim.Adam", "params": "$@generator.parameters()", "lr": 0.01},
            "d_optimizer": {"_target_": "torch.optim.Adam", "params": "$@discriminator.parameters()", "lr": 0.02},
            "g_loss_function": "$functools.partial(scripts.losses.generator, judge=@discriminator)",
            "d_loss_function": "$functools.partial(scripts.losses.discriminator, judge=@discriminator)",
            "d_train_steps": 2,
        },
    }  # fmt: skip
    path = _bundle(folder, config)
    losses = (
        "def generator(fakes, judge):\n    return (judge(fakes) - 1).square().mean()\n\n\n"
        "def discriminator(fakes, reals, judge):\n"
        "    return judge(fakes.detach()).square().mean() + (judge(reals) - 1).square().mean()\n"
    )
    return _with_scripts(path, losses=losses)


# Data in the layouts of the public zoo's bundles


def hands(folder: Path, count: int) -> Path:
    """Grey JPEGs of 64 x 64 pixels."""
    folder.mkdir(parents=True)
    for index in range(count):
        pixels = np.random.default_rng(index).integers(0, 256, (64, 64), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:02}.jpeg")
    return folder


def spleens(folder: Path, count: int) -> Path:
    """Volumes and masks in the folders of the Medical Segmentation Decathlon."""
    for index in range(count):
        volume = np.random.default_rng(index).normal(0, 50, (40, 40, 20)).astype(np.float32)
        mask = np.zeros(volume.shape, np.uint8)
        mask[4 + index : 16 + index, 12:28, 5:15] = 1
        for name, values in (("imagesTr", volume + 150 * mask), ("labelsTr", mask)):
            (folder / name).mkdir(parents=True, exist_ok=True)
            nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / name / f"s_{index:02}.nii.gz")
    return folder


def nodules(folder: Path, count: int) -> Path:
    """Volumes with one cube each, and list.json with its box (centre and size, in mm)."""
    folder.mkdir(parents=True)
    entries = []
    for index in range(count):
        draw = np.random.default_rng(index)
        volume = draw.normal(-800, 50, (72, 72, 40)).astype(np.float32)
        centre = [int(draw.integers(16, high)) for high in (36, 36, 26)]
        volume[tuple(slice(c - 4, c + 4) for c in centre)] = 0
        nibabel.save(nibabel.Nifti1Image(volume, np.diag([-1.0, -1, 1, 1])), folder / f"{index:02}.nii.gz")
        entries.append({"image": f"{index:02}.nii.gz", "box": [[*map(float, centre), 8, 8, 8]], "label": [0]})
    (folder / "list.json").write_text(json.dumps({"training": entries}))
    return folder
