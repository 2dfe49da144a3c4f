"""FedNH: "Tackling Data Heterogeneity in Federated Learning with Class Prototypes" (Dai et al., AAAI 2023).

Head:    logits s (f/||f||) W', W (K, d) with unit rows, fixed at the sites; cross-entropy trains the body and s.
Site:    after training, r_c = the class mean of f/||f||, normalised.
Server:  W_c <- normalise(rho W_c + (1 - rho) normalise(sum_k n_kc r_kc / sum_k n_kc)); the rest moves by the server's
         rate times the plain mean of the differences. W starts with orthonormal rows, spread ones if K > d.
A class that no participant has keeps its row (in the public code its mean is a zero row). Class means are computed in
evaluation mode. The global model is judged; the paper's personal one, the local body with W, is the model after local
training.
Departure: W, which a site does not change, is sent back with the weights beside r and n: K d redundant numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from medfl.core import Message, Messages, Task, Weights
from medfl.methods._parts.class_heads import class_head
from medfl.methods._parts.prototypes import class_means, pooled_means
from medfl.methods.base import (
    Group,
    Method,
    option,
    sent,
    step_towards,
    uniform_shares,
    weighted_mean,
)
from medfl.networks.heads import head_name, replace_head
from medfl.storage import State
from medfl.training import Host, Site, snapshot


class CosineHead(nn.Linear):
    """Logits s (f/||f||) W'; the rows of `weight` are W, without gradient."""

    def __init__(self, features: int, classes: int, scale: float, learn_scale: bool) -> None:
        super().__init__(features, classes, bias=False)
        self.weight = nn.Parameter(spread(classes, features), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(scale), requires_grad=learn_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K) of features (B, d)."""
        return self.scale * super().forward(normalize(x, dim=1))


@dataclass(frozen=True)
class FedNH(Method):
    """FedAvg of a body around a head of class prototypes that only the server moves."""

    rho: float = option(
        0.9, "share of the old prototypes (paper and FedBM's runs: 0.9)", minimum=0.0, maximum=1.0
    )
    scale: float = option(
        20.0,
        "start of s, the logits' scale (public code: 20 for ResNets, 1 for a CNN, 30 if fixed)",
    )
    learn_scale: bool = option(True, "train s")
    server_lr: float = option(1.0, "the server's step towards the mean of the sites", minimum=0.0)

    paper = (
        "Tackling Data Heterogeneity in Federated Learning with Class Prototypes (Dai et al., 2023)"
    )
    tasks = ("classification",)

    def groups(self) -> tuple[Group, ...]:
        """Declare class means, which go up; the head's prototypes come back among the weights."""
        return (Group("prototypes", down=False, smaller=True),)

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Replace the head by a cosine head."""
        layer = class_head(network, task)
        cosine = CosineHead(layer.in_features, layer.out_features, self.scale, self.learn_scale)
        return replace_head(network, cosine.to(layer.weight))

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train body and s; also reply with the directions of the class means."""
        model = site.model(down["weights"])
        self.train(model, site, state, down)
        means, counts = class_means(model, site, normalised=True)
        prototypes = {"means": normalize(means, dim=1), "counts": counts}
        return state, site.reply(snapshot(model), prototypes=prototypes)

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average body and s, move the prototypes."""
        old = server["weights"]
        network = host.model(old)
        mean = weighted_mean(replies, "weights", uniform_shares(replies))
        name = f"{head_name(network)}.weight"
        weights = step_towards(old, mean, self.server_lr, dict(network.named_parameters()))
        # W is not averaged: a site returns it as it came.
        weights[name] = self._moved(old[name], sent(replies, "prototypes"))

        return {"weights": weights}

    def _moved(self, old: Tensor, prototypes: list[Weights]) -> Tensor:
        """Return the next W (K, d)."""
        means, counts = pooled_means(prototypes)
        if self.rho == 1:
            return old.clone()
        # W_c <- normalise(rho W_c + (1 - rho) normalise(mean of the r_kc by n_kc))
        fresh = normalize(self.rho * old + (1 - self.rho) * normalize(means, dim=1), dim=1)
        return torch.where(counts[:, None] > 0, fresh, old)


def spread(classes: int, features: int) -> Tensor:
    """Draw unit rows (K, d): orthonormal ones if K <= d, else rows that repel each other until they are spread."""
    rows = normalize(torch.randn(max(classes, features), features), dim=1)
    if classes <= features:
        orthonormal: Tensor = torch.linalg.qr(rows).Q
        return orthonormal[:classes].contiguous()

    # more classes than dimensions have no orthonormal rows, so these are spread as evenly as possible
    for step in range(500):
        # Each row is pushed by the others, most by the nearest, with a shrinking step.
        push = (10 * (rows @ rows.T)).exp().fill_diagonal_(0) @ rows
        rows = normalize(rows - 0.1 * 0.99**step * normalize(push, dim=1), dim=1)

    return rows


METHOD = FedNH
