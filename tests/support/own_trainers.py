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
    steps = [
        load,
        {"_target_": "EnsureChannelFirstd", "keys": "@key"},
        {"_target_": "ScaleIntensityd", "keys": "@key"},
    ]
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
    (path / "scripts" / "__init__.py").write_text(
        "".join(f"from . import {name}\n" for name in modules)
    )
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
            nibabel.save(
                nibabel.Nifti1Image(values, np.eye(4)), folder / name / f"s_{index:02}.nii.gz"
            )
    return folder


def nodules(folder: Path, count: int) -> Path:
    """Volumes with one cube each, and list.json with its box (centre and size, in mm).

    They are no larger than a window of the detection bundle's inferer.
    """
    folder.mkdir(parents=True)
    entries = []
    for index in range(count):
        draw = np.random.default_rng(index)
        volume = draw.normal(-800, 50, (64, 64, 32)).astype(np.float32)
        centre = [int(draw.integers(16, high)) for high in (36, 36, 26)]
        volume[tuple(slice(c - 4, c + 4) for c in centre)] = 0
        nibabel.save(
            nibabel.Nifti1Image(volume, np.diag([-1.0, -1, 1, 1])), folder / f"{index:02}.nii.gz"
        )
        entries.append(
            {"image": f"{index:02}.nii.gz", "box": [[*map(float, centre), 8, 8, 8]], "label": [0]}
        )
    (folder / "list.json").write_text(json.dumps({"training": entries}))
    return folder


PROMPTING = '''"""A trainer that draws prompts from the labels, as VISTA3D's bundle does, and an evaluator beside it."""

from __future__ import annotations

import torch
from monai.apps.vista3d.sampler import sample_prompt_pairs
from monai.engines import Evaluator, Trainer
from monai.utils.enums import CommonKeys as Keys


class PromptTrainer(Trainer):
    """Keeps network, optimiser and loss as attributes; its step is `_iteration`."""

    def __init__(self, device, max_epochs, train_data_loader, network, optimizer, loss_function, train_handlers=None,
                 amp=False, hyper_kwargs=None):
        super().__init__(device, max_epochs, train_data_loader, handlers=train_handlers, amp=amp)
        self.network, self.optimizer, self.loss_function = network, optimizer, loss_function
        self.hyper_kwargs = hyper_kwargs

    def _iteration(self, engine, batchdata):
        inputs, labels = engine.prepare_batch(batchdata, engine.state.device, engine.non_blocking, **engine.to_kwargs)
        how = engine.hyper_kwargs
        prompts = sample_prompt_pairs(labels, [0, 1], max_point=how["max_point"], drop_label_prob=0.25,
                                      drop_point_prob=0.25, include_background=False)
        label_prompt, point, point_label, prompt_class = prompts
        engine.network.train()
        engine.optimizer.zero_grad()
        loss = torch.tensor(0.0)
        if label_prompt is not None or point is not None:
            outputs = engine.network(input_images=inputs, point_coords=point, point_labels=point_label,
                                     class_vector=label_prompt)
            for index, value in enumerate(prompt_class):
                loss = loss + engine.loss_function(outputs[[index]].float(), labels == value)
            loss.backward()
            engine.optimizer.step()
        engine.state.output = {Keys.IMAGE: inputs, Keys.LABEL: labels, Keys.LOSS: loss}
        return engine.state.output


class PromptEvaluator(Evaluator):
    """Asks for class 1."""

    def __init__(self, device, val_data_loader, network, key_val_metric, val_handlers=None):
        super().__init__(device, val_data_loader, key_val_metric=key_val_metric, val_handlers=val_handlers)
        self.network = network

    def _iteration(self, engine, batchdata):
        inputs, labels = engine.prepare_batch(batchdata, engine.state.device, engine.non_blocking, **engine.to_kwargs)
        with engine.mode(engine.network), torch.no_grad():
            logits = engine.network(input_images=inputs, class_vector=torch.tensor([[1]]))
        engine.state.output = {Keys.IMAGE: inputs, Keys.LABEL: labels, Keys.PRED: (logits > 0).float()}
        return engine.state.output
'''


def prompting(folder: Path) -> Path:
    """A bundle with VISTA3D's network at toy width, its sampler of prompts, and data lists by folds."""
    spleens(folder / "data", 5)
    names = [f"s_{index:02}.nii.gz" for index in range(5)]
    items = [
        {"image": f"imagesTr/{n}", "label": f"labelsTr/{n}", "fold": int(n == names[-1])}
        for n in names
    ]
    keys = ["image", "label"]
    steps = [
        {"_target_": "LoadImaged", "keys": keys, "image_only": True, "ensure_channel_first": True},
        {"_target_": "ScaleIntensityd", "keys": "image"},
        {"_target_": "ResizeWithPadOrCropd", "keys": keys, "spatial_size": [32, 32, 32]},
    ]
    fold = "$monai.auto3dseg.utils.datafold_read(datalist=@data_list_file_path, basedir=@dataset_dir, fold=1)"
    engine = {"device": "@device", "network": "@network"}
    config = {
        "imports": ["$import scripts"], "bundle_root": ".", "device": "cpu", "dataset_dir": str(folder / "data"),
        "data_list_file_path": "$@bundle_root + '/configs/folds.json'", "max_point": 5,
        "network_def": "$monai.networks.nets.vista3d132(encoder_embed_dim=8)", "network": "$@network_def.to(@device)",
        "loss": {"_target_": "DiceCELoss", "sigmoid": True, "squared_pred": True, "include_background": True,
                 "to_onehot_y": False, "smooth_nr": 0, "smooth_dr": 1e-05},
        "optimizer": {"_target_": "torch.optim.AdamW", "params": "$@network.parameters()", "lr": 0.001},
        "train": {
            "dataset": {"_target_": "Dataset", "data": f"{fold}[0]",
                        "transform": {"_target_": "Compose", "transforms": steps}},
            "dataloader": {"_target_": "DataLoader", "dataset": "@train#dataset", "batch_size": 1},
            "trainer": {
                "_target_": "scripts.prompting.PromptTrainer", **engine, "max_epochs": 1, "optimizer": "@optimizer",
                "train_data_loader": "@train#dataloader", "loss_function": "@loss", "amp": True,
                "train_handlers": [{"_target_": "ValidationHandler", "validator": "@validate#evaluator"}],
                "hyper_kwargs": {"max_point": "@max_point"},
            },
        },
        "validate": {
            "dataset": {"_target_": "Dataset", "data": f"{fold}[1]",
                        "transform": {"_target_": "Compose", "transforms": steps}},
            "dataloader": {"_target_": "DataLoader", "dataset": "@validate#dataset", "batch_size": 1},
            "evaluator": {
                "_target_": "scripts.prompting.PromptEvaluator", **engine, "val_data_loader": "@validate#dataloader",
                "key_val_metric": {"val_mean_dice": {"_target_": "MeanDice", "include_background": True,
                                   "output_transform": "$monai.handlers.from_engine(['pred', 'label'])"}},
            },
        },
    }  # fmt: skip
    path = _with_scripts(_bundle(folder, config), prompting=PROMPTING)
    (path / "configs" / "folds.json").write_text(json.dumps({"training": items}))
    return path


def reconstructing(folder: Path) -> Path:
    """A bundle with MONAI's AdversarialTrainer: a network that reconstructs, and a discriminator."""
    path = adversarial(folder)
    file = path / "configs" / "train.json"
    config = json.loads(file.read_text())
    old = config["trainer"]
    shape = {
        "spatial_dims": 2,
        "in_channels": 1,
        "out_channels": 1,
        "channels": [2, 4],
        "strides": [1, 2],
    }
    config["generator"] = {"_target_": "AutoEncoder", **shape}
    config["trainer"] = {
        "_target_": "AdversarialTrainer", "device": "@device", "max_epochs": 3,
        "prepare_batch": "$lambda b, device=None, non_blocking=False, **k: (b['reals'], b['reals'])",
        **{key: old[key] for key in ("train_data_loader", "g_network", "d_network", "g_optimizer", "d_optimizer")},
        "g_loss_function": "$lambda logits: (logits - 1).square().mean()",
        "d_loss_function": "$lambda real, fake: (real - 1).square().mean() + fake.square().mean()",
        "recon_loss_function": {"_target_": "torch.nn.L1Loss"},
    }  # fmt: skip
    file.write_text(json.dumps(config))
    return path
