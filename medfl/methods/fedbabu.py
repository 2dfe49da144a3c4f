"""FedBABU: "Toward Enhanced Representation for Federated Image Classification" (Oh, Kim, Yun, ICLR 2022).

w = (body theta, head phi). phi is drawn once, common to all, and frozen in federated training; theta is trained by the
sites and averaged, plainly as in the public code. A personal model is the whole network fine-tuned on the site's data.
The paper fine-tunes after the last round. Here it is done whenever a site is judged, from the newest global model on a
copy, so that training does not know of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medfl.core.message import Message
from medfl.core.storage import State
from medfl.core.task import Task
from medfl.methods._parts.aggregation import sample_shares, uniform_shares, weighted_mean
from medfl.methods.base import Method, option
from medfl.methods.fedper import check_parts, head_option, head_tensors
from medfl.training import FitReport, Host, Site, fit, merged, train_only


@dataclass(frozen=True)
class FedBABU(Method):
    """FedAvg of the body around a head that is never trained; fine-tuned where it is used."""

    finetune_epochs: int = option(5, "epochs on the whole network before a site is judged (paper: 5)", minimum=0)
    weights: str = option(
        "uniform", "mean over participants: 1/S as in the public code, or by samples", choices=("uniform", "samples")
    )
    head_layers: str = head_option()

    paper: ClassVar[str] = (
        "FedBABU: Toward Enhanced Representation for Federated Image Classification (Oh et al., 2022)"
    )
    tasks: ClassVar[tuple[str, ...]] = ("classification", "segmentation")
    judged: ClassVar[str] = "personal"

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network, whose body has something to train."""
        return check_parts(network, self.head_layers, "fedbabu", head=False)

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the head's tensors: everyone has the initial ones, so they never travel."""
        return head_tensors(network, self.head_layers)

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train the body; a parameter without gradient has no weight decay either."""
        body = {name for name, _ in model.named_parameters()} - self.personal_names(model)
        with train_only(model, body):
            return fit(model, site)

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Average the bodies."""
        shares = uniform_shares(replies) if self.weights == "uniform" else sample_shares(replies)
        return {"weights": weighted_mean(replies, "weights", shares)}

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
