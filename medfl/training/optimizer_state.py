"""The state of an optimiser as a State, and back."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer

from medfl.core.storage import State


def saved_state(optimizer: Optimizer) -> State:
    """Return an optimiser's state of each parameter (string keys, tensors and numbers)."""
    return {str(index): dict(values) for index, values in optimizer.state_dict()["state"].items()}


def restore_state(optimizer: Optimizer, state: State) -> None:
    """Let an optimiser continue from a saved state, which is copied: the optimiser works in place."""
    whole = optimizer.state_dict()
    whole["state"] = {
        int(index): {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}
        for index, values in state.items()
    }
    optimizer.load_state_dict(whole)
