"""MOON: "Model-Contrastive Federated Learning" (Li, He, Song, CVPR 2021).

Site:    minimise f_k + mu times the mean over items of -log[e^(s(z, z_g) / tau) / (e^(s(z, z_g) / tau) + e^(s(z, z_p) /
         tau))], s the cosine, z the feature of the model in training, z_g that of the received model, z_p that of the
         site's own model at the end of its last participation, which stays there and may be old. Both references are
         in evaluation mode, without gradients.
Server:  FedAvg's.

A first participation has no z_p and trains as FedAvg (the public code's loss is 0 then). z is the head's input;
`projection=true` puts the original's two layers before a smaller head. In segmentation z is the bottleneck: the
smallest feature map, averaged over space. Departure: the public code can keep several previous models, here it is one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, softplus

from medfl.core import Message, Task
from medfl.methods._parts.class_heads import class_head
from medfl.methods.base import Collated, Method, one_of, option
from medfl.networks.heads import features_and_output, frozen, head_name, replace_head
from medfl.storage import State
from medfl.training import FitReport, Site, fit

_PROJECTED = 256  # length of a projected feature, as in the public code


@dataclass(frozen=True)
class MOON(Method):
    """FedAvg whose sites keep features near the received model's and away from their own previous model's."""

    mu: float = option(
        1.0, "strength of the contrastive term (paper: 5 CIFAR-10, 1 CIFAR-100)", minimum=0.0
    )
    tau: float = option(0.5, "temperature, above 0 (original grid 0.1, 0.5, 1)", minimum=1e-6)
    projection: bool = option(
        False, "put the original's projection (d to d, ReLU, d to 256) before the head"
    )
    feature: str = one_of(
        "z: what enters the head, the bottleneck of a network for maps, or by task",
        "auto",
        "head",
        "bottleneck",
    )

    paper = "Model-Contrastive Federated Learning (Li et al., 2021)"
    takes_prototypes = True

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Replace the head by a projection and a new head, if requested."""
        if not self.projection:
            return network

        layer = class_head(network, task)
        size = layer.in_features
        projection = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, _PROJECTED))
        layers = OrderedDict(
            projection=projection, output=nn.Linear(_PROJECTED, layer.out_features)
        )

        return replace_head(network, nn.Sequential(layers).to(layer.weight))

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train and keep the trained model as the previous one for the next time."""
        _, reply = super().local_update(site, state, down)
        return {"previous": reply["weights"]}, reply

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train with mu times the contrastive term in the loss."""
        if self.mu == 0 or "previous" not in state:
            if not self.mu:
                return fit(model, site)

            # FedAvg's loss as an objective, so that a bundle's trainer with its own training step is
            # refused now and not in round 2.
            return fit(model, site, objective=lambda net, x, y: site.loss(net(x), y))

        by_map = self.feature == "bottleneck" or (
            self.feature == "auto" and site.task.kind == "segmentation"
        )
        run = bottleneck_and_output if by_map else features_and_output
        # separate networks: `model` moves while these two are fixed
        received = frozen(site.model(down["weights"]))
        previous = frozen(site.model(state["previous"]))

        def objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
            z, output = run(network, x)
            with torch.no_grad():
                z_g, _ = run(received, x)
                z_p, _ = run(previous, x)
            return site.loss(output, y) + self.mu * contrastive(z, z_g, z_p, self.tau)

        return fit(model, site, objective=objective)


def contrastive(z: Tensor, z_g: Tensor, z_p: Tensor, tau: float) -> Tensor:
    """Return the mean of -log[e^(s_g / tau) / (e^(s_g / tau) + e^(s_p / tau))] = log(1 + e^((s_p - s_g) / tau)).

    z are features (B, d), or maps (B, d, H, W[, D]), which are averaged over space; z_g of the received model attract,
    z_p of the previous one repel.
    """
    z, z_g, z_p = (value.flatten(2).mean(2) if value.ndim > 2 else value for value in (z, z_g, z_p))
    return softplus((cosine_similarity(z, z_p) - cosine_similarity(z, z_g)) / tau).mean()


def bottleneck_and_output(network: nn.Module, x: Tensor) -> tuple[Tensor, Collated]:
    """Run a network once and return its smallest feature map (B, C, H, W[, D]) and its output.

    Of several equally small ones the last, where a decoder starts. A map of one position does not count: it is the gate
    of a squeeze-and-excitation block. The head and its containers do not count, so that a network that keeps its size
    gives the head's input.
    """
    last = head_name(network)
    size = float("inf")
    feature_map = x

    def look(_: nn.Module, inputs: Collated, output: Collated) -> None:
        nonlocal size, feature_map
        # a single pixel is no map; of maps of one size the last, which has seen the most
        if (
            isinstance(output, Tensor)
            and output.ndim == x.ndim
            and 1 < output[0, 0].numel() <= size
        ):
            size = output[0, 0].numel()
            feature_map = output

    handles = []
    for name, module in network.named_modules():
        # neither the head nor what contains it: their outputs come later
        if name and not f"{last}.".startswith(f"{name}."):
            handles.append(module.register_forward_hook(look))

    try:
        output = network(x)
    finally:
        for handle in handles:
            handle.remove()

    return feature_map, output


METHOD = MOON
