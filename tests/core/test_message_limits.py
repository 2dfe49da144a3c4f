"""What of a received message is not taken, and that it is refused before anything is allocated for it."""

from __future__ import annotations

import json
import tracemalloc
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from medfl.core.errors import RunError
from medfl.core.message import Message, is_finite
from medfl.core.message_limits import MessageLimits
from tests.support.toy import bits


def document(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors document with any header."""
    told = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(told) if length is None else length).to_bytes(8, "little") + told + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


W = "weights/w"
EIGHT = bytes(8)
FORM = json.dumps(entry())
NESTED = b'{"weights/w":' * 100_000
REFUSED: Mapping[str, tuple[bytes, str]] = {
    "no length": (b"\x01", "shorter than the length"),
    "a header of 2 GiB": (document(b"{}", length=2**31), "claims 2147483648 bytes; 2 are there"),
    "a header past all numbers": (b"\xff" * 64, "claims 18446744073709551615 bytes"),
    "a header that is no text": (document(b"\xff\xfe\x00"), "decode"),
    "a header in UTF-16": (document(json.dumps({W: entry()}).encode("utf-16"), EIGHT), "decode"),
    "a header that is no JSON": (document(b"{]"), "Expecting"),
    "a header that is a list": (document([]), "no mapping"),
    "a header nested deeply": (document(NESTED), "recursion|Expecting|nested"),
    "a tensor of 2 GiB": (document({W: entry(shape=[2**29], offsets=[0, 2**31])}, EIGHT), "claim 2147483648 bytes; 8"),
    "a tensor past all numbers": (document({W: entry(shape=[2**62] * 8)}, EIGHT), "bytes by its shape, and 8"),
    "another size than its shape": (document({W: entry(shape=[3])}, EIGHT), "has 12 bytes by its shape, and 8"),
    "negative sizes": (document({W: entry(shape=[-1, -2])}, EIGHT), r"has the shape \[-1, -2\]"),
    "sizes that are true": (document({W: entry(shape=[True, 2])}, EIGHT), "has the shape"),
    "sizes that are fractions": (document({W: entry(shape=[2.0])}, EIGHT), "has the shape"),
    "offsets from the end": (document({W: entry(offsets=[8, 0])}, EIGHT), "has 8 bytes by its shape, and -8"),
    "three offsets": (document({W: entry(offsets=[0, 4, 8])}, EIGHT), "lies at"),
    "a gap": (document({W: entry(offsets=[4, 12])}, bytes(12)), "leave a gap, at byte 0"),
    "an overlap": (document({W: entry(), "weights/v": entry(offsets=[4, 12])}, bytes(12)), "overlap"),
    "the same bytes twice": (document({W: entry(), "weights/v": entry()}, EIGHT), "overlap"),
    "bytes at the end": (document({W: entry()}, bytes(9)), "claim 8 bytes; 9 are there"),
    "truncated bytes": (document({W: entry()}, bytes(7)), "claim 8 bytes; 7 are there"),
    "a name twice": (document(f'{{"{W}": {FORM}, "{W}": {FORM}}}'.encode(), EIGHT), "twice"),
    "no group": (document({"w": entry()}, EIGHT), "'w' is not named group/name"),
    "an empty group": (document({"/w": entry()}, EIGHT), "not named group/name"),
    "metadata": (document({"__metadata__": {"a": "b"}}), "not named group/name"),
    "no form": (document({W: 3}), "not described as a tensor"),
    "half a form": (document({W: {"dtype": "F32", "shape": [2]}}, EIGHT), "not described as a tensor"),
    "eight-bit floats": (document({W: entry("F8_E4M3", [8])}, EIGHT), "has the type 'F8_E4M3'"),
    "unsigned integers": (document({W: entry("U32")}, EIGHT), "has the type 'U32'"),
    "complex numbers": (document({W: entry("C64", [1])}, EIGHT), "has the type 'C64'"),
    "a type that is a list": (document({W: entry(["F32"])}, EIGHT), "has the type"),
    "nine dimensions": (document({W: entry(shape=[1] * 8 + [2])}, EIGHT), "has the shape"),
    "a long name": (document({"weights/" + "w" * 505: entry()}, EIGHT), "a name of 513 characters"),
    "a number of two": (document({"scalars/samples": entry()}, EIGHT), "expected one number"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_document_is_refused_with_the_reason_and_the_sender(case: str) -> None:
    data, text = REFUSED[case]
    with pytest.raises(
        RunError,
        match=rf"^site 'a': a received message of {len(data)} bytes is not taken: .*({text})",
    ):
        Message.decode(data, sender="site 'a'")


def test_nothing_is_allocated_for_what_is_claimed() -> None:
    tracemalloc.start()
    for case in ("a header of 2 GiB", "a tensor of 2 GiB", "a tensor past all numbers"):
        with pytest.raises(RunError):
            Message.decode(REFUSED[case][0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


SMALL = MessageLimits(size=100, header=400, tensors=3, name=12, dimensions=2)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"w": torch.zeros(26)}, "104 bytes; at most 100|more than 100 bytes"),
        (
            {"a": torch.zeros(13), "b": torch.zeros(13)},
            "104 bytes; at most 100|more than 100 bytes",
        ),
        ({str(i): torch.zeros(1) for i in range(4)}, "4 tensors; at most 3"),
        ({"abcde": torch.zeros(1)}, "a name of 13 characters, 'weights/abcde'…; at most 12"),
        ({"w": torch.zeros(1, 1, 1)}, r"'weights/w' has (the shape \[1, 1, 1\]|3 dimensions)"),
    ],
)
def test_bytes_and_restored_tensors_are_held_to_the_same_caps(
    tensors: dict[str, torch.Tensor], text: str
) -> None:
    message = Message({"weights": tensors})
    with pytest.raises(RunError, match=text):
        Message.decode(message.encode(), SMALL)
    with pytest.raises(RunError, match=f"^site 'a': .*({text})"):
        SMALL.checked(message.flat(), "site 'a'")
    Message.decode(message.encode())


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([f"scalars/{i}" for i in range(1025)], "it has 1025 numbers; at most 1024"),
        ([f"weights/{i}" for i in range(8193)], "it has 8193 tensors; at most 8192"),
    ],
    ids=["numbers", "tensors"],
)
def test_what_is_too_many_is_counted_before_anything_is_made_of_it(
    names: list[str], text: str
) -> None:
    class Unread(dict[str, torch.Tensor]):
        def items(self) -> Any:
            raise AssertionError

    named = dict.fromkeys(names, torch.tensor(1.0))
    with pytest.raises(RunError, match=f"^site 'a': {text}"):
        MessageLimits().checked(Unread(named), "site 'a'")
    data = safetensors.torch.save({name: torch.tensor(1.0) for name in names})
    with pytest.raises(RunError, match=text):
        Message.decode(data)
    many = {f"block{i}.weight": torch.zeros(1) for i in range(300)}
    assert MessageLimits().checked(many, "x").keys() == many.keys(), "names without a group"


@pytest.mark.parametrize("size", [0, 4])
def test_a_tensor_without_its_storage_does_not_end_the_process(size: int) -> None:
    value = torch.ones(1000)
    value.untyped_storage().resize_(size)
    with pytest.raises(RunError, match="^site 'a': reading it raises RuntimeError"):
        MessageLimits().checked({"weights/w": value}, "site 'a'")


def test_a_long_header_is_refused() -> None:
    data = document(json.dumps({W: entry()}).encode() + b" " * 400, EIGHT)
    with pytest.raises(RunError, match="its header has 4.. bytes; at most 400"):
        Message.decode(data, SMALL)


ADMITTED = {
    "an array": np.arange(3.0), "a number": np.float32(2.5), "a view": np.arange(8)[::-2], "none": np.zeros((0, 2)),
    "bfloat16": torch.ones(2).bfloat16(), "a parameter": torch.nn.Parameter(torch.ones(2)), "truth": np.array([True]),
    "masked": np.ma.masked_array([1.0, 2.0], [True, False]),
}  # fmt: skip


@pytest.mark.parametrize("value", ADMITTED.values(), ids=ADMITTED)
def test_arrays_and_tensors_are_taken_as_they_are(value: Any) -> None:
    found = MessageLimits().checked({"weights/w": value}, "site 'a'")["weights/w"]
    assert not found.requires_grad
    expected = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(np.array(value))
    assert bits(found) == bits(expected)


@pytest.mark.parametrize(
    "value", [torch.tensor(2, dtype=torch.uint8), torch.tensor([[0, 1], [255, 0]]).byte().T]
)
def test_a_truth_value_besides_0_and_1_is_refused(value: torch.Tensor) -> None:
    """A copy of it has another byte, so that what is sent on would be another message."""
    form = entry("BOOL", list(value.shape), [0, value.numel()])
    with pytest.raises(RunError, match="'weights/w' has a truth value besides 0 and 1"):
        Message.decode(document({W: form}, bytes(value.reshape(-1).tolist())))
    with pytest.raises(RunError, match="^site 'a': 'weights/w' has a truth value besides 0 and 1"):
        MessageLimits().checked({W: value.view(torch.bool)}, "site 'a'")


def test_an_array_is_copied() -> None:
    array = np.zeros(2)
    found = MessageLimits().checked({"weights/w": array}, "site 'a'")["weights/w"]
    array[0] = 7
    assert found[0] == 0


NOT_ADMITTED: Mapping[str, tuple[Any, str]] = {
    "text": ("x", "is a str; expected a dense tensor"),
    "a list": ([1.0], "is a list"),
    "objects": (np.array([print]), "has the type object"),
    "times": (np.array(["2026-01-01"], "datetime64"), "has the type datetime64"),
    "complex": (np.zeros(2, complex), "has the type complex128"),
    "complex tensor": (torch.zeros(2, dtype=torch.complex64), "has the type torch.complex64"),
    "unsigned": (np.zeros(2, np.uint32), "has the type torch.uint32"),
    "other order of bytes": (np.zeros(2, ">f4"), "byte order"),
    "wide floats": (np.zeros(2, np.longdouble), "longdouble"),
    "sparse": (torch.eye(2).to_sparse(), "expected a dense tensor"),
    "nowhere": (torch.zeros(2, device="meta"), "expected a dense tensor"),
    "eight bits": (torch.zeros(2).to(torch.float8_e4m3fn), "has the type torch.float8_e4m3fn"),
    "2 GiB of an array": (np.broadcast_to(np.float32(0), (2**29,)), "more than 268435456 bytes"),
    "2 GiB of a tensor": (torch.zeros(1).expand(2**29), "more than 268435456 bytes"),
    "sixteen dimensions": (np.zeros((1,) * 16), "has 16 dimensions"),
}


@pytest.mark.parametrize("case", NOT_ADMITTED)
def test_other_values_are_refused(case: str) -> None:
    value, text = NOT_ADMITTED[case]
    with pytest.raises(RunError, match=f"^site 'a': .*{text}"):
        MessageLimits().checked({"weights/w": value}, "site 'a'")


def test_a_name_is_text() -> None:
    with pytest.raises(RunError, match="^site 'a': the name '3' is no text"):
        MessageLimits().checked({3: torch.zeros(1)}, "site 'a'")


def test_caps_grow_with_the_largest_network() -> None:
    small, large = (
        {"w": torch.zeros(10)},
        {f"w{i}": torch.zeros(1).expand(10**7) for i in range(9000)},
    )
    assert MessageLimits.for_networks() == MessageLimits.for_networks(small) == MessageLimits()
    assert MessageLimits().size == 2**28
    assert MessageLimits.for_networks(small, large) == MessageLimits(
        size=8 * 9000 * 4 * 10**7, tensors=72_000
    )


@pytest.mark.parametrize("sign", ["\n", "\x1b[31m", "\u202e", "\u2028"], ids=ascii)
def test_no_name_writes_a_line_of_its_own_into_a_log(sign: str) -> None:
    """Neither that of what a transport restored nor that in a document."""
    named = {f"weights/a{sign}2026-01-01 INFO all is well": torch.ones(1)}
    with pytest.raises(RunError, match="is no name") as caught:
        MessageLimits().checked(named, "x")
    assert sign not in str(caught.value)
    with pytest.raises(RunError, match="is no name"):
        Message.decode(safetensors.torch.save(named))


@pytest.mark.parametrize("name", ["weights/क्\u200dष", "prototypes/bone lesion", "weights/0.weight"])
def test_names_of_any_language_are_names(name: str) -> None:
    assert MessageLimits().checked({name: torch.ones(1)}, "x").keys() == {name}


class Liar(torch.Tensor):
    """Says of itself, whatever it has, that it is finite."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.sum:
            return torch.zeros(())
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_tensor_is_taken_without_what_its_class_says() -> None:
    value = torch.full((2,), torch.nan).as_subclass(Liar)
    found = MessageLimits().checked({W: value}, "site 'a'")[W]
    assert type(found) is torch.Tensor
    assert not is_finite(found)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    NESTED_TENSOR = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


class Failing(dict):
    """Cannot be read."""

    def items(self):
        raise KeyError("boom")


@pytest.mark.parametrize(
    ("arrived", "text"),
    [
        ([1, 2], "reading it raises AttributeError"),
        ("text", "reading it raises AttributeError"),
        (Failing({W: torch.zeros(1)}), "reading it raises KeyError"),
        ({W: NESTED_TENSOR}, "expected a dense"),
    ],
    ids=["list", "text", "failing", "nested"],
)
def test_what_is_no_message_is_refused_by_name(arrived: Any, text: str) -> None:
    with pytest.raises(RunError, match=f"^site 'a': .*{text}"):
        MessageLimits().checked(arrived, "site 'a'")
