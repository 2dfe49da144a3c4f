"""FLARE's stock FedAvg recipe around medfl's sites (docs/examples/stock_flare): medfl's own weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("nvflare")

from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.aggregators.weighted_aggregation_helper import WeightedAggregationHelper
from torch import Tensor

from medfl import datasets
from medfl.bundle.bundle import Bundle
from medfl.runs.launch import federate
from medfl.storage.files import load_weights
from tests.support.programs import python_path
from tests.support.toy import bits

pytestmark = [
    pytest.mark.flare,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # FLARE's own
]

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "stock_flare"
CONFIG = {"network": "small_cnn", "image_size": 16}


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The example's modules."""
    sys.path.insert(0, str(EXAMPLE))
    import client
    import job

    yield SimpleNamespace(client=client, job=job)
    sys.path.remove(str(EXAMPLE))
    for name in ("client", "job"):
        del sys.modules[name]


def asked(scans: Path, partition: str, **changes: Any) -> dict[str, Any]:
    """Settings of two sites; "iid" makes them equal."""
    return {
        "data": str(scans), "sites": 2, "partition": partition, "rounds": 2, "local_epochs": 1, "batch_size": 8,
        **changes,
    }  # fmt: skip


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return datasets.write_phantom(
        "mednist", tmp_path_factory.mktemp("scans") / "data", per_class=10, size=16
    )


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"run": None, "bundle": None, "data": None, "rounds": None, "policy": None, **given}
    )


def averaged(example: SimpleNamespace, run: Path, rounds: int) -> dict[str, Tensor]:
    """Drive the sites of a run as FLARE does, and return the mean of their replies as its aggregator makes it."""
    sites = [example.client.site_of(name, options(run=str(run))) for name in ("site-1", "site-2")]
    for site in sites:
        site.initialize()
    weights = dict(sites[0].get_weights().weights)
    for round_ in range(rounds):
        replies = [
            example.client.replied(site, FLModel(params=weights, current_round=round_))
            for site in sites
        ]
        assert all(0 <= reply.metrics["accuracy"] <= 1 for reply in replies)
        helper = WeightedAggregationHelper()
        for site, reply in zip(sites, replies, strict=True):
            helper.add(reply.params, reply.meta["NUM_STEPS_CURRENT_ROUND"], site.name, round_)
        weights = helper.get_result()
    return weights


def test_equal_sites_give_the_simulator_s_bits(
    example: SimpleNamespace, scans: Path, tmp_path: Path
) -> None:
    federate(
        "mednist",
        config=CONFIG,
        requested=asked(scans, "iid", cohort=1.0),
        out=tmp_path / "run",
        jobs=1,
    )
    expected = load_weights(tmp_path / "run" / "weights.safetensors")
    mean = averaged(example, tmp_path / "run", 2)
    assert bits({name: mean[name].to(tensor.dtype) for name, tensor in expected.items()}) == bits(
        expected
    )


def test_other_sites_give_them_but_for_ties(
    example: SimpleNamespace, scans: Path, tmp_path: Path
) -> None:
    """FLARE weighs by 23 and 19 and divides by 42, medfl weighs by 23/42 and 19/42: halfway cases round differently."""
    requested = asked(scans, "dirichlet:0.5", rounds=1, cohort=1.0)
    federate("mednist", config=CONFIG, requested=requested, out=tmp_path / "run", jobs=1)
    expected = load_weights(tmp_path / "run" / "weights.safetensors")
    mean = averaged(example, tmp_path / "run", 1)
    off = 0
    for name, tensor in expected.items():
        mine = mean[name].to(tensor.dtype)
        if tensor.is_floating_point():
            step = torch.nextafter(tensor.abs(), torch.tensor(torch.inf)) - tensor.abs()
            assert ((mine - tensor).abs() <= step).all()
            off += int((mine != tensor).sum())
    assert off < 0.01 * sum(tensor.numel() for tensor in expected.values())


def test_a_site_with_a_folder_of_its_own(example: SimpleNamespace, scans: Path) -> None:
    site = example.client.site_of("clinic", options(bundle="mednist", data=str(scans), rounds=3))
    site.initialize()
    assert site.name == "clinic"
    assert site.get_weights().weights.keys() == Bundle("mednist").network().state_dict().keys()


def test_flare_s_recipe_gives_the_simulator_s_weights(
    example: SimpleNamespace, scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FLARE's simulator, with its processes; the job carries the script and no other code."""
    monkeypatch.setenv("PYTHONPATH", python_path())
    found = example.job.executed(tmp_path / "out", "mednist", CONFIG, asked(scans, "dirichlet:0.5"))
    assert found["difference"] < 1e-5, (
        "a weight by steps, another round or other initial weights give more than 1e-3"
    )
    assert found["moved"] > 1e-3
    assert len(set(found["samples"].values())) == 2
    server = Path(found["model"]).parent
    assert [path.name for path in (server / "custom").rglob("*") if path.is_file()] == ["client.py"]
    (controller,) = json.loads((server / "config" / "config_fed_server.json").read_text())[
        "workflows"
    ]
    assert controller["path"] == "nvflare.app_common.workflows.fedavg.FedAvg"
