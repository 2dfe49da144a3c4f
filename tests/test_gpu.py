"""The same runs on a GPU: near the CPU's weights, resumable, with any method. Needs a CUDA device (`-m gpu`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from medfl import datasets, federate
from medfl.methods import names
from medfl.storage import load_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SGD = {"_target_": "torch.optim.SGD", "params": "$@network_def.parameters()", "lr": "@learning_rate"}
SMALL = {"g_start": 1, "g_every": 1, "g_iterations": 2, "g_batch": 8, "synthetic_batch": 4, "normalise": "half"}
OPTIONS: dict[str, dict[str, Any]] = {"fedbm": SMALL, "pfedbayes": {"optimizer": "run", "zeta": 0.1}}


@pytest.fixture(scope="module")
def chest(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(datasets.write_phantom("pneumonia", tmp_path_factory.mktemp("chest") / "data", per_class=24, size=32))


def run(chest: str, out: Path, method: str, device: str, rounds: int = 2, amp: bool = False) -> dict[str, torch.Tensor]:
    federate(
        "pneumonia",
        options=OPTIONS.get(method, {}),
        config={"network": "resnet20", "image_size": 32, "optimizer": SGD},
        requested={
            "method": method, "data": chest, "sites": 3, "partition": "iid", "rounds": rounds, "local_epochs": 1,
            "batch_size": 8, "lr": 0.01, "device": device, "amp": amp,
        },
        out=out,
    )  # fmt: skip
    return load_weights(out / "weights.safetensors")


@pytest.mark.parametrize("method", names())
def test_one_round_is_near_the_cpus(method: str, chest: str, tmp_path: Path) -> None:
    host, device = (run(chest, tmp_path / kind, method, kind, 1) for kind in ("cpu", "cuda"))
    assert host.keys() == device.keys()
    for name, value in host.items():
        torch.testing.assert_close(
            device[name], value, rtol=0.02, atol=0.02, msg=lambda text, name=name: f"{name}: {text}"
        )


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
        torch.testing.assert_close(again[name], value, rtol=0.02, atol=0.02)
