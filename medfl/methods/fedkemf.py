"""FedKEMF: small knowledge networks travel and are fused by distillation (Yu, Qian, Jannesari, 2022).

"Resource-aware Federated Learning using Knowledge Extraction and Multi-model Fusion" (FedHelp prints "FedKEAF"). A site
has a local model phi, any network (option `bodies`), and gets the knowledge network k, the bundle's own network.

Site:    deep mutual learning of both on its data, each with the other held constant:
         (1) f_i(phi) + lambda KL(p_k || p_phi)  and  f_i(k_i) + lambda KL(p_phi || p_k), f_i the site's loss, k_i <- k.
         Reply: k_i. phi never leaves.
Server:  (2) p~(x) = 1/S sum_i softmax(k_i(x)), the participants' ensemble;
         (3) k is trained on KL(p~ || softmax(k)), mean over public items, from where it was and without labels.
Judged by phi; the server's model is k.

p is a softmax, in maps that of each pixel; a single channel is the logit of a sigmoid. Temperatures are 1.
Departures. The public code distils on the training set with its labels, by squared differences between the teachers'
probabilities and softened ones of the student, and between logits at the sites; here it is KL and only public images.
It steps the two models one after the other; here they step from the same forward passes, and its cosine decay within a
round is omitted. The teachers are in evaluation mode. An option selects where the statistics of k's BatchNorm come
from: from the distillation, and so from public images, or from the sites. FedHelp describes another variant, in which
whole models are sent; this is the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medfl.core import Message, Messages, Weights, pick
from medfl.data import Public
from medfl.methods._parts.distillation import divergence, ensemble
from medfl.methods._parts.mutual_learning import PrivateModels, proxy_model, train_together
from medfl.methods._parts.public import PublicMethod, on_public, public_data, untracked
from medfl.methods.base import Collated, one_of, option, sent, uniform_shares, weighted_mean
from medfl.networks.heads import frozen
from medfl.storage import State
from medfl.training import Host, LocalSettings, Site, fit, snapshot, trainable


@dataclass(frozen=True)
class FedKEMF(PublicMethod, PrivateModels):
    """Local models of any kind learn with knowledge networks of one kind, which the server fuses on public data."""

    lam: float = option(1.0, "lambda, weight of the other model's opinion at a site", minimum=0.0)
    server_epochs: int = option(1, "passes over the public items a round", minimum=0)
    server_batch_size: int = option(
        0, "public items a step of the server; 0: 64, in segmentation 4", minimum=0
    )
    server_optimizer: str = one_of("of the server, anew each round", "sgd", "adam")
    server_lr: float = option(0.01, "its learning rate (public code: SGD 0.01)", minimum=0.0)
    public_bn: str = one_of(
        "running statistics of k's BatchNorm: of public batches, or the mean of the sites' (no_track)",
        "track",
        "no_track",
    )

    paper = (
        "Resource-aware Federated Learning using Knowledge Extraction and Multi-model Fusion "
        "(Yu, Qian, Jannesari, 2022)"
    )
    tasks = ("classification", "segmentation")

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start k from the initial weights."""
        public_data(host)
        return {"weights": dict(weights)}

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Distil the participants' ensemble into k."""
        k = host.model(server["weights"])
        if self.server_epochs:
            teachers = [frozen(host.model(weights)) for weights in sent(replies, "weights")]
            with untracked(k, self.public_bn == "no_track"):
                self._distil(k, teachers, host, public_data(host))

        fused = snapshot(k)
        if self.public_bn == "no_track":
            mean = weighted_mean(replies, "weights", uniform_shares(replies))
            # Distillation left k's buffers unchanged; the sites' mean replaces them.
            buffers = fused.keys() - dict(k.named_parameters()).keys()
            fused |= pick(mean, buffers)

        return {"weights": fused}

    def _distil(
        self, k: nn.Module, teachers: Sequence[nn.Module], host: Host, public: Public
    ) -> None:
        def optimizer(network: nn.Module) -> torch.optim.Optimizer:
            parameters = trainable(network).values()
            if self.server_optimizer == "sgd":
                return torch.optim.SGD(parameters, lr=self.server_lr)

            return torch.optim.Adam(parameters, lr=self.server_lr)

        def objective(network: nn.Module, x: Collated, y: Collated) -> Tensor:
            with torch.no_grad():
                teacher = ensemble([public.outputs(network, x) for network in teachers])  # (2)
            return divergence(public.outputs(network, x), teacher)  # (3)

        size = self.server_batch_size or (4 if host.task.kind == "segmentation" else 64)
        settings = LocalSettings(self.server_epochs, size, optimizer)
        items = public.shard
        server = Site(  # `fit` trains there too
            "server",
            host.seed,
            items,
            items,
            items,
            divergence,
            settings,
            host.networks,
            host.round,
            host.task,
        )
        everything = torch.arange(len(public))
        fit(
            k,
            on_public(server, public, everything, None, self.server_epochs, size),
            objective=objective,
        )

    # Site half

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train phi and the received k together (1); reply with k_i."""
        private = site.model(state["private"])
        knowledge = proxy_model(site, down["weights"])

        def loss(z: Tensor, z_k: Tensor, y: Collated) -> Tensor:
            # (1): the losses of both models are one sum, each detached from the other inside
            # `divergence`.
            labels = site.loss(z, y) + site.loss(z_k, y)
            if self.lam:
                return labels + self.lam * (divergence(z, z_k) + divergence(z_k, z))

            return labels

        train_together(site, private, knowledge, loss, "knowledge")
        return {"private": snapshot(private)}, Message({"weights": snapshot(knowledge)})


METHOD = FedKEMF
