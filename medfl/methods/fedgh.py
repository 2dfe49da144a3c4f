"""FedGH: "FedGH: Heterogeneous Federated Learning with Generalized Global Header" (Yi et al., ACM MM 2023).

A site's model is a body theta_k of its own and the common header phi, the network's last layer.
Site:    phi_k <- phi; minimise f_k over theta_k and phi_k; then r_k,c = mean feature of its items of class c. Reply:
         r_k,c of each own class. theta_k stays; the trained phi_k is dropped.
Server:  phi <- phi - eta d/dphi CE(phi(r_k,c), c), one sample for each site and class.
Judged by theta_k with phi, the newest header.

Departures. The public code steps the sites' optimiser in the server's phase, so that its header is never trained, and
averages the means of batches under a body in training mode; here, as in the paper, the server has its own optimiser
(plain SGD, samples in random order), and r_k,c is the mean over items, in evaluation mode. Its clipping of the
sites' gradients at 50 is omitted. For segmentation the header is the last 1x1 convolution, and r_k,c the mean of
its input map over all pixels of class c.
With `bodies` the sites' bodies differ; features, including those of the server's network, must have the same length.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn

from medfl.core.mappings import without
from medfl.core.message import Message, Messages, Tensors, Weights
from medfl.core.seeding import stream
from medfl.methods._parts.class_heads import fit_head
from medfl.methods._parts.prototype_exchange import (
    PrototypeExchange,
    by_class,
    check_lengths,
    prototypes_in,
)
from medfl.methods._parts.prototypes import class_means
from medfl.methods.base import Group, option
from medfl.networks.heads import feature_size, head, head_names
from medfl.storage.files import State
from medfl.training import Host, Site, snapshot


@dataclass(frozen=True)
class FedGH(PrototypeExchange):
    """Bodies stay; a header for all of them is trained at the server, on the sites' class means."""

    server_lr: float = option(
        0.01, "eta, rate of the server's SGD (public code: that of the sites)", minimum=0.0
    )
    server_epochs: int = option(1, "passes over the class means of a round", minimum=0)
    server_batch_size: int = option(
        1, "class means a step of the server, 0: all of them", minimum=0
    )

    paper = (
        "FedGH: Heterogeneous Federated Learning with Generalized Global Header (Yi et al., 2023)"
    )
    tasks = ("classification", "segmentation")

    def groups(self) -> tuple[Group, ...]:
        """Declare class means, which go up, and the header, which comes back."""
        return (
            Group("prototypes", down=False, smaller=True),
            Group("header", up=False, smaller=True),
        )

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the header of the initial weights.

        Raises:
            InputError: the sites' features differ in length, from each other or from the server's.
        """
        network = host.model(weights)
        self.check_introduced(introductions, network)
        return {"header": snapshot(head(network))}

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Train phi on the class means.

        Raises:
            InputError: features differ in length between the sites, or from the header's.
        """
        network = host.model(host.networks.initial)
        # A copy, since the network is shared with others.
        layer = deepcopy(head(network))
        layer.load_state_dict(server["header"])
        lengths = {"the server": feature_size(network)}
        means = []
        classes = []
        for name in sorted(replies):
            prototypes = prototypes_in(replies[name])
            for c in sorted(prototypes, key=int):  # transmission has its own order
                lengths[name] = len(prototypes[c])
                means.append(prototypes[c])
                classes.append(int(c))

        check_lengths(lengths)

        if means:
            samples = torch.stack(means)
            labels = torch.tensor(classes)
            # in the order of sites and classes, with a separate stream: SGD with one mean per step depends on it
            with stream(host.seed, "header") as generator:
                layer.requires_grad_(True)
                optimizer = torch.optim.SGD(layer.parameters(), self.server_lr)
                size = self.server_batch_size or len(samples)
                x = samples.to(host.device)
                y = labels.to(host.device)
                # phi <- phi - eta d/dphi CE(phi(r_k,c), c)
                fit_head(layer, optimizer, x, y, self.server_epochs, size, generator)

        return {"header": snapshot(layer)}

    # Site half

    def init_site(self, site: Site) -> State:
        """Start from the body of the initial weights."""
        return {"body": body(site.model(site.initial_weights))}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train body and header; keep the body, reply with the class means of its features."""
        model = self.predictor(site, state, down)
        self.train(model, site, state, down)
        return {"body": body(model)}, Message({"prototypes": by_class(*class_means(model, site))})

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's body with the received header."""
        model = site.model({**site.initial_weights, **state["body"]})
        head(model).load_state_dict(dict(down["header"]))
        return model


def body(network: nn.Module) -> Tensors:
    """Copy all tensors of a network but its head's."""
    return without(snapshot(network), head_names(network))


METHOD = FedGH
