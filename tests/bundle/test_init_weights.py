"""Who draws a network's initial weights is a named choice of any bundle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from medfl.bundle.bundle import Bundle
from medfl.core.errors import InputError
from medfl.core.seeding import stream
from medfl.runs.plan import Request, make_plan
from medfl.training.network_pool import Networks
from tests.support.toy import bits

RESNET = {"network": "resnet18", "image_size": 32}


def weights(**config: str) -> dict[str, torch.Tensor]:
    bundle = Bundle("mednist", {**RESNET, **config})
    return dict(Networks(bundle.network, 3, torch.device("cpu")).initial)


def test_pytorchs_layers_draw_uniformly_within_the_fan_in_and_monai_by_the_fan_out() -> None:
    """The first convolution of ResNet-18 has 1 x 7 x 7 inputs and 64 x 7 x 7 outputs."""
    plain, monai, pytorch = (
        weights(),
        weights(init_weights="monai"),
        weights(init_weights="pytorch"),
    )
    assert bits(plain) == bits(monai), "recorded runs keep their weights"
    assert bits(pytorch) == bits(weights(init_weights="pytorch"))
    assert plain.keys() == pytorch.keys()
    first, kernel = "conv1.weight", "layer3.0.conv2.weight"
    assert plain[first].std().item() == pytest.approx(math.sqrt(2 / (64 * 49)), rel=0.05)
    for name in (first, kernel, "fc.weight", "fc.bias"):
        fan_in = 512 if name.startswith("fc") else pytorch[name][0].numel()
        assert pytorch[name].abs().max().item() <= 1 / math.sqrt(fan_in)
        few = 0.4 if "bias" in name else 0.1
        assert pytorch[name].std().item() == pytest.approx(1 / math.sqrt(3 * fan_in), rel=few)
    same = [name for name in plain if "bn" in name or "downsample.1" in name]
    assert len(same) == 100
    assert all(torch.equal(plain[name], pytorch[name]) for name in same)


def test_each_kind_of_layer_is_drawn_anew() -> None:
    bundle = Bundle(
        "mednist", {"network": "small_cnn", "image_size": 32, "init_weights": "pytorch"}
    )
    with stream(0, "one"):
        one = bundle.network()
    with stream(0, "one"):
        other = Bundle("mednist", {"network": "small_cnn", "image_size": 32}).network()
    for layer, like in zip(one.modules(), other.modules(), strict=True):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            assert not torch.equal(layer.weight, like.weight)


def test_a_run_names_it_and_another_word_is_refused() -> None:
    small = {"data": "phantom", "sites": 2, "config": {"network": "two_conv", "image_size": 28}}
    plain, drawn = (
        make_plan(
            Request("mednist", "fedavg", **{**small, "config": {**small["config"], **more}})
        ).run
        for more in ({}, {"init_weights": "pytorch"})
    )
    assert drawn.config["init_weights"] == "pytorch"
    assert (drawn.bundle_sha256, drawn.run_hash == plain.run_hash) == (plain.bundle_sha256, False)
    with pytest.raises(
        InputError, match="--config init_weights=keras; monai or pytorch; choose one of them"
    ):
        Bundle("mednist", {"init_weights": "keras"}).network()
