"""FedMR: features that neither collapse within a class nor spread into the space of classes that a site lacks.

"Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping" (Fan et al., TMLR 2023).
Site:    l_cls + mu1~ l_intra + mu2 l_inter (eq. 5); then g_k^c, the mean of the features of each own class c.
         l_intra (eq. 3): mean over the classes of a batch of ||M^c||_F^2, M^c the correlations of the features in c.
         l_inter (eq. 4): mean over samples of class c and other classes j of max(||z - g_c|| - ||z - g_j||, 0).
Server:  FedAvg of the weights; g_c = sum_k N_k^c g_k^c / sum_k N_k^c. There is no g, hence no l_inter, in round 1.

`mu1` does not depend on the network: mu1~ = mu1 / (d (d - 1)), about mu1 times the mean squared correlation; with
another `intra_scale` it multiplies that loss itself. `mu1=auto` is the released code's default, `intra_scale=released`
with its mu of 0.01: mu1 = 0.01 (n - 1)^2 / n for a batch with n images of each class, 0.58 at 60 and 0.06 at 8. Other
values of mu1 and mu2 are ours: the paper gives none. A class counts from 2 samples per batch, as in the released code;
with 2 it has no gradient.
Departures. Eq. 4 as printed never uses the prototypes of missing classes, for which the text sends them:
`inter_scope=present` is that version. The standard deviation is unbiased as in the released code, otherwise lemma 1
does not hold. Class means are computed in evaluation mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.mappings import within
from medfl.core.message import Message
from medfl.methods._parts.manifold import INTRA_SCALES, STDS, intra_class_loss, shaped
from medfl.methods._parts.prototype_sharing import SharesPrototypes, Sharing
from medfl.methods.base import Method, option, same_option
from medfl.storage.files import State
from medfl.training import FitReport, Site, fit, snapshot


@dataclass(frozen=True)
class FedMR(SharesPrototypes):
    """FedAvg with features decorrelated inside each class and kept away from other classes' global prototypes."""

    mu1: float | str = option(
        0.1,
        "intra-class loss, on the mean squared correlation (ours: 0.001 to 0.5); auto: as the released code",
        minimum=0.0,
    )
    mu2: float = same_option(Sharing, "mu2")
    inter_scope: str = same_option(Sharing, "inter_scope")
    margin: bool = same_option(Sharing, "margin")
    std: str = option(
        "unbiased", "standard deviation inside a class: unbiased (code) or biased", choices=STDS
    )
    min_count: int = option(
        2, "samples of a class in a batch from which it counts; 3 have a gradient", minimum=2
    )
    intra_scale: str = option(
        "paper",
        "intra-class loss: eq. 3, its mean squared correlation, or as the released code scales it",
        choices=INTRA_SCALES,
    )
    lite: int = same_option(Sharing, "lite")
    share_prototypes: float = same_option(Sharing, "share_prototypes")
    stale: str = same_option(Sharing, "stale")
    one_hot: bool = same_option(Sharing, "one_hot")

    inner = Method()
    paper = "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping (Fan et al., 2023)"
    tasks = ("classification",)

    def __post_init__(self) -> None:
        """Refuse a share of the sites outside (0, 1], and words other than `auto` for mu1."""
        shared = within(vars(self), Sharing.__dataclass_fields__)
        # the class is frozen
        object.__setattr__(self, "sharing", Sharing(prototypes=True, **shared))
        if isinstance(self.mu1, str) and self.mu1 != "auto":
            raise InputError(f"mu1={self.mu1}", "mu1 is a number >= 0, or auto", "choose one")

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train with both losses; reply with the class means beside the weights."""
        model = site.model(down["weights"])
        self.train(model, site, state, down)
        reply = site.reply(snapshot(model))
        return state, self.sharing.add_class_means(site, down, model, reply)

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train with l_intra and, if there are prototypes, l_inter in the loss."""
        scale = self.intra_scale if self.mu1 != "auto" else "released"
        # the released code's replacement for mu1
        mu1 = 0.01 if isinstance(self.mu1, str) else self.mu1

        def intra(features: Tensor, labels: Tensor) -> Tensor:
            loss = intra_class_loss(
                features, labels, std=self.std, min_count=self.min_count, scale=scale
            )
            if scale != "paper":
                return loss * mu1

            # mu1~ = mu1 / (d (d - 1)): M^c has d (d - 1) entries off the diagonal.
            d = features.shape[1]
            return loss * (mu1 / max(d * (d - 1), 1))

        decorrelated = shaped(site, intra) if mu1 else site
        return fit(model, self.sharing.pushed(decorrelated, down, model))


METHOD = FedMR
