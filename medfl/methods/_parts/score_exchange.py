"""Rounds in which sites exchange scores of public items; no weights are sent.

The server draws N_a public items per round. Each participant replies with its network's scores of them, and the next
round's broadcast has their mean over the participants, the consensus, beside the indices of the new items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, adaptive_avg_pool3d

from medfl.core import Message, Messages, Weights, stream
from medfl.methods._parts.own_networks import OwnNetworks
from medfl.methods._parts.public import PublicMethod, on_public, public_data, untracked
from medfl.methods.base import Collated, Group, one_of, option, uniform_shares, weighted_mean
from medfl.storage import State
from medfl.training import Host, Objective, Site, evaluating, fit


@dataclass(frozen=True)
class ScoreExchange(PublicMethod, OwnNetworks):
    """The common part of FedMD and FCCL: the server's half, and a site's work on public items."""

    alignment: int = option(
        5000, "N_a, public items drawn each round (public code: 5,000); 0 all", minimum=0
    )
    initial_epochs: int = option(
        0,
        "passes over a site's own data at first, before those of its first round (public code: up to 25)",
        minimum=0,
    )
    map_size: int = option(
        32, "side of the maps of scores that are sent in segmentation", minimum=1
    )
    public_bn: str = one_of(
        "BatchNorm on public batches: running statistics follow (public code), or stay those of private data",
        "track",
        "no_track",
    )

    tasks = ("classification", "segmentation")

    def groups(self) -> tuple[Group, ...]:
        """Declare scores of public items, and the indices of the requested items."""
        return (Group("scores", smaller=True), Group("positions", up=False))

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Draw the public items of round 1."""
        return {"positions": self._drawn(host)}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the indices of the requested items and, once there is one, the last consensus with its own indices."""
        request = {"asked": server["positions"]}
        if "consensus" not in server:
            return Message({"positions": request})
        # The consensus is of the items of the round before, the request of this round's.
        last = server["consensus"]
        positions = {**request, "scored": last["positions"]}
        return Message({"positions": positions, "scores": {"public": last["scores"]}})

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average the scores and draw the items of the next round."""
        mean = weighted_mean(replies, "scores", uniform_shares(replies))["public"]
        return {
            "positions": self._drawn(host),
            "consensus": {"positions": server["positions"], "scores": mean},
        }

    def _drawn(self, host: Host) -> Tensor:
        """Draw the indices (N,) of N_a public items, in ascending order; 0, or more than there are, means all."""
        total = len(public_data(host))
        with stream(host.seed, "alignment") as generator:
            order = torch.randperm(total, generator=generator)

        # sorted: the indices reveal nothing about the draw, and items are read in order
        return order[: self.alignment or total].sort().values

    # Site half

    def first_epochs(self, model: nn.Module, site: Site) -> None:
        """Train on the site's own data for `initial_epochs` before its first round."""
        if self.initial_epochs:
            fit(model, replace(site.for_epochs(self.initial_epochs), journal=[]), purpose="initial")

    def fit_public(self, model: nn.Module, items: Site, objective: Objective, purpose: str) -> None:
        """Train on the result of `on_public`."""
        with untracked(model, self.public_bn == "no_track"):
            fit(model, items, objective=objective, purpose=purpose)

    def fit_consensus(
        self,
        model: nn.Module,
        site: Site,
        down: Message,
        loss: Callable[[Tensor, Tensor], Tensor],
        purpose: str,
        *,
        epochs: int,
        size: int,
        least: int = 1,
    ) -> None:
        """Train on the items of the received consensus.

        `loss` is (scores of a batch, the consensus on it) -> scalar. A last batch of fewer than `least` items joins the
        previous one.
        """

        def objective(network: nn.Module, x: Collated, consensus: Collated) -> Tensor:
            return loss(self.scores(network, site, x), consensus)

        positions = down["positions"]["scored"]
        scores = down["scores"]["public"]
        items = on_public(site, public_data(site), positions, scores, epochs, size, least)
        self.fit_public(model, items, objective, purpose)

    def scoring(self, network: nn.Module, site: Site, down: Message, size: int) -> Message:
        """Return the reply to a broadcast: scores (N, K[, h, w[, d]]) float32 of the requested items."""
        public = public_data(site)
        positions = down["positions"]["asked"].cpu()
        parts = []
        with evaluating(network), torch.no_grad():
            for batch in torch.split(positions, size):
                x, _ = public.at(batch)
                parts.append(self.scores(network, site, x.to(site.device)).float())

        return Message({"scores": {"public": torch.cat(parts)}})

    def scores(self, network: nn.Module, site: Site, x: Collated) -> Tensor:
        """Return a network's scores of public inputs; maps have at most `map_size` per side."""
        return reduced(public_data(site).outputs(network, x), self.map_size)


def batch_size(site: Site, size: int, usual: int) -> int:
    """Return the number of public items per step: `size`, or if that is 0 `usual`, for maps the run's batch size."""
    if size:
        return size
    if site.task.kind == "segmentation":
        return max(2, site.settings.batch_size)  # FCCL standardises over at least two items

    return usual


def reduced(output: Tensor, side: int) -> Tensor:
    """Return logits (B, K) unchanged, and maps (B, K, H, W[, D]) averaged over cells to at most `side` per side.

    Half precision becomes float32.
    """
    exact = output.to(torch.promote_types(output.dtype, torch.float32))
    if exact.ndim == 2:
        return exact
    pool: Any = adaptive_avg_pool2d if exact.ndim == 4 else adaptive_avg_pool3d
    averaged: Tensor = pool(exact, [min(side, length) for length in exact.shape[2:]])
    return averaged
