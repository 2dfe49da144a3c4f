"""Derived streams: stable, unrelated to the global state, and without effect on it."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch

from medfl.core.seeding import derive, stream

PINNED = (3456079177858693020, 2843754191089344717, 5891121604427942361)


@pytest.mark.parametrize("path", [(0,), (0, "network"), (7, "round", 3, "site-2")])
def test_derived_seeds_are_those_of_the_definition(path: tuple) -> None:
    """SHA-256 of "seed/type:part/...", its first 8 bytes big-endian, less the lowest bit."""
    text = "/".join(
        [str(path[0])] + [("int:" if isinstance(p, int) else "str:") + str(p) for p in path[1:]]
    )
    assert derive(*path) == int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) // 2


def test_derived_seeds_never_change() -> None:
    """A recorded run repeats only if these stay; they were computed once and written down."""
    assert derive(0) == PINNED[0]
    assert derive(0, "network") == PINNED[1]
    assert derive(7, "round", 3, "site-2") == PINNED[2]


def test_paths_are_told_apart() -> None:
    paths = [
        (0,),
        (1,),
        (0, 0),
        (0, "0"),
        (0, 1, 2),
        (0, 12),
        (0, "a", "b"),
        (0, "b", "a"),
        (0, "ab"),
        (10,),
        (1, 0),
    ]
    seeds = {derive(*path) for path in paths}
    assert len(seeds) == len(paths)
    assert all(0 <= seed < 2**63 for seed in seeds)


def draws(generator: torch.Generator) -> list[float]:
    return [
        float(torch.rand((), generator=generator)),
        float(torch.rand(())),
        float(np.random.rand()),  # noqa: NPY002
        random.random(),
    ]


def disturb() -> None:
    torch.rand(5)
    np.random.rand(3)  # noqa: NPY002
    random.random()


def test_a_stream_depends_on_its_path_alone() -> None:
    with stream(3, "a", 1) as generator:
        first = draws(generator)
    disturb()
    with stream(3, "a", 1) as generator:
        assert draws(generator) == first
    with stream(3, "a", 2) as generator:
        assert all(x != y for x, y in zip(draws(generator), first, strict=True))


def global_state() -> list:
    python, numpy_ = random.getstate(), np.random.get_state()  # noqa: NPY002
    return [python, numpy_[1].tolist(), numpy_[2], torch.get_rng_state().tolist()]


def test_global_generators_are_put_back_also_after_an_error() -> None:
    disturb()
    before = global_state()
    with stream(1, "x") as generator:
        draws(generator)
        assert global_state() != before
    assert global_state() == before

    def fail() -> None:
        with stream(1, "x") as generator:
            draws(generator)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert global_state() == before


def test_streams_nest() -> None:
    with stream(1, "outer") as outer:
        whole = [draws(outer), draws(outer)]
    with stream(1, "outer") as outer:
        first = draws(outer)
        with stream(1, "inner") as inner:
            draws(inner)
        assert [first, draws(outer)] == whole
