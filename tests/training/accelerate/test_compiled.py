"""Compiled networks: steps near eager ones, the same whatever the process has seen; short batches stay eager."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from medfl import datasets
from medfl.core.errors import RunError
from medfl.runs.launch import federate
from medfl.storage.files import load_weights
from medfl.training.accelerate.compiled import compile_steps
from medfl.training.site import FitReport, fit, snapshot
from tests.support.toy import Toy, bits, blobs, classifier, cross_entropy, sgd

SITES = {"a": 22, "b": 17}
"""Items: batches of 4 make five and a rest of 2, four and a rest of 1, an epoch."""


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the calls of TorchInductor, which are left out: the operations are run as they are."""
    from torch._inductor import compile_fx

    torch._dynamo.reset()
    made: list[int] = []

    def uncompiled(graph: Any, inputs: Any, **_: Any) -> Any:
        made.append(1)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", uncompiled)
    return made


def toy(**changes: Any) -> Toy:
    settings = {
        "network": classifier(norm=True),
        "loss": cross_entropy,
        "optimizer": sgd(0.1, momentum=0.9),
    }
    return Toy(blobs(SITES), **{**settings, "batch_size": 4, "epochs": 3, **changes})


def trained(
    made: Toy, name: str, compiles: bool, **arguments: Any
) -> tuple[FitReport, dict[str, Tensor]]:
    with made.networks.scope(), compile_steps() if compiles else nullcontext():
        model = made.site(name).model(made.initial)
        return fit(model, made.site(name), **arguments), snapshot(model)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_a_compiled_step_trains_as_an_eager_one(dropout: float) -> None:
    """Dropout draws the same numbers."""
    made = toy(network=classifier(norm=True, dropout=dropout))
    eager, weights = trained(made, "a", False)
    report, found = trained(made, "a", True)
    assert report.steps == eager.steps == 18
    assert report.loss == pytest.approx(eager.loss, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_one_compilation_serves_all_sites_and_rounds(compilations: list[int]) -> None:
    made = toy()
    for name in ("a", "b", "a"):
        eager, weights = trained(made, name, False)
        report, found = trained(made, name, True)
        assert (bits(found), report.loss) == (bits(weights), eager.loss)
    assert compilations == [1]


def test_a_site_with_short_batches_alone_stays_eager(compilations: list[int]) -> None:
    trained(toy(batch_size=30), "a", True)
    assert not compilations


def test_the_network_is_eager_again_after_a_step(compilations: list[int]) -> None:
    made = toy()
    with made.networks.scope(), compile_steps():
        model = made.site("a").model(made.initial)
        fit(model, made.site("a"))
        compilations.clear()
        model(torch.zeros(4, *made.data["a"][0].shape[1:]))
    assert not compilations


def test_without_a_compiler_the_run_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    def missing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler\nat all")

    torch._dynamo.reset()
    monkeypatch.setattr(compile_fx, "compile_fx", missing)
    with pytest.raises(
        RunError, match="--compile: .* no C\\+\\+ compiler.*; run it without --compile"
    ):
        trained(toy(), "a", True)


SGD = {
    "_target_": "torch.optim.SGD",
    "params": "$@network_def.parameters()",
    "lr": "@learning_rate",
}


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=14, size=32
    )


@pytest.mark.slow
def test_a_compiled_run_is_the_same_with_workers_clients_and_resumed(
    scans: Path, tmp_path: Path
) -> None:
    def run(
        name: str, jobs: int | None, rounds: int = 2, runtime: str = "simulator", **more: Any
    ) -> dict[str, Tensor]:
        requested = {
            "data": str(scans),
            "partition": "iid",
            "sites": 3,
            "rounds": rounds,
            "batch_size": 4,
            **more,
        }
        config = {"network": "small_cnn", "image_size": 32, "optimizer": SGD}
        federate(
            "mednist",
            config=config,
            requested=requested,
            out=tmp_path / name,
            jobs=jobs,
            runtime=runtime,
        )
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
