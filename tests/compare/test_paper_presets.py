"""What the bundles' presets `paper` set, and what a table's page says is ours."""

from __future__ import annotations

import re

import pytest

from medfl.bundle.bundle import Bundle
from medfl.bundle.open import protocol_of
from medfl.bundle.protocol import options_for, resolved
from medfl.compare import papers
from medfl.compare.papers import runs as tables
from medfl.compare.papers.runs import _ours, departures, presets_of
from medfl.methods import load, options_of


def taken(bundle: str, method: str, *presets: str) -> dict[str, object]:
    found = resolved(bundle, protocol_of(bundle), ["paper", *presets])
    method = load(method, dict(options_for(found, method)))
    settings = {
        name: found[name] for name in ("decay_per", "site_weights", "patience", "keep_optimizer")
    }
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
    cycle = taken(bundle, "fedbm", "cycle")
    assert {**found, "g_every": 5, "g_start": 5} == cycle, "section III-D and the code"
    assert taken(bundle, "fedcb")["covariance"] == "full"
    assert (
        found["tau"]
        == load("fedbm", dict(options_for(resolved(bundle, protocol_of(bundle)), "fedbm"))).tau
    )
    plain = resolved(bundle, protocol_of(bundle))
    assert (plain["decay_per"], plain["site_weights"]) == ("round", "samples"), (
        "the default is the code's"
    )


@pytest.mark.parametrize(
    ("bundle", "split"), [("ham10000", "dermamnist"), ("pbc", "official"), ("oct_c8", "official")]
)
def test_fedbm_s_sections_are_those_of_the_card(bundle: str, split: str) -> None:
    """HAM10000 at 7,007, 1,003 and 2,005 images and PBC at 11,959, 1,712 and 3,421 are MedMNIST's; OCT-C8's its own."""
    assert resolved(bundle, protocol_of(bundle), ["paper"])["split"] == split


@pytest.mark.parametrize(
    ("bundle", "preset"),
    [(name, "paper") for name in ("cifar10", "cifar100", "fmnist", "svhn")]
    + [("isic19", "paper-fedmr")],
)
def test_fedmr_as_printed(bundle: str, preset: str) -> None:
    """Section 4.1, eq. 4 over the classes present, and a deviation with divisor n; plain FedMR has the code's n - 1."""
    found = resolved(bundle, protocol_of(bundle), [preset])
    method = load("fedmr", dict(options_for(found, "fedmr")))
    assert (method.inter_scope, method.std, method.intra_scale) == ("present", "biased", "paper")
    assert (load("fedmr").inter_scope, load("fedmr").std) == ("all", "unbiased")
    assert (found["local_epochs"], found["batch_size"], found["lr"], found["lr_decay"]) == (
        10,
        128,
        0.01,
        1.0,
    )
    assert (found["patience"], found["site_weights"], found["keep_optimizer"]) == (
        0,
        "samples",
        False,
    )
    configured = Bundle(bundle, found["config"])
    (group,) = configured.optimizer(configured.network(), 0.01).param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.9, 1e-5)


@pytest.mark.parametrize(
    ("bundle", "presets", "lam"),
    [("mnist", (), 1.0), ("femnist", (), 1.0), ("cifar10", (), 0.1), ("cifar10", ("pfedpm",), 0.1)],
)
def test_pfedpm_as_printed(bundle: str, presets: tuple[str, ...], lam: float) -> None:
    """Lambda by data set, "average aggregation", SGD at every module, the norm of class means, frozen mixtures."""
    found = taken(bundle, "pfedpm", *presets)
    wanted = {
        "lam": lam,
        "agg": "uniform",
        "relation_optimizer": "sgd",
        "reg": "class_l2",
        "mix": "frozen",
    }
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("bundle", ["isic19", "pneumonia", "lung_cxr", "ixi_brain"])
def test_fedhelp_as_printed(bundle: str) -> None:
    """4.1.2: four lambdas, sums over all public data, early stopping after at most 100 rounds, all sites in each."""
    found, values = taken(bundle, "fedhelp"), resolved(bundle, protocol_of(bundle), ["paper"])
    wanted = {
        "lambda_r": 0.1, "lambda_j": 0.2, "lambda_f": 1.0, "lambda_b": 0.2,
        "loss_reduction": "sum", "public_schedule": "full", "patience": 10,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    assert (values["rounds"], values["cohort"]) == (100, 1.0)
    sizes = {
        "isic19": "centre:rosendahl=180/45", "pneumonia": "counts:3134/374,1048/124,422/49,317/37,213/24,109/12",
        "lung_cxr": "counts:285/31,285/31,65/7", "ixi_brain": "centre",
    }  # fmt: skip
    assert values["partition"] == sizes[bundle]
    if values["task"] == "classification":
        assert (found["public"], found["teachers"]) == ("cifar100", "clip-vit-l14,clip-rn50x16")
    else:
        assert (found["public"], found["teachers"]) == ("skin_lesion", "medsam")
        assert found["mask_loss"] == "weighted", "equations 8 to 11"


def test_every_grid_of_a_table_takes_its_own_paper_s_preset() -> None:
    """ISIC2019 is in FedHelp's and FedMR's tables: FedMR's have EfficientNet and all six centres as they are."""
    for key in papers.names():
        for grid in tables.load(key).grids:
            found = [name for name in presets_of(grid) if name.startswith("paper")]
            assert found == [
                "paper-fedmr"
                if (key.split("/")[0], grid.bundle) == ("fedmr", "isic19")
                else "paper"
            ], key
            assert presets_of(grid, ["paper"]).count("paper") == 1, "asked for besides"


@pytest.mark.parametrize(("key", "number"), [("fedmr/table2", 7), ("fedmr/table3", 5)])
def test_fedmr_s_isic2019_rows_have_its_protocol(key: str, number: int) -> None:
    grid = tables.load(key).grids[number - 1]
    found = resolved("isic19", protocol_of("isic19"), presets_of(grid))
    assert (grid.bundle, found["config"]["network"], found["batch_size"], found["lr"], found["patience"]) == (
        "isic19", "efficientnet_b0", 128, 0.01, 0,
    )  # fmt: skip
    assert found["partition"] == "centre", "rosendahl whole"
    (told,) = (line for line in _ours(tables.load(key), [grid]) if line.startswith("- bundle "))
    assert told.startswith("- bundle isic19, preset paper-fedmr: FedMR's ISIC2019 row"), (
        "not FedHelp's protocol"
    )


def test_the_list_of_departures_is_made_from_docstrings_and_options() -> None:
    lines = departures(
        ["ccvr", "fedavg", "ccvr"], {"bundle x": "a split of ours", "bundle y": ""}, ["a note"]
    )
    assert lines[:2] == ["- a note", "- bundle x: a split of ours"]
    assert sum("ccvr: Departures. The paper calibrates once" in line for line in lines) == 1
    ours = {one["name"] for one in options_of(type(load("ccvr"))) if "(ours)" in one["help"]}
    assert {found[1] for line in lines if (found := re.match(r"- ccvr: (\w+)=", line))} == ours
    assert len(ours) == 4
    assert departures(["fedavg"], {}, []) == ["- nothing that is known"]
