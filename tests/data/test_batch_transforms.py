"""Batched random transforms against MONAI's own: the same outcomes, as often, and the same result of the same draw."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from monai.transforms import (
    Compose,
    EnsureTyped,
    RandAffined,
    RandFlipd,
    RandGaussianNoised,
    RandRotate90d,
    RandRotated,
    RandScaleIntensityd,
    RandShiftIntensityd,
    RandSpatialCropd,
)

from medfl.data.batch_transforms import Affine, BatchRecipe, recipe

BOTH = ["image", "label"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def steps(
    transforms: Any, *shapes: tuple[int, ...], channels: int = 1, masks: bool = False
) -> BatchRecipe | None:
    compose = Compose(transforms).flatten()
    return recipe(compose, 0, frozenset(shapes), channels, torch.float32, masks)


def made(
    transforms: Any, shape: tuple[int, ...], channels: int = 1, masks: bool = False
) -> BatchRecipe:
    found = steps(transforms, shape, channels=channels, masks=masks)
    assert found is not None
    return found


def ours(transforms: Any, image: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    """Return `count` draws of an image (C, ...)."""
    found = made(transforms, tuple(image.shape[1:]), len(image))
    draws = torch.rand(count, found.num_draws, generator=seeded(seed), dtype=torch.float64)
    return found(image.repeat(count, *[1] * image.ndim), torch.zeros(count), draws)[0]


def monais(transforms: Any, image: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    compose = Compose(transforms)
    compose.set_random_state(seed)
    return torch.stack([compose({"image": image})["image"].as_tensor() for _ in range(count)])


# The same distribution


SQUARE = torch.arange(2 * 4 * 4.0).reshape(2, 4, 4)
OBLONG = torch.arange(30.0).reshape(1, 5, 6)
CUBE = torch.arange(27.0).reshape(1, 3, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transforms", "image", "outcomes"),
    [
        ([RandFlipd("image", 0.3, 0)], OBLONG, 2),
        ([RandFlipd("image", 0.7, -1)], CUBE, 2),
        ([RandFlipd("image", 0.5)], OBLONG, 2),
        ([RandFlipd("image", 0.5, [0, 2])], CUBE, 2),
        ([RandFlipd("image", 1.0, 1)], OBLONG, 1),
        ([RandRotate90d("image", 0.75)], SQUARE, 4),
        ([RandRotate90d("image", 0.5, max_k=1)], SQUARE, 2),
        ([RandRotate90d("image", 0.6, 3, (0, 2))], CUBE, 4),
        ([RandSpatialCropd("image", (4, 4), random_size=False)], OBLONG, 6),
        ([RandSpatialCropd("image", (-1, 5), random_size=False)], OBLONG, 2),
        ([RandSpatialCropd("image", 9, random_size=False)], OBLONG, 1),
        ([RandSpatialCropd("image", (2, 3, 2), random_size=False)], CUBE, 4),
        (
            [RandFlipd("image", 0.5, 0), RandFlipd("image", 0.5, 1), RandRotate90d("image", 0.75)],
            SQUARE,
            8,
        ),
        (
            [RandSpatialCropd("image", (5, 5), random_size=False), RandFlipd("image", 0.5, 1)],
            OBLONG,
            4,
        ),
    ],
)
def test_outcomes_and_their_frequencies_are_monais(
    transforms: list[Any], image: torch.Tensor, outcomes: int
) -> None:
    """Two samples of n from one distribution: their frequencies differ by less than 4.5 standard deviations."""
    count = 1000
    mine, theirs = (
        Counter(result.contiguous().numpy().tobytes() for result in draw(transforms, image, count))
        for draw in (ours, monais)
    )
    assert mine.keys() == theirs.keys()
    assert len(mine) == outcomes
    for outcome, number in mine.items():
        p = (number + theirs[outcome]) / (2 * count)
        assert abs(number - theirs[outcome]) / count <= 4.5 * math.sqrt(2 * p * (1 - p) / count)


RAMP = torch.linspace(-3, 3, 9)[None, :, None].expand(1, 9, 9).contiguous()


@pytest.mark.parametrize(
    ("transform", "image"),
    [
        (RandScaleIntensityd("image", 0.3, prob=0.6), SQUARE),
        (RandScaleIntensityd("image", (0.1, 0.5), prob=0.6, channel_wise=True), SQUARE),
        (RandShiftIntensityd("image", 0.3, prob=0.6), SQUARE),
        (RandShiftIntensityd("image", (-0.1, 0.5), prob=0.6, channel_wise=True), SQUARE),
        (RandGaussianNoised("image", 0.6, mean=0.2, std=0.5), SQUARE),
        (RandGaussianNoised("image", 0.6, mean=0.2, std=0.5, sample_std=False), SQUARE),
        (RandAffined("image", prob=0.6, translate_range=(2, 0), padding_mode="border"), RAMP),
        (
            RandAffined("image", prob=0.6, scale_range=((-0.2, 0.4), None), padding_mode="border"),
            RAMP,
        ),
        (
            RandAffined(
                "image", prob=0.6, rotate_range=0.8, shear_range=(0.1, 0.2), padding_mode="zeros"
            ),
            RAMP,
        ),
        (RandRotated("image", (-0.2, 0.9), prob=0.6), RAMP),
    ],
)
def test_continuous_draws_are_distributed_as_monais(transform: Any, image: torch.Tensor) -> None:
    """Kolmogorov and Smirnov: samples of n from one distribution are further apart than 1.95 sqrt(2 / n) once in 1000.

    Compared are two numbers of each result, and how many results are the image itself.
    """
    count = 500
    mine, theirs = (draw([transform], image, count, seed=5) for draw in (ours, monais))
    same = [int((result == image).flatten(1).all(1).sum()) for result in (mine, theirs)]
    assert 0.3 * count < same[0] < 0.5 * count
    assert abs(same[0] - same[1]) / count < 4.5 * math.sqrt(2 * 0.24 / count)
    for place in ((0, 2, 1), (-1, -1, -1)):
        a, b = (result[(slice(None), *place)].sort().values for result in (mine, theirs))
        at = torch.cat([a, b])
        gap = (
            torch.searchsorted(a, at, right=True) - torch.searchsorted(b, at, right=True)
        ).abs().max() / count
        assert gap < 1.95 * math.sqrt(2 / count)


def test_items_are_drawn_apart_from_each_other_and_from_whether_a_step_applies() -> None:
    """Of what is rotated with probability 0.5, half has an angle above 0."""
    found = made([RandAffined("image", prob=0.5, rotate_range=0.8)], (9, 9))
    draws = torch.rand(2000, found.num_draws, generator=seeded(), dtype=torch.float64)
    step = found.steps[0]
    assert isinstance(step, Affine)
    angles = [float(step.matrix(row[1:], (9, 9))[1, 0]) for row in draws if row[0] < 0.5]
    assert 0.45 < np.mean(np.array(angles) > 0) < 0.55


# The same result of the same draw


def test_scale_and_shift_of_given_factors_are_monais_bits() -> None:
    """u = 0.25 of [-0.3, 0.3) is f = -0.15: the image times 0.85, then u = 0.75 of [-1, 1) adds 0.5."""
    image = torch.randn(3, 5, 5, generator=seeded())
    scale, shift = (
        RandScaleIntensityd("image", 0.3, prob=1.0),
        RandShiftIntensityd("image", 1.0, prob=1.0),
    )
    found = made([scale, shift], (5, 5), 3)
    draws = torch.tensor([[0.0, 0.25, 0.0, 0.75]], dtype=torch.float64)
    x, _ = found(image[None].clone(), torch.zeros(1), draws)
    scale.scaler.factor, shift.shifter._offset = -0.3 + 0.6 * 0.25, 0.5
    scale.scaler._do_transform = shift.shifter._do_transform = True
    expected = shift.shifter(scale.scaler(image, randomize=False), randomize=False).as_tensor()
    assert torch.equal(x[0], expected)
    assert torch.allclose(x[0], image * 0.85 + 0.5, atol=1e-6)


@pytest.mark.parametrize("shape", [(7, 9), (5, 6, 7)])
@pytest.mark.parametrize(
    "way", [("bilinear", "reflection"), ("nearest", "zeros"), ("bilinear", "border")]
)
def test_affine_of_given_parameters_is_monais(shape: tuple[int, ...], way: tuple[str, str]) -> None:
    dims, (mode, padding) = len(shape), way
    ranges = {
        "rotate_range": [0.6] * (1 if dims == 2 else 3),
        "shear_range": [0.2] * (2 if dims == 2 else 6),
        "translate_range": [1.5] * dims,
        "scale_range": [(-0.2, 0.3)] * dims,
    }
    transform = RandAffined(BOTH, prob=0.5, mode=[mode, "nearest"], padding_mode=padding, **ranges)
    found = made([transform], shape, 2, masks=True)
    images = torch.randn(4, 2, *shape, generator=seeded())
    masks = torch.randint(3, (4, 1, *shape), generator=seeded(), dtype=torch.uint8)
    draws = torch.rand(4, found.num_draws, generator=seeded(3), dtype=torch.float64)
    draws[:, 0] = torch.tensor([0.1, 0.9, 0.2, 0.3])  # the second is left as it is
    x, y = found(images.clone(), masks.clone(), draws)
    assert x.dtype == y.dtype == torch.float32
    assert torch.equal(x[1], images[1])
    assert torch.equal(y[1], masks[1].float())
    grid = transform.rand_affine.rand_affine_grid
    for i in (0, 2, 3):
        numbers = iter(draws[i, 1:].tolist())
        for name, values in ranges.items():
            pairs = [value if isinstance(value, tuple) else (-value, value) for value in values]
            added = 1.0 if name == "scale_range" else 0.0
            drawn = [low + (high - low) * next(numbers) + added for low, high in pairs]
            setattr(grid, name.replace("range", "params"), drawn)
        transform.rand_affine._do_transform = True
        for result, image, how in ((x[i], images[i], mode), (y[i], masks[i], "nearest")):
            expected = transform.rand_affine(
                image, mode=how, padding_mode=padding, randomize=False
            ).as_tensor()
            assert torch.allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(7, 9), (5, 6, 7)])
def test_rotation_by_given_angles_is_monais(shape: tuple[int, ...]) -> None:
    transform = RandRotated("image", 0.5, 0.4, 0.3, prob=1.0, padding_mode="zeros")
    found = made([transform], shape, 2)
    images = torch.randn(3, 2, *shape, generator=seeded())
    draws = torch.rand(3, found.num_draws, generator=seeded(1), dtype=torch.float64)
    x, _ = found(images.clone(), torch.zeros(3), draws)
    rotate = transform.rand_rotate
    for i in range(3):
        angles = [
            -r + 2 * r * u for r, u in zip((0.5, 0.4, 0.3), draws[i, 1:].tolist(), strict=False)
        ]
        rotate.x, rotate.y, rotate.z = (angles + [0.0, 0.0])[:3]
        rotate._do_transform = True
        expected = rotate(images[i], padding_mode="zeros", randomize=False).as_tensor()
        assert torch.allclose(x[i], expected, atol=1e-5)


# Masks, sizes, codes


GEOMETRY = [
    RandSpatialCropd(BOTH, (4, 4), random_size=False),
    RandFlipd(BOTH, 0.5, 0),
    RandRotate90d(BOTH, 0.75),
    EnsureTyped(BOTH, track_meta=False),
]


def test_masks_move_with_their_images() -> None:
    found = made(GEOMETRY, (5, 6), masks=True)
    images = torch.rand(40, 1, 5, 6, generator=seeded())
    masks = (images > 0.5).to(torch.uint8)
    x, y = found(
        images, masks, torch.rand(40, found.num_draws, generator=seeded(1), dtype=torch.float64)
    )
    assert y.dtype == torch.uint8
    assert torch.equal(y, (x > 0.5).to(torch.uint8))


def test_patches_of_items_of_different_sizes() -> None:
    """A patch starts at floor(u (n - 3)) of an axis of n: 0.5 gives 1 of 5 and 6, 2 of 7; and 0 of 4."""
    shapes = [(5, 4), (7, 6)]
    found = steps([RandSpatialCropd(BOTH, (4, 4), random_size=False)], *shapes, masks=True)
    assert found is not None
    images = [torch.arange(math.prod(shape)).float().reshape(1, *shape) for shape in shapes]
    x, y = found(
        list(images),
        [image.to(torch.uint8) for image in images],
        torch.full((2, 2), 0.5, dtype=torch.float64),
    )
    assert torch.equal(x[0], images[0][:, 1:5, 0:4])
    assert torch.equal(x[1], images[1][:, 2:6, 1:5])
    assert torch.equal(y.float(), x)
