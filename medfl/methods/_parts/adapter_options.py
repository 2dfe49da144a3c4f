"""The options of low-rank adapters: of which rank, in which layers, what is trained beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.methods._parts.chosen_layers import matrices, whole_layers
from medfl.methods._parts.extras import SiteNetworks
from medfl.methods.base import Method, option

SHARES = ("both", "a", "b", "stack", "svd")


@dataclass(frozen=True)
class AdapterOptions(SiteNetworks, Method):
    """A method whose sites train adapters; each has the bundle's network and may have a rank of its own."""

    rank: int = option(4, "r of the adapters", minimum=1)
    alpha: float = option(4.0, "the product counts alpha / rank times", minimum=0.0)
    layers: str = option(
        "",
        "with adapters: names, ends or patterns of names, linear, conv, with commas between; default: all that fit, "
        "none: no adapters",
    )
    share: str = option(
        "both", "averaged: A and B, A, B, or the product, added to the base or made factors again", choices=SHARES
    )
    ranks: str = option("", "SITE=RANK,...: sites with another rank")
    full: str = option("head", "trained whole and averaged: as layers, or head, norm, none")

    def __post_init__(self) -> None:
        """Refuse ranks that are none; with `share=a` each site has a model of its own."""
        _ = self.bank
        if self.share == "a":
            object.__setattr__(self, "judged", "personal")

    @property
    def scale(self) -> float:
        """The product's factor, alpha / rank at all sites."""
        return self.alpha / self.rank

    @property
    def bank(self) -> int:
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
        return whole_layers(network, self.full)

    def matrices(self, network: nn.Module) -> dict[str, Tensor]:
        """Return the weights that have adapters, as matrices."""
        return matrices(network, self.layers, self.whole(network))

    def checked(self, network: nn.Module) -> nn.Module:
        """Return a network that the options fit.

        Raises:
            InputError: a layer is not there or smaller than the rank, nothing is to be trained, or the bundle's
                trainer takes the steps.
        """
        found, whole = self.matrices(network), self.whole(network)
        for name, matrix in found.items():
            if min(matrix.shape) < self.bank:
                raise InputError(
                    f"rank={self.bank} for {name}, which is {matrix.shape[0]} x {matrix.shape[1]}",
                    f"a rank is at most the smaller side, {min(matrix.shape)}",
                    "take a smaller rank, or choose larger layers=...",
                )
        if not found and not any(p.requires_grad for name, p in network.named_parameters() if name in whole):
            raise InputError(f"layers={self.layers} with full={self.full}", "something is trained", "name a layer")
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
