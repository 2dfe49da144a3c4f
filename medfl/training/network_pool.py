"""Networks: one worker's networks, built once from the bundle and filled with the weights that a step needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from medfl.core import Tensors, Weights, stream
from medfl.networks.deep_supervision import with_full_size


class Networks:
    """The networks of one worker: built once from the bundle, weights swapped in place.

    Within one `scope` every `lease` returns a different network, so a method may hold several; when the scope ends, all
    of them return to the pool.
    """

    def __init__(self, factory: Callable[[], nn.Module], seed: int, device: torch.device) -> None:
        """Store the bundle's network factory; every network starts from the same weights, drawn on the run's stream."""
        self._factory = factory
        self.seed = seed
        self.device = device
        self._free: list[_PooledNetwork] = []
        self._leased = _Leased()
        self._initial: Tensors | None = None
        self._shared: dict[str, str] = {}
        self._start: Weights | None = None

    def set_initial_weights(self, weights: Weights) -> None:
        """Start every network from these weights instead of drawn ones: a complete state dict."""
        self._start = weights

    def fresh(self, *path: str | int) -> nn.Module:
        """Build a new network with the run's initial weights; it belongs to the caller.

        Args:
            path: names another random draw of the weights, constant over the rounds of the run; also drawn if the
                run starts from given weights.
        """
        with stream(self.seed, "network", *path):
            network = self._factory()
        if self._start is not None and not path:
            network.load_state_dict(self._start)
        return with_full_size(network).to(self.device)

    @property
    def initial(self) -> Tensors:
        """The run's initial weights (a copy on the device); read only."""
        if self._initial is None:
            pooled = _PooledNetwork(self.fresh())
            self._initial = {name: tensor.clone() for name, tensor in pooled.tensors.items()}
            self._shared = pooled.shared
            self._free.append(pooled)
        return self._initial

    def under_one_name(self, weights: Weights) -> Weights:
        """Return weights in which all names of a shared tensor have the value of its first name.

        A method that corrects the parameters at the server knows a shared one only by its first name.
        """
        _ = self.initial  # which finds the shared names
        unified = {}
        for name, tensor in weights.items():
            unified[name] = weights.get(self._shared.get(name, name), tensor)

        return unified

    def lease(self, weights: Weights) -> nn.Module:
        """Return a pooled network in training mode holding a copy of `weights`, a complete state dict.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape.
        """
        _ = self.initial
        pooled = self._free.pop() if self._free else _PooledNetwork(self.fresh())
        self._leased.networks.append(pooled)
        pooled.load(weights)
        return pooled.network

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Return every network leased inside to the pool when the block ends."""
        outer = self._leased.networks
        self._leased.networks = []
        try:
            yield
        finally:
            self._free.extend(self._leased.networks)
            self._leased.networks = outer


class _Leased(threading.local):
    """The networks leased in the innermost scope of each thread: interleaved visits have threads of their own."""

    def __init__(self) -> None:
        self.networks: list[_PooledNetwork] = []


class _PooledNetwork:
    """A network, its state tensors, and a copy of all its other state at construction."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.tensors = {name: t.detach() for name, t in network.state_dict().items()}
        self.shared: dict[str, str] = {}
        first_names: dict[int, str] = {}
        # with `keep_vars` a tied tensor is one object under all of its names
        for name, tensor in network.state_dict(keep_vars=True).items():
            first_name = first_names.setdefault(id(tensor), name)
            if first_name != name:
                self.shared[name] = first_name

        self.trainable = [(p, p.requires_grad) for p in network.parameters()]
        self.buffers: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        for module in network.modules():
            if module._buffers:
                self.buffers.append((module, dict(module._buffers)))

        # not in the state dict, so no weights restore them
        self.unsaved: list[tuple[Tensor, Tensor]] = []
        for module, buffers in self.buffers:
            for name in module._non_persistent_buffers_set:
                buffer = buffers.get(name)
                if buffer is not None:
                    self.unsaved.append((buffer, buffer.detach().clone()))

    def load(self, weights: Weights) -> None:
        if weights.keys() != self.tensors.keys():
            odd = sorted(weights.keys() ^ self.tensors.keys())
            raise ValueError(
                f"these weights do not fit the network: {odd[0]!r} is in one of them only ({len(odd)} such)"
            )

        # a forward pass may replace the tensor of a buffer
        for module, buffers in self.buffers:
            module._buffers.clear()
            module._buffers.update(buffers)

        with torch.no_grad():
            for buffer, value in self.unsaved:
                buffer.copy_(value)
            for name, target in self.tensors.items():
                if weights[name].shape != target.shape:
                    raise ValueError(
                        f"{name!r} has shape {tuple(weights[name].shape)}; the network's is {tuple(target.shape)}"
                    )

                target.copy_(weights[self.shared.get(name, name)])

        # the last lease may have frozen a part of it
        for parameter, flag in self.trainable:
            parameter.requires_grad_(flag)

        self.network.train()
