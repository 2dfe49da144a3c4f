"""Tiny drawn data for bundles of the public model zoo, each in the layout that its training configuration expects.

`DRAW[name](folder)` fills a folder, which `--data` takes, and returns what `--config` takes: sizes, batches, readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.zoo.images import blob, save_nifti, save_picture

ROOT = Path(__file__).resolve().parents[3] / "shared" / "zoo"
"""Where the bundles lie, as published."""

Config = dict[str, str]


def _volumes(
    folder: Path,
    image: str,
    label: str,
    count: int,
    values: tuple[int, ...] = (0, 1, 1),
    **how: Any,
) -> list[dict[str, str]]:
    """Draw volumes and masks; `values` are the mask's for nothing, rim and core, `how` their size and spacing."""
    rng, items = np.random.default_rng(0), []
    for n in range(count):
        pixels, mask = blob(rng, how.get("size", (32, 32, 32)))
        items.append({"image": image.format(n), "label": label.format(n)})
        save_nifti(
            folder / items[-1]["image"], 400 * pixels - 150, how.get("spacing", (1.0, 1.0, 1.0))
        )
        save_nifti(
            folder / items[-1]["label"],
            np.choose(mask, values).astype(np.uint8),
            how.get("spacing", (1, 1, 1)),
        )
    return items


def _json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def spleen_ct_segmentation(folder: Path) -> Config:
    _volumes(folder, "imagesTr/s{}.nii.gz", "labelsTr/s{}.nii.gz", 13, spacing=(1.5, 1.5, 2.0))
    return {
        "train#random_transforms#0#spatial_size": "[32, 32, 32]",
        "train#random_transforms#0#num_samples": "1",
        "validate#inferer#roi_size": "[32, 32, 32]",
    }


def brats_mri_segmentation(folder: Path) -> Config:
    rng, items = np.random.default_rng(0), []
    for n in range(6):
        image, mask = blob(rng, (24, 24, 16))
        names = [f"case{n}/{kind}.nii.gz" for kind in ("t1c", "t1", "t2", "flair")]
        for gain, name in enumerate(names, start=1):
            save_nifti(folder / name, 100 * gain * image)
        mask[0] = 4
        save_nifti(folder / f"case{n}/seg.nii.gz", mask)
        items.append({"image": names, "label": f"case{n}/seg.nii.gz"})
    _json(folder / "datalist.json", {"training": items[:4], "validation": items[4:]})
    return {
        "train#random_transforms#0#roi_size": "[24, 24, 16]",
        "validate#inferer#roi_size": "[24, 24, 16]",
    }


def classification_template(folder: Path) -> Config:
    items = _volumes(folder, "img{}.nii.gz", "lbl{}.nii.gz", 15, size=(32, 32))
    labelled = [
        {"image": str(folder / item["image"]), "label": n % 4} for n, item in enumerate(items)
    ]
    _json(folder / "train_samples.json", labelled)
    return {}


def segmentation_template(folder: Path) -> Config:
    _volumes(folder, "img{:02}.nii.gz", "lbl{:02}.nii.gz", 10, (0, 1, 3), size=(32, 32, 32))
    return {}


def endoscopic_inbody_classification(folder: Path) -> Config:
    rng, items = np.random.default_rng(0), []
    for n in range(12):
        path = folder / ("inbody", "outbody")[n % 2] / f"{n}.jpg"
        save_picture(path, rng.random((40, 48, 3)).astype(np.float32))
        items.append({"image": str(path), "label": n % 2})
    _json(folder / "train_samples.json", items[:8])
    _json(folder / "val_samples.json", items[8:])
    return {"train#deterministic_transforms#3#spatial_size": "[32, 32]"}


def ventricular_short_axis_3label(folder: Path) -> Config:
    rng = np.random.default_rng(0)
    images, masks = zip(*(blob(rng, (48, 48)) for _ in range(10)), strict=True)
    np.savez(folder / "allimages3label.npz", images=np.stack(images), segs=np.stack(masks))
    return {"batch_size": "4", "num_iters": "1"}


def pancreas_ct_dints_segmentation(folder: Path) -> Config:
    items = _volumes(folder, "imagesTr/p{}.nii.gz", "labelsTr/p{}.nii.gz", 6, (0, 1, 2))
    _json(folder / "dataset_0.json", {"training": items[:4], "validation": items[4:]})
    codes = {"node_a": np.eye(4)[np.zeros(13, int)], "arch_code_a": np.eye(10)[np.zeros(12, int)]}
    codes["arch_code_c"] = np.ones((12, 10), dtype=int)
    torch.save({**codes, "best_dsc": np.float64(0.5)}, folder / "search_code.pt")
    size = "[32, 32, 32]"
    return {
        "arch_ckpt_path": str(folder / "search_code.pt"),
        "train#deterministic_transforms#11#spatial_size": size,
        "train#random_transforms#0#spatial_size": size,
        "validate#inferer#roi_size": size,
    }


def pathology_nuclei_classification(folder: Path) -> Config:
    rng, items = np.random.default_rng(0), []
    for n in range(12):
        image, mask = blob(rng, (32, 32))
        save_picture(folder / f"Images/{n}.png", np.stack([image] * 3, -1))
        (folder / "Labels").mkdir(exist_ok=True)
        kind = 1 + n % 4
        Image.fromarray(np.choose(mask, (0, 255, kind)).astype(np.uint8)).save(
            folder / f"Labels/{n}.png"
        )
        files = {"image": str(folder / f"Images/{n}.png"), "label": str(folder / f"Labels/{n}.png")}
        items.append({**files, "nuclei_id": n, "mask_value": kind, "centroid": [16, 16]})
    _json(folder / "dataset.json", {"training": items[:8], "validation": items[8:]})
    return {}


def pathology_tumor_detection(folder: Path) -> Config:
    import tifffile

    rng = np.random.default_rng(0)
    slide = rng.integers(0, 255, (700, 700, 3), dtype=np.uint8)
    (folder / "training/images").mkdir(parents=True)
    tifffile.imwrite(folder / "training/images/slide.tif", slide, tile=(64, 64), photometric="rgb")
    for name, count in (("training", 2), ("validation", 2)):
        rows = [["slide", 350, 350, *rng.integers(0, 2, 9)] for _ in range(count)]
        (folder / f"{name}.csv").write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    return {
        "wsi_reader": "TiffFile",
        "region_size": "[672, 672]",
        "train#dataloader#batch_size": "1",
        "validate#dataloader#batch_size": "1",
    }


def prostate_mri_anatomy(folder: Path) -> Config:
    items = _volumes(
        folder, "train/{}/t2.nii.gz", "train/{}/mask.nii.gz", 6, (0, 1, 2), spacing=(0.5, 0.5, 0.5)
    )
    rows = [f"{n},{item['image']},{item['label']}\n" for n, item in enumerate(items)]
    for name, some in (("train", rows[:4]), ("valid", rows[4:])):
        (folder / f"{name}.csv").write_text("ID,t2,t2_anatomy_reader1\n" + "".join(some))
    return {
        "train#random_transforms#6#spatial_size": "[32, 32, 32]",
        "train#random_transforms#6#num_samples": "1",
        "validate#inferer#roi_size": "[32, 32, 32]",
    }


def valve_landmarks(folder: Path) -> Config:
    rng, values = np.random.default_rng(0), (10, 15, 20, 25, 30, 35, 100, 150, 200, 250)
    arrays = {}
    for name, count in (("train", 6), ("test", 3)):
        arrays[f"{name}Imgs"] = rng.random((count, 256, 256)).astype(np.float32)
        points = np.zeros((count, 256, 256), dtype=np.int32)
        for one in points:
            for value in values:
                one[tuple(rng.integers(60, 190, 2))] = value
        arrays[f"{name}LMImgs"] = points
    np.savez(folder / "valvelandmarks.npz", **arrays)
    return {"batch_size": "3", "num_iters": "1"}


DRAW: dict[str, Callable[[Path], Config]] = {
    draw.__name__: draw
    for draw in (
        brats_mri_segmentation,
        classification_template,
        endoscopic_inbody_classification,
        pancreas_ct_dints_segmentation,
        pathology_nuclei_classification,
        pathology_tumor_detection,
        prostate_mri_anatomy,
        segmentation_template,
        spleen_ct_segmentation,
        valve_landmarks,
        ventricular_short_axis_3label,
    )
}
