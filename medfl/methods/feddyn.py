"""FedDyn: "Federated Learning Based on Dynamic Regularization" (Acar et al., ICLR 2021).

Site:    w_k ~ argmin f_k(w) - <g_k, w> + (alpha_k/2) ||w - w^t||^2;  g_k <- g_k - alpha_k (w_k - w^t)
Server:  h <- h - (alpha/m) sum_{k in S_t} (w_k - w^t), m = all sites;  w^{t+1} = mean_{S_t} w_k - h/alpha

Stored, as in the public code, as the histories H_k = -g_k/alpha_k and their mean over all m sites, -h/alpha: H_k <- H_k
+ w_k - w^t; w^{t+1} = mean_{S_t} w_k + mean_m H_k. The means are plain, not by samples. The two terms are added to the
loss gradient, which is then clipped.
Departure: corrections act on trainable parameters only; buffers are averaged by samples as in FedAvg (the public code
has no networks with buffers).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from medfl.core.mappings import map_values, pick_known
from medfl.core.message import Message, Messages, Weights
from medfl.methods._parts.drift import mean_with_drift
from medfl.methods.base import Method, difference, moved_by, option
from medfl.storage.files import State
from medfl.training import Host, Site, clip, fit, in_turn, pull, push, snapshot, zeros_of


@dataclass(frozen=True)
class FedDyn(Method):
    """FedAvg whose local losses are regularised so that their minimisers meet in the common one."""

    alpha: float = option(
        0.01, "strength of the regulariser, above 0 (original grid 0.001, 0.01, 0.1)", minimum=1e-9
    )
    alpha_scaling: str = option(
        "none",
        "the same alpha for all sites (paper), or alpha * (mean n) / n_k (public code)",
        choices=("none", "by_size"),
    )
    max_norm: float = option(
        10.0, "clip the gradient to this norm (public code: 10), 0 never", minimum=0.0
    )
    evaluate: str = option(
        "corrected",
        "the server's model w (paper), or the smoother mean of the last participants",
        choices=("corrected", "mean"),
    )

    paper = "Federated Learning Based on Dynamic Regularization (Acar et al., 2021)"
    takes_prototypes = True

    def introduce(self, site: Site) -> Message:
        """Send the number of training items, if alpha depends on it."""
        if self.alpha_scaling == "by_size":
            return Message({}, {"samples": site.num_samples})

        return Message()

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial weights and the mean history 0."""
        server = {
            **super().init_server(host, weights, introductions),
            "history": zeros_of(host.model(weights)),
        }
        if self.alpha_scaling == "by_size":
            # by name, so that the sum has the same bits on every run
            sizes = [introductions[name].scalars["samples"] for name in sorted(introductions)]
            server["mean_samples"] = sum(sizes) / len(sizes)
        return server

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send w, and the mean number of items if alpha depends on it."""
        return Message({"weights": server["weights"]}, pick_known(server, ["mean_samples"]))

    def init_site(self, site: Site) -> State:
        """Start from H_k = 0."""
        return {"history": zeros_of(site.model(site.initial_weights))}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train with the two terms and add the change of the weights to the history."""
        model = site.model(down["weights"])
        received = down["weights"]
        history = state["history"]
        scale = 1.0
        if self.alpha_scaling == "by_size":
            scale = down.scalars["mean_samples"] / site.num_samples

        alpha = self.alpha * scale
        # The gradient of -<g_k, w> is -g_k = alpha_k H_k, that of the square alpha_k (w - w^t).
        push_back = push(model, map_values(lambda value: alpha * value, history))
        pull_back = pull(model, received, alpha)
        fit(model, site, gradient_hook=in_turn(pull_back, push_back, clip(self.max_norm)))
        trained = snapshot(model)
        # H_k <- H_k + w_k - w^t
        after = moved_by(history, difference(trained, received, history))

        return {"history": after}, site.reply(trained)

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Add the participants' share (of all m sites) to the mean history, and set w to the mean plus that history."""
        weights, history = mean_with_drift(replies, server["weights"], server["history"], num_sites)
        return {**server, "weights": weights, "history": history}

    def global_predictor(self, host: Host, server: State) -> nn.Module | None:
        """Return w, or the last participants' mean."""
        weights = server["weights"]
        if self.evaluate == "mean" and host.round:
            # w = mean_S w_k + mean_m H_k, so the mean of the last participants is w minus the history.
            history = server["history"]
            weights = {**weights, **difference(weights, history, history)}
        return host.model(weights)


METHOD = FedDyn
