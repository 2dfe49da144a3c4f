"""A mistyped name is answered with the one that is near; a value of another kind in one line, by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import medfl
from medfl import datasets, methods, networks
from medfl.bundle import files, protocol
from medfl.cli import api
from medfl.core.errors import InputError, did_you_mean
from medfl.core.type_checks import type_mismatches
from medfl.data.partition import rules
from medfl.runs import launch
from medfl.runs.plan import Request


def test_the_near_name_comes_before_the_advice() -> None:
    assert (
        did_you_mean("fedproks", ("fedavg", "fedprox"), "see medfl methods")
        == "did you mean fedprox? if not, see medfl methods"
    )
    assert did_you_mean("zzz", ("fedavg", "fedprox"), "see medfl methods") == "see medfl methods"
    assert did_you_mean("zzz", (), "nothing") == "nothing"


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: methods.load("fedpox"), "fedprox"),
        (lambda: methods.load("FedAvg"), "fedavg"),
        (lambda: methods.load("fedbm", {"clasifier": 3}), "classifier"),
        (lambda: files.find("pneumonie"), "pneumonia"),
        (lambda: datasets.get("mednits"), "mednist"),
        (lambda: rules.parse("dirichlett:0.1"), "dirichlet"),
        (lambda: rules.parse("center"), "centre"),
        (lambda: networks.build("resnet81", 1, 2), "resnet18"),
        (lambda: protocol.resolved("x", {"presets": {"paper": {}}}, ["papers"]), "paper"),
        (lambda: medfl.run("pneumonia", round=3, say=str), "rounds"),
        (lambda: launch.federate("pneumonia", requested={"epochs": 3}), "local_epochs"),
        (lambda: launch.federate("pneumonia", runtime="flair"), "flare"),
    ],
)
def test_unknown_names(call: Callable[[], object], name: str) -> None:
    with pytest.raises(InputError, match=rf"; did you mean {name}\? if not, "):
        call()


def test_a_known_kind_of_partition_with_a_wrong_value_is_meant_as_it_is() -> None:
    with pytest.raises(InputError, match="; give BETA as a number above 0"):
        rules.parse("dirichlet:x")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("rounds", "1", "a whole number"), ("sites", 2.5, "a whole number"), ("rounds", True, "a whole number"),
        ("lr", "0.1", "a number"), ("amp", "no", "True or False"), ("data", 3, "text"), ("presets", "small", "a list"),
        ("config", [1], "a dict"), ("options", "mu=1", "a dict"), ("method", 3, "text"), ("jobs", "2", "a whole"),
        ("out", 3, "text or a path"), ("say", None, "a function"), ("jobs", 0, "at least 1"),
    ],
)  # fmt: skip
def test_arguments_of_another_kind(tmp_path: Path, name: str, value: Any, allowed: str) -> None:
    given = {
        "bundle": "pneumonia",
        "out": tmp_path / "out",
        "say": str,
        "data": "phantom",
        name: value,
    }
    with pytest.raises(InputError, match=rf"^(--)?{name}[ =].*{allowed}"):
        medfl.run(**given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("methods", "fedavg"), ("methods", [3]), ("seeds", 1), ("seeds", "0,1"), ("seeds", (0.5,)),
        ("partitions", "iid"), ("options", [1]), ("config", [1]), ("out", 3), ("jobs", 0), ("rounds", "1"),
    ],
)  # fmt: skip
def test_arguments_of_a_comparison(tmp_path: Path, name: str, value: Any) -> None:
    given = {
        "bundle": "pneumonia",
        "methods": ["fedavg"],
        "out": tmp_path / "out",
        "data": "phantom",
        "say": str,
    }
    with pytest.raises(InputError, match=rf"^(--)?{name}[ =]"):
        medfl.compare(**{**given, name: value})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", [3, None, ["a"], b"x", "no-such-folder"])
def test_a_run_that_cannot_be_loaded(folder: Any) -> None:
    with pytest.raises(InputError, match="^folder=|has no run.json"):
        medfl.load_run(folder)


@pytest.mark.parametrize("options", ["mu=1", [1]])
def test_options_that_are_no_dict(options: Any) -> None:
    with pytest.raises(InputError, match="^options .* a dict"):
        methods.load("fedprox", options)


def test_what_fits() -> None:
    given = {
        "bundle": "x",
        "rounds": 3,
        "lr": 1,
        "sites": None,
        "presets": ("a",),
        "options": {"mu": 1},
    }
    assert [*type_mismatches(Request, given)] == []
    assert api._plain(np.int64(3)) == 3
    assert type(api._plain(np.int64(3))) is int
