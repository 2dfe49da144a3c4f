"""benchmarks/gpu.py as far as it needs no GPU: what it refuses, its rows, and that it times what it says."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, f"benchmarks_{name}", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = loaded("gpu", monkeypatch)
    monkeypatch.setattr(module, "EPOCH", 6)
    return module


def tiny(benchmark: Any, *more: str) -> Any:
    arguments = [
        "--device",
        "cpu",
        "--network",
        "small_cnn",
        "--batch",
        "2",
        "--steps",
        "6",
        "--repeats",
        "1",
    ]
    return benchmark.parser().parse_args([*arguments, *more])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "cpu"], "error: --device cpu, .*; steps are measured on a GPU; run this .*"),
        (["--methods", "fedavg,nosuch"], "error: --methods nosuch; methods are asymfedavg, .*"),
        (["--sizes", "28,x"], "error: --sizes 28,x; whole numbers above 0.*"),
        (["--ways", "eager,packed"], "error: --ways eager,packed; eager and compiled, .*"),
        (["--steps", "3"], "error: --steps 3; at least 6, .*"),
    ],
)
def test_the_benchmark_refuses_in_a_line(
    arguments: list[str],
    text: str,
    benchmark: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    assert benchmark.main() == 2
    printed = capsys.readouterr()
    assert re.fullmatch(text + "\n", printed.err)
    assert printed.out == ""


def test_the_benchmark_makes_rows_of_measurements(benchmark: Any) -> None:
    """Steps of 5, 10 and 5 ms against 40 ms each: 8, 4 and 8 times; kernels of 4 ms a step allow 250 steps a second."""
    pairs = [(0.005, 0.04), (0.01, 0.04), (0.005, 0.04)]
    made = benchmark.row("gpu/fedavg compiled", pairs, 0.004, "cuda")
    assert (made["ratio"], made["ratio_min"], made["ratio_max"]) == (8, 4, 8)
    assert (made["steps_per_second"], made["steps_per_second_bare"]) == (200, 25)
    assert made["floor_steps_per_second"] == pytest.approx(250)
    assert made["part_of_the_floor"] == pytest.approx(0.8)
    line = "200.0 steps/s, 8.00 x the bare loop (min 4.00, max 8.00), 80% of the floor"
    assert benchmark.told({**made, "refused": ""}).endswith(line)
    assert benchmark.told({"name": "gpu/a", "refused": "it counts"}).endswith(
        "cannot be had: it counts"
    )
    json.dumps([made])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "way"),
    [("fedavg", "eager"), ("fedavg", "compiled"), ("fedhelp", "eager"), ("pfedbayes", "eager")],
)
def test_the_benchmark_times_each_way(method: str, way: str, benchmark: Any) -> None:
    made = benchmark.of_method(method, 28, way, tiny(benchmark))
    assert made["name"] == f"gpu/{method} small_cnn 28 pixels batch 2 {way}"
    assert made["refused"] == ""
    assert made["part_of_the_floor"] is None, "no kernels of a GPU"
    assert len(benchmark.told(made).splitlines()) == 1


def test_what_a_method_refuses_is_a_row(benchmark: Any) -> None:
    """FedBM's generator makes no images of 28 pixels; rows that are known are not measured again."""
    options = tiny(benchmark, "--methods", "fedbm", "--sizes", "28", "--no-3d")
    known = ["gpu/fedbm small_cnn 28 pixels batch 2 compiled"]
    (made,) = benchmark.rows(options, known)
    assert made["name"].endswith("28 pixels batch 2 eager")
    assert "multiples of 16" in made["refused"]


@pytest.mark.slow
def test_the_benchmark_has_volumes(benchmark: Any) -> None:
    made = benchmark.of_volumes("eager", tiny(benchmark), cube=16)
    assert made["images_per_second"] == 2 * made["steps_per_second"]
    assert made["refused"] == ""
    # On a CPU PyTorch 2.15 leaves gradients of such small volumes in bfloat16 partly unwritten: not a number at times.
    amp = benchmark.of_volumes("eager", tiny(benchmark), cube=32, amp=True)
    assert amp["name"] == "gpu/fedavg 3D U-Net 32 voxels batch 2 amp eager"
