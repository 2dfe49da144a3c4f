"""The concept-guided generator of FedBM with its augmentation and losses (equation numbers of the paper).

"FedBM: Stealing Knowledge from Pre-trained Language Models for Heterogeneous Federated Learning" (Zhu et al., Medical
Image Analysis 2025); the architecture is that of the authors' public code, the paper says "lightweight".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from medfl.core import Constants, InputError, Weights
from medfl.networks.heads import frozen

_STEPS = 16  # four doublings
_WIDTH = 128
_PADDING = 4
_EPSILON = 1e-5
_BEYOND = 0.25  # allowed deviation of resampled pictures from 0..1

NORMALISATIONS: Mapping[str, Constants] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "half": ((0.5,), (0.5,)),
    "none": ((0.0,), (1.0,)),
}
"""Name -> mean and standard deviation of the channels, as used by a bundle's transforms for real images."""


class Generator(nn.Module):
    """Condition z (B, dimension) -> images (B, channels, H, W) in (0, 1).

    A linear layer to 128 maps of H/16 x W/16, a convolution, four times doubling and convolution, a convolution to the
    channels. 4,758,211 parameters with 512 dimensions, 3 channels and 128 x 128 pixels.
    """

    def __init__(self, dimension: int, channels: int, height: int, width: int) -> None:
        """Build the network with PyTorch's initialisation.

        Raises:
            InputError: height or width is not a multiple of 16.
        """
        check_size(height, width)
        super().__init__()
        self.start = (_WIDTH, height // _STEPS, width // _STEPS)
        self.linear = nn.Linear(dimension, _WIDTH * self.start[1] * self.start[2])
        layers = _block(_WIDTH, _WIDTH)

        for narrow, wide in ((_WIDTH, _WIDTH), (_WIDTH, _WIDTH), (_WIDTH, 64), (64, 64)):
            layers += [nn.Upsample(scale_factor=2, mode="nearest"), *_block(narrow, wide)]

        # The sigmoid ends in 0..1, like pictures before normalisation.
        self.body = nn.Sequential(*layers, nn.Conv2d(64, channels, 3, padding=1), nn.Sigmoid())

    @classmethod
    def restored(cls, weights: Weights, shape: Sequence[int], device: torch.device) -> Generator:
        """Return the frozen generator with these weights for images of this shape (channels, height, width)."""
        # Without allocation or random draws: `assign` puts the given tensors in place.
        with torch.device("meta"):
            network = cls(weights["linear.weight"].shape[1], *shape)
        network.load_state_dict(
            {name: tensor.to(device) for name, tensor in weights.items()}, assign=True
        )
        frozen(network)
        return network

    def forward(self, z: Tensor) -> Tensor:
        """Return the images of the conditions z (B, dimension)."""
        images: Tensor = self.body(self.linear(z).unflatten(1, self.start))
        return images


def _block(wide_in: int, wide_out: int) -> list[nn.Module]:
    conv = nn.Conv2d(wide_in, wide_out, 3, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(wide_out), nn.LeakyReLU(0.2, inplace=True)]


def check_size(height: int, width: int) -> None:
    """Check that the generator can make images of this size.

    Raises:
        InputError: it cannot; names the size.
    """
    if height % _STEPS or width % _STEPS or min(height, width) < _STEPS:
        raise InputError(
            f"images of {height} x {width} pixels",
            f"the generator makes sides that are multiples of {_STEPS}",
            f"take --config image_size={max(_STEPS, round(height / _STEPS) * _STEPS)}, or --set generator=false",
        )


def normalisation(text: str) -> Constants:
    """Return mean and standard deviation for a name in `NORMALISATIONS`, or for MEAN/SD, each one number per channel.

    Raises:
        InputError: it is neither.
    """
    if text in NORMALISATIONS:
        return NORMALISATIONS[text]

    try:
        mean, sd = (tuple(map(float, part.split(","))) for part in text.split("/"))
    except ValueError:
        mean = ()
        sd = ()

    if (
        not mean
        or len(mean) != len(sd)
        or not all(map(math.isfinite, (*mean, *sd)))
        or min(sd) <= 0
    ):
        raise InputError(
            f"normalise={text}",
            f"read, {', '.join(NORMALISATIONS)} or MEAN/SD with a number for each channel",
            "for example normalise=0.5/0.25",
        )

    return mean, sd


def check_images(images: Tensor, constants: Constants) -> None:
    """Check that the generator can make images like these (B, C, H, W), normalised by these constants.

    Raises:
        InputError: the constants are for another number of channels or other intensities.
    """
    channels = images.shape[1]
    if len(constants[0]) not in (1, channels):
        raise InputError(
            f"normalise={_as_text(constants)} for images of {channels} channel{'s' if channels != 1 else ''}",
            f"it has means for {len(constants[0])}",
            "leave normalise out, or say what the bundle's transforms do",
        )

    mean, sd = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in constants)
    units = images.double() * sd + mean
    low = float(units.min())
    high = float(units.max())

    if low < -_BEYOND or high > 1 + _BEYOND:
        raise InputError(
            f"normalise={_as_text(constants)} for images that it brings back to {low:.3g}..{high:.3g}",
            "pictures are 0..1 before they are normalised",
            "say what the bundle's transforms do with --set normalise=MEAN/SD",
        )


def _as_text(constants: Constants) -> str:
    return "/".join(",".join(f"{number:g}" for number in part) for part in constants)


@dataclass(frozen=True)
class Augmentation:
    """Zero-padding by 4 and random crop, random flips of both axes, then normalisation (so that padding is black).

    Attributes:
        mean, std: one number per channel, or one for all.
        per_image: separate crops and flips for each image instead of common ones for the batch.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    per_image: bool = False
    _constants: dict[tuple[str, torch.dtype], list[Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __call__(self, images: Tensor, draws: torch.Generator) -> Tensor:
        """Return images ready for the classifier, same shape; differentiable. `draws` is on the CPU."""
        positions = self.positions(len(images), images.shape[1:], draws)
        return self.moved(images, positions.to(images.device))

    def positions(self, count: int, shape: Sequence[int], draws: torch.Generator) -> Tensor:
        """Draw the source positions of the pixels of images of shape (C, H, W).

        Returns:
            (count or 1, H W), on the CPU: positions in the padded image, per image or common.
        """
        number = count if self.per_image else 1
        return torch.stack([_place(shape[1], shape[2], draws) for _ in range(number)])

    def moved(self, images: Tensor, positions: Tensor) -> Tensor:
        """Return images (B, C, H, W) as `__call__` does, by given `positions`; nothing waits."""
        padded = functional.pad(images, [_PADDING] * 4).flatten(2)
        taken = padded.gather(2, positions[:, None].expand(*padded.shape[:2], -1))
        return self.normalised(taken.view_as(images))

    def normalised(self, images: Tensor) -> Tensor:
        """Return images (B, C, H, W) in 0 to 1 in the form for the classifier, neither cropped nor flipped."""
        key = str(images.device), images.dtype
        if key not in self._constants:  # once, since each copy to a GPU makes it wait
            parts = (self.mean, self.std)
            self._constants[key] = [images.new_tensor(part)[:, None, None] for part in parts]

        mean, std = self._constants[key]
        return (images - mean) / std


def _place(height: int, width: int, draws: torch.Generator) -> Tensor:
    """Draw a crop and flips; return (H W,) positions in an image padded on all sides."""
    top, left = torch.randint(2 * _PADDING + 1, (2,), generator=draws).tolist()
    mirrored, overturned = (torch.rand(2, generator=draws) < 0.5).tolist()
    rows = torch.arange(top, top + height)
    columns = torch.arange(left, left + width)
    if overturned:
        rows = rows.flip(0)
    if mirrored:
        columns = columns.flip(0)

    return (rows[:, None] * (width + 2 * _PADDING) + columns).flatten()


class _Distances(torch.autograd.Function):
    """L1 distances (P,) of the P pairs of rows of x (B, D), in the order of `torch.triu_indices`.

    Row by row, with memory of the size of x: `pdist` needs B times that for its gradient on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.cat([(x[row + 1 :] - x[row]).abs().sum(1) for row in range(len(x))])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = torch.zeros_like(x)
        parts = grads[0].split([*range(len(x) - 1, -1, -1)])
        for row, part in enumerate(parts):
            # d|a - b|_1 / da = sign(a - b), and the opposite for b.
            pull = (x[row + 1 :] - x[row]).sign_().mul_(part[:, None])
            gradient[row + 1 :] += pull
            gradient[row] -= pull.sum(0)

        return gradient


def diversity_loss(images: Tensor, z: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Return L_div (eq. 7): small if images of a class differ as much as their conditions do.

    1 / (|x_i - x_j|_1 / |z_i - z_j|_1 + 1e-5), averaged over the pairs of a class, summed over the classes, divided by
    K; the L1 norms are sums. The paper gives one pair and no epsilon.

    Args:
        images: (B, C, H, W) as generated, neither augmented nor normalised.
        z: (B, D) conditions.
        labels: (B,) pseudo-labels.
        num_classes: K.
    """
    same_class = labels[:, None] == labels
    i, j = torch.triu_indices(len(labels), len(labels), 1, device=labels.device)
    paired = same_class[i, j]
    members = same_class.sum(1)[i]
    apart = _Distances.apply(images.flatten(1))
    conditions = _Distances.apply(z.flatten(1))
    # 1 for a pair of two classes: it is left out below, and must not divide by 0 before that.
    closeness = 1 / (apart / torch.where(paired, conditions, 1) + _EPSILON)
    # Pairs of a class with this number of members.
    pairs = (members * (members - 1) / 2).clamp(min=1)

    return torch.where(paired, closeness / pairs, 0).sum() / num_classes


@contextmanager
def statistics_gap(network: nn.Module) -> Iterator[list[Tensor]]:
    """Collect, one scalar per BatchNorm2d layer, the distance of its inputs from its running statistics (eq. 8).

    ||m - running mean||_2 + ||v - running variance||_2, with mean and biased variance of the layer's input over
    (N, H, W); L_dis is the sum. The list is filled by forward passes inside the block.
    """
    gaps = []

    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, nn.BatchNorm2d)
        variance, mean = torch.var_mean(inputs[0], (0, 2, 3), correction=0)
        if layer.running_mean is not None and layer.running_var is not None:
            # ||m - running mean||_2 + ||v - running variance||_2
            gaps.append((mean - layer.running_mean).norm() + (variance - layer.running_var).norm())

    handles = []
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            handles.append(module.register_forward_pre_hook(before))

    try:
        yield gaps
    finally:
        for handle in handles:
            handle.remove()
