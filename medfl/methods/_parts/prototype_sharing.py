"""Global class prototypes for methods that average weights: FedMR's second half, which others can enable.

"Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping" (Fan et al., 2023), eq. 4 and Table 8.
Server:  g_c = sum_k p_k^c g_k^c, p_k^c = N_k^c / sum_j N_j^c over the sharing participants that own class c.
Site:    mu2 l_inter is added to whatever the method trains, g constant; then g_k^c, the mean feature of class c
under the trained weights, is sent with the count N_k^c, for the site's own classes only.
Messages are those of FedProto: one (d,) tensor per class, named by the class's index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medfl.core import InputError, Message, Messages, Task, Weights, generator_of
from medfl.methods._parts.class_heads import class_count, class_head
from medfl.methods._parts.manifold import inter_class_loss, shaped
from medfl.methods._parts.prototype_exchange import (
    average_prototypes,
    check_lengths,
    class_mean_groups,
    distances,
    has_prototype,
    received,
)
from medfl.methods._parts.prototypes import class_counts, class_means, prototype_groups
from medfl.methods.base import Group, Method, one_of, option
from medfl.networks.heads import feature_size, head
from medfl.storage import State
from medfl.training import FitReport, Host, Site, merged


@dataclass(frozen=True)
class Sharing:
    """The two halves of prototype sharing, called from a method's own; with neutral options it changes nothing."""

    prototypes: bool = option(False, "share class prototypes and add FedMR's inter-class loss")
    mu2: float = option(
        0.1, "inter-class loss (ours; grid 0.001 to 1), 0: no prototypes at all", minimum=0.0
    )
    inter_scope: str = one_of(
        "keep away from the prototypes of all other classes, or of those present at the site (eq. 4 as printed)",
        "all",
        "present",
    )
    margin: bool = option(True, "without it features are only pulled to the own prototype")
    lite: int = option(
        0, "inter-class loss on so many random samples of a batch (paper: 10, 50), 0 all", minimum=0
    )
    share_prototypes: float = option(
        1.0, "part of the sites that send prototypes, above 0 (paper: 0.5, 0.8)", minimum=0.0
    )
    stale: str = one_of(
        "a class's prototype that nobody sends: keep the last, or drop it", "keep", "drop"
    )
    one_hot: bool = option(
        False, "unit vectors for prototypes, a negative control; sites send none"
    )

    def __post_init__(self) -> None:
        """Refuse a share of the sites outside (0, 1]."""
        if not 0 < self.share_prototypes <= 1:
            raise InputError(
                f"share_prototypes={self.share_prototypes:g}",
                "a part of the sites, above 0 and at most 1",
                "take for example share_prototypes=0.5; mu2=0 shares nothing",
            )

    @property
    def active(self) -> bool:
        """Whether there are prototypes."""
        return self.prototypes and self.mu2 > 0

    @property
    def groups(self) -> tuple[Group, ...]:
        """Message groups in addition to the method's."""
        if not self.active:
            return ()
        if self.one_hot:
            return (Group("prototypes", up=False, smaller=True),)

        return prototype_groups(counts=True)

    def check(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the network if its head is linear with one output per class.

        Raises:
            InputError: it is not, or it has too few features for one-hot prototypes.
        """
        layer = class_head(network, task)
        if self.active and self.one_hot and layer.in_features < layer.out_features:
            raise InputError(
                f"one_hot=true with {layer.in_features} features and {layer.out_features} classes",
                "at least one feature a class",
                "use a network with longer features, or one_hot=false",
            )

        return network

    # Server half

    def begin(self, host: Host, server: State, introductions: Messages) -> State:
        """Add prototypes (none yet) to the server's first State, and the sites that send some if not all do."""
        if not self.active:
            return server

        network = host.model(host.networks.initial)
        started: State = {"prototypes": {}}
        if self.one_hot:
            unit = torch.eye(class_count(network), feature_size(network))
            rows = unit.to(next(head(network).parameters()))
            started["prototypes"] = {str(c): row for c, row in enumerate(rows)}

        if self.share_prototypes < 1:
            names = sorted(introductions)
            number = max(1, round(self.share_prototypes * len(names)))
            generator = generator_of(host.seed, "prototypes")
            chosen = torch.randperm(len(names), generator=generator)[:number].tolist()
            started["sharing"] = sorted(names[i] for i in chosen)

        return {**server, **started}

    def add_prototypes(self, server: State, site_name: str, down: Message) -> Message:
        """Add the prototypes to a broadcast, and, if not all sites send prototypes, whether this one should."""
        if not self.active:
            return down
        scalars = dict(down.scalars)
        if "sharing" in server:
            scalars["sharing"] = float(site_name in server["sharing"])

        return Message({**down.tensors, "prototypes": server["prototypes"]}, scalars)

    def merged(self, server: State, replies: Messages) -> State:
        """Return this half's part of the server's next State.

        Raises:
            InputError: features differ in length between the sites; names them.
        """
        if not self.active:
            return {}

        before = server["prototypes"]
        if self.stale == "drop" and not self.one_hot:
            before = {}

        after = {"prototypes": average_prototypes(before, replies, by_samples=True)}
        if "sharing" in server:
            after["sharing"] = server["sharing"]

        return after

    def observed(self, server: State, replies: Messages) -> Mapping[str, float]:
        """Return distances between class means and prototypes, if there are any."""
        if self.active:
            return distances(server["prototypes"], replies)

        return {}

    # Site half

    def pushed(self, site: Site, down: Message, network: nn.Module) -> Site:
        """Return the site with mu2 l_inter added to whatever it trains, if there are prototypes yet.

        Raises:
            InputError: its features and the prototypes have different lengths; names the site.
        """
        prototypes = received(down, network)
        if not self.active or prototypes is None:
            return site

        check_lengths({site.name: feature_size(network), "the server": prototypes.shape[1]})
        # a class that nobody has yet is NaN, and out of the loss
        there = has_prototype(prototypes)
        rows = prototypes.nan_to_num()
        own_classes = None

        if self.inter_scope == "present":
            own_classes = (class_counts(site.train, len(rows)) > 0).to(site.device)

        # a stream of its own: the inner method draws the batches it would draw alone
        draws = generator_of(site.seed, "lite")

        def loss(features: Tensor, labels: Tensor) -> Tensor:
            # FedMR's lite variant (Table 8): the loss on some random samples of the batch.
            if 0 < self.lite < len(labels):
                chosen = torch.randperm(len(labels), generator=draws)[: self.lite].to(
                    site.device, non_blocking=True
                )
                features = features[chosen]
                labels = labels[chosen]

            targets = rows.to(features.dtype)
            return self.mu2 * inter_class_loss(
                features, labels, targets, there, owned=own_classes, margin=self.margin
            )

        return shaped(site, loss)

    def add_class_means(
        self, site: Site, down: Message, network: nn.Module, reply: Message
    ) -> Message:
        """Add the class means of the site's features under the trained network to its reply, if it should send them."""
        if not self.active or self.one_hot or not down.scalars.get("sharing", 1):
            return reply
        groups = class_mean_groups(*class_means(network, site), with_counts=True)
        return Message({**reply.tensors, **groups}, reply.scalars)


class SharesPrototypes(Method):
    """A method made of another one, `inner`, and of prototypes shared beside its weights."""

    inner: Method
    sharing: Sharing

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the inner method's network, whose head has one output per class."""
        return self.sharing.check(self.inner.adapt(network, task), task)

    def groups(self) -> tuple[Group, ...]:
        """Declare the inner method's groups, and those of the prototypes."""
        return self.inner.groups() + self.sharing.groups

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start as the inner method, without prototypes."""
        return self.sharing.begin(
            host, self.inner.init_server(host, weights, introductions), introductions
        )

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the inner method's broadcast, and the prototypes."""
        return self.sharing.add_prototypes(
            server, site_name, self.inner.broadcast(host, server, site_name)
        )

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Aggregate as the inner method, and average the prototypes class by class."""
        prototypes = self.sharing.merged(server, replies)
        return {**self.inner.aggregate(host, server, replies, num_sites), **prototypes}

    def observed(self, server: State, replies: Messages) -> Mapping[str, float]:
        """Return the inner method's numbers, and distances between class means and prototypes."""
        return {**self.inner.observed(server, replies), **self.sharing.observed(server, replies)}


@dataclass(frozen=True)
class WithPrototypes(SharesPrototypes):
    """Another method with global prototypes shared beside its weights, and l_inter in its local loss."""

    inner: Method
    sharing: Sharing

    paper = "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping (Fan et al., 2023)"
    tasks = ("classification",)

    def check(self, site: Site) -> None:
        """Check as the inner method does."""
        self.inner.check(site)

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the inner method's."""
        return self.inner.personal_names(network)

    def global_predictor(self, host: Host, server: State) -> nn.Module | None:
        """Return the inner method's."""
        return self.inner.global_predictor(host, server)

    def introduce(self, site: Site) -> Message:
        """Introduce as the inner method does."""
        return self.inner.introduce(site)

    def init_site(self, site: Site) -> State:
        """Start as the inner method does."""
        return self.inner.init_site(site)

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train as the inner method, with l_inter in its loss; add the class means to the reply."""
        network = site.model(site.initial_weights)
        state, reply = self.inner.local_update(
            self.sharing.pushed(site, down, network), state, down
        )
        # the class means are of the features after training
        network.load_state_dict(merged(reply["weights"], state.get("weights", {})))
        return state, self.sharing.add_class_means(site, down, network, reply)

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train as the inner method, with l_inter in its loss."""
        return self.inner.train(model, self.sharing.pushed(site, down, model), state, down)

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the inner method's."""
        return self.inner.predictor(site, state, down)
