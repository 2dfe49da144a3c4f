"""FedProto: "Federated Prototype Learning across Heterogeneous Clients" (Tan et al., AAAI 2022).

Site:    minimise f_k + lambda * mean over batch and d of (h - C_y)^2, h the feature, C_y the received prototype of its
         label, constant; a class without one contributes 0. Reply: the mean of h over each own class.
Server:  C_c = plain mean over the participants that own c, as in the public code. Weights never leave a site.
Judged by the nearest prototype (mean squared difference) among the site's own classes, or by the site's classifier.
Departures. The paper prints a sample-weighted mean divided once more by the number of owners, which would shrink every
prototype; `weights="samples"` is without that division. Class means are taken after training in evaluation mode,
not over the last epoch's batches. A class whose owners are all absent keeps its prototype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medfl.message import Message, Weights
from medfl.methods.base import Method, class_head, option
from medfl.networks.heads import features_and_output, head, head_name
from medfl.prototypes import class_counts, class_indices, collect, distance
from medfl.site import Host, Site, snapshot
from medfl.storage import State
from medfl.task import Task
from medfl.training import FitReport, fit


@dataclass(frozen=True)
class FedProto(Method):
    """Sites share class means of features instead of weights."""

    lam: float = option(1.0, "lambda, pull towards the prototypes (paper: 1, or 0.1 on CIFAR-10)", minimum=0.0)
    weights: str = option(
        "uniform",
        "mean over a class's owners: plain (public code), or by samples (paper)",
        choices=("uniform", "samples"),
    )
    predict: str = option(
        "prototypes",
        "a site is judged by the nearest prototype, or by its classifier (the public code reports both)",
        choices=("prototypes", "classifier"),
    )

    paper: ClassVar[str] = "FedProto: Federated Prototype Learning across Heterogeneous Clients (Tan et al., 2022)"
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    judged: ClassVar[str] = "personal"

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network, whose head has one output a class."""
        class_head(network, task)
        return network

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return every tensor of the network."""
        return frozenset(network.state_dict())

    def init_server(self, host: Host, weights: Weights, introductions: Mapping[str, Message]) -> State:
        """Start without prototypes."""
        return {"prototypes": {}}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the prototypes, one (d,) tensor a class, under the class's index."""
        return Message({"prototypes": server["prototypes"]})

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train the site's own model near the prototypes; reply its class means."""
        model = site.model(state["weights"])
        self.train(model, site, state, down)
        means, counts = collect(model, site.train, site.settings.batch_size, _classes(model), site.device)
        own = {str(c): means[c] for c in counts.nonzero()[:, 0].tolist()}
        groups = {"prototypes": own}
        if self.weights == "samples":
            groups["counts"] = {name: counts[int(name)] for name in own}
        return {"weights": snapshot(model)}, Message(groups)

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train with lambda times the distance between features and prototypes in the loss."""
        received = _received(down)
        if self.lam == 0 or not received:
            return fit(model, site)
        table = _table(received, _classes(model)).to(site.device)

        def objective(network: nn.Module, x: Any, y: Any) -> Tensor:
            values, output = features_and_output(network, x)
            target = table[class_indices(y)].to(values.dtype)
            target = torch.where(target.isnan(), values.detach(), target)  # no prototype: it contributes 0
            return site.loss(output, y) + self.lam * nn.functional.mse_loss(values, target)

        return fit(model, site, objective=objective)

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Average each class's means over its owners."""
        prototypes = dict(server["prototypes"])
        names = sorted(replies)
        for c in sorted({c for name in names for c in replies[name]["prototypes"]}):
            owners = [name for name in names if c in replies[name]["prototypes"]]
            shares = [float(replies[name]["counts"][c]) if self.weights == "samples" else 1.0 for name in owners]
            total = sum(s * replies[n]["prototypes"][c].double() for s, n in zip(shares, owners, strict=True))
            assert isinstance(total, Tensor)
            prototypes[c] = (total / sum(shares)).to(replies[owners[0]]["prototypes"][c].dtype)
        return {"prototypes": prototypes}

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's model, its output replaced by the distances to the prototypes of the site's classes."""
        received = _received(down)
        if self.predict == "classifier" or not received:
            return site.model(state["weights"])
        model = site.network()  # not a leased one: it is changed for good
        model.load_state_dict(state["weights"])
        own = class_counts(site.train, _classes(model)).to(site.device) > 0
        return nearest(model, _table(received, len(own)).to(site.device), own)


def nearest(network: nn.Module, table: Tensor, own: Tensor) -> nn.Module:
    """Let a network classify by the nearest prototype.

    Args:
        network: changed in place: its head gives (B, K) logits, minus the mean squared difference to each prototype.
        table: prototypes (K, d), NaN for a class without one.
        own: (K,) bool, the classes allowed; another one's logit lies 30 below the smallest, so that losses are finite.
    """
    known = own & ~table.isnan().any(1)
    known = known if known.any() else ~table.isnan().any(1)

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        logits = -distance(inputs[0], table.nan_to_num().to(inputs[0].dtype))
        return torch.where(known, logits, logits.masked_fill(~known, float("inf")).amin(1, keepdim=True) - 30)

    network.get_submodule(head_name(network)).register_forward_hook(replace)
    return network


def _received(down: Message) -> Weights:
    """Return the prototypes; an empty group does not survive the wire."""
    return down.tensors.get("prototypes", {})


def _table(prototypes: Weights, num_classes: int) -> Tensor:
    """Return the prototypes as one tensor (K, d), NaN where there is none."""
    first = next(iter(prototypes.values()))
    table = torch.full((num_classes, len(first)), float("nan"), dtype=first.dtype, device=first.device)
    for name, value in prototypes.items():
        table[int(name)] = value
    return table


def _classes(network: nn.Module) -> int:
    layer: Any = head(network)
    return int(layer.out_features)


METHOD = FedProto
