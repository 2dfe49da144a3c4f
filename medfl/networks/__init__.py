"""Networks by name, for bundle configurations: `{_target_: medfl.networks.build, name: resnet18, ...}`.

MONAI's if MONAI has them; own code only for what it lacks. All accept any spatial size from 16 up. Classifiers return
logits (B, num_classes), the U-Nets logits (B, num_classes, H, W[, D]).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial

from monai.networks.nets.basic_unet import BasicUNet
from monai.networks.nets.efficientnet import EfficientNetBN
from monai.networks.nets.resnet import ResNet
from torch import nn

from medfl.core import Document, InputError, did_you_mean
from medfl.networks.heads import head_names as head_names
from medfl.networks.residual import CifarResNet, WideResNet
from medfl.networks.small_cnn import SmallCNN
from medfl.networks.two_conv import TwoConv


def _resnet18(
    in_channels: int, num_classes: int, spatial_dims: int, small_images: bool = False
) -> Document:
    """ResNet-18; the body ends in 512 features.

    Its stem is that for ImageNet (7x7 stride 2, then 3x3 max-pool stride 2) or, for small images (`resnet18s`), a 3x3
    convolution of stride 1 without a pool.
    """
    return {
        "_target_": "monai.networks.nets.ResNet",
        "block": "basic",
        "layers": [2, 2, 2, 2],
        "block_inplanes": [64, 128, 256, 512],
        "spatial_dims": spatial_dims,
        "n_input_channels": in_channels,
        "conv1_t_size": 3 if small_images else 7,
        # MONAI's default of 1 makes the network four times as expensive.
        "conv1_t_stride": 1 if small_images else 2,
        "no_max_pool": small_images,
        "num_classes": num_classes,
        "bias_downsample": False,
    }


def _efficientnet_b0(in_channels: int, num_classes: int, spatial_dims: int) -> nn.Module:
    """EfficientNet-B0, not pretrained; with an activation that TorchScript can export, and padding for any image size.

    MONAI pads for 224x224 images, which fails below 32 and cuts borders at other sizes: this pads kernel // 2 on all
        sides.
    """
    network = EfficientNetBN(
        "efficientnet-b0",
        pretrained=False,
        spatial_dims=spatial_dims,
        in_channels=in_channels,
        num_classes=num_classes,
    )
    # The memory-efficient one is an autograd function, which TorchScript cannot export.
    network.set_swish(memory_efficient=False)  # type: ignore[operator]

    for module in list(network.modules()):
        for name, padder in list(module.named_children()):
            if name.endswith("_padding") and not isinstance(padder, nn.Identity):
                conv = getattr(module, name.removesuffix("_padding"))
                conv.padding = tuple(size // 2 for size in conv.kernel_size)
                setattr(module, name, nn.Identity())

    return network


def _unet(in_channels: int, num_classes: int, spatial_dims: int, width: int) -> Document:
    """MONAI's BasicUNet with features (f, f, 2f, 4f, 8f, f) and BatchNorm; f = `width`."""
    return {
        "_target_": "monai.networks.nets.BasicUNet",
        "spatial_dims": spatial_dims,
        "in_channels": in_channels,
        "out_channels": num_classes,
        "features": [width, width, 2 * width, 4 * width, 8 * width, width],
        "norm": ["batch", {"eps": 1e-5}],
    }


SEGMENTERS = tuple(f"unet{width}" for width in (8, 16, 32, 64))
"""The networks that output a map of logits."""

_CLASSES: dict[str, Callable[..., nn.Module]] = {"ResNet": ResNet, "BasicUNet": BasicUNet}
_BUILDERS: dict[str, Callable[[int, int, int], Document | nn.Module]] = {
    "efficientnet_b0": _efficientnet_b0,
    "resnet18": _resnet18,
    "resnet18s": partial(_resnet18, small_images=True),
    "resnet20": partial(CifarResNet, 20),
    "resnet110": partial(CifarResNet, 110),
    "small_cnn": SmallCNN,
    "two_conv": TwoConv,
    "two_conv_18": partial(TwoConv, width=18),
    "two_conv_22": partial(TwoConv, width=22),
    **{name: partial(_unet, width=int(name.removeprefix("unet"))) for name in SEGMENTERS},
    "wrn28_10": partial(WideResNet, 28, 10),
}


def names() -> tuple[str, ...]:
    """Return the names that `build` knows."""
    return tuple(_BUILDERS)


def component(
    name: str, in_channels: int, num_classes: int, spatial_dims: int = 2
) -> Document | None:
    """Return a network as a component of MONAI, None if MONAI lacks it; same arguments as `build`."""
    network = _BUILDERS[name](in_channels, num_classes, spatial_dims)
    return network if isinstance(network, dict) else None


def build(name: str, in_channels: int, num_classes: int, spatial_dims: int = 2) -> nn.Module:
    """Build a freshly initialised network: (B, in_channels, H, W[, D]) -> logits (B, num_classes[, H, W[, D]]).

    Raises:
        InputError: unknown name, or an invalid number.
    """
    if name not in _BUILDERS:
        raise InputError(
            f"network '{name}'",
            f"the networks are {', '.join(names())}",
            did_you_mean(str(name), names(), "choose one of these with network=NAME"),
        )

    for argument, value, least in (
        ("in_channels", in_channels, 1),
        ("num_classes", num_classes, 1),
    ):
        if value < least:
            raise InputError(
                f"{argument}={value} for network '{name}'",
                f"{argument} is >= {least}",
                f"take {least}",
            )

    if spatial_dims not in (2, 3):
        raise InputError(
            f"spatial_dims={spatial_dims}",
            "spatial_dims is 2 or 3",
            "set it to 2, or 3 for volumes",
        )

    network = _BUILDERS[name](in_channels, num_classes, spatial_dims)
    if isinstance(network, nn.Module):
        return network

    # selected by name, not imported by it: a configuration's text decides nothing here
    component_class = _CLASSES[network.pop("_target_").rpartition(".")[2]]
    with redirect_stdout(None):  # BasicUNet prints its features
        return component_class(**network)
