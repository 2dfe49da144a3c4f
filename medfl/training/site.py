"""Site and Host: what the two halves of a method may use. A Site has one site's private data; a Host never does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medfl.core.message import Weights
from medfl.core.task import Task
from medfl.data.known_labels import AnnotatedClasses
from medfl.data.prepared import Shard
from medfl.data.public import Public
from medfl.training.network_pool import Networks

Penalty = Callable[[Tensor, Any], Tensor]
"""(features (B, d), targets) -> scalar, added to the loss of a step."""


class _WithNetworks:
    networks: Networks

    @property
    def device(self) -> torch.device:
        """Where the networks live."""
        return self.networks.device

    def network(self) -> nn.Module:
        """Build the network anew (at a site its own architecture) with the run's initial weights."""
        return self.networks.fresh()

    def model(self, weights: Weights) -> nn.Module:
        """Return a network holding a copy of `weights`, valid until the step ends."""
        return self.networks.lease(weights)


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


@dataclass(frozen=True)
class Site(_WithNetworks):
    """One participant in one round: its data, loss, settings and networks.

    Attributes:
        name: the site's name.
        seed: seed of this site in this round; open `stream(site.seed, purpose)` for draws of your own.
        train, validate, test: the site's own items.
        loss: (network output, targets) -> scalar tensor, mean over the batch.
        settings: local training settings.
        networks: the worker's network pool.
        round: the round, from 1; 0 before the first.
        task: the bundle's problem: kind, classes, class texts.
        journal: what `fit` did in this step (its reports, in order); stays at the site.
        optimizer_states: of optimisers that go on from round to round, by `fit`'s name for each; None: all are new.
        penalty: what `fit` adds to any method's loss; set by `replace` where a method shapes the features.
        common: the pool of the bundle's own network, also where this site's network is another.
        public: the run's public data, for the methods that use some.
        method: the run's, for what is said of it.
        known: the structures that its masks show, over which its loss is; None: all.
    """

    name: str
    seed: int
    train: Shard
    validate: Shard
    test: Shard
    loss: Callable[..., Tensor]
    settings: LocalSettings
    networks: Networks
    round: int = 0
    task: Task = Task()
    journal: list[Any] = field(default_factory=list)
    penalty: Penalty | None = None
    common: Networks | None = None
    public: Public | None = None
    method: str = ""
    optimizer_states: dict[str, Any] | None = None
    known: AnnotatedClasses | None = None

    @property
    def still(self) -> Shard:
        """The training items without random transforms, for what is measured on them rather than learned."""
        return self.train.deterministic()

    @property
    def num_samples(self) -> int:
        """Number of training items, the FedAvg weight."""
        return len(self.train)

    @property
    def initial_weights(self) -> Weights:
        """The run's common initial weights."""
        return self.networks.initial

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return a new optimiser of a network's trainable parameters, with the learning rates of this round."""
        optimizer = self.settings.optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.settings.lr_factor
        return optimizer

    def learning_rate(self, model: nn.Module) -> float:
        """Return the learning rate of this round (of the first parameter group, the mean over the epochs)."""
        settings = self.settings
        first = float(self.optimizer(model).param_groups[0]["lr"])
        rates = settings.rates
        if rates is None and settings.epoch_factor == 1:
            return first

        decay = settings.epoch_factor
        each = [
            (rates(e)[0] * settings.lr_factor if rates else first) * decay**e
            for e in range(settings.epochs)
        ]
        return sum(each) / settings.epochs

    def for_epochs(self, epochs: int) -> Site:
        """Return the same site with another number of local epochs."""
        return replace(self, settings=replace(self.settings, epochs=epochs))


@dataclass(frozen=True)
class Host(_WithNetworks):
    """What the server half of a method may use; never private data.

    Attributes:
        seed: seed of the server in this round.
        networks: the worker's network pool.
        round: the round, from 1; 0 before the first.
        task: the bundle's problem: kind, classes, class texts.
        public: the run's public data, for the methods that use some.
    """

    seed: int
    networks: Networks
    round: int = 0
    task: Task = Task()
    public: Public | None = None


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    """Copy a network's state dict (parameters and persistent buffers), detached from the network."""
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def zeros_of(network: nn.Module) -> dict[str, Tensor]:
    """Return a zero tensor for each trainable parameter, under its name."""
    return {
        name: torch.zeros_like(p.detach())
        for name, p in network.named_parameters()
        if p.requires_grad
    }


def merged(shared: Weights, personal: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the complete weights made of the received and the personal tensors; personal ones win."""
    return {**shared, **personal}
