from __future__ import annotations

import pytest
import torch

from medfl.errors import InputError
from medfl.message import Message
from medfl.packing import pack, unpack


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_tensors_of_any_type_arrive_bit_for_bit_and_can_be_written(dtype: torch.dtype) -> None:
    sent = {"a": [torch.arange(6).reshape(2, 3).to(dtype), torch.zeros((), dtype=dtype), torch.zeros(0, dtype=dtype)]}
    got = unpack(pack(sent))
    for left, right in zip(sent["a"], got["a"], strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    got["a"][0][0] = 1


def test_parameters_views_messages_and_errors_arrive() -> None:
    view = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(unpack(pack(torch.nn.Parameter(view))), view)
    message = unpack(pack(Message({"weights": {"w": view}}, {"samples": 2})))
    assert torch.equal(message["weights"]["w"], view)
    error = unpack(pack(InputError("a", "b", "c")))
    assert str(error) == "a; b; c"
