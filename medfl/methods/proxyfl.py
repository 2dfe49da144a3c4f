"""ProxyFL: "Decentralized federated learning through proxy model sharing" (Kalra et al., Nature Communications 2023).

A site has a private model phi, any network (option `bodies`), and a proxy theta, the bundle's own network.
Site:    theta <- the proxy that arrived. Both models see the same batches, each with the other one held constant:
         (1 - alpha) f_k(phi) + alpha KL(p_theta || p_phi)  and  (1 - alpha) f_k(theta) + alpha KL(p_phi || p_theta).
         Reply: theta. phi never leaves.
Server:  none in the paper; here it relays, and averages nothing. In round r = 0, 1, ... the proxy of site i goes to
         site (i + 2^(r mod L)) mod N, L = floor(log2(N - 1)) + 1: the directed exponential graph.
Judged by phi.

p is the softmax of a network's output, in maps that of each pixel; a single channel is the logit of a
sigmoid. Departures. DP-SGD for the proxies is omitted, so nothing here is differentially private. The paper de-biases
by PushSum; as every site sends its whole proxy and gets one, the weights stay 1 and there is nothing to do. In a round
with a cohort the graph is that of its sites, and an absent site keeps the proxy waiting for it. Models start from
the run's initial weights; if phi and theta are the same network, they differ from the first exchange on.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from medfl.core import Message, Messages, Weights
from medfl.methods._parts.distillation import divergence
from medfl.methods._parts.mutual_learning import PrivateModels, proxy_model, train_together
from medfl.methods.base import Collated, option
from medfl.storage import State
from medfl.training import Host, Site, snapshot


@dataclass(frozen=True)
class ProxyFL(PrivateModels):
    """Private models of any kind learn with proxies of one kind, which travel from site to site."""

    alpha: float = option(
        0.5,
        "share of the other model's opinion in both losses (paper: 0.5)",
        minimum=0.0,
        maximum=1.0,
    )

    paper = "Decentralized federated learning through proxy model sharing (Kalra et al., 2023)"
    tasks = ("classification", "segmentation")

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Hold a proxy of the initial weights for every site."""
        return {"proxies": {name: dict(weights) for name in sorted(introductions)}}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the proxy that waits for the site."""
        return Message({"weights": server["proxies"][site_name]})

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Hand each participant's proxy to the next one along the graph."""
        names = sorted(replies)
        step = stride(host.round, len(names))
        proxies = dict(server["proxies"])
        for i, name in enumerate(names):
            proxies[names[(i + step) % len(names)]] = dict(replies[name]["weights"])

        return {"proxies": proxies}

    def global_predictor(self, host: Host, server: State) -> None:
        """Return None: no proxy is common to all."""
        return

    # Site half

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train phi and the received proxy together; reply with the proxy."""
        private = site.model(state["private"])
        proxy = proxy_model(site, down["weights"])

        def loss(z: Tensor, z_proxy: Tensor, y: Collated) -> Tensor:
            of_private = self._loss(site.loss(z, y), z, z_proxy)
            return of_private + self._loss(site.loss(z_proxy, y), z_proxy, z)

        train_together(site, private, proxy, loss, "proxy")
        return {"private": snapshot(private)}, Message({"weights": snapshot(proxy)})

    def _loss(self, on_labels: Tensor, z: Tensor, teacher: Tensor) -> Tensor:
        if self.alpha:
            return (1 - self.alpha) * on_labels + self.alpha * divergence(z, teacher)

        return on_labels


def stride(round_: int, sites: int) -> int:
    """Return by how many positions a proxy moves in a round (from 1) among these sites: 1, 2, 4, ..., repeating."""
    length = (sites - 1).bit_length()  # floor(log2(N - 1)) + 1
    return 1 << (round_ - 1) % length if length else 0


METHOD = ProxyFL
