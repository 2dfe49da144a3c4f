"""Heads with one output per class, for each item or each pixel, and their training on features alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from medfl.core import InputError, Task
from medfl.networks.heads import Head, head, head_name


def class_head(network: nn.Module, task: Task) -> nn.Linear:
    """Return the head of a classification network: a linear layer with one output per class.

    Raises:
        InputError: the head is of another kind.
    """
    layer = head(network)
    if not isinstance(layer, nn.Linear) or layer.out_features != task.num_classes:
        raise InputError(
            f"a network whose head {head_name(network)!r} is {layer}",
            f"this method needs a linear layer with one output for each of the {task.num_classes} classes",
            "use a network that ends in such a layer, or another method (medfl methods)",
        )

    return layer


def class_count(network: nn.Module) -> int:
    """Return K, the number of outputs of a head."""
    return len(head(network).weight)


def with_class_head(network: nn.Module, task: Task) -> nn.Module:
    """Return the network if its head has one output per class: a linear layer, or for segmentation a 1x1 convolution.

    Raises:
        InputError: the head is of another kind.
    """
    if task.kind != "segmentation":
        class_head(network, task)
        return network

    layer = head(network)
    outputs = 0
    if isinstance(layer, nn.Conv2d | nn.Conv3d) and {*layer.kernel_size, layer.groups} == {1}:
        outputs = len(layer.weight)

    # A task may not state its number of classes; then the head's counts.
    if outputs < 2 or outputs != (task.num_classes or outputs):
        raise InputError(
            f"a network whose head {head_name(network)!r} is {layer}",
            "this method needs a convolution of size 1 with one output for each class, the background among them",
            "use a network that ends in such a layer, or another method (medfl methods)",
        )

    return network


def head_like(layer: Head, outputs: int) -> nn.Module:
    """Return a new linear layer, or convolution of size 1, with another number of outputs for the same features."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, outputs)
    kind: Any = type(layer)
    return kind(layer.in_channels, outputs, 1)  # type: ignore[no-any-return]


def logits(layer: nn.Module, features: Tensor) -> Tensor:
    """Apply a head to features (N, d): (N, K). A convolution treats each as a map of one pixel."""
    dims = next(layer.parameters()).ndim - 2
    # (N, d) for a linear layer, (N, d, 1, 1[, 1]) for a convolution.
    output: Tensor = layer(features[(..., *[None] * dims)])
    return output.flatten(1)


def fit_head(
    layer: nn.Module,
    optimizer: torch.optim.Optimizer,
    features: Tensor,
    labels: Tensor,
    epochs: int,
    size: int,
    generator: torch.Generator,
) -> None:
    """Train a head by cross-entropy on features, in random order.

    Args:
        layer: the head, in place.
        optimizer: of its parameters, new.
        features: (N, d), on its device.
        labels: (N,) class indices, likewise.
        epochs: passes over them.
        size: features per step.
        generator: draws the order.
    """
    # drawn on the CPU, so that a GPU sees the same order
    for _ in range(epochs):
        order = torch.randperm(len(features), generator=generator).to(features.device)
        for chosen in torch.split(order, size):
            optimizer.zero_grad()
            loss = cross_entropy(logits(layer, features[chosen]), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
