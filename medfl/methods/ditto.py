"""Ditto: "Fair and Robust Federated Learning Through Personalization" (Li et al., ICML 2021).

The global w is FedAvg's. Each sampled site also keeps v_i, trained by v_i <- v_i - eta (g_i(v_i) + lambda (v_i -
w^t)) with w^t the received model before the local update. Both see the same batches, as in the reference code;
buffers are not pulled.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from medfl.core import Message
from medfl.methods.base import Method, option
from medfl.storage import State
from medfl.training import Site, copied, fit, pull, snapshot


@dataclass(frozen=True)
class Ditto(Method):
    """FedAvg plus a personal model at each site, pulled towards the global one."""

    lam: float = option(
        1.0,
        "lambda, strength of the pull towards the received model (paper: 0.1, 1, 2)",
        minimum=0.0,
    )

    paper = "Ditto: Fair and Robust Federated Learning Through Personalization (Li et al., 2021)"
    judged = "personal"

    def init_site(self, site: Site) -> State:
        """Start v_i from the common initial weights."""
        return {"personal": copied(site.initial_weights)}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train the copy of the global model as FedAvg does, then v_i."""
        # first the global half: its random draws are then those of FedAvg, whose model it trains
        _, reply = super().local_update(site, {}, down)
        personal = site.model(state["personal"])
        # v_i <- v_i - eta (g_i(v_i) + lambda (v_i - w^t))
        fit(personal, site, gradient_hook=pull(personal, down["weights"], self.lam))
        return {"personal": snapshot(personal)}, reply

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return v_i."""
        return site.model(state["personal"])


METHOD = Ditto
