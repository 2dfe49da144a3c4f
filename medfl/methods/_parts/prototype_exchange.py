"""Class prototypes as messages: one (d,) tensor per class, named by its index: `prototypes/3` for class 3.

A site sends the mean feature of each of its classes; the server averages each class over its owners. Features have the
same length d at all sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message, Messages, Tensors, Weights
from medfl.methods._parts.class_heads import class_count, with_class_head
from medfl.methods._parts.own_networks import OwnNetworks
from medfl.methods._parts.prototypes import MISSING, OTHERS, OWN
from medfl.networks.heads import feature_size
from medfl.storage.files import State
from medfl.training import Host, Site


@dataclass(frozen=True)
class PrototypeExchange(OwnNetworks):
    """Networks stay at their sites; class prototypes are sent."""

    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    adapt = staticmethod(with_class_head)  # one output per class

    def introduce(self, site: Site) -> Message:
        """Send the length d of a feature, if networks differ."""
        if self.bodies:
            return Message({}, {"features": feature_size(site.model(site.initial_weights))})

        return Message()

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start without prototypes.

        Raises:
            InputError: the sites' features differ in length.
        """
        self.check_introduced(introductions)
        return {"prototypes": {}}

    def check_introduced(self, introductions: Messages, network: nn.Module | None = None) -> None:
        """Compare the feature lengths in the sites' introductions, and the server's if it has a network.

        Raises:
            InputError: they differ.
        """
        lengths = {}
        for name, message in introductions.items():
            if message.scalars:
                lengths[name] = int(message.scalars["features"])

        if lengths and network is not None:
            lengths["the server"] = feature_size(network)
        check_lengths(lengths)


# Messages


def prototypes_in(message: Message) -> Weights:
    """Return the prototypes of a broadcast or reply; an empty group does not survive the wire."""
    return message.tensors.get("prototypes", {})


def received(down: Message, network: nn.Module) -> Tensor | None:
    """Return the prototypes of a broadcast as one tensor (K, d), NaN for a class without one; None without any."""
    prototypes = prototypes_in(down)
    if not prototypes:
        return None
    return table(prototypes, class_count(network)).to(next(network.parameters()).device)


def class_mean_groups(means: Tensor, counts: Tensor, *, with_counts: bool) -> dict[str, Weights]:
    """Return the part of a site's reply with its class means (K, d) and the counts (K,) of its items."""
    groups: dict[str, Weights] = {"prototypes": by_class(means, counts)}
    if with_counts:
        return {**groups, "counts": by_class(counts, counts)}

    return groups


def by_class(values: Tensor, counts: Tensor) -> Tensors:
    """Return the entries (K, ...) of a site's classes, by (K,) counts, named by the class's index."""
    return {str(c): values[c] for c in counts.nonzero()[:, 0].tolist()}


def table(prototypes: Weights, num_classes: int) -> Tensor:
    """Return prototypes, at least one, as one tensor (K, d), NaN if missing."""
    first = next(iter(prototypes.values()))
    rows = torch.full(
        (num_classes, len(first)), float("nan"), dtype=first.dtype, device=first.device
    )
    # the names of the tensors are the classes' indices
    for name, value in prototypes.items():
        rows[int(name)] = value
    return rows


def has_prototype(rows: Tensor) -> Tensor:
    """Return which classes of a table (K, d) have a prototype, (K,) bool."""
    return ~rows.isnan().any(1)


def average_prototypes(before: Weights, replies: Messages, *, by_samples: bool) -> Tensors:
    """Average each class's means over its owners, plainly or by samples; a class that nobody sent keeps its prototype.

    Raises:
        InputError: features differ in length between the sites, or from earlier ones.
    """
    names = sorted(replies)
    sent = {name: prototypes_in(replies[name]) for name in names}
    lengths = {}
    classes: set[str] = set()
    for sender, group in {"earlier rounds": before, **sent}.items():
        if group:
            lengths[sender] = len(next(iter(group.values())))

    check_lengths(lengths)
    for group in sent.values():
        classes.update(group)

    prototypes = dict(before)
    for c in sorted(classes):
        owners = [name for name in names if c in sent[name]]
        shares = []
        for name in owners:
            shares.append(float(replies[name]["counts"][c]) if by_samples else 1.0)

        first = sent[owners[0]][c]
        # float64 and in the order of the names: the same bits on every run
        total = torch.zeros_like(first, dtype=torch.float64)
        for share, name in zip(shares, owners, strict=True):
            total += share * sent[name][c].double()

        prototypes[c] = (total / sum(shares)).to(first.dtype)

    return prototypes


def distances(prototypes: Weights, replies: Messages) -> dict[str, float]:
    """Return the mean Euclidean distance between the sites' class means and the prototypes, over all such pairs.

    Returns:
        "own class", "other classes of the site" and "classes missing at the site", if there are such pairs.
    """
    names = list(prototypes)
    lengths = dict[str, list[Tensor]]()
    for name in sorted(replies):
        sent = prototypes_in(replies[name])
        if not sent or not names:
            continue

        means = torch.stack(list(sent.values())).double()
        rows = torch.stack(list(prototypes.values())).double().to(means.device)
        # By differences: matrix products lose the digits of near points.
        apart = torch.cdist(means, rows, compute_mode="donot_use_mm_for_euclid_dist")
        is_own_class = torch.zeros(apart.shape, dtype=torch.bool, device=apart.device)
        for row, c in enumerate(sent):
            if c in prototypes:
                is_own_class[row, names.index(c)] = True

        has = torch.tensor([j in sent for j in names], device=apart.device)

        for kind, pairs in {
            OWN: is_own_class,
            OTHERS: has & ~is_own_class,
            MISSING: ~has & ~is_own_class,
        }.items():
            lengths.setdefault(kind, []).append(apart[pairs].cpu())

    observations = {}
    for kind in sorted(lengths):
        pooled = torch.cat(lengths[kind])
        if len(pooled):
            observations[kind] = float(pooled.mean())

    return observations


# Losses and logits


def prototype_loss(features: Tensor, label: Tensor, prototypes: Tensor) -> Tensor:
    """Return the mean over batch and d of (h - C_y)^2, C_y constant; a class without prototype contributes 0.

    Args:
        features: h (B, d).
        label: (B,) class indices.
        prototypes: (K, d), NaN for a class without one.
    """
    target = prototypes[label].to(features.dtype)
    # Without a prototype a feature is its own target: distance and gradient are 0.
    return nn.functional.mse_loss(features, torch.where(target.isnan(), features.detach(), target))


def only_classes(logits: Tensor, allowed: Tensor) -> Tensor:
    """Set the logits (B, K) of classes that are not allowed (K,) 30 below the smallest, so that losses are finite."""
    smallest = logits.masked_fill(~allowed, float("inf")).amin(1, keepdim=True)
    return torch.where(allowed, logits, smallest - 30)


def check_lengths(lengths: Mapping[str, int]) -> None:
    """Compare the lengths of the sites' features.

    Raises:
        InputError: they differ; names the sites of each length.
    """
    sites_of: dict[int, list[str]] = {}
    for site in sorted(lengths):
        sites_of.setdefault(lengths[site], []).append(site)

    if len(sites_of) > 1:
        groups = []
        for length, sites in sorted(sites_of.items()):
            groups.append(f"length {length} at {', '.join(sites)}")

        raise InputError(
            f"features of {'; '.join(groups)}",
            "networks may differ between sites, the length of their features may not",
            "choose bodies with features of the same length",
        )
