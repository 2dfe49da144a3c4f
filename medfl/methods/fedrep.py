"""FedRep: "Exploiting Shared Representations for Personalized Federated Learning" (Collins et al., ICML 2021).

w = (body theta, head psi_k). A site first trains psi_k for E_h epochs with theta frozen, then theta for E_b epochs with
psi_k frozen; E_b is the run's local epochs (1 or 5 in the public code). theta is averaged by samples as in that code,
psi_k never leaves. The code also fits the heads to the final theta after the last round: here this is done whenever a
site is judged, on a copy.
Departures. While the body is frozen, so are BatchNorm's statistics; in the public code they keep moving. Each phase has
its own optimiser: no parameter is trained in both, so nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from medfl.core.message import Message
from medfl.core.task import Task
from medfl.methods._parts.personal_head import PersonalHead
from medfl.methods._parts.phases import fit_part
from medfl.methods.base import option
from medfl.storage.files import State
from medfl.training import FitReport, Site, fit, train_only


@dataclass(frozen=True)
class FedRep(PersonalHead):
    """A common body and personal heads, trained in turn."""

    head_epochs: int = option(
        10,
        "E_h, epochs on the head before the local epochs on the body (public code: 10; 1 for step parity)",
        minimum=0,
    )
    finetune_epochs: int = option(
        10, "epochs on the head before a site is judged (public code: 10)", minimum=0
    )

    paper = "Exploiting Shared Representations for Personalized Federated Learning (Collins et al., 2021)"

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network, both parts of which have trainable parameters."""
        return self.check_parts(network, "fedrep", head=self.head_epochs + self.finetune_epochs > 0)

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train the head, then the body."""
        head = self.personal_names(model)
        if self.head_epochs:
            fit_part(model, site, head, "head", epochs=self.head_epochs)
        body = dict(model.named_parameters()).keys() - head
        with train_only(model, body):
            return fit(model, site)

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the newest body with the site's head fitted to it."""
        model = super().predictor(site, state, down)
        if self.finetune_epochs:
            head = self.personal_names(model)
            fit_part(model, site, head, "finetune", epochs=self.finetune_epochs)
        return model


METHOD = FedRep
