"""FedBABU: "Toward Enhanced Representation for Federated Image Classification" (Oh, Kim, Yun, ICLR 2022).

w = (body theta, head phi). phi is drawn once, common to all, and frozen in federated training; theta is trained by the
sites and averaged, plainly as in the public code. A personal model is the whole network fine-tuned on the site's data.
The paper fine-tunes after the last round. Here it is done whenever a site is judged, on a copy of the newest global
model, so that training is unaffected.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from medfl.core.message import Message
from medfl.core.task import Task
from medfl.methods._parts.personal_head import PersonalHead
from medfl.methods.base import MEANS, option
from medfl.storage.files import State
from medfl.training import FitReport, Host, Site, fit, merged, train_only


@dataclass(frozen=True)
class FedBABU(PersonalHead):
    """FedAvg of the body around a head that is never trained; fine-tuned where it is used."""

    finetune_epochs: int = option(
        5, "epochs on the whole network before a site is judged (paper: 5)", minimum=0
    )
    weights: str = option(
        "uniform", "mean over participants: 1/S (code), or by samples", choices=MEANS
    )

    paper = "FedBABU: Toward Enhanced Representation for Federated Image Classification (Oh et al., 2022)"

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network, whose body has trainable parameters."""
        return self.check_parts(network, "fedbabu", head=False)

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train the body; a parameter without gradient has no weight decay either."""
        body = {name for name, _ in model.named_parameters()} - self.personal_names(model)
        # phi is frozen: only theta has gradients.
        with train_only(model, body):
            return fit(model, site)

    def global_predictor(self, host: Host, server: State) -> nn.Module:
        """Return the averaged body with the initial head."""
        return host.model(merged(host.networks.initial, server["weights"]))

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the newest global model fine-tuned on the site's data."""
        model = site.model(merged(site.initial_weights, down["weights"]))
        if self.finetune_epochs:
            fit(model, site.for_epochs(self.finetune_epochs), purpose="finetune")
        return model


METHOD = FedBABU
