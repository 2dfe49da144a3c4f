"""ConDistFL: "Conditional Distillation for Federated Learning from Partially Annotated Data" (Wang et al., 2023).

Site:    minimise L + lam_r C over the received weights; L is the loss over what its masks show (`--site-labels`)
         F: the structures that it annotates; B: the background and the others, each by itself
         z, t: logits of the network and of the received model, the latter in evaluation mode and without gradients
         q(z)_b = exp(z_b / tau) / sum_(b' in B) exp(z_b' / tau), the probability of b where nothing of F is
         M = 1 at pixels where neither the mask shows nor t predicts anything of F, else 0
         C = 1 - mean over b in B of 2 sum M q(z)_b q(t)_b / (sum M q(z)_b + sum M q(t)_b + 1e-5), sums over a batch
         lam_r: from lam_first in round 1 to lam_last in round `rounds`, in equal steps
Server:  FedAvg's.

Written from the paper's abstract and the authors' published code. Departures: the bundle's loss, made marginal, and its
optimiser replace Dice with cross-entropy and SGD with momentum 0.99; gradients are not clipped to norm 1. In the
code an organ and its tumour are one group of B, here every structure is its own. The code divides by 1 - sum_F p + 1e-5
after a softmax over all channels; q is the same without the 1e-5. A site that annotates everything trains as in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medfl.core import InputError, Message
from medfl.data import AnnotatedClasses
from medfl.methods.base import Collated, Method, option
from medfl.networks.heads import frozen
from medfl.storage import State
from medfl.training import FitReport, Site, fit


@dataclass(frozen=True)
class ConDistFL(Method):
    """Sites that annotate different structures learn the others from the model that they receive."""

    tau: float = option(2.0, "temperature of both softmaxes (authors' code)", minimum=1e-3)
    lam_first: float = option(
        0.01, "weight of the distillation in round 1 (authors' code)", minimum=0.0
    )
    lam_last: float = option(1.0, "its weight in the last round (authors' code)", minimum=0.0)
    rounds: int = option(
        120, "round with the last weight; default in a run: its number of rounds", minimum=1
    )

    paper = "ConDistFL: Conditional Distillation for FL from Partially Annotated Data (Wang et al., 2023)"
    tasks = ("segmentation",)

    def check(self, site: Site) -> None:
        """Refuse masks whose channels overlap: conditioning on the other classes requires exclusive classes."""
        if site.known is not None and not site.known.exclusive:
            raise InputError(
                f"method condistfl at site {site.name!r}, whose network says yes or no in each channel",
                "it is for a softmax over background and structures",
                "take fedavg: the loss leaves unknown channels out with any method",
            )

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train with distillation of the structures that the site does not annotate."""
        annotated = site.known
        weight = self._weight(site.round)
        if annotated is None or weight == 0:
            return fit(model, site)

        received = frozen(site.model(down["weights"]))

        def objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
            output = network(x)
            with torch.no_grad():
                teacher = _whole(received(x))
            return site.loss(output, y) + weight * conditional(
                _whole(output), teacher, y, annotated, self.tau
            )

        return fit(model, site, objective=objective)

    def _weight(self, round_: int) -> float:
        # linear in the rounds, from the first weight to the last
        done = min(1.0, (round_ - 1) / max(1, self.rounds - 1))
        return self.lam_first + (self.lam_last - self.lam_first) * done


def conditional(
    student: Tensor, teacher: Tensor, target: Tensor, known: AnnotatedClasses, tau: float
) -> Tensor:
    """Return C: one minus the Dice of two networks' beliefs about unannotated classes, where no annotated one is.

    Args:
        student: logits (B, K, H, W[, D]).
        teacher: logits of the same shape, constant.
        target: masks of the site.
        known: what they show.
        tau: temperature.
    """
    annotated = known.renumbered(target)

    # class indices in one channel, or one-hot channels of which the first is the background
    if annotated.ndim != student.ndim:
        annotated = annotated[:, None]

    if annotated.shape[1] > 1:
        annotated = annotated[:, 1:].any(1, keepdim=True)
    else:
        annotated = annotated > 0

    predicted = teacher.argmax(1, keepdim=True)
    for channel in known.classes:
        # Nor where the teacher predicts an annotated structure: there the site's own mask is better.
        annotated = annotated | (predicted == channel)

    # The probabilities of the unannotated classes, given that it is none of the annotated ones.
    # (B, unannotated classes, ...)
    q, p = (_given_the_rest(z, known, tau) * ~annotated for z in (student, teacher.detach()))
    space = [0, *range(2, q.ndim)]
    return 1 - (2 * (q * p).sum(space) / (q.sum(space) + p.sum(space) + 1e-5)).mean()


def _given_the_rest(z: Tensor, known: AnnotatedClasses, tau: float) -> Tensor:
    exact = z.to(torch.promote_types(z.dtype, torch.float32))
    return torch.stack([exact[:, channel] for channel in known.unannotated], 1).div(tau).softmax(1)


def _whole(output: Collated) -> Tensor:
    """Return the full-size output, which is the first of a network with deep supervision."""
    finest: Tensor = output[0] if isinstance(output, list | tuple) else output
    return finest


METHOD = ConDistFL
