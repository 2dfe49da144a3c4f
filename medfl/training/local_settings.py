"""How a site trains: its settings, the learning rates they give, and an optimiser's state from round to round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from medfl.storage.files import State


@dataclass(frozen=True)
class LocalSettings:
    """How a site trains.

    Attributes:
        epochs: passes over the site's data a round.
        batch_size: items per step; the last batch may be smaller.
        optimizer: builds the optimiser of a network's trainable parameters.
        lr_factor: multiplies every learning rate this round (decay).
        epoch_factor: multiplies it after each local epoch.
        amp: automatic mixed precision.
        lr_decay: factor of one decay; `lr_factor` is its power by the rounds, or local epochs, that are over.
        rates: (local epoch, from 0) -> the optimiser's learning rates in it before decay, one for each parameter group;
            None where they stay.
    """

    epochs: int
    batch_size: int
    optimizer: Callable[[nn.Module], Optimizer]
    lr_factor: float = 1.0
    amp: bool = False
    lr_decay: float = 1.0
    rates: Callable[[int], Sequence[float]] | None = None
    epoch_factor: float = 1.0


def saved_state(optimizer: Optimizer) -> State:
    """Return an optimiser's state of each parameter (string keys, tensors and numbers)."""
    return {str(index): dict(values) for index, values in optimizer.state_dict()["state"].items()}


def restore_state(optimizer: Optimizer, state: State) -> None:
    """Let an optimiser continue from a saved state, which is copied: the optimiser works in place."""
    complete_state = optimizer.state_dict()
    complete_state["state"] = {
        int(index): {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
        for index, values in state.items()
    }
    optimizer.load_state_dict(complete_state)


def set_rates(optimizer: Optimizer, settings: LocalSettings, epoch: int) -> None:
    """Change the learning rates where a local epoch begins, the first (0) excepted."""
    if epoch == 0:
        return

    factor = settings.epoch_factor
    for group in optimizer.param_groups if factor != 1 else ():
        group["lr"] = group["lr"] * factor

    for group, rate in zip(
        optimizer.param_groups, settings.rates(epoch) if settings.rates else (), strict=False
    ):
        group["lr"] = rate * settings.lr_factor * factor**epoch
