"""Captured steps on the CPU, a recorder in the graph's place: replays give the bits of eager steps, or are not used.

What a replay would get wrong is what the recorder (`tests.support.graph_recorder`) gets wrong too, so these can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medfl.core.seeding import stream
from medfl.training.accelerate import capture as capturing
from medfl.training.accelerate import recordings
from medfl.training.accelerate.capture import capture_steps
from medfl.training.accelerate.cuda_graphs import CudaGraph
from medfl.training.loop import clip, fit, in_turn, pull, push
from medfl.training.site import snapshot
from tests.support.graph_recorder import Arguments, Recorder, compared, installed, make, of, trained
from tests.support.toy import (
    Toy,
    adam,
    bits,
    blobs,
    classifier,
    cross_entropy,
    sgd,
)

OPTIMIZERS = {
    "sgd": sgd(0.1),
    "momentum": sgd(0.1, momentum=0.9),
    "decay": sgd(0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
}


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    return installed(monkeypatch)


# What is captured


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("network", [classifier(), classifier(norm=True, dropout=0.4)], ids=["plain", "norm-dropout"])
def test_replays_give_the_bits_of_eager_steps(optimizer: Any, network: Any) -> None:
    """Of 12 full batches three are warm-ups; the three short ones are eager."""
    report = compared(make(optimizer=optimizer, network=network), lambda model: {"optimizer_state": {}})
    assert (report.steps, report.replayed, report.eager_reason) == (15, 9, "")


def test_a_batch_of_one_image_is_captured() -> None:
    pixels, pooled = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)], [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    generator = torch.Generator().manual_seed(0)
    data = {"a": (torch.randn(6, 1, 8, 8, generator=generator), torch.tensor([0, 1, 2] * 2))}
    network = nn.Sequential(*pixels, *pooled, nn.BatchNorm1d(2), nn.Linear(2, 3))
    toy = Toy(data, lambda: network, cross_entropy, sgd(0.1), batch_size=1, epochs=2)
    assert compared(toy).replayed == 9


def test_a_site_with_fewer_items_than_a_batch_has_one_shape_too() -> None:
    assert compared(make(batch_size=100, epochs=8)).replayed == 5


def test_hooks_are_captured() -> None:
    def arguments(model: nn.Module) -> dict[str, Any]:
        start = snapshot(model)
        terms = {name: torch.full_like(value, 0.01) for name, value in start.items()}
        return {"gradient_hook": in_turn(pull(model, start, 0.3), push(model, terms), clip(0.5))}

    assert compared(make(), arguments).replayed == 9


def test_a_hook_may_add_up_and_put_other_gradients_in_place() -> None:
    totals: list[Tensor] = []

    def arguments(model: nn.Module) -> dict[str, Any]:
        total = torch.zeros_like(next(model.parameters()))
        totals.append(total)

        def hook(parameters: Any) -> None:
            total.add_(parameters[0].grad)
            for parameter in parameters:
                parameter.grad = parameter.grad.sign()

        return {"gradient_hook": hook}

    assert compared(make(), arguments).replayed == 9
    assert bits(totals[0]) == bits(totals[1])


def test_a_step_of_another_shape_may_change_what_the_steps_reach() -> None:
    """Three batches of 4 find the verdict, then a rest of 2 puts a tensor before those that the next steps use.

    The recording that is made after it serves who has such a tensor from the beginning.
    """

    def reaching(before: int) -> Arguments:
        def arguments(model: nn.Module) -> dict[str, Any]:
            reached = [*[torch.zeros(3)] * before, torch.ones(3), torch.full((3,), 2.0)]

            def objective(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
                if len(x) == 2 and len(reached) == 2:
                    reached.insert(0, torch.zeros(3))
                reached[-1].mul_(1.01)
                return cross_entropy(network(x) * reached[-1], y)

            return {"objective": objective}

        return arguments

    toy = Toy(blobs({"a": 14}), classifier(norm=True), cross_entropy, sgd(0.1), batch_size=4, epochs=4)
    for before in (0, 1):
        assert compared(toy, reaching(before)).replayed


def test_a_penalty_is_captured() -> None:
    toy = make()
    site = replace(toy.site("a"), penalty=lambda features, targets: 0.1 * features.square().mean())
    assert compared(toy, site=site).replayed == 9


def test_an_optimiser_goes_on_with_its_state() -> None:
    toy = make(optimizer=sgd(0.1, momentum=0.9))
    first, _ = trained(toy, False, lambda model: {"optimizer_state": {}}, None)
    assert compared(toy, lambda model: {"optimizer_state": first.optimizer_state}).replayed == 9


def test_frozen_parameters_stay() -> None:
    def arguments(model: Any) -> dict[str, Any]:
        model[0].requires_grad_(False)
        return {}

    assert compared(make(), arguments).replayed == 9


def test_mixed_precision_in_bfloat16_is_captured() -> None:
    assert compared(make(amp=True)).replayed == 9


# Failures


class Failing(Recorder):
    """Gives up amid the step, as a graph does at an operation that it does not know."""

    tried = 0

    def capture(self, step: Callable[[], Tensor]) -> Tensor:
        type(self).tried += 1
        raise RuntimeError("operation not permitted when stream is capturing\nmore about it")


def test_a_capture_that_fails_leaves_the_training_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capturing.GRAPHS, "cpu", Failing)
    monkeypatch.setattr(Failing, "tried", 0)
    for _ in range(2):
        report = compared(make(optimizer=sgd(0.1, momentum=0.9)))
        why = "a capture failed: operation not permitted when stream is capturing"
        assert (report.replayed, report.eager_reason) == (0, why)
    assert Failing.tried == 1, "it is not tried again"


def test_batches_without_plain_memory_are_trained_eagerly() -> None:
    def sparse(model: nn.Module) -> Any:
        return {
            "feed": lambda x, y: (x.to_sparse(), y),
            "objective": lambda net, x, y: nn.functional.cross_entropy(net(x.to_dense()), y),
        }

    report = compared(make(), sparse)
    assert (report.replayed, report.eager_reason) == (0, "a batch is not made of plain tensors")


def test_an_error_of_the_step_is_told_as_it_is() -> None:
    def broken(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(network(x), y[:, None, None])

    with pytest.raises((RuntimeError, ValueError)) as eager:
        trained(make(), False, of(broken), None)
    with pytest.raises(eager.type, match=str(eager.value)[:20]):
        trained(make(), True, of(broken), None)


# Verdicts


def replayed(toy: Toy, site: str, round_: int, factor: float = 1.0) -> int:
    there = toy.site(site, round_)
    model = there.model(toy.initial)
    return fit(model, there, objective=lambda net, x, y: factor * there.loss(net(x), y)).replayed


def recorded(recorders: list[Recorder]) -> int:
    return sum(bool(recorder.listener.operations) for recorder in recorders)


def two(**changes: Any) -> Toy:
    """Return two sites of 18 items, as `make` has one."""
    toy = make(**changes)
    toy.data = blobs({"a": 18, "b": 18})
    return toy


def test_one_recording_serves_all_sites_and_rounds_with_the_same_code_and_numbers(recorders: list[Recorder]) -> None:
    """The first visit warms up with three steps of twelve, each later one with one; other numbers ask again."""
    toy = two()
    with capture_steps():
        counts = [replayed(toy, *visit) for visit in (("a", 1), ("b", 1), ("a", 2), ("b", 2, 0.5), ("a", 3))]
    assert counts == [9, 11, 11, 9, 11]
    assert recorded(recorders) == 2


def test_short_visits_are_served_too() -> None:
    """Four steps: the verdict and the recording are found in the first visit, and replayed in the others."""
    toy = two(epochs=1)
    with capture_steps():
        assert [replayed(toy, *visit) for visit in (("a", 1), ("b", 1), ("a", 2))] == [1, 3, 3]


def test_visits_too_short_for_a_verdict_say_so() -> None:
    report = compared(make(epochs=1, batch_size=6))
    assert (report.steps, report.replayed) == (3, 0)
    assert report.eager_reason == "a visit has fewer than 4 steps of the same shape"


def test_short_visits_that_nothing_is_like_are_looked_at_only_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "_MAX_UNSHARED", 2)
    monkeypatch.setattr(capturing, "MIN_STEPS", 20)
    toy = two()
    with capture_steps():
        assert [replayed(toy, "a", 1, factor) for factor in (1.0, 0.5, 0.25)] == [9, 9, 0]
        assert replayed(toy, "a", 2, 0.5) == 11
        assert [replayed(toy, "a", 1, factor) for factor in (0.25, 0.125)] == [9, 0]


def test_a_recording_has_memory_of_its_own() -> None:
    """Two networks change places: what was the teacher's memory in one visit is the student's in the next."""
    toy = two()

    def visits() -> Any:
        there = toy.site("a")
        first, second = there.model(toy.initial), there.model(toy.initial)
        for round_, (student, teacher) in enumerate([(first, second), (second, first), (first, second)]):
            teacher.requires_grad_(False)
            student.requires_grad_(True)

            def objective(net: nn.Module, x: Tensor, y: Tensor, teacher: nn.Module = teacher) -> Tensor:
                with torch.no_grad():
                    wanted = teacher(x)
                return cross_entropy(net(x), y) + (net(x) - wanted).square().mean()

            counts.append(fit(student, toy.site("a", round_), objective=objective).replayed)
        return bits([snapshot(first), snapshot(second)])

    counts: list[int] = []
    eager = visits()
    with capture_steps():
        assert visits() == eager
    assert counts[3:] == [9, 11, 11]


class Tied(nn.Module):
    """Two layers whose weights may lie in the same memory."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        both = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) / 3
        self.one.weight.data = both[:8]
        self.two.weight.data = both[:8] if shared else both[8:].clone()
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(self.one(x)))


def test_a_recording_serves_only_who_shares_memory_in_the_same_way(recorders: list[Recorder]) -> None:
    """Shapes and code are the same, but a step on shared memory writes both weights."""
    toy = make()

    def trained_as(shared: bool) -> tuple[int, Any]:
        torch.manual_seed(0)
        model = Tied(shared)
        report = fit(model, toy.site("a"))
        return report.replayed, bits([snapshot(model)])

    eager = {shared: trained_as(shared)[1] for shared in (False, True)}
    with capture_steps():
        found = [trained_as(shared) for shared in (False, True, False, True)]
    assert [weights for _, weights in found] == [eager[shared] for shared in (False, True, False, True)]
    assert [count for count, _ in found] == [9, 11, 11, 11]
    assert recorded(recorders) == 2


def test_only_so_many_recordings_are_kept(recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_MAX_RECORDINGS", 2)
    toy, factors = two(), [1.0, 2.0, 3.0, 1.0, 3.0]
    with capture_steps():
        for factor in factors:
            replayed(toy, "a", 1, factor)
    assert recorded(recorders) == 4, "the first was gone, the last was not"
    assert len(recordings._RECORDINGS) == 2


# The recorder, and what of the CUDA graph needs no GPU


def test_the_recorder_repeats_operations_and_not_python() -> None:
    x, total, calls = torch.ones(3), torch.zeros(3), []

    def step() -> Tensor:
        calls.append(1)
        total.add_(2 * x.view(3, 1)[:, 0] + len(calls))
        return torch.rand(1) + total.sum()

    recorder = Recorder(torch.device("cpu"))
    with stream(0, "draws") as _:
        loss = recorder.capture(step)
        first = loss.item()
        x.fill_(5)
        recorder.replay()
    with stream(0, "draws") as _:
        drawn = torch.rand(1).item(), torch.rand(1).item()
    assert total.tolist() == [3 + 11] * 3
    assert (first, loss.item()) == pytest.approx((9 + drawn[0], 42 + drawn[1]))
    assert (len(calls), recorder.replays) == (1, 1)


def test_an_optimiser_is_told_to_count_on_the_device() -> None:
    network: Any = classifier()()
    counting, plain = adam(0.1)(network), sgd(0.1)(network)
    for optimizer in (counting, plain):
        CudaGraph.prepare(None, optimizer, False)  # type: ignore[arg-type]  # it needs no graph
    assert [group["capturable"] for group in counting.param_groups] == [True]
    assert "capturable" not in plain.param_groups[0]
