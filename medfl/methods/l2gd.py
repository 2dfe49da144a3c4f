"""L2GD: "Federated Learning of a Mixture of Global and Local Models" (Hanzely, Richtarik 2020).

min (1/n) sum_i f_i(w_i) + (lambda/2n) sum_i ||w_i - m||^2, m the mean of the n sites' w_i. The paper tosses a coin, the
same for all sites: with probability 1 - p a local step of rate alpha / (n (1 - p)), with p an averaging step
w_i <- w_i + theta (m - w_i), theta = alpha lambda / (n p). Averaging steps leave m unchanged, so only a change from
local to averaging steps requires communication.

A round is one communication: the run's local epochs, then one averaging step; the run's learning rate is
alpha / (n (1 - p)), so lambda = theta p / ((1 - p) x rate). With `coin` = p > 0 the numbers of local iterations, of the
run's local epochs each, and of averaging steps are those between two such changes of the coin; with one batch and one
epoch that is the paper's algorithm. A site averages when it receives m, in the next round or when it is judged.
Departures. m is the plain mean over the round's participants (the paper has no cohorts). BatchNorm's buffers stay at
their site.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from medfl.core import InputError, Message, Messages, Weights, pick, stream
from medfl.methods.base import Method, option, uniform_shares, weighted_mean
from medfl.storage import State
from medfl.training import FitReport, Host, Site, copied, fit, snapshot


@dataclass(frozen=True)
class L2GD(Method):
    """Personal models that step towards their mean from time to time."""

    theta: float = option(
        0.1,
        "the averaging step: 0 is Local, 1 makes all models the mean (grid 0.1, 0.5)",
        minimum=0.0,
    )
    coin: float = option(
        0.0,
        "p of the paper's coin (grid 0.1, 0.5), below 1; 0: one local phase, one averaging step",
        minimum=0.0,
    )
    mix_buffers: bool = option(False, "average BatchNorm's buffers too, by the same step")

    paper = (
        "Federated Learning of a Mixture of Global and Local Models (Hanzely and Richtarik, 2020)"
    )
    judged = "personal"

    def __post_init__(self) -> None:
        """Refuse a step beyond the mean, and a coin that never selects a local step."""
        if self.theta > 1 or self.coin >= 1:
            raise InputError(
                f"theta={self.theta:g} and coin={self.coin:g} for method 'l2gd'",
                "theta is 0 to 1, coin at least 0 and below 1",
                "see medfl methods l2gd",
            )

    def personal_names(self, network: nn.Module) -> frozenset[str]:
        """Return the buffers."""
        parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
        # the paper's models have no running statistics, and those of others do not fit personal weights
        if self.mix_buffers:
            return frozenset()

        return frozenset(network.state_dict()) - parameters

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the common initial weights as the mean, which averaging steps leave unchanged."""
        return {**super().init_server(host, weights, introductions), "tosses": self.tosses(host)}

    def broadcast(self, host: Host, server: State, site_name: str) -> Message:
        """Send the mean, and the result of the coin."""
        return Message({"weights": server["weights"]}, server["tosses"])

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Take the plain mean and toss the coin."""
        return {
            "weights": weighted_mean(replies, "weights", uniform_shares(replies)),
            "tosses": self.tosses(host),
        }

    def tosses(self, host: Host) -> dict[str, int]:
        """Toss the coin, if any: count averaging steps until a local one, then local ones until the next change."""
        if not self.coin:
            return {}

        with stream(host.seed, "coin") as generator:
            averagings = _run(self.coin, generator)
            iterations = _run(1 - self.coin, generator)
            return {"averagings": averagings, "iterations": iterations}

    def global_predictor(self, host: Host, server: State) -> None:
        """Return None: the mean is not a result of this method."""
        return

    def init_site(self, site: Site) -> State:
        """Start w_i from the common initial weights."""
        return {"weights": copied(site.initial_weights)}

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Take the averaging steps towards the received mean, train, reply with w_i."""
        model = site.model(self._averaged(state, down))
        self.train(model, site, state, down)
        trained = snapshot(model)
        return {"weights": trained}, Message({"weights": pick(trained, down["weights"])})

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train for as many iterations as the coin says."""
        # a coin that says more, with probability exp(-36), is no coin: a server cannot have a site train for ever
        iterations = int(min(down.scalars.get("iterations", 1), 36 / (self.coin or 36)))
        return fit(model, site.for_epochs(site.settings.epochs * iterations))

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return w_i after the averaging steps."""
        return site.model(self._averaged(state, down))

    def _averaged(self, state: State, down: Message) -> Weights:
        """Return w_i + (1 - (1 - theta)^a) (m - w_i) after a averaging steps; counters are unchanged."""
        # A step leaves 1 - theta of the distance to m, and m unchanged.
        part = 1 - (1 - self.theta) ** int(down.scalars.get("averagings", 1))
        averaged = dict(state["weights"])
        for name, m in down["weights"].items():
            if part and m.is_floating_point():
                averaged[name] = torch.lerp(averaged[name], m.to(averaged[name].device), part)

        return averaged


def _run(again: float, generator: torch.Generator) -> int:
    """Count steps, at least one, while the next toss gives the same result, with this probability."""
    count = 1
    while torch.rand((), generator=generator) < again:
        count += 1
    return count


METHOD = L2GD
