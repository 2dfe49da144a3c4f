"""FedLoRA in whole runs of the command line: killed in a round and resumed, with every byte that went up counted."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.cli import verbs as cli
from medfl.core.message import Message
from medfl.methods import fedlora
from tests.support import forked

RANKS = {"site-1": 1, "site-2": 3}


@pytest.fixture(scope="module")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "pneumonia", tmp_path_factory.mktemp("data") / "phantom", per_class=20, size=28
    )


def command(phantom: Path, out: Path, share: str) -> list[str]:
    return [
        "run", "pneumonia", "--data", str(phantom), "--sites", "2", "--partition", "iid", "--rounds", "3",
        "--local-epochs", "1", "--batch-size", "8", "--config", "network=small_cnn", "--config", "image_size=28",
        "--method", "fedlora", "--set", "rank=3", "--set", "ranks=site-1=1", "--set", f"share={share}",
        "--jobs", "1", "--quiet", "--out", str(out),
    ]  # fmt: skip


def killed_in_round_2(arguments: list[str]) -> None:
    """Run, and die by SIGKILL before the second site of round 2 trains."""
    fit, sites = fedlora.fit, []

    def fit_or_die(model: Any, site: Any) -> Any:
        sites.append(site)
        if len(sites) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return fit(model, site)

    fedlora.fit = fit_or_die
    cli.main(arguments)


def left(out: Path) -> dict[str, Any]:
    """What must be the same however a run was cut."""
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    return {
        "rounds": [
            {k: v for k, v in entry.items() if not k.startswith("seconds")} for entry in rounds
        ],
        **{
            name: summary[name] for name in ("run_hash", "weights_sha256", "bytes_up", "bytes_down")
        },
    }


def bytes_of_a_round(weights: dict[str, torch.Tensor], share: str) -> int:
    """Both replies, written out: head, rows of A and columns of B of each other matrix or kernel, number of items."""
    head, total = list(weights)[-1].rpartition(".")[0], 0
    for rank in RANKS.values():
        factors = {}
        for name, tensor in weights.items():
            if tensor.ndim > 1 and not name.startswith(head):
                factors |= (
                    {f"{name}.lora_A.{rank}": torch.zeros(rank, tensor[0].numel())}
                    if share != "b"
                    else {}
                )
                factors |= (
                    {f"{name}.lora_B.{rank}": torch.zeros(len(tensor), rank)}
                    if share != "a"
                    else {}
                )
        whole = {name: tensor for name, tensor in weights.items() if name.startswith(head)}
        total += len(Message({"weights": whole, "adapters": factors}, {"samples": 1}).encode())
    return total


@pytest.mark.slow
@pytest.mark.parametrize("share", ["a", "svd"])
def test_law1_a_run_killed_in_round_2_goes_on(phantom: Path, tmp_path: Path, share: str) -> None:
    """With `a` a site's B lies in its State, with `svd` everything at the server."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cli.main(command(phantom, whole, share)) == 0
    process = forked.start(
        killed_in_round_2, command(phantom, cut, share), output=tmp_path / "printed"
    )
    process.join(120)
    assert process.exitcode == -signal.SIGKILL, (tmp_path / "printed").read_text()
    assert json.loads((cut / "state" / "manifest.json").read_text())["round"] == 1
    assert cli.main([*command(phantom, cut, share), "--resume"]) == 0
    assert left(cut) == left(whole)
    up = bytes_of_a_round(
        Bundle("pneumonia", {"network": "small_cnn", "image_size": 28}).network().state_dict(),
        share,
    )
    assert [entry["bytes_up"] for entry in left(cut)["rounds"]] == [up] * 3
