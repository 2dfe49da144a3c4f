"""Public items: positions, batches, colours, volumes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public, cycle, recoloured
from tests.support.toy import public_blobs


def test_positions_name_the_same_item_everywhere() -> None:
    public = public_blobs(10)
    later = replace(public, shard=Shard(public.shard.prepared, torch.tensor([7, 2, 5])))
    x, y = later.at(torch.tensor([2, 0]))
    whole, labels = public.at(torch.tensor([5, 7]))
    assert torch.equal(x, whole)
    assert torch.equal(y, labels)
    assert len(later) == 3


def test_batches_visit_every_item_once() -> None:
    public = public_blobs(10)
    for generator in (None, torch.Generator().manual_seed(0)):
        seen = torch.cat([positions for positions, _, _ in public.batches(4, generator)])
        assert sorted(seen.tolist()) == list(range(10))
    assert seen.tolist() != list(range(10))
    for positions, x, _ in public.batches(4, torch.Generator().manual_seed(1)):
        assert torch.equal(x, public.at(positions)[0])


def test_answers_come_in_single_precision() -> None:
    public = public_blobs(10)
    half = replace(public, answers=tuple(answer.half() for answer in public.answers))
    told = half.answered(torch.tensor([3, 1]))
    assert told.shape == (2, 2, 4)
    assert told.dtype == torch.float32


def test_a_cycle_visits_all_before_it_repeats_one() -> None:
    take = cycle(5, torch.Generator().manual_seed(0))
    taken = torch.cat([take(3), take(4), take(3)]).tolist()
    assert sorted(taken[:5]) == sorted(taken[5:]) == list(range(5))
    assert len(cycle(2, torch.Generator().manual_seed(0))(7)) == 7


def test_colours_become_grey_by_luma_and_grey_is_repeated() -> None:
    x = torch.rand(2, 3, 4, 4)
    grey = recoloured(x, 1)
    torch.testing.assert_close(grey[:, 0], 0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2])
    assert torch.equal(recoloured(grey, 3)[:, 2], grey[:, 0])
    items = Stacked([{"id": "a"}, {"id": "b"}], x, torch.zeros(2, dtype=torch.int64))
    public = Public("colours", Shard.of(items, [0, 1]), Task(), channels=1)
    assert public.at(torch.tensor([1]))[0].shape == (1, 1, 4, 4)


def test_flat_images_are_repeated_for_volumes_and_outputs_averaged() -> None:
    public = Public("flat", public_blobs().shard, Task(), depth=4)
    network = nn.Conv3d(1, 2, 3, padding=1)
    x = torch.randn(2, 1, 5, 5)
    volume = x[..., None].repeat(1, 1, 1, 1, 4)
    torch.testing.assert_close(public.outputs(network, x), network(volume).mean(-1))
    logits = torch.randn(2, 3)
    assert public.flat(logits) is logits
