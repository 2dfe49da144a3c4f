from __future__ import annotations

import multiprocessing

import pytest
import torch

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.storage.shared_memory import SharedBuffer, dump_shared, load_shared


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_tensors_of_any_type_arrive_bit_for_bit_and_can_be_written(dtype: torch.dtype) -> None:
    sent = {
        "a": [
            torch.arange(6).reshape(2, 3).to(dtype),
            torch.zeros((), dtype=dtype),
            torch.zeros(0, dtype=dtype),
        ]
    }
    got = load_shared(dump_shared(sent))
    for left, right in zip(sent["a"], got["a"], strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    got["a"][0][0] = 1


def test_parameters_views_messages_and_errors_arrive() -> None:
    view = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(load_shared(dump_shared(torch.nn.Parameter(view))), view)
    message = load_shared(dump_shared(Message({"weights": {"w": view}}, {"samples": 2})))
    assert torch.equal(message["weights"]["w"], view)
    error = load_shared(dump_shared(InputError("a", "b", "c")))
    assert str(error) == "a; b; c"


LARGE = {
    "w": torch.arange(5000.0).reshape(50, 100).t(),
    "b": torch.arange(9000).to(torch.bfloat16),
    "n": torch.ones(3),
}


def test_large_tensors_go_through_shared_memory_and_small_ones_do_not() -> None:
    shared = SharedBuffer(2**20)
    packed = dump_shared(LARGE, shared)
    assert len(packed) < 1000 < len(dump_shared(LARGE))
    got = load_shared(packed, shared)
    assert {name: tensor.dtype for name, tensor in got.items()} == {
        name: t.dtype for name, t in LARGE.items()
    }
    assert all(torch.equal(got[name], LARGE[name]) for name in LARGE)


def test_a_copy_outlives_the_next_value_and_the_memory_itself_does_not() -> None:
    shared = SharedBuffer(2**20)
    packed = dump_shared(LARGE, shared)
    copied, same = load_shared(packed, shared), load_shared(packed, shared, copy=False)
    dump_shared({name: -tensor for name, tensor in LARGE.items()}, shared)
    assert torch.equal(copied["w"], LARGE["w"])
    assert torch.equal(same["w"], -LARGE["w"])
    assert torch.equal(same["n"], LARGE["n"])


def test_what_does_not_fit_travels_with_the_rest() -> None:
    shared = SharedBuffer(24_000)  # 20,000 bytes of w; b has 18,000
    packed = dump_shared(LARGE, shared)
    assert 18_000 < len(packed) < 20_000
    assert all(
        torch.equal(tensor, LARGE[name]) for name, tensor in load_shared(packed, shared).items()
    )


def test_a_forked_process_reads_what_was_packed_and_answers() -> None:
    there, back = SharedBuffer(2**20), SharedBuffer(2**20)
    context = multiprocessing.get_context("fork")
    here, link = context.Pipe()

    def answer() -> None:
        value = load_shared(link.recv_bytes(), there, copy=False)
        link.send_bytes(dump_shared({name: tensor * 2 for name, tensor in value.items()}, back))

    process = context.Process(target=answer)
    process.start()
    here.send_bytes(dump_shared(LARGE, there))
    got = load_shared(here.recv_bytes(), back)
    process.join(10)
    assert all(torch.equal(got[name], tensor * 2) for name, tensor in LARGE.items())
