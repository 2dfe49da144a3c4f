"""TF32 is off in a run unless it is asked for, and put back; kernels with their channels last are the same ones."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medfl import datasets, federate
from medfl.core.errors import InputError
from medfl.methods import load
from medfl.methods.fedavg import FedAvg
from medfl.runtimes import simulator
from medfl.runtimes.federation import Federation
from medfl.runtimes.registry import Execution
from medfl.runtimes.simulator import Simulator
from medfl.storage.files import load_weights
from medfl.storage.run_documents import read_run
from medfl.storage.run_folder import RunFolder
from medfl.training.accelerate.precision import tf32, with_channels_last
from tests.support import forked
from tests.support.toy import ToyBundle, run_record


def allowed() -> tuple[bool, bool]:
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Start from what PyTorch itself sets: convolutions may."""
    before = allowed()
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = True, False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("asked", [False, True])
def test_both_settings_hold_inside_the_block_alone(asked: bool) -> None:
    with contextlib.suppress(KeyError), tf32(asked):
        assert allowed() == (asked, asked)
        raise KeyError
    assert allowed() == (True, False)


@pytest.mark.parametrize("asked", [{}, {"tf32": True}])
def test_a_run_trains_without_it_unless_asked(
    asked: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    execute = simulator.Simulator.execute

    def watched(self: simulator.Simulator, *settings: object, **more: object) -> object:
        seen.append(allowed())
        return execute(self, *settings, **more)

    monkeypatch.setattr(simulator.Simulator, "execute", watched)
    chest = str(datasets.write_phantom("pneumonia", tmp_path / "data", per_class=10, size=28))
    requested = {
        "data": chest,
        "sites": 2,
        "partition": "iid",
        "rounds": 1,
        "local_epochs": 1,
        **asked,
    }
    out = tmp_path / "run"
    said: list[str] = []
    federate(
        "pneumonia",
        config={"network": "small_cnn"},
        requested=requested,
        out=out,
        jobs=1,
        say=said.append,
    )
    expected = bool(asked)
    assert ("note: --tf32: of no effect on a CPU" in said) is expected
    assert seen == [(expected, expected)]
    assert allowed() == (True, False)
    run, document = read_run(out / "run.json")
    assert run.tf32 is expected
    assert ("tf32" in document) is expected, "records without it keep their hash"
    federate(out=out, resume=True, requested={"rounds": 2})
    assert seen == [(expected, expected)] * 2, "a run is resumed with its own settings"


NOTES = [
    ({"tf32": True}, ["--tf32: of no effect on a CPU"]),
    (
        {"compile": True},
        ["--compile: the first training steps wait for the compiler, seconds to minutes"],
    ),
]


@pytest.mark.parametrize(("asked", "notes"), NOTES)
def test_what_is_asked_of_the_machine_is_said_and_recorded(
    asked: dict[str, Any], notes: list[str], tmp_path: Path
) -> None:
    chest = str(datasets.write_phantom("pneumonia", tmp_path / "data", per_class=10, size=28))
    requested = {
        "data": chest,
        "sites": 2,
        "rounds": 1,
        "local_epochs": 1,
        "lr_decay": 1.0,
        **asked,
    }
    said: list[str] = []
    federate(
        "pneumonia",
        config={"network": "small_cnn"},
        requested=requested,
        out=tmp_path / "run",
        jobs=1,
        say=said.append,
    )
    assert [line for line in said if line.startswith("note: --")] == [
        f"note: {note}" for note in notes
    ]
    run, document = read_run(tmp_path / "run" / "run.json")
    for name, value in asked.items():
        assert getattr(run, name) == value
        assert document[name] == value


def test_a_run_that_is_compiled_is_not_profiled(tmp_path: Path) -> None:
    """With a profile all steps are eager: the run would give other weights for being looked at."""
    chest = str(datasets.write_phantom("pneumonia", tmp_path / "data", per_class=10, size=28))
    requested = {"data": chest, "sites": 2, "rounds": 1, "compile": True}
    with pytest.raises(InputError, match="--profile with --compile; .*; leave one out"):
        federate("pneumonia", requested=requested, out=tmp_path / "run", profile=True)
    assert not (tmp_path / "run").exists()


def test_a_site_and_the_server_keep_to_it_in_any_process() -> None:
    """A host of MONAI FL or FLARE calls them with settings of its own."""
    seen = []

    class Looking(FedAvg):
        def aggregate(self, *args: object) -> dict[str, object]:
            seen.append(allowed())
            return {}

    for asked in (False, True):
        made = Federation(ToyBundle(), Looking(), run_record(tf32=asked))  # type: ignore[arg-type]
        with made.scope():
            assert allowed() == (asked, asked)
        made.aggregate(1, {}, {})
    assert seen == [(False, False), (True, True)]
    assert allowed() == (True, False)


# Channels last


class Pictures(ToyBundle):
    """The toy's numbers as images (2, 2, 2) for a convolution."""

    def __init__(self) -> None:
        def network() -> nn.Module:
            convolution = nn.Conv2d(2, 4, 2, padding=1)
            return nn.Sequential(
                nn.Unflatten(1, (2, 2, 2)), convolution, nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
            )

        super().__init__(network=network)


def trained(
    out: Path, method: str, **settings: object
) -> tuple[Federation, dict[str, torch.Tensor]]:
    made = Federation(Pictures(), load(method), run_record(method=method, rounds=2, **settings))  # type: ignore[arg-type]
    folder = RunFolder.create(out)
    folder.write_run(made.run, {})
    Simulator(Execution(made, folder)).execute()
    return made, load_weights(out / "weights.safetensors")


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_kernels_with_channels_last_have_the_same_values(method: str, tmp_path: Path) -> None:
    usual, expected = trained(tmp_path / "usual", method)
    other, found = trained(tmp_path / "other", method, channels_last=True)
    network = other.networks.lease(usual.networks.initial)
    assert network[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert not usual.networks.fresh()[1].weight.is_contiguous(memory_format=torch.channels_last)
    for name, value in usual.networks.initial.items():
        assert torch.equal(other.networks.initial[name], value)
    for name, value in expected.items():
        assert found[name].is_contiguous()
        torch.testing.assert_close(found[name], value)


def test_kernels_of_volumes_too() -> None:
    network = nn.Sequential(nn.Conv3d(2, 3, 2), nn.Conv2d(2, 3, 2), nn.Linear(2, 2))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert with_channels_last(network)[0].weight.stride() == (16, 1, 8, 4, 2)
    assert network[1].weight.stride() == (8, 1, 4, 2)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_a_forked_process_computes_with_threads_after_its_parent_has(tmp_path: Path) -> None:
    """Without ending OpenMP's threads first it waits for ever: the runs of a comparison, and workers with --threads."""
    square = torch.ones(600, 600)

    def computed() -> float:
        torch.set_num_threads(2)
        return float((square @ square).relu().sum())

    def parent() -> int:
        expected = computed()
        worker = os.fork()
        if not worker:
            signal.alarm(60)
            os._exit(0 if computed() == expected else 3)
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        return 0 if (code, computed()) == (0, expected) else 1

    process = forked.start(parent, output=tmp_path / "said")
    process.join(120)
    assert process.exitcode == 0, (tmp_path / "said").read_text()
