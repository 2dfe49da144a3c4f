"""pFedBayes: "Personalized Federated Learning via Variational Bayesian Inference" (Zhang et al., ICML 2022).

Every weight is a Gaussian N(mu, sigma^2), sigma = log(1 + e^rho); q_i is a site's distribution, w the global one.

Site:    w_i = w; for each batch
         (1) K times, with W = mu + sigma eps, eps ~ N(0, 1), drawn anew:
             q_i <- a step on NLL(W) + (zeta / n_i) KL(q_i || w_i), the NLL a mean over the batch;
         (2) w_i <- a step on (zeta / n_i) KL(q_i || w_i), q_i fixed.
Server:  (mu, rho) <- (1 - beta) (mu, rho) + beta times the participants' plain mean of those of w_i.
Result:  a site is judged by the mean of its q_i, or by the mean probability of some draws; before its first
         participation by the mean of w.

(1) and (2) are the bound E NLL(D_i) + zeta KL of the paper divided by n_i; with one local epoch the public code's
sum over the batch and zeta / R are the same bound. q_i starts as the first received w and stays at the site.
Both steps use Adam as in the public code, at the run's learning rate (there 0.001): a KL gradient is of the order
1 / sigma^2, too steep for plain descent at usual rates (`optimizer=run`). rho has no weight decay, w_i none at all.
Weights and biases of all layers are Gaussian except those of normalisation layers, which have values: q_i its own,
trained with it, w the participants' mean of them, not mixed by beta; likewise running statistics.
Departures. mu_0 is the network's own initialisation, not N(0, 0.1^2). eps has the deviation 1 of the paper; the public
code draws it with 0.001.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import softplus
from torch.optim import Optimizer

from medfl.core.errors import InputError
from medfl.core.mappings import without
from medfl.core.message import Message, Messages, Tensors, Weights
from medfl.core.seeding import stream
from medfl.methods._parts.repeated_batches import repeating
from medfl.methods.base import (
    MEANS,
    Collated,
    Group,
    Method,
    mean_shares,
    option,
    step_towards,
    trained_names,
    weighted_mean,
)
from medfl.storage.files import State
from medfl.training import NORMS, Host, Site, fit, snapshot, split_names, trainable

Moments = tuple[Sequence[Tensor], Sequence[Tensor]]
"""mu and sigma of each Gaussian tensor."""


@dataclass(frozen=True)
class PFedBayes(Method):
    """A distribution of weights at each site, held near a common one that follows all of them."""

    zeta: float = option(
        10.0, "zeta, weight of the divergence from w (public code: 10)", minimum=0.0
    )
    rho: float = option(
        -3.0, "first rho of all weights: sigma 0.049 (public code; reported: -2.5, sigma 0.079)"
    )
    inner_steps: int = option(5, "K, steps on q_i a batch (public code: 5)", minimum=1)
    beta: float = option(1.0, "the server's step towards the sites' mean", minimum=0.0)
    draws: int = option(
        0,
        "judge by the mean probability of this many draws (10), 0: by the mean weights",
        minimum=0,
    )
    optimizer: str = option(
        "adam", "Adam at the run's learning rate, or the run's optimiser", choices=("adam", "run")
    )
    weights: str = option(
        "uniform", "mean over participants: 1/S (paper), or by samples", choices=MEANS
    )

    paper = (
        "Personalized Federated Learning via Variational Bayesian Inference (Zhang et al., 2022)"
    )
    judged = "personal"

    def groups(self) -> tuple[Group, ...]:
        """Declare the deviations, both ways."""
        return (Group("rho", like_weights=True),)

    def check(self, site: Site) -> None:
        """Refuse draws if there are no probabilities.

        Raises:
            InputError: the task is of another kind.
        """
        if self.draws and site.task.kind == "other":
            raise InputError(
                f"draws={self.draws} for method 'pfedbayes' on a task without classes",
                "draws give the mean of class probabilities",
                "leave draws out",
            )

    # Server half

    def init_server(self, host: Host, weights: Weights, introductions: Messages) -> State:
        """Start from the initial weights as mu, and one rho for all."""
        names = gaussian_names(host.model(weights))
        rho = {name: torch.full_like(weights[name], self.rho) for name in names}
        return {"weights": dict(weights), "rho": rho}

    def aggregate(self, host: Host, server: State, replies: Messages, num_sites: int) -> State:
        """Move mu and rho by beta towards their means."""
        shares = mean_shares(self.weights, replies)
        network = host.model(server["weights"])
        # Normalisation layers are not Gaussian: they take the mean, whatever beta is.
        gaussian = set(trained_names(network)) - split_names(network, NORMS)
        mu = weighted_mean(replies, "weights", shares)
        rho = weighted_mean(replies, "rho", shares)
        return {
            "weights": step_towards(server["weights"], mu, self.beta, gaussian),
            "rho": step_towards(server["rho"], rho, self.beta, server["rho"].keys()),
        }

    # Site half

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train q_i on each batch, and let w_i follow it; keep q_i, reply with w_i."""
        # zeta / n_i
        scale = self.zeta / max(1, site.num_samples)
        taken = 0
        with stream(site.seed, "weights") as noise:
            q = Gaussian(
                site.model(state.get("personal", down["weights"])),
                state.get("rho", down["rho"]),
                noise,
            )
            w = Gaussian(site.model(down["weights"]), down["rho"], noise)
            build = self._builder(site)
            follower = build(w)

            for group in follower.param_groups:
                # `fit` decays only the rate of its own optimiser.
                group |= {"lr": group["lr"] * site.settings.lr_factor, "weight_decay": 0.0}

            def follow() -> None:
                follower.zero_grad()
                (scale * divergence(fixed(q), w.moments())).backward()  # type: ignore[no-untyped-call]
                follower.step()  # (2)

            def bound(model: nn.Module, x: Collated, y: Collated) -> Tensor:
                nonlocal taken
                # q_i has had K steps on the last batch.
                if scale and taken and taken % self.inner_steps == 0:
                    follow()

                taken += 1
                loss = site.loss(model(x), y)
                if scale:
                    return loss + scale * divergence(q.moments(), fixed(w))  # (1)

                return loss

            changed = replace(site, settings=replace(site.settings, optimizer=build))
            fit(q, repeating(changed, self.inner_steps), objective=bound)
            if scale and taken:
                follow()

        after = {"personal": snapshot(q.network), "rho": q.rhos()}
        # The reply is w_i: its mu, with q_i's normalisation layers and running statistics around it.
        with torch.no_grad():
            torch._foreach_copy_(q.mu, w.mu)

        return after, site.reply(snapshot(q.network), rho=w.rhos())

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return the network of the mean weights, or of some draws."""
        network = site.model(state.get("personal", down["weights"]))
        if not self.draws:
            return network
        with stream(site.seed, "draws") as noise, torch.no_grad():
            q = Gaussian(network, state.get("rho", down["rho"]), noise)
            return Averaged(network, [q.drawn() for _ in range(self.draws)])

    def _builder(self, site: Site) -> Callable[[nn.Module], Optimizer]:
        """Return a builder of an optimiser for mu, rho and everything with a value."""

        def build(model: nn.Module) -> Optimizer:
            assert isinstance(model, Gaussian)
            solver = site.settings.optimizer(model.network)
            if self.optimizer == "adam":
                chosen = trainable(model.network).values()
                solver = torch.optim.Adam(chosen, solver.param_groups[0]["lr"])

            # rho is trained at the rate of mu, without weight decay, which would pull sigma to log 2.
            solver.add_param_group(
                {**solver.param_groups[0], "params": list(model.rho), "weight_decay": 0.0}
            )
            return solver

        return build


class Gaussian(nn.Module):
    """A network whose weights are drawn in every forward pass, W = mu + log(1 + e^rho) eps.

    Args:
        network: its parameters with these names are mu, all others are values.
        rho: name -> rho, for the Gaussian ones.
        noise: draws eps.
    """

    def __init__(self, network: nn.Module, rho: Weights, noise: torch.Generator) -> None:
        super().__init__()
        parameters = dict(network.named_parameters())
        self.network = network
        self.names = sorted(rho)
        self.noise = noise
        self.places = _places(network, self.names)
        self.mu: list[Tensor] = [parameters[name] for name in self.names]
        self.rho = nn.ParameterList(
            rho[name].to(parameters[name].device, copy=True) for name in self.names
        )

    def moments(self) -> Moments:
        """Return mu and sigma."""
        return self.mu, list(map(softplus, self.rho))

    def rhos(self) -> Tensors:
        """Return a copy of rho by name."""
        copies = {}
        for name, rho in zip(self.names, self.rho, strict=True):
            copies[name] = rho.detach().clone()
        return copies

    def drawn(self) -> Tensors:
        """Draw weights; the noise is drawn on the CPU, so that it is the same on every device."""
        out = {}
        for name, mu, sigma in zip(self.names, *self.moments(), strict=True):
            eps = torch.randn(mu.shape, generator=self.noise, dtype=mu.dtype)
            out[name] = mu + sigma * eps.to(mu.device, non_blocking=True)
        return out

    def forward(self, x: Tensor) -> Collated:
        """Run the network with weights drawn for this pass."""
        drawn = self.drawn()
        weights = {place: drawn[name] for place, name in self.places.items()}

        # of a layer with several names PyTorch restores the tied weights wrongly
        return functional_call(self.network, weights, (x,), tie_weights=False)


class Averaged(nn.Module):
    """The mean probability of several drawn networks, as the logarithm, or for a single output as the logit.

    Args:
        network: gives logits (B, K, ...) of a softmax, or (B, 1, ...) of a sigmoid.
        draws: weights by name, for each drawn network; everything else is the network's.
    """

    def __init__(self, network: nn.Module, draws: Sequence[Weights]) -> None:
        """Hold the network, and a copy of it for each draw; weights that are substituted on call cannot be recorded."""
        super().__init__()
        self.network = network
        # A tuple, so that the copies are not part of the state dict.
        self.drawn = tuple(deepcopy(network).requires_grad_(False).eval() for _ in draws)
        for drawn_network, draw in zip(self.drawn, draws, strict=True):
            drawn_network.zero_grad()
            drawn_network.load_state_dict(dict(draw), strict=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities (B, K, ...), or the logit (B, 1, ...)."""
        outputs = [network(x).float() for network in self.drawn]
        single = outputs[0].shape[1] == 1  # the logit of class 1, beside one of 0
        if single:
            outputs = [torch.cat([torch.zeros_like(z), z], 1) for z in outputs]

        first, *rest = (z.log_softmax(1) for z in outputs)
        total: Tensor = first
        for part in rest:
            total = torch.logaddexp(total, part)

        if single:
            return total[:, 1:] - total[:, :1]

        return total - math.log(len(self.drawn))


def _places(network: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return the name of each parameter of each layer, once -> its name among these, which a tied one shares."""
    name_of = {id(network.get_parameter(name)): name for name in names}
    places = {}
    for prefix, layer in network.named_modules():
        for place, parameter in layer.named_parameters(prefix, recurse=False):
            if id(parameter) in name_of:
                places[place] = name_of[id(parameter)]

    return places


def gaussian_names(network: nn.Module) -> list[str]:
    """Return the names of the parameters that are Gaussian: the trainable ones outside of normalisation layers."""
    return list(without(trainable(network), split_names(network, NORMS)))


def fixed(distribution: Gaussian) -> Moments:
    """Return mu and sigma without gradients."""
    mu, sigma = distribution.moments()
    return [value.detach() for value in mu], [value.detach() for value in sigma]


def divergence(q: Moments, w: Moments) -> Tensor:
    """Return KL(q || w) = sum of log(sigma_w / sigma_q) + (sigma_q^2 + (mu_q - mu_w)^2) / (2 sigma_w^2) - 1/2."""
    parts = []
    for mu_q, sigma_q, mu_w, sigma_w in zip(*q, *w, strict=True):
        square = (sigma_q**2 + (mu_q - mu_w) ** 2) / (2 * sigma_w**2)
        parts.append(((sigma_w / sigma_q).log() + square - 0.5).sum())

    return torch.stack(parts).sum()


METHOD = PFedBayes
