"""FedPer: "Federated Learning with Personalization Layers" (Arivazhagan et al. 2019).

w = (body theta, head psi_k). A site trains the received theta and its own psi_k together; theta is averaged by samples,
including its BatchNorm buffers; psi_k never leaves. Judged by the newest theta with the site's psi_k; a site that never
took part has the initial head, which is common to all.
psi_k is the last layer; for the two-convolution networks it is both linear layers, as in pFedPM's counts (20 sites
send 20 (260 + 5,020) numbers).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from medfl.methods._parts.personal_head import PersonalHead
from medfl.methods.base import option
from medfl.networks.heads import head_names
from medfl.networks.two_conv import TwoConv


@dataclass(frozen=True)
class FedPer(PersonalHead):
    """FedAvg of the body under personal heads."""

    head_layers: str = option(
        "",
        "layers that make the head, with commas between; default: the last layer, of the two_conv networks fc1,fc2",
    )

    paper = "Federated Learning with Personalization Layers (Arivazhagan et al., 2019)"

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the head's tensors."""
        if isinstance(network, TwoConv) and not self.head_layers:
            # The head according to pFedPM's communication counts.
            return head_names(network, ("fc1", "fc2"))
        return super().personal_names(network)


METHOD = FedPer
