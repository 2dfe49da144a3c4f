"""The losses that other people's code reaches from the same weights and sites, where batch order cannot matter.

The figures and what they were measured with are in the folder of the anchors: PFLlib, FL-bench and a plain loop.
"""

from __future__ import annotations

import csv
import json
import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset

import medfl

DATA = Path(os.environ.get("MEDFL_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
ANCHORS = DATA.parent / "anchors"
PIXELS = DATA / "mednist" / "mednist_64.npz"
ROUNDS = (1, 2, 5)
LOSSES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "fedavg": ({}, (1.786405, 1.778589)),
    "fedprox": ({"mu": 0.01}, (1.786407, 1.778592)),  # so weak, it stays beside FedAvg
    "scaffold": ({}, (1.786405, 1.778679, 1.754710)),
    "feddyn": ({"alpha": 0.01, "max_norm": 0}, (1.778901, 1.754819, 1.557423)),
    "moon": ({"mu": 1.0, "tau": 0.5}, (1.786405, 1.783122, 1.769298)),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ANCHORS.is_dir() and PIXELS.is_file()), reason=f"no {ANCHORS} or no {PIXELS}"
    ),
]


class Net(nn.Module):
    """Two convolutions of 5 x 5 and two linear layers; the names are those of the initial weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5)
        self.fc1, self.fc2 = nn.Linear(1024, 128), nn.Linear(128, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution in (self.conv1, self.conv2):
            x = nn.functional.max_pool2d(convolution(x).relu(), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())


@cache
def sites() -> dict[str, dict[str, TensorDataset]]:
    """Six sites of two classes; every test image is at one of them, as validation image."""
    with np.load(PIXELS) as arrays:
        known = {
            name: arrays[name]
            for name in ("train_images", "train_labels", "test_images", "test_labels")
        }
    with (ANCHORS / "partition_mednist.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "train"]

    def items(section: str, indices: list[int]) -> TensorDataset:
        small = [
            Image.fromarray(known[f"{section}_images"][i]).resize((28, 28), Image.BILINEAR)
            for i in indices
        ]
        pixels = torch.tensor(np.stack([np.asarray(one) for one in small]), dtype=torch.float32)
        labels = torch.tensor([int(known[f"{section}_labels"][i, 0]) for i in indices])
        return TensorDataset(((pixels / 255 - 0.5) / 0.5)[:, None], labels)

    found = {}
    for site in range(6):
        tested = items("test", list(range(site, 720, 6)))
        train = items("train", [int(row["image"]) for row in rows if row["site"] == str(site)])
        found[f"site-{site}"] = {
            "train": train,
            "validate": tested,
            "test": TensorDataset(*tested[:1]),
        }
    return found


@pytest.mark.parametrize("method", LOSSES)
def test_the_losses_of_other_peoples_code(method: str, tmp_path: Path) -> None:
    options, expected = LOSSES[method]
    parts = medfl.Parts(
        network=Net, data=sites(), loss=nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.01),
        classes=tuple("abcdef"), batch_size=120,
    )  # fmt: skip
    medfl.run(
        parts, method, out=tmp_path / "run", options=options, init=str(ANCHORS / "init_mednist.safetensors"),
        rounds=ROUNDS[len(expected) - 1], local_epochs=5, jobs=1, say=str,
    )  # fmt: skip
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()
    ]
    found = [rows[round_ - 1]["val"]["loss"] for round_ in ROUNDS[: len(expected)]]
    assert found == pytest.approx(expected, abs=1e-5)
