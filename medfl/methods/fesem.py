"""FeSEM: "Multi-Center Federated Learning" (Xie et al. 2020): sites with similar weights share a centre.

The server keeps K centres W_k; each site has one of them, from which it trains. After a round, with the participants'
weights w_i: E-step r(i) = argmin_k ||w_i - W_k|| over all trainable parameters together, the lowest k of equal ones;
M-step W_k = the mean of its members' w_i. A centre without members is unchanged, an absent site keeps its centre.
Both steps reduce sum_i ||w_i - W_r(i)||^2.

In round 1 no site has weights yet: all train from the common initial model, and the first centres are K of the returned
weights, far from each other (ours). With fewer than K different ones, the others are chosen in the next rounds; a
centre that has not been chosen yet has no members. `start=random` is the paper's: K different random models, to which
the sites are assigned. Those are further apart than training ever moves a site, so that the groups hardly change.
`assign=by_class_count` is what a public code base in the lineage of pFedPM's experiments calls SEM: two groups, the
sites with fewer classes than the mean and the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from medfl.core import InputError, Message, Messages, Task, Weights, stream
from medfl.methods._parts.prototypes import class_counts
from medfl.methods.base import MEANS, Method, mean_shares, one_of, option, sent, weighted_mean
from medfl.storage import State
from medfl.training import Host, Site, snapshot, trainable


@dataclass(frozen=True)
class FeSEM(Method):
    """Several averaged models, each for the sites whose weights are nearest to it."""

    clusters: int = option(2, "K, number of centres (2 to 4; tune)", minimum=1)
    start: str = one_of(
        "first centres: weights of sites after round 1, far from each other; or random models (paper)",
        "spread",
        "random",
    )
    assign: str = one_of(
        "a site's centre is the nearest, or goes by whether it has fewer classes than the mean",
        "distance",
        "by_class_count",
    )
    weights: str = one_of("mean over a centre's members: plain or by samples", *MEANS)
    predict: str = one_of("a site is judged by its centre or its local model", "centre", "local")

    paper = "Multi-Center Federated Learning (Xie et al., 2020)"
    judged = "personal"

    def __post_init__(self) -> None:
        """Refuse a number of centres other than two if classes are counted."""
        if self.assign == "by_class_count" and self.clusters != 2:
            raise InputError(
                f"clusters={self.clusters} with assign=by_class_count",
                "that makes two groups",
                "take clusters=2",
            )

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network."""
        if self.assign == "by_class_count" and task.kind != "classification":
            raise InputError(
                f"assign=by_class_count in a {task.kind} task", "it counts classes", "take distance"
            )
        return network

    # Server half

    def introduce(self, site: Site) -> Message:
        """Send the number of classes, if the groups depend on it."""
        if self.assign == "distance":
            return Message()
        return Message({}, {"classes": int((class_counts(site.train, 0) > 0).sum())})

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Make the first centres and assign one to each site."""
        names = sorted(introductions)
        drawn = []
        for k in range(1, self.clusters):
            if self.start == "random":
                drawn.append(snapshot(host.networks.fresh("centre", k)))
            else:
                drawn.append(dict(weights))

        assignment = dict.fromkeys(names, 0)

        if self.assign == "by_class_count":
            counts = {name: introductions[name].scalars["classes"] for name in names}
            mean = sum(counts.values()) / len(counts)
            assignment = {name: int(count >= mean) for name, count in counts.items()}
        elif self.start == "random":
            with stream(host.seed, "deal") as generator:
                order = torch.randperm(len(names), generator=generator).tolist()
            assignment = {names[i]: rank % self.clusters for rank, i in enumerate(order)}

        # how many centres are final: the others are chosen among the replies of the first rounds
        chosen = self.clusters if self.start == "random" else 0
        return {
            "weights": dict(weights),
            "others": drawn,
            "assignment": assignment,
            "chosen": chosen,
        }

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the site its centre; a site without introduction has the first."""
        return Message({"weights": _centres(server)[server["assignment"].get(site_name, 0)]})

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Choose initial centres while there are too few, then E-step and M-step."""
        centres = _centres(server)
        assignment = server["assignment"]
        chosen = server["chosen"]
        if self.assign == "distance":
            # buffers and frozen weights say nothing about a site's own data
            names = [*trainable(host.model(centres[0]))]
            anchors = _spread(sent(replies, "weights"), centres, chosen, names)
            centres = [*anchors, *centres[len(anchors) :]]
            chosen = len(anchors)
            assignment = dict(assignment)
            for site, reply in replies.items():
                assignment[site] = nearest(reply["weights"], anchors, names)  # E-step

        first, *rest = self.means(centres, assignment, replies)
        return {"weights": first, "others": rest, "assignment": assignment, "chosen": chosen}

    def means(
        self,
        centres: Sequence[Weights],
        assignment: Mapping[str, int],
        replies: Messages,
    ) -> list[Weights]:
        """Return the centres after an M-step."""
        members: list[dict[str, Message]] = [{} for _ in centres]
        for name, reply in replies.items():
            members[assignment.get(name, 0)][name] = reply

        after = list(centres)
        for index, member_replies in enumerate(members):
            if member_replies:  # a centre without members stays
                shares = mean_shares(self.weights, member_replies)
                after[index] = weighted_mean(member_replies, "weights", shares)

        return after

    def global_predictor(self, host: Host, server: State) -> None:
        """Return None: there are several centres."""
        return

    # Site half

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train from the site's centre."""
        _, reply = super().local_update(site, {}, down)
        if self.predict == "local":
            return {"trained": reply["weights"]}, reply

        return {}, reply

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's centre, or its model after its last training."""
        return site.model(state.get("trained", down["weights"]))


def nearest(weights: Weights, centres: Sequence[Weights], names: Sequence[str]) -> int:
    """Return the index of the centre with the least Euclidean distance over the named tensors, the lowest of equals."""
    squares = [_square(weights, centre, names) for centre in centres]
    return squares.index(min(squares))


def _spread(
    weights_of: Sequence[Weights], centres: Sequence[Weights], count: int, names: Sequence[str]
) -> list[Weights]:
    """Return the first `count` centres, then sites' weights up to K in all, each the farthest from those before."""
    chosen = [*centres[:count]] or [weights_of[0]]
    while len(chosen) < len(centres):
        squares = []
        for weights in weights_of:
            squares.append(min(_square(weights, centre, names) for centre in chosen))

        farthest = max(squares)
        # fewer different weights than centres: a second one in the same place would get no members
        if not farthest:
            break

        chosen.append(weights_of[squares.index(farthest)])

    return chosen


def _square(weights: Weights, centre: Weights, names: Sequence[str]) -> float:
    squares = []
    for name in names:
        # After a resume the centres may be on another device than the sites' weights.
        difference = weights[name].double() - centre[name].to(weights[name]).double()
        squares.append(float(difference.square().sum()))

    return sum(squares)


def _centres(server: State) -> list[Weights]:
    return [server["weights"], *server["others"]]


METHOD = FeSEM
