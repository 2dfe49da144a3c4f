"""The optimiser of a problem for any network, and its learning rates by epoch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau


class OptimizerFactory:
    """Builds the optimiser of a problem for a network.

    The expression that groups the parameters is evaluated once, on one network. Each copy of the optimiser then gets
    the parameters of another network by name.

    Args:
        optimizer: over `network`'s parameters, without a schedule, which would tie its copies to it.
        network: the network that it was made for.
        scheduler: the schedule of another optimiser of the same kind, None for constant learning rates.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, network: nn.Module, scheduler: Any
    ) -> None:
        """Store the optimiser over empty tensors, and which parameter each of them stands for."""
        empty = {}
        self._names: dict[int, str] = {}
        for name, parameter in network.named_parameters():
            placeholder = nn.Parameter(parameter.new_empty(0))
            empty[id(parameter)] = placeholder
            self._names[id(placeholder)] = name

        # deepcopy uses the copies registered in its memo, so no weights are kept
        self._template = copy.deepcopy(optimizer, dict(empty))
        self._base = [group["lr"] for group in optimizer.param_groups]
        self.scheduler: Any = None if isinstance(scheduler, ReduceLROnPlateau) else scheduler
        self._factors: list[tuple[float, ...]] = []

    def rates(self, epoch: int, lr: float | None = None) -> tuple[float, ...]:
        """Return the learning rate of each parameter group in an epoch, from 0; the schedule scales a given rate."""
        rates = self._base if lr is None else [lr] * len(self._base)
        if self.scheduler is None:
            return tuple(rates)

        while len(self._factors) <= epoch:
            self._step()

        factors = self._factors[epoch]
        return tuple(rate * factor for rate, factor in zip(rates, factors, strict=True))

    def _step(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the scheduler's optimiser takes no step
            if self._factors:
                self.scheduler.step()

        factors = []
        for group, base in zip(self.scheduler.optimizer.param_groups, self._base, strict=True):
            factors.append(group["lr"] / base if base else 1.0)

        self._factors.append(tuple(factors))

    def build(self, network: nn.Module, rates: tuple[float, ...]) -> torch.optim.Optimizer:
        """Build the optimiser of a network with a learning rate for each of its parameter groups.

        Parameters that a method added to the problem's network are trained like the first group.
        """
        parameters = dict(network.named_parameters())
        replacements = {}
        for key, name in self._names.items():
            if name in parameters:  # a method may have removed it
                replacements[key] = parameters.pop(name)

        optimizer = copy.deepcopy(self._template, replacements)
        optimizer.param_groups[0]["params"] += parameters.values()

        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr

        return optimizer
