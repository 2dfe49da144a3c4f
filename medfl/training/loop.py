"""fit: the one local training loop. A method changes its loss or its gradients, never the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from medfl.core.seeding import stream
from medfl.data.prepared import moved
from medfl.storage.files import State
from medfl.training.accelerate.compiled import NetworkCalls
from medfl.training.accelerate.precision import autocast, backward, gradient_scaler
from medfl.training.layers import one_sample_safe
from medfl.training.loss_checks import check_finite, check_one_number, penalised
from medfl.training.optimizer_state import restore_state, saved_state, set_rates
from medfl.training.site import Site

Objective = Callable[..., Tensor]
"""(model, inputs, targets, *more of the feed) -> scalar loss, mean over the batch."""

GradientHook = Callable[[Sequence[nn.Parameter]], None]
"""Called after backward and before the step with the trainable parameters, in `model.parameters()` order; edits
`.grad`."""

Feed = Callable[[Any, Any], tuple[Any, ...]]
"""(inputs, targets) of a batch, on the device -> what the step trains on in its place: (inputs, targets, *more), on the
device too. The objective gets it all."""


@dataclass(frozen=True)
class FitReport:
    """What one call of `fit` did.

    Attributes:
        steps: optimiser updates.
        loss: mean training loss over the steps (NaN if there was none).
        optimizer_state: the optimiser's state, only if it was asked for.
    """

    steps: int
    loss: float
    optimizer_state: State | None = None


def fit(
    model: nn.Module,
    site: Site,
    *,
    objective: Objective | None = None,
    gradient_hook: GradientHook | None = None,
    feed: Feed | None = None,
    purpose: str = "local",
    optimizer_state: State | None = None,
) -> FitReport:
    """Train `model` in place on the site's data for its local epochs.

    Every call opens the random stream (site, purpose): two calls with the same purpose see the same batches, the same
    dropout and the same random transforms.

    Args:
        model: network in training mode on the site's device.
        site: data, loss and settings.
        objective: the loss; default `site.loss(model(x), y)`.
        gradient_hook: edits gradients between backward and step (after unscaling with mixed precision).
        feed: changes each batch before its step, or adds to it.
        purpose: name of the random stream.
        optimizer_state: state to continue from; `{}` asks for the state without continuing. Default: a fresh
            optimiser, not kept; where the site keeps optimisers, the state that the same call left in its last round.

    Raises:
        InputError: the bundle's trainer takes its steps by itself, and this asks for more than another gradient.
        RunError: the loss became NaN or infinite, or the network cannot be compiled; names the site and the step.
    """
    trainer: Any = vars(model).get("custom_trainer")
    if trainer is not None:  # the bundle's trainer takes the steps
        continues = (
            optimizer_state is not None
            or site.optimizer_states is not None
            or site.settings.epoch_factor != 1
        )
        if objective or feed or site.penalty:
            changed = "the loss"
        elif continues:
            changed = "the optimiser"
        else:
            changed = ""

        report: FitReport = trainer.fit(site, purpose, gradient_hook, changed)
        return report

    model.zero_grad()  # an optimiser of all parameters would step a frozen one by a gradient left over from before
    optimizer = site.optimizer(model)
    visit_name = f"{purpose} {len(site.journal)}"
    states_of_visits = site.optimizer_states if optimizer_state is None else None

    if states_of_visits is not None:
        optimizer_state = states_of_visits.get(visit_name, {})

    if optimizer_state:
        restore_state(optimizer, optimizer_state)

    objective = penalised(objective or (lambda net, x, y: site.loss(net(x), y)), site.penalty)
    calls = NetworkCalls(model, site.settings.batch_size, site.device)
    step = training_step(model, site, optimizer, objective, gradient_hook, calls)
    losses: list[Tensor] = []

    with stream(site.seed, purpose) as generator, calls.visit():
        for epoch in range(site.settings.epochs):
            set_rates(optimizer, site.settings, epoch)
            epoch_start = len(losses)

            for x, y in site.train.batches(site.settings.batch_size, generator):
                batch: tuple[Any, ...] = moved(x, site.device), moved(y, site.device)
                if feed is not None:
                    batch = feed(*batch)
                losses.append(step(*batch))

            check_finite(losses, epoch_start, site)

    mean_loss = float(torch.stack(losses).mean()) if losses else float("nan")
    state = None if optimizer_state is None else saved_state(optimizer)
    if states_of_visits is not None:
        states_of_visits[visit_name] = state

    report = FitReport(len(losses), mean_loss, state)
    site.journal.append(report)
    return report


def training_step(
    model: nn.Module,
    site: Site,
    optimizer: Optimizer,
    objective: Objective,
    gradient_hook: GradientHook | None,
    calls: NetworkCalls,
) -> Callable[..., Tensor]:
    """Return the function that takes one step on a batch, and returns its loss, detached."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    scaler = gradient_scaler(site)

    def step(x: Any, y: Any, *more: Any) -> Tensor:
        for (
            parameter
        ) in parameters:  # also those that the optimiser leaves out, which a hook may read
            parameter.grad = None

        with calls.step(x):
            with one_sample_safe(model, x), autocast(site):
                loss = check_one_number(objective(model, x, y, *more), site)
            backward(loss, scaler, optimizer, parameters, site)

        if gradient_hook is not None:
            gradient_hook(parameters)

        optimizer.step()
        return loss.detach()

    return step


def summed(reports: Sequence[FitReport]) -> FitReport:
    """Return all that some calls of `fit` did together: their steps, and the mean loss over these."""
    steps = sum(report.steps for report in reports)
    if not steps:
        return FitReport(0, float("nan"))

    # a call without steps has the loss NaN
    losses = sum(report.steps * report.loss for report in reports if report.steps)
    return FitReport(steps, losses / steps)


# Gradient hooks


def pull(model: nn.Module, anchor: Mapping[str, Tensor], strength: float) -> GradientHook:
    """Return a gradient hook that adds `strength * (w - anchor)`, the gradient of (strength/2) ||w - anchor||^2.

    Args:
        model: the network to be trained; only its trainable parameters are pulled.
        anchor: tensor name -> where to pull; copied, so it may be the model's own parameters.
        strength: mu of FedProx, lambda of Ditto.
    """
    if strength == 0:
        return lambda parameters: None  # adding 0 would turn a gradient of -0.0 into 0.0

    anchors = [
        anchor[name].detach().clone() for name, p in model.named_parameters() if p.requires_grad
    ]

    def hook(parameters: Sequence[nn.Parameter]) -> None:
        pairs = [(p, a) for p, a in zip(parameters, anchors, strict=True) if p.grad is not None]
        apart = torch._foreach_sub([p.detach() for p, _ in pairs], [a for _, a in pairs])
        torch._foreach_add_([p.grad for p, _ in pairs if p.grad is not None], apart, alpha=strength)

    return hook


def push(model: nn.Module, terms: Mapping[str, Tensor]) -> GradientHook:
    """Return a gradient hook that adds constant tensors, the gradient of the linear term <terms, w> of a loss."""
    added = [terms[name] for name, p in model.named_parameters() if p.requires_grad]

    def hook(parameters: Sequence[nn.Parameter]) -> None:
        for parameter, term in zip(parameters, added, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(term)

    return hook


def clip(max_norm: float) -> GradientHook:
    """Return a gradient hook that clips the norm of all gradients together; 0 never clips."""

    def hook(parameters: Sequence[nn.Parameter]) -> None:
        if max_norm:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    return hook


def in_turn(*hooks: GradientHook) -> GradientHook:
    """Return the gradient hook that calls these one after the other."""

    def hook(parameters: Sequence[nn.Parameter]) -> None:
        for each in hooks:
            each(parameters)

    return hook
