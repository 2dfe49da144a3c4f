"""Changing ids of configuration files, and the networks that exported configurations name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from medfl.core.errors import InputError
from medfl.export import network as exported
from medfl.export.configs import (
    EditedConfig,
    network_of_method,
    network_with_weights,
    network_without_weights,
)
from medfl.export.descriptions import _data_format
from medfl.storage.files import save_weights

TEXT = """\
# A head.
network: resnet18  # or another
image_size: 128

lists:
- one   # kept
- two
validate#dataset#data: $[1, 2]
train:
  transforms:  # of images
  - _target_: First
    keys: image
  - _target_: Second
# before the end
run:
- $@train#run()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "train.yaml").write_text(TEXT)
    return tmp_path / "train.yaml"


def test_ids_are_changed_wherever_they_stand(file: Path) -> None:
    made = EditedConfig(file)
    made.set("image_size", [1, 2])
    made.set("elsewhere", 3)
    made.set("train#transforms#0#keys", "label")
    made.set("validate::dataset::data", "$[]")
    made.insert("new", {"a": [1, 2]}, before="network")
    made.insert("last", None, before="nothing")
    content = yaml.safe_load(made.text())
    before = yaml.safe_load(TEXT)
    before["train"]["transforms"][0] = {"_target_": "First", "keys": "label"}
    changed = {"last": None, "new": {"a": [1, 2]}, "image_size": [1, 2]}
    assert content == {**before, **changed, "validate#dataset#data": "$[]"}
    assert list(content)[:3] == ["last", "new", "network"]


def test_json_stays_json(tmp_path: Path) -> None:
    (tmp_path / "train.json").write_text('{"a": {"b": 1}, "c": 2}')
    made = EditedConfig(tmp_path / "train.json")
    made.set("a#b", [3])
    assert json.loads(made.text()) == {"a": {"b": [3]}, "c": 2}


def test_a_start_replaces_an_earlier_one() -> None:
    node = {"_target_": "torch.nn.Linear"}
    once = network_with_weights(node, "1")
    assert network_with_weights(once, "2") == {**once, "sha256": "2"}
    assert network_without_weights(once) == node
    made = network_with_weights(network_of_method(once, {"method": "fedetf"}), "3")
    assert made == {
        "_target_": "medfl.exported.network", "network": node, "method": "fedetf", "weights": "@initial_weights",
        "sha256": "3",
    }  # fmt: skip
    assert network_without_weights(made) == network_of_method(node, {"method": "fedetf"})


# The network


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


def test_weights_of_the_stated_hash_are_loaded(tmp_path: Path) -> None:
    path, state = tmp_path / "model.safetensors", linear().state_dict()
    save_weights(path, state)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    made = exported.network(linear(), weights=str(path), sha256=digest).state_dict()
    assert all(torch.equal(made[name], tensor) for name, tensor in state.items())
    with pytest.raises(
        InputError,
        match="with sha256 .*; the recorded one is 000000000000; restore the file, or set ",
    ):
        exported.network(linear(), weights=str(path), sha256="0" * 64)
    with pytest.raises(InputError, match=r"do not fit \(Error.* in loading state_dict for Linear"):
        exported.network(nn.Linear(4, 2), weights=str(path))
    with pytest.raises(InputError, match="cannot read the weights .*No such file"):
        exported.network(linear(), weights=str(tmp_path / "none"))
    path.write_bytes(b"\x80\x04.")
    with pytest.raises(InputError, match="do not fit .cannot read the weights"):
        exported.network(linear(), weights=str(path))


@pytest.mark.parametrize("name", ["os.system", "tests.support.toy", "no_such"])
def test_a_configuration_names_no_method_but_medfls(name: str) -> None:
    with pytest.raises(
        InputError, match="in a configuration; an exported network names one of medfl's"
    ):
        exported.network(linear(), method=name)


def test_a_text_classifier_needs_only_the_shape_of_its_prompts() -> None:
    """All of it is in the state dict, so that weights alone make two of them equal."""
    arguments = {"method": "fedcb", "classes": ["p", "q", "r"], "embeddings": [3, 4, 5]}
    one, other = (exported.network(linear(), **arguments).eval() for _ in range(2))
    moved = {name: tensor + 0.1 for name, tensor in one.state_dict().items()}
    assert {"0.embeddings", "0.mean", "0.spread"} <= moved.keys()
    one.load_state_dict(moved)
    other.load_state_dict(moved)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(one(x), other(x))
    assert one(x).shape == (6, 3)


def test_a_range_that_names_all_values_becomes_one() -> None:
    seen: Any = SimpleNamespace(
        shapes=[((1, 4, 8, 8), (1, 4))], spatial=lambda which: [8, 8] if which == 0 else []
    )
    source = {
        "inputs": {"image": {"value_range": [0, 1]}},
        "outputs": {"pred": {"value_range": [0, 1, 2, 3]}},
    }
    written = _data_format(source, seen)
    assert written["inputs"]["image"]["value_range"] == [0, 1]
    assert written["outputs"]["pred"]["value_range"] == [0, 3]
