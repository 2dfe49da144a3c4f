"""The relation head of R-pFedPM: a small network that scores how well features and class features belong together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, one_hot

from medfl.core.message import Weights
from medfl.core.seeding import stream
from medfl.methods._parts.prototype_exchange import has_prototype, only_classes
from medfl.methods.base import Collated
from medfl.networks.heads import feature_size, features_and_output, head
from medfl.training import Site, evaluating

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda head: torch.optim.Adam(head.parameters(), 1e-3),
    "sgd": lambda head: torch.optim.SGD(head.parameters(), 0.01, momentum=0.5),
}


class Relation(nn.Module):
    """Scores (B, J) in (0, 1) of features (B, d) with class features (J, d); 6,641 parameters with d = 50."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(2, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool1d(2, ceil_mode=True),  # which an odd d needs
            nn.Flatten(),
            nn.Linear(32 * ((features + 1) // 2), 8),
            nn.ReLU(),
            nn.Linear(8, 1),
            nn.Sigmoid(),
        )

    def forward(self, h: Tensor, means: Tensor) -> Tensor:
        """Return the scores of all pairs; a pair is two channels, the sample's first."""
        # (B, J, d) each
        samples = h[:, None].expand(-1, len(means), -1)
        classes = means.expand(len(h), -1, -1)
        scores: Tensor = self.layers(torch.stack([samples, classes], 2).flatten(0, 1))
        return scores.view(len(h), len(means))


class Judged(nn.Module):
    """A site's network with a relation head in the place of its own, or with only some of the classes allowed.

    The relation head comes first, so that the last linear layer is the network's and body and head can be told apart.

    Args:
        network: the site's, images -> (B, K).
        allowed: (K,) bool, the classes that may be predicted.
        relation: scores features against `mixed`; None: the network's own head predicts.
        mixed: (K, d), anything for a class that is not allowed.
    """

    allowed: Tensor
    mixed: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        allowed: Tensor,
        relation: Relation | None = None,
        mixed: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.relation = relation
        self.network = network
        self.register_buffer("allowed", allowed)
        self.register_buffer("mixed", mixed)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores or logits (B, K); those of other classes lie far below."""
        h, logits = features_and_output(self.network, x)
        if self.relation is not None and self.mixed is not None:
            logits = self.relation(h, self.mixed)
        return only_classes(logits, self.allowed)


def relation_for(site: Site, network: nn.Module, weights: Weights | None = None) -> Relation:
    """Build a relation head for a network's features, drawn on a stream of its own, or with these weights."""
    with stream(site.seed, "relation"):
        relation = Relation(feature_size(network)).to(
            site.device, next(head(network).parameters()).dtype
        )
    if weights is not None:
        relation.load_state_dict(weights)
    return relation


def relation_loss(relation: Relation, h: Tensor, label: Tensor, mixed: Tensor) -> Tensor:
    """Return (12): the mean over batch and known classes of (score - 1[y = j])^2; h and C~ are constant."""
    scored = has_prototype(mixed)
    scores = relation(h.detach(), mixed[scored].to(h.dtype))
    return mse_loss(scores, one_hot(label, len(mixed))[:, scored].to(scores.dtype))


def relation_step(
    relation: Relation,
    optimizer: torch.optim.Optimizer,
    mixed: Tensor,
    network: nn.Module,
    x: Collated,
    label: Tensor,
) -> None:
    """Take one step of the relation head; the network is run in evaluation mode, so nothing of it changes."""
    with evaluating(network), torch.no_grad():
        h, _ = features_and_output(network, x)
    optimizer.zero_grad()
    relation_loss(relation, h, label, mixed).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def after_steps(site: Site, call: Callable[[], None]) -> Site:
    """Return the site with a call after every step of its optimiser."""

    def optimizer(network: nn.Module) -> torch.optim.Optimizer:
        hooked = site.settings.optimizer(network)
        hooked.register_step_post_hook(lambda *_: call())
        return hooked

    return replace(site, settings=replace(site.settings, optimizer=optimizer))
