"""FedBN: "Federated Learning on Non-IID Features via Local Batch Normalization" (Li et al., ICLR 2021).

FedAvg over everything except normalisation layers (affine parameters, running statistics and counter), which stay at
their site. Layers are found by module type: names such as "bn" miss shortcut layers and every norm of MONAI's
networks (`adn.N`).
Departure: the mean is weighted by samples, so that a network without BatchNorm gives FedAvg (`weights="uniform"` as
in the reference code).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfl.methods.base import Method, option
from medfl.training import NORMS, split_names

_KINDS: dict[str, tuple[type[nn.Module], ...]] = {"batch": (_BatchNorm,), "all": NORMS}


@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg whose normalisation layers never leave their site."""

    norms: str = option(
        "batch",
        "layers that stay: BatchNorm as in the paper, or every norm",
        choices=("batch", "all"),
    )
    weights: str = option(
        "samples", "mean over participants by samples, or 1/S", choices=("samples", "uniform")
    )

    paper = "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization (Li et al., 2021)"
    judged = "personal"

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the normalisation layers' tensors."""
        return split_names(network, _KINDS[self.norms])


METHOD = FedBN
