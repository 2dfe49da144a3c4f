"""FedProto: "Federated Prototype Learning across Heterogeneous Clients" (Tan et al., AAAI 2022).

Site:    minimise f_k + lambda * mean over batch and d of (h - C_y)^2, h the feature, C_y the received prototype of its
         label, constant; a class without one contributes 0. Reply: the mean of h over each own class.
Server:  C_c = plain mean over the participants that own c, as in the public code. Weights never leave a site.
Judged by the nearest prototype (mean squared difference) among the site's own classes, or by the site's classifier.
Departures. The paper prints a sample-weighted mean divided once more by the number of owners, which would shrink every
prototype; `weights="samples"` is without that division. Class means are taken after training in evaluation mode,
not over the last epoch's batches. A class whose owners are all absent keeps its prototype.
With `bodies` the sites have networks of their own, which must agree on the length d of a feature and on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message, Weights
from medfl.core.storage import State
from medfl.core.task import Task
from medfl.methods._parts.extras import Bodies
from medfl.methods._parts.prototypes import (
    MISSING,
    OTHERS,
    OWN,
    class_counts,
    class_indices,
    collect,
    distance,
    prototype_groups,
)
from medfl.methods.base import Group, Method, class_head, option
from medfl.networks.heads import feature_size, features_and_output, head, head_name
from medfl.training.loop import FitReport, fit
from medfl.training.site import Host, Site, snapshot


@dataclass(frozen=True)
class FedProto(Bodies, Method):
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

    def groups(self) -> tuple[Group, ...]:
        """Name the class means of features, and the classes' counts where these weigh."""
        return prototype_groups(counts=self.weights == "samples")

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network, whose head has one output a class."""
        class_head(network, task)
        return network

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return every tensor of the network."""
        return frozenset(network.state_dict())

    def introduce(self, site: Site) -> Message:
        """Tell the length of a feature, where networks differ."""
        return feature_length(site) if self.bodies else Message()

    def init_server(self, host: Host, weights: Weights, introductions: Mapping[str, Message]) -> State:
        """Start without prototypes.

        Raises:
            InputError: the sites' features differ in length.
        """
        check_lengths({name: int(m.scalars["features"]) for name, m in introductions.items() if m.scalars})
        return {"prototypes": {}}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the prototypes, one (d,) tensor a class, under the class's index."""
        return Message({"prototypes": server["prototypes"]})

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train the site's own model near the prototypes; reply its class means."""
        model = site.model(state["weights"])
        self.train(model, site, state, down)
        means, counts = collect(model, site.train, site.settings.batch_size, num_classes(model), site.device)
        groups = {"prototypes": owned(means, counts)}
        if self.weights == "samples":
            groups["counts"] = owned(counts, counts)
        return {"weights": snapshot(model)}, Message(groups)

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train with lambda times the distance between features and prototypes in the loss."""
        prototypes = received(down)
        if self.lam == 0 or not prototypes:
            return fit(model, site)
        targets = table(prototypes, num_classes(model)).to(site.device)

        def objective(network: nn.Module, x: Any, y: Any) -> Tensor:
            values, output = features_and_output(network, x)
            return site.loss(output, y) + self.lam * apart(values, class_indices(y), targets)

        return fit(model, site, objective=objective)

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Average each class's means over its owners."""
        return {"prototypes": averaged(server["prototypes"], replies, by_samples=self.weights == "samples")}

    def observed(self, server: State, replies: Mapping[str, Message]) -> Mapping[str, float]:
        """Return distances between class means and prototypes."""
        return distances(server["prototypes"], replies)

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's model, its output replaced by the distances to the prototypes of the site's classes."""
        prototypes = received(down)
        if self.predict == "classifier" or not prototypes:
            return site.model(state["weights"])
        model = site.network()  # not a leased one: it is changed for good
        model.load_state_dict(state["weights"])
        own = class_counts(site.train, num_classes(model)).to(site.device) > 0
        return nearest(model, table(prototypes, len(own)).to(site.device), own)


def nearest(network: nn.Module, prototypes: Tensor, own: Tensor) -> nn.Module:
    """Let a network classify by the nearest prototype.

    Args:
        network: changed in place: its head gives (B, K) logits, minus the mean squared difference to each prototype.
        prototypes: (K, d), NaN for a class without one.
        own: (K,) bool, the classes allowed.
    """
    known = own & ~prototypes.isnan().any(1)
    known = known if known.any() else ~prototypes.isnan().any(1)

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return among(-distance(inputs[0], prototypes.nan_to_num().to(inputs[0].dtype)), known)

    network.get_submodule(head_name(network)).register_forward_hook(replace)
    return network


def among(logits: Tensor, allowed: Tensor) -> Tensor:
    """Put the logits (B, K) of classes that are not allowed (K,) 30 below the smallest, so that losses are finite."""
    return torch.where(allowed, logits, logits.masked_fill(~allowed, float("inf")).amin(1, keepdim=True) - 30)


def apart(values: Tensor, label: Tensor, prototypes: Tensor) -> Tensor:
    """Return the mean over batch and d of (h - C_y)^2, C_y constant; a class without prototype contributes 0.

    Args:
        values: features h (B, d).
        label: (B,) class indices.
        prototypes: (K, d), NaN for a class without one.
    """
    target = prototypes[label].to(values.dtype)
    return nn.functional.mse_loss(values, torch.where(target.isnan(), values.detach(), target))


# Messages: the prototype of class 3 is the tensor "prototypes/3"


def received(down: Message) -> Weights:
    """Return the prototypes of a broadcast; an empty group does not survive the wire."""
    return down.tensors.get("prototypes", {})


def owned(values: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Return the entries (K, ...) of the classes that a site has, by (K,) counts, under the class's index."""
    return {str(c): values[c] for c in counts.nonzero()[:, 0].tolist()}


def table(prototypes: Weights, num_classes: int) -> Tensor:
    """Return prototypes, one at least, as one tensor (K, d), NaN where there is none."""
    first = next(iter(prototypes.values()))
    rows = torch.full((num_classes, len(first)), float("nan"), dtype=first.dtype, device=first.device)
    for name, value in prototypes.items():
        rows[int(name)] = value
    return rows


def averaged(known: Weights, replies: Mapping[str, Message], *, by_samples: bool) -> dict[str, Tensor]:
    """Average each class's means over its owners, plainly or by samples; a class that nobody sent keeps its prototype.

    Args:
        known: the prototypes so far.
        replies: messages with prototypes, and with counts where they are averaged by samples.
        by_samples: weigh by the counts.

    Raises:
        InputError: features differ in length between the sites, or from those so far.
    """
    names = sorted(replies)
    sent = {name: received(replies[name]) for name in names}
    check_lengths({who: len(next(iter(g.values()))) for who, g in [("earlier rounds", known), *sent.items()] if g})
    prototypes = dict(known)
    for c in sorted({c for group in sent.values() for c in group}):
        owners = [name for name in names if c in sent[name]]
        shares = [float(replies[name]["counts"][c]) if by_samples else 1.0 for name in owners]
        total = sum(share * sent[name][c].double() for share, name in zip(shares, owners, strict=True))
        assert isinstance(total, Tensor)
        prototypes[c] = (total / sum(shares)).to(sent[owners[0]][c].dtype)
    return prototypes


def distances(prototypes: Weights, replies: Mapping[str, Message]) -> dict[str, float]:
    """Return how far the sites' class means are from the prototypes: Euclidean, mean over all such pairs.

    Returns:
        "own class", "other classes of the site" and "classes missing at the site", those of which there is a pair.
    """
    names, found = list(prototypes), dict[str, list[Tensor]]()
    for name in sorted(replies):
        sent = received(replies[name])
        if not sent or not names:
            continue
        means, rows = (torch.stack(list(group.values())).double() for group in (sent, prototypes))
        apart = torch.cdist(means, rows.to(means.device), compute_mode="donot_use_mm_for_euclid_dist")
        own = torch.tensor([[c == j for j in names] for c in sent], device=apart.device)
        has = torch.tensor([j in sent for j in names], device=apart.device)
        kinds = {OWN: own, OTHERS: has & ~own, MISSING: ~has & ~own}
        for kind, pairs in kinds.items():
            found.setdefault(kind, []).append(apart[pairs])
    pooled = {kind: torch.cat([part.cpu() for part in parts]) for kind, parts in sorted(found.items())}
    return {kind: float(values.mean()) for kind, values in pooled.items() if len(values)}


def feature_length(site: Site) -> Message:
    """Return a site's introduction: the length d of its network's features."""
    return Message({}, {"features": feature_size(site.model(site.initial_weights))})


def check_lengths(lengths: Mapping[str, int]) -> None:
    """Compare the lengths of the sites' features.

    Raises:
        InputError: they differ; names the sites of each length.
    """
    found = sorted({*lengths.values()})
    if len(found) > 1:
        sites = {d: ", ".join(name for name in sorted(lengths) if lengths[name] == d) for d in found}
        raise InputError(
            f"features of {'; '.join(f'length {d} at {sites[d]}' for d in found)}",
            "networks may differ between sites, the length of their features may not",
            "deal bodies with features of one length",
        )


def num_classes(network: nn.Module) -> int:
    """Return K, the number of outputs of the head."""
    layer: Any = head(network)
    return int(layer.out_features)


METHOD = FedProto
