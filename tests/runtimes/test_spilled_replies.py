"""TensorStore: what lies in the file is what was put in, and a method cannot tell where its replies lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from medfl.core.errors import RunError
from medfl.core.message import Message
from medfl.methods import load, names
from medfl.methods.base import _BLOCK, sample_shares, weighted_mean
from medfl.runtimes import spilled_replies
from medfl.runtimes.spilled_replies import Replies, SitesWeights, TensorStore
from medfl.storage.files import weights_sha256
from tests.support.toy import WITHOUT_IMAGES, Toy, bits, simulate

T = TypeVar("T")
TENSORS = {
    "w": torch.randn(3, 4),
    "turned": torch.randn(4, 6).T[1:],
    "count": torch.tensor(7),
    "brain": torch.randn(2, 3).bfloat16(),
    "half": torch.randn(3).half(),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
    "wide": torch.randn(2).double(),
}


def within(budget: int | None, make: Callable[[], T]) -> T:
    """Return what is made with so many bytes for memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spilled_replies, "BUDGET", budget)
        return make()


@pytest.mark.parametrize("budget", [0, 10**9])
def test_tensors_come_back_bit_for_bit(tmp_path: Path, budget: int) -> None:
    kept = within(budget, lambda: TensorStore(tmp_path)).keep(TENSORS)
    assert list(kept) == list(TENSORS)
    assert bits(dict(kept)) == bits(TENSORS)
    assert "w" in kept
    assert "v" not in kept
    assert len(kept) == len(TENSORS)


def test_what_fits_the_budget_stays_in_memory_and_the_rest_is_in_no_file_with_a_name(
    tmp_path: Path,
) -> None:
    """Two tensors of 40 bytes fit 100; the third goes to the file, and a fourth of 20 fits again."""
    held = within(100, lambda: TensorStore(tmp_path))
    given = [
        {"w": torch.randn(10)},
        {"w": torch.randn(10)},
        {"w": torch.randn(10)},
        {"w": torch.randn(5)},
    ]
    kept = [held.keep(tensors) for tensors in given]
    assert [mine is theirs for mine, theirs in zip(kept, given, strict=True)] == [
        True,
        True,
        False,
        True,
    ]
    assert held.held == 100
    assert [bits(dict(tensors)) for tensors in kept] == [bits(tensors) for tensors in given]
    assert [*tmp_path.iterdir()] == []


def test_every_access_reads_a_tensor_of_its_own(tmp_path: Path) -> None:
    kept = within(0, lambda: TensorStore(tmp_path)).keep({"w": torch.ones(3)})
    kept["w"].zero_()
    assert kept["w"].tolist() == [1, 1, 1]


def test_a_folder_without_room_is_our_own_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot write .*--resume"):
        within(0, lambda: TensorStore(tmp_path / "gone")).keep(TENSORS)


@pytest.mark.parametrize("budget", [0, 10**9])
def test_replies_are_listed_in_the_order_of_the_sites_and_not_of_arrival(
    tmp_path: Path, budget: int
) -> None:
    replies = within(budget, lambda: Replies(["b", "a", "c"], tmp_path))
    messages = {
        name: Message({"weights": TENSORS, "none": {}}, {"samples": i})
        for i, name in enumerate("abc")
    }
    for name in ("c", "a"):
        replies.add(name, messages[name])
    assert list(replies) == ["a", "c"]
    assert "b" not in replies
    with pytest.raises(KeyError):
        replies["b"]
    replies.add("b", messages["b"])
    assert list(replies) == ["b", "a", "c"]
    assert len(replies) == 3
    assert bits(dict(replies)) == bits({name: messages[name] for name in "bac"})
    assert "none" in replies["a"]
    assert bits(Message.decode(replies["a"].encode())) == bits(
        Message.decode(messages["a"].encode())
    )


def test_a_mean_reads_a_block_of_one_reply_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 replies one tensor is read whole, for its form; of the others a block is alive while it is added."""
    size = 3 * _BLOCK + 5
    replies, generator = (
        within(0, lambda: Replies([f"{i:02}" for i in range(20)], tmp_path)),
        torch.Generator().manual_seed(0),
    )
    plain = {}
    for i in range(20):
        message = Message(
            {"weights": {"w": torch.randn(size, generator=generator)}}, {"samples": i + 1}
        )
        plain[f"{i:02}"] = message
        replies.add(f"{i:02}", message)
    alive, most, read = [], [], TensorStore.part

    def counted(self: TensorStore, place: object, start: int, stop: int) -> torch.Tensor:
        tensor = read(self, place, start, stop)
        alive.append(torch.utils.weak.WeakTensorKeyDictionary({tensor: 1}))
        most.append(sum(key.numel() for one in alive for key in one))
        return tensor

    monkeypatch.setattr(TensorStore, "part", counted)
    mean = weighted_mean(replies, "weights", sample_shares(replies))
    assert bits(mean) == bits(weighted_mean(plain, "weights", sample_shares(plain)))
    assert len(most) == 1 + 4 * 20
    assert max(most) <= size + 2 * _BLOCK


@pytest.mark.parametrize("name", names())
def test_no_method_can_tell_where_its_replies_lie(name: str, classes: Toy, tmp_path: Path) -> None:
    method = load(name, WITHOUT_IMAGES.get(name))
    toy = classes.adapted(method)
    outcome = simulate(method, toy, 2)
    found = []
    for budget in (0, spilled_replies.BUDGET):
        replies = within(budget, lambda: Replies(list(outcome.replies), tmp_path))
        for site, message in outcome.replies.items():
            replies.add(site, message)
        with toy.networks.scope():
            found.append(
                method.aggregate(toy.host(2), outcome.history[1], replies, len(outcome.replies))
            )
    assert bits(found) == bits([outcome.server, outcome.server])


def test_the_weights_of_all_sites_are_one_mapping(tmp_path: Path) -> None:
    parts = {
        name: {"w": torch.randn(3), "n": torch.tensor(i)}
        for i, name in enumerate(("site-1", "site-10", "a/b"))
    }
    flat = {f"{name}/{key}": tensor for name, part in parts.items() for key, tensor in part.items()}
    for budget in (0, 30, 10**9):
        weights = within(budget, lambda: SitesWeights(tmp_path))
        for name, part in parts.items():
            weights.add(name, part)
        assert bits(dict(weights)) == bits(flat)
        assert weights_sha256(weights) == weights_sha256(flat)
        assert "a/b/w" in weights
        assert len(weights) == 6
