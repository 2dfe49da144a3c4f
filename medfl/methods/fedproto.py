"""FedProto: "Federated Prototype Learning across Heterogeneous Clients" (Tan et al., AAAI 2022).

Site:    minimise f_k + lambda * mean over batch and d of (h - C_y)^2, h the feature, C_y the received prototype of its
         label, constant; a class without one contributes 0. Reply: the mean of h over each own class.
Server:  C_c = plain mean over the participants that own c, as in the public code. Weights never leave a site.
Judged by the nearest prototype (mean squared difference) among the site's own classes, or by the site's classifier.
Departures. The paper prints a sample-weighted mean divided once more by the number of owners, which would shrink every
prototype; `weights="samples"` omits that division. Class means are computed after training in evaluation mode,
not over the last epoch's batches. A class whose owners are all absent keeps its prototype.
With `bodies` the sites have their own networks, which only need to agree on the length d of a feature.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass

from torch import Tensor, nn

from medfl.core import Message, Messages
from medfl.methods._parts.prototype_exchange import (
    PrototypeExchange,
    average_prototypes,
    class_mean_groups,
    distances,
    has_prototype,
    only_classes,
    prototype_loss,
    received,
)
from medfl.methods._parts.prototypes import (
    class_counts,
    class_indices,
    class_means,
    distance,
    prototype_groups,
)
from medfl.methods.base import MEANS, Collated, Group, one_of, option
from medfl.networks.heads import features_and_output, head
from medfl.storage import State
from medfl.training import FitReport, Host, Site, fit, snapshot


@dataclass(frozen=True)
class FedProto(PrototypeExchange):
    """Sites share class means of features instead of weights."""

    lam: float = option(
        1.0, "lambda, pull towards the prototypes (paper: 1, or 0.1 on CIFAR-10)", minimum=0.0
    )
    weights: str = one_of(
        "mean over a class's owners: plain (public code), or by samples (paper)", *MEANS
    )
    predict: str = one_of(
        "a site is judged by the nearest prototype, or by its classifier (the public code reports both)",
        "prototypes",
        "classifier",
    )

    paper = "FedProto: Federated Prototype Learning across Heterogeneous Clients (Tan et al., 2022)"

    def groups(self) -> tuple[Group, ...]:
        """Declare the class means of features, and the classes' counts if they are used as weights."""
        return prototype_groups(counts=self.weights == "samples")

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train the site's own model near the prototypes; reply with its class means."""
        model = site.model(state["weights"])
        self.train(model, site, state, down)
        means, counts = class_means(model, site)
        groups = class_mean_groups(means, counts, with_counts=self.weights == "samples")
        return {"weights": snapshot(model)}, Message(groups)

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train with lambda times the distance between features and prototypes in the loss."""
        prototypes = received(down, model)
        if self.lam == 0 or prototypes is None:
            return fit(model, site)

        def objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
            h, output = features_and_output(network, x)
            # f_k + lambda mean (h - C_y)^2
            return site.loss(output, y) + self.lam * prototype_loss(h, class_indices(y), prototypes)

        return fit(model, site, objective=objective)

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average each class's means over its owners."""
        by_samples = self.weights == "samples"
        return {
            "prototypes": average_prototypes(server["prototypes"], replies, by_samples=by_samples)
        }

    def observed(self, server: State, replies: Messages) -> Mapping[str, float]:
        """Return distances between class means and prototypes."""
        return distances(server["prototypes"], replies)

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's model, its output replaced by the distances to the prototypes of the site's classes."""
        model = super().predictor(site, state, down)
        prototypes = received(down, model)
        if self.predict == "classifier" or prototypes is None:
            return model
        own_classes = class_counts(site.train, len(prototypes)).to(site.device) > 0
        # On a copy: a leased network must not keep the hook.
        return nearest(deepcopy(model), prototypes, own_classes)


def nearest(network: nn.Module, prototypes: Tensor, own: Tensor) -> nn.Module:
    """Make a network classify by the nearest prototype.

    Args:
        network: changed in place: its head gives (B, K) logits, minus the mean squared difference to each prototype.
        prototypes: (K, d), NaN for a class without one.
        own: (K,) bool, the classes allowed.
    """
    available = has_prototype(prototypes)
    allowed = own & available
    if not allowed.any():  # no class of the site has been sent yet
        allowed = available

    def replace(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return only_classes(
            -distance(inputs[0], prototypes.nan_to_num().to(inputs[0].dtype)), allowed
        )

    head(network).register_forward_hook(replace)
    return network


METHOD = FedProto
