"""The optimiser of a bundle's trainer for any network, and its learning rates from epoch to epoch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from medfl.bundle.configuration import Configuration


def is_disabled(config: Configuration, key: str, node: Mapping[str, Any]) -> bool:
    """Tell whether a component is left out: by `_disabled_`, which may be an expression."""
    value = config.evaluated(f"{key}#_disabled_") if "_disabled_" in node else False
    return value.strip().lower() == "true" if isinstance(value, str) else bool(value)


def find_schedule(config: Configuration) -> str:
    """Return the id of the schedule that a handler of the bundle steps once an epoch, "" where there is none."""
    for key, node in config.nodes("LrScheduleHandler"):
        by_epoch = node.get("epoch_level", True) is True and "step_transform" not in node
        if by_epoch and "lr_scheduler" in node and not is_disabled(config, key, node):
            return config.raw(f"{key}#lr_scheduler")[0]
    return ""


class OptimizerFactory:
    """Makes the optimiser of a bundle for a network.

    Whatever expression chooses and groups the parameters was evaluated once, on a network of its own; copies then take
    other networks' parameters in.

    Args:
        optimizer: of `network`'s parameters, without a schedule, which would tie its copies to it.
        network: the one that it was made for.
        scheduler: the schedule of another optimiser of the same kind, None where learning rates stay.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, network: nn.Module, scheduler: Any) -> None:
        """Keep the optimiser over empty tensors, and which parameter each stands for."""
        empty = {id(p): (nn.Parameter(p.new_empty(0)), name) for name, p in network.named_parameters()}
        self._template = copy.deepcopy(optimizer, {key: parameter for key, (parameter, _) in empty.items()})
        self._names = {id(parameter): name for parameter, name in empty.values()}
        self._base = [group["lr"] for group in optimizer.param_groups]
        self.scheduler: Any = None if isinstance(scheduler, ReduceLROnPlateau) else scheduler
        self._factors: list[tuple[float, ...]] = []

    def rates(self, epoch: int, lr: float | None = None) -> tuple[float, ...]:
        """Return the learning rate of each parameter group in an epoch, from 0; the schedule scales what is given."""
        rates = self._base if lr is None else [lr] * len(self._base)
        if self.scheduler is None:
            return tuple(rates)
        while len(self._factors) <= epoch:
            self._step()
        return tuple(rate * factor for rate, factor in zip(rates, self._factors[epoch], strict=True))

    def _step(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the scheduler's optimiser makes no step
            if self._factors:
                self.scheduler.step()
        now = [group["lr"] for group in self.scheduler.optimizer.param_groups]
        self._factors.append(tuple(lr / base if base else 1.0 for lr, base in zip(now, self._base, strict=True)))

    def build(self, network: nn.Module, rates: tuple[float, ...]) -> torch.optim.Optimizer:
        """Build the optimiser of a network with a learning rate for each of its parameter groups.

        Parameters that a method added to the bundle's network are trained as the first group is.
        """
        parameters = dict(network.named_parameters())
        # a method may have left one out, or put some in
        named = {key: parameters.pop(name) for key, name in self._names.items() if name in parameters}
        optimizer: torch.optim.Optimizer = copy.deepcopy(self._template, named)
        optimizer.param_groups[0]["params"] += parameters.values()
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
        return optimizer
