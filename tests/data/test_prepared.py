"""Batches of prepared items: order, sizes, seeds of the random transforms."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from medfl.core.errors import InputError
from medfl.data import samples as threads
from medfl.data.prepared import Augmented, Prepared, Shard, Stacked, stack
from medfl.data.samples import Sampled

ITEMS = [{"id": name, "label": index % 2} for index, name in enumerate("abcdefg")]


def stacked() -> Stacked:
    return Stacked(ITEMS, torch.arange(7.0).reshape(7, 1), torch.arange(7))


class Noisy:
    """Item i plus noise that one seed sets for all items, as MONAI's random transforms have it."""

    has_steps_left = True

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def reseed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def __call__(self, index: int) -> dict[str, Any]:
        noise = torch.rand(1, generator=self.generator) + torch.rand(
            1
        )  # one's own and the global stream
        return {"x": index + 0.1 * noise, "y": index}


def sampled() -> Sampled:
    noisy = Noisy()
    return Sampled(ITEMS, noisy, default_collate, lambda batch: (batch["x"], batch["y"]))


def values(batches: Any) -> list[float]:
    return [value for x, _ in batches for value in x.flatten().tolist()]


def test_order_and_sizes() -> None:
    shard = Shard.of(stacked(), [5, 0, 3])
    assert [(x.flatten().tolist(), y.tolist()) for x, y in shard.batches(2)] == [
        ([5, 0], [5, 0]),
        ([3], [3]),
    ]
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
    first, next_, again = (
        values(shard.batches(3, source)) for source in (generator, generator, _seeded(1))
    )
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
    assert all(i < value for i, value in enumerate(whole)), (
        "the random transforms are applied all the same"
    )


def test_evaluation_leaves_the_global_stream_alone() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)
        list(Shard.of(sampled(), range(7)).batches(3))
        assert torch.equal(torch.rand(1), expected)


# In threads


class Alone:
    """Item i plus noise of a generator of its own; slow, so that threads overlap."""

    has_steps_left = True

    def __init__(self, log: list[int]) -> None:
        self.generator, self.log = torch.Generator(), log

    def reseed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def clone(self) -> Alone:
        return Alone(self.log)

    def __call__(self, index: int) -> dict[str, Any]:
        self.log.append(threading.get_ident())
        time.sleep(0.001 * (index % 3))
        if index == 99:
            raise InputError("item 99", "none", "none")
        return {"x": index + 0.1 * torch.rand(1, generator=self.generator), "y": index}


def threaded(twins: bool, log: list[int] | None = None) -> Sampled:
    log = [] if log is None else log
    items = [{"id": str(i)} for i in range(100)]
    return Sampled(items, Alone(log), default_collate, lambda b: (b["x"], b["y"]), in_threads=twins)


def test_threads_change_no_number_and_no_order() -> None:
    log: list[int] = []
    shards = [Shard.of(threaded(twins, log), range(41)) for twins in (False, True)]
    for seed in (1, 2, None):
        generators = [None if seed is None else _seeded(seed) for _ in shards]
        once, again = (list(s.batches(2, g)) for s, g in zip(shards, generators, strict=True))
        assert [y.tolist() for _, y in once] == [y.tolist() for _, y in again]
        assert values(once) == values(again)
    assert len(set(log)) > 1


def test_threads_are_few_steps_ahead_and_gone_when_nobody_asks_any_more() -> None:
    log: list[int] = []
    before = threading.active_count()
    batches = Shard.of(threaded(True, log), range(99)).batches(1, _seeded(0))
    next(batches)
    assert threading.active_count() <= before + threads._THREADS
    batches.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert 1 <= len(log) <= 1 + threads._MADE_AHEAD


def test_a_failure_in_a_thread_comes_at_its_place() -> None:
    batches = Shard.of(threaded(True), [1, 2, 99, 3]).batches(1)
    assert [int(y) for _, y in (next(batches), next(batches))] == [1, 2]
    with pytest.raises(InputError, match="item 99"):
        next(batches)


# Random transforms of whole batches


@dataclass(frozen=True)
class Added:
    """A recipe that adds its one number."""

    num_draws: int = 1

    def __call__(self, inputs: Any, targets: Any, draws: Tensor) -> Any:
        x = inputs if isinstance(inputs, Tensor) else torch.stack(list(inputs))
        return x + draws.to(x), targets


def augmented() -> tuple[Augmented, Augmented]:
    """The same items stacked, and one by one as on disk."""
    kept: list[Mapping[str, Any]] = [
        {"image": torch.tensor([float(i)]), "label": i} for i in range(7)
    ]
    return Augmented(ITEMS, stacked(), Added()), Augmented(ITEMS, kept, Added())


def test_draws_follow_the_generator_wherever_items_are_kept() -> None:
    first, other = (Shard.of(prepared, range(7)) for prepared in augmented())
    drawn = values(first.batches(3, _seeded(1)))
    assert drawn == values(other.batches(3, _seeded(1))) == values(first.batches(2, _seeded(1)))
    assert drawn != values(first.batches(3, _seeded(2)))
    assert sorted(int(value) for value in drawn) == list(range(7))
    assert [y.tolist() for _, y in other.batches(4)] == [[0, 1, 2, 3], [4, 5, 6]]


def test_what_is_evaluated_is_always_drawn_the_same() -> None:
    prepared, _ = augmented()
    whole = values(Shard.of(prepared, range(7)).batches(3))
    assert values(Shard.of(prepared, [4, 2]).batches(1)) == [whole[4], whole[2]]
    assert len({round(value - i, 6) for i, value in enumerate(whole)}) == 7


# On a device


@pytest.mark.parametrize("make", [stacked, lambda: augmented()[0]])
def test_what_fits_a_budget_is_held_on_the_device(make: Any) -> None:
    """The device `meta` has no numbers: only what it is asked for shows."""
    prepared: Prepared = make()
    device = torch.device("meta")
    assert prepared.to(device, prepared.nbytes - 1) is prepared
    held = prepared.to(device, prepared.nbytes)
    assert type(held) is type(prepared)
    assert held.items is prepared.items
    inside = held.cached if isinstance(held, Augmented) else held
    assert isinstance(inside, Stacked)
    assert inside.inputs.device == inside.targets.device == device


@pytest.mark.parametrize("prepared", [sampled(), augmented()[1]])
def test_items_one_by_one_stay_where_they_are(prepared: Prepared) -> None:
    assert prepared.nbytes == 0
    assert prepared.to(torch.device("meta"), 1 << 40) is prepared


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("make", [stacked, lambda: augmented()[0]])
def test_batches_come_from_the_gpu(make: Any) -> None:
    prepared: Prepared = make()
    held = prepared.to(torch.device("cuda"), 1 << 30)
    order = torch.arange(len(prepared))
    for seed in (1, None):
        generators = [None if seed is None else _seeded(seed) for _ in range(2)]
        pairs = zip(
            prepared.batches(order, 2, generators[0]),
            held.batches(order, 2, generators[1]),
            strict=True,
        )
        for (x, y), (on_device, labels) in pairs:
            assert on_device.is_cuda
            assert labels.is_cuda
            assert torch.equal(on_device.cpu(), x)
            assert torch.equal(labels.cpu(), y)


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
