"""What a replay would get wrong is seen beforehand, and runs eagerly: same bits, a reason, no replay."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from medfl.core.seeding import stream
from medfl.training.accelerate import capture
from medfl.training.accelerate.capture import capture_steps, visit_obstacle
from medfl.training.accelerate.replayable import ReachableState, StorageIds
from medfl.training.network_pool import Networks
from tests.support.graph_recorder import Arguments, Recorder, compared, installed, make, of, trained
from tests.support.toy import (
    adam,
    classifier,
    cross_entropy,
)


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    return installed(monkeypatch)


def _counting(model: nn.Module) -> dict[str, Any]:
    taken = 0

    def objective(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nonlocal taken
        taken += 1
        return cross_entropy(network(x), y) * (2 if taken > 6 else 1)

    return {"objective": objective}


def _collecting(model: nn.Module) -> dict[str, Any]:
    seen: list[Tensor] = []
    return {"gradient_hook": lambda parameters: seen.append(parameters[0].grad)}


def _iterating(model: nn.Module) -> dict[str, Any]:
    steps = itertools.count(1)
    return {"objective": lambda net, x, y: cross_entropy(net(x), y) / next(steps)}


def _hidden(model: nn.Module) -> dict[str, Any]:
    parts = iter([1.0] * 100)
    return {"objective": lambda net, x, y: cross_entropy(net(x), y) * next(parts)}


def _drawing_itself(model: nn.Module) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(1)
    return {"objective": lambda net, x, y: cross_entropy(net(x) + torch.rand(1, generator=draws), y)}


def _keeping(model: nn.Module) -> dict[str, Any]:
    kept: dict[str, Tensor] = {}

    def objective(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = network(x)
        loss = cross_entropy(output, y) + 0.1 * kept.get("last", output.detach()).mean()
        kept["last"] = output.detach().clone()
        return loss

    return {"objective": objective}


def _attribute(model: Any) -> dict[str, Any]:
    model.age = 0

    def hook(parameters: Any) -> None:
        model.age += 1

    return {"gradient_hook": hook}


COUNT = 0


def _global(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return cross_entropy(network(x), y)


def _seeding(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with stream(3, "always the same"):
        return cross_entropy(network(x), y)


def _branching(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(network(x), y)
    return loss * 2 if loss > 1 else loss


def _masking(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = network(x)
    return cross_entropy(output, y) + output[y == 1].sum()


def _fresh(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(network(x) + torch.from_numpy(np.ones(3, np.float32)), y)


def _python_draw(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(network(x), y) * random.choice([1, 1])


def _numpy_draw(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(network(x), y) * (1 + 0 * np.random.rand())  # noqa: NPY002


REMEMBERS = "remembers something"
REFUSED: dict[str, tuple[Arguments, str]] = {
    "a counter": (_counting, REMEMBERS),
    "a list": (_collecting, REMEMBERS),
    "count()": (_iterating, REMEMBERS),
    "a tensor kept": (_keeping, REMEMBERS),
    "an attribute": (_attribute, REMEMBERS),
    "a global": (of(_global), REMEMBERS),
    "Python's draws": (of(_python_draw), REMEMBERS),
    "NumPy's draws": (of(_numpy_draw), REMEMBERS),
    "an iterator": (_hidden, "list_iterator, which cannot be looked into"),
    "a generator": (_drawing_itself, "draws from a generator of its own"),
    "a seed": (of(_seeding), "seeded within the step"),
    "a number read": (of(_branching), "reads a number back"),
    "a mask": (of(_masking), "chooses by a mask"),
    "a new tensor": (of(_fresh), "differ in what they do"),
}


@pytest.mark.parametrize(("arguments", "why"), REFUSED.values(), ids=REFUSED)
def test_what_a_replay_would_get_wrong_runs_eagerly(arguments: Arguments, why: str) -> None:
    report = compared(make(), arguments)
    assert report.replayed == 0
    assert why in report.eager_reason


def test_an_optimiser_that_reads_its_counter_runs_eagerly() -> None:
    report = compared(make(optimizer=adam(0.01)))
    assert (report.replayed, report.eager_reason) == (0, "aten::_local_scalar_dense reads a number back")


def test_a_learning_rate_that_changes_within_the_visit_runs_eagerly() -> None:
    site = make().site("a")
    report = compared(make(), site=replace(site, settings=replace(site.settings, epoch_factor=0.5)))
    assert (report.replayed, report.eager_reason) == (0, "the learning rate changes within a visit")


def test_scaled_gradients_are_an_obstacle() -> None:
    site = make().site("a")
    on_gpu = replace(site, networks=Networks(classifier(), 0, torch.device("cuda")))
    with_amp = [replace(one, settings=replace(one.settings, amp=True)) for one in (site, on_gpu)]
    assert [bool(visit_obstacle(one)) for one in (site, on_gpu, *with_amp)] == [False, False, False, True]
    assert "float16" in visit_obstacle(with_amp[1])


def test_steps_that_somebody_listens_to_run_eagerly() -> None:
    heard: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: heard.append(1))
    try:
        report = compared(make())
    finally:
        handle.remove()
    assert report.replayed == 0
    assert "--profile" in report.eager_reason
    assert len(heard) == 30


def test_without_leave_nothing_is_captured(recorders: list[Recorder]) -> None:
    with capture_steps(), capture_steps(False):
        report, _ = trained(make(), False, lambda model: {}, None)
    assert (report.replayed, report.eager_reason, recorders) == (0, "", [])


@pytest.mark.parametrize("arguments", [_counting, _iterating, _keeping], ids=["counter", "count()", "tensor"])
def test_without_the_verdict_it_would_be_wrong(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder is no better than a graph: what is refused above comes out wrong if it is replayed."""

    class Blind(capture.Verdicts):
        def get(self, key: object) -> capture.Verdict:
            return capture.Verdict("")

    _, eager = trained(make(), False, arguments, None)
    monkeypatch.setattr(capture, "_VERDICTS", Blind())
    report, captured = trained(make(), True, arguments, None)
    assert report.replayed > 0
    assert captured != eager


def test_values_of_tensors_are_nobodys_memory() -> None:
    network, storages, cpu = classifier(norm=True)(), StorageIds(), torch.device("cpu")

    def look(*inputs: Tensor) -> ReachableState:
        return ReachableState(network, inputs, storages, cpu)

    before = look()
    with torch.no_grad():
        network[0].weight.add_(1)
    assert look().state == before.state
    network.eval()
    assert look().state != before.state
    assert look().signature != before.signature
    network.train()
    network[0].weight = nn.Parameter(network[0].weight.detach().clone())
    assert look().state != before.state
    assert look().signature == before.signature
