"""The same runs on a GPU: near the CPU's weights, resumable, with any method, eager or compiled.

Needs a CUDA device (`-m gpu`). Sums of many threads come in any order there: two runs agree to `NEAR`, not to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medfl import datasets, federate
from medfl.storage.files import load_weights
from medfl.training import site
from medfl.training.accelerate.precision import tf32
from tests.support.toy import CLASSIFYING

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SGD = {
    "_target_": "torch.optim.SGD",
    "params": "$@network_def.parameters()",
    "lr": "@learning_rate",
}
SMALL = {
    "g_start": 1,
    "g_every": 1,
    "g_iterations": 2,
    "g_batch": 8,
    "synthetic_batch": 4,
    "normalise": "half",
}
NEAR = {"rtol": 0.02, "atol": 0.02}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedbm": SMALL,
    "pfedbayes": {"optimizer": "run", "zeta": 0.1},
}


@pytest.fixture(scope="module")
def chest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        datasets.write_phantom(
            "pneumonia", tmp_path_factory.mktemp("chest") / "data", per_class=24, size=32
        )
    )


def run(
    chest: str,
    out: Path,
    method: str,
    device: str,
    rounds: int = 2,
    amp: bool = False,
    **changes: Any,
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
        torch.testing.assert_close(
            device[name], value, **NEAR, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold", "feddyn", "ditto", "feddc", "fednova", "fedproc", "fedbm"]
)
def test_states_come_back_to_the_gpu_after_a_resume(
    method: str, chest: str, tmp_path: Path
) -> None:
    run(chest, tmp_path / "run", method, "cuda", 1)
    federate(out=tmp_path / "run", resume=True, requested={"rounds": 3})
    assert all(
        torch.isfinite(value).all()
        for value in load_weights(tmp_path / "run" / "weights.safetensors").values()
    )


@pytest.mark.parametrize("amp", [False, True])
def test_a_recorded_run_repeats_nearly(amp: bool, chest: str, tmp_path: Path) -> None:
    weights = run(chest, tmp_path / "run", "fedavg", "cuda", amp=amp)
    federate(source=tmp_path / "run" / "run.json", out=tmp_path / "again")
    again = load_weights(tmp_path / "again" / "weights.safetensors")
    for name, value in weights.items():
        torch.testing.assert_close(again[name], value, **NEAR)


# Compiled networks


LONGER = {"local_epochs": 3, "batch_size": 4}


@pytest.mark.parametrize("amp", [False, True])
def test_compiled_rounds_are_near_eager_ones(amp: bool, chest: str, tmp_path: Path) -> None:
    eager = run(chest, tmp_path / "eager", "fedavg", "cuda", 1, amp, **LONGER)
    compiled = run(chest, tmp_path / "compiled", "fedavg", "cuda", 1, amp, compile=True, **LONGER)
    assert any(not torch.equal(compiled[name], value) for name, value in eager.items())
    for name, value in eager.items():
        torch.testing.assert_close(
            compiled[name], value, **NEAR, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("method", CLASSIFYING)
def test_any_method_trains_with_compiled_networks(method: str, chest: str, tmp_path: Path) -> None:
    weights = run(chest, tmp_path / "run", method, "cuda", 2, compile=True)
    assert all(torch.isfinite(value).all() for value in weights.values())


# How numbers are computed, and how much memory


def products() -> dict[str, float]:
    """Return the largest relative error of a matrix product and of a convolution, against float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(256, 256, generator=generator).to("cuda") for _ in range(2))
    x, k = (
        torch.rand(4, 32, 32, 32, generator=generator).cuda(),
        torch.rand(32, 32, 3, 3, generator=generator).cuda(),
    )
    pairs = {"matmul": (a @ b, a.double() @ b.double())}
    pairs["conv"] = (nn.functional.conv2d(x, k), nn.functional.conv2d(x.double(), k.double()))
    return {
        name: float(((near - exact) / exact).abs().max()) for name, (near, exact) in pairs.items()
    }


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
    make = site.training_step

    def noted(*arguments: Any) -> Any:
        seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
        return make(*arguments)

    monkeypatch.setattr(site, "training_step", noted)
    run(chest, tmp_path / "plain", "fedavg", "cuda", 1)
    assert set(seen) == {(False, False)}
    seen.clear()
    run(chest, tmp_path / "tf32", "fedavg", "cuda", 1, tf32=True)
    assert set(seen) == {(True, True)}
