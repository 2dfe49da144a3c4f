"""benchmarks/gpu.py as far as it needs no GPU: what it refuses, its rows, and that it times replays."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recorder import Recorder, installed


@pytest.fixture(autouse=True)
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    return installed(monkeypatch)


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
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
    monkeypatch.setattr(module, "SKIPPED", 4)
    return module


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Any:
    return loaded("gpu_packing", monkeypatch)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "cpu"], "error: --device cpu, .*; captured steps are measured on a GPU; run this where .*"),
        (["--methods", "fedavg,nosuch"], "error: --methods nosuch; methods are ccvr, .*"),
        (["--sizes", "28,x"], "error: --sizes 28,x; numbers of pixels.*"),
        (["--steps", "3"], "error: --steps 3; at least 20.*"),
    ],
)
def test_the_benchmark_refuses_in_a_line(
    arguments: list[str], text: str, benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    assert benchmark.main() == 2
    printed = capsys.readouterr()
    assert re.fullmatch(text + "\n", printed.err)
    assert printed.out == ""


def test_the_benchmark_makes_rows_of_measurements(benchmark: Any) -> None:
    """200 steps in 1, 2 and 1 s against 8 s each: 8, 4 and 8 times; kernels of 4 ms a step allow 250 steps a second."""

    def clock(seconds: float, kernels: float = 0.0) -> Any:
        return benchmark.Clock(steps=200, seconds=seconds, kernels=kernels, replayed=197)

    pairs = [[clock(seconds), clock(8.0)] for seconds in (1.0, 2.0, 1.0)]
    made = benchmark.row("fedavg", pairs, clock(1.0, 0.8), "cuda")
    assert (made["name"], made["ratio"], made["ratio_min"], made["ratio_max"]) == ("gpu/fedavg", 8, 4, 8)
    assert (made["steps_per_second"], made["steps_per_second_eager"]) == (200, 25)
    assert made["floor_steps_per_second"] == pytest.approx(250)
    assert made["part_of_the_floor"] == pytest.approx(0.8)
    line = "200.0 steps/s, 8.00 x eager (min 4.00, max 8.00), 80% of the floor"
    assert benchmark.told(made).endswith(line)
    assert benchmark.told({**made, "eager_because": "it counts"}).endswith("; not captured: it counts")
    json.dumps([made])


@pytest.mark.parametrize(("method", "replays"), [("fedavg", 11), ("ditto", 22), ("proxyfl", 11), ("pfedbayes", 0)])
def test_the_benchmark_times_replays(method: str, replays: int, benchmark: Any, recorders: list[Recorder]) -> None:
    """12 steps a visit, verdicts known from the visits before; Ditto has two of them, pFedBayes draws by itself."""
    options = benchmark.parser().parse_args(
        ["--device", "cpu", "--network", "small_cnn", "--batch", "2", "--steps", "12", "--repeats", "1"]
    )
    made = benchmark.of_method(method, 28, options)
    assert made["name"] == f"gpu/{method} small_cnn 28 pixels batch 2"
    assert made["replayed"] == replays
    assert bool(made["eager_because"]) == (replays == 0)
    assert made["part_of_the_floor"] is None, "no kernels of a GPU"
    assert len(benchmark.told(made).splitlines()) == 1


def test_the_benchmark_has_volumes(benchmark: Any) -> None:
    options = benchmark.parser().parse_args(["--device", "cpu", "--steps", "6", "--repeats", "1"])
    made = benchmark.of_volumes(options, cube=16)
    assert made["images_per_second"] == 2 * made["steps_per_second"]
    assert made["images_per_second_eager"] == 2 * made["steps_per_second_eager"]
    assert made["replayed"] > 0


# gpu_packing.py


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "cpu"], "error: --device cpu, .*; packed steps are measured on a GPU; run this where .*"),
        (["--sites", "2,0"], "error: --sites 2,0; whole numbers above 0.*"),
        (["--sizes", "big"], "error: --sizes big; whole numbers above 0.*"),
    ],
)
def test_the_benchmark_of_packing_refuses_in_a_line(
    arguments: list[str], text: str, packing: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_packing.py", *arguments])
    assert packing.main() == 2
    assert re.fullmatch(text + "\n", capsys.readouterr().err)


def test_the_benchmark_of_packing_times_each_way(packing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SHORT", 6)
    arguments = ["--device", "cpu", "--network", "small_cnn", "--batch", "2", "--steps", "8", "--repeats", "1"]
    made = packing.rows(2, 28, packing.parser().parse_args(arguments))
    assert [row["name"].rpartition("2 sites ")[2] for row in made] == list(packing.WAYS)
    for row in made:
        assert row["site_steps_per_second"] == pytest.approx(row["ratio"] * row["site_steps_per_second_eager"])
        assert "x eager" in packing.told(row)
    json.dumps(made)
    assert packing.told({"name": "pack/a", "refused": "it draws"}) == "pack/a: cannot be had: it draws"
