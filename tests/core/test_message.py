"""What crosses a wire: its bytes, its form, and what is refused."""

from __future__ import annotations

import pickle

import pytest
import torch

from medfl.core.errors import RunError
from medfl.core.message import Message, is_finite
from tests.support.toy import bits

MESSAGES = {
    "scalars": Message({}, {"samples": 3}),
    "one tensor": Message({"weights": {"w": torch.randn(2, 3)}}),
    "zero dimensions": Message({"weights": {"w": torch.tensor(1.5)}}),
    "no elements": Message({"weights": {"w": torch.zeros(0, 4)}}),
    "dtypes": Message(
        {
            "weights": {
                "a": torch.randn(5).bfloat16(),
                "b": torch.arange(7),
                "c": torch.tensor([True, False]),
                "d": torch.randn(3).double(),
                "e": torch.randn(1, 3).half(),
            }
        }
    ),
    "groups": Message(
        {"weights": {"w": torch.randn(3)}, "control": {"w": torch.randn(3)}}, {"n": 2.5, "x": -0.0}
    ),
    "strides": Message({"weights": {"w": torch.randn(4, 6).T[::2]}}),
    "shared": Message({"weights": {"a": (tied := torch.randn(4)), "b": tied, "c": tied[1:]}}),
    "names": Message(
        {"weights": {"a/b/c": torch.randn(2), "": torch.randn(1), "é∑": torch.randn(1)}}
    ),
    "long": Message({"weights": {f"layer{i}.weight": torch.randn(i, 3) for i in range(60)}}),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_encoding_round_trips_bit_for_bit_and_its_length_is_foretold(message: Message) -> None:
    data = message.encode()
    assert message.num_bytes == len(data)
    assert bits(Message.decode(data)) == bits(message)
    assert Message.decode(data).encode() == data


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_flat_and_pickle_round_trip(message: Message) -> None:
    assert bits(Message.from_flat(message.flat())) == bits(message)
    assert bits(pickle.loads(pickle.dumps(message))) == bits(message)


def test_length_depends_on_names_and_shapes_not_on_values() -> None:
    def length(name: str, *shape: int) -> int:
        return Message({"weights": {name: torch.randn(shape)}}).num_bytes

    assert length("w", 1000) == length("w", 1000)
    assert length("w", 1000) - length("w", 998) == 8
    assert Message({"weights": {"w": torch.zeros(32).double()}}).num_bytes - length("w", 32) == 128


def test_an_empty_message_is_not_sent() -> None:
    assert Message().num_bytes == 0
    assert Message({"weights": {}}).num_bytes == 0
    assert bits(Message.decode(Message().encode())) == bits(Message())


def test_a_missing_group_names_those_present() -> None:
    message = Message({"weights": {}, "control": {}})
    assert "weights" in message
    assert "prototypes" not in message
    with pytest.raises(KeyError, match=r"no group 'prototypes'.*\['control', 'weights'\]"):
        message["prototypes"]


@pytest.mark.parametrize("group", ["a/b", "scalars"])
def test_ambiguous_group_names_are_refused(group: str) -> None:
    with pytest.raises(ValueError, match=group):
        Message({group: {}})


def test_it_is_read_only_and_does_not_follow_the_dict_it_was_made_of() -> None:
    groups, numbers = {"weights": {}}, {"samples": 1}
    message = Message(groups, numbers)
    groups["more"] = {}
    numbers["samples"] = 2
    assert "more" not in message
    assert message.scalars == {"samples": 1.0}
    with pytest.raises(TypeError):
        message.tensors["more"] = {}  # type: ignore[index]


@pytest.mark.parametrize(
    "message", [MESSAGES["groups"], MESSAGES["dtypes"]], ids=["groups", "dtypes"]
)
def test_damaged_bytes_raise_our_own_error(message: Message) -> None:
    data = message.encode()
    damaged = [data[:cut] for cut in (0, 1, 7, 8, 20, len(data) // 2, len(data) - 1)]
    damaged += [data + b"x", b"\xff" * 64, b"\x80\x04N.", data[:12] + b"\x00" + data[13:]]
    for sample in damaged:
        with pytest.raises(RunError, match=rf"received message of {len(sample)} bytes"):
            Message.decode(sample)


def test_a_pickle_is_not_loaded(tmp_path) -> None:
    class Attack:
        def __reduce__(self):
            return (tmp_path / "ran").touch, ()

    with pytest.raises(RunError):
        Message.decode(pickle.dumps(Attack()))
    assert not (tmp_path / "ran").exists()


def test_a_number_that_is_not_one_is_refused() -> None:
    from safetensors.torch import save

    with pytest.raises(RunError):
        Message.decode(save({"scalars/samples": torch.zeros(3)}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_is_finite(dtype: torch.dtype) -> None:
    fine = torch.tensor([[1.0, -2.0], [0.0, 3.0]], dtype=dtype)
    assert is_finite(fine)
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not is_finite(torch.where(fine == 3, bad, fine))
    assert is_finite(torch.zeros(0, dtype=dtype))
    assert is_finite(torch.tensor([2**62]))
