"""Images of sites that lack channels."""

from __future__ import annotations

import pytest
import torch

from medfl.core.errors import InputError
from medfl.data.prepared import Channels, Shard, Stacked


def stacked(count: int = 6, channels: int = 3) -> Stacked:
    x = 1 + torch.rand(count, channels, 4, 4, generator=torch.Generator().manual_seed(0))
    return Stacked([{"id": str(i)} for i in range(count)], x, torch.arange(count))


def whole(
    shard: Shard, size: int = 4, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    parts = list(shard.batches(size, generator))
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def there(x: torch.Tensor) -> torch.Tensor:
    return (x != 0).flatten(2).all(2)


PRESENT = torch.tensor([[True, True, True]] * 3 + [[True, False, True]] * 3)


def test_what_an_item_lacks_is_zero_in_whatever_order_it_comes() -> None:
    kept = stacked()
    for seed in (None, 3):
        x, y = whole(Shard.of(Channels(kept, PRESENT), range(6)), seed=seed)
        assert torch.equal(there(x), PRESENT[y])
        assert torch.equal(x, torch.where(PRESENT[y][:, :, None, None], kept.inputs[y], 0.0))
    assert (kept.inputs != 0).all()


def test_channels_are_dropped_in_training_alone_and_one_stays() -> None:
    many, present = stacked(600), PRESENT.repeat(100, 1)
    made = Channels(many, present, 0.5)
    x, y = whole(Shard.of(made, range(600)), seed=1)
    assert (there(x) <= present[y]).all()
    assert there(x).any(1).all()
    assert (
        0.45 < there(x)[present[y].all(1)].float().mean() < 0.62
    )  # 1/2, and of one in eight a third that stays
    again, _ = whole(Shard.of(made, range(600)), seed=1)
    assert torch.equal(again, x)
    for still in (
        whole(Shard.of(made, range(600)))[0],
        whole(Shard.of(made, range(600)).deterministic(), seed=1)[0],
    ):
        assert there(still).sum() == present.sum()


def test_without_a_chance_nothing_is_drawn() -> None:
    """The order of a run that drops nothing is that of one in which all have everything."""
    plain, all_there = (
        Shard.of(stacked(), range(6)),
        Shard.of(Channels(stacked(), PRESENT | True), range(6)),
    )
    for ours, other in zip(whole(all_there, seed=5), whole(plain, seed=5), strict=True):
        assert torch.equal(ours, other)


def test_images_with_other_channels_are_refused() -> None:
    with pytest.raises(InputError, match=r"images of shape \(4, 2, 4, 4\) with --site-channels"):
        whole(Shard.of(Channels(stacked(channels=2), PRESENT), range(6)))
