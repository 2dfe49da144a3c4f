"""Batches of prepared items: order, sizes, seeds of the random transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from medfl.errors import InputError
from medfl.prepared import Sampled, Shard, Stacked, stack

ITEMS = [{"id": name, "label": index % 2} for index, name in enumerate("abcdefg")]


def stacked() -> Stacked:
    return Stacked(ITEMS, torch.arange(7.0).reshape(7, 1), torch.arange(7))


class Noisy:
    """Item i plus noise that one seed sets for all items, as MONAI's random transforms have it."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def reseed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def __call__(self, index: int) -> dict[str, Any]:
        noise = torch.rand(1, generator=self.generator) + torch.rand(1)  # one's own and the global stream
        return {"x": index + 0.1 * noise, "y": index}


def sampled() -> Sampled:
    noisy = Noisy()
    return Sampled(ITEMS, noisy, noisy.reseed, default_collate, lambda batch: (batch["x"], batch["y"]))


def values(batches: Any) -> list[float]:
    return [value for x, _ in batches for value in x.flatten().tolist()]


def test_order_and_sizes() -> None:
    shard = Shard.of(stacked(), [5, 0, 3])
    assert [(x.flatten().tolist(), y.tolist()) for x, y in shard.batches(2)] == [([5, 0], [5, 0]), ([3], [3])]
    assert shard.ids == ["f", "a", "d"]
    assert shard.labels == [1, 0, 1]
    assert list(Shard.of(stacked(), []).batches(2)) == []


def test_many_batches_cross_the_gather() -> None:
    """Batches are gathered 32 at a time; the seams must not show."""
    prepared = Stacked([{"id": str(i)} for i in range(201)], torch.arange(201.0), torch.arange(201))
    batches = list(Shard.of(prepared, range(201)).batches(2))
    assert [len(x) for x, _ in batches] == [2] * 100 + [1]
    assert torch.cat([x for x, _ in batches]).tolist() == list(range(201))


def test_shuffled_by_the_generator() -> None:
    shard = Shard.of(stacked(), range(7))
    generator = _seeded(1)
    first, next_, again = (values(shard.batches(3, source)) for source in (generator, generator, _seeded(1)))
    assert first == again != next_
    assert sorted(first) == sorted(next_) == list(range(7))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_random_transforms_follow_the_generator() -> None:
    """The same generator gives the same noise whatever was drawn before; the next epoch gives other noise."""
    shard = Shard.of(sampled(), range(7))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = values(shard.batches(3, generator := _seeded(1)))
        other = values(shard.batches(3, generator))
        torch.manual_seed(0)
        again = values(shard.batches(3, _seeded(1)))
    assert first == again
    assert sorted(round(v - 0.1) for v in other) == list(range(7))
    assert first != other


def test_evaluated_samples_are_always_the_same() -> None:
    """Without a generator a sample depends neither on the batch, nor on its neighbours, nor on earlier draws."""
    prepared = sampled()
    whole = values(Shard.of(prepared, range(7)).batches(3))
    torch.rand(5)
    assert values(Shard.of(prepared, [4, 2]).batches(1)) == [whole[4], whole[2]]
    assert all(i < value for i, value in enumerate(whole)), "the random transforms are applied all the same"


def test_evaluation_leaves_the_global_stream_alone() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        list(Shard.of(sampled(), range(7)).batches(3))
        assert torch.equal(torch.rand(1), expected)


IMAGE = torch.zeros(3, 4, 4)


@pytest.mark.parametrize(
    ("inputs", "targets", "stacks"),
    [
        ([IMAGE, IMAGE], [0, 1], True),
        ([IMAGE, IMAGE], [IMAGE, IMAGE], True),
        ([IMAGE, torch.zeros(3, 4, 5)], [0, 1], False),
        ([IMAGE, IMAGE], [IMAGE, torch.zeros(3, 4, 5)], False),
    ],
)
def test_stack(inputs: list[Tensor], targets: list[Any], stacks: bool) -> None:
    made = stack(ITEMS[:2], inputs, targets)
    assert (made is not None) == stacks
    assert made is None or len(made.inputs) == len(made.targets) == 2


def test_stack_names_both_images_of_different_channels() -> None:
    with pytest.raises(InputError, match=r"image 'b' has 1 channels, 'a' has 3; all images"):
        stack(ITEMS[:2], [IMAGE, torch.zeros(1, 4, 4)], [0, 1])
