"""CCVR: "No Fear of Heterogeneity: Classifier Calibration for Federated Learning ..." (Luo et al., NeurIPS 2021).

FedAvg; then the sites send count, mean and unbiased covariance of each class's features under the final model, the
server pools them exactly, draws virtual features from one Gaussian per class and retrains only the head on them by
cross-entropy.

Departures. The paper calibrates once, after training. Here nobody knows in advance which round is the last, so in every
`calibrate_every`-th round a site sends, beside its trained weights, the statistics under the model that it received,
before training. The judged model is thus the newest received model with statistics, w^(t-1) in round t, with its
head calibrated: one round of training less than FedAvg's, and exactly the paper's procedure on it. Training continues
from the uncalibrated w^t. With `calibrate_every` = the number of rounds the statistics are sent once, as in the paper.
They come from that round's participants only. Optimiser and duration of the head's retraining are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from medfl.core import Message, Messages, Tensors, Weights, stream
from medfl.methods._parts.class_heads import class_count, fit_head, with_class_head
from medfl.methods._parts.prototypes import Gaussians, gaussians, pool
from medfl.methods.base import Group, Method, option
from medfl.networks.heads import head, head_name
from medfl.storage import State
from medfl.training import Host, Site, snapshot


@dataclass(frozen=True)
class CCVR(Method):
    """FedAvg whose head is retrained on features drawn from the sites' pooled class Gaussians."""

    calibrate_every: int = option(
        1, "rounds between calibrations; the number of rounds: once, at the end", minimum=1
    )
    virtual: int = option(200, "virtual features a class (public code: 200)", minimum=1)
    calibration_epochs: int = option(10, "passes over the virtual features (ours)", minimum=0)
    calibration_batch: int = option(64, "virtual features a step (ours)", minimum=1)
    calibration_lr: float = option(0.01, "rate of the head's SGD (ours)", minimum=0.0)
    calibration_momentum: float = option(0.9, "its momentum (ours)", minimum=0.0, maximum=1.0)

    paper = (
        "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with "
        "Non-IID Data (Luo et al., 2021)"
    )
    tasks = ("classification",)
    adapt = staticmethod(with_class_head)  # one output per class

    def groups(self) -> tuple[Group, ...]:
        """Declare the moments of each class's features, which go up."""
        return (Group("statistics", down=False),)

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """If due, compute the features' statistics under the received model; then train as FedAvg does."""
        groups = {}
        if site.round % self.calibrate_every == 0:
            groups["statistics"] = self._statistics(site, down)
        # The statistics are of the received model: the training that follows changes it.
        state, reply = super().local_update(site, state, down)
        return state, Message({**reply.tensors, **groups}, reply.scalars)

    def _statistics(self, site: Site, down: Message) -> Tensors:
        model = site.model(down["weights"])
        kind = next(p.dtype for p in head(model).parameters())
        fitted = gaussians(
            model, site.train, site.settings.batch_size, class_count(model), site.device
        )
        covariances = fitted.covariances.to(kind)
        return {
            "counts": fitted.counts.int(),
            "means": fitted.means.to(kind),
            "covariances": covariances,
        }

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Average as FedAvg, and calibrate the model that the sites received if they sent statistics."""
        after = super().aggregate(host, server, replies, num_sites)
        names = sorted(replies)
        if all("statistics" in replies[name] for name in names):
            parts = [Gaussians(**replies[name]["statistics"]) for name in names]
            after["calibrated"] = self._calibrated(host, server["weights"], pool(parts))
        return after

    def _calibrated(self, host: Host, weights: Weights, statistics: Gaussians) -> Tensors:
        """Return the weights with the head retrained; a class with fewer than two items draws no features."""
        network = host.model(weights)
        layer = head(network)
        kind = next(p.dtype for p in layer.parameters())
        classes = (statistics.counts > 1).nonzero()[:, 0].tolist()

        if not classes:
            return dict(weights)

        with stream(host.seed, "calibrate") as generator:
            # z ~ N(mu_c, Sigma_c), the same number for every class: the head sees balanced classes.
            drawn = [statistics.sample(c, self.virtual, generator).to(kind) for c in classes]
            x = torch.cat(drawn).to(host.device)
            y = torch.tensor(classes, device=host.device).repeat_interleave(self.virtual)
            optimizer = torch.optim.SGD(
                # a new one each time: momentum of the last calibration belongs to another model
                layer.parameters(),
                self.calibration_lr,
                self.calibration_momentum,
            )
            fit_head(
                layer, optimizer, x, y, self.calibration_epochs, self.calibration_batch, generator
            )

        calibrated = dict(weights)
        prefix = head_name(network)
        for leaf, tensor in snapshot(layer).items():
            # A network that is its own head has the name "".
            calibrated[f"{prefix}.{leaf}".removeprefix(".")] = tensor

        return calibrated

    def global_predictor(self, host: Host, server: State) -> nn.Module:
        """Return the newest calibrated model; before the first calibration the plain one."""
        return host.model(server.get("calibrated") or server["weights"])


METHOD = CCVR
