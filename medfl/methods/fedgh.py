"""FedGH: "FedGH: Heterogeneous Federated Learning with Generalized Global Header" (Yi et al., ACM MM 2023).

A site's model is a body theta_k of its own and the common header phi, the network's last layer.
Site:    phi_k <- phi; minimise f_k over theta_k and phi_k; then r_k,c = mean feature of its items of class c. Reply:
         r_k,c of each own class. theta_k stays; the trained phi_k is dropped.
Server:  phi <- phi - eta d/dphi CE(phi(r_k,c), c), one sample for each site and class.
Judged by theta_k with phi, the newest header.

Departures. The public code steps the sites' optimiser in the server's phase, so that its header is never trained, and
averages the means of batches under a body in training mode; here, as in the paper, the server has an optimiser of its
own (plain SGD, samples in random order), and r_k,c is the mean over items, in evaluation mode. Its clipping of the
sites' gradients at 50 is left out. In segmentation the header is the last convolution, of size 1, and r_k,c the mean of
the map that enters it over all pixels of class c.
With `bodies` the sites' bodies differ; features, also those of the server's network, must have one length.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from medfl.core.errors import InputError
from medfl.core.message import Message, Weights
from medfl.core.seeding import stream
from medfl.core.storage import State
from medfl.core.task import Task
from medfl.data.prepared import Shard
from medfl.methods._parts.extras import Bodies
from medfl.methods._parts.prototypes import collect
from medfl.methods.base import Group, Method, class_head, option
from medfl.methods.fedproto import check_lengths, feature_length, owned, received
from medfl.networks.heads import feature_size, features_and_output, head, head_name, head_names
from medfl.training import Host, Site, evaluating, snapshot
from medfl.training.accelerate.capture import StepRunner
from medfl.training.accelerate.cuda_graphs import without_readback


@dataclass(frozen=True)
class FedGH(Bodies, Method):
    """Bodies stay; a header for all of them is trained at the server, on the sites' class means."""

    server_lr: float = option(0.01, "eta, rate of the server's SGD (public code: that of the sites)", minimum=0.0)
    server_epochs: int = option(1, "passes over the class means of a round", minimum=0)
    server_batch_size: int = option(1, "class means a step of the server, 0: all of them", minimum=0)

    paper: ClassVar[str] = "FedGH: Heterogeneous Federated Learning with Generalized Global Header (Yi et al., 2023)"
    tasks: ClassVar[tuple[str, ...]] = ("classification", "segmentation")
    judged: ClassVar[str] = "personal"

    def groups(self) -> tuple[Group, ...]:
        """Declare class means go up, the header comes back."""
        return (Group("prototypes", down=False, smaller=True), Group("header", up=False, smaller=True))

    def adapt(self, network: nn.Module, task: Task) -> nn.Module:
        """Return the bundle's network, whose head has one output a class for each item or pixel."""
        if task.kind == "segmentation":
            check_pixel_head(network, task)
        else:
            class_head(network, task)
        return network

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return every tensor of the network: a trained header does not leave either."""
        return frozenset(network.state_dict())

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Mapping[str, Message]) -> State:
        """Start from the header of the initial weights.

        Raises:
            InputError: the sites' features differ in length, from each other or from the server's.
        """
        network = host.model(weights)
        lengths = {name: int(m.scalars["features"]) for name, m in introductions.items() if m.scalars}
        check_lengths({**lengths, "the server": feature_size(network)} if lengths else {})
        return {"header": snapshot(head(network))}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send phi."""
        return Message({"header": server["header"]})

    def aggregate(self, host: Host, server: State, replies: Mapping[str, Message], num_sites: int) -> State:
        """Train phi on the class means.

        Raises:
            InputError: features differ in length between the sites, or from the header's.
        """
        network = host.model(host.networks.initial)
        layer = deepcopy(head(network))
        layer.load_state_dict(server["header"])
        sent = [(name, int(c), r) for name in sorted(replies) for c, r in received(replies[name]).items()]
        sent.sort(key=lambda entry: entry[:2])  # the wire has its own order
        check_lengths({"the server": feature_size(network), **{name: len(r) for name, _, r in sent}})
        if sent:
            samples, labels = torch.stack([r for _, _, r in sent]), torch.tensor([c for _, c, _ in sent])
            with stream(host.seed, "header") as generator:
                layer.requires_grad_(True)
                optimizer = torch.optim.SGD(layer.parameters(), self.server_lr)
                size = self.server_batch_size or len(samples)
                x, y = samples.to(host.device), labels.to(host.device)
                fit_head(layer, optimizer, x, y, self.server_epochs, size, generator)
        return {"header": snapshot(layer)}

    # Site half

    def introduce(self, site: Site) -> Message:
        """Tell the length of a feature, where networks differ."""
        return feature_length(site) if self.bodies else Message()

    def init_site(self, site: Site) -> State:
        """Start from the body of the initial weights."""
        return {"body": body(site.model(site.initial_weights))}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train body and header; keep the body, reply the class means of its features."""
        model = self.predictor(site, state, down)
        self.train(model, site, state, down)
        means, counts = class_means(model, site.train, site.settings.batch_size, site.device)
        return {"body": body(model)}, Message({"prototypes": owned(means, counts)})

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the site's body with the received header."""
        model = site.model({**site.initial_weights, **state["body"]})
        head(model).load_state_dict(dict(down["header"]))
        return model


def body(network: nn.Module) -> dict[str, Tensor]:
    """Copy all tensors of a network but its head's."""
    names = head_names(network)
    return {name: tensor for name, tensor in snapshot(network).items() if name not in names}


def logits(layer: nn.Module, values: Tensor) -> Tensor:
    """Return what a head makes of features (N, d): (N, K). A convolution takes each as a map of one pixel."""
    dims = next(layer.parameters()).ndim - 2
    output: Tensor = layer(values[(..., *[None] * dims)])
    return output.flatten(1)


def fit_head(
    layer: nn.Module,
    optimizer: torch.optim.Optimizer,
    features: Tensor,
    labels: Tensor,
    epochs: int,
    size: int,
    generator: torch.Generator,
) -> None:
    """Train a head by cross-entropy on features, in random order; the steps are captured where they can be.

    Args:
        layer: the head, in place.
        optimizer: of its parameters, anew.
        features: (N, d), on its device.
        labels: (N,) class indices, there too.
        epochs: passes over them.
        size: features a step.
        generator: draws the order.
    """

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(logits(layer, x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        with without_readback(optimizer):
            optimizer.step()
        return loss.detach()

    steps = StepRunner(step, optimizer, features.device, epochs * max(1, len(features) // size))
    for _ in range(epochs):
        order = torch.randperm(len(features), generator=generator).to(features.device)
        for chosen in torch.split(order, size):
            steps(features[chosen], labels[chosen])
    steps.finish()


def class_means(network: nn.Module, shard: Shard, batch_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the mean feature of each class (K, d), of its items or its pixels, and their numbers (K,) int64."""
    layer: Any = head(network)
    classes = len(layer.weight)
    if isinstance(layer, nn.Linear):
        return collect(network, shard, batch_size, classes, device)
    sums = torch.zeros(classes, feature_size(network), dtype=torch.float64, device=device)
    counts = torch.zeros(classes, dtype=torch.int64, device=device)
    with evaluating(network), torch.no_grad():
        for x, y in shard.deterministic().batches(batch_size):
            maps, _ = features_and_output(network, x.to(device))
            for values, label in zip(maps.flatten(2), pixel_classes(y).to(device), strict=True):  # (d, P), (P,)
                members = one_hot(label, classes)
                sums += members.T.double() @ values.T.double()
                counts += members.sum(0)
    return (sums / counts.clamp(min=1)[:, None]).to(layer.weight.dtype), counts


def pixel_classes(masks: Tensor) -> Tensor:
    """Return the class index of each pixel (B, P) of masks (B, 1, H, W[, D]) or one-hot (B, K, H, W[, D])."""
    return (masks.argmax(1) if masks.shape[1] > 1 else masks[:, 0]).flatten(1).long()


def check_pixel_head(network: nn.Module, task: Task) -> None:
    """Check the head of a segmentation network: a convolution of size 1 with one output a class.

    Raises:
        InputError: the head is another one.
    """
    layer: Any = head(network)
    pointwise = isinstance(layer, nn.Conv2d | nn.Conv3d) and {*layer.kernel_size, layer.groups} == {1}
    outputs = len(layer.weight) if pointwise else 0
    if outputs < 2 or outputs != (task.num_classes or outputs):
        raise InputError(
            f"a network whose head {head_name(network)!r} is {layer}",
            "this method needs a convolution of size 1 with one output for each class, the background among them",
            "use a network that ends in such a layer, or another method (medfl methods)",
        )


METHOD = FedGH
