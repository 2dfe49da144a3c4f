"""A site's private model of any architecture and a proxy, which is sent, learn from each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from medfl.core import Config, Message, Weights
from medfl.methods._parts.extras import Bodies
from medfl.methods._parts.separate_randomness import SeparateRandomness
from medfl.methods.base import Collated, Method
from medfl.storage import State
from medfl.training import Site, evaluating, fit, snapshot, summed

PairLoss = Callable[[Tensor, Tensor, Collated], Tensor]
"""(output of the private model, output of the proxy, targets) -> loss of both."""

Turn = tuple[nn.Module, nn.Module, Config]
"""The network trained for an epoch, the network frozen meanwhile, and further keyword arguments of `fit`."""


@dataclass(frozen=True)
class PrivateModels(Bodies, Method):
    """Each site is scored with a private model, the State's group `private`, which never leaves the site."""

    judged = "personal"

    def keeps_network(self, config: Config) -> bool:
        """Keep the private model, whatever its network; a proxy is sent."""
        return True

    def init_site(self, site: Site) -> State:
        """Start the private model from the initial weights."""
        return {"private": snapshot(site.model(site.initial_weights))}

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the private model."""
        return site.model(state["private"])


def proxy_model(site: Site, weights: Weights) -> nn.Module:
    """Return a network of the bundle's architecture with these weights, even if the site's differs."""
    return (site.common or site.networks).lease(weights)


def train_together(
    site: Site, private: nn.Module, proxy: nn.Module, loss: PairLoss, purpose: str
) -> None:
    """Train both models on the same batches, in one step from the same forward passes.

    The private model's dropout is the same as if it were trained alone; the proxy draws its own from the stream
    `purpose`. `loss` returns the loss of both models and detaches what either of them treats as constant.
    """
    separate_randomness = SeparateRandomness(site, purpose)

    def objective(pair: nn.Module, x: Collated, y: Collated) -> Tensor:
        z = private(x)
        with separate_randomness():
            z_proxy = proxy(x)
        return loss(z, z_proxy, y)

    fit(nn.ModuleList([private, proxy]), optimizing_each(site), objective=objective)


def train_in_turns(site: Site, turns: Callable[[int], Iterable[Turn]]) -> None:
    """Train networks in turns of one local epoch; each optimiser keeps its state from turn to turn.

    Args:
        site: data and settings; its journal gets one report, of the first network.
        turns: epoch -> its turns, consumed one by one.
    """
    once = replace(site.for_epochs(1), journal=[])
    reports = []

    # those of the site itself, if the run keeps them between rounds
    memory = {} if site.optimizer_states is None else site.optimizer_states

    for epoch in range(site.settings.epochs):
        purpose = f"local {epoch}" if epoch else "local"
        for turn, (network, partner, settings) in enumerate(turns(epoch)):
            # the partner only predicts: its dropout and running statistics are unaffected
            with evaluating(partner):
                before = memory.get(f"turn {turn}") or {}
                report = fit(network, once, **settings, purpose=purpose, optimizer_state=before)

            memory[f"turn {turn}"] = report.optimizer_state or {}
            # The journal is only about the first network.
            if not turn:
                reports += [report]

    site.journal.append(summed(reports))


def optimizing_each(site: Site) -> Site:
    """Return the site with an optimiser for a list of networks: each keeps the parameter groups it would have alone."""

    def optimizer(networks: nn.Module) -> torch.optim.Optimizer:
        first, *rest = map(site.settings.optimizer, networks.children())
        for solver in rest:
            for group in solver.param_groups:
                # one optimiser updates both networks, so that `fit` only needs to handle one
                first.add_param_group(group)

        return first

    return replace(site, settings=replace(site.settings, optimizer=optimizer))
