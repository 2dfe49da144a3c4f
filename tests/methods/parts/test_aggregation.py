"""Means over replies."""

from __future__ import annotations

import pytest
import torch

from medfl.core.message import Message
from medfl.methods.base import sample_shares, uniform_shares, weighted_mean
from tests.support.toy import bits


def reply(value: float, samples: float = 1, count: int = 0) -> Message:
    tensors = {
        "w": torch.full((2,), float(value)),
        "n": torch.tensor(count),
        "d": torch.tensor(value).double(),
    }
    return Message({"weights": tensors}, {"samples": samples})


def test_shares() -> None:
    replies = {"b": reply(0, 30), "a": reply(0, 10)}
    assert sample_shares(replies) == {"a": 0.25, "b": 0.75}
    assert uniform_shares(replies) == {"a": 0.5, "b": 0.5}
    many = {f"{i}": reply(0, i + 1) for i in range(7)}
    assert sum(sample_shares(many).values()) == pytest.approx(1, abs=1e-15)
    assert sum(uniform_shares(many).values()) == pytest.approx(1, abs=1e-15)


def test_the_mean_by_hand_and_the_counters_maximum() -> None:
    """0.25 * 1 + 0.75 * 5 = 4; the counters 3 and 7 give 7, not 6."""
    mean = weighted_mean(
        {"a": reply(1, count=3), "b": reply(5, count=7)}, "weights", {"a": 0.25, "b": 0.75}
    )
    assert mean["w"].tolist() == [4, 4]
    assert (mean["n"].item(), mean["n"].dtype) == (7, torch.int64)
    assert (mean["d"].item(), mean["d"].dtype) == (4, torch.float64)


def test_booleans_are_joined() -> None:
    masks = {"a": [True, False], "b": [False, False]}
    replies = {
        name: Message({"weights": {"m": torch.tensor(mask)}}) for name, mask in masks.items()
    }
    assert weighted_mean(replies, "weights", uniform_shares(replies))["m"].tolist() == [True, False]


def test_order_of_arrival_is_no_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    replies = {
        f"site-{i}": Message(
            {"weights": {"w": torch.randn(50, generator=generator) * 10.0**i}}, {"samples": i + 1}
        )
        for i in range(6)
    }
    reference = bits(weighted_mean(replies, "weights", sample_shares(replies)))
    for names in (
        list(reversed(replies)),
        ["site-3", "site-0", "site-5", "site-1", "site-4", "site-2"],
    ):
        turned = {name: replies[name] for name in names}
        assert bits(weighted_mean(turned, "weights", sample_shares(turned))) == reference


def test_replies_are_not_changed_and_the_mean_is_new_memory() -> None:
    replies = {"a": reply(1.0, count=1), "b": reply(3.0, count=2)}
    before = bits(replies)
    for group in ({"a": 1.0}, {"a": 0.5, "b": 0.5}):
        mean = weighted_mean({name: replies[name] for name in group}, "weights", group)
        for tensor in mean.values():
            tensor.zero_()
    assert bits(replies) == before


def test_equal_replies_are_returned_to_rounding() -> None:
    replies = {name: reply(0.1, samples) for name, samples in (("a", 7), ("b", 5), ("c", 1))}
    mean = weighted_mean(replies, "weights", sample_shares(replies))["w"]
    torch.testing.assert_close(mean, torch.full((2,), 0.1), rtol=1e-6, atol=0)


def test_a_single_reply_is_returned_exactly() -> None:
    only = {"a": reply(0.1, 13, 4)}
    assert bits(weighted_mean(only, "weights", sample_shares(only))) == bits(only["a"]["weights"])
