"""Method: an algorithm as a frozen value whose defaults are FedAvg; a new one overrides only what its paper changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medfl.core.declared import declared
from medfl.core.errors import InputError, RunError
from medfl.core.message import Message, Weights
from medfl.core.task import TASKS, Task
from medfl.storage.files import State
from medfl.training import FitReport, Host, Site, fit, merged, snapshot

_BLOCK = 32768
"""Numbers summed at a time on a CPU: their float64 sum and the buffer beside it stay in its cache."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[Any, ...] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare an option of a method: default, help, choices and limits exist once, on the field."""
    return declared(default, help, choices=choices, minimum=minimum, maximum=maximum)


def same_option(owner: type, name: str) -> Any:
    """Declare an option as another dataclass does, so that what several methods take is written once."""
    option_field = {member.name: member for member in fields(owner)}[name]
    return field(default=option_field.default, metadata=option_field.metadata)


@dataclass(frozen=True)
class Group:
    """A group of tensors in a method's messages.

    Attributes:
        name: its name in `Message`.
        up: replies have it.
        down: broadcasts have it.
        like_weights: its tensors have names, shapes and types of the network's; any other is refused.
        smaller: noise does it no harm, so `--messages float16|bfloat16|int8` make it smaller too.
    """

    name: str
    up: bool = True
    down: bool = True
    like_weights: bool = False
    smaller: bool = False


@dataclass(frozen=True)
class Method:
    """Federated averaging; the base of all methods.

    The server half sees a `Host` and messages, the site half a `Site`, its own State and one message. Both are
    functions of their arguments: whatever must survive a round is returned as State.

    Class facts:
        paper: title, authors, year.
        tasks: the tasks that it supports.
        judged: "global" if the server's model is the product, "personal" if each site's own model is.
        takes_prototypes: class prototypes can be shared beside its weights (`prototypes=true`).
        pools_data: the data of all sites is pooled at one participant (the centralised reference only).
        shown: options with which one round has all that travels, where the defaults send some of it later only.
    """

    paper: ClassVar[str] = ""
    tasks: ClassVar[tuple[str, ...]] = TASKS
    judged: ClassVar[str] = "global"
    takes_prototypes: ClassVar[bool] = False
    pools_data: ClassVar[bool] = False
    shown: ClassVar[Mapping[str, Any]] = {}

    # The network

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the network that this method trains, made from the bundle's (default: that one)."""
        return network

    def check(self, site: Site) -> None:
        """Raise InputError for data that the method cannot train on; called before anything is written or trained."""

    # What leaves and what stays

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the state-dict names that never leave a site (default: none)."""
        return frozenset()

    def groups(self) -> tuple[Group, ...]:
        """Declare the groups of tensors that its messages have beside the network's weights (default: none)."""
        return ()

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Mapping[str, Message]) -> State:
        """Make the server's first State from the initial weights and the sites' introductions."""
        personal = self.personal_names(host.model(weights))
        return {"weights": {name: tensor for name, tensor in weights.items() if name not in personal}}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Return what the server sends to one site."""
        return Message({"weights": server["weights"]})

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Return the server's next State; w = sum_k p_k w_k with p_k by sample counts (FedAvg)."""
        if server.get("weights") == {}:  # every tensor is personal
            return server
        return {**server, "weights": weighted_mean(replies, "weights", sample_shares(replies))}

    def observed(self, server: State, replies: Mapping[str, Message]) -> Mapping[str, float]:
        """Return numbers that say how the method fared in a round, from the server's next State (default: none).

        They go into rounds.jsonl and become curves; nothing else reads them.
        """
        return {}

    def global_predictor(self, host: Host, server: State) -> nn.Module | None:
        """Return the server's network for any new site, or None where the server alone has none."""
        network = host.model(host.networks.initial)
        return None if self.personal_names(network) else host.model(server["weights"])

    # Site half

    def introduce(self, site: Site) -> Message:
        """Return what a site tells the server once, before round 1 (default: nothing)."""
        return Message()

    def init_site(self, site: Site) -> State:
        """Return a site's first State: its personal tensors, from the common initial weights."""
        names = self.personal_names(site.model(site.initial_weights))
        return {"weights": {name: site.initial_weights[name].clone() for name in sorted(names)}} if names else {}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train on the site's data from the received model; return the next State and the reply."""
        model = site.model(_complete(state, down))
        report = self.train(model, site, state, down)
        if not isinstance(report, FitReport):
            raise InputError(
                f"train of method {site.method!r} returned a {type(report).__name__}",
                "it returns what fit gave, a FitReport",
                "return fit(...)",
            )
        trained, personal = snapshot(model), state.get("weights", {})
        reply = Message(
            {"weights": {name: tensor for name, tensor in trained.items() if name not in personal}},
            {"samples": site.num_samples},
        )
        return ({**state, "weights": {name: trained[name] for name in personal}} if personal else state), reply

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train `model` in place; the hook for methods that change only the loss or the gradient."""
        return fit(model, site)

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the network that the site is judged by, from its State and the newest broadcast."""
        return site.model(_complete(state, down))


def _complete(state: State, down: Message) -> Weights:
    """Return the received weights and the site's own; a group without tensors does not cross a wire."""
    return merged(down.tensors.get("weights", {}), state.get("weights", {}))


# Means over a group of replies, in sorted site order, never in order of arrival


def sample_shares(replies: Mapping[str, Message]) -> dict[str, float]:
    """Return p_k = n_k / sum of n over the round's participants (McMahan et al. 2017, FedAvg).

    Raises:
        RunError: a reply does not have its n_k.
    """
    if without := [name for name in sorted(replies) if "samples" not in replies[name].scalars]:
        raise RunError(f"site {without[0]!r}: its reply does not say of how many items it is")
    total = sum(replies[name].scalars["samples"] for name in sorted(replies))
    return {name: replies[name].scalars["samples"] / total for name in sorted(replies)}


def uniform_shares(replies: Mapping[str, Message]) -> dict[str, float]:
    """Return 1/S for each of the S participants."""
    return {name: 1 / len(replies) for name in sorted(replies)}


MEANS = ("uniform", "samples")
"""Choices of an option that `mean_shares` reads."""


def mean_shares(weighting: str, replies: Mapping[str, Message]) -> dict[str, float]:
    """Return what an option `weights` says: the shares of a plain mean ("uniform"), or by samples ("samples")."""
    return uniform_shares(replies) if weighting == "uniform" else sample_shares(replies)


def weighted_mean(replies: Mapping[str, Message], group: str, shares: Mapping[str, float]) -> dict[str, Tensor]:
    """Average one tensor group with the given shares (they sum to 1).

    Floating tensors, BatchNorm's running statistics among them, are averaged; integer counters such as
    `num_batches_tracked` take the maximum, since the mean of counters means nothing.

    Block by block the replies are added to a float64 sum, which is rounded once at the end: replies that lie on disk
    need not fit in memory, many small shares lose nothing, and no large tensor is written but the mean.
    """
    parts = {name: replies[name][group] for name in sorted(replies)}
    first, *others = parts
    out: dict[str, Tensor] = {}
    with torch.no_grad():
        for key, like in parts[first].items():
            if not like.is_floating_point():
                out[key] = like.clone()
                for name in others:
                    torch.maximum(out[key], parts[name][key], out=out[key])
                continue
            read = {name: slices(weights, key) for name, weights in parts.items()}
            mean = torch.empty_like(like, memory_format=torch.contiguous_format)
            flat, size = mean.view(-1), max(1, like.numel() if like.device.type != "cpu" else _BLOCK)
            wide = torch.empty(min(size, like.numel()), dtype=torch.float64, device=like.device)
            for start in range(0, like.numel(), size):
                stop = min(start + size, like.numel())
                total = read[first](start, stop).to(torch.float64, copy=True).mul_(shares[first])
                for name in others:  # widened first: adding float32 to float64 takes twice as long
                    total.add_(wide[: stop - start].copy_(read[name](start, stop)), alpha=shares[name])
                flat[start:stop] = total
            out[key] = mean
    return out


def slices(weights: Weights, name: str) -> Callable[[int, int], Tensor]:
    """Return what gives the numbers start..stop of a tensor; of a reply on disk those are read and no more."""
    read = getattr(weights, "part", None)
    if read is not None:
        return partial(read, name)
    flat = weights[name].reshape(-1)
    return lambda start, stop: flat[start:stop]


def step_towards(old: Weights, mean: Weights, beta: float, names: Collection[str]) -> dict[str, Tensor]:
    """Return (1 - beta) old + beta mean of the named tensors, and the mean of all others."""
    moved = {} if beta == 1 else {name: old[name] + beta * (mean[name] - old[name]) for name in names}
    return {**mean, **moved}


def trained_names(network: nn.Module) -> list[str]:
    """Return the names of the trainable parameters in a state dict, all those of a shared one."""
    return [name for name, p in network.named_parameters(remove_duplicate=False) if p.requires_grad]
