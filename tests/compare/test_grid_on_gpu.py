"""Grids of runs on a GPU, pretended: nothing of CUDA in the process that forks, and a share of the memory for each.

The runs themselves are made on the CPU; of CUDA there are the few functions that are asked for memory.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from medfl import datasets
from medfl.cli import verbs as cli
from medfl.compare import checks
from medfl.core import gpu_memory
from medfl.core.errors import InputError, RunError
from medfl.core.gpu_memory import (
    CONTEXT_BYTES,
    GIB,
    Gpu,
    in_forked_process,
    is_out_of_memory,
    peak_memory,
    without_cuda_init,
)
from medfl.runs import plan as planning
from medfl.runs.launch import Shared, federate
from medfl.runtimes.launch import Launch

SMALL = (
    "--config", "network=small_cnn", "--config", "image_size=16", "--sites", "2", "--rounds", "2", "--local-epochs",
    "1", "--batch-size", "8", "--partition", "iid", "--eval-every", "2",
)  # fmt: skip
TOTAL, FREE = 100 * GIB, 98 * GIB
NEED = {"fedavg": 20 * GIB, "fedprox": 30 * GIB}
"""What a run of a method takes of the device."""


@pytest.fixture(autouse=True)
def unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process have asked whether there is a GPU, which forbids CUDA in its forks."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom("mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=16)


@dataclass
class Pretended:
    """What the runs on the pretended GPU saw: (method, seed, bytes of tensors allowed, bytes told free, resumed)."""

    seen: Path
    need: dict[str, int]

    @property
    def runs(self) -> list[tuple[Any, ...]]:
        return [tuple(json.loads(line)) for line in self.seen.read_text().splitlines()]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pretended:
    """Let there be a GPU, and fail where the test's own process initialises CUDA."""
    parent, made, bound = os.getpid(), Pretended(tmp_path / "seen.jsonl", dict(NEED)), dict[str, int]()

    def elsewhere(answer: Any) -> Callable[..., Any]:
        def function(*_: Any, **__: Any) -> Any:
            assert os.getpid() != parent, "CUDA is initialised in the process that forks"
            return answer

        return function

    def bind(fraction: float, device: int) -> None:
        assert os.getpid() != parent
        assert device == 0
        bound["tensors"] = round(fraction * TOTAL)

    for name in ("_cuda_init", "_cuda_getDeviceCount"):
        monkeypatch.setattr(torch._C, name, elsewhere(1))
    monkeypatch.setattr(torch.cuda, "_lazy_init", elsewhere(None))
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", elsewhere((FREE, TOTAL)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", elsewhere(0))
    monkeypatch.setattr(torch.cuda, "memory_allocated", elsewhere(0))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", bind)

    def federate_on_cpu(
        *arguments: Any, requested: dict[str, Any], shared: Shared, launch: Launch, **named: Any
    ) -> None:
        """Do on the CPU what is asked of the GPU; where that does not fit, the first round only."""
        method, seed, allowed = requested["method"], requested["seed"], bound["tensors"]
        free = shared.free(torch.device("cuda")) if shared.free else None
        monkeypatch.undo()  # in this process, which now goes on without a GPU
        with made.seen.open("a") as file:
            print(json.dumps([method, seed, allowed, free, launch.resume]), file=file)
        assert requested["device"] in ("cuda", "auto")
        short = allowed < made.need[method]
        record = launch.folder / "run.json"
        if record.is_file():
            record.write_text(json.dumps({**json.loads(record.read_text()), "device": "cpu"}))
        settings = {**requested, "device": "cpu", **({"rounds": 1} if short else {})}
        federate(*arguments, requested=settings, shared=shared, launch=launch, **named)
        record.write_text(json.dumps({**json.loads(record.read_text()), "device": "cuda"}))
        summary = launch.folder / "summary.json"
        if short:
            summary.unlink()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        told = {**json.loads(summary.read_text()), "peak_device_bytes": made.need[method] + CONTEXT_BYTES}
        summary.write_text(json.dumps(told))

    monkeypatch.setattr(importlib.import_module("medfl.compare.grid"), "federate", federate_on_cpu)
    return made


def go(scans: Path, out: Path, *arguments: str, device: str = "cuda") -> int:
    return cli.main(
        ["compare", "mednist", "--data", str(scans), "--out", str(out), *SMALL, "--device", device, *arguments]
    )


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "note: " not in line]


def limit(need: int) -> int:
    """Return the bytes of tensors in the allowance of a run whose kind needs so many."""
    return int(1.1 * (need + CONTEXT_BYTES)) - CONTEXT_BYTES


# A grid


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_grid_leaves_cuda_to_its_runs(
    gpu: Pretended, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    out, grid = tmp_path / "grid", ("--methods", "fedavg,fedprox", "--jobs", "3")
    assert go(scans, out, *grid, "--seeds", "0,1", device=device) == 0
    lines = said(capsys)
    assert [line for line in lines if line.startswith("alone")] == [
        f"alone on the device, to see how much memory it takes: {method} on iid, seed 0"
        for method in ("fedavg", "fedprox")
    ]
    (told,) = [line for line in lines if line.startswith("peaks: ")]
    assert told == "peaks: fedavg on iid 21.0 GiB, fedprox on iid 31.0 GiB; up to 3 runs at a time on 98.0 GiB"
    assert lines.index(told) == lines.index(next(line for line in lines if "done: fedprox on iid, seed 0" in line)) + 1
    assert gpu.runs[:2] == [("fedavg", 0, FREE, None, False), ("fedprox", 0, FREE, None, False)]
    assert sorted(gpu.runs[2:]) == [
        (method, 1, pytest.approx(limit(need), abs=2), pytest.approx(2 * limit(need), abs=4), False)
        for method, need in sorted(NEED.items())
    ]
    gpu.seen.unlink()
    assert go(scans, out, *grid, "--seeds", "0,1,2", device=device) == 0
    assert not [line for line in said(capsys) if line.startswith("alone")], "runs that are over have told"
    assert sorted(run[:2] for run in gpu.runs) == [("fedavg", 2), ("fedprox", 2)]
    assert {run[2] for run in gpu.runs}.isdisjoint({FREE})


@pytest.mark.slow
def test_a_run_that_runs_out_of_its_share_goes_on_alone(
    gpu: Pretended, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, grid = tmp_path / "grid", ("--methods", "fedavg")
    assert go(scans, out, *grid, "--seeds", "0") == 0
    gpu.need["fedavg"] = 50 * GIB  # another seed's partition has a larger site
    gpu.seen.unlink()
    capsys.readouterr()
    assert go(scans, out, *grid, "--seeds", "0,1") == 0
    short, whole = gpu.runs
    assert (short[1], short[4]) == (1, False)
    assert whole == ("fedavg", 1, FREE, None, True)
    assert (
        "fedavg on iid, seed 1: out of the device's memory, given 23.1 GiB of 98.0 GiB; "
        "once more from its last round, alone on the device"
    ) in said(capsys)
    folder = out / "iid" / "fedavg" / "seed-1"
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 2
    assert [json.loads(line)["round"] for line in (folder / "rounds.jsonl").read_text().splitlines()] == [1, 2]
    assert not folder.with_name("seed-1-failed.txt").exists()


def test_a_run_that_runs_out_of_the_whole_device_has_failed(
    gpu: Pretended, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.need["fedavg"] = 200 * GIB
    assert go(scans, tmp_path / "grid", "--methods", "fedavg", "--seeds", "0") == 1
    assert len(gpu.runs) == 1
    assert "FAILED: fedavg on iid, seed 0: out of the device's memory, given 98.0 GiB of 98.0 GiB" in said(capsys)


def test_a_device_that_is_not_there_is_refused(
    gpu: Pretended, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert go(scans, tmp_path / "grid", "--methods", "fedavg", "--seeds", "0", device="cuda:4") == 2
    assert "error: --device cuda:4; this machine has 1 CUDA devices; choose cpu or auto" in capsys.readouterr().err
    assert not (tmp_path / "grid").exists()


def test_a_process_that_has_used_cuda_is_refused(
    gpu: Pretended, scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert go(scans, tmp_path / "grid", "--methods", "fedavg", "--seeds", "0") == 2
    assert "error: a comparison on a GPU from a process that has used CUDA; " in capsys.readouterr().err
    assert not (tmp_path / "grid").exists()


def test_what_is_planned_as_on_a_cpu_is_compared_as_on_the_gpu(
    gpu: Pretended, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, module = "PYTORCH_NVML_BASED_CUDA_CHECK", importlib.import_module("medfl.compare.grid")
    monkeypatch.delenv(name, raising=False)
    planned: list[tuple[str, str | None]] = []
    compared: list[str] = []

    def plan(request: planning.Request) -> planning.Plan:
        planned.append((request.device, os.environ.get(name)))
        return planning.make_plan(request)

    monkeypatch.setattr(module, "make_plan", plan)
    monkeypatch.setattr(checks, "check_same_source_and_bundle", lambda run, there: compared.append(run.device))
    assert go(scans, tmp_path / "grid", "--methods", "fedavg", "--seeds", "0") == 0
    assert planned == [("cpu", "1")]
    assert compared == ["cuda"]
    assert name not in os.environ


# The device


def test_what_is_called_apart_is_called_in_another_process() -> None:
    assert in_forked_process(os.getpid) != os.getpid()


def test_an_error_apart_is_raised_here() -> None:
    def refuse() -> None:
        raise InputError("this", "that", "do so")

    def fail() -> None:
        raise RuntimeError("no driver")

    with pytest.raises(InputError, match="this; that; do so"):
        in_forked_process(refuse)
    with pytest.raises(RunError, match="cannot be asked: RuntimeError: no driver"):
        in_forked_process(fail)
    with pytest.raises(RunError, match="ended with 5"):
        in_forked_process(lambda: os._exit(5))


@pytest.mark.parametrize("before", [None, "0"])
def test_whether_there_is_a_gpu_is_asked_of_nvml(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with without_cuda_init():
        assert os.environ[name] == "1"
    assert os.environ.get(name) == before


def test_a_process_is_bound_to_its_allowance_without_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: bound.append(given))
    shared = Gpu("cuda:1", TOTAL, FREE)
    assert shared.limit_process(26 * GIB) == 25 * GIB
    assert shared.limit_process(FREE) == FREE
    assert shared.limit_process(CONTEXT_BYTES // 2) == 0
    assert bound == [(0.25, 1), (0.98, 1), (0.0, 1)]


def test_the_peak_is_what_the_allocator_reserved_and_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * GIB if device == 1 else GIB)
    assert peak_memory("cuda:1") == {"peak_device_bytes": 3 * GIB + CONTEXT_BYTES}
    assert peak_memory("cuda") == {"peak_device_bytes": GIB + CONTEXT_BYTES}
    assert peak_memory("cpu") == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert peak_memory("cuda") == {}, "the work was done in other processes"


def test_a_run_leaves_its_peak_in_its_summary(scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "peak_memory", lambda device: {"peak_device_bytes": len(device)})
    out = tmp_path / "run"
    assert cli.main(["run", "mednist", "--data", str(scans), "--out", str(out), *SMALL, "--rounds", "1"]) == 0
    assert json.loads((out / "summary.json").read_text())["peak_device_bytes"] == len("cpu")


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("whatever it says"), True),
        (caused(InputError("a step fails", "it goes", "lower lr"), torch.OutOfMemoryError("no")), True),
        (RunError("site 'a': OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), False),
        (MemoryError("out of memory"), False),
        (RunError("site 'a': NaN"), False),
    ],
)
def test_what_is_caused_by_a_full_device(error: BaseException, found: bool) -> None:
    assert is_out_of_memory(error) is found


def test_a_run_on_a_cpu_is_asked_for_no_device(
    scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: Any) -> None:
        raise AssertionError("a device was asked for")

    monkeypatch.setattr(gpu_memory, "in_forked_process", asked)
    assert go(scans, tmp_path / "grid", "--methods", "fedavg", "--seeds", "0", "--rounds", "1", device="cpu") == 0
    assert not [line for line in said(capsys) if "peaks" in line or "alone" in line]
    summary = json.loads((tmp_path / "grid" / "iid" / "fedavg" / "seed-0" / "summary.json").read_text())
    assert "peak_device_bytes" not in summary
