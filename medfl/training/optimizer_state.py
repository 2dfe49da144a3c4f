"""The state of an optimiser as a State, and back, and its learning rates from epoch to epoch."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from medfl.storage.files import State
from medfl.training.site import LocalSettings


def saved_state(optimizer: Optimizer) -> State:
    """Return an optimiser's state of each parameter (string keys, tensors and numbers)."""
    return {str(index): dict(values) for index, values in optimizer.state_dict()["state"].items()}


def restore_state(optimizer: Optimizer, state: State) -> None:
    """Let an optimiser continue from a saved state, which is copied: the optimiser works in place."""
    whole = optimizer.state_dict()
    whole["state"] = {
        int(index): {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
        for index, values in state.items()
    }
    optimizer.load_state_dict(whole)


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
