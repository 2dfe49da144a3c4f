"""FedMD: "FedMD: Heterogenous Federated Learning via Model Distillation" (Li, Wang, 2019).

Sites with networks of any kind (option `bodies`) learn from each other's scores of public items; no weights are sent.

First:   transfer learning: a site trains on the labelled public items, then on its own.
Round:   the server draws N_a public items; f_k(x) are site k's scores of x, before any softmax, in evaluation mode.
         (1) consensus: f~(x) = 1/S sum_k f_k(x), the plain mean of the participants;
         (2) digest: each site minimises the mean of |f_k(x) - f~(x)| over the drawn items;
         (3) revisit: it trains on its own data as ever, by cross-entropy.
Judged by each site's own model.

A round is one exchange here. The broadcast of round r has the items drawn for r and the consensus on those of r - 1; a
site digests that, revisits, and replies with its scores of the new items. So a participant of round r digests the
consensus of the participants of r - 1. A site's first participation is its transfer learning, without a digest.

Departures. Public labels are learned only if they have the sites' classes, by name and in order; otherwise, as
with CIFAR beside skin lesions, and in segmentation, transfer learning starts on the site's own data, and f_k are the
scores of the private classes. Both trainings have a fixed length, with the run's optimiser and rate and, on private
data, its batches (public code: Adam 0.001 throughout, batches of 32 and then 5). In segmentation f_k is a map of
scores, averaged over cells so that at most `map_size` remain per side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss, mse_loss

from medfl.core import Message
from medfl.methods._parts.public import on_public, public_data
from medfl.methods._parts.score_exchange import ScoreExchange, batch_size
from medfl.methods.base import Collated, one_of, option
from medfl.storage import State
from medfl.training import Site, fit, snapshot

_BATCH = 256  # as in the public code


@dataclass(frozen=True)
class FedMD(ScoreExchange):
    """Sites fit the mean of everybody's scores of public items, then their own data."""

    digest_epochs: int = option(
        1, "passes over the drawn items to fit the consensus (public code: 1)", minimum=0
    )
    digest_batch_size: int = option(
        0,
        "public items a step; 0: 256 (public code), in segmentation the run's batch size",
        minimum=0,
    )
    digest_loss: str = one_of("distance to the consensus: absolute (code), or squared", "l1", "mse")
    pretrain_epochs: int = option(
        20,
        "passes over labelled public items at first, where their classes are the sites' (paper: to convergence)",
        minimum=0,
    )

    paper = "FedMD: Heterogenous Federated Learning via Model Distillation (Li, Wang, 2019)"

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Digest the consensus, revisit the site's own data; keep the model, reply with its scores."""
        model = site.model(state["weights"])
        size = batch_size(site, self.digest_batch_size, _BATCH)
        if "started" not in state:
            self._transfer(model, site, size)
        elif "scores" in down and self.digest_epochs:
            distance = l1_loss if self.digest_loss == "l1" else mse_loss

            def gap(z: Tensor, consensus: Tensor) -> Tensor:
                return distance(z, consensus.to(z))  # (2)

            self.fit_consensus(
                model, site, down, gap, "digest", epochs=self.digest_epochs, size=size
            )

        fit(model, site)  # (3)
        reply = self.scoring(model, site, down, size)
        return {"weights": snapshot(model), "started": True}, reply

    def _transfer(self, model: nn.Module, site: Site, size: int) -> None:
        """Train on public labels, if they have the sites' classes, and then on the site's own data."""
        public = public_data(site)
        task = site.task
        same_classes = task.classes and (task.kind, task.classes) == (
            public.task.kind,
            public.task.classes,
        )
        if self.pretrain_epochs and same_classes:

            def objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
                return site.loss(public.outputs(network, x), y)  # type: ignore[no-any-return]

            everything = on_public(
                site, public, torch.arange(len(public)), None, self.pretrain_epochs, size
            )
            self.fit_public(model, everything, objective, "public labels")

        # In both cases the site's own data come last: phase two of the transfer.
        self.first_epochs(model, site)


METHOD = FedMD
