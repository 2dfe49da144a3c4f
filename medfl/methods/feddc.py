"""FedDC: "... Federated Learning with Non-IID Data via Local Drift Decoupling and Correction" (Gao et al., CVPR 2022).

Site:    minimise f_k(w) + (alpha/2) ||w + h_k - w^t||^2 + <c - c_k, w>; with D = w_k - w^t and K steps of rate eta:
         h_k <- h_k + D;  c_k+ = c_k - c - D / (K eta)
Server:  c <- c + (1/m) sum_{k in S_t} (c_k+ - c_k), m = all sites;  w^{t+1} = mean_{S_t} w_k + mean_m h_k

The paper writes the linear term with the last updates, <w, g_k - g> / (eta K): the same with c = -g / (eta K). The
means are plain, not by samples. K is the site's own number of steps. Both terms are added to the loss gradient, which
is then clipped.
Departures. With momentum FedNova's a_k replaces K. D / (K eta) is minus a mean gradient for SGD only; with
another optimiser the mean of its gradients is used instead (`control="auto"`). A site sends c_k+ - c_k,
which with SGD the server could compute. Scaling by the site's size and one K for all sites, as in the public code, are
omitted. Corrections act on trainable parameters only; buffers are averaged by samples (that code has none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from medfl.core.mappings import map_values
from medfl.core.message import Message, Messages, Weights
from medfl.methods._parts.drift import mean_with_drift
from medfl.methods._parts.effective_steps import effective_steps
from medfl.methods.base import (
    Group,
    Method,
    difference,
    moved_by,
    option,
    uniform_shares,
    weighted_mean,
)
from medfl.storage.files import State
from medfl.training import (
    GradientHook,
    Host,
    Site,
    clip,
    fit,
    in_turn,
    pull,
    push,
    snapshot,
    zeros_of,
)


@dataclass(frozen=True)
class FedDC(Method):
    """FedAvg whose sites track how far they drift from the global model, and correct for it."""

    alpha: float = option(
        0.01, "strength of the penalty (public code: 0.01 CIFAR, 0.1 MNIST)", minimum=0.0
    )
    max_norm: float = option(
        10.0, "clip the gradient to this norm (public code: 10), 0 never", minimum=0.0
    )
    control: str = option(
        "auto",
        "c_k from the weight difference, from the mean gradient, or by optimiser",
        choices=("auto", "difference", "gradient"),
    )

    paper = "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction (Gao et al., 2022)"
    takes_prototypes = True

    def groups(self) -> tuple[Group, ...]:
        """Declare control variates, both ways."""
        return (Group("control", like_weights=True, smaller=True),)

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial weights, mean drift 0 and c = 0."""
        model = host.model(weights)
        return {
            **super().init_server(host, weights, introductions),
            "drift": zeros_of(model),
            "control": zeros_of(model),
        }

    def init_site(self, site: Site) -> State:
        """Start from h_k = 0 and c_k = 0."""
        model = site.model(site.initial_weights)
        return {"drift": zeros_of(model), "control": zeros_of(model)}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train with the three terms; reply the trained weights and c_k+ - c_k."""
        model = site.model(down["weights"])
        received = down["weights"]
        common = down["control"]
        drift = state["drift"]
        control = state["control"]
        total = zeros_of(model)
        # The gradient of (alpha/2) ||w + h_k - w^t||^2 + <c - c_k, w> is alpha (w - w^t), which `pull`
        # adds, and the constant alpha h_k + (c - c_k), which `push` adds.
        shift = moved_by(difference(common, control, drift), drift, self.alpha)
        # clipped last, so that the bound is on the gradient of the whole loss
        hooks = [pull(model, received, self.alpha), push(model, shift), clip(self.max_norm)]
        is_sgd = isinstance(site.settings.optimizer(model), torch.optim.SGD)
        # other optimisers do not step by eta times the gradient, so D / (K eta) is not its mean
        by_gradient = self.control == "gradient" or (self.control == "auto" and not is_sgd)

        if by_gradient:
            hooks.append(_sum_into(total))

        steps = fit(model, site, gradient_hook=in_turn(*hooks)).steps
        trained = snapshot(model)
        # D = w_k - w^t
        gone = difference(trained, received, drift)
        if by_gradient:
            mean = map_values(lambda value: value / steps, total)
        else:
            pace = effective_steps(site, model, steps) * site.learning_rate(model)  # K eta
            mean = map_values(lambda value: -value / pace, gone)  # -D / (K eta)

        change = difference(mean, common, drift)  # c_k+ - c_k
        # h_k + D and c_k+
        state = {"drift": moved_by(drift, gone), "control": moved_by(control, change)}

        return state, site.reply(trained, control=change)

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Move w, the mean drift and c; absent sites keep h_k and c_k."""
        weights, drift = mean_with_drift(replies, server["weights"], server["drift"], num_sites)
        change = weighted_mean(replies, "control", uniform_shares(replies))
        part = len(replies) / num_sites  # mean over participants times S/m is the sum over m
        control = moved_by(server["control"], change, part)
        return {"weights": weights, "drift": drift, "control": control}


def _sum_into(total: Weights) -> GradientHook:
    """Return a gradient hook that sums the gradients given to the optimiser."""

    def hook(parameters: Sequence[nn.Parameter]) -> None:
        # both in the order of the trainable parameters
        for value, parameter in zip(total.values(), parameters, strict=True):
            if parameter.grad is not None:
                value.add_(parameter.grad)

    return hook


METHOD = FedDC
