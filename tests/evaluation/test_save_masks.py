"""Predicted masks on the grid of their image's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import (
    CenterSpatialCropd,
    CropForegroundd,
    Flipd,
    LoadImaged,
    Orientationd,
    Resized,
    Spacingd,
    SpatialPadd,
    SpatialResample,
)
from PIL import Image

from medfl.core.errors import RunError
from medfl.data.prepare import prepare
from medfl.data.prepared import Geometry
from medfl.data.samples import SampleMaker
from medfl.data.source import Source
from medfl.datasets.readers.transforms import ReadPaird
from medfl.evaluation.save_masks import save, to_original

OBLIQUE = np.array([[0, -1.2, 0.5, 10], [0.9, 0, 0, -20], [0, 0.2, 3, 5], [0, 0, 0, 1.0]])
"""The axes lead to the front, to the left and upwards, the last two at a slant; 0.9 x 1.22 x 3.04 mm."""


def volume(
    path: Path, affine: np.ndarray[Any, Any] = OBLIQUE, shape: tuple[int, ...] = (12, 15, 9)
) -> str:
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    values[:2] = 0
    nib.save(nib.Nifti1Image(values, affine), path)
    return str(path)


def prepared(file: str, *transforms: Any) -> tuple[MetaTensor, Geometry]:
    """Return an image after deterministic transforms, and its geometry."""
    chain = (LoadImaged("image", ensure_channel_first=True), *transforms)
    source = Source([{"image": file, "label": 0}], chain)
    samples = SampleMaker([{"id": "x"}], source)
    return samples(0)["image"], prepare([{"id": "x"}], source).geometry[0]


def labels(image: MetaTensor) -> torch.Tensor:
    """Smooth blobs of three classes in the shape of an image."""
    noise = torch.rand(1, 3, *image.shape[1:], generator=torch.Generator().manual_seed(0))
    pool = torch.nn.functional.avg_pool3d if image.ndim == 4 else torch.nn.functional.avg_pool2d
    return pool(noise, 3, 1, 1)[0].argmax(0).to(torch.uint8)


@pytest.mark.parametrize(
    "transforms",
    [
        [],
        [Orientationd("image", "RAS", labels=None)],
        [Orientationd("image", "LPI", labels=None), Flipd("image", 1)],
        [SpatialPadd("image", (9, 9, 9))],
    ],
)
def test_where_voxels_only_move_nothing_is_lost(tmp_path: Path, transforms: list[Any]) -> None:
    """The numbers of the voxels, as a mask, come back to where they were."""
    file = volume(tmp_path / "x.nii.gz", shape=(5, 6, 8))
    image, geometry = prepared(file, *transforms)
    numbers = np.arange(240, dtype=np.float32).reshape(5, 6, 8)
    nib.save(nib.Nifti1Image(numbers, OBLIQUE), tmp_path / "n.nii.gz")
    moved, _ = prepared(str(tmp_path / "n.nii.gz"), *transforms)
    assert (to_original(moved[0].as_tensor(), geometry) == numbers).all()


def test_what_was_cropped_away_is_background(tmp_path: Path) -> None:
    """The first two planes along the first axis are; they are zero in the image."""
    file = volume(tmp_path / "x.nii.gz")
    image, geometry = prepared(
        file, Orientationd("image", "RAS", labels=None), CropForegroundd("image", "image")
    )
    assert image.shape == (1, 15, 10, 9)
    mask = to_original(torch.ones(15, 10, 9), geometry)
    assert mask.shape == (12, 15, 9)
    assert not mask[:2].any()
    assert mask[2:].all()


@pytest.mark.parametrize(
    "transforms",
    [
        [Spacingd("image", (1.1, 1.1, 1.1))],
        [
            Orientationd("image", "RAS", labels=None),
            Spacingd("image", (2.0, 1.5, 1.1)),
            Flipd("image", 0),
        ],
        [Resized("image", (20, 11, 16))],
    ],
)
def test_a_volume_is_resampled_as_monai_does(tmp_path: Path, transforms: list[Any]) -> None:
    """On an anisotropic, oblique affine; the file has the input's shape and affine."""
    file = volume(tmp_path / "x.nii.gz")
    image, geometry = prepared(file, *transforms)
    mask = labels(image)
    written = nib.load(save(mask, 3, geometry, tmp_path / "mask"))
    assert written.shape == (12, 15, 9)
    assert np.allclose(written.affine, OBLIQUE, atol=1e-6)
    assert np.allclose(written.get_qform(), OBLIQUE, atol=1e-5)
    assert written.get_data_dtype() == np.uint8
    nearest = SpatialResample(mode="nearest", padding_mode="zeros", align_corners=False)
    expected = nearest(
        MetaTensor(mask[None].double(), affine=image.affine), torch.from_numpy(OBLIQUE), (12, 15, 9)
    )[0]
    assert (np.asarray(written.dataobj) == expected.numpy()).all()
    assert len(np.unique(written.dataobj)) == 3


@pytest.mark.parametrize("classes", [2, 3])
def test_a_picture_gets_its_own_size(tmp_path: Path, classes: int) -> None:
    """A disc predicted at 32 x 32 in a picture of 40 x 96 pixels becomes an ellipse where the disc was."""
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 96), dtype=np.uint8)).save(
        tmp_path / "x.png"
    )
    Image.fromarray(np.eye(40, 96, dtype=np.uint8)).save(tmp_path / "m.png")
    entry = {"image": str(tmp_path / "x.png"), "label": str(tmp_path / "m.png")}
    geometry = prepare([{"id": "x"}], Source([entry], (ReadPaird(channels=1, size=32),))).geometry[
        0
    ]
    assert geometry.spacing == (40 / 32, 3.0)
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    mask = ((rows - 20) ** 2 + (columns - 10) ** 2 < 64).to(torch.uint8)
    with Image.open(save(mask, classes, geometry, tmp_path / "predicted")) as image:
        assert (image.size, image.mode) == ((96, 40), "L")
        found = np.asarray(image)
    assert set(np.unique(found)) == ({0, 255} if classes == 2 else {0, 1})
    y, x = np.mgrid[:40, :96]  # a pixel of the file lies at (i + 0.5) * 32 / side - 0.5 in the mask
    near = np.rint([(y + 0.5) * 32 / 40 - 0.5, (x + 0.5) * 32 / 96 - 0.5]).astype(int)
    assert ((found > 0) == mask.numpy()[tuple(near)].astype(bool)).all()


def test_the_same_mask_gives_the_same_bytes_and_nothing_else(tmp_path: Path) -> None:
    _, geometry = prepared(volume(tmp_path / "x.nii.gz"))
    (tmp_path / "out").mkdir()
    paths = [
        save(torch.ones(12, 15, 9), 2, geometry, tmp_path / "out" / name) for name in ("a.b", "c")
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.b.nii.gz", "c.nii.gz"]
    with pytest.raises(RunError, match="cannot write"):
        save(torch.ones(12, 15, 9), 2, geometry, tmp_path / "missing" / "a")


PADDED = {
    "all": ([Orientationd("image", "RAS")], False),
    "turned and padded": ([Orientationd("image", "PIR"), SpatialPadd("image", (12, 9, 15))], True),
    "padded at an end": ([SpatialPadd("image", (9, 9, 9), method="end")], True),
    "cropped": ([CenterSpatialCropd("image", (3, 3, 3))], False),
    "of other pixels": (
        [Spacingd("image", (2.0, 2.0, 2.0)), SpatialPadd("image", (20, 20, 20))],
        False,
    ),
}


@pytest.mark.parametrize("name", PADDED)
def test_what_a_grid_is_padded_with_is_not_in_the_file(name: str, tmp_path: Path) -> None:
    """Every voxel is numbered from 1, and padding is 0."""
    transforms, is_padded = PADDED[name]
    voxels = np.arange(1, 7 * 5 * 8 + 1, dtype=np.float32).reshape(7, 5, 8)
    nib.save(nib.Nifti1Image(voxels, np.diag([1.0, 1.5, 2.0, 1.0])), tmp_path / "a.nii.gz")
    image, geometry = prepared(str(tmp_path / "a.nii.gz"), *transforms)
    part = geometry.part_in_file(image.shape[1:])
    if name == "of other pixels":  # whose edges are rounded
        assert part == ()
        return
    assert (image[0][(..., *part)] > 0.5).all()
    assert (image[0][(..., *part)].numel() < image[0].numel()) == is_padded
    if is_padded:
        assert image[0][(..., *part)].numel() == voxels.size
