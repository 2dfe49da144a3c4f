"""What the bundles' presets `paper` set, and what a table's page says is ours."""

from __future__ import annotations

import re

import pytest

from medfl.bundle.bundle import Bundle
from medfl.bundle.open import protocol
from medfl.bundle.protocol import options_for, resolved
from medfl.compare import papers
from medfl.compare.papers import tables
from medfl.compare.papers.departures import departures
from medfl.methods import load, options_of


def taken(bundle: str, method: str, *presets: str) -> dict[str, object]:
    found = resolved(bundle, protocol(bundle), ["paper", *presets])
    method = load(method, dict(options_for(found, method)))
    settings = {name: found[name] for name in ("decay_per", "site_weights", "patience", "keep_optimizer")}
    return {**settings, **found["config"], **vars(method)}


@pytest.mark.parametrize("bundle", ["oct_c8", "kvasir_v2", "ham10000", "pbc", "femnist"])
def test_fedbm_as_printed(bundle: str) -> None:
    """Algorithm 1 and section III: decay per epoch, 1/C, a set of images a round, made before it, diagonal variance."""
    found = taken(bundle, "fedbm")
    wanted = {
        "decay_per": "epoch", "site_weights": "uniform", "pool_per_round": True, "z_covariance": "diag",
        "g_every": 1, "g_start": 0, "keep_optimizer": False, "init_weights": "pytorch", "normalise": "read",
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    assert taken(bundle, "fedcb")["covariance"] == "full"
    assert found["tau"] == load("fedbm", dict(options_for(resolved(bundle, protocol(bundle)), "fedbm"))).tau
    plain = resolved(bundle, protocol(bundle))
    assert (plain["decay_per"], plain["site_weights"]) == ("round", "samples"), "the default is the code's"


def test_the_others_as_printed() -> None:
    for name in ("cifar10", "cifar100", "fmnist", "svhn"):
        found = taken(name, "fedmr")
        assert (found["inter_scope"], found["init_weights"]) == ("present", "pytorch")
    assert load("fedmr").inter_scope == "all"
    for name in ("mnist", "cifar10"):
        found = taken(name, "pfedpm")
        assert (found["agg"], found["relation_optimizer"]) == ("uniform", "sgd")
    for name in ("isic19", "pneumonia"):
        found = taken(name, "fedhelp")
        assert (found["loss_reduction"], found["public_schedule"], found["patience"]) == ("sum", "full", 10)
        assert resolved(name, protocol(name), ["paper"])["partition"].split(":")[0] in ("centre", "counts")


def test_every_grid_of_a_table_of_these_bundles_takes_the_preset() -> None:
    offering = {"oct_c8", "kvasir_v2", "ham10000", "pbc", "femnist", "cifar10", "cifar100", "fmnist", "svhn", "mnist"}
    offering |= {"isic19", "pneumonia"}
    found = {grid.bundle for key in papers.names() for grid in tables.load(key).grids}
    have = {name for name in found if "paper" in Bundle(name).protocol.get("presets", {})}
    assert have == offering & found
    assert found - have <= {"lung_cxr", "ixi_brain"}, "in these FedHelp's settings are the default or another preset"


def test_the_list_of_departures_is_made_from_docstrings_and_options() -> None:
    lines = departures(["ccvr", "fedavg", "ccvr"], {"x": {"protocol": "a split of ours"}, "y": {}}, ["a note"])
    assert lines[:2] == ["- a note", "- bundle x: a split of ours"]
    assert sum("ccvr: Departures. The paper calibrates once" in line for line in lines) == 1
    ours = {one["name"] for one in options_of(type(load("ccvr"))) if "(ours)" in one["help"]}
    assert {found[1] for line in lines if (found := re.match(r"- ccvr: (\w+)=", line))} == ours
    assert len(ours) == 4
    assert departures(["fedavg"], {}, []) == ["- nothing that is known"]
