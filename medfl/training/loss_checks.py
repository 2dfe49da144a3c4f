"""The training loss: what is added to it, and checks that it is one number, and finite."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from medfl.core.errors import InputError, RunError
from medfl.networks.heads import entering_head
from medfl.training.site import Penalty, Site


def check_one_number(loss: Any, site: Site) -> Tensor:
    """Return the loss of a step; raise InputError if a method's objective gave anything but one number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    if isinstance(loss, Tensor):
        form = f"has the shape {tuple(loss.shape)}"
    else:
        form = f"is a {type(loss).__name__}"

    raise InputError(
        f"the loss of method {site.method!r} {form}",
        "a loss is one number, the mean over the batch",
        "take its mean()",
    )


def check_finite(losses: list[Tensor], start: int, site: Site) -> None:
    """Raise RunError if a loss from `start` on is not finite: an epoch at once, so that no step stops a GPU."""
    if len(losses) == start:
        return
    bad = (~torch.isfinite(torch.stack(losses[start:]))).nonzero()
    if len(bad):
        step = start + int(bad[0]) + 1
        raise RunError(
            f"site {site.name!r}, round {site.round}: the training loss is {float(losses[step - 1])} at step {step}; "
            "the last good round is kept; lower the learning rate or look at this site's data"
        )


def penalised(objective: Callable[..., Tensor], penalty: Penalty | None) -> Callable[..., Tensor]:
    """Return an objective with a penalty on the features added: on what entered the head in its first pass."""
    if penalty is None:
        return objective

    def with_penalty(network: nn.Module, x: Any, y: Any, *more: Any) -> Tensor:
        with entering_head(network) as features:
            loss = objective(network, x, y, *more)
        return loss + penalty(features[0], y)

    return with_penalty


def mean_loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss of (prediction, target) reduced to its mean, as MONAI's trainer reduces it."""

    def loss(prediction: Any, target: Any) -> Tensor:
        value = function(prediction, target)
        return value if value.ndim == 0 else value.mean()

    return update_wrapper(loss, function, (), ())  # inspect.unwrap finds the loss itself
