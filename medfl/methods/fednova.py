"""FedNova: "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization" (Wang et al., 2020).

Site:    K_k steps of its optimiser from w to w_k; a_k = ||a_k||_1, how many plain gradient steps they were worth.
Server:  d_k = (w - w_k) / a_k;  w <- w - tau_eff sum_k p_k d_k, tau_eff = sum_k p_k a_k, p_k by samples
a_k:     K_k for plain SGD, the sum over the steps of c with c <- rho c + 1 for momentum rho, a <- a (1 - eta mu) + 1
         with a proximal term mu; then tau_eff = sum_k p_k K_k, as in the public code.

Computed as sum_k p_k w_k + sum_k p_k (tau_eff / a_k - 1) (w_k - w), whose second sum vanishes for equal a_k: FedAvg
bit for bit.
Departures. The paper has SGD only; a_k is measured here, as the distance in learning rates over which the site's
optimiser moves a parameter with constant gradient 1, so Adam's is K_k, and the proximal term passes through momentum.
Weight decay is part of the gradient. Buffers are averaged by samples. The server's momentum accumulates steps of the
weights; the public code divides each by its round's learning rate first, which is the same unless that rate decays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from medfl.core import InputError, Message, Messages, RunError, Weights
from medfl.methods._parts.effective_steps import effective_steps
from medfl.methods.base import Method, option, sample_shares, trained_names, weighted_mean
from medfl.storage import State
from medfl.training import Host, Site, fit, pull, snapshot, zeros_of

_LEAST = 1e-3  # one step is 1; dividing a change by almost nothing would make it arbitrarily large


@dataclass(frozen=True)
class FedNova(Method):
    """FedAvg of normalised steps, so that a site with more local steps does not pull harder."""

    mu: float = option(0.0, "strength of a proximal term at the sites", minimum=0.0)
    server_momentum: float = option(
        0.0, "momentum of the server's step (public code: gmf)", minimum=0.0
    )

    paper = "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization (Wang et al., 2020)"
    takes_prototypes = True

    def check(self, site: Site) -> None:
        """Refuse optimisers that persist between rounds: a_k is measured with a new one."""
        if site.optimizer_states is not None:
            raise InputError(
                "--keep-optimizer with method 'fednova'",
                "it counts the steps of a new optimiser",
                "leave it out",
            )

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial weights, and velocity 0 if the server has momentum."""
        server = super().init_server(host, weights, introductions)
        if self.server_momentum:
            return {**server, "velocity": zeros_of(host.model(weights))}

        return server

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train as FedAvg or FedProx does; also reply with a_k, and with K_k if there is a proximal term."""
        model = site.model(down["weights"])
        proximal = pull(model, dict(model.named_parameters()), self.mu)
        steps = fit(model, site, gradient_hook=proximal).steps
        scalars = {
            "samples": site.num_samples,
            # a_k
            "effective_steps": effective_steps(site, model, steps, self.mu),
        }
        if self.mu:
            scalars["steps"] = steps
        return state, Message({"weights": snapshot(model)}, scalars)

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Move w by tau_eff times the mean normalised step."""
        shares = sample_shares(replies)
        received = server["weights"]
        weights = weighted_mean(replies, "weights", shares)
        names = trained_names(host.model(received))

        # The second sum: p_k (tau_eff / a_k - 1) (w_k - w); in the shares' order, sorted by name.
        for site_name, share in shares.items():
            excess = share * _excess(replies, shares, site_name)
            # equal local work, FedAvg to the bit: adding 0 could turn a -0.0 into 0.0
            if not excess:
                continue

            trained = replies[site_name]["weights"]
            for name in names:
                weights[name].add_(trained[name] - received[name], alpha=excess)

        if not self.server_momentum:
            return {"weights": weights}

        velocity = {}
        for name, old in server["velocity"].items():
            velocity[name] = self.server_momentum * old + (weights[name] - received[name])
            weights[name] = received[name] + velocity[name]

        return {"weights": weights, "velocity": velocity}


def _excess(replies: Messages, shares: Mapping[str, float], site_name: str) -> float:
    """Return tau_eff / a_k - 1 of a site, exactly 0 where all a_k are the same."""
    scalars = {name: replies[name].scalars for name in shares}
    effective = scalars[site_name]["effective_steps"]
    if effective < _LEAST:
        raise RunError(
            f"site {site_name!r}: its reply says that its effective steps are {effective:g}, below {_LEAST:g}"
        )

    # tau_eff is the mean of K_k if replies have them, else of a_k. As the p_k sum to 1, tau_eff - a_k
    # is the mean of the differences, which is exactly 0 for equal ones.
    differences = []
    for name, share in shares.items():
        steps = scalars[name].get("steps", scalars[name]["effective_steps"])
        differences.append(share * (steps - effective))

    return sum(differences) / effective


METHOD = FedNova
