"""FedBM on grey squares, quick: a federation in memory whose images are small enough for a generator in a test."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from medfl.methods import load
from medfl.methods.fedbm import FedBM
from tests.support.toy import Outcome, Toy, cross_entropy, prompts, sgd, simulate

QUICK = {
    "g_every": 1,
    "g_start": 1,
    "g_iterations": 2,
    "g_batch": 6,
    "synthetic_batch": 4,
    "normalise": "half",
}
EMBEDDINGS = prompts("minilm")


def quick(**options: object) -> FedBM:
    return load("fedbm", {**QUICK, **options})


def images(
    counts: dict[str, int], size: int = 16, channels: int = 1
) -> dict[str, tuple[Tensor, Tensor]]:
    """Grey squares whose brightness is their class, with noise."""
    draws = torch.Generator().manual_seed(0)
    data = {}
    for name, count in counts.items():
        y = torch.arange(count) % 3
        noise = 0.3 * torch.randn(count, channels, size, size, generator=draws)
        data[name] = ((noise + (y - 1.0)[:, None, None, None]).clamp(-1, 1), y)
    return data


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, 2, 1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def federation(method: FedBM, **changes: object) -> Toy:
    values: dict = {"optimizer": sgd(0.05, momentum=0.9), "batch_size": 4, **changes}
    return Toy(images({"a": 9, "b": 6, "c": 11}), network, cross_entropy, **values).adapted(method)


def run(
    method: FedBM, rounds: int, cohorts: Sequence[Sequence[str]] | None = None, **changes: object
) -> Outcome:
    return simulate(method, federation(method, **changes), rounds, cohorts)
