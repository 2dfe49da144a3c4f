"""Both halves of a method with low-rank adapters: its options, a site's factors, and their combination."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from medfl.core import (
    Config,
    InputError,
    Message,
    Messages,
    Tensors,
    Weights,
    derive,
    pick,
    split_commas,
    within,
)
from medfl.methods._parts.extras import SiteNetworks
from medfl.methods.base import Method, one_of, option, sample_shares, weighted_mean
from medfl.methods.fedlora import low_rank
from medfl.methods.fedlora.low_rank import (
    Pairs,
    factor_name,
    named_factors,
    padded,
    read_factor,
    truncated,
)
from medfl.networks.heads import head_name
from medfl.storage import State
from medfl.training import NORMS, Host, Site, merged, trainable

SHARE_RULES = ("both", "a", "b", "stack", "svd")


@dataclass(frozen=True)
class Adapters(SiteNetworks, Method):
    """A method whose sites train adapters; each has the bundle's network and may have its own rank.

    Messages have the group `adapters`, or for `share=stack`, on the way down, the group `delta` instead.
    """

    rank: int = option(4, "r of the adapters", minimum=1)
    alpha: float = option(4.0, "the product counts alpha / rank times", minimum=0.0)
    layers: str = option(
        "",
        "with adapters: names, ends or patterns of names, linear, conv, with commas between; default: all that fit, "
        "none: no adapters",
    )
    share: str = one_of(
        "averaged: A and B, A, B, or the product, added to the base or made factors again",
        *SHARE_RULES,
    )
    ranks: str = option("", "SITE=RANK,...: sites with another rank")
    full: str = option("head", "trained whole and averaged: as layers, or head, norm, none")

    def __post_init__(self) -> None:
        """Refuse invalid ranks; with `share=a` each site has its own model."""
        _ = self.max_rank
        # the class is frozen, and an option decides what it is judged by
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

    def site_networks(self, names: Sequence[str]) -> Mapping[str, Config]:
        """Return the bundle's network for each.

        Raises:
            InputError: `ranks` names a site that takes no part. A single name may be one of several sites, each of
                which is planned on its own machine.
        """
        if (odd := sorted(self._ranks.keys() - set(names))) and len(names) > 1:
            raise InputError(
                f"ranks={self.ranks}: there is no site {odd[0]!r}",
                f"the sites are {', '.join(names)}",
                "name these",
            )
        return {name: {} for name in names}

    def whole(self, network: nn.Module) -> frozenset[str]:
        """Return the names of the fully trained tensors."""
        return whole_tensor_names(network, self.full)

    def matrices(self, network: nn.Module) -> Tensors:
        """Return the weights that have adapters, as matrices."""
        return matrices(network, self.layers, self.whole(network))

    def checked(self, network: nn.Module) -> nn.Module:
        """Return a network after checking the options against it.

        Raises:
            InputError: a layer does not exist or is smaller than the rank, nothing would be trained, or the bundle's
                trainer has its own training step.
        """
        weight_matrices = self.matrices(network)
        full_names = self.whole(network)
        for name, matrix in weight_matrices.items():
            if min(matrix.shape) < self.max_rank:
                raise InputError(
                    f"rank={self.max_rank} for {name}, which is {matrix.shape[0]} x {matrix.shape[1]}",
                    f"a rank is at most the smaller side, {min(matrix.shape)}",
                    "take a smaller rank, or choose larger layers=...",
                )

        if not weight_matrices and not trainable(network).keys() & full_names:
            raise InputError(
                f"layers={self.layers} with full={self.full}",
                "at least one layer is trained",
                "name one",
            )
        if "custom_trainer" in vars(network):
            raise InputError(
                "adapters with a trainer that takes the training steps itself",
                "the trainer's optimiser accepts the adapters' parameters",
                "choose another method, or another trainer",
            )

        return network

    @property
    def _ranks(self) -> dict[str, int]:
        ranks = {}
        for part in filter(str.strip, self.ranks.split(",")):
            site, _, rank = map(str.strip, part.partition("="))
            if not site or site in ranks or not rank.isdecimal() or int(rank) < 1:
                raise InputError(
                    f"ranks={self.ranks}",
                    "ranks is SITE=RANK,... with ranks from 1, each site once",
                    "as ranks=a=2,b=8",
                )

            ranks[site] = int(rank)

        return ranks

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
        """Return A as drawn from the run's seed, with `stack` anew in each round, and B = 0."""
        seed = where.networks.seed
        round_ = where.round if self.share == "stack" else 0
        pairs = {}
        for name, matrix in matrices.items():
            # Drawn at the largest rank, so that sites of smaller ranks share its first rows.
            a, b = low_rank.initial(matrix, self.max_rank, derive(seed, "adapters", round_, name))
            pairs[name] = (a[:rank], b[:, :rank])

        return pairs

    def pairs(
        self, site: Host | Site, state: State, down: Message, matrices: Weights, rank: int
    ) -> Pairs:
        """Return the factors that a site continues from: its own, else the received ones, else the initial ones.

        To score the network that a site has just trained, pass its reply as `down`.

        Raises:
            RunError: the server's message lacks a factor, or a factor has the wrong shape or type.
        """
        held = {**down.tensors.get("adapters", {}), **state.get("adapters", {})}
        first = self.first(site, matrices, rank)

        def factor(name: str, which: str) -> Tensor:
            if factor_name(name, which, rank) not in held and which not in self.sent_down:
                return first[name][which == "B"]
            sent = rank if factor_name(name, which, rank) in held else self.max_rank
            return truncated(read_factor(held, name, which, matrices[name], sent), which, rank)

        return {name: (factor(name, "A"), factor(name, "B")) for name in matrices}

    def server_factors(self, replies: Messages, matrices: Weights) -> Tensors:
        """Return the server's factors: the sites' mean by samples, or with `svd` the factors of the mean product.

        Raises:
            RunError: a reply lacks a factor, has an unknown one, or one of the wrong shape or type.
        """
        if self.share == "svd":
            # The mean of the products, not the product of the means.
            means = self.mean_products(replies, matrices)
            pairs = {}
            for name, mean in means.items():
                pairs[name] = low_rank.refactored(mean, self.max_rank)

            like = next(iter(matrices.values()))  # a singular value decomposition is in float64
            return {name: tensor.to(like) for name, tensor in named_factors(pairs, "AB").items()}

        rank = self.max_rank
        padded_replies = {}
        for site, adapters in self._received(replies, matrices).items():
            bank = {}
            for name, pair in adapters.items():
                for which, tensor in pair.items():
                    bank[factor_name(name, which, rank)] = padded(tensor, which, rank)

            padded_replies[site] = Message({"adapters": bank})

        return weighted_mean(padded_replies, "adapters", sample_shares(replies))

    def mean_products(self, replies: Messages, matrices: Weights) -> Tensors:
        """Return sum_k p_k B_k A_k of each matrix, float64.

        Raises:
            RunError: as for `server_factors`.
        """
        adapters = self._received(replies, matrices)
        shares = sample_shares(replies)
        means = {}
        for name in matrices:
            pairs = {}
            for site, factors in adapters.items():
                pairs[site] = (factors[name]["A"], factors[name]["B"])

            means[name] = low_rank.mean_product(pairs, shares)

        return means

    def _received(self, replies: Messages, matrices: Weights) -> dict[str, dict[str, Tensors]]:
        received = {}
        for site, reply in replies.items():
            factors = reply.tensors.get("adapters", {})
            rank = self.rank_of(site)
            received[site] = low_rank.read_factors(factors, matrices, self.sent_up, rank)

        return received

    def begun(self, where: Host | Site, down: Message) -> nn.Module:
        """Return the base with the received head, for `stack` also with the sum of the products."""
        model = where.model(merged(where.networks.initial, down.tensors.get("weights", {})))
        if self.share == "stack":
            names = self.matrices(model)
            low_rank.add(model, {name: down["delta"][low_rank.delta_name(name)] for name in names})

        return model

    def complete(self, where: Host | Site, state: State, down: Message, rank: int) -> nn.Module:
        """Return the base with the head and the products of the factors, truncated to a rank."""
        model = self.begun(where, down)
        pairs = self.pairs(where, state, down, self.matrices(model), rank)
        return low_rank.merge_into(model, pairs, self.scale)


# Layers of a network selected by a text: names, ends of names, patterns with * and ?, or kinds, separated by commas.


_CONV = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_MATRICES: tuple[type[nn.Module], ...] = (nn.Linear, *_CONV, nn.MultiheadAttention)
_KINDS: Mapping[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "conv": _CONV,
    "norm": NORMS,
}
_WEIGHTS = ("weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
NONE = "none"


def whole_tensor_names(network: nn.Module, text: str) -> frozenset[str]:
    """Return the state-dict names of the chosen layers, under all names that a shared tensor has.

    Args:
        network: to search.
        text: which layers; the kinds are `head` and `norm`, "" and `none` select no layer.

    Raises:
        InputError: no such layer.
    """
    layers = {}
    for name, layer in network.named_modules():
        if name and layer.state_dict():
            layers[name] = layer

    candidates = dict(layers)
    if "head" in text.split(","):
        candidates.setdefault("head", None)  # a layer of this name takes precedence over the kind

    names = set(_chosen(candidates, text.strip() or NONE, "full"))
    if "head" in names and "head" not in layers:
        names.remove("head")
        names.add(head_name(network))

    tensors = network.state_dict(keep_vars=True)
    prefixes = tuple(f"{layer}." for layer in names)
    # By identity: a shared tensor has several names, and all of them count.
    tensor_ids = set()
    for name, tensor in tensors.items():
        if name.startswith(prefixes):
            tensor_ids.add(id(tensor))

    return frozenset(name for name, tensor in tensors.items() if id(tensor) in tensor_ids)


def matrices(network: nn.Module, text: str, but: Collection[str] = ()) -> Tensors:
    """Return the weights of the chosen layers as matrices (first dimension, all others), by their names.

    Args:
        network: to search.
        text: which layers; the kinds are `linear` and `conv`, "" selects all that fit, `none` no layer.
        but: names of weights to skip. A tensor shared by several layers is skipped too: changing one changes the
            others.

    Raises:
        InputError: no such layer; names those that fit.
    """
    ids = [id(parameter) for _, parameter in network.named_parameters(remove_duplicate=False)]
    fitting = {}
    layers = {}
    for name, layer in network.named_modules():
        if not isinstance(layer, _MATRICES):
            continue

        layers[name] = layer
        weights = {}
        for key in _WEIGHTS:
            weight = layer._parameters.get(key)
            full_name = f"{name}.{key}".lstrip(".")
            # shared with another layer, it would be changed there too
            if weight is not None and ids.count(id(weight)) == 1 and full_name not in but:
                weights[full_name] = weight.detach().flatten(1)

        if weights:
            fitting[name] = weights

    chosen_matrices = {}
    for name in _chosen(pick(layers, fitting), text, "layers"):
        chosen_matrices.update(fitting[name])

    return chosen_matrices


def _chosen(layers: Mapping[str, nn.Module | None], text: str, option: str) -> list[str]:
    """Return the layers that a text selects, in the network's order; all if it is empty."""
    if not text.strip():
        return list(layers)

    chosen = set()
    for part in split_commas(text):
        fitting = [name for name, layer in layers.items() if _is(part, name, layer)]
        chosen.update(fitting)
        if part != NONE and not fitting:
            names = list(filter(None, layers))
            kinds = "linear, conv" if option == "layers" else "head, norm"
            raise InputError(
                f"{option}={part}: no layer of the network that fits",
                f"layers that fit are {', '.join(names)[:400] or 'none'}",
                f"name some, all of a kind ({kinds}), or {NONE}",
            )

    return list(within(layers, chosen))


def _is(part: str, name: str, layer: nn.Module | None) -> bool:
    by_kind = part in _KINDS and isinstance(layer, _KINDS[part])
    return by_kind or name == part or name.endswith(f".{part}") or fnmatchcase(name, part)
