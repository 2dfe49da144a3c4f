"""Site and Host: what the two halves of a method may use, and the networks that a worker builds once.

A Site has one site's private data; a Host never does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medfl.core.message import Weights
from medfl.core.seeding import stream
from medfl.core.task import Task
from medfl.data.prepared import Shard
from medfl.data.public import Public

Penalty = Callable[[Tensor, Any], Tensor]
"""(features (B, d), targets) -> scalar, added to the loss of a step."""


class Networks:
    """The networks of one worker: built once from the bundle, weights swapped in place.

    Within one `scope` every `lease` is a different network, so a method may hold several; when the scope ends all of
    them go back to the pool.
    """

    def __init__(self, factory: Callable[[], nn.Module], seed: int, device: torch.device) -> None:
        """Take the bundle's network factory; every network starts from the same weights, drawn on the run's stream."""
        self._factory, self._seed, self.device = factory, seed, device
        self._free: list[_Pooled] = []
        self._lent = threading.local()  # visits abreast have threads of their own
        self._initial: dict[str, Tensor] | None = None

    def fresh(self, *path: str | int) -> nn.Module:
        """Build a new network with the run's initial weights; it belongs to the caller.

        Args:
            path: names another draw of the weights, the same one in every round of the run.
        """
        with stream(self._seed, "network", *path):
            return self._factory().to(self.device)

    @property
    def initial(self) -> dict[str, Tensor]:
        """The run's initial weights (a copy kept on the device); read only."""
        if self._initial is None:
            pooled = _Pooled(self.fresh())
            self._initial = {name: tensor.clone() for name, tensor in pooled.tensors.items()}
            self._free.append(pooled)
        return self._initial

    def lease(self, weights: Weights) -> nn.Module:
        """Return a pooled network in training mode holding a copy of `weights`, a complete state dict.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape.
        """
        _ = self.initial
        pooled = self._free.pop() if self._free else _Pooled(self.fresh())
        self._leased().append(pooled)
        pooled.load(weights)
        return pooled.network

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Take every network leased inside back when the block ends."""
        held, self._lent.networks = self._leased(), []
        try:
            yield
        finally:
            self._free.extend(self._leased())
            self._lent.networks = held

    def _leased(self) -> list[_Pooled]:
        if not hasattr(self._lent, "networks"):
            self._lent.networks = []
        found: list[_Pooled] = self._lent.networks
        return found


class _Pooled:
    """A network with its state tensors at hand, and what it has besides as it was when built."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.tensors = {name: t.detach() for name, t in network.state_dict().items()}
        self.trainable = [(p, p.requires_grad) for p in network.parameters()]
        self.buffers = [(module, dict(module._buffers)) for module in network.modules() if module._buffers]
        self.unsaved = [
            (buffer, buffer.detach().clone())
            for module, named in self.buffers
            for name, buffer in named.items()
            if buffer is not None and name in module._non_persistent_buffers_set
        ]

    def load(self, weights: Weights) -> None:
        if weights.keys() != self.tensors.keys():
            odd = sorted(weights.keys() ^ self.tensors.keys())
            raise ValueError(
                f"these weights do not fit the network: {odd[0]!r} is in one of them only ({len(odd)} such)"
            )
        for module, named in self.buffers:  # a forward pass may put another tensor in a buffer's place
            module._buffers.clear()
            module._buffers.update(named)
        with torch.no_grad():
            for buffer, value in self.unsaved:
                buffer.copy_(value)
            for name, target in self.tensors.items():
                if weights[name].shape != target.shape:
                    raise ValueError(
                        f"{name!r} has shape {tuple(weights[name].shape)}; the network's is {tuple(target.shape)}"
                    )
                target.copy_(weights[name])
        for parameter, flag in self.trainable:
            parameter.requires_grad_(flag)
        self.network.train()


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Run a block with a network in evaluation mode; each layer's own mode is put back at the end."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def snapshot(network: nn.Module) -> dict[str, Tensor]:
    """Copy a network's state dict (parameters and persistent buffers), detached from the network."""
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


@dataclass(frozen=True)
class LocalSettings:
    """How a site trains.

    Attributes:
        epochs: passes over the site's data a round.
        batch_size: items per step; the last batch may be smaller.
        optimizer: builds the optimiser of a network's trainable parameters.
        lr_factor: multiplies every learning rate this round (decay).
        amp: automatic mixed precision.
        lr_decay: what one decay multiplies; `lr_factor` has it once for each round that is over.
    """

    epochs: int
    batch_size: int
    optimizer: Callable[[nn.Module], Optimizer]
    lr_factor: float = 1.0
    amp: bool = False
    lr_decay: float = 1.0


@dataclass(frozen=True)
class Site:
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
        penalty: what `fit` adds to any method's loss; set by `replace` where a method shapes the features.
        common: the pool of the bundle's own network, also where this site's network is another.
        public: the run's public data, for the methods that use some.
        method: the run's, for what is said of it.
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

    @property
    def device(self) -> torch.device:
        """Where the networks live."""
        return self.networks.device

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

    def network(self) -> nn.Module:
        """Build this site's network anew (its own architecture, the run's initial weights)."""
        return self.networks.fresh()

    def model(self, weights: Weights) -> nn.Module:
        """Return a network holding a copy of `weights`, valid until the step ends."""
        return self.networks.lease(weights)


@dataclass(frozen=True)
class Host:
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

    @property
    def device(self) -> torch.device:
        """Where the networks live."""
        return self.networks.device

    def network(self) -> nn.Module:
        """Build the bundle's network anew with the run's initial weights."""
        return self.networks.fresh()

    def model(self, weights: Weights) -> nn.Module:
        """Return a network holding a copy of `weights`, valid until the server's step ends."""
        return self.networks.lease(weights)


def zeros_of(network: nn.Module) -> dict[str, Tensor]:
    """Return a zero tensor for each trainable parameter, under its name."""
    return {name: torch.zeros_like(p.detach()) for name, p in network.named_parameters() if p.requires_grad}


def split_names(network: nn.Module, kinds: tuple[type[nn.Module], ...]) -> frozenset[str]:
    """Return the state-dict names that belong to layers of these types (by type: names such as `bn` prove nothing)."""
    names: set[str] = set()
    for prefix, module in network.named_modules(remove_duplicate=False):  # a state dict has all names of a shared layer
        if isinstance(module, kinds):
            names.update(f"{prefix}.{name}" if prefix else name for name in module.state_dict())
    return frozenset(names)


def merged(shared: Weights, personal: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the complete weights made of the received and the personal tensors; personal ones win."""
    return {**shared, **personal}
