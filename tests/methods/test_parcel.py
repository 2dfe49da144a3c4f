"""Parts of a batch in one tensor of bytes, and out of it again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from medfl.methods._parcel import Parcel
from tests.helpers import bits

IMAGES = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
PARTS: list[Tensor] = [
    torch.tensor([2, 0, 1]),
    IMAGES,
    IMAGES.to(memory_format=torch.channels_last),
    IMAGES[1:, :, 1],
    torch.tensor([[True, False]]),
    torch.tensor(0.5, dtype=torch.float64),
    torch.empty(0, 3),
    torch.ones(3, dtype=torch.bfloat16),
]


def test_the_parts_come_out_as_they_went_in() -> None:
    contiguous = [part if part.is_contiguous() else part.clone() for part in PARTS]
    parcel = Parcel()
    packed = parcel.pack(*contiguous)
    assert (packed.dtype, packed.ndim) == (torch.uint8, 1)
    found = parcel.unpack(packed)
    assert bits(list(found)) == bits(contiguous)
    assert [part.stride() for part in found] == [part.stride() for part in contiguous]
    assert all(part.data_ptr() % part.element_size() == 0 for part in found)


def test_they_are_views_so_that_a_recorded_step_reads_the_newest() -> None:
    parcel = Parcel()
    packed = parcel.pack(torch.zeros(3), torch.ones(2))
    first, second = parcel.unpack(packed)
    packed.copy_(parcel.pack(torch.full((3,), 4.0), torch.full((2,), 5.0)))
    assert (first.tolist(), second.tolist()) == ([4.0] * 3, [5.0] * 2)


def test_what_was_packed_last_is_unpacked() -> None:
    parcel = Parcel()
    for count in (4, 3):
        (found,) = parcel.unpack(parcel.pack(torch.arange(count)))
        assert found.tolist() == [*range(count)]


class Other(Tensor):
    pass


@pytest.mark.parametrize(
    "odd",
    [{"mask": torch.ones(2)}, torch.ones(2).as_subclass(Other), torch.ones(2, device="meta"), torch.ones(1).expand(2),
     torch.arange(6)[::2]],
    ids=["a dict", "another type", "another device", "repeated numbers", "gaps"],
)  # fmt: skip
def test_what_packing_would_change_stays_as_it_is(odd: Any) -> None:
    """Of another stride it may be summed in another order."""
    parcel, y = Parcel(), torch.ones(2)
    for parts in ((y, odd), (odd, y)):
        packed = parcel.pack(*parts)
        assert isinstance(packed, tuple)
        assert all(found is part for found, part in zip(parcel.unpack(packed), parts, strict=True))
