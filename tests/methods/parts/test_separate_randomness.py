"""Streams of their own for what goes on beside a network's training, and none for what draws nothing."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from medfl.core.seeding import stream
from medfl.methods._parts.separate_randomness import SeparateRandomness
from tests.support.toy import Toy, blobs

SITE = Toy(blobs({"a": 3})).site("a")


def blocks(aside: SeparateRandomness, count: int) -> list[float]:
    """What so many blocks draw."""
    found = []
    for _ in range(count):
        with aside():
            found.append(torch.rand(1).item())
    return found


def drawn(purpose: str, step: int) -> float:
    with stream(SITE.seed, purpose, step):
        return torch.rand(1).item()


def test_each_block_has_a_stream_of_its_own() -> None:
    assert blocks(SeparateRandomness(SITE, "some"), 3) == [
        drawn("some", step) for step in (0, 1, 2)
    ]
    assert blocks(SeparateRandomness(SITE, "some", first=1, each=2), 4) == [
        drawn("some", step) for step in (1, 1, 2, 2)
    ]


def test_what_is_drawn_outside_stays() -> None:
    with stream(0, "outside"):
        torch.rand(1)
        expected = torch.rand(1).item()
    aside = SeparateRandomness(SITE, "some")
    with stream(0, "outside"):
        torch.rand(1)
        blocks(aside, 3)
        assert torch.rand(1).item() == expected


def test_what_draws_nothing_is_not_seeded_after_its_first_block() -> None:
    aside = SeparateRandomness(SITE, "some")
    with stream(0, "outside"):
        seeds = []
        for _ in range(3):
            with aside():
                seeds.append(torch.initial_seed())
        assert seeds[0] != torch.initial_seed()
        assert seeds[1:] == [torch.initial_seed()] * 2


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1), lambda: np.random.rand(), random.random],  # noqa: NPY002
    ids=["torch", "NumPy", "Python"],
)
def test_all_generators_count_as_drawing(draw: Callable[[], object]) -> None:
    aside = SeparateRandomness(SITE, "some")
    with aside():
        draw()
    assert blocks(aside, 1) == [drawn("some", 1)]


def test_a_block_that_fails_puts_the_generators_back() -> None:
    with stream(0, "outside"):
        seed = torch.initial_seed()
        with pytest.raises(ValueError, match="no"), SeparateRandomness(SITE, "some")():
            raise ValueError("no")
        assert torch.initial_seed() == seed
