"""ProxyFL: "Decentralized federated learning through proxy model sharing" (Kalra et al., Nature Communications 2023).

A site has a private model phi, any network (option `bodies`), and a proxy theta, the bundle's own network.
Site:    theta <- the proxy that arrived. Both models see the same batches, each with the other one held constant:
         (1 - alpha) f_k(phi) + alpha KL(p_theta || p_phi)  and  (1 - alpha) f_k(theta) + alpha KL(p_phi || p_theta).
         Reply: theta. phi never leaves.
Server:  none in the paper; here it relays, and averages nothing. In round r = 0, 1, ... the proxy of site i goes to
         site (i + 2^(r mod L)) mod N, L = floor(log2(N - 1)) + 1: the directed exponential graph.
Judged by phi.

p is the softmax of a network's output, in maps that of each pixel; a single channel is taken for the logit of a
sigmoid. Departures. DP-SGD for the proxies is left out, so nothing here is differentially private. The paper de-biases
by PushSum; as every site sends its whole proxy and gets one, the weights stay 1 and there is nothing to do. In a round
with a cohort the graph is that of its sites, and an absent site keeps the proxy that waits for it. Models start from
the run's initial weights; where phi and theta are the same network they differ from the first exchange on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from medfl.core.errors import InputError
from medfl.core.message import Message, Weights
from medfl.core.storage import State
from medfl.methods._parts.extras import Bodies
from medfl.methods._parts.side_stream import Aside
from medfl.methods.base import Method, option
from medfl.training import Host, Networks, Site, fit, snapshot


@dataclass(frozen=True)
class ProxyFL(Bodies, Method):
    """Private models of any kind learn with proxies of one kind, which travel from site to site."""

    alpha: float = option(0.5, "share of the other model's opinion in both losses, 0 to 1 (paper: 0.5)", minimum=0.0)

    paper: ClassVar[str] = "Decentralized federated learning through proxy model sharing (Kalra et al., 2023)"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "segmentation")
    judged: ClassVar[str] = "personal"

    def __post_init__(self) -> None:
        """Refuse a share above 1."""
        if self.alpha > 1:
            raise InputError(f"alpha={self.alpha:g}", "the other model's share is 0 to 1", "take at most 1")

    def keeps_network(self, config: Mapping[str, Any]) -> bool:
        """Keep the private model, whatever its network; a proxy leaves."""
        return True

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Mapping[str, Message]) -> State:
        """Hold a proxy of the initial weights for every site."""
        return {"proxies": {name: dict(weights) for name in sorted(introductions)}}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the proxy that waits for the site."""
        return Message({"weights": server["proxies"][site_name]})

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Hand each participant's proxy to the next one along the graph."""
        names = sorted(replies)
        step = stride(host.round, len(names))
        arrived = {names[(i + step) % len(names)]: dict(replies[name]["weights"]) for i, name in enumerate(names)}
        return {"proxies": {**server["proxies"], **arrived}}

    def global_predictor(self, host: Host, server: State) -> None:
        """Return None: no proxy is everybody's."""
        return

    # Site half

    def init_site(self, site: Site) -> State:
        """Start phi from the initial weights."""
        return {"private": snapshot(site.model(site.initial_weights))}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train phi and the arrived proxy together; reply the proxy."""
        private, proxy = site.model(state["private"]), proxies(site).lease(down["weights"])
        beside = Aside(site, "proxy")

        def objective(pair: nn.Module, x: Any, y: Any) -> Tensor:
            z = private(x)
            with beside():
                z_proxy = proxy(x)
            return self._loss(site.loss(z, y), z, z_proxy) + self._loss(site.loss(z_proxy, y), z_proxy, z)

        fit(nn.ModuleList([private, proxy]), optimizing_each(site), objective=objective)
        return {"private": snapshot(private)}, Message({"weights": snapshot(proxy)})

    def _loss(self, own: Tensor, z: Tensor, other: Tensor) -> Tensor:
        return (1 - self.alpha) * own + self.alpha * divergence(z, other) if self.alpha else own

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return phi."""
        return site.model(state["private"])


def stride(round_: int, sites: int) -> int:
    """Return how many places on a proxy goes in a round (from 1), of so many sites: 1, 2, 4, ... and again from 1."""
    length = (sites - 1).bit_length()  # floor(log2(N - 1)) + 1
    return 1 << (round_ - 1) % length if length else 0


def proxies(site: Site) -> Networks:
    """Return the pool of proxies: the bundle's own network, whatever the site's is."""
    return site.common or site.networks


def optimizing_each(site: Site) -> Site:
    """Return the site with an optimiser that treats each of several networks in a list as the site's treats one."""

    def optimizer(networks: nn.Module) -> torch.optim.Optimizer:
        first, *others = (site.settings.optimizer(network) for network in networks.children())
        for group in (group for other in others for group in other.param_groups):
            first.add_param_group(group)
        return first

    return replace(site, settings=replace(site.settings, optimizer=optimizer))


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(softmax(teacher) || softmax(student)) over dimension 1, mean over all others; the teacher is constant.

    Args:
        student: logits (B, K) or maps of them (B, K, H, W[, D]); a single channel is the logit of a sigmoid.
        teacher: of the same shape.
    """
    log_q, log_p = (_log_probabilities(z) for z in (student, teacher.detach()))
    return kl_div(log_q, log_p, reduction="none", log_target=True).sum(1).mean()


def _log_probabilities(z: Tensor) -> Tensor:
    exact = z.to(torch.promote_types(z.dtype, torch.float32))  # with mixed precision it is not
    return log_softmax(torch.cat([torch.zeros_like(exact), exact], 1) if exact.shape[1] == 1 else exact, 1)


METHOD = ProxyFL
