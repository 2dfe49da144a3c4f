"""Per-FedAvg: federated model-agnostic meta-learning (Fallah, Mokhtari, Ozdaglar, NeurIPS 2020).

"Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach".

min_w (1/N) sum_i f_i(w - alpha grad f_i(w)): a model from which one step on a site's data leads far.

Site:    with g(w; D) the gradient on a batch, and three independent batches D, D', D'' a step,
         (1) w+ = w - alpha g(w; D);  (2) v = g(w+; D');
         (3) first order: d = v;  Hessian-free: d = v - alpha [g(w + delta v; D'') - g(w - delta v; D'')] / (2 delta);
         (4) w <- w - beta d, from w and not from w+.
Server:  the participants' plain mean.
Result:  a site is judged by w after a few steps (1) on batches of its training data.

One step on one batch is a noisy evaluation: over ten rounds with sites of two classes it varies by 20 points and more
from round to round. `adapted=own` judges the model that the site trained itself, `finetune_steps` uses more batches.
A public library (PFLlib) has alpha = beta, both the learning rate, pairs D with D' within an epoch, and trains twice:
on sites of two classes that second pass has the largest effect (the method's page in docs/methods).

D' are the batches of the local epochs and (4) is the run's optimiser, so that beta is its learning rate (public code:
0.001) and alpha = 0 is FedAvg. alpha belongs to the objective: it does not decay over the rounds. The passes of (1) and
those of the brackets leave BatchNorm's buffers unchanged, also when a site is judged. They use full precision even in a
run with mixed precision; the two of the brackets see the same dropout and transforms, otherwise they would differ by
noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from medfl.core import Message, stream
from medfl.data import Batch
from medfl.methods._parts.separate_randomness import SeparateRandomness
from medfl.methods.base import MEANS, Collated, Method, one_of, option
from medfl.storage import State
from medfl.training import FitReport, Site, fit, one_sample_safe, trainable


@dataclass(frozen=True)
class PerFedAvg(Method):
    """FedAvg of a model that is made to be adapted: each site takes a few steps from it before it is used."""

    alpha: float = option(
        0.01, "rate of the inner step and the adaptation (public code: 0.005 to 0.03)", minimum=0.0
    )
    order: str = one_of(
        "second derivatives: none, or by finite differences", "first", "hessian_free"
    )
    delta: float = option(
        1e-3, "step of the finite difference of hessian_free, above 0", minimum=1e-9
    )
    adapted: str = one_of(
        "what a site adapts: the newest global model (paper), or its own after local training",
        "global",
        "own",
    )
    finetune_steps: int = option(
        1, "steps of rate alpha on a training batch before a site is judged", minimum=0
    )
    weights: str = one_of("mean over participants: 1/S (paper), or by samples", *MEANS)

    paper = (
        "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach "
        "(Fallah et al., 2020)"
    )
    judged = "personal"

    def local_update(self, site: Site, state: State, down: Message) -> tuple[State, Message]:
        """Train as `train` does; keep the model if that is what is adapted."""
        state, reply = super().local_update(site, state, down)
        if self.adapted == "own":
            return {"own": dict(reply["weights"])}, reply

        return state, reply

    def train(self, model: nn.Module, site: Site, state: State, down: Message) -> FitReport:
        """Train with the gradient after a step: the loss is taken at w+, the optimiser steps from w."""
        if self.alpha == 0:
            return fit(model, site)

        start = [p.detach().clone() for p in _trainable(model)]
        names = ("inner", "hessian") if self.order == "hessian_free" else ("inner",)
        randomness = SeparateRandomness(site, "inner", 1)
        twice = SeparateRandomness(site, "hessian", 1, each=2)
        steps = count(1)
        last = list[Collated]()

        def with_draws(x: Collated, y: Collated) -> tuple[Collated, ...]:
            step = next(steps)
            drawn = list[Collated]()
            for name in names:
                with stream(site.seed, name, step) as generator:
                    drawn += draw(site, generator)

            return x, y, *drawn

        def after_a_step(
            network: nn.Module,
            x: Collated,
            y: Collated,
            x_inner: Collated,
            y_inner: Collated,
            *for_hessian: Collated,
        ) -> Tensor:
            # `start` is w; the network moves to w+, where loss and gradient are computed.
            torch._foreach_copy_(start, [p.detach() for p in _trainable(network)])
            last[:] = for_hessian
            with randomness():
                inner_step(network, site, (x_inner, y_inner), self.alpha)  # (1)

            return site.loss(network(x), y)

        def back(parameters: Sequence[nn.Parameter]) -> None:
            with torch.no_grad():
                # Back to w before the optimiser's step: (4) steps from w with the gradient at w+.
                torch._foreach_copy_(list(parameters), start)
            if self.order == "hessian_free":
                v = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
                # The brackets of (3), on the batch D'' of this step.
                product = hessian_product(model, site, v, self.delta, (last[0], last[1]), twice)
                for parameter, bent in zip(parameters, product, strict=True):
                    if parameter.grad is not None:
                        parameter.grad.sub_(bent, alpha=self.alpha)  # (3)

        return fit(model, site, objective=after_a_step, gradient_hook=back, feed=with_draws)

    def predictor(self, site: Site, state: State, down: Message) -> nn.Module:
        """Return w, or the site's own, adapted to its training data."""
        model = site.model(state.get("own", down["weights"]))
        for step in range(self.finetune_steps if site.num_samples else 0):
            with stream(site.seed, "finetune", step) as generator:
                inner_step(model, site, draw(site, generator), self.alpha)
        return model


def draw(site: Site, generator: torch.Generator) -> Batch:
    """Return a batch of the site's training items, drawn without replacement."""
    size = site.settings.batch_size
    chosen = site.train.indices[torch.randperm(site.num_samples, generator=generator)[:size]]
    x, y = next(site.train.prepared.batches(chosen, size, generator))
    return x.to(site.device), y.to(site.device)


def gradient(network: nn.Module, site: Site, batch: Batch) -> tuple[Tensor, ...]:
    """Return the gradient of the site's loss by each trainable parameter, in full precision; buffers stay."""
    x, y = batch
    buffers = [(buffer, buffer.clone()) for buffer in network.buffers()]
    with one_sample_safe(network, x), torch.autocast(site.device.type, enabled=False):
        loss = site.loss(network(x), y)
        gradients = torch.autograd.grad(
            loss, _trainable(network), allow_unused=True, materialize_grads=True
        )

    # running statistics see each batch once, in the outer pass
    for buffer, value in buffers:
        buffer.copy_(value)

    return gradients


def inner_step(network: nn.Module, site: Site, batch: Batch, alpha: float) -> None:
    """Take a step of plain descent, w <- w - alpha g(w; D), in place."""
    gradients = gradient(network, site, batch)
    with torch.no_grad():
        torch._foreach_sub_(_trainable(network), gradients, alpha=alpha)


def hessian_product(
    network: nn.Module,
    site: Site,
    v: Sequence[Tensor],
    delta: float,
    batch: Batch,
    randomness: SeparateRandomness,
) -> list[Tensor]:
    """Return [g(w + delta v; D'') - g(w - delta v; D'')] / (2 delta), near the Hessian times v.

    Args:
        network: holds w, also afterwards.
        site: the loss.
        v: one tensor per trainable parameter.
        delta: above 0.
        batch: D''.
        randomness: gives both gradients the same dropout.
    """
    parameters = _trainable(network)
    start = [p.detach().clone() for p in parameters]
    gradients = []
    for sign in (delta, -delta):
        with torch.no_grad():
            torch._foreach_copy_(parameters, torch._foreach_add(start, list(v), alpha=sign))
        with randomness():
            gradients.append(gradient(network, site, batch))

    with torch.no_grad():
        torch._foreach_copy_(parameters, start)

    return [(plus - minus) / (2 * delta) for plus, minus in zip(*gradients, strict=True)]


def _trainable(network: nn.Module) -> list[Tensor]:
    return [*trainable(network).values()]


METHOD = PerFedAvg
