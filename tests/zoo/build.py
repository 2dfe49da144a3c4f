"""Writes the zoo: each function of `ZOO` puts one complete tiny bundle with its data into a folder and describes it.

The configurations lie as they are in `bundles/`, written in the styles of the public model zoo; only the data,
`LICENSE` and `metadata.json` are made here.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .images import blob, save_nifti, save_picture
from .record import ZooBundle, copy_bundle, describe, write_json


def seg3d_decathlon_json(folder: Path) -> ZooBundle:
    """A spleen-like 3D segmentation over a decathlon `dataset.json`, volumes of different sizes and spacings."""
    rng = np.random.default_rng(1)
    path = copy_bundle("seg3d_decathlon_json", folder)
    data = path / "data" / "Task99_Ball"
    training = []
    for n in range(6):
        shape, spacing = (20 + n, 22, 18), (1.0, 1.0, 1.0 + 0.1 * n)
        image, label = blob(rng, shape)
        files = {"image": f"./imagesTr/ball_{n}.nii.gz", "label": f"./labelsTr/ball_{n}.nii.gz"}
        save_nifti(data / files["image"], (400 * image - 150).astype(np.int16), spacing)
        save_nifti(data / files["label"], (label > 0).astype(np.uint8), spacing)
        training.append(files)
    test = [f"./imagesTs/ball_{n}.nii.gz" for n in (6, 7)]
    for name in test:
        save_nifti(data / name, (400 * blob(rng, (20, 22, 18))[0] - 150).astype(np.int16))
    write_json(
        data / "dataset.json",
        {
            "name": "Ball",
            "tensorImageSize": "3D",
            "modality": {"0": "CT"},
            "labels": {"0": "background", "1": "ball"},
            "numTraining": len(training),
            "numTest": len(test),
            "training": training,
            "test": test,
        },
    )
    record = ZooBundle(
        path=path,
        config="configs/train.json",
        task="segmentation",
        dims=3,
        in_channels=1,
        outputs=2,
        train=4,
        validate=2,
        steps=2,
        loss="DiceCELoss",
        optimizer="Novograd",
        key_metric="val_mean_dice",
        idioms=(
            "train# and validate# sections",
            "decathlon data list split by slices; unlabelled test list",
            "images of different size and spacing, non-canonical orientation",
            "several samples per item (RandCropByPosNegLabeld)",
            "CacheDataset; loader with a worker",
            "% macro for the validation transforms and postprocessing",
            "sliding window validation; one-hot postprocessing; BatchNorm",
            "evaluate.json with CheckpointLoader and MetricsSaver",
            "initialize and run lists",
        ),
    )
    return describe(record, ["background", "ball"])


def cls2d_glob_yaml(folder: Path) -> ZooBundle:
    """A MedNIST-like 2D classification: one folder a class, globbed; the data lie outside the bundle."""
    rng = np.random.default_rng(2)
    path = copy_bundle("cls2d_glob_yaml", folder)
    data = folder.resolve() / "MiniNIST"
    for index, name in enumerate(("Abdomen", "Chest", "Hand")):
        for n in range(8):
            image, _ = blob(rng, (32, 32))
            image += 0.3 * np.sin(np.arange(32) * (index + 1)).astype(np.float32)
            save_picture(data / name / f"{n:06d}.jpeg", image)
    (data / "README.txt").write_text("Synthetic.\n")
    record = ZooBundle(
        path=path,
        config="configs/train.yaml",
        task="classification",
        dims=2,
        in_channels=1,
        outputs=3,
        train=18,
        validate=6,
        steps=3,
        loss="CrossEntropyLoss",
        optimizer="Adam",
        key_metric="val_accuracy",
        overrides={"dataset_dir": str(data)},
        idioms=(
            "YAML with comments; keys from $monai.utils.CommonKeys",
            "dataset_dir is a placeholder that the user overrides",
            "data list by glob, zip and a label looked up from the folder's name",
            "number of classes computed from the data",
            "expressions with references inside comprehensions",
            "one-hot prediction and label under ignite Accuracy",
        ),
    )
    return describe(record, ["Abdomen", "Chest", "Hand"])


def seg2d_csv_flat(folder: Path) -> ZooBundle:
    """A binary 2D segmentation with flat ids, read from a table; one sigmoid channel."""
    rng = np.random.default_rng(3)
    path = copy_bundle("seg2d_csv_flat", folder)
    rows = []
    for n in range(12):
        image, label = blob(rng, (32, 32))
        row = {"image": f"images/{n}.png", "mask": f"masks/{n}.png", "patient": f"p{n // 2}"}
        save_picture(path / "data" / row["image"], image)
        save_picture(path / "data" / row["mask"], (label > 0).astype(np.float32))
        rows.append({**row, "split": "val" if n >= 8 else "train"})
    with (path / "data" / "cases.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    record = ZooBundle(
        path=path,
        config="configs/train.json",
        task="segmentation",
        dims=2,
        in_channels=1,
        outputs=1,
        train=8,
        validate=4,
        steps=2,
        loss="DiceLoss",
        optimizer="AdamW",
        key_metric="val_mean_dice",
        sections=False,
        trainer="trainer",
        evaluator="evaluator",
        run_id="training",
        idioms=(
            "flat ids; the loss is `lossfn`; no inferer; no training metric",
            "data list from a table",
            "lambda transforms, which do not pickle",
            "one sigmoid channel, 0/255 masks",
            "metric and handlers written inside the evaluator",
            "the run list is `training`",
        ),
    )
    return describe(record, ["object"])


def seg3d_multilabel_json(folder: Path) -> ZooBundle:
    """A BraTS-like 3D segmentation: four files an image, three overlapping sigmoid channels, mixed precision."""
    rng = np.random.default_rng(4)
    path = copy_bundle("seg3d_multilabel_json", folder)
    data = folder.resolve() / "braintumour"
    items = []
    for n in range(6):
        image, label = blob(rng, (18, 18, 14))
        tumour = np.choose(label, [0, 2, 1]).astype(np.uint8)
        tumour[label == 2] = rng.choice([1, 4], int((label == 2).sum()))
        names = [f"case_{n}/case_{n}_{kind}.nii.gz" for kind in ("t1", "t1ce", "t2", "flair")]
        for gain, name in enumerate(names, start=1):
            save_nifti(data / name, (100 * gain * image * (image > 0)).astype(np.float32))
        mask = f"case_{n}/case_{n}_seg.nii.gz"
        save_nifti(data / mask, tumour)
        items.append({"image": names, "label": mask})
    write_json(path / "configs" / "datalist.json", {"training": items[:4], "validation": items[4:]})
    record = ZooBundle(
        path=path,
        config="configs/train.json",
        task="segmentation",
        dims=3,
        in_channels=4,
        outputs=3,
        train=4,
        validate=2,
        steps=4,
        loss="DiceLoss",
        optimizer="Adam",
        key_metric="val_mean_dice",
        overrides={"dataset_dir": str(data)},
        idioms=(
            "an image is a list of files",
            "labels 0, 1, 2, 4 become three overlapping channels",
            "deterministic transforms are called preprocessing_transforms",
            "data list inside the bundle, images outside, joined by base_dir",
            "amp; learning rate scheduler; batch of one",
            "prediction split into channels, one more metric per channel",
        ),
    )
    return describe(record, ["tumour core", "whole tumour", "enhancing tumour"])


def seg2d_opaque_dataset(folder: Path) -> ZooBundle:
    """An endoscopy-like 2D segmentation of colour pictures; the training set is two data sets joined."""
    rng = np.random.default_rng(5)
    path = copy_bundle("seg2d_opaque_dataset", folder)
    places = {"train/camera_a": 4, "train/camera_b": 3, "val/camera_a": 2, "val/camera_b": 1}
    for place, count in places.items():
        for n in range(count):
            image, label = blob(rng, (40, 60))
            tint = np.asarray(
                [1.0, 0.8, 0.6] if place.endswith("a") else [0.6, 0.8, 1.0], dtype=np.float32
            )
            base = path / "data" / "tools" / place
            save_picture(base / f"frame_{n:03d}.png", image[..., None] * tint)
            save_picture(base / f"frame_{n:03d}_seg.png", (label > 0).astype(np.float32))
    record = ZooBundle(
        path=path,
        config="configs/train.json",
        task="segmentation",
        dims=2,
        in_channels=3,
        outputs=2,
        train=7,
        validate=3,
        steps=2,
        loss="DiceFocalLoss",
        optimizer="SGD",
        key_metric="val_iou",
        items=False,
        idioms=(
            "ConcatDataset: there is no train#dataset#data",
            "bundle_root is $os.getcwd()",
            "PersistentDataset for validation (writes a cache folder)",
            "optimiser over a filter of the parameters; PolynomialLR",
            "label files found by replacing a suffix; a glob with a negated set",
            "a Compose around a macro of a Compose",
            "numpy constants in transforms",
        ),
    )
    return describe(record, ["background", "tool"])


def cls3d_partition_json(folder: Path) -> ZooBundle:
    """A 3D classification: a JSON list that carries patient and centre, split by `partition_dataset`."""
    rng = np.random.default_rng(6)
    path = copy_bundle("cls3d_partition_json", folder)
    samples = []
    for n in range(12):
        kind = n % 2
        volume = blob(rng, (18, 16, 20))[0] if kind else rng.random((18, 16, 20)).astype(np.float32)
        name = f"volumes/v{n:02d}.nii.gz"
        save_nifti(path / "data" / name, volume)
        samples.append(
            {"image": name, "label": kind, "patient": f"p{n // 2}", "centre": "ab"[n // 2 % 2]}
        )
    write_json(path / "data" / "samples.json", {"training": samples[:8], "test": samples[8:]})
    record = ZooBundle(
        path=path,
        config="configs/train.json",
        task="classification",
        dims=3,
        in_channels=1,
        outputs=2,
        train=6,
        validate=2,
        test=4,
        steps=3,
        loss="CrossEntropyLoss",
        optimizer="Adam",
        key_metric="val_auc",
        idioms=(
            "an open file as an id, closed in finalize",
            "items with more keys than image and label (patient, centre)",
            "partition_dataset; section data are $@partitions[0] and [1]",
            "loss with reduction sum; ThreadDataLoader; cache_rate 0.5",
            "ROCAUC on probabilities",
            "evaluate.json replaces validate#dataset#data by a test list",
        ),
    )
    return describe(record, ["noise", "ball"])


def seg2d_npz_subset_yaml(folder: Path) -> ZooBundle:
    """A cardiac-like 2D segmentation with flat ids; all slices in one `.npz`, `Subset` below `CacheDataset`."""
    rng = np.random.default_rng(7)
    path = copy_bundle("seg2d_npz_subset_yaml", folder)
    pairs = [blob(rng, (24, 24)) for _ in range(10)]
    (path / "data").mkdir()
    images, segs = (np.stack(arrays) for arrays in zip(*pairs, strict=True))
    np.savez(path / "data" / "slices.npz", images=images, segs=segs)
    record = ZooBundle(
        path=path,
        config="configs/train.yaml",
        task="segmentation",
        dims=2,
        in_channels=1,
        outputs=3,
        train=8,
        validate=2,
        steps=3,
        loss="DiceLoss",
        optimizer="RMSprop",
        key_metric="val_mean_dice",
        sections=False,
        trainer="trainer",
        evaluator="evaluator",
        items=False,
        idioms=(
            "items are arrays in memory without a file each: Subset of NPZDictItemDataset",
            "sampler with replacement; loader that repeats each batch",
            "a size taken from the first item while the configuration is read",
            "MetricLogger, LogfileHandler; handlers with _disabled_",
            "flat ids in YAML",
        ),
    )
    return describe(record, ["background", "wall", "pool"])


def seg2d_own_scripts_yaml(folder: Path) -> ZooBundle:
    """A registration-template-like bundle with Python of its own: network, transform and batch preparation."""
    rng = np.random.default_rng(8)
    path = copy_bundle("seg2d_own_scripts_yaml", folder)
    (path / "data").mkdir()
    for n in range(12):
        image, label = blob(rng, (24, 20))
        np.save(path / "data" / f"scan_{n:02d}.npy", 400 * image - 150)
        np.save(path / "data" / f"mask_{n:02d}.npy", (label > 0).astype(np.float32))
    record = ZooBundle(
        path=path,
        config="configs/train.yaml",
        task="segmentation",
        dims=2,
        in_channels=1,
        outputs=1,
        train=8,
        validate=4,
        steps=2,
        loss="BCELoss",
        optimizer="Adam",
        key_metric="val_mse",
        higher_is_better=False,
        sections=False,
        trainer="trainer",
        evaluator="val#evaluator",
        run_id="training",
        idioms=(
            "scripts.* targets, importable only with the bundle's folder on the path",
            "the network is `net`: there is no network_def",
            "the loss stands inside the trainer and is not reduced (the trainer takes the mean)",
            "prepare_batch: keys are `scan` and `mask`",
            "a lower key metric is better (metric_cmp_fn)",
            "epoch_length and drop_last",
            "a transform written inside a data set; handlers by a conditional expression",
        ),
    )
    return describe(record, ["object"])


ZOO: dict[str, Callable[[Path], ZooBundle]] = {
    function.__name__: function
    for function in (
        seg3d_decathlon_json,
        cls2d_glob_yaml,
        seg2d_csv_flat,
        seg3d_multilabel_json,
        seg2d_opaque_dataset,
        cls3d_partition_json,
        seg2d_npz_subset_yaml,
        seg2d_own_scripts_yaml,
    )
}
