"""FedPer: "Federated Learning with Personalization Layers" (Arivazhagan et al. 2019).

w = (body theta, head psi_k). A site trains the received theta and its own psi_k together; theta is averaged by samples,
its BatchNorm buffers too, psi_k never leaves. Judged by the newest theta with the site's psi_k; a site that never took
part has the initial head, which is common to all.
psi_k is the last layer; of the two-convolution networks it is both linear layers, as pFedPM's counts have it (20 sites
send 20 (260 + 5,020) numbers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from medfl.core.errors import InputError
from medfl.methods.base import Method, option
from medfl.networks.heads import head_name, head_names
from medfl.networks.two_conv import TwoConv


def head_option() -> Any:
    """Declare the option `head_layers` of the methods that tell body from head."""
    return option("", "layers that make the head, with commas between; default: the last layer")


def head_tensors(network: nn.Module, layers: str) -> frozenset[str]:
    """Return the state-dict names of the head that the option `head_layers` names.

    Raises:
        InputError: no such layer.
    """
    return head_names(network, layers.replace(",", " ").split())


def check_parts(network: nn.Module, layers: str, method: str, *, head: bool) -> nn.Module:
    """Return the network if its body has something to train, and with `head` its head too.

    Raises:
        InputError: one of them has not; or no such layer.
    """
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    personal = head_tensors(network, layers)
    for part, names in (("body", trained - personal), ("head", trained & personal if head else trained)):
        if not names:
            raise InputError(
                f"method {method!r} on a {type(network).__name__} with the head {layers or head_name(network)}: its "
                f"{part} has nothing to train",
                "it trains a part of the network at a time",
                "choose other head_layers, or another network or method",
            )
    return network


@dataclass(frozen=True)
class FedPer(Method):
    """FedAvg of the body under personal heads."""

    head_layers: str = option(
        "", "layers that make the head, with commas between; default: the last layer, of the two_conv networks fc1,fc2"
    )

    paper: ClassVar[str] = "Federated Learning with Personalization Layers (Arivazhagan et al., 2019)"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "segmentation")
    judged: ClassVar[str] = "personal"

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the head's tensors."""
        default = "fc1,fc2" if isinstance(network, TwoConv) else ""
        return head_tensors(network, self.head_layers or default)


METHOD = FedPer
