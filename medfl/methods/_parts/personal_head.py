"""Methods whose sites share a body and keep the head, or leave it untrained."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from medfl.core import OF_VECTORS, InputError
from medfl.methods.base import Method, option
from medfl.networks.heads import head_name, head_names
from medfl.training import trainable


@dataclass(frozen=True)
class PersonalHead(Method):
    """FedAvg of the body."""

    head_layers: str = option(
        "", "layers that make the head, with commas between; default: the last layer"
    )

    tasks = (*OF_VECTORS, "segmentation")
    judged = "personal"

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the head's tensors.

        Raises:
            InputError: no such layer.
        """
        return head_names(network, self.head_layers.replace(",", " ").split())

    def check_parts(self, network: nn.Module, method: str, *, head: bool) -> nn.Module:
        """Return the network if its body has trainable parameters, and with `head` also its head.

        Raises:
            InputError: one of them has none; or there is no such layer.
        """
        trained = trainable(network).keys()
        personal = self.personal_names(network)
        for part, names in (
            ("body", trained - personal),
            ("head", trained & personal if head else trained),
        ):
            if not names:
                raise InputError(
                    f"method {method!r} on a {type(network).__name__} with the head "
                    f"{self.head_layers or head_name(network)}: its {part} has nothing to train",
                    "it trains a part of the network at a time",
                    "choose other head_layers, or another network or method",
                )

        return network
