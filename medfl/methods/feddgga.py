"""FedDG-GA: "Federated Domain Generalization with Generalization Adjustment" (Zhang et al., CVPR 2023).

Site:    as FedAvg; tells its gap G_k = L_k(w^t) - L_k(w_k^s), L_k the loss over its training items, w_k^s what it
         trained in its last round s: how much worse the others have made the model for it
Server:  a_k <- max(0, a_k + d_t (G_k - mean of G) / max |G - mean of G|), divided by their sum
         d_t = step (1 - (t - 1) / T);  w = sum_k a_k w_k
a_k begins as 1/K; `step` 0 with `weights` "samples" is FedAvg.

Written from the authors' code and a re-implementation, which agree except for the mean (not subtracted in the authors'
code, whose step is a third for its three sites). Departures. L_k is over the training items without random transforms,
while the code uses validation images: sites need none. In the code a_k is also clipped to at most 1, which matters for
a single site only. Without a gap (a site's first round) a_k is unchanged. Absent sites keep their a_k; those of a
cohort are scaled to the sum 1. Gaps are sent as 1 + G_k, since a server refuses a number of 1000 times the median.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import nn

from medfl.core import Message, Messages, Weights, pick
from medfl.data import moved
from medfl.methods.base import MEANS, Method, mean_shares, one_of, option, weighted_mean
from medfl.storage import State
from medfl.training import Host, Site, autocast, evaluating


@dataclass(frozen=True)
class FedDGGA(Method):
    """FedAvg that gives more weight to the sites for which averaging made the model worse."""

    step: float = option(
        0.2, "d, how much a share may change in round 1 (authors' code)", minimum=0.0, maximum=1.0
    )
    rounds: int = option(
        40, "T, after which d is 0; default in a run: its number of rounds", minimum=1
    )
    weights: str = one_of("the shares to begin with: equal or by samples", *MEANS)

    paper = (
        "Federated Domain Generalization with Generalization Adjustment (Zhang et al., CVPR 2023)"
    )

    def introduce(self, site: Site) -> Message:
        """Send the number of training items, on which the initial shares may be based."""
        return Message({}, {"samples": site.num_samples})

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial weights and the first shares."""
        shares = mean_shares(self.weights, introductions)
        return {**super().init_server(host, weights, introductions), "shares": shares}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train as FedAvg does, and send the gap between the received model and the last one trained here."""
        if self.step == 0:
            return super().local_update(site, state, down)

        gap = {}
        if "loss" in state:
            received = training_loss(site.model(down["weights"]), site)
            gap = {"gap": 1 + received - state["loss"]}

        _, reply = super().local_update(site, {}, down)
        trained = training_loss(site.model(reply["weights"]), site)
        return {"loss": trained}, Message(reply.tensors, {**reply.scalars, **gap})

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Adjust the cohort's shares, and average with them."""
        if self.step == 0:
            shares = mean_shares(self.weights, replies)
            return {**server, "weights": weighted_mean(replies, "weights", shares)}

        before = pick(server["shares"], sorted(replies))
        gaps = {}
        for name in before:
            if "gap" in replies[name].scalars:
                gaps[name] = replies[name].scalars["gap"] - 1

        # d (1 - (t - 1) / T)
        decayed = self.step * max(0.0, 1 - (host.round - 1) / self.rounds)
        shares = adjusted(before, gaps, decayed)
        # the cohort's total weight is unchanged
        total = sum(before.values())
        cohort_shares = {name: total * share for name, share in shares.items()}
        return {
            "weights": weighted_mean(replies, "weights", shares),
            "shares": {**server["shares"], **cohort_shares},
        }

    def observed(self, server: State, replies: Messages) -> Mapping[str, float]:
        """Return each site's share of all weight."""
        return {f"weight/{name}": share for name, share in server["shares"].items()}


def adjusted(
    shares: Mapping[str, float], gaps: Mapping[str, float], step: float
) -> dict[str, float]:
    """Return a_k of a cohort after a step, with the sum 1: equal if all would be 0.

    Args:
        shares: a_k before, with any sum.
        gaps: G_k of the sites that know theirs.
        step: d_t.
    """
    total = sum(shares.values())
    moved = {name: share / total if total else 1 / len(shares) for name, share in shares.items()}
    mean = 0.0
    if gaps:
        mean = fmean(gaps.values())

    largest = max((abs(gap - mean) for gap in gaps.values()), default=0.0)
    if largest > 0:
        for name, gap in gaps.items():
            # a_k + d (G_k - mean of G) / max |G - mean|, not below 0
            moved[name] = max(0.0, moved[name] + step * (gap - mean) / largest)

    total = sum(moved.values())
    return {name: share / total if total else 1 / len(moved) for name, share in moved.items()}


def training_loss(model: nn.Module, site: Site) -> float:
    """Return L_k: the site's mean loss over its training items, without random transforms."""
    size = site.settings.batch_size
    left = site.num_samples
    total = 0.0
    with evaluating(model), torch.no_grad(), autocast(site):
        for x, y in site.still.batches(size):
            loss = site.loss(model(moved(x, site.device)), moved(y, site.device))
            total += min(size, left) * float(loss)
            left -= size

    return total / site.num_samples


METHOD = FedDGGA
