"""Every method with captured steps, a recorder in the graph's place: the bits of eager steps, and what is captured.

All visits of a method are captured, at the sites and at the server, apart from those in the two tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medfl import methods
from medfl.core.task import Task
from medfl.data.prepared import Shard, Stacked
from medfl.data.public import Public
from medfl.training.accelerate import capture
from medfl.training.accelerate.capture import capture_steps
from tests.support.graph_recorder import Recorder, installed
from tests.support.sweeps import mostly_slow
from tests.support.toy import WITHOUT_IMAGES, Toy, bits, blobs, classifier, cross_entropy, public_blobs, sgd, simulate

OPTIONS: dict[str, dict[str, Any]] = {
    **WITHOUT_IMAGES,
    "ccvr": {"virtual": 10, "calibration_batch": 4},
    "fccl": {"public_epochs": 2, "public_batch_size": 2},
    "fedgh": {"server_epochs": 2},
    "fedkemf": {"server_epochs": 2, "server_batch_size": 2},
    "fedmd": {"digest_epochs": 2, "digest_batch_size": 2},
}
"""With steps on public data and at the server that are enough of them for a capture."""

SPARSE = "it has a tensor without plain memory (a sparse one)"
OWN = "draws from a generator of its own"
SEEDED = "draws from a generator that is seeded within the step"

LIMITS: dict[str, tuple[str, int]] = {
    "fedhelp": (SPARSE, 2),  # small sites: the teachers' shares alpha of each public item are trained by SparseAdam
    "pfedbayes": (OWN, 4),  # noise is drawn in each pass, and the optimiser of w_i steps once in K steps only
}
"""Method -> why visits are eager, and how many of the four that two sites make in two rounds."""

WITH_DROPOUT: dict[str, tuple[str, int]] = {
    "fedhelp": (SEEDED, 4),  # the proxy's and the public pass
    "fedkemf": (SEEDED, 4),  # the knowledge network's pass; the server's distillation is captured
    "pfedbayes": LIMITS["pfedbayes"],
    "perfedavg": (SEEDED, 4),  # the inner step
    "proxyfl": (SEEDED, 4),  # the proxy's pass
}
"""The same where networks draw in each pass: those beside the trained one do so from streams of their own."""

MORE: list[tuple[str, dict[str, Any]]] = [
    ("fedhelp", {"alpha": "uniform"}),
    ("fedhelp", {"alpha": "uniform", "public_bn": "separate", "temperature": 2.0}),
    ("fedhelp", {"lambda_r": 0.0, "public_schedule": "full", "schedule": "alternate"}),
    ("fedkemf", {"lam": 0.0, "public_bn": "no_track"}),
    ("fedtype", {"lam_b": 0.0}),
    ("perfedavg", {"order": "hessian_free", "alpha": 0.1}),
    ("pfedme", {"inner_steps": 3, "eta": 0.05, "beta": 0.5}),
    ("proxyfl", {"alpha": 0.0}),
]
"""Other ways through a step, all of them captured."""


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    return installed(monkeypatch)


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[capture.StepRunner]]:
    """Collect all visits."""
    made: list[capture.StepRunner] = []
    begin = capture.StepRunner.__init__

    def noted(self: capture.StepRunner, *arguments: Any) -> None:
        made.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(capture.StepRunner, "__init__", noted)
    return made


def federation(dropout: float, seed: int = 0) -> Toy:
    network, public = classifier(norm=True, dropout=dropout), public_blobs(12)
    optimizer, data = sgd(0.1, momentum=0.9, weight_decay=0.01), blobs({"a": 13, "b": 11})
    return Toy(data, network, cross_entropy, optimizer, epochs=3, batch_size=2, seed=seed, public=public)


def obstacles(
    name: str, options: Mapping[str, Any], dropout: float, visits: list[capture.StepRunner]
) -> tuple[list[str], int]:
    """Compare two rounds with captured steps and without; return why visits were eager, and how many were not."""
    method = methods.load(name, {**OPTIONS.get(name, {}), **options})

    def run() -> Any:
        outcome = simulate(method, federation(dropout).adapted(method), 2)
        return bits([outcome.server, outcome.states, outcome.replies])

    eager = run()
    visits.clear()
    with capture_steps():
        assert run() == eager
    return [visit.eager_reason for visit in visits if visit.eager_reason], sum(visit.replayed > 0 for visit in visits)


@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["silent", "dropout"])
@pytest.mark.parametrize("name", mostly_slow(methods.names()))
def test_each_method_gives_the_same_bits(name: str, dropout: float, visits: list[capture.StepRunner]) -> None:
    why, captured = obstacles(name, {}, dropout, visits)
    told, count = (WITH_DROPOUT if dropout else LIMITS).get(name, ("", 0))
    assert len(why) == count
    assert all(told in each for each in why)
    assert captured or count == 4


@pytest.mark.parametrize(("name", "options"), MORE)
def test_other_ways_through_a_step_are_captured(
    name: str, options: Mapping[str, Any], visits: list[capture.StepRunner]
) -> None:
    why, captured = obstacles(name, options, 0.0, visits)
    assert not why
    assert captured >= 4


SERVED = [
    ("fedhelp", {"alpha": "uniform"}, [17, 14]),
    ("fedtype", {}, [5] * 6 + [4] * 6),
    ("perfedavg", {}, [17, 14]),
    ("pfedme", {}, [89, 74]),
    ("proxyfl", {}, [17, 14]),
]


@pytest.mark.parametrize(("name", "options", "replayed"), SERVED)
def test_one_recording_serves_other_draws(
    name: str, options: Mapping[str, Any], replayed: list[int], visits: list[capture.StepRunner]
) -> None:
    """Seeds, counts and draws are none of the numbers in a recording: later visits replay all but their first step."""
    method = methods.load(name, {**OPTIONS.get(name, {}), **options})
    with capture_steps():
        for seed in (0, 1):
            visits.clear()
            simulate(method, federation(0.0, seed).adapted(method))
    assert [visit.replayed for visit in visits] == replayed


def coloured(count: int, seed: int, channels: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, channels, 8, 8, generator=generator), torch.arange(count) % 3


def network() -> nn.Module:
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *pooled)


def test_grey_public_images_are_captured_where_sites_have_coloured_ones(visits: list[capture.StepRunner]) -> None:
    """Their channels are one in memory; in a recording they are three."""
    x, y = coloured(12, 0, channels=1)
    shard = Shard.of(Stacked([{"id": f"{i}"} for i in range(12)], x, y), range(12))
    answers = tuple(torch.full((12, 3), 1 / 3) for _ in range(2))
    public = Public("grey", shard, Task("classification", ("k", "l", "m")), answers, channels=3)
    data = {"a": coloured(9, 1), "b": coloured(11, 2)}
    toy = Toy(data, network, cross_entropy, sgd(0.1), epochs=3, batch_size=2, public=public)
    method = methods.load("fedhelp", large="a", alpha="uniform")
    eager = simulate(method, toy)
    visits.clear()
    with capture_steps():
        assert bits(simulate(method, toy).replies) == bits(eager.replies)
    assert [(visit.eager_reason, visit.replayed > 0) for visit in visits] == [("", True), ("", True)]
