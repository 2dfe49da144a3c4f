"""Methods whose sites keep their whole network; architectures may differ between sites."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from medfl.core import Message
from medfl.methods._parts.extras import Bodies
from medfl.methods.base import Method
from medfl.storage import State
from medfl.training import Site


@dataclass(frozen=True)
class OwnNetworks(Bodies, Method):
    """No weights are sent; each site is scored with its own network, the State's group `weights`."""

    judged = "personal"

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return every tensor of the network."""
        return frozenset(network.state_dict())

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's own model."""
        return site.model(state["weights"])
