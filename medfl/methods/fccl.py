"""FCCL: "Learn from Others and Be Yourself in Heterogeneous Federated Learning" (Huang, Ye, Du, CVPR 2022).

Sites with networks of any kind (option `bodies`) align their logits of public items; no weights are sent.

First:   a site trains on its own data; that model stays with it, frozen.
Public:  (1) M = z' z~ / B (K, K), z (B, K) the site's logits of a batch of public items, z~ the mean over the sites,
         constant, each column of both standardised over the batch;
         (2) L_col = sum_u (M_uu - 1)^2 + lambda sum_(u != v) (M_uv + 1)^2: two classes are to oppose each other.
Private: (3) CE + KL(frozen || model) + KL(previous || model), temperature 1: the frozen model holds on to what the
         site's own data say, its model of the previous round to what was learnt from the others.
Judged by each site's own model.
z~ includes the site's own model of the previous round, as in the public code. A round is one exchange, as
in FedMD here: a site learns from the mean logits z~ of the participants of round r - 1 on the public items of r - 1,
runs its private phase, and replies with its logits of the items of r.

Departures. The others' logits are fixed during a public phase; in the public code all sites process each batch
together. They are computed in evaluation mode, like the outputs of both references. The first participation trains
the frozen model, for the run's local epochs (and `initial_epochs`). A column whose standard deviation is below 1e-5
counts as constant, 0 after standardising, and a last batch of one item joins the previous one. Maps of logits are
averaged over cells to `map_size` per side, and standardised over all items and cells of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from medfl.core import InputError, Message
from medfl.methods._parts.distillation import divergence
from medfl.methods._parts.public import public_data
from medfl.methods._parts.score_exchange import ScoreExchange, batch_size
from medfl.methods.base import Collated, option
from medfl.networks.heads import frozen
from medfl.storage import State
from medfl.training import Objective, Site, fit, snapshot

_BATCH = 512  # public items per step, as in the public code
_LEAST = 1e-5  # standard deviation below which a column counts as constant


@dataclass(frozen=True)
class FCCL(ScoreExchange):
    """Sites correlate their logits of public items class by class, and hold on to what they knew."""

    lam: float = option(
        0.0051, "lambda, weight of the terms off the diagonal (public code: 0.0051)", minimum=0.0
    )
    frozen_weight: float = option(
        1.0, "weight of KL(frozen || model) (public code: 1)", minimum=0.0
    )
    previous_weight: float = option(
        1.0, "weight of KL(previous || model) (public code: 1)", minimum=0.0
    )
    public_epochs: int = option(
        1, "passes over the drawn public items a round (public code: 1)", minimum=0
    )
    public_batch_size: int = option(
        0, "public items a step, not 1; 0: 512 (code), of masks the run's", minimum=0
    )

    paper = "Learn from Others and Be Yourself in Heterogeneous Federated Learning (Huang, Ye, Du, 2022)"

    def __post_init__(self) -> None:
        """Refuse batches without a variance."""
        for name in ("alignment", "public_batch_size"):
            if getattr(self, name) == 1:
                raise InputError(
                    f"{name}=1",
                    "logits are standardised over 2 public items or more",
                    "take at least 2",
                )

    def check(self, site: Site) -> None:
        """Require two public items."""
        if len(public := public_data(site)) < 2:
            raise InputError(
                f"{len(public)} public item of {public.name!r}",
                "standardising takes 2 or more",
                "raise public_items",
            )

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Learn from the others' logits, then train; keep the model, reply with its logits."""
        model = site.model(state["weights"])
        size = batch_size(site, self.public_batch_size, _BATCH)
        if "frozen" not in state:
            # nothing to correlate with yet, and the frozen model is made here
            self.first_epochs(model, site)
            fit(model, site)
        else:
            if "scores" in down and self.public_epochs:
                learn = partial(collaboration, lam=self.lam)
                self.fit_consensus(
                    model,
                    site,
                    down,
                    learn,
                    "public",
                    epochs=self.public_epochs,
                    size=size,
                    least=2,
                )

            fit(model, site, objective=self._hold_on(site, state))

        reply = self.scoring(model, site, down, size)
        trained = snapshot(model)
        # the model after the first private training remains a teacher in all rounds
        return {"weights": trained, "frozen": state.get("frozen", trained)}, reply

    def _hold_on(self, site: Site, state: State) -> Objective:
        """Return the loss of the private phase (3); the model of the previous round is the one in the State."""
        weights = {"frozen": self.frozen_weight, "weights": self.previous_weight}
        references = []
        for name, weight in weights.items():
            if weight:
                references.append((weight, frozen(site.model(state[name]))))

        def objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
            z = network(x)
            with torch.no_grad():
                teachers = [(weight, reference(x)) for weight, reference in references]
            loss = site.loss(z, y)
            for weight, teacher in teachers:
                loss = loss + weight * divergence(z, teacher)  # (3)

            return loss

        return objective


def collaboration(z: Tensor, z_bar: Tensor, lam: float) -> Tensor:
    """Return L_col (2) of logits (B, K) or maps of them (B, K, h, w[, d]), with z_bar of the same shape constant."""
    m = cross_correlation(z, z_bar)  # (K, K)
    diagonal = m.diagonal()
    agree = (diagonal - 1).square().sum()
    oppose = (m + 1).square().sum() - (diagonal + 1).square().sum()
    # Eq. 2: the diagonal towards 1, everything off it towards -1.
    return agree + lam * oppose


def cross_correlation(z: Tensor, z_bar: Tensor) -> Tensor:
    """Return M (K, K) of (1), with the standard deviations of B - 1 as torch has them by default."""
    local_scores = standardised(z)
    mean_scores = standardised(z_bar.detach().to(z))
    with torch.autocast(z.device.type, enabled=False):  # M is compared with 1
        # Eq. 1: M = z' z~ / B.
        return local_scores.T @ mean_scores / len(local_scores)


def standardised(z: Tensor) -> Tensor:
    """Return logits (B, K[, h, w[, d]]) as columns (N, K) of mean 0 and standard deviation 1; a constant one is 0."""
    columns = z.movedim(1, -1).reshape(-1, z.shape[1])
    variance, mean = torch.var_mean(columns, 0)
    return (columns - mean) / variance.clamp(min=_LEAST**2).sqrt()


METHOD = FCCL
