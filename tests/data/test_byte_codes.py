"""Tensors of few values: every bit comes back, what does not fit is left alone."""

from __future__ import annotations

import pytest
import torch
from monai.transforms import BorderPad, NormalizeIntensity, ScaleIntensityRange

from medfl.data.byte_codes import Coded, decoded, encode, plain, shape_of, stacked
from medfl.storage.shared_memory import dump_shared, load_shared


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pixels(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=seeded(seed), dtype=torch.uint8)


def normalised(image: torch.Tensor, mean: float = 0.485) -> torch.Tensor:
    """What the bundles' deterministic transforms make of 8-bit pixels (3, H, W)."""
    scaled = ScaleIntensityRange(0, 255, 0, 1)(image)
    made = NormalizeIntensity([mean, 0.456, 0.406], [0.229, 0.224, 0.225], channel_wise=True)(
        scaled
    )
    return BorderPad(2, mode="reflect")(made).as_tensor()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def test_normalised_pixels_take_a_byte_and_every_bit_comes_back() -> None:
    image = normalised(pixels(3, 40, 40))
    coded = encode(image)
    assert coded is not None
    assert coded.codes.nbytes * 4 == image.nbytes
    assert shape_of(coded) == image.shape
    assert same_bits(decoded(coded), image)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16, torch.int64]
)
def test_types_come_back(dtype: torch.dtype) -> None:
    mask = torch.randint(3, (1, 30, 30), generator=seeded()).to(dtype)
    coded = encode(mask)
    assert coded is not None
    assert decoded(coded).dtype == dtype
    assert torch.equal(decoded(coded), mask)


def test_negative_zero_and_nan_stay_what_they_are() -> None:
    image = torch.tensor([0.0, -0.0, float("nan"), float("-inf")]).repeat(1, 32)
    coded = encode(image)
    assert coded is not None
    assert same_bits(decoded(coded), image)


@pytest.mark.parametrize(
    "image",
    [
        torch.rand(1, 20, 20, generator=seeded()),  # 400 values
        torch.cat(
            [torch.zeros(1, 400), torch.rand(1, 400, generator=seeded())]
        ),  # in the second channel
        torch.cat([torch.zeros(4096 * 2 - 300), torch.rand(300, generator=seeded())])[
            None
        ],  # 301, few at a glance
        torch.rand(3, 4, 4, generator=seeded()),  # codes and table together are larger
        pixels(3, 4, 4),  # a byte a number already
        torch.tensor([1.0, 2.0]),
        torch.zeros(1, 0, 4),
    ],
)
def test_what_is_not_smaller_or_has_more_values_is_left_alone(image: torch.Tensor) -> None:
    assert encode(image) is None


def test_images_of_the_same_transforms_share_a_table() -> None:
    """Ten images of few pixels have different values; a table of all of them serves each."""
    images = [normalised(pixels(3, 9, 9, seed=seed)) for seed in range(10)]
    column = stacked([encode(image) for image in images])
    assert isinstance(column, Coded)
    assert column.values.shape[0] == 3
    assert column.values.ndim == 2
    assert column.shape == (10, 3, 13, 13)
    assert same_bits(plain(column), torch.stack(images))
    some = torch.tensor([7, 2, 2])
    assert same_bits(plain(column[some]), torch.stack(images)[some])


def test_images_normalised_each_by_itself_keep_their_tables() -> None:
    images = [normalised(pixels(3, 60, 60, seed=seed), mean=0.4 + seed / 100) for seed in range(4)]
    column = stacked([encode(image) for image in images])
    assert isinstance(column, Coded)
    assert column.values.shape[:2] == (4, 3)
    assert column.nbytes < sum(image.nbytes for image in images) / 2
    assert same_bits(plain(column), torch.stack(images))
    assert same_bits(plain(column[torch.tensor([3, 1])]), torch.stack([images[3], images[1]]))


def test_one_image_that_does_not_fit_brings_all_back_to_numbers() -> None:
    images = [normalised(pixels(3, 9, 9)), torch.rand(3, 13, 13, generator=seeded())]
    parts = [encode(image) or image for image in images]
    assert [type(part) for part in parts] == [Coded, torch.Tensor]
    column = stacked(parts)
    assert isinstance(column, torch.Tensor)
    assert same_bits(column, torch.stack(images))


def test_moving_codes_moves_numbers() -> None:
    images = torch.stack([normalised(pixels(3, 9, 9, seed=seed)) for seed in range(3)])
    column = stacked([encode(image) for image in images])
    assert isinstance(column, Coded)
    turned = column.rearranged(lambda x: torch.rot90(x.flip(3), 1, (2, 3)))
    assert same_bits(turned.decode(), torch.rot90(images.flip(3), 1, (2, 3)).contiguous())


def test_processes_can_hand_it_over() -> None:
    coded = encode(normalised(pixels(3, 9, 9)))
    assert coded is not None
    assert same_bits(load_shared(dump_shared(coded)).decode(), coded.decode())
