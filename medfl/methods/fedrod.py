"""FedROD: "On Bridging Generic and Personalized Federated Learning for Image Classification" (Chen, Chao, ICLR 2022).

One body, two heads on its feature f. The generic head g is trained with the body by balanced softmax, the loss of
z_g + gamma log n with n the site's class counts; both are averaged by samples. The personal head h stays; the loss of
z_g + h(f), with z_g and f held constant, trains h only. Global prediction z_g, personal prediction z_g + h(f).
h starts as a copy of g (`personal_start=zero`: at 0, so that a site that never took part predicts as g, at the cost of
slow first rounds).
Departures. Both losses use the same forward pass and the bundle's optimiser takes both steps; the public code trains h
by plain SGD. The bundle's loss replaces cross-entropy. The variant that predicts h from the class distribution (a
hypernetwork) is omitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from medfl.core import Message, Task
from medfl.methods._parts.class_heads import class_head
from medfl.methods._parts.prototypes import log_prior
from medfl.methods.base import Collated, Method, one_of, option
from medfl.networks.heads import features_and_output, replace_head
from medfl.storage import State
from medfl.training import FitReport, Host, Site, fit, merged


class TwoHeads(nn.Linear):
    """A generic head under the names of the layer that it replaces, and a personal one, here 0.

    In evaluation mode the output is the sum of both, in training mode the generic head's alone.
    """

    def __init__(self, generic: nn.Linear) -> None:
        shape = (generic.in_features, generic.out_features, generic.bias is not None)
        super().__init__(*shape, dtype=generic.weight.dtype)
        self.load_state_dict(generic.state_dict())
        self.personal = nn.Linear(*shape, dtype=generic.weight.dtype)
        for parameter in self.personal.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K) of features (B, d)."""
        # Run in training mode too: it is the network's last layer, whose hooks must fire.
        personal: Tensor = self.personal(x.detach())
        if self.training:
            return super().forward(x)

        return super().forward(x) + personal


@dataclass(frozen=True)
class FedROD(Method):
    """A body with a generic head for everybody and a personal head for the site's own class distribution."""

    personal_start: str = one_of(
        "the personal head begins as a copy of the generic one (authors' code), or at 0",
        "generic",
        "zero",
    )
    gamma: float = option(
        1.0, "strength of the balanced softmax (1 in the paper's and FedBM's runs)", minimum=0.0
    )

    paper = "On Bridging Generic and Personalized Federated Learning for Image Classification (Chen and Chao, 2022)"
    tasks = ("classification",)
    judged = "personal"

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Replace the head by two."""
        return replace_head(network, TwoHeads(class_head(network, task)))

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the personal head's tensors."""
        modules = network.named_modules()
        layer = next(name for name, module in modules if isinstance(module, TwoHeads))
        prefix = f"{layer}.personal.".removeprefix(".")
        return frozenset(name for name in network.state_dict() if name.startswith(prefix))

    def init_site(self, site: Site) -> State:
        """Start the personal head."""
        state = super().init_site(site)
        initial = site.initial_weights
        if self.personal_start == "generic":
            # the generic head has the same names without this part
            for name in state["weights"]:
                state["weights"][name] = initial[name.replace("personal.", "")].clone()

        return state

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train body and generic head by balanced softmax, and the personal head on top of them."""
        heads = next(module for module in model.modules() if isinstance(module, TwoHeads))
        prior = log_prior(site, heads.out_features, self.gamma)

        def objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
            feature, generic = features_and_output(network, x)
            # z_g + h(f), with z_g and f constant: its loss trains h alone.
            personal = generic.detach() + heads.personal(feature.detach())
            # Balanced softmax for body and g: z_g + gamma log n.
            return site.loss(generic + prior, y) + site.loss(personal, y)

        return fit(model, site, objective=objective)

    def global_predictor(self, host: Host, server: State) -> nn.Module:
        """Return body and generic head; the personal one is 0."""
        return host.model(merged(host.networks.initial, server["weights"]))


METHOD = FedROD
