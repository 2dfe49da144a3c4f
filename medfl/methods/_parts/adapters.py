"""Both halves of a method with low-rank adapters: which factors a site has, and one bank made of the sites'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from medfl.core.message import Message, Weights
from medfl.core.seeding import derive
from medfl.core.storage import State
from medfl.methods._parts import low_rank
from medfl.methods._parts.adapter_options import AdapterOptions
from medfl.methods._parts.low_rank import Pairs, cut, drawn, key, named, padded, read, read_all
from medfl.methods.base import sample_shares, weighted_mean
from medfl.training import Host, Site, merged


@dataclass(frozen=True)
class Adapters(AdapterOptions):
    """A method whose messages have the group `adapters`, of `share=stack` down the group `delta` in its place."""

    @property
    def up(self) -> str:
        """The factors that a site sends."""
        return {"a": "A", "b": "B"}.get(self.share, "AB")

    @property
    def down(self) -> str:
        """The factors that the server sends."""
        return "" if self.share == "stack" else self.up

    def first(self, where: Host | Site, found: Weights, rank: int = 0) -> Pairs:
        """Return A as drawn from the run's seed, with `stack` in each round anew, and B = 0."""
        seed, round_ = where.networks.seed, where.round if self.share == "stack" else 0
        bank = {n: drawn(matrix, self.bank, derive(seed, "adapters", round_, n)) for n, matrix in found.items()}
        return {name: (a[: rank or None], b[:, : rank or None]) for name, (a, b) in bank.items()}

    def pairs(self, site: Host | Site, state: State, down: Message, found: Weights, rank: int) -> Pairs:
        """Return the factors that a site goes on from: its own, those that it received, else the first ones.

        Where the trained network is scored its own reply stands for what it received.

        Raises:
            RunError: the server's message lacks a factor, or one has another form.
        """
        held, first = {**down.tensors.get("adapters", {}), **state.get("adapters", {})}, self.first(site, found, rank)

        def factor(name: str, which: str) -> Tensor:
            if key(name, which, rank) not in held and which not in self.down:
                return first[name][which == "B"]
            sent = rank if key(name, which, rank) in held else self.bank
            return cut(read(held, name, which, found[name], sent), which, rank)

        return {name: (factor(name, "A"), factor(name, "B")) for name in found}

    def bank_of(self, replies: Mapping[str, Message], found: Weights) -> dict[str, Tensor]:
        """Return the sites' factors as the server's: their mean by samples, or of `svd` those of the mean product.

        Raises:
            RunError: a reply lacks a factor, has others, or one of another form.
        """
        if self.share == "svd":
            means = self.mean_products(replies, found)
            made = named({name: low_rank.refactored(mean, self.bank) for name, mean in means.items()}, "AB")
            return {name: tensor.to(next(iter(found.values()))) for name, tensor in made.items()}
        banks = {
            site: {key(n, f, self.bank): padded(t, f, self.bank) for n, part in taken.items() for f, t in part.items()}
            for site, taken in self._taken(replies, found).items()
        }
        same = {site: Message({"adapters": bank}) for site, bank in banks.items()}
        return weighted_mean(same, "adapters", sample_shares(replies))

    def mean_products(self, replies: Mapping[str, Message], found: Weights) -> dict[str, Tensor]:
        """Return sum_k p_k B_k A_k of each matrix, float64.

        Raises:
            RunError: as above.
        """
        taken, shares = self._taken(replies, found), sample_shares(replies)
        pairs = {name: {site: (part[name]["A"], part[name]["B"]) for site, part in taken.items()} for name in found}
        return {name: low_rank.mean_product(each, shares) for name, each in pairs.items()}

    def _taken(self, replies: Mapping[str, Message], found: Weights) -> dict[str, dict[str, dict[str, Tensor]]]:
        return {
            site: read_all(reply.tensors.get("adapters", {}), found, self.up, self.rank_of(site))
            for site, reply in replies.items()
        }

    def begun(self, where: Host | Site, down: Message) -> nn.Module:
        """Return the base with the received head, of `stack` with the sum of the products too."""
        model = where.model(merged(where.networks.initial, down.tensors.get("weights", {})))
        if self.share == "stack":
            low_rank.add(model, {name: down["delta"][low_rank.delta(name)] for name in self.matrices(model)})
        return model

    def complete(self, where: Host | Site, state: State, down: Message, rank: int) -> nn.Module:
        """Return the base with the head and the products of the factors, those of a rank."""
        model = self.begun(where, down)
        return low_rank.merge(model, self.pairs(where, state, down, self.matrices(model), rank), self.scale)
