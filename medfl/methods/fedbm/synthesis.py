"""What FedBM's generator is fed with, and the shape of what it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medfl.core.errors import InputError, RunError, errors_safe_to_send
from medfl.core.message import Message, Messages
from medfl.methods._parts.text_classifier import TextGaussians
from medfl.networks.generator import Augmentation, Generator, check_size

AXES = ("channels", "height", "width")
"""Of an image, as messages and States name them."""
CONDITIONS = ("concept", "noise", "noise+onehot")
"""What z is made of: the class's Gaussian; N(0, I); N(0, I) and the label."""


@dataclass(frozen=True)
class Conditions:
    """Where pseudo-labels, conditions and augmentations come from.

    Attributes:
        gaussians: the classes' distributions with the covariance of z.
        kind: one of `CONDITIONS`.
        augmentation: crop, flips, normalisation.
        draws: the generator of all random numbers, on the CPU.
    """

    gaussians: TextGaussians
    kind: str
    augmentation: Augmentation
    draws: torch.Generator

    @property
    def dimension(self) -> int:
        """Length of z."""
        classes, size = self.gaussians.mean.shape
        return size + (classes if self.kind == "noise+onehot" else 0)

    def draw(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return y ~ U over all classes (count,) and z (count, dimension), eq. 9."""
        classes = len(self.gaussians.mean)
        labels = torch.randint(classes, (count,), generator=self.draws)
        return labels.to(device), self.conditions(labels).to(device)

    def conditions(self, labels: Tensor) -> Tensor:
        """Draw z (count, dimension) for labels (count,), on the CPU."""
        if self.kind == "concept":
            return self.gaussians.draw(labels, self.draws)

        classes, size = self.gaussians.mean.shape
        z = torch.randn(len(labels), size, generator=self.draws)
        if self.kind == "noise+onehot":
            z = torch.cat([z, nn.functional.one_hot(labels, classes).to(z.dtype)], 1)

        return z

    def positions(self, count: int, shape: Sequence[int], device: torch.device) -> Tensor:
        """Draw crops and flips for so many images of a shape (channels, height, width)."""
        return self.augmentation.positions(count, shape, self.draws).to(device)

    def augment(self, images: Tensor) -> Tensor:
        """Return generated images (B, C, H, W) as a network takes them."""
        return self.augmentation(images, self.draws)


def shape_of(images: Tensor, site: str) -> dict[str, float]:
    """Return the size along `AXES` of a batch of a site's images.

    Raises:
        InputError: its items are no images.
    """
    if images.ndim != 4:
        raise InputError(
            f"site {site!r} has items of shape {tuple(images.shape[1:])}",
            "the generator makes images (channels, height, width)",
            "set generator=false",
        )

    return dict(zip(AXES, map(float, images.shape[1:]), strict=True))


def common_shape(introductions: Messages) -> list[int]:
    """Return channels, height and width of everybody's images.

    Raises:
        InputError: they differ, nobody has any, or the generator cannot make images of this size.
    """
    shapes = {}
    for name in sorted(introductions):
        scalars = introductions[name].scalars
        if scalars:
            shapes[name] = [int(scalars[axis]) for axis in AXES]

    if not shapes:
        raise InputError(
            "no site has a training image", "the generator needs their size", "give sites images"
        )

    first, shape = next(iter(shapes.items()))
    for name, shape_of_site in shapes.items():
        if shape_of_site != shape:
            raise InputError(
                f"site {name!r} has images of shape {shape_of_site}, site {first!r} of {shape}",
                "the generator makes images of one size",
                "let the bundle's transforms resize them, or set generator=false",
            )

    check_size(*shape[1:])
    return shape


def check_received(down: Message, dimension: int, shape: Mapping[str, float]) -> dict[str, int]:
    """Compare a generator that a server sent with the one that a site expects; return its version and image size.

    z has this dimension, and the site's images the shape, by `AXES`; empty at a site without any.

    Raises:
        RunError: it is for other images or conditions, or no generator.
    """
    numbers = {name: down.scalars.get(name, -1.0) for name in ("version", *AXES)}
    wrong = []
    for name, number in numbers.items():
        if not (1 <= number < 2**31 and number == int(number)):
            wrong.append(f"{name} {number:g}")

    for axis, length in shape.items():
        if numbers[axis] != length:
            wrong.append(f"{axis} {numbers[axis]:g}, not {length:g}")

    # Sizes first: a network of absurd sizes is not even described, on no device.
    if not wrong:
        with torch.device("meta"):
            expected = Generator(dimension, *(int(numbers[axis]) for axis in AXES)).state_dict()

        weights = down["generator"]
        wrong = [f"{name!r}" for name in sorted(weights.keys() ^ expected.keys())]
        for name, like in expected.items() if not wrong else ():
            tensor = weights[name]
            if tensor.shape != like.shape or tensor.dtype != like.dtype:
                wrong.append(f"{name!r} of {tuple(tensor.shape)} {tensor.dtype}")

    if wrong:
        with errors_safe_to_send():
            raise RunError(
                f"the server's generator does not fit this site: {wrong[0]} ({len(wrong)} such)"
            )

    return {name: int(number) for name, number in numbers.items()}
