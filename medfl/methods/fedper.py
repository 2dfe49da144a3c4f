"""FedPer: "Federated Learning with Personalization Layers" (Arivazhagan et al. 2019).

w = (body theta, head psi_k). A site trains the received theta and its own psi_k together; theta is averaged by samples,
its BatchNorm buffers too, psi_k never leaves. Judged by the newest theta with the site's psi_k; a site that never took
part has the initial head, which is common to all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from medfl.methods.base import Method, option
from medfl.networks.heads import head_names


def head_option() -> Any:
    """Declare the option `head_layers` of the methods that tell body from head."""
    return option("", "layers that make the head, with commas between; default: the last layer")


def head_tensors(network: nn.Module, layers: str) -> frozenset[str]:
    """Return the state-dict names of the head that the option `head_layers` names.

    Raises:
        InputError: no such layer.
    """
    return head_names(network, layers.replace(",", " ").split())


@dataclass(frozen=True)
class FedPer(Method):
    """FedAvg of the body under personal heads."""

    head_layers: str = head_option()

    paper: ClassVar[str] = "Federated Learning with Personalization Layers (Arivazhagan et al., 2019)"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "segmentation")
    judged: ClassVar[str] = "personal"

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the head's tensors."""
        return head_tensors(network, self.head_layers)


METHOD = FedPer
