"""SCAFFOLD: "Stochastic Controlled Averaging for Federated Learning" (Karimireddy et al., ICML 2020).

Local step:   y <- y - eta (g_i(y) - c_i + c), R optimiser steps from y = x
Option II:    c_i+ = c_i - c + (x - y) / (R eta)
Server:       x <- x + eta_g (1/S) sum (y_i - x);  c <- c + (1/N) sum_{i in S_t} (c_i+ - c_i), N = all sites

Departures. Option II is the mean gradient of the local steps only for plain SGD; with momentum, weight decay or an
adaptive optimiser c_i+ is the mean of the loss gradients seen (`control="auto"`). Controls and eta_g act on trainable
parameters only; buffers take the participants' mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from medfl.core import Message, Messages, Weights
from medfl.methods.base import (
    MEANS,
    Group,
    Method,
    difference,
    moved_by,
    one_of,
    option,
    step_towards,
    uniform_shares,
    weighted_mean,
)
from medfl.storage import State
from medfl.training import Host, Site, fit, snapshot, trainable, zeros_of


@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg with control variates that cancel the sites' drift."""

    server_lr: float = option(
        1.0, "eta_g, the server's step towards the mean of the sites", minimum=0.0
    )
    control: str = one_of(
        "c_i from the weight difference (option II), from the mean gradient, or by optimiser",
        "auto",
        "difference",
        "gradient",
    )
    weights: str = one_of("mean over participants: 1/S (paper), or by samples", *MEANS)

    paper = "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning (Karimireddy et al., 2020)"

    def groups(self) -> tuple[Group, ...]:
        """Declare control variates, both ways."""
        return (Group("control", like_weights=True, smaller=True),)

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial weights and c = 0."""
        return {
            **super().init_server(host, weights, introductions),
            "control": zeros_of(host.model(weights)),
        }

    def init_site(self, site: Site) -> State:
        """Start from c_i = 0."""
        return {"control": zeros_of(site.model(site.initial_weights))}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train with corrected gradients; reply with the trained weights and c_i+ - c_i."""
        model = site.model(down["weights"])
        parameters = trainable(model)
        site_control = state["control"]  # c_i
        server_control = down["control"]  # c
        # y_i <- y_i - eta (g_i(y_i) - c_i + c), line 10 of Algorithm 1
        correction = [server_control[name] - site_control[name] for name in parameters]
        gradient_sums = list(map(torch.zeros_like, parameters.values()))
        by_gradient = self.control == "gradient" or (
            self.control == "auto" and not _plain_sgd(site, model)
        )

        def correct(parameters: Sequence[nn.Parameter]) -> None:
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
            if by_gradient:
                # before the correction: c_i+ is the mean gradient of the loss alone
                torch._foreach_add_(gradient_sums, gradients)

            torch._foreach_add_(gradients, correction)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

        report = fit(model, site, gradient_hook=correct)
        trained = snapshot(model)

        # c_i+
        if by_gradient:
            means = [value / report.steps for value in gradient_sums]
            control = dict(zip(parameters, means, strict=True))
        else:
            scale = 1 / (report.steps * site.learning_rate(model))  # 1 / (R eta)
            control = {}
            for name in parameters:
                step = down["weights"][name] - trained[name]
                control[name] = site_control[name] - server_control[name] + scale * step

        change = difference(control, site_control, parameters)
        return {"control": control}, site.reply(trained, control=change)

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Move x by eta_g times the mean difference and c by the participants' changes over all N sites."""
        mean = super().aggregate(host, server, replies, num_sites)["weights"]
        weights = step_towards(server["weights"], mean, self.server_lr, server["control"])
        change = weighted_mean(replies, "control", uniform_shares(replies))
        part = len(replies) / num_sites  # mean over participants times S/N is the sum over N
        return {"weights": weights, "control": moved_by(server["control"], change, part)}


def _plain_sgd(site: Site, model: nn.Module) -> bool:
    optimizer = site.settings.optimizer(model)
    # Several groups may have several learning rates, and option II knows one eta.
    if not isinstance(optimizer, torch.optim.SGD) or len(optimizer.param_groups) != 1:
        return False

    (group,) = optimizer.param_groups
    return not group.get("momentum") and not group.get("weight_decay")


METHOD = Scaffold
