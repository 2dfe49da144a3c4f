"""Body and head of a network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from monai.networks.nets.attentionunet import AttentionUnet
from monai.networks.nets.basic_unet import BasicUNet
from monai.networks.nets.flexible_unet import FlexibleUNet
from monai.networks.nets.segresnet import SegResNet
from torch import nn

from medfl.core.errors import InputError
from medfl.networks import build
from medfl.networks.heads import (
    entering_head,
    feature_size,
    features_and_output,
    frozen,
    head,
    head_name,
    head_names,
    replace_head,
)
from tests.support.toy import classifier

NETWORKS = [
    ("resnet18", "fc", 512),
    ("resnet20", "fc", 64),
    ("efficientnet_b0", "_fc", 1280),
    ("small_cnn", "fc", 72),
]


SEGMENTERS = [
    (lambda: FlexibleUNet(3, 2, "efficientnet-b0"), "segmentation_head.0"),
    (lambda: BasicUNet(2, 1, 2, features=(4, 4, 4, 4, 4, 4)), "final_conv"),
    (lambda: AttentionUnet(2, 1, 2, (4, 8), (2,)), "model.2.conv"),
    (lambda: SegResNet(2, 8, 1, 2), "conv_final.2.conv"),
]


@pytest.mark.parametrize(("make", "layer"), SEGMENTERS)
def test_the_head_of_monais_segmentation_networks_makes_their_output(
    make: Callable[[], nn.Module], layer: str
) -> None:
    network = make().eval()
    assert head_name(network) == layer
    channels = next(m for m in network.modules() if isinstance(m, nn.Conv2d)).in_channels
    with torch.no_grad(), entering_head(network) as seen:
        output = network(torch.rand(1, channels, 32, 32))
    torch.testing.assert_close(head(network)(seen[-1]), output)


@pytest.mark.parametrize(("name", "layer", "size"), NETWORKS)
def test_heads_of_the_shipped_networks(name: str, layer: str, size: int) -> None:
    network = build(name, 1, 5).eval()
    assert head_name(network) == layer
    assert feature_size(network) == size
    assert head_names(network) == {f"{layer}.weight", f"{layer}.bias"}
    with torch.no_grad():
        features, output = features_and_output(network, torch.rand(2, 1, 32, 32))
        assert features.shape == (2, size)
        torch.testing.assert_close(head(network)(features), output)


def test_the_last_layer_is_the_head_whatever_linear_layers_are_inside() -> None:
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(4, 4), nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 1)
    )
    assert head_name(network) == "3"
    segmenter = nn.Sequential(nn.Conv3d(1, 8, 3), nn.Conv3d(8, 2, 1))
    assert (head_name(segmenter), feature_size(segmenter)) == ("1", 8)
    assert features_and_output(segmenter, torch.rand(1, 1, 4, 4, 4))[0].shape == (1, 8, 2, 2, 2)


def test_a_network_that_is_one_layer_is_its_own_head() -> None:
    layer = nn.Linear(4, 3)
    assert head_name(layer) == ""
    assert head(layer) is layer


def test_a_network_without_a_head_is_refused() -> None:
    with pytest.raises(InputError, match="a Sequential without a linear or convolution layer"):
        head_name(nn.Sequential(nn.ReLU()))


def test_named_layers_make_the_head() -> None:
    network = classifier(norm=True)()
    assert head_names(network, ["1", "4"]) == {
        *(
            f"1.{name}"
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        ),
        "4.weight",
        "4.bias",
    }
    with pytest.raises(InputError, match="head layer 'fc1'; layers are 0, 1, 2, 3, 4"):
        head_names(network, ("fc1",))


def test_features_carry_gradients_and_leave_no_hook() -> None:
    network = classifier()()
    features, output = features_and_output(network, torch.rand(5, 8))
    assert output.shape == (5, 3)
    features.sum().backward()
    assert network[0].weight.grad.any()
    assert network[4].weight.grad is None
    assert not head(network)._forward_pre_hooks


def test_the_hook_goes_when_the_network_fails() -> None:
    network = classifier()()
    with pytest.raises(RuntimeError, match="shapes"):
        features_and_output(network, torch.rand(5, 7))
    assert not head(network)._forward_pre_hooks


def test_frozen() -> None:
    network = frozen(classifier(norm=True)())
    assert not any(module.training for module in network.modules())
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert not network(torch.rand(2, 8)).requires_grad


def test_replace_head() -> None:
    network = nn.Sequential(nn.Linear(8, 6), nn.Sequential(nn.ReLU(), nn.Linear(6, 3)))
    layer = nn.Linear(6, 9)
    assert replace_head(network, layer) is network
    assert network[1][1] is layer
    assert network(torch.rand(2, 8)).shape == (2, 9)


def test_a_transposed_convolution_is_a_head() -> None:
    """As in MONAI's UNet without residual units."""
    network = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 2, 2, 2))
    assert (head_name(network), feature_size(network)) == ("2", 8)
