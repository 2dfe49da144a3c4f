"""Local: no federation.

Each site trains its own model from the common initial weights. Every tensor is personal, so nothing is sent in either
direction. The optimiser is rebuilt every round, to be step-comparable with the federated methods.
With a cohort a site trains only in the rounds for which it is drawn: as many steps as in FedAvg with the same settings.
`everyone` trains all sites in every round instead, rounds x local epochs each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medfl.core.message import Message
from medfl.core.storage import State
from medfl.methods._parts.extras import Bodies, WholeCohort
from medfl.methods.base import Method, option
from medfl.training.site import Host, Site, snapshot


@dataclass(frozen=True)
class Local(WholeCohort, Bodies, Method):
    """Per-site training without any exchange: the lower reference."""

    everyone: bool = option(False, "train all sites in every round, whatever the cohort")

    paper: ClassVar[str] = "reference: no federation"
    judged: ClassVar[str] = "personal"

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return every tensor of the network."""
        return frozenset(network.state_dict())

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send nothing."""
        return Message()

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train the site's own model on; reply nothing."""
        model = site.model(state["weights"])
        self.train(model, site, state, down)
        return {"weights": snapshot(model)}, Message()

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's own model."""
        return site.model(state["weights"])

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Do nothing."""
        return server


METHOD = Local
