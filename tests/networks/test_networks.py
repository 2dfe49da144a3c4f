from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from medfl import networks
from medfl.core.errors import InputError
from medfl.networks.heads import features_and_output
from medfl.networks.residual import CifarResNet, WideResNet
from medfl.networks.two_conv import TwoConv


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def float_buffers(network: nn.Module) -> int:
    return sum(b.numel() for b in network.buffers() if b.is_floating_point())


# (name, channels, classes) -> parameters, floating BatchNorm entries; numbers of the papers' networks.
COUNTS = [
    ("resnet18", 3, 8, 11_176_512 + 513 * 8, 9_600),
    ("resnet18", 3, 7, 11_176_512 + 513 * 7, 9_600),
    ("resnet20", 3, 2, 269_202, 1_376),
    ("resnet20", 3, 8, 269_592, 1_376),
    ("resnet110", 3, 2, 1_727_442, 8_096),
    ("resnet110", 3, 8, 1_727_832, 8_096),
    ("efficientnet_b0", 3, 8, 4_017_796, 42_016),
    ("resnet18s", 3, 10, 11_173_962, 9_600),
    ("resnet18s", 1, 10, 11_173_962 - 2 * 9 * 64, 9_600),
    ("small_cnn", 1, 2, 60_506, 0),
    ("small_cnn", 3, 8, 61_520, 0),
    ("two_conv", 1, 10, 21_840, 0),
    ("two_conv_18", 1, 10, 19_738, 0),
    ("two_conv_22", 1, 10, 23_942, 0),
    ("wrn28_10", 3, 100, 36_546_980, 17_977 - 25),
    ("unet16", 3, 2, 496_210, 1_536),  # FedHelp's card, as the next one
    ("unet64", 3, 2, 7_904_578, 6_144),
]


@pytest.mark.parametrize(("name", "channels", "classes", "count", "buffers"), COUNTS)
def test_sizes(name: str, channels: int, classes: int, count: int, buffers: int) -> None:
    with torch.device("meta"):  # sizes alone: nothing is drawn
        network = networks.build(name, channels, classes)
    assert parameters(network) == count
    assert float_buffers(network) == buffers


@pytest.mark.parametrize(
    ("name", "count", "buffers"), [("unet8", 360_426, 768), ("unet32", 5_749_410, 3_072)]
)
def test_sizes_of_the_3d_unets_of_fedhelp(name: str, count: int, buffers: int) -> None:
    with torch.device("meta"):
        network = networks.build(name, 1, 2, spatial_dims=3)
    assert (parameters(network), float_buffers(network)) == (count, buffers)


def test_a_unet_is_built_silently(capsys: pytest.CaptureFixture[str]) -> None:
    networks.build("unet8", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_resnet18_has_20_norms_and_the_imagenet_stem() -> None:
    network = networks.build("resnet18", 3, 8)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in network.modules()) == 20
    shapes: list[torch.Size] = []
    network.layer1.register_forward_hook(lambda _m, inputs, _o: shapes.append(inputs[0].shape))
    network.layer4.register_forward_hook(lambda _m, _i, output: shapes.append(output.shape))
    network(torch.rand(2, 3, 128, 128))
    assert shapes == [(2, 64, 32, 32), (2, 512, 4, 4)]


DEEPER = ("resnet110", "unet32", "unet64", "wrn28_10")
"""Of the classes of resnet20 and the smaller U-Nets, and the network of `test_wide_resnet_block_and_shape`."""


@pytest.mark.parametrize("name", [n for n in networks.names() if n not in DEEPER])
def test_any_size_and_gradients_everywhere(name: str) -> None:
    network = networks.build(name, 1, 5)
    for size in ((16, 16), (28, 28), (37, 51)):
        network.zero_grad()
        logits = network(torch.rand(2, 1, *size))
        assert logits.shape == ((2, 5, *size) if name in networks.SEGMENTERS else (2, 5))
        logits.square().sum().backward()
        gradients = [parameter.grad for parameter in network.parameters()]
        assert all(g is not None and torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("name", ["resnet18", "resnet18s", "resnet20", "small_cnn", "two_conv"])
def test_volumes(name: str) -> None:
    assert networks.build(name, 1, 2, spatial_dims=3)(torch.rand(2, 1, 17, 16, 18)).shape == (2, 2)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning"
)
@pytest.mark.parametrize("name", [n for n in networks.names() if n not in (*DEEPER, "unet16")])
def test_scripted_network_computes_the_same(name: str) -> None:
    network = networks.build(name, 3, 4).eval()
    images = torch.rand(2, 3, 33, 32)
    assert torch.allclose(torch.jit.script(network)(images), network(images), atol=1e-5)


def test_option_a_shortcut_is_every_second_pixel_and_zeros() -> None:
    """With both convolutions zero and BatchNorm in its initial state a block is relu(shortcut)."""
    network = CifarResNet(8, 3, 2).eval()
    block = network.stages[1][0]
    nn.init.zeros_(block.conv1.weight)
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(2, 16, 7, 6)
    y = block(x)
    assert y.shape == (2, 32, 4, 3)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert not y[:, 16:].any()


@pytest.mark.parametrize(("size", "shape"), [(28, (1, 1)), (33, (2, 2)), (224, (7, 7))])
def test_efficientnet_halves_five_times_rounding_up(size: int, shape: tuple[int, int]) -> None:
    network = networks.build("efficientnet_b0", 3, 8).eval()
    shapes: list[torch.Size] = []
    network._conv_head.register_forward_hook(lambda _m, _i, output: shapes.append(output.shape))
    network(torch.rand(1, 3, size, size))
    assert shapes == [(1, 1280, *shape)]


def test_stem_for_small_images_keeps_their_size() -> None:
    network = networks.build("resnet18s", 1, 10).eval()
    shapes: list[torch.Size] = []
    network.layer1.register_forward_hook(lambda _m, inputs, _o: shapes.append(inputs[0].shape))
    network.layer4.register_forward_hook(lambda _m, _i, output: shapes.append(output.shape))
    network(torch.rand(1, 1, 28, 28))
    assert shapes == [(1, 64, 28, 28), (1, 512, 4, 4)]


def test_two_conv_is_that_of_the_lineage() -> None:
    """conv, pool, ReLU, conv, dropout, pool, ReLU, linear, ReLU (the feature), dropout, linear: by hand at 28."""
    network = TwoConv(1, 10)
    x = torch.rand(3, 1, 28, 28)
    conv1, conv2 = network.body[0], network.body[3]

    def by_hand() -> torch.Tensor:
        y = functional.relu(functional.max_pool2d(conv1(x), 2))
        y = functional.relu(
            functional.max_pool2d(functional.dropout2d(conv2(y), training=network.training), 2)
        )
        assert y.shape == (3, 20, 4, 4)
        return functional.relu(network.fc1(y.flatten(1)))

    network.eval()
    feature, logits = features_and_output(network, x)
    torch.testing.assert_close(feature, by_hand())
    torch.testing.assert_close(
        logits, functional.linear(feature, network.fc2.weight, network.fc2.bias)
    )
    network.train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        feature, _ = features_and_output(network, x)
        torch.manual_seed(0)
        torch.testing.assert_close(feature, by_hand())
    assert feature.shape == (3, 50)
    assert sum(p.numel() for p in network.body.parameters()) == 5_280


def test_wide_resnet_block_and_shape() -> None:
    """A block without its convolutions is its shortcut; WRN-10-2 halves the size twice and ends in 128 features."""
    network = WideResNet(10, 2, 3, 5)
    block = network.blocks[0]
    assert [module.p for module in network.modules() if isinstance(module, nn.Dropout)] == [0.3] * 3
    assert (network.bn1.momentum, block.bn1.momentum) == (0.9, 0.1)
    nn.init.zeros_(block.conv2.weight)
    x = torch.rand(2, 16, 9, 8)
    assert torch.equal(block(x), block.shortcut(x))
    shapes: list[torch.Size] = []
    hook = network.bn1.register_forward_hook(lambda _m, inputs, _o: shapes.append(inputs[0].shape))
    logits = network(torch.rand(2, 3, 33, 28))
    hook.remove()
    assert shapes == [(2, 128, 9, 7)]
    logits.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())
    images = torch.rand(2, 3, 17, 16)
    network.eval()
    assert torch.allclose(torch.jit.script(network)(images), network(images), atol=1e-5)
    assert WideResNet(10, 1, 1, 2, spatial_dims=3)(torch.rand(2, 1, 9, 8, 10)).shape == (2, 2)
    with pytest.raises(ValueError, match="6n"):
        WideResNet(12, 1, 3, 2)


def test_small_cnn_has_no_buffers() -> None:
    assert list(networks.build("small_cnn", 1, 2).buffers()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("resnet19", 3, 8), ["resnet19", *networks.names()]),
        (("resnet20", 0, 8), ["in_channels=0", "resnet20"]),
        (("resnet20", 3, 0), ["num_classes=0", "resnet20"]),
        (("resnet20", 3, 8, 4), ["spatial_dims=4"]),
    ],
)
def test_bad_input(arguments: tuple[str, int, int], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        networks.build(*arguments)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


def test_depth_of_a_cifar_resnet() -> None:
    with pytest.raises(ValueError, match="6n"):
        CifarResNet(21, 3, 2)
