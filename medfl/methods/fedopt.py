"""FedOpt: "Adaptive Federated Optimization" (Reddi et al., ICLR 2021, Alg. 2): an optimiser at the server.

Server:  D = sum_k p_k w_k - w, the pseudo-gradient, p_k by samples; every operation by coordinate
sgd:     m <- b1 m + D,               w <- w + eta m          (FedAvgM with b1 0.9; FedAvg with b1 0 and eta 1)
others:  m <- b1 m + (1 - b1) D,      w <- w + eta m / (sqrt(v) + tau)
         adagrad: v <- v + D^2;  adam: v <- b2 v + (1 - b2) D^2;  yogi: v <- v - (1 - b2) D^2 sign(v - D^2)
m = 0 and v = tau^2 before round 1; there is no correction of m and v for that.

Departures. p_k are by samples, as in FedAvg; Alg. 2 has 1/|S|. Only trained parameters are moved: floating buffers
are averaged and integers take their maximum, since an optimiser could make a variance negative. The paper
searches eta for each task; the defaults of 1 for sgd (FedAvg's) and 0.01 for the others are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from medfl.core import Messages, Weights
from medfl.methods.base import (
    Method,
    option,
    sample_shares,
    step_towards,
    trained_names,
    weighted_mean,
)
from medfl.storage import State
from medfl.training import Host

# v of the server's step, from the last v and the squared change
_SQUARES: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "adagrad": lambda v, d2, _: v + d2,
    "adam": lambda v, d2, b2: b2 * v + (1 - b2) * d2,
    "yogi": lambda v, d2, b2: v - (1 - b2) * d2 * torch.sign(v - d2),
}


@dataclass(frozen=True)
class FedOpt(Method):
    """Treat the mean change of the sites as a gradient, and let an optimiser at the server take the step."""

    optimizer: str = option(
        "adam", "the server's: FedAvgM, FedAdam, ...", choices=("sgd", "adam", "yogi", "adagrad")
    )
    server_lr: float | None = option(
        None, "eta, its learning rate; unset: 1 of sgd, 0.01 of the others", minimum=0.0
    )
    momentum: float | None = option(
        None, "beta1; unset: 0.9, of adagrad 0 (paper)", minimum=0.0, maximum=1.0
    )
    beta2: float = option(0.99, "of adam and yogi (paper)", minimum=0.0, maximum=1.0)
    tau: float = option(1e-3, "least denominator of adam, yogi and adagrad (paper)", minimum=1e-12)

    paper = "Adaptive Federated Optimization (Reddi et al., ICLR 2021)"

    @property
    def _rate(self) -> float:
        if self.server_lr is not None:
            return self.server_lr
        if self.optimizer == "sgd":
            return 1.0

        return 0.01

    @property
    def _beta1(self) -> float:
        if self.momentum is not None:
            return self.momentum
        if self.optimizer == "adagrad":
            return 0.0

        return 0.9

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial weights with m = 0 and v = tau^2."""
        server = super().init_server(host, weights, introductions)
        names = trained_names(host.model(weights))
        zeros = {name: torch.zeros_like(weights[name]) for name in names}
        if self.optimizer == "sgd":
            return {**server, "m": zeros} if self._beta1 else server
        return {
            **server,
            "m": zeros,
            "v": {name: torch.full_like(z, self.tau**2) for name, z in zeros.items()},
        }

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Take the optimiser's step along the mean change; buffers are averaged."""
        old = server["weights"]
        mean = weighted_mean(replies, "weights", sample_shares(replies))
        names = trained_names(host.model(old))
        rate = self._rate
        beta1 = self._beta1

        # plain server SGD needs no moments, and with rate 1 is FedAvg to the bit
        if self.optimizer == "sgd" and not beta1:
            return {**server, "weights": step_towards(old, mean, rate, names)}

        weights = dict(mean)
        m = {}
        v = {}
        # momentum of SGD adds the whole pseudo-gradient, as in FedAvgM; the others' is a running mean
        new = 1.0 if self.optimizer == "sgd" else 1 - beta1
        for name in names:
            d = mean[name] - old[name]  # D, the pseudo-gradient
            m[name] = beta1 * server["m"][name] + new * d
            if self.optimizer == "sgd":
                weights[name] = old[name] + rate * m[name]
                continue

            v[name] = _SQUARES[self.optimizer](server["v"][name], d * d, self.beta2)
            weights[name] = old[name] + rate * m[name] / (v[name].sqrt() + self.tau)

        after = {**server, "weights": weights, "m": m}
        return {**after, "v": v} if v else after


METHOD = FedOpt
