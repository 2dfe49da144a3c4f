"""The same runs on a GPU: near the CPU's weights, resumable, with any method, eager or captured.

Needs a CUDA device (`-m gpu`). Sums of many threads come in any order there: two runs agree to `NEAR`, not to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medfl import datasets, federate
from medfl.core.gpu_memory import GIB, Gpu, is_out_of_memory
from medfl.runtimes import simulator
from medfl.storage.files import load_weights
from medfl.training.accelerate import capture as capturing
from medfl.training.accelerate.capture import capture_steps
from medfl.training.accelerate.pack_sites import ALONE, BESIDE, GROUPED, Packer
from medfl.training.accelerate.precision import tf32
from medfl.training.loop import FitReport, fit
from medfl.training.network_pool import Networks
from medfl.training.site import snapshot
from tests.support.toy import CLASSIFYING, Optimizer, Toy, adam, blobs, classifier, cross_entropy, sgd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SGD = {"_target_": "torch.optim.SGD", "params": "$@network_def.parameters()", "lr": "@learning_rate"}
SMALL = {"g_start": 1, "g_every": 1, "g_iterations": 2, "g_batch": 8, "synthetic_batch": 4, "normalise": "half"}
NEAR = {"rtol": 0.02, "atol": 0.02}
OPTIONS: dict[str, dict[str, Any]] = {"fedbm": SMALL, "pfedbayes": {"optimizer": "run", "zeta": 0.1}}


@pytest.fixture(scope="module")
def chest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(datasets.write_phantom("pneumonia", tmp_path_factory.mktemp("chest") / "data", per_class=24, size=32))


def run(
    chest: str, out: Path, method: str, device: str, rounds: int = 2, amp: bool = False, **changes: Any
) -> dict[str, Tensor]:
    federate(
        "pneumonia",
        options=OPTIONS.get(method, {}),
        config={"network": "resnet20", "image_size": 32, "optimizer": SGD},
        requested={
            "method": method, "data": chest, "sites": 3, "partition": "iid", "rounds": rounds, "local_epochs": 1,
            "batch_size": 8, "lr": 0.01, "device": device, "amp": amp, **changes,
        },
        jobs=1,
        out=out,
    )  # fmt: skip
    return load_weights(out / "weights.safetensors")


@pytest.mark.parametrize("method", CLASSIFYING)
def test_one_round_is_near_the_cpus(method: str, chest: str, tmp_path: Path) -> None:
    host, device = (run(chest, tmp_path / kind, method, kind, 1) for kind in ("cpu", "cuda"))
    assert host.keys() == device.keys()
    for name, value in host.items():
        torch.testing.assert_close(device[name], value, **NEAR, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "feddyn", "ditto", "feddc", "fednova", "fedproc", "fedbm"])
def test_states_come_back_to_the_gpu_after_a_resume(method: str, chest: str, tmp_path: Path) -> None:
    run(chest, tmp_path / "run", method, "cuda", 1)
    federate(out=tmp_path / "run", resume=True, requested={"rounds": 3})
    assert all(torch.isfinite(value).all() for value in load_weights(tmp_path / "run" / "weights.safetensors").values())


@pytest.mark.parametrize("amp", [False, True])
def test_a_recorded_run_repeats_nearly(amp: bool, chest: str, tmp_path: Path) -> None:
    weights = run(chest, tmp_path / "run", "fedavg", "cuda", amp=amp)
    federate(source=tmp_path / "run" / "run.json", out=tmp_path / "again")
    again = load_weights(tmp_path / "again" / "weights.safetensors")
    for name, value in weights.items():
        torch.testing.assert_close(again[name], value, **NEAR)


# Captured steps


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[capturing.StepRunner]]:
    """Let short visits be captured, and collect them all."""
    made: list[capturing.StepRunner] = []
    begin = capturing.StepRunner.__init__

    def noted(self: capturing.StepRunner, *arguments: Any) -> None:
        made.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(capturing.StepRunner, "__init__", noted)
    monkeypatch.setattr(capturing, "MIN_STEPS", 5)
    monkeypatch.setattr(capturing, "_FAILED", {})
    return made


LONGER = {"local_epochs": 3, "batch_size": 4}


@pytest.mark.parametrize("method", CLASSIFYING)
def test_a_captured_round_is_near_an_eager_one(
    method: str, chest: str, tmp_path: Path, visits: list[capturing.StepRunner]
) -> None:
    eager = run(chest, tmp_path / "eager", method, "cuda", 1, **LONGER)
    visits.clear()
    with capture_steps():
        captured = run(chest, tmp_path / "captured", method, "cuda", 1, **LONGER)
    assert any(visit.replayed or visit.eager_reason for visit in visits)
    assert not [visit.eager_reason for visit in visits if "a capture failed" in visit.eager_reason]
    for name, value in eager.items():
        torch.testing.assert_close(captured[name], value, **NEAR, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "ditto", "feddyn", "fednova", "moon"])
def test_most_methods_are_captured(method: str, chest: str, tmp_path: Path, visits: list[capturing.StepRunner]) -> None:
    with capture_steps():
        run(chest, tmp_path / "run", method, "cuda", **LONGER)
    assert all(visit.replayed for visit in visits)


def test_the_final_metric_is_within_the_noise_of_seeds(
    chest: str, tmp_path: Path, visits: list[capturing.StepRunner]
) -> None:
    found: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(3):
        for capture in found:
            with capture_steps(capture):
                out = tmp_path / f"{seed}-{capture}"
                run(chest, out, "fedavg", "cuda", 4, seed=seed, **LONGER)
            summary = json.loads((out / "summary.json").read_text())
            found[capture].append(summary["last"]["balanced_accuracy"])
    assert any(visit.replayed for visit in visits)
    assert abs(mean(found[True]) - mean(found[False])) <= max(0.05, stdev(found[False]))


@pytest.mark.parametrize("way", [ALONE, BESIDE, GROUPED])
def test_packed_sites_are_near_those_one_by_one(
    way: str, chest: str, tmp_path: Path, visits: list[capturing.StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = run(chest, tmp_path / "eager", "fedavg", "cuda", 1, **LONGER)
    visits.clear()
    monkeypatch.setattr(simulator, "Packer", partial(Packer, ways=[way]))
    packed = run(chest, tmp_path / "packed", "fedavg", "cuda", 1, pack=3, **LONGER)
    assert all(visit.replayed for visit in visits)
    assert [choice["way"] for choice in json.loads((tmp_path / "packed" / "run.json").read_text())["packed"]] == [way]
    for name, value in eager.items():
        torch.testing.assert_close(packed[name], value, **NEAR, msg=lambda text, name=name: f"{name}: {text}")


def test_the_way_of_packing_is_measured_and_recorded(
    chest: str, tmp_path: Path, visits: list[capturing.StepRunner]
) -> None:
    run(chest, tmp_path / "run", "scaffold", "cuda", 2, pack=3, **LONGER)
    (choice,) = json.loads((tmp_path / "run" / "run.json").read_text())["packed"]
    assert choice["refused"] == {}
    assert choice["way"] == min(choice["seconds"], key=choice["seconds"].get)
    assert all(visit.replayed for visit in visits)


@pytest.mark.parametrize("method", ["fedavg", "central", "feddyn"])
def test_a_resumed_run_with_captures_is_near_an_unbroken_one(
    method: str, chest: str, tmp_path: Path, visits: list[capturing.StepRunner]
) -> None:
    with capture_steps():
        whole = run(chest, tmp_path / "whole", method, "cuda", 3, **LONGER)
        run(chest, tmp_path / "broken", method, "cuda", 1, **LONGER)
        federate(out=tmp_path / "broken", resume=True, requested={"rounds": 3}, jobs=1)
    assert any(visit.replayed for visit in visits)
    for name, value in load_weights(tmp_path / "broken" / "weights.safetensors").items():
        torch.testing.assert_close(whole[name], value, **NEAR)


def compared(toy: Toy, objective: Any = None) -> tuple[FitReport, FitReport]:
    """Train one site of a toy federation on the GPU, eagerly and with captures, and compare the weights."""
    networks = Networks(toy.network, 0, torch.device("cuda"))
    reports, weights = [], []
    for capture in (False, True):
        site = replace(toy.site("a"), networks=networks)
        model = site.model(networks.initial)
        with capture_steps(capture):
            reports.append(fit(model, site, objective=objective, optimizer_state={}))
        weights.append(snapshot(model))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-3, atol=1e-4)
    eager, captured = reports
    assert captured.loss == pytest.approx(eager.loss, rel=1e-3)
    return eager, captured


@pytest.mark.parametrize("items", [16, 18, 17])
@pytest.mark.parametrize("optimizer", [sgd(0.1, momentum=0.9, weight_decay=0.01), adam(0.01)], ids=["sgd", "adam"])
def test_dropout_momentum_and_short_batches_are_those_of_eager_steps(
    optimizer: Optimizer, items: int, visits: list[capturing.StepRunner]
) -> None:
    network = classifier(norm=True, dropout=0.4)
    _, captured = compared(Toy(blobs({"a": items}), network, cross_entropy, optimizer, epochs=3, batch_size=4))
    assert captured.replayed >= 9
    assert captured.eager_reason == ""


def test_a_capture_that_fails_leaves_the_training_as_it_is(visits: list[capturing.StepRunner]) -> None:
    """Waiting for the GPU amid a step is nothing that an operation tells of, and no capture takes it."""

    def waiting(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return cross_entropy(model(x), y)

    toy = Toy(blobs({"a": 18}), classifier(dropout=0.4), cross_entropy, sgd(0.1), epochs=3, batch_size=4)
    _, failed = compared(toy, waiting)
    assert failed.replayed == 0
    assert failed.eager_reason.startswith("a capture failed")
    assert torch.rand(3, device="cuda").isfinite().all(), "the generator still draws"


def test_compiled_rounds_are_near_eager_ones(chest: str, tmp_path: Path, visits: list[capturing.StepRunner]) -> None:
    eager = run(chest, tmp_path / "eager", "fedavg", "cuda", 1, **LONGER)
    visits.clear()
    compiled = run(chest, tmp_path / "compiled", "fedavg", "cuda", 1, compile=True, **LONGER)
    assert all(visit.replayed for visit in visits)
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, **NEAR, msg=lambda text, name=name: f"{name}: {text}")


# How numbers are computed, and how much memory


def products() -> dict[str, float]:
    """Return the largest relative error of a matrix product and of a convolution, against float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(256, 256, generator=generator).to("cuda") for _ in range(2))
    x, k = torch.rand(4, 32, 32, 32, generator=generator).cuda(), torch.rand(32, 32, 3, 3, generator=generator).cuda()
    pairs = {"matmul": (a @ b, a.double() @ b.double())}
    pairs["conv"] = (nn.functional.conv2d(x, k), nn.functional.conv2d(x.double(), k.double()))
    return {name: float(((near - exact) / exact).abs().max()) for name, (near, exact) in pairs.items()}


def test_products_are_rounded_to_tf32_only_where_that_is_asked_for() -> None:
    """float32 keeps 24 bits of a factor, TF32 11: the errors are about 1e-6 and 1e-4."""
    with tf32(False):
        assert max(products().values()) < 1e-5
    if torch.cuda.get_device_capability() >= (8, 0):
        with tf32(True):
            assert min(products().values()) > 1e-5


def test_a_run_computes_in_float32_unless_it_says_tf32(
    chest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    begin = capturing.StepRunner.__init__

    def noted(self: capturing.StepRunner, *arguments: Any) -> None:
        seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        begin(self, *arguments)

    monkeypatch.setattr(capturing.StepRunner, "__init__", noted)
    run(chest, tmp_path / "plain", "fedavg", "cuda", 1)
    assert set(seen) == {(False, False)}
    seen.clear()
    run(chest, tmp_path / "tf32", "fedavg", "cuda", 1, tf32=True)
    assert set(seen) == {(True, True)}


def test_a_process_is_held_to_its_allowance() -> None:
    """2 GiB, of which 1 GiB is the context's: half a GiB of tensors fits, two do not."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    try:
        assert Gpu("cuda", total, total).limit_process(2 * GIB) == GIB
        torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
        assert is_out_of_memory(caught.value)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
