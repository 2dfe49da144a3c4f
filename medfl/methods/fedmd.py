"""FedMD: "FedMD: Heterogenous Federated Learning via Model Distillation" (Li, Wang, 2019).

Sites with networks of any kind (option `bodies`) learn from each other's scores of public items; no weights travel.

First:   transfer learning: a site trains on the labelled public items, then on its own.
Round:   the server draws N_a public items; f_k(x) are site k's scores of x, before any softmax, in evaluation mode.
         (1) consensus: f~(x) = 1/S sum_k f_k(x), the plain mean of the participants;
         (2) digest: each site minimises the mean of |f_k(x) - f~(x)| over the drawn items;
         (3) revisit: it trains on its own data as ever, by cross-entropy.
Judged by each site's own model.

A round is one exchange here. The broadcast of round r has the items drawn for r and the consensus on those of r - 1; a
site digests that, revisits, and replies its scores of the new items. So whoever takes part in round r digests what the
participants of r - 1 agreed on. A site's first participation is its transfer learning, without a digest.

Departures. Public labels are learned only where they are of the sites' classes, by name and in order; elsewhere, as
with CIFAR beside skin lesions, and in segmentation, transfer learning begins on the site's own data, and f_k are the
scores of the private classes. Both trainings are of a fixed length, with the run's optimiser and rate and, on private
data, its batches (public code: Adam 0.001 throughout, batches of 32 and then 5). In segmentation f_k is a map of
scores, averaged over cells so that at most `map_size` are left a side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, adaptive_avg_pool3d, l1_loss, mse_loss

from medfl.core.message import Message, Weights
from medfl.core.seeding import stream
from medfl.core.storage import State
from medfl.data.prepared import Batch, Prepared, Shard
from medfl.data.public import Public
from medfl.methods._parts.aggregation import uniform_shares, weighted_mean
from medfl.methods._parts.extras import Bodies, PublicData
from medfl.methods._parts.public import SCORES, shared, untracked
from medfl.methods.base import Group, Method, option
from medfl.training import Host, Site, evaluating, fit, snapshot

_BATCH = 256  # of the public code


@dataclass(frozen=True)
class FedMD(PublicData, Bodies, Method):
    """Sites fit the mean of everybody's scores of public items, then their own data."""

    alignment: int = option(
        5000, "N_a, public items that are drawn each round, at most all (public code: 5,000); 0 all", minimum=0
    )
    digest_epochs: int = option(1, "passes over the drawn items to fit the consensus (public code: 1)", minimum=0)
    digest_batch_size: int = option(
        0, "public items a step; 0: 256 (public code), in segmentation the run's batch size", minimum=0
    )
    digest_loss: str = option(
        "l1", "distance to the consensus: absolute (public code), or squared", choices=("l1", "mse")
    )
    pretrain_epochs: int = option(
        20,
        "passes over labelled public items at first, where their classes are the sites' (paper: to convergence)",
        minimum=0,
    )
    initial_epochs: int = option(
        0, "passes over a site's own data at first, before those of its first round (public code: up to 25)", minimum=0
    )
    map_size: int = option(32, "side of the maps of scores that are sent in segmentation", minimum=1)
    public_bn: str = option(
        "track",
        "BatchNorm on public batches: running statistics follow (public code), or stay those of private data",
        choices=("track", "no_track"),
    )

    paper: ClassVar[str] = "FedMD: Heterogenous Federated Learning via Model Distillation (Li, Wang, 2019)"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "segmentation")
    judged: ClassVar[str] = "personal"

    def groups(self) -> tuple[Group, ...]:
        """Declare scores of public items, and the positions of those that are asked for."""
        return SCORES

    def check(self, site: Site) -> None:
        """Ask for public data."""
        shared(site)

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return every tensor of the network."""
        return frozenset(network.state_dict())

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Mapping[str, Message]) -> State:
        """Draw the public items of round 1."""
        return {"positions": drawn(host, self.alignment)}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the items of this round, and the consensus on those of the one before."""
        return asking(server)

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Average the scores and draw the items of the next round."""
        return agreed(host, server, replies, self.alignment)

    # Site half

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Digest the consensus, revisit the site's own data; keep the model, reply its scores."""
        model, public = site.model(state["weights"]), shared(site)
        size = batch_size(site, self.digest_batch_size, _BATCH)
        if "started" not in state:
            self._transfer(model, site, public, size)
        elif "scores" in down and self.digest_epochs:
            self._digest(model, site, public, down, size)
        fit(model, site)  # (3)
        reply = scoring(model, site, public, down, size, self.map_size)
        return {"weights": snapshot(model), "started": True}, reply

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's own model."""
        return site.model(state["weights"])

    def _transfer(self, model: nn.Module, site: Site, public: Public, size: int) -> None:
        """Train on public labels, where they are of the sites' classes, and for so long on the site's own data."""
        if self.pretrain_epochs and same_classes(site, public):
            everything = on_public(site, public, torch.arange(len(public)), None, self.pretrain_epochs, size)
            with statistics(model, self.public_bn):
                fit(
                    model,
                    everything,
                    objective=lambda net, x, y: site.loss(public.outputs(net, x), y),
                    purpose="public labels",
                )
        first_epochs(model, site, self.initial_epochs)

    def _digest(self, model: nn.Module, site: Site, public: Public, down: Message, size: int) -> None:
        """Fit the consensus (2)."""
        distance = l1_loss if self.digest_loss == "l1" else mse_loss

        def objective(network: nn.Module, x: Any, y: Any) -> Tensor:
            z = reduced(public.outputs(network, x), self.map_size)
            return distance(z, y.to(z))

        positions, consensus = down["positions"]["scored"], down["scores"]["public"]
        items = on_public(site, public, positions, consensus, self.digest_epochs, size)
        with statistics(model, self.public_bn):
            fit(model, items, objective=objective, purpose="digest")


# The server's half of all methods that exchange scores


def drawn(host: Host, number: int) -> Tensor:
    """Draw the positions (N,) of so many public items, in ascending order; 0, or more than there are, means all."""
    total = len(shared(host))
    with stream(host.seed, "alignment") as generator:
        return torch.randperm(total, generator=generator)[: number or total].sort().values


def asking(server: State) -> Message:
    """Return the positions of which scores are wanted and, once there is one, the last consensus with its own."""
    asked = {"asked": server["positions"]}
    if "consensus" not in server:
        return Message({"positions": asked})
    last = server["consensus"]
    return Message({"positions": {**asked, "scored": last["positions"]}, "scores": {"public": last["scores"]}})


def agreed(host: Host, server: State, replies: Mapping[str, Message], number: int) -> State:
    """Return the server's next State: the consensus on what it asked for, and so many new positions."""
    mean = weighted_mean(replies, "scores", uniform_shares(replies))["public"]  # (1)
    return {"positions": drawn(host, number), "consensus": {"positions": server["positions"], "scores": mean}}


# The sites' half


def same_classes(site: Site, public: Public) -> bool:
    """Tell whether public labels mean what the site's do: the same kind of task with the same classes in order."""
    own, other = site.task, public.task
    return bool(own.classes) and (own.kind, own.classes) == (other.kind, other.classes)


def first_epochs(model: nn.Module, site: Site, epochs: int) -> None:
    """Train on the site's own data for so long before its first round."""
    if epochs:
        fit(model, replace(site.for_epochs(epochs), journal=[]), purpose="initial")


def batch_size(site: Site, wanted: int, usual: int) -> int:
    """Return how many public items a step takes: as many as wanted, or, where that is 0, as fit in memory."""
    return wanted or (max(2, site.settings.batch_size) if site.task.kind == "segmentation" else usual)


def scoring(network: nn.Module, site: Site, public: Public, down: Message, size: int, side: int) -> Message:
    """Return the reply to `asking`: the network's scores (N, K[, h, w[, d]]) float32 of the items asked for."""
    positions = down["positions"]["asked"].cpu()
    with evaluating(network), torch.no_grad():
        parts = [
            reduced(public.outputs(network, public.at(some)[0].to(site.device)), side).float()
            for some in torch.split(positions, size)
        ]
    return Message({"scores": {"public": torch.cat(parts)}})


def reduced(output: Tensor, side: int) -> Tensor:
    """Return logits (B, K) as they are, maps (B, K, H, W[, D]) averaged over cells to at most so many a side.

    Half precision becomes float32.
    """
    exact = output.to(torch.promote_types(output.dtype, torch.float32))
    if exact.ndim == 2:
        return exact
    pool: Any = adaptive_avg_pool2d if exact.ndim == 4 else adaptive_avg_pool3d
    averaged: Tensor = pool(exact, [min(side, length) for length in exact.shape[2:]])
    return averaged


class Scored(Prepared):
    """Public items with scores in the place of their targets.

    Args:
        public: the items.
        positions: (N,), which of them.
        scores: (N, ...), one each; None keeps the targets.
        least: a last batch of fewer items joins the one before.
    """

    def __init__(self, public: Public, positions: Tensor, scores: Tensor | None = None, least: int = 1) -> None:
        """Keep the parts."""
        self.positions = positions.cpu()  # a State that was moved to a GPU has them there
        super().__init__([public.shard.prepared.items[i] for i in public.shard.indices[self.positions].tolist()])
        self.public, self.scores, self.least = public, scores, least

    def batches(self, indices: Tensor, size: int, generator: torch.Generator | None) -> Iterator[Batch]:
        """Yield batches; `generator` is not used, public items are read without random transforms."""
        chunks = list(torch.split(indices, size))
        if len(chunks) > 1 and len(chunks[-1]) < self.least:
            chunks[-2:] = [torch.cat(chunks[-2:])]
        for chunk in chunks:
            x, y = self.public.at(self.positions[chunk])
            yield x, y if self.scores is None else self.scores[chunk.to(self.scores.device)]


def on_public(
    site: Site, public: Public, positions: Tensor, scores: Tensor | None, epochs: int, size: int, least: int = 1
) -> Site:
    """Return a site that trains on public items instead of its own; the arguments are those of `Scored`.

    Its journal is another: the one of the site tells of its own data.
    """
    settings = replace(site.settings, epochs=epochs, batch_size=size)
    shard = Shard.of(Scored(public, positions, scores, least), range(len(positions)))
    return replace(site, train=shard, settings=settings, journal=[], penalty=None)


def statistics(network: nn.Module, choice: str) -> AbstractContextManager[None]:
    """Return the context in which BatchNorm's running statistics do what the option `public_bn` says."""
    return nullcontext() if choice == "track" else untracked(network)


METHOD = FedMD
