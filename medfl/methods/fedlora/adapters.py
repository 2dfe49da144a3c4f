"""Both halves of a method with low-rank adapters: its options, which factors a site has, one bank of the sites'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message, Weights
from medfl.core.seeding import derive
from medfl.methods._parts.extras import SiteNetworks
from medfl.methods.base import Method, option, sample_shares, weighted_mean
from medfl.methods.fedlora import low_rank
from medfl.methods.fedlora.chosen_layers import matrices, whole_tensor_names
from medfl.methods.fedlora.low_rank import Pairs, factor_name, named_factors, padded, read_factor, truncated
from medfl.storage.files import State
from medfl.training import Host, Site, merged

SHARE_RULES = ("both", "a", "b", "stack", "svd")


@dataclass(frozen=True)
class Adapters(SiteNetworks, Method):
    """A method whose sites train adapters; each has the bundle's network and may have a rank of its own.

    Messages have the group `adapters`, of `share=stack` down the group `delta` in its place.
    """

    rank: int = option(4, "r of the adapters", minimum=1)
    alpha: float = option(4.0, "the product counts alpha / rank times", minimum=0.0)
    layers: str = option(
        "",
        "with adapters: names, ends or patterns of names, linear, conv, with commas between; default: all that fit, "
        "none: no adapters",
    )
    share: str = option(
        "both", "averaged: A and B, A, B, or the product, added to the base or made factors again", choices=SHARE_RULES
    )
    ranks: str = option("", "SITE=RANK,...: sites with another rank")
    full: str = option("head", "trained whole and averaged: as layers, or head, norm, none")

    def __post_init__(self) -> None:
        """Refuse ranks that are none; with `share=a` each site has a model of its own."""
        _ = self.max_rank
        if self.share == "a":
            object.__setattr__(self, "judged", "personal")

    @property
    def scale(self) -> float:
        """The product's factor, alpha / rank at all sites."""
        return self.alpha / self.rank

    @property
    def max_rank(self) -> int:
        """The largest rank of a site, the server's."""
        return max([self.rank, *self._ranks.values()])

    def rank_of(self, site: str) -> int:
        """Return a site's rank."""
        return self._ranks.get(site, self.rank)

    def site_networks(self, names: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the bundle's network for each.

        Raises:
            InputError: `ranks` names a site that takes no part. One name alone may be one of several sites, each of
                which is planned on a machine of its own.
        """
        if (odd := sorted(self._ranks.keys() - set(names))) and len(names) > 1:
            raise InputError(
                f"ranks={self.ranks}: there is no site {odd[0]!r}", f"the sites are {', '.join(names)}", "name these"
            )
        return {name: {} for name in names}

    def whole(self, network: nn.Module) -> frozenset[str]:
        """Return the names of the tensors that are trained whole."""
        return whole_tensor_names(network, self.full)

    def matrices(self, network: nn.Module) -> dict[str, Tensor]:
        """Return the weights that have adapters, as matrices."""
        return matrices(network, self.layers, self.whole(network))

    def checked(self, network: nn.Module) -> nn.Module:
        """Return a network that the options fit.

        Raises:
            InputError: a layer is not there or smaller than the rank, nothing is to be trained, or the bundle's
                trainer takes the steps.
        """
        weight_matrices, whole = self.matrices(network), self.whole(network)
        for name, matrix in weight_matrices.items():
            if min(matrix.shape) < self.max_rank:
                raise InputError(
                    f"rank={self.max_rank} for {name}, which is {matrix.shape[0]} x {matrix.shape[1]}",
                    f"a rank is at most the smaller side, {min(matrix.shape)}",
                    "take a smaller rank, or choose larger layers=...",
                )
        if not weight_matrices and not any(p.requires_grad for name, p in network.named_parameters() if name in whole):
            raise InputError(f"layers={self.layers} with full={self.full}", "one trained layer or more", "name one")
        if "own_iteration" in vars(network):
            raise InputError(
                "adapters with a trainer that takes its steps by itself",
                "a trainer whose optimiser takes other parameters in",
                "take another method, or another trainer",
            )
        return network

    @property
    def _ranks(self) -> dict[str, int]:
        parts = [part.partition("=") for part in self.ranks.split(",") if part.strip()]
        wrong = any(not name.strip() or not rank.strip().isdecimal() or int(rank) < 1 for name, _, rank in parts)
        if wrong or len({name.strip() for name, _, _ in parts}) < len(parts):
            allowed = "ranks is SITE=RANK,... with ranks from 1, each site once"
            raise InputError(f"ranks={self.ranks}", allowed, "as ranks=a=2,b=8")
        return {name.strip(): int(rank) for name, _, rank in parts}

    # Factors

    @property
    def sent_up(self) -> str:
        """The factors that a site sends."""
        return {"a": "A", "b": "B"}.get(self.share, "AB")

    @property
    def sent_down(self) -> str:
        """The factors that the server sends."""
        return "" if self.share == "stack" else self.sent_up

    def first(self, where: Host | Site, matrices: Weights, rank: int) -> Pairs:
        """Return A as drawn from the run's seed, with `stack` in each round anew, and B = 0."""
        seed, round_ = where.networks.seed, where.round if self.share == "stack" else 0
        bank = {n: low_rank.initial(m, self.max_rank, derive(seed, "adapters", round_, n)) for n, m in matrices.items()}
        return {name: (a[:rank], b[:, :rank]) for name, (a, b) in bank.items()}

    def pairs(self, site: Host | Site, state: State, down: Message, matrices: Weights, rank: int) -> Pairs:
        """Return the factors that a site goes on from: its own, those that it received, else the first ones.

        Where the trained network is scored its own reply stands for what it received.

        Raises:
            RunError: the server's message lacks a factor, or one has another form.
        """
        held = {**down.tensors.get("adapters", {}), **state.get("adapters", {})}
        first = self.first(site, matrices, rank)

        def factor(name: str, which: str) -> Tensor:
            if factor_name(name, which, rank) not in held and which not in self.sent_down:
                return first[name][which == "B"]
            sent = rank if factor_name(name, which, rank) in held else self.max_rank
            return truncated(read_factor(held, name, which, matrices[name], sent), which, rank)

        return {name: (factor(name, "A"), factor(name, "B")) for name in matrices}

    def server_factors(self, replies: Mapping[str, Message], matrices: Weights) -> dict[str, Tensor]:
        """Return the sites' factors as the server's: their mean by samples, or of `svd` those of the mean product.

        Raises:
            RunError: a reply lacks a factor, has others, or one of another form.
        """
        if self.share == "svd":
            means = self.mean_products(replies, matrices)
            pairs = {name: low_rank.refactored(mean, self.max_rank) for name, mean in means.items()}
            factors = named_factors(pairs, "AB")
            return {name: tensor.to(next(iter(matrices.values()))) for name, tensor in factors.items()}
        rank = self.max_rank
        banks = {
            site: {factor_name(n, f, rank): padded(t, f, rank) for n, ab in taken.items() for f, t in ab.items()}
            for site, taken in self._taken(replies, matrices).items()
        }
        same = {site: Message({"adapters": bank}) for site, bank in banks.items()}
        return weighted_mean(same, "adapters", sample_shares(replies))

    def mean_products(self, replies: Mapping[str, Message], matrices: Weights) -> dict[str, Tensor]:
        """Return sum_k p_k B_k A_k of each matrix, float64.

        Raises:
            RunError: as above.
        """
        taken, shares = self._taken(replies, matrices), sample_shares(replies)
        pairs = {name: {site: (part[name]["A"], part[name]["B"]) for site, part in taken.items()} for name in matrices}
        return {name: low_rank.mean_product(each, shares) for name, each in pairs.items()}

    def _taken(self, replies: Mapping[str, Message], matrices: Weights) -> dict[str, dict[str, dict[str, Tensor]]]:
        return {
            site: low_rank.read_factors(reply.tensors.get("adapters", {}), matrices, self.sent_up, self.rank_of(site))
            for site, reply in replies.items()
        }

    def begun(self, where: Host | Site, down: Message) -> nn.Module:
        """Return the base with the received head, of `stack` with the sum of the products too."""
        model = where.model(merged(where.networks.initial, down.tensors.get("weights", {})))
        if self.share == "stack":
            low_rank.add(model, {name: down["delta"][low_rank.delta_name(name)] for name in self.matrices(model)})
        return model

    def complete(self, where: Host | Site, state: State, down: Message, rank: int) -> nn.Module:
        """Return the base with the head and the products of the factors, those of a rank."""
        model = self.begun(where, down)
        return low_rank.merge_into(model, self.pairs(where, state, down, self.matrices(model), rank), self.scale)
