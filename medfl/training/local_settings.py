"""How a site trains: its settings, the resulting learning rates, and an optimiser's state between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from medfl.storage import State


@dataclass(frozen=True)
class LocalSettings:
    """How a site trains.

    Attributes:
        epochs: passes over the site's data per round.
        batch_size: items per step; the last batch may be smaller.
        optimizer: builds the optimiser of a network's trainable parameters.
        lr_factor: multiplies every learning rate this round (decay).
        epoch_factor: multiplies it after each local epoch.
        amp: automatic mixed precision.
        rates: (local epoch, from 0) -> the optimiser's learning rates in it before decay, one per parameter group;
            None if they are constant.
    """

    epochs: int
    batch_size: int
    optimizer: Callable[[nn.Module], Optimizer]
    lr_factor: float = 1.0
    amp: bool = False
    rates: Callable[[int], Sequence[float]] | None = None
    epoch_factor: float = 1.0


def saved_state(optimizer: Optimizer) -> State:
    """Return an optimiser's state of each parameter (string keys, tensors and numbers)."""
    return {str(index): dict(values) for index, values in optimizer.state_dict()["state"].items()}


def restore_state(optimizer: Optimizer, state: State) -> None:
    """Let an optimiser continue from a saved state, which is copied: the optimiser works in place."""
    complete_state = optimizer.state_dict()
    complete_state["state"] = {int(index): deepcopy(values) for index, values in state.items()}
    optimizer.load_state_dict(complete_state)


def set_rates(optimizer: Optimizer, settings: LocalSettings, epoch: int) -> None:
    """Change the learning rates at the start of a local epoch, except the first (0)."""
    if epoch == 0:
        return

    factor = settings.epoch_factor
    for group in optimizer.param_groups if factor != 1 else ():
        group["lr"] = group["lr"] * factor

    if settings.rates is None:
        return

    # from the schedule's own rate: multiplying the group's current rate would compound the factors
    for group, rate in zip(optimizer.param_groups, settings.rates(epoch), strict=False):
        group["lr"] = rate * settings.lr_factor * factor**epoch
