"""Workers are as many as fit in memory, by a measured step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from medfl.data.prepared import Stacked
from medfl.methods import load
from medfl.runtimes.federation import Federation
from medfl.runtimes.local import memory
from medfl.runtimes.local.memory import jobs_that_fit, step_bytes
from tests.support.toy import ToyBundle, run_record

MIB = 2**20


class Volumes(ToyBundle):
    """Images of a million pixels; the network keeps 16 copies of a batch for its backward pass."""

    def __init__(self) -> None:
        def network() -> nn.Module:
            layers = (layer for _ in range(16) for layer in (nn.Conv2d(1, 1, 1), nn.Tanh()))
            return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 3))

        super().__init__(network=network)

    def prepared(self, section: str, **settings: object) -> Stacked:
        items = [{"id": f"{section}{i}", "label": i % 3} for i in range(12)]
        return Stacked(items, torch.zeros(12, 1, 1024, 1024), torch.arange(12) % 3)


@pytest.fixture(scope="module")
def volumes() -> Federation:
    return Federation(Volumes(), load("fedavg"), run_record(batch_size=2))


def test_a_step_is_measured_where_it_does_no_harm(volumes: Federation) -> None:
    """Each of 32 layers keeps its output, 2 x 1 MiB x 4 bytes: 256 MiB; nothing of it stays here.

    Memory that this process has freed, but not given back, is used without being counted: 256 less a part.
    """
    before = memory._status("VmHWM")
    assert 128 * MIB < step_bytes(volumes) < 1500 * MIB
    assert memory._status("VmHWM") - before < 64 * MIB


def test_workers_are_bounded_by_memory_and_it_is_said(
    volumes: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(memory, "step_bytes", lambda federation: 1024 * MIB)
    monkeypatch.setattr(memory, "free_ram", lambda: 4096 * MIB)
    assert jobs_that_fit(volumes, 8, said.append) == 3  # 0.8 * 4 GiB hold three workers of 1 GiB
    assert said == ["note: 3 of 8 workers: each takes about 1.0 GiB, of 4.0 free"]
    monkeypatch.setattr(memory, "free_ram", lambda: 100 * MIB)
    assert jobs_that_fit(volumes, 8) == 1
    monkeypatch.setattr(memory, "free_ram", lambda: 1 << 40)
    assert jobs_that_fit(volumes, 8, said.append) == 8
    assert len(said) == 1


def test_small_images_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "step_bytes", lambda federation: pytest.fail("measured"))
    assert jobs_that_fit(Federation(ToyBundle(), load("fedavg"), run_record()), 8) == 8


def test_a_step_that_fails_is_left_to_the_first_round(
    volumes: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(memory, "fit", broken)
    assert step_bytes(volumes) == 0
    assert jobs_that_fit(volumes, 8) == 8
