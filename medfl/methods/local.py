"""Local: no federation.

Each site trains its own model from the common initial weights. Every tensor is personal, so nothing is sent in either
direction. The optimiser is rebuilt every round, for step parity with the federated methods.
With a cohort a site trains only in the rounds for which it is drawn: as many steps as in FedAvg with the same settings.
`everyone` trains all sites in every round instead, rounds x local epochs each.
"""

from __future__ import annotations

from dataclasses import dataclass

from medfl.core.message import Message
from medfl.methods._parts.extras import WholeCohort
from medfl.methods._parts.own_networks import OwnNetworks
from medfl.methods.base import option
from medfl.storage.files import State
from medfl.training import Host, Site, snapshot


@dataclass(frozen=True)
class Local(WholeCohort, OwnNetworks):
    """Per-site training without any exchange: the lower reference."""

    everyone: bool = option(False, "train all sites in every round, whatever the cohort")

    paper = "reference: no federation"

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send nothing."""
        return Message()

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Continue training the site's own model; reply with nothing."""
        # The site's own weights, whatever was broadcast.
        model = site.model(state["weights"])
        self.train(model, site, state, down)
        return {"weights": snapshot(model)}, Message()


METHOD = Local
