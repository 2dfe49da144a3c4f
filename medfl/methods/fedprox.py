"""FedProx: "Federated Optimization in Heterogeneous Networks" (Li et al., MLSys 2020).

A site minimises f_k(w) + (mu/2) ||w - w^t||^2 over the trainable parameters; the server is FedAvg's. The term's
gradient mu (w - w^t) is added to the loss gradient, so it passes through momentum like a term of the loss; buffers
are not pulled.
Departure: sites never return inexact solutions (no stragglers).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from medfl.core import Message
from medfl.methods.base import Method, option
from medfl.storage import State
from medfl.training import FitReport, Site, fit, pull


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with a proximal term that holds each site near the received model."""

    mu: float = option(
        0.01, "strength of the proximal term (original grid 0.001 to 1)", minimum=0.0
    )

    paper = "Federated Optimization in Heterogeneous Networks (Li et al., 2020)"
    takes_prototypes = True

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train with mu (w - w^t) added to the gradient; `model` holds w^t now."""
        # The gradient of (mu/2) ||w - w^t||^2; `pull` copies w^t before the first step.
        return fit(model, site, gradient_hook=pull(model, dict(model.named_parameters()), self.mu))


METHOD = FedProx
