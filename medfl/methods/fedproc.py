"""FedProc: "FedProc: Prototypical contrastive federated learning on non-IID data" (Mu et al., FGCS 2023).

Site:    minimise alpha_t l_proc + (1 - alpha_t) f_k, l_proc the mean over items of -log[e^(s(z, g_y) / tau) / sum_c
         e^(s(z, g_c) / tau)], c over the classes with a prototype, s the cosine, z the feature, g_c the received
         prototype, constant; an item whose own class has none contributes 0. alpha_t = 1 - t / (T - 1), then 0.
Server:  FedAvg's; g_c = plain mean over the participants that own c of their class means of z, or by samples.
Written from re-implementations; the other reading, 1 - t / T, is `rounds` = T + 1. T stays when a run is extended.
Departures. While there is no prototype (round 1), alpha_t is 0: it would be 1, and nothing would be learned. Class
means are computed after training in evaluation mode. A class whose owners are all absent keeps its prototype. The
original's projection layers are omitted. Rows of absent classes are sent as zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from medfl.core import Message, Messages, Weights
from medfl.methods._parts.class_heads import with_class_head
from medfl.methods._parts.prototypes import class_indices, class_means, pooled_means
from medfl.methods.base import MEANS, Collated, Group, Method, one_of, option, sent
from medfl.networks.heads import features_and_output, head
from medfl.storage import State
from medfl.training import FitReport, Host, Site, fit, snapshot


@dataclass(frozen=True)
class FedProc(Method):
    """FedAvg whose sites gather features around shared class prototypes first, then train the classifier."""

    alpha: float = option(
        1.0, "weight of the prototype loss in round 1; it falls to 0", minimum=0.0, maximum=1.0
    )
    rounds: int = option(
        100, "T, the round in which it is 0; default in a run: its number of rounds", minimum=1
    )
    tau: float = option(1.0, "temperature, above 0 (re-implementations: 1)", minimum=1e-6)
    average: str = one_of("mean over a class's owners: plain or by samples", *MEANS)

    paper = "FedProc: Prototypical contrastive federated learning on non-IID data (Mu et al., 2023)"
    tasks = ("classification",)
    adapt = staticmethod(with_class_head)  # one output per class

    def groups(self) -> tuple[Group, ...]:
        """Declare class prototypes, both ways."""
        return (Group("prototypes", smaller=True),)

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial weights, without prototypes: their counts are 0."""
        # the head's weight (K, d) has the form of the prototypes; counts of 0 mean that there are none yet
        means = torch.zeros_like(next(head(host.model(weights)).parameters()).detach())
        counts = torch.zeros(len(means), dtype=torch.int64, device=host.device)
        return {
            **super().init_server(host, weights, introductions),
            "prototypes": {"means": means, "counts": counts},
        }

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train; also reply with the class means of the trained model's features."""
        model = site.model(down["weights"])
        self.train(model, site, state, down)
        means, counts = class_means(model, site)
        if self.average == "uniform":
            counts = counts.clamp(max=1)  # the server only needs to know who owns a class

        return state, site.reply(snapshot(model), prototypes={"means": means, "counts": counts})

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train with alpha_t times the prototype loss and 1 - alpha_t times the site's own."""
        means, counts = (down["prototypes"][name].to(site.device) for name in ("means", "counts"))
        alpha = self.alpha_at(site.round)
        if alpha == 0 or not counts.any():
            return fit(model, site)

        def objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
            z, output = features_and_output(network, x)
            # alpha_t l_proc + (1 - alpha_t) f_k
            loss = alpha * prototype_loss(z, class_indices(y), means, counts > 0, self.tau)
            return loss + (1 - alpha) * site.loss(output, y)

        return fit(model, site, objective=objective)

    def alpha_at(self, round_: int) -> float:
        """Return alpha_t of a round, counted from 1."""
        return self.alpha * max(0.0, 1 - (round_ - 1) / max(1, self.rounds - 1))

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average the weights, and each class's means over its owners."""
        old = server["prototypes"]
        means, counts = pooled_means(sent(replies, "prototypes"))
        # A class whose owners are all absent keeps its prototype.
        fresh = {
            "means": torch.where(counts[:, None] > 0, means, old["means"]),
            "counts": torch.where(counts > 0, counts, old["counts"]),
        }
        return {**super().aggregate(host, server, replies, num_sites), "prototypes": fresh}


def prototype_loss(
    z: Tensor, labels: Tensor, prototypes: Tensor, known: Tensor, tau: float
) -> Tensor:
    """Return l_proc.

    Args:
        z: features (B, d).
        labels: class indices (B,).
        prototypes: (K, d).
        known: (K,) bool, the classes that have a prototype; an item of another one contributes 0.
        tau: temperature.
    """
    cosine = normalize(z, dim=1) @ normalize(prototypes, dim=1).to(z.dtype).T  # (B, K)
    # A class without a prototype is not in the sum over c.
    logits = (cosine / tau).masked_fill(~known, -torch.inf)
    labels = torch.where(known[labels], labels, -100)  # the index that cross_entropy ignores
    return cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / len(labels)


METHOD = FedProc
