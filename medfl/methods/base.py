"""Method: an algorithm as a frozen value whose defaults are FedAvg; a new one overrides only what its paper changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from torch import nn

from medfl.core.errors import InputError
from medfl.core.message import Message, Weights
from medfl.core.storage import State
from medfl.core.task import TASKS, Task
from medfl.methods._parts.aggregation import sample_shares, weighted_mean
from medfl.networks.heads import head, head_name
from medfl.training import FitReport, Host, Site, fit, merged, snapshot


def option(default: Any, help: str, *, choices: tuple[Any, ...] | None = None, **limits: float) -> Any:
    """Declare an option of a method: default, help, choices, `minimum` and `maximum` exist once, on the field."""
    return field(default=default, metadata={"help": help, "choices": choices, **limits})


def same_option(owner: type, name: str) -> Any:
    """Declare an option as another dataclass does, so that what several methods take is written once."""
    declared = next(one for one in fields(owner) if one.name == name)
    return field(default=declared.default, metadata=declared.metadata)


def class_head(network: nn.Module, task: Task) -> nn.Linear:
    """Return the head of a classification network: a linear layer with one output a class.

    Raises:
        InputError: the head is another one.
    """
    layer = head(network)
    if not isinstance(layer, nn.Linear) or layer.out_features != task.num_classes:
        raise InputError(
            f"a network whose head {head_name(network)!r} is {layer}",
            f"this method needs a linear layer with one output for each of the {task.num_classes} classes",
            "use a network that ends in such a layer, or another method (medfl methods)",
        )
    return layer


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
    functions of their
    arguments: whatever must survive a round is returned as State.

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
        if self.personal_names(network):
            return None
        return host.model(server["weights"])

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
        model = site.model(merged(_shared(down), state.get("weights", {})))
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
        return site.model(merged(_shared(down), state.get("weights", {})))


def _shared(down: Message) -> Weights:
    """Return the weights of a broadcast; a group without tensors does not cross a wire."""
    return down.tensors.get("weights", {})
