"""Method: an algorithm as a frozen value whose defaults are FedAvg; a new one overrides only what its paper changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medfl.core import (
    TASKS,
    Config,
    InputError,
    Message,
    Messages,
    RunError,
    Task,
    Tensors,
    Weights,
    fields_of,
    pick,
    pick_known,
    without,
)
from medfl.core.declared import declared
from medfl.storage import State
from medfl.training import FitReport, Host, Site, fit, merged, snapshot
from medfl.training.site import Collated as Collated

_BLOCK = 32768
"""Numbers summed at a time on a CPU: their float64 sum and the buffer beside it fit in its cache."""


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


def one_of(help: str, *choices: object) -> Any:
    """Declare an option that takes one of these values; its default is the first."""
    return option(choices[0], help, choices=choices)


def same_option(owner: type, name: str) -> Any:
    """Declare an option like another dataclass does, so that options of several methods are written once."""
    option_field = fields_of(owner)[name]
    return field(default=option_field.default, metadata=option_field.metadata)


@dataclass(frozen=True)
class Group:
    """A group of tensors in a method's messages.

    Attributes:
        name: its name in `Message`.
        up: replies contain it.
        down: broadcasts contain it.
        like_weights: its tensors have the names, shapes and types of the network's tensors; others are refused.
        smaller: it tolerates rounding, so `--messages float16|bfloat16|int8` compresses it too.
    """

    name: str
    up: bool = True
    down: bool = True
    like_weights: bool = False
    smaller: bool = False


@dataclass(frozen=True)
class Method:
    """Federated averaging; the base of all methods.

    The server half gets a `Host` and messages; the site half gets a `Site`, its State and one message. Both halves are
    functions of their arguments: what must survive a round is returned as State.

    One round calls `broadcast` on the server, `local_update` at each site and `aggregate` on the server.

    Class facts:
        paper: title, authors, year.
        tasks: the supported tasks.
        judged: "global" if the result is the server's model, "personal" if it is one model per site.
        takes_prototypes: class prototypes can be shared beside the weights (`prototypes=true`).
        pools_data: one participant gets the data of all sites (only the centralised reference does this).
        shown: options that let a single round send every group, where the defaults send some of them later.
    """

    paper: ClassVar[str] = ""
    tasks: ClassVar[tuple[str, ...]] = TASKS
    judged: ClassVar[str] = "global"
    takes_prototypes: ClassVar[bool] = False
    pools_data: ClassVar[bool] = False
    shown: ClassVar[Config] = {}

    # The network

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the network to train, made from the bundle's (default: the bundle's own)."""
        return network

    def check(self, site: Site) -> None:
        """Raise InputError for data that the method cannot train on; called before the run starts."""

    # What leaves and what stays

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the state-dict names that never leave a site (default: none)."""
        return frozenset()

    def groups(self) -> tuple[Group, ...]:
        """Declare the tensor groups of its messages other than the network's weights (default: none)."""
        return ()

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Return the server's first State, made from the initial weights and the sites' introductions."""
        return {"weights": without(weights, self.personal_names(host.model(weights)))}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Return what the server sends to one site (default: the weights, and its groups that go down)."""
        return Message(pick_known(server, group_names(self, "down")))

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Return the server's next State: the mean by sample counts (FedAvg), or by the option `weights`."""
        if server.get("weights") == {}:  # every tensor is personal
            return server

        # w^{t+1} = sum_k p_k w_k^t
        shares = mean_shares(getattr(self, "weights", "samples"), replies)
        return {**server, "weights": weighted_mean(replies, "weights", shares)}

    def observed(self, server: State, replies: Messages) -> Mapping[str, float]:
        """Return the method's own figures of a round, given the server's next State (default: none).

        They are written to rounds.jsonl and plotted as curves; nothing else reads them.
        """
        return {}

    def global_predictor(self, host: Host, server: State) -> nn.Module | None:
        """Return the network that the server can give to a new site, or None if it lacks personal tensors."""
        network = host.model(host.networks.initial)
        if self.personal_names(network):
            return None

        return host.model(server["weights"])

    # Site half

    def introduce(self, site: Site) -> Message:
        """Return what a site tells the server once, before round 1 (default: nothing)."""
        return Message()

    def init_site(self, site: Site) -> State:
        """Return a site's first State: its personal tensors, from the common initial weights."""
        personal = self.personal_names(site.model(site.initial_weights))
        if not personal:
            return {}

        # clones: the pool's initial tensors are lent to every site
        return {"weights": {name: site.initial_weights[name].clone() for name in sorted(personal)}}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train on the site's data from the received model; return the next State and the reply."""
        model = site.model(_complete(state, down))
        report = self.train(model, site, state, down)
        if not isinstance(report, FitReport):
            raise InputError(
                f"train of method {site.method!r} returned a {type(report).__name__}",
                "train returns the FitReport of fit",
                "return fit(...)",
            )

        trained = snapshot(model)
        # Only personal tensors are in the State under "weights".
        personal = state.get("weights", {})
        reply = site.reply(without(trained, personal))
        if not personal:
            return state, reply

        return {**state, "weights": pick(trained, personal)}, reply

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train `model` in place. Override this alone if the paper changes only the loss or the gradient."""
        return fit(model, site)

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the network that the site is scored with, from its State and the newest broadcast."""
        return site.model(_complete(state, down))


def _complete(state: State, down: Message) -> Weights:
    """Return the received weights with the site's personal tensors."""
    received = down.tensors.get("weights", {})  # an empty group is not sent
    return merged(received, state.get("weights", {}))


# Means over a group of replies. Sites are added in sorted order, never in order of arrival, so that the sums have the
# same bits on every run.


def group_names(method: Method, flag: str) -> list[str]:
    """Return `weights` and the method's groups with this flag of `Group`: "up", "down", "like_weights", "smaller"."""
    return ["weights", *(group.name for group in method.groups() if getattr(group, flag))]


def sample_shares(replies: Messages) -> dict[str, float]:
    """Return p_k = n_k / sum of n over the round's participants (McMahan et al. 2017, FedAvg).

    Raises:
        RunError: a reply lacks its n_k.
    """
    samples = {}
    for name in sorted(replies):
        scalars = replies[name].scalars
        if "samples" not in scalars:
            raise RunError(f"site {name!r}: its reply lacks the number of training samples")
        samples[name] = scalars["samples"]

    total = sum(samples.values())
    return {name: count / total for name, count in samples.items()}


def uniform_shares(replies: Messages) -> dict[str, float]:
    """Return 1/S for each of the S participants."""
    return {name: 1 / len(replies) for name in sorted(replies)}


MEANS = ("uniform", "samples")
"""Choices of an option that `mean_shares` reads."""


def mean_shares(weighting: str, replies: Messages) -> dict[str, float]:
    """Return the shares that an option `weights` names: equal ("uniform") or by sample counts ("samples")."""
    if weighting == "uniform":
        return uniform_shares(replies)

    return sample_shares(replies)


def sent(replies: Messages, group: str) -> list[Weights]:
    """Return this group of all replies in the order of the sites' names, on which sums and ties depend."""
    return [replies[name][group] for name in sorted(replies)]


def weighted_mean(replies: Messages, group: str, shares: Mapping[str, float]) -> Tensors:
    """Average one tensor group with the given shares (they sum to 1).

    Floating tensors, including BatchNorm's running statistics, are averaged; integer counters such as
    `num_batches_tracked` take the maximum, since the mean of counters has no meaning.
    """
    parts = {name: replies[name][group] for name in sorted(replies)}
    first = next(iter(parts.values()))
    means = {}

    with torch.no_grad():
        for key, like in first.items():
            if like.is_floating_point():
                means[key] = _mean_tensor(like, parts, key, shares)
            else:
                # The maximum, so that no site's counter goes back.
                means[key] = torch.stack([weights[key] for weights in parts.values()]).amax(0)

    return means


def _mean_tensor(
    like: Tensor, parts: Mapping[str, Weights], key: str, shares: Mapping[str, float]
) -> Tensor:
    """Average one floating tensor, the first part's of which is `like`, block by block.

    Each block is summed in float64 and rounded once, so that many small shares lose no precision. Replies on disk are
    read a block at a time: they need not fit in memory, and no other large tensor is allocated than the mean.
    """
    # the first opens the sum, so that a mean of one reply is that reply to the bit
    first, *others = parts
    readers = {name: slices(weights, key) for name, weights in parts.items()}

    # A GPU takes the tensor at once: there, blocks would cost launches and save nothing.
    on_cpu = like.device.type == "cpu"
    size = _BLOCK if on_cpu else max(1, like.numel())
    # one buffer for all blocks
    wide = torch.empty(min(size, like.numel()), dtype=torch.float64, device=like.device)

    mean = torch.empty_like(like, memory_format=torch.contiguous_format)
    flat = mean.view(-1)

    for start in range(0, like.numel(), size):
        stop = min(start + size, like.numel())
        total = readers[first](start, stop).to(torch.float64, copy=True).mul_(shares[first])

        for name in others:
            # Widened first: adding float32 to float64 directly takes twice as long.
            block = wide[: stop - start].copy_(readers[name](start, stop))
            total.add_(block, alpha=shares[name])

        flat[start:stop] = total

    return mean


def slices(weights: Weights, name: str) -> Callable[[int, int], Tensor]:
    """Return a function (start, stop) -> those numbers of a flat tensor; from a reply on disk it reads no others."""
    read = getattr(weights, "part", None)
    if read is not None:
        return partial(read, name)

    flat = weights[name].reshape(-1)
    return lambda start, stop: flat[start:stop]


def difference(first: Weights, second: Weights, names: Iterable[str]) -> Tensors:
    """Return first - second of the named tensors."""
    return {name: first[name] - second[name] for name in names}


def moved_by(old: Weights, change: Weights, factor: float = 1.0) -> Tensors:
    """Return old + factor * change, of the tensors of `old`."""
    return {name: value + factor * change[name] for name, value in old.items()}


def step_towards(old: Weights, mean: Weights, beta: float, names: Collection[str]) -> Tensors:
    """Return (1 - beta) old + beta mean for the named tensors, and the mean for all others."""
    # the mean to the bit: old + 1 * (mean - old) rounds twice
    if beta == 1:
        return dict(mean)

    return {**mean, **{name: old[name] + beta * (mean[name] - old[name]) for name in names}}


def trained_names(network: nn.Module) -> list[str]:
    """Return the state-dict names of the trainable parameters; a shared parameter is listed under each of its names."""
    parameters = network.named_parameters(remove_duplicate=False)
    return [name for name, parameter in parameters if parameter.requires_grad]
