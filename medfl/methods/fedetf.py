"""FedETF: "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning ..." (Li et al., ICCV 2023).

Fixed simplex classifier M = sqrt(K/(K-1)) U (I - 11'/K), (d, K), U with orthonormal columns, the same at every site and
never sent. Logits tau <p, M_c>, with p the unit-norm feature after a linear projection to d dimensions. Loss: balanced
softmax, logits + gamma log n with n the site's class counts. Body, projection and tau are averaged by samples.
The global model is judged. With `finetune_rounds` each site is also scored at the end by a personal one: a copy of the
newest global model after a local training, then alternating epochs on M and projection with SGD and the bundle's loss.
Departures: the bundle's loss replaces cross-entropy; no fine-tuning by default (20 turns in the public code).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from medfl.core import InputError, Message, Task
from medfl.methods._parts.class_heads import class_head
from medfl.methods._parts.extras import SiteModels
from medfl.methods._parts.phases import fit_part
from medfl.methods._parts.prototypes import log_prior
from medfl.methods.base import Method, option
from medfl.networks.heads import head, head_name, replace_head
from medfl.storage import State
from medfl.training import FitReport, Site, fit


class SimplexHead(nn.Linear):
    """A projection (its weight and bias), then tau times the products with a fixed simplex `etf` (d, K).

    The simplex is a buffer outside the state dict: every network of a run draws the same one.
    """

    def __init__(self, features: int, dimension: int, classes: int) -> None:
        super().__init__(features, dimension)
        self.temperature = nn.Parameter(torch.ones(()))
        self.etf: Tensor
        self.register_buffer("etf", simplex(dimension, classes), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K) of features (B, F)."""
        return self.temperature * (normalize(super().forward(x), dim=1) @ self.etf)


@dataclass(frozen=True)
class FedETF(SiteModels, Method):
    """FedAvg around a classifier that is fixed as neural collapse would make it."""

    gamma: float = option(1.0, "strength of the balanced softmax (paper: 1)", minimum=0.0)
    dimension: int = option(
        0, "d, length of the projection; 0: the number of classes (public code)", minimum=0
    )
    finetune_rounds: int = option(
        0,
        "turns for a personal model, 3 epochs on the simplex, 3 on the projection (public code: 20)",
        minimum=0,
    )
    finetune_simplex_lr: float = option(
        0.1, "rate on the simplex for a personal model (public code)", minimum=0.0
    )
    finetune_projection_lr: float = option(
        0.05, "rate on the projection then (public code)", minimum=0.0
    )

    paper = (
        "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and Fixed Classifier "
        "(Li et al., 2023)"
    )
    tasks = ("classification",)

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Replace the head by projection and simplex."""
        layer = class_head(network, task)
        dimension = self.dimension or layer.out_features
        if dimension < layer.out_features:
            raise InputError(
                f"dimension={dimension} for method 'fedetf' with {layer.out_features} classes",
                "a simplex of K classes needs at least K dimensions",
                "raise it, or leave it out",
            )

        return replace_head(
            network, SimplexHead(layer.in_features, dimension, layer.out_features).to(layer.weight)
        )

    def has_site_models(self) -> bool:
        """Tell whether there is fine-tuning."""
        return self.finetune_rounds > 0

    def train(
        self, model: nn.Module, site: Site, state: State, down: Message, purpose: str = "local"
    ) -> FitReport:
        """Train body, projection and tau by balanced softmax."""
        # Logits + gamma log n: rare classes must win by more.
        layer = head(model)
        assert isinstance(layer, SimplexHead)
        prior = log_prior(site, layer.etf.shape[1], self.gamma)
        return fit(
            model,
            site,
            objective=lambda network, x, y: site.loss(network(x) + prior, y),
            purpose=purpose,
        )

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the newest global model, fine-tuned on the site's data together with its own simplex."""
        if not self.finetune_rounds:
            return super().predictor(site, state, down)

        model = site.network()  # not a leased one: its simplex is changed permanently
        model.load_state_dict(down["weights"])
        self.train(model.train(), site, state, down, "finetune")
        layer = head(model)
        assert isinstance(layer, SimplexHead)
        simplex_here = layer.etf.clone()
        # a buffer of this name would keep a parameter out
        del layer.etf
        layer.etf = nn.Parameter(simplex_here)
        prefix = f"{head_name(model)}.".removeprefix(".")

        for index in range(self.finetune_rounds):
            for part, rate in (
                ("etf", self.finetune_simplex_lr),
                ("weight bias", self.finetune_projection_lr),
            ):
                names = [prefix + leaf for leaf in part.split()]
                # 3 epochs as in the public code.
                fit_part(model, site, names, f"finetune {part} {index}", epochs=3, rate=rate)

        return model


def simplex(dimension: int, classes: int) -> Tensor:
    """Draw a simplex equiangular tight frame (d, K): unit columns whose cosines are all -1/(K-1)."""
    # U with orthonormal columns, so that the columns of M have equal angles.
    orthonormal: Tensor = torch.linalg.qr(torch.rand(dimension, classes)).Q  # (d, K)
    centred = torch.eye(classes) - torch.ones(classes, classes) / classes
    # M = sqrt(K / (K - 1)) U (I - 11' / K)
    return orthonormal.mul((classes / (classes - 1)) ** 0.5) @ centred


METHOD = FedETF
