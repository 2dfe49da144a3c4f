"""Steps of several sites at once: the bits of one after the other where the arithmetic is the same, else near them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medfl import datasets, methods
from medfl.methods import Method
from medfl.networks import build
from medfl.runs.launch import federate
from medfl.runtimes import simulator
from medfl.storage.files import load_weights
from medfl.training.accelerate.capture import capture_steps
from medfl.training.accelerate.interleave import interleave
from medfl.training.accelerate.pack_sites import (
    ALONE,
    BESIDE,
    EAGER,
    GROUPED,
    PackedStep,
    Packer,
    Request,
    StackedMemory,
)
from medfl.training.accelerate.recordings import VisitMemory
from medfl.training.accelerate.vmapped import CannotBeGrouped, CannotBeTraced, GroupedStep, trace_step
from medfl.training.loop import fit
from medfl.training.site import snapshot
from tests.support.graph_recorder import Recorder, installed
from tests.support.sweeps import mostly_slow
from tests.support.toy import (
    WITHOUT_IMAGES,
    Outcome,
    Toy,
    bits,
    blobs,
    classifier,
    cross_entropy,
    public_blobs,
    sgd,
    simulate,
)

SITES = {"a": 22, "b": 17, "c": 9}
"""Items: batches of 4 make five and a rest, four and a rest, two and a rest an epoch."""


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    return installed(monkeypatch)


def toy(**changes: Any) -> Toy:
    settings = {"network": classifier(norm=True), "loss": cross_entropy, "optimizer": sgd(0.1, momentum=0.9)}
    return Toy(blobs(SITES), **{**settings, "batch_size": 4, "epochs": 3, **changes})


def _each(made: Toy, together: Packer, visit: Callable[[str], Any]) -> list[Any]:
    def visiting(name: str) -> Any:
        with made.networks.scope():
            return visit(name)

    with capture_steps():
        return list(interleave((partial(visiting, name) for name in made.names), together.size, together))


def _fitted(made: Toy, name: str, **arguments: Any) -> Any:
    model = made.site(name).model(made.initial)
    report = fit(model, made.site(name), **arguments)
    return [name, bits(snapshot(model)), report.steps, report.loss, report.replayed]


def _alone(made: Toy, **arguments: Any) -> dict[str, Any]:
    found = {}
    for name in made.names:
        with made.networks.scope():
            found[name] = _fitted(made, name, **arguments)[1:4]
    return found


# Operations for several networks


def _step_of(network: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    parameters = [p for p in network.parameters() if p.requires_grad]

    def step(x: Tensor, y: Tensor) -> Tensor:
        for parameter in parameters:
            parameter.grad = None
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def _used(network: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    kept = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return [*network.state_dict(keep_vars=True).values(), *kept]


OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3, nesterov=True),
    "foreach": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.005, eps=0.1, momentum=0.5, foreach=True, capturable=False),
}


@pytest.mark.parametrize(
    ("name", "optimiser"),
    [*(("small_cnn", name) for name in OPTIMISERS), ("resnet20", "foreach")]
    + [pytest.param("resnet20", name, marks=pytest.mark.slow) for name in ("sgd", "rmsprop")],
)
def test_grouped_operations_train_each_network_as_alone(name: str, optimiser: str) -> None:
    """In float64: where a gradient is nearly 0, RMSprop makes a step of any size of the last bits of float32."""
    torch.manual_seed(2)
    network = build(name, 3, 5, 2).double()
    optimizer = OPTIMISERS[optimiser](network.parameters())
    step = _step_of(network, optimizer)
    batches = [(torch.randn(4, 3, 16, 16).double(), torch.randint(5, (4,))) for _ in range(3)]
    step(*batches[0])
    used = _used(network, optimizer)
    start = [[t.detach().clone() if not t.is_floating_point() else t.detach() * f for t in used] for f in (1, 1.1, 0.9)]
    operations = trace_step(step, used, batches[0])
    stacked = [torch.stack(values) for values in zip(*start, strict=True)]
    losses = GroupedStep(operations, 3)(stacked, [torch.stack(part) for part in zip(*batches, strict=True)])
    for place, values in enumerate(start):
        with torch.no_grad():
            for tensor, value in zip(used, values, strict=True):
                tensor.copy_(value)
        loss = step(*batches[place])
        torch.testing.assert_close(losses[place], loss, rtol=1e-10, atol=1e-10)
        for tensor, whole in zip(used, stacked, strict=True):
            torch.testing.assert_close(whole[place], tensor.detach(), rtol=1e-10, atol=1e-10)
    assert not torch.equal(stacked[0][0], stacked[0][1])


def test_lists_of_tensors_are_taken_as_a_whole_where_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an optimiser on a GPU takes them: the last factors are one number for each tensor, so these go one by one."""
    weights, factors = [torch.ones(2, 3), torch.ones(3)], [torch.tensor(2.0), torch.tensor(3.0)]

    def step(x: Tensor) -> Tensor:
        torch._foreach_add_(weights, 1.0)
        torch._foreach_addcmul_(weights, weights, weights, 0.5)
        torch._foreach_mul_(weights, factors)
        torch._foreach_mul_(weights, torch.tensor(2.0))
        return x.sum()

    operations = trace_step(step, [*weights, *factors], [torch.zeros(1)])
    for tensor in weights:
        tensor.fill_(1.0)
    one_by_one: list[str] = []
    inner = GroupedStep._each
    monkeypatch.setattr(
        GroupedStep, "_each", lambda self, name, *rest: one_by_one.append(name) or inner(self, name, *rest)
    )
    start = [torch.stack([tensor, 3 * tensor]) for tensor in (*weights, *factors)]
    losses = GroupedStep(operations, 2)(start, [torch.zeros(2, 1)])
    assert losses.tolist() == [0, 0]
    assert one_by_one == ["mul_", "mul_"]
    step(torch.zeros(1))
    for tensor, whole in zip(weights, start, strict=False):
        assert torch.equal(whole[0], tensor)
    for tensor, factor in zip(weights, factors, strict=True):
        tensor.fill_(3.0)
        factor.mul_(3.0)
    step(torch.zeros(1))
    for tensor, whole in zip(weights, start, strict=False):
        assert torch.equal(whole[1], tensor)


def test_a_step_that_draws_cannot_be_grouped() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    step = _step_of(network, torch.optim.SGD(network.parameters(), 0.1))
    with pytest.raises(CannotBeTraced, match="draws random numbers"):
        trace_step(step, list(network.parameters()), [torch.randn(3, 4), torch.randint(4, (3,))])


def test_running_statistics_that_would_not_be_updated_are_refused() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    step, batch = _step_of(network, optimizer), [torch.randn(3, 4), torch.randint(4, (3,))]
    used = _used(network, optimizer)
    operations = trace_step(step, used, batch)
    apart = [torch.stack([t.detach()] * 2, -1).movedim(-1, 0) for t in used]
    with pytest.raises(CannotBeGrouped, match="running statistics"):
        GroupedStep(operations, 2)(apart, [torch.stack([part] * 2) for part in batch])


def test_a_step_with_a_tensor_that_nobody_names_cannot_be_grouped() -> None:
    network, hidden = nn.Linear(4, 4), torch.ones(4)
    optimizer = torch.optim.SGD(network.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        network.zero_grad()
        loss = nn.functional.cross_entropy(network(x) * hidden, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    with pytest.raises(CannotBeTraced, match="not seen from outside"):
        trace_step(step, list(network.parameters()), [torch.randn(3, 4), torch.randint(4, (3,))])


# Memory


def test_rows_lie_apart_and_share_memory_as_the_home_does() -> None:
    whole = torch.arange(12.0)
    home = VisitMemory([whole[:6].view(2, 3), whole[4:], torch.tensor(7)])
    rows = StackedMemory(home, 3)
    assert [tuple(tensor.shape) for tensor in rows.stacked] == [(3, 2, 3), (3, 8), (3,)]
    rows.stacked[0][1] += 100  # the values 0 to 5 of the second row
    assert rows.stacked[1][:, :3].tolist() == [[4, 5, 6], [104, 105, 6], [4, 5, 6]]
    rows.store(1, home)
    assert whole.tolist() == [100, 101, 102, 103, 104, 105, *range(6, 12)]
    whole.zero_()
    rows.load(2, home)
    assert rows.stacked[1][2].tolist() == [0.0] * 8
    assert rows.stacked[2].tolist() == [7, 7, 7]


# Visits


@pytest.mark.parametrize("way", [ALONE, BESIDE])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_sites_together_give_the_bits_of_sites_one_by_one(way: str, size: int) -> None:
    expected, together = _alone(toy()), Packer(size, ways=[way])
    found = _each(toy(), together, partial(_fitted, toy()))
    assert {name: rest[:3] for name, *rest in found} == expected
    assert all(rest[3] > 0 for _, *rest in found)
    assert [choice.way for choice in together.choices] == [way]


def test_grouped_sites_are_near_sites_one_by_one() -> None:
    def trained(name: str) -> tuple[str, dict[str, Tensor], int]:
        model = made.site(name).model(made.initial)
        report = fit(model, made.site(name))
        return name, snapshot(model), report.replayed

    made, together = toy(), Packer(3, ways=[GROUPED])
    found = {name: (weights, replayed) for name, weights, replayed in _each(made, together, trained)}
    assert [choice.way for choice in together.choices] == [GROUPED]
    assert not together.choices[0].refused
    for name in made.names:
        with made.networks.scope():
            _, weights, _ = trained(name)
            assert found[name][1] > 0
            for key, value in weights.items():
                torch.testing.assert_close(found[name][0][key], value, rtol=1e-4, atol=1e-5)


def test_steps_that_draw_are_not_done_together() -> None:
    made = toy(network=classifier(norm=True, dropout=0.4))
    expected, together = _alone(made), Packer(3)
    found = _each(made, together, partial(_fitted, made))
    assert {name: rest[:3] for name, *rest in found} == expected
    assert not together.choices
    assert all(rest[3] > 0 for _, *rest in found)  # each by replays of its own


def test_a_hook_and_a_feed_work_together_too() -> None:
    def shrinking(parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    arguments: dict[str, Any] = {"gradient_hook": shrinking, "feed": lambda x, y: (x * 2, y)}
    expected, together = _alone(toy(), **arguments), Packer(3, ways=[BESIDE])
    found = _each(toy(), together, partial(_fitted, toy(), **arguments))
    assert {name: rest[:3] for name, *rest in found} == expected
    assert together.choices


def test_a_loss_that_is_no_number_names_its_site_and_step() -> None:
    made = toy()
    x, _ = made.data["b"]
    x[:] = float("nan")
    together = Packer(3, ways=[BESIDE])
    with pytest.raises(Exception, match="site 'b', round 1: the training loss is nan at step 1"):
        _each(made, together, partial(_fitted, made))


def test_what_cannot_be_recorded_is_done_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Recorder, step: Any) -> Tensor:
        raise RuntimeError("no graph\nat all")

    expected = _alone(toy())
    monkeypatch.setattr(Recorder, "capture", broken)
    together = Packer(3)
    found = _each(toy(), together, partial(_fitted, toy()))
    assert {name: rest[:3] for name, *rest in found} == expected
    (choice,) = together.choices
    assert choice.way == EAGER
    assert {rest[3] for _, *rest in found} == {0}
    assert choice.refused == {ALONE: "no graph", BESIDE: "no graph", GROUPED: "no graph"}


def _clock(seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], float]:
    """A clock by which a replay of each way takes so long."""
    now, order = [0.0], iter([ALONE, BESIDE, GROUPED])
    ways: dict[int, str] = {}
    inner_capture, inner_replay = Recorder.capture, Recorder.replay

    def capture(self: Recorder, step: Any) -> Tensor:
        ways[id(self)] = next(order)
        return inner_capture(self, step)

    def replay(self: Recorder) -> None:
        now[0] += seconds[ways[id(self)]]
        inner_replay(self)

    monkeypatch.setattr(Recorder, "capture", capture)
    monkeypatch.setattr(Recorder, "replay", replay)
    return lambda _: now[0]


@pytest.mark.parametrize(
    ("seconds", "way"),
    [
        ({ALONE: 1, BESIDE: 2, GROUPED: 2.5}, BESIDE),
        ({ALONE: 1, BESIDE: 2, GROUPED: 1.5}, GROUPED),
        ({ALONE: 1, BESIDE: 3.5, GROUPED: 4}, ALONE),
    ],
)
def test_the_fastest_way_is_taken(seconds: dict[str, float], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = Packer(3, _clock(seconds, monkeypatch))
    _each(toy(), together, partial(_fitted, toy()))
    (choice,) = together.choices
    assert choice.way == way
    assert choice.seconds == pytest.approx({**seconds, ALONE: 3 * seconds[ALONE]})
    assert f"steps of 3 sites {way}" in str(choice)
    assert "one after the other 3000.00 ms" in str(choice)


def test_few_sites_are_done_one_by_one_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack of three in 2.5 s is faster than three steps of 1 s, slower than the two that are left."""
    together = Packer(3, _clock({ALONE: 1, BESIDE: 2.5, GROUPED: 9}, monkeypatch))
    done: list[int] = []
    inner = PackedStep.serve

    def noted_serve(self: PackedStep, requests: Sequence[Request]) -> None:
        done.append(len(requests))
        inner(self, requests)

    monkeypatch.setattr(PackedStep, "serve", noted_serve)
    found = _each(toy(), together, partial(_fitted, toy()))
    assert {name: rest[:3] for name, *rest in found} == _alone(toy())
    assert done
    assert set(done) == {3}


# Methods


def _abreast(method: Method, made: Toy, rounds: int, together: Packer) -> Outcome:
    """Run both halves of a method as `simulate` does, its sites abreast."""
    names = ["central"] if method.pools_data else made.names
    with made.networks.scope():
        introductions = {name: method.introduce(made.site(name, 0)) for name in names}
        server = method.init_server(made.host(0), made.networks.initial, introductions)
    outcome = Outcome(server, {}, {}, {}, [server])
    for round_ in range(1, rounds + 1):
        with made.networks.scope():
            outcome.down = {name: method.broadcast(made.host(round_), outcome.server, name) for name in names}

        def visit(name: str, round_: int = round_) -> tuple[str, Any, Any]:
            with made.networks.scope():
                site = made.site(name, round_)
                state = outcome.states.get(name)
                state = method.init_site(site) if state is None else state
                return name, *method.local_update(site, state, outcome.down[name])

        with capture_steps():
            for name, state, reply in interleave((partial(visit, name) for name in names), together.size, together):
                outcome.states[name], outcome.replies[name] = state, reply
        with made.networks.scope(), capture_steps():
            ordered = {name: outcome.replies[name] for name in names}
            outcome.server = method.aggregate(made.host(round_), outcome.server, ordered, len(names))
    return outcome


@pytest.mark.parametrize("name", mostly_slow(methods.names()))
def test_each_method_gives_the_same_bits_beside_others(name: str) -> None:
    method = methods.load(name, WITHOUT_IMAGES.get(name, {}))
    made = toy(public=public_blobs(classes=3), epochs=2)

    def found(outcome: Outcome) -> Any:
        return bits([outcome.server, outcome.states, outcome.replies])

    expected = found(simulate(method, replace(made).adapted(method), 2))
    assert found(_abreast(method, replace(made).adapted(method), 2, Packer(3, ways=[BESIDE]))) == expected


# Runs

SGD = {"_target_": "torch.optim.SGD", "params": "$@network_def.parameters()", "lr": "@learning_rate"}
"""Adam on the CPU counts its steps there and reads them back."""


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom("mednist", tmp_path_factory.mktemp("scans") / "data", per_class=14, size=16)


@pytest.mark.parametrize("way", [BESIDE, GROUPED])
def test_a_run_packs_its_sites_and_says_how(
    way: str, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, **more: Any) -> tuple[dict[str, Tensor], list[str]]:
        requested = {"data": str(scans), "partition": "iid", "sites": 3, "rounds": 2, "batch_size": 2, **more}
        config = {"network": "small_cnn", "image_size": 16, "optimizer": SGD}
        said: list[str] = []
        federate("mednist", config=config, requested=requested, out=tmp_path / name, jobs=1, say=said.append)
        return load_weights(tmp_path / name / "weights.safetensors"), said

    plain, _ = run("plain")
    monkeypatch.setattr(simulator, "Packer", partial(Packer, ways=[way]))
    packed, said = run("packed", pack=2)
    record = json.loads((tmp_path / "packed" / "run.json").read_text())
    assert record["pack"] == 2
    assert [(choice["sites"], choice["way"]) for choice in record["packed"]] == [(2, way)]
    assert any(line.startswith(f"note: steps of 2 sites {way}") for line in said)
    for name, value in plain.items():
        if way == BESIDE:
            assert torch.equal(packed[name], value)
        else:
            torch.testing.assert_close(packed[name], value, rtol=1e-3, atol=1e-5)
    assert "packed" not in json.loads((tmp_path / "plain" / "run.json").read_text())


def test_learning_rates_that_decay_make_a_step_of_their_own() -> None:
    made, together = toy(lr_decay=0.5), Packer(3, ways=[BESIDE])
    rates = []
    for round_ in (1, 2):
        site = made.site("a", round_)
        rates.append(site.learning_rate(site.model(made.initial)))

        def visit(name: str, round_: int = round_) -> Any:
            model = made.site(name, round_).model(made.initial)
            return fit(model, made.site(name, round_))

        _each(made, together, visit)
    assert rates == [0.1, 0.05]
    assert len(together.choices) == 1, "measured once"
    assert len(together._groups) == 2, "in the toy the rate is a number"
    assert {group.choice.way for group in together._groups.values()} == {BESIDE}


def test_only_so_many_groups_keep_their_memory() -> None:
    made, together = toy(lr_decay=0.5), Packer(3, ways=[ALONE, BESIDE])
    for round_ in range(1, 8):

        def visit(name: str, round_: int = round_) -> Any:
            with_rate = made.site(name, round_)
            model = with_rate.model(made.initial)
            report = fit(model, with_rate)
            return [name, bits(snapshot(model)), report.steps, report.loss]

        expected = []
        for name in made.names:
            with made.networks.scope():
                expected.append(visit(name))
        assert sorted(_each(made, together, visit), key=lambda each: str(each[0])) == expected
    assert len(together._groups) == 4
    assert len(together.choices) == 1
