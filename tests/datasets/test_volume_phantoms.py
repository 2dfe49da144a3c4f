"""Phantoms of the volume data sets, and what the bundles make of a volume and write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from monai.bundle import ConfigParser
from monai.networks import one_hot
from scipy.ndimage import gaussian_filter
from sklearn.ensemble import RandomForestClassifier

import medfl.datasets as datasets
from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError
from medfl.datasets.readers.volumes import read_pair
from tests.datasets.test_volumes import AFFINE, save, save_dicom

NAMES = ("brain_tissue", "hippocampus", "ixi_brain")


@pytest.mark.parametrize("name", NAMES)
def test_a_phantom_is_repeated_by_its_seed(tmp_path: Path, name: str) -> None:
    def content(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }

    made = [
        content(datasets.write_phantom(name, tmp_path / str(run), seed=seed, per_class=10, size=16))
        for run, seed in enumerate((3, 3, 4))
    ]
    assert made[0] == made[1]
    assert made[0] != made[2]


@pytest.mark.parametrize("name", NAMES)
def test_phantoms_are_whole_and_fit_the_bundle(volumes: dict[str, Path], name: str) -> None:
    report = datasets.check(name, volumes[name])
    assert report.ok, report.problems
    assert not report.warnings
    bundle = Bundle(name, {"dataset_dir": str(volumes[name])})
    prepared = bundle.prepared("validate")
    assert len(prepared) == len(prepared.geometry) > 0
    for index, geometry in enumerate(prepared.geometry):
        image = nib.load(geometry.file)
        assert geometry.original_shape == image.shape
        assert np.allclose(geometry.original_affine, image.affine)
        (x, y) = next(prepared.batches(torch.tensor([index]), 1, None))
        assert x.shape == y.shape
        assert not y.is_floating_point()
        assert y.max() <= len(datasets.get(name).classes) - 1
        assert abs(float(x.mean())) < (0.01 if name != "brain_tissue" else 1)


def features(image: np.ndarray) -> np.ndarray:
    """Return (voxels, 6): intensity, smoothed twice, and place."""
    scaled = (image - image.mean()) / image.std()
    places = np.meshgrid(*(np.linspace(-1, 1, side) for side in image.shape), indexing="ij")
    return np.stack(
        [scaled, gaussian_filter(scaled, 1), gaussian_filter(scaled, 3), *places], -1
    ).reshape(-1, 6)


@pytest.mark.parametrize("name", NAMES)
def test_parts_can_be_learned_but_not_by_a_threshold(volumes: dict[str, Path], name: str) -> None:
    """A forest on a voxel's blurred surroundings and place finds every part in cases that it has not seen."""
    classes = len(datasets.get(name).classes)
    pairs = {
        section: [
            tuple(
                volume[0].numpy()
                for volume in read_pair(item["image"], str(item["label"]), classes)
            )
            for item in datasets.datalist(name, volumes[name], section)[:count]
        ]
        for section, count in (("train", 6), ("test", 2))
    }
    chosen = np.random.default_rng(0)
    x, y = [], []
    for image, mask in pairs["train"]:
        every, flat = features(image), mask.ravel()
        picks = np.concatenate(
            [chosen.choice(np.flatnonzero(flat == kind), 200) for kind in range(classes)]
        )
        x.append(every[picks])
        y.append(flat[picks])
    forest = RandomForestClassifier(25, max_depth=12, random_state=0).fit(
        np.concatenate(x), np.concatenate(y)
    )
    alone = RandomForestClassifier(25, max_depth=6, random_state=0)
    alone.fit(np.concatenate(x)[:, :1], np.concatenate(y))
    full, single = [], []
    for image, mask in pairs["test"]:
        every = features(image)
        for scores, guess in ((full, forest.predict(every)), (single, alone.predict(every[:, :1]))):
            flat = mask.ravel()
            scores.append(
                [
                    2
                    * ((guess == k) & (flat == k)).sum()
                    / ((guess == k).sum() + (flat == k).sum())
                    for k in range(1, classes)
                ]
            )
    assert np.mean(full, axis=0).min() > 0.4
    assert np.mean(full) > np.mean(single) + 0.1


def test_hospitals_have_scanners_of_their_own(volumes: dict[str, Path]) -> None:
    brightness: dict[str, list[float]] = {}
    for item in datasets.datalist("ixi_brain", volumes["ixi_brain"], "train"):
        image, mask = read_pair(item["image"], str(item["label"]), 2)
        brightness.setdefault(item["centre"], []).append(float(image[mask > 0].mean()))
    means = {centre: np.mean(values) for centre, values in brightness.items()}
    spread = max(np.std(values) for values in brightness.values())
    assert means["Guys"] > means["IOP"] + 2 * spread
    assert len(means) == 3


# What the bundles make of a volume, and write


def test_spacing_follows_the_resizing(volumes: dict[str, Path]) -> None:
    """Phantoms of 48 x 60 x 48 voxels of 4 mm."""
    config = {"dataset_dir": str(volumes["ixi_brain"]), "image_size": [24, 30, 48]}
    (geometry, *_) = Bundle("ixi_brain", config).prepared("validate").geometry
    assert geometry.spacing == pytest.approx((8, 8, 4))
    config = {"dataset_dir": str(volumes["ixi_brain"]), "image_size": None, "spacing": [8, 6, 4]}
    (geometry, *_) = Bundle("ixi_brain", config).prepared("validate").geometry
    assert geometry.spacing == pytest.approx((8, 6, 4))


def test_a_volume_smaller_than_the_patch_stops_the_run_at_its_start(
    volumes: dict[str, Path],
) -> None:
    config = {"dataset_dir": str(volumes["hippocampus"]), "patch_size": [24, 40, 60]}
    with pytest.raises(
        InputError, match=r"hippocampus_\d+\.nii\.gz is .* smaller than the patch of 24 x 40 x 60"
    ):
        Bundle("hippocampus", config).prepared("train")


SIDES = (20, 24, 18)
CHANGES: dict[str, tuple[dict[str, Any], float]] = {
    "as stored": ({}, 1.0),
    "resampled": ({"spacing": [2, 2, 2]}, 0.9),
    "resized": ({"image_size": [30, 30, 30]}, 0.9),
    "both": ({"spacing": [1, 2, 1], "image_size": 28}, 0.9),
}


@pytest.mark.parametrize("form", ["nifti", "dicom"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_written_lies_where_the_input_lay(tmp_path: Path, change: str, form: str) -> None:
    """The mask itself as the prediction comes back onto the grid of the file, tilted and anisotropic, in its place."""
    overrides, least = CHANGES[change]
    x, y, z = np.ogrid[-1 : 1 : SIDES[0] * 1j, -1 : 1 : SIDES[1] * 1j, -1 : 1 : SIDES[2] * 1j]
    body = (x - 0.2) ** 2 + (y / 0.8) ** 2 + (z + 0.1) ** 2 < 0.5
    mask = body.astype(np.uint8) + (body & (y > 0.1))
    voxels = 100 * mask + np.random.default_rng(0).integers(0, 30, SIDES)
    image = (
        save(tmp_path / "a.nii.gz", voxels.astype(np.int16))
        if form == "nifti"
        else save_dicom(tmp_path / "a", voxels)
    )
    item = {"image": image, "label": save(tmp_path / "m.nii.gz", mask)}
    source = Bundle("hippocampus").root / "configs" / "inference.yaml"
    parser = ConfigParser(yaml.safe_load(source.read_text()))
    for key, value in {
        "patch_size": None,
        "output_dir": str(tmp_path / "out"),
        **overrides,
    }.items():
        parser[key] = value
    prepared = parser.get_parsed_content("preprocessing")(item)
    prepared["pred"] = 10 * one_hot(prepared["label"].as_tensor()[None], 3)[0]
    parser.get_parsed_content("postprocessing")(prepared)
    written = nib.load(tmp_path / "out" / "a_seg.nii.gz")
    assert written.shape == SIDES
    assert np.allclose(written.affine, AFFINE, atol=1e-4)
    values = np.asarray(written.dataobj)
    assert values.dtype == np.uint8
    for kind in (1, 2):
        ours, theirs = values == kind, mask == kind
        assert 2 * (ours & theirs).sum() / (ours.sum() + theirs.sum()) >= least


@pytest.mark.parametrize("name", ["brain_tissue", "ixi_brain"])
def test_masks_of_volumes_of_one_name_are_written_into_their_subfolders(
    name: str, tmp_path: Path
) -> None:
    mask = np.zeros(SIDES, np.uint8)
    mask[5:12, 6:14, 4:12] = 1
    items = []
    for number, folder in enumerate(("one", "two")):
        (tmp_path / "data" / folder).mkdir(parents=True)
        voxels = 100 * mask + np.random.default_rng(number).integers(1, 30, SIDES)
        shown = save(tmp_path / "data" / folder / "t1.nii.gz", voxels.astype(np.int16))
        drawn = np.roll(mask, 3 * number, axis=2)
        items.append(
            {"image": shown, "label": save(tmp_path / "data" / folder / "m.nii.gz", drawn)}
        )
    parser = ConfigParser()
    parser.read_config(Bundle(name).root / "configs" / "inference.yaml")
    changes = {
        "dataset#data": items,
        "output_dir": str(tmp_path / "out"),
        "patch_size": None,
        "spacing": None,
    }
    for key, value in {**changes, "image_size": None}.items():
        parser[key] = value
    parser.parse()
    finish, classes = parser.get_parsed_content("postprocessing"), parser["num_classes"]
    for item in parser.get_parsed_content("dataset"):
        finish({**item, "pred": 10 * one_hot(item["label"].as_tensor()[None], classes)[0]})
    written = [tmp_path / "out" / folder / "t1_seg.nii.gz" for folder in ("one", "two")]
    assert sorted((tmp_path / "out").rglob("*.*")) == written
    for path, item in zip(written, items, strict=True):
        assert np.array_equal(
            np.asarray(nib.load(path).dataobj), np.asarray(nib.load(item["label"]).dataobj)
        )
