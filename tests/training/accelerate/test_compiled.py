"""Compiled steps: near eager ones, the same whatever the process has seen, and eager where they cannot be had."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medfl import datasets
from medfl.runs.launch import federate
from medfl.storage.files import load_weights
from medfl.training.accelerate import capture
from medfl.training.accelerate import compiled as compiling
from medfl.training.loop import FitReport, fit
from medfl.training.site import snapshot
from tests.support.toy import Toy, bits, blobs, classifier, cross_entropy, sgd

SITES = {"a": 22, "b": 17}
"""Items: batches of 4 make five and a rest of 2, four and a rest of 1, an epoch."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forget what other tests found, and return what forgets again."""

    def forget() -> None:
        monkeypatch.setattr(capture, "_VERDICTS", capture.Verdicts())
        monkeypatch.setattr(compiling, "_STEPS", OrderedDict())

    forget()
    return forget


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the compilations, which are left out: the noted operations are run as they are."""
    made: list[int] = []

    def plain(step: Any, tensors: Any, batch: Any) -> Any:
        operations = compiling.trace_step(step, tensors, batch)
        made.append(1)

        def done(tensors: Any, batch: Any) -> Tensor:
            with torch.no_grad():
                loss: Tensor = operations(*[value.detach() for value in (*tensors, *batch)])
            return loss

        return done

    monkeypatch.setattr(compiling, "compile_step", plain)
    return made


def toy(**changes: Any) -> Toy:
    settings = {"network": classifier(norm=True), "loss": cross_entropy, "optimizer": sgd(0.1, momentum=0.9)}
    return Toy(blobs(SITES), **{**settings, "batch_size": 4, "epochs": 3, **changes})


def trained(made: Toy, name: str, compile_: bool, **arguments: Any) -> tuple[FitReport, dict[str, Tensor]]:
    with made.networks.scope():
        model = made.site(name).model(made.initial)
        if not compile_:
            return fit(model, made.site(name), **arguments), snapshot(model)
        with compiling.compile_steps():
            return fit(model, made.site(name), **arguments), snapshot(model)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [sgd(0.1, momentum=0.9), sgd(0.1, weight_decay=0.5), sgd(0.1)])
def test_a_compiled_step_trains_as_an_eager_one(optimizer: Any) -> None:
    made = toy(optimizer=optimizer)
    eager, weights = trained(made, "a", False)
    report, found = trained(made, "a", True)
    assert (report.steps, report.replayed, report.eager_reason) == (18, 14, "")  # all but the first, and the rests
    assert report.loss == pytest.approx(eager.loss, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_optimisers_that_count_are_compiled(kind: Any, counted: list[int]) -> None:
    """On the CPU they read their counters back, but for those who ask; the noted operations give the step's bits."""
    made = toy(optimizer=lambda network: kind(network.parameters(), 0.01, eps=1e-3))
    report, found = trained(made, "a", True)
    assert (report.replayed, report.eager_reason) == (14, "")
    eager, weights = trained(made, "a", False)
    assert report.loss == pytest.approx(eager.loss, rel=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_one_compilation_serves_all_sites_and_rounds(counted: list[int]) -> None:
    made = toy()
    for name in ("a", "b", "a"):
        assert trained(made, name, True)[0].replayed
    assert counted == [1]


RATED = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.02, eps=1e-2),  # or noise about a gradient of 0 makes steps of any sign
    "rmsprop": partial(torch.optim.RMSprop, lr=0.02, eps=1e-2),
}


@pytest.mark.parametrize("kind", RATED)
def test_one_compilation_serves_rounds_with_other_learning_rates(kind: str, counted: list[int]) -> None:
    made = toy(optimizer=lambda network: RATED[kind](network.parameters()), lr_decay=0.5)
    found = []
    for compile_ in (False, True):
        for round_ in (1, 2, 5):
            with made.networks.scope():
                site = made.site("a", round_)
                site = replace(site, settings=replace(site.settings, lr_decay=0.5))
                model = site.model(made.initial)
                with compiling.compile_steps() if compile_ else nullcontext():
                    report = fit(model, site)
                found.append((report, snapshot(model)))
    assert counted == [1]
    for (eager, weights), (report, compiled) in zip(found[:3], found[3:], strict=True):
        assert (report.replayed, report.eager_reason) == (14, "")
        assert report.loss == pytest.approx(eager.loss, rel=1e-3)
        for name, value in weights.items():
            torch.testing.assert_close(compiled[name], value, rtol=1e-2, atol=2e-3)
    first = found[3][1]
    for _, weights in found[4:]:
        assert max((weights[name] - first[name]).abs().max() for name in weights if "weight" in name) > 0.01


def test_the_same_steps_are_compiled_whatever_the_process_has_seen(
    counted: list[int], fresh: Callable[[], None]
) -> None:
    made, found = toy(), []
    for order in (("a", "b"), ("b", "a")):
        fresh()
        results = {name: trained(made, name, True) for name in order}
        found.append({name: (report.replayed, bits(weights)) for name, (report, weights) in sorted(results.items())})
    assert found[0] == found[1]
    assert counted == [1, 1]


def test_noted_operations_give_the_bits_of_the_step(counted: list[int]) -> None:
    """So what is looked at is undone, and nothing of a visit gets lost between eager and compiled steps."""
    made = toy()
    for name in SITES:
        eager, weights = trained(made, name, False)
        report, found = trained(made, name, True)
        assert (bits(found), report.loss, report.steps) == (bits(weights), eager.loss, eager.steps)
        assert report.replayed


def _dropping() -> Toy:
    return toy(network=classifier(norm=True, dropout=0.4))


def _counting(network: nn.Module) -> dict[str, Any]:
    steps = [0]

    def objective(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        steps[0] += 1
        return cross_entropy(model(x), y) * steps[0]

    return {"objective": objective}


def _reading(network: nn.Module) -> dict[str, Any]:
    return {"objective": lambda model, x, y: cross_entropy(model(x), y) * (1 + float(x.sum() > 0))}


EAGER = [
    (_dropping, lambda network: {}, "draws random numbers"),
    (toy, _counting, "remembers something"),
    (toy, _reading, "reads a number back"),
    (lambda: toy(epochs=1, batch_size=10), lambda network: {}, ""),
]


@pytest.mark.parametrize(("make", "arguments", "why"), EAGER, ids=["dropout", "a counter", "a number", "too short"])
def test_what_cannot_be_compiled_is_eager_to_the_bit(
    make: Callable[[], Toy], arguments: Callable[[Any], dict[str, Any]], why: str, counted: list[int]
) -> None:
    made = make()
    for _ in range(2):
        eager, weights = trained(made, "a", False, **arguments(None))
        report, found = trained(made, "a", True, **arguments(None))
        assert (bits(found), report.loss, report.replayed) == (bits(weights), eager.loss, 0)
        assert why in report.eager_reason
    assert not counted


def test_without_a_compiler_steps_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import _inductor

    def missing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler\nat all")

    monkeypatch.setattr(_inductor, "compile", missing)
    made = toy()
    eager, weights = trained(made, "a", False)
    report, found = trained(made, "a", True)
    assert (bits(found), report.loss) == (bits(weights), eager.loss)
    assert report.eager_reason == "it cannot be compiled: RuntimeError: no C++ compiler"


SGD = {"_target_": "torch.optim.SGD", "params": "$@network_def.parameters()", "lr": "@learning_rate"}


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom("mednist", tmp_path_factory.mktemp("scans") / "data", per_class=14, size=32)


@pytest.mark.slow
def test_a_compiled_run_is_the_same_with_workers_clients_and_resumed(scans: Path, tmp_path: Path) -> None:
    def run(name: str, jobs: int | None, rounds: int = 2, runtime: str = "simulator", **more: Any) -> dict[str, Tensor]:
        requested = {"data": str(scans), "partition": "iid", "sites": 3, "rounds": rounds, "batch_size": 4, **more}
        config = {"network": "small_cnn", "image_size": 32, "optimizer": SGD}
        federate("mednist", config=config, requested=requested, out=tmp_path / name, jobs=jobs, runtime=runtime)
        return load_weights(tmp_path / name / "weights.safetensors")

    plain, one, two = run("plain", 1), run("one", 1, compile=True), run("two", 2, compile=True)
    clients = run("clients", None, runtime="monai-fl", compile=True)
    run("broken", 1, 1, compile=True)
    federate(out=tmp_path / "broken", resume=True, requested={"rounds": 2}, jobs=1)
    broken = load_weights(tmp_path / "broken" / "weights.safetensors")
    assert any(not torch.equal(one[name], value) for name, value in plain.items())
    for name, value in plain.items():
        assert torch.equal(one[name], two[name])
        assert torch.equal(one[name], broken[name])
        assert torch.equal(one[name], clients[name])
        torch.testing.assert_close(one[name], value, rtol=1e-3, atol=1e-5)
