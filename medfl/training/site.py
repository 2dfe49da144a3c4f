"""A site and its local training: Site, Host, and `fit`, the one training loop.

A Site holds one site's private data; a Host, used by the server half of a method, never does. A method changes the
loss or the gradients of `fit`, never the loop.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from typing import Any

import torch
from monai.losses import FocalLoss
from torch import Tensor, nn
from torch.optim import Optimizer

from medfl.core import InputError, Message, RunError, Task, Tensors, Weights, stream
from medfl.data import AnnotatedClasses, Public, Shard, moved
from medfl.networks.deep_supervision import carried
from medfl.networks.heads import entering_head
from medfl.storage import State
from medfl.training.accelerate.compiled import NetworkCalls
from medfl.training.layers import one_sample_safe
from medfl.training.local_settings import LocalSettings, restore_state, saved_state, set_rates
from medfl.training.network_pool import Networks

Collated = Any
"""Inputs or targets of a batch: usually a tensor, but a bundle's data set may collate anything."""

Objective = Callable[..., Tensor]
"""(model, inputs, targets, *further values of the feed) -> scalar loss, mean over the batch."""

GradientHook = Callable[[Sequence[nn.Parameter]], None]
"""Called after backward and before the step with the trainable parameters, in `model.parameters()` order; edits
`.grad`."""

Feed = Callable[[Collated, Collated], tuple[Collated, ...]]
"""(inputs, targets) of a batch, on the device -> what the step trains on instead: (inputs, targets, *more), also on
the device. All of it is passed to the objective."""

Penalty = Callable[[Tensor, Collated], Tensor]
"""(features (B, d), targets) -> scalar, added to the loss of a step."""

LOSSES_OF_FINDINGS = (nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss, FocalLoss)
"""Losses of targets from 0 to 1."""

# for the scale of a step's float16 gradients: from 2^16 to below the smallest float16
_HALVINGS = 40


class _WithNetworks:
    networks: Networks

    @property
    def device(self) -> torch.device:
        """Where the networks live."""
        return self.networks.device

    def network(self) -> nn.Module:
        """Build the network anew (at a site its own architecture) with the run's initial weights."""
        return self.networks.fresh()

    def model(self, weights: Weights) -> nn.Module:
        """Return a network holding a copy of `weights`, valid until the step ends."""
        return self.networks.lease(weights)


@dataclass(frozen=True)
class Site(_WithNetworks):
    """One participant in one round: its data, loss, settings and networks.

    Attributes:
        name: the site's name.
        seed: seed of this site in this round; open `stream(site.seed, purpose)` for draws of your own.
        train, validate, test: the site's own items.
        loss: (network output, targets) -> scalar tensor, mean over the batch.
        settings: local training settings.
        networks: the worker's network pool.
        round: the round, from 1; 0 before the first.
        task: the bundle's problem: kind, classes, class texts.
        journal: what `fit` did in this step (its reports, in order); stays at the site.
        optimizer_states: of optimisers that persist between rounds, by `fit`'s name for each; None: all are new.
        penalty: added by `fit` to any method's loss; set by `replace` if a method shapes the features.
        common: the pool of the bundle's own network, even if this site's network is another.
        public: the run's public data, for the methods that use it.
        method: the run's method, used in messages.
        known: the structures annotated in its masks, to which its loss is restricted; None: all.
    """

    name: str
    seed: int
    train: Shard
    validate: Shard
    test: Shard
    loss: Callable[..., Tensor]
    settings: LocalSettings
    networks: Networks
    round: int = 0
    task: Task = Task()
    journal: list[FitReport] = field(default_factory=list)
    penalty: Penalty | None = None
    common: Networks | None = None
    public: Public | None = None
    method: str = ""
    optimizer_states: dict[str, State | None] | None = None
    known: AnnotatedClasses | None = None

    @property
    def still(self) -> Shard:
        """The training items without random transforms, for measurements on them rather than training."""
        return self.train.deterministic()

    @property
    def num_samples(self) -> int:
        """Number of training items, the FedAvg weight."""
        return len(self.train)

    @property
    def initial_weights(self) -> Weights:
        """The run's common initial weights."""
        return self.networks.initial

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return a new optimiser of a network's trainable parameters, with the learning rates of this round."""
        optimizer = self.settings.optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.settings.lr_factor
        return optimizer

    def learning_rate(self, model: nn.Module) -> float:
        """Return the learning rate of this round (of the first parameter group, averaged over the epochs)."""
        settings = self.settings
        first = float(self.optimizer(model).param_groups[0]["lr"])
        rates = settings.rates
        if rates is None and settings.epoch_factor == 1:
            return first

        epoch_rates = []
        for epoch in range(settings.epochs):
            rate = rates(epoch)[0] * settings.lr_factor if rates else first
            epoch_rates.append(rate * settings.epoch_factor**epoch)

        return sum(epoch_rates) / settings.epochs

    def reply(self, weights: Weights, **groups: Weights) -> Message:
        """Return trained weights in the form for FedAvg's server half: weighted by the site's number of items."""
        return Message({"weights": weights, **groups}, {"samples": self.num_samples})

    def for_epochs(self, epochs: int) -> Site:
        """Return the same site with another number of local epochs."""
        return replace(self, settings=replace(self.settings, epochs=epochs))


@dataclass(frozen=True)
class Host(_WithNetworks):
    """What the server half of a method may use; never private data.

    Attributes:
        seed: seed of the server in this round.
        networks: the worker's network pool.
        round: the round, from 1; 0 before the first.
        task: the bundle's problem: kind, classes, class texts.
        public: the run's public data, for the methods that use it.
    """

    seed: int
    networks: Networks
    round: int = 0
    task: Task = Task()
    public: Public | None = None


def copied(tensors: Weights) -> Tensors:
    """Return detached copies of tensors."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def snapshot(network: nn.Module) -> Tensors:
    """Copy a network's state dict (parameters and persistent buffers), detached from the network."""
    return copied(network.state_dict())


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name; a shared one once, as an optimiser has it."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def zeros_of(network: nn.Module) -> Tensors:
    """Return a zero tensor for each trainable parameter, under its name."""
    return {name: torch.zeros_like(p.detach()) for name, p in trainable(network).items()}


def merged(shared: Weights, personal: Weights) -> Tensors:
    """Merge the received and the personal tensors to complete weights; personal ones win."""
    return {**shared, **personal}


@dataclass(frozen=True)
class FitReport:
    """What one call of `fit` did.

    Attributes:
        steps: optimiser updates.
        loss: mean training loss over the steps (NaN if there was none).
        optimizer_state: the optimiser's state, only if requested.
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

    Every call opens the random stream (site, purpose): two calls with the same purpose see the same batches, dropout
    and random transforms.

    Args:
        model: network in training mode on the site's device.
        site: data, loss and settings.
        objective: the loss; default `site.loss(model(x), y)`.
        gradient_hook: edits gradients between backward and step (after unscaling with mixed precision).
        feed: replaces each batch before its step, or adds to it.
        purpose: name of the random stream.
        optimizer_state: state to continue from; `{}` requests the state without continuing. Default: a new optimiser
            that is discarded; if the site keeps optimisers, the state that the same call left in its last round.

    Raises:
        InputError: the bundle's trainer has its own training step, and this call needs more than another gradient.
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

    model.zero_grad()  # an optimiser of all parameters would update a frozen one by a leftover gradient
    optimizer = site.optimizer(model)
    # by its position among the site's calls: a method may train several networks in a visit
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

    # one stream per purpose: random draws of one call of `fit` do not shift those of another
    with stream(site.seed, purpose) as generator, calls.visit():
        for epoch in range(site.settings.epochs):
            # before the batches: the rate of the first step is already that of the epoch
            set_rates(optimizer, site.settings, epoch)
            epoch_start = len(losses)

            for x, y in site.train.batches(site.settings.batch_size, generator):
                batch: tuple[Collated, ...] = moved(x, site.device), moved(y, site.device)
                if feed is not None:
                    batch = feed(*batch)
                losses.append(step(*batch))

            check_finite(losses, epoch_start, site)

    # once: each `float` would make a GPU wait for its steps
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
    """Return the function that takes one step on a batch and returns its detached loss."""
    parameters = list(trainable(model).values())
    scaler = gradient_scaler(site)

    def step(x: Collated, y: Collated, *more: Collated) -> Tensor:
        # also those that the optimiser omits, since a hook may read them
        for parameter in parameters:
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
    """Return the combined report of several calls of `fit`: their steps, and the mean loss over these."""
    steps = sum(report.steps for report in reports)
    if not steps:
        return FitReport(0, float("nan"))

    # a call without steps has the loss NaN
    losses = sum(report.steps * report.loss for report in reports if report.steps)
    return FitReport(steps, losses / steps)


# Gradient hooks


def pull(model: nn.Module, anchor: Weights, strength: float) -> GradientHook:
    """Return a gradient hook that adds `strength * (w - anchor)`, the gradient of (strength/2) ||w - anchor||^2.

    Args:
        model: the network to be trained; only its trainable parameters are pulled.
        anchor: tensor name -> target of the pull; copied, so it may be the model's own parameters.
        strength: mu of FedProx, lambda of Ditto.
    """
    if strength == 0:
        return lambda parameters: None  # adding 0 would turn a gradient of -0.0 into 0.0

    # copies: the anchor may be the tensors of a network that is being trained
    anchors = [anchor[name].detach().clone() for name in trainable(model)]

    def hook(parameters: Sequence[nn.Parameter]) -> None:
        gradients = []
        values = []
        fixed = []
        for parameter, value in zip(parameters, anchors, strict=True):
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                values.append(parameter.detach())
                fixed.append(value)

        # a few launches on a GPU instead of two per parameter
        apart = torch._foreach_sub(values, fixed)
        torch._foreach_add_(gradients, apart, alpha=strength)

    return hook


def push(model: nn.Module, terms: Weights) -> GradientHook:
    """Return a gradient hook that adds constant tensors, the gradient of the linear term <terms, w> of a loss."""
    added = [terms[name] for name in trainable(model)]

    def hook(parameters: Sequence[nn.Parameter]) -> None:
        for parameter, term in zip(parameters, added, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(term)

    return hook


def clip(max_norm: float) -> GradientHook:
    """Return a gradient hook that clips the norm of all gradients together; 0 disables it."""

    def hook(parameters: Sequence[nn.Parameter]) -> None:
        if max_norm:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    return hook


def in_turn(*hooks: GradientHook) -> GradientHook:
    """Return the gradient hook that calls these one after another."""

    def hook(parameters: Sequence[nn.Parameter]) -> None:
        for edit in hooks:
            edit(parameters)

    return hook


# The loss of a step


def check_one_number(loss: object, site: Site) -> Tensor:
    """Return the loss of a step; raise InputError if a method's objective returned anything but one number."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    if isinstance(loss, Tensor):
        form = f"has the shape {tuple(loss.shape)}"
    else:
        form = f"is a {type(loss).__name__}"

    raise InputError(
        f"the loss of method {site.method!r} {form}",
        "a loss is one number, the mean over the batch",
        "take its mean()",
    )


def check_finite(losses: list[Tensor], start: int, site: Site) -> None:
    """Raise RunError if a loss from `start` on is not finite: once per epoch, so that no step stalls a GPU."""
    if len(losses) == start:
        return
    bad = (~torch.isfinite(torch.stack(losses[start:]))).nonzero()
    if len(bad):
        step = start + int(bad[0]) + 1
        raise RunError(
            f"site {site.name!r}, round {site.round}: the training loss is {float(losses[step - 1])} at step {step}; "
            "the last good round is kept; lower the learning rate or look at this site's data"
        )


def penalised(objective: Callable[..., Tensor], penalty: Penalty | None) -> Callable[..., Tensor]:
    """Add a penalty on the features to an objective: on the input of the head in its first pass."""
    if penalty is None:
        return objective

    def with_penalty(network: nn.Module, x: Collated, y: Collated, *more: Collated) -> Tensor:
        with entering_head(network) as features:
            loss = objective(network, x, y, *more)
        return loss + penalty(features[0], y)

    return with_penalty


_OF_KNOWN = "is_mean_of_known"


def mean_loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss of (prediction, target) reduced to its mean, as MONAI's trainer does.

    NaN in numerical targets, (B,) or (B, K), means unknown, and the mean is over the others; so does less than 0 where
    a loss is of findings. A loss that is already reduced, as in a bundle whose trainer reduces it for MONAI's own run,
    is unchanged.
    """
    if getattr(function, _OF_KNOWN, False):
        return function

    of_findings = isinstance(function, LOSSES_OF_FINDINGS) or getattr(
        function, "__name__", ""
    ).startswith("binary_cross_entropy")

    def loss(prediction: Collated, target: Collated) -> Tensor:
        prediction = carried(prediction)
        is_vector = isinstance(target, Tensor) and target.ndim <= 2 and target.is_floating_point()
        if is_vector and isinstance(prediction, Tensor) and prediction.numel() == target.numel():
            target = target.reshape(prediction.shape)
            is_known = target >= 0 if of_findings else ~target.isnan()
            if not is_known.all():
                return _mean_of_known(function, prediction, target, is_known)

        value = function(prediction, target)
        return value if value.ndim == 0 else value.mean()

    # wrapped twice, it would be the mean of a mean
    setattr(loss, _OF_KNOWN, True)
    return update_wrapper(loss, function, (), ())  # inspect.unwrap finds the loss itself


def _mean_of_known(
    function: Callable[..., Tensor], prediction: Tensor, target: Tensor, is_known: Tensor
) -> Tensor:
    """Return the mean of a loss over the known targets, 0 if there are none.

    Raises:
        InputError: the loss does not return a value per target.
    """
    values = None
    filled = target.masked_fill(~is_known, 0.0)
    # a copy, because the bundle's own module may be in use elsewhere
    if isinstance(function, nn.Module) and hasattr(function, "reduction"):
        elementwise = copy.copy(function)
        elementwise.reduction = "none"  # type: ignore[assignment]
        values = elementwise(prediction, filled)
    elif "reduction" in getattr(function, "__annotations__", {}):  # as in torch.nn.functional
        values = function(prediction, filled, reduction="none")

    if values is None or values.shape != target.shape:
        raise InputError(
            "targets of which some are unknown (NaN, or findings below 0)",
            "a loss with reduction='none', which gives a value for each of them",
            "take such a loss, as BCEWithLogitsLoss or L1Loss, or leave these images out",
        )

    # a product, not an index: an unknown target has the gradient 0, even if none is known
    mean: Tensor = (values * is_known).sum() / is_known.sum().clamp(min=1)
    return mean


# Mixed precision


def autocast(site: Site) -> AbstractContextManager[object]:
    """Return the mixed-precision context of the site's settings (float16 on CUDA, bfloat16 on CPU), or a null one."""
    if not site.settings.amp:
        return nullcontext()
    return torch.autocast(
        site.device.type, torch.float16 if site.device.type == "cuda" else torch.bfloat16
    )


def gradient_scaler(site: Site) -> torch.amp.GradScaler:
    """Return the scaler of float16 gradients; disabled if the site uses another precision."""
    return torch.amp.GradScaler("cuda", enabled=site.settings.amp and site.device.type == "cuda")


def backward(
    loss: Tensor,
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    site: Site,
) -> None:
    """Put finite gradients of the loss in `.grad`: if its scale is too large, half the scale is tried.

    So a hook never reads an infinite gradient, and every batch is trained on: a scaler alone skips such batches,
    which for a site with few batches may be all of them. A disabled scaler scales nothing.

    Raises:
        RunError: the gradients are not finite at any scale; names the site.
    """
    if not scaler.is_enabled():
        loss.backward()  # type: ignore[no-untyped-call]
        return

    stepped = set[int]()
    for group in optimizer.param_groups:
        stepped.update(map(id, group["params"]))

    # the scaler ignores these, but a hook may read them
    unscaled = [p for p in parameters if id(p) not in stepped]
    # no step is skipped, unlike with scalers: the number of steps is the same on every device
    for _ in range(_HALVINGS):
        scaler.scale(loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        for parameter in unscaled:
            if parameter.grad is not None:
                parameter.grad.div_(scaler.get_scale())

        scaler.update()
        norms = torch._foreach_norm(
            [p.grad for p in parameters if p.grad is not None], float("inf")
        )
        if torch.stack(norms).isfinite().all():
            return

        for parameter in parameters:
            parameter.grad = None

    raise RunError(
        f"site {site.name!r}, round {site.round}: gradients in float16 are not finite at any scale; "
        "the last good round is kept; run it without --amp, lower the learning rate or look at this site's data"
    )
