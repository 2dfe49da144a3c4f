"""Whatever arrives, nothing is raised but the declared error; whatever is sent, it arrives bit for bit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from medfl.core.errors import RunError
from medfl.core.message import Message
from medfl.core.untrusted import visible
from medfl.methods import load
from medfl.runtimes.federation import Federation
from medfl.runtimes.monai_fl.view import SiteView
from tests.runtimes.test_smaller_messages import Wide
from tests.support.toy import bits, run_record

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
]  # fmt: skip
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8).filter(
    lambda name: visible(name) == name and "\n" not in name
)
groups = names.filter(lambda name: name not in ("", "scalars") and "/" not in name)
shapes = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any form, any bits: NaN, infinities and denormal numbers among them."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    data = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return data.view(dtype).reshape(shape) if data.numel() else torch.zeros(shape, dtype=dtype)


messages = st.builds(
    Message,
    st.dictionaries(groups, st.dictionaries(names, tensors(), min_size=1, max_size=4), max_size=3),
    st.dictionaries(names, st.floats(), max_size=3),
)


def damaged(draw: st.DrawFn, data: bytearray) -> bytes:
    """Flip bits, cut, put something in, or change a number in the header."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "length", "header"]))
        if kind == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        elif kind == "length":
            data[:8] = draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
        else:
            data = _edited(draw, data)
    return bytes(data)


ODD = st.one_of(
    st.integers(-(2**70), 2**70), st.none(), st.booleans(), st.floats(), st.text(max_size=4), st.just([]), st.just({}),
    st.lists(st.integers(-1, 2**64), max_size=9), st.sampled_from(["F32", "F64", "I64", "BF16", "BOOL", "F8_E4M3"]),
)  # fmt: skip


def _edited(draw: st.DrawFn, data: bytearray) -> bytearray:
    """Change what the header says of one tensor, and keep the rest in order."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        name = draw(st.sampled_from(sorted(header)))
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "name", "all"]))
        if field == "name":
            header[draw(st.one_of(names, st.just("__metadata__")))] = header.pop(name)
        elif field == "all":
            header[name] = draw(ODD)
        else:
            header[name][field] = draw(ODD)
    except Exception:  # damaged before: there is no header to edit
        return data
    told = json.dumps(header).encode()
    return bytearray(len(told).to_bytes(8, "little") + told + data[8 + length :])


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    """Any bytes, bytes with a header of their length, or a message that was damaged on its way."""
    kind = draw(st.sampled_from(["any", "header", "damaged", "damaged", "damaged"]))
    if kind == "any":
        return draw(st.binary(max_size=400))
    if kind == "header":
        told = draw(st.one_of(st.binary(max_size=80), ODD.map(json.dumps).map(str.encode)))
        return len(told).to_bytes(8, "little") + told + draw(st.binary(max_size=40))
    return damaged(draw, bytearray(draw(messages).encode()))


def all_bits(message: Message) -> Any:
    """The bits of its numbers too: NaN is not equal to itself."""
    return bits(message.flat())


def decodes_or_refuses(data: bytes) -> None:
    try:
        message = Message.decode(data, sender="site 'a'")
    except RunError as error:
        told = str(error)
    else:
        assert all_bits(Message.decode(message.encode())) == all_bits(message)
        return
    assert told.startswith("site 'a': ")
    assert "\n" not in told


# What arrives at a site


@lru_cache
def at_site(form: str) -> SiteView:
    made = Federation(Wide(), load("scaffold"), run_record(messages=form))
    return SiteView(made, "x", threading.Event())


WEIGHTS = {name: tuple(t.shape) for name, t in Wide().network().state_dict().items()}
KEYS = [
    *(f"{group}/{name}" for name in WEIGHTS for group in ("weights", "control", "weights@int8@float32")),
    "weights@scales@float32/scales", "weights@topk@float32/indices", "weights@topk@float32/values", "scalars/samples",
    "prototypes/0", "weights/secret", "/w", "w", "w/", "scalars/", "weights@int8@float64/0.weight",
]  # fmt: skip
arrays = st.builds(
    lambda dtype, shape: np.zeros(shape, dtype),
    st.sampled_from(
        ["f4", "f8", "f2", "i8", "u4", "?", ">f4", "c8", "O", "U3", "M8[s]", "longdouble"]
    ),
    st.one_of(shapes, st.sampled_from(sorted(WEIGHTS.values()))),
)
ELSEWHERE = [
    torch.eye(2).to_sparse(),
    torch.zeros(3, device="meta"),
    torch.zeros(1).expand(2**40),
    np.float64(1),
]
alike = st.sampled_from(sorted(WEIGHTS.values())).flatmap(
    lambda shape: st.sampled_from(
        [torch.zeros(shape), torch.full(shape, torch.nan), torch.ones(shape, dtype=torch.int8)]
    )
)
values = st.one_of(tensors(), arrays, ODD, st.sampled_from(ELSEWHERE), alike)
mappings = st.dictionaries(
    st.one_of(st.sampled_from(KEYS), names, st.integers(), st.none(), st.binary(max_size=3)),
    values,
    max_size=6,
)


@st.composite
def arriving(draw: st.DrawFn) -> tuple[str, str, dict[Any, Any]]:
    """A form of messages, which check it meets, and what arrives: a right broadcast with some of it exchanged."""
    form = draw(st.sampled_from(["lossless", "float16", "int8", "topk:0.1"]))
    whole = at_site("lossless")
    right = {
        f"weights/{name}": torch.zeros(shape, dtype=dtype)
        for name, (shape, dtype) in whole.rules.leaves.items()
    }
    start = draw(st.sampled_from([{}, right]))
    check = draw(st.sampled_from(["received", "averaged", "arrived"]))
    return form, check, {**start, **draw(mappings)}


def takes_or_refuses(case: tuple[str, str, dict[Any, Any]]) -> None:
    form, check, named = case
    site = at_site(form)
    take: Callable[..., Message] = {
        "received": site.received, "averaged": site.averaged, "arrived": site.rules.decode_reply
    }[check]  # fmt: skip
    with suppress(RunError):
        message = take(named)
        assert isinstance(message, Message)
        with suppress(RunError):
            site.rules.check_reply(message)
            site.rules.check_complete(message)


def few(count: int) -> Any:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=checks,
    )


@few(150)
@given(messages)
def test_what_is_sent_arrives_bit_for_bit(message: Message) -> None:
    data = message.encode()
    assert all_bits(Message.decode(data)) == all_bits(message)
    assert message.num_bytes == (len(data) if message.flat() else 0)


@few(200)
@given(documents())
def test_any_bytes_are_decoded_or_refused(data: bytes) -> None:
    decodes_or_refuses(data)


@few(200)
@given(arriving())
def test_any_mapping_is_taken_or_refused(case: tuple[str, str, dict[Any, Any]]) -> None:
    takes_or_refuses(case)


@pytest.mark.slow
@few(2000)
@given(documents())
def test_2000_documents_are_decoded_or_refused(data: bytes) -> None:
    decodes_or_refuses(data)


@pytest.mark.slow
@few(2000)
@given(arriving())
def test_2000_mappings_are_taken_or_refused(case: tuple[str, str, dict[Any, Any]]) -> None:
    takes_or_refuses(case)
