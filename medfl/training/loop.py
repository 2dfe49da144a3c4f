"""fit: the one local training loop. A method changes its loss or its gradients, never the loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfl.core.errors import InputError, RunError
from medfl.core.seeding import stream
from medfl.core.storage import State
from medfl.networks.heads import entering_head
from medfl.training.accelerate.capture import Steps
from medfl.training.accelerate.cuda_graphs import by_tensors
from medfl.training.site import Penalty, Site

Objective = Callable[..., Tensor]
"""(model, inputs, targets, *more of the feed) -> scalar loss, mean over the batch."""

GradientHook = Callable[[Sequence[nn.Parameter]], None]
"""Called after backward and before the step with the trainable parameters, in `model.parameters()` order; edits
`.grad`."""


Feed = Callable[[Any, Any], tuple[Any, ...]]
"""(inputs, targets) of a batch, on the device -> what the step trains on in its place: (inputs, targets, *more), on the
device too. The objective gets it all."""


_SCALES = 40
"""How often a step halves the scale of its float16 gradients: from 2^16 to below the smallest float16."""


@dataclass(frozen=True)
class FitReport:
    """What one call of `fit` did.

    Attributes:
        steps: optimiser updates.
        loss: mean training loss over the steps (NaN if there was none).
        optimizer_state: the optimiser's state, only if it was asked for.
        replayed: updates that were replays of a captured step (`medfl.training.accelerate.capture`).
        eager: why none could be, "" where some were, or where nobody asked for it.
    """

    steps: int
    loss: float
    optimizer_state: State | None = None
    replayed: int = 0
    eager: str = ""


def summed(reports: Sequence[FitReport]) -> FitReport:
    """Return all that some calls of `fit` did together: their steps, and the mean loss over these."""
    steps = sum(report.steps for report in reports)
    losses = sum(report.steps * report.loss for report in reports if report.steps)  # of none it is NaN
    return FitReport(
        steps,
        losses / steps if steps else float("nan"),
        replayed=sum(report.replayed for report in reports),
        eager=next((report.eager for report in reports if report.eager), ""),
    )


def fit(
    model: nn.Module,
    site: Site,
    *,
    objective: Objective | None = None,
    gradient_hook: GradientHook | None = None,
    feed: Feed | None = None,
    purpose: str = "local",
    optimizer_state: State | None = None,
    epoch_factor: float = 1.0,
) -> FitReport:
    """Train `model` in place on the site's data for its local epochs.

    Every call opens the random stream (site, purpose): two calls with the same purpose see the same batches, the same
    dropout and the same random transforms.

    Args:
        model: network in training mode on the site's device.
        site: data, loss and settings.
        objective: the loss; default `site.loss(model(x), y)`.
        gradient_hook: edits gradients between backward and step (after unscaling with mixed precision).
        feed: changes each batch before its step, or adds to it; what draws by itself belongs here, for a captured step
            cannot.
        purpose: name of the random stream.
        optimizer_state: state to continue from; `{}` asks for the state without continuing. Default: a fresh
            optimiser, not kept.
        epoch_factor: multiplies every learning rate after each local epoch.

    Raises:
        RunError: the loss became NaN or infinite; names the site and the step.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.zero_grad()  # an optimiser of all parameters would step a frozen one by a gradient left over from before
    optimizer = site.settings.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * site.settings.lr_factor
    objective = penalised(objective or (lambda net, x, y: site.loss(net(x), y)), site.penalty)
    scaler = _scaler(site)

    def step(x: Any, y: Any, *more: Any) -> Tensor:
        for parameter in parameters:  # also those that the optimiser leaves out, which a hook may read
            parameter.grad = None
        with one_sample_safe(model, x), autocast(site):
            loss = _one_number(objective(model, x, y, *more), site)
        if scaler.is_enabled():
            _scaled_backward(loss, scaler, optimizer, parameters, site)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
        if gradient_hook is not None:
            gradient_hook(parameters)
        with by_tensors(optimizer):
            optimizer.step()
        return loss.detach()

    settings = site.settings
    alike = settings.epochs * max(1, len(site.train) // settings.batch_size)
    obstacle = _obstacle(site, scaler, epoch_factor)
    steps = Steps(step, optimizer, site.device, alike, obstacle, settings.lr_decay != 1)
    if optimizer_state:
        _restore(optimizer, optimizer_state)
    losses: list[Tensor] = []
    with stream(site.seed, purpose) as generator:
        for _ in range(settings.epochs):
            done = len(losses)
            for x, y in site.train.batches(settings.batch_size, generator):
                batch = _to(x, site.device), _to(y, site.device)
                if feed is not None:
                    steps.flush()  # it may change what these look at
                losses.append(steps(*(feed(*batch) if feed else batch)))
            steps.flush()
            _check_finite(losses, done, site)
            for group in optimizer.param_groups if epoch_factor != 1 else ():
                group["lr"] = group["lr"] * epoch_factor
        steps.finish()
    mean = float(torch.stack(losses).mean()) if losses else float("nan")
    kept = None if optimizer_state is None else _captured(optimizer)
    report = FitReport(len(losses), mean, kept, steps.replayed, steps.eager)
    site.journal.append(report)
    return report


def _one_number(loss: Any, site: Site) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    told = f"has the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is a {type(loss).__name__}"
    raise InputError(
        f"the loss of method {site.method!r} {told}", "a loss is one number, the mean over the batch", "take its mean()"
    )


def _scaler(site: Site) -> torch.amp.GradScaler:
    """Return what scales float16 gradients; disabled where the site computes with another precision."""
    return torch.amp.GradScaler("cuda", enabled=site.settings.amp and site.device.type == "cuda")


def _scaled_backward(
    loss: Tensor,
    scaler: torch.amp.GradScaler,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    site: Site,
) -> None:
    """Leave finite gradients of the loss in `.grad`: where its scale is too large, half the scale is tried.

    So a hook never reads an infinite gradient, and every batch is trained on: a scaler alone leaves such batches out,
    which for a site of few batches are all of them.

    Raises:
        RunError: the gradients are not finite at any scale; names the site.
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [p for p in parameters if id(p) not in stepped]  # the scaler leaves them, a hook may read them
    for _ in range(_SCALES):
        scaler.scale(loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        for gradient in (p.grad for p in others if p.grad is not None):
            gradient.div_(scaler.get_scale())
        scaler.update()
        norms = torch._foreach_norm([p.grad for p in parameters if p.grad is not None], float("inf"))
        if torch.stack(norms).isfinite().all():
            return
        for parameter in parameters:
            parameter.grad = None
    raise RunError(
        f"site {site.name!r}, round {site.round}: gradients in float16 are not finite at any scale; "
        "the last good round is kept; run it without --amp, lower the learning rate or look at this site's data"
    )


def _obstacle(site: Site, scaler: torch.amp.GradScaler, epoch_factor: float) -> str:
    """Return why the steps of a visit cannot be captured, as far as the settings tell."""
    if scaler.is_enabled():
        return "mixed precision in float16 reads back whether gradients are finite"
    if epoch_factor != 1 and site.settings.epochs > 1:
        return "the learning rate changes within a visit"
    return ""


def penalised(objective: Objective, penalty: Penalty | None) -> Objective:
    """Return an objective with a penalty on the features added: on what entered the head in its first pass."""
    if penalty is None:
        return objective

    def added(network: nn.Module, x: Any, y: Any, *more: Any) -> Tensor:
        with entering_head(network) as seen:
            loss = objective(network, x, y, *more)
        return loss + penalty(seen[0], y)

    return added


def autocast(site: Site) -> Any:
    """Return the mixed-precision context of the site's settings (float16 on CUDA, bfloat16 on CPU), or a null one."""
    if not site.settings.amp:
        return nullcontext()
    return torch.autocast(site.device.type, torch.float16 if site.device.type == "cuda" else torch.bfloat16)


def one_sample_safe(model: nn.Module, x: Any) -> Any:
    """Let a batch of one sample pass: BatchNorm without a second value per channel uses its running statistics."""
    if not isinstance(x, Tensor) or len(x) != 1:
        return nullcontext()
    return _guarded([m for m in model.modules() if isinstance(m, _BatchNorm) and m.training])


@contextmanager
def _guarded(layers: list[_BatchNorm]) -> Iterator[None]:
    def before(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        layer.train(inputs[0].numel() > inputs[0].shape[1])  # one value has no variance

    handles = [layer.register_forward_pre_hook(before) for layer in layers]
    try:
        yield
    finally:
        for layer, handle in zip(layers, handles, strict=True):
            handle.remove()
            layer.train()


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) and value.device != device else value


def _check_finite(losses: list[Tensor], start: int, site: Site) -> None:
    """Look at a whole epoch at once, so that a GPU is not stopped at every step."""
    if len(losses) == start:
        return
    bad = (~torch.isfinite(torch.stack(losses[start:]))).nonzero()
    if len(bad):
        step = start + int(bad[0]) + 1
        raise RunError(
            f"site {site.name!r}, round {site.round}: the training loss is {float(losses[step - 1])} at step {step}; "
            "the last good round is kept; lower the learning rate or look at this site's data"
        )


def _captured(optimizer: torch.optim.Optimizer) -> State:
    """Turn an optimiser's per-parameter state into a State (string keys, tensors and numbers)."""
    return {str(index): dict(values) for index, values in optimizer.state_dict()["state"].items()}


def _restore(optimizer: torch.optim.Optimizer, state: State) -> None:
    saved = optimizer.state_dict()
    saved["state"] = {  # copied: the optimiser works in place, and a State given is never changed
        int(index): {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}
        for index, values in state.items()
    }
    optimizer.load_state_dict(saved)


def pull(model: nn.Module, anchor: Mapping[str, Tensor], strength: float) -> GradientHook:
    """Return a gradient hook that adds `strength * (w - anchor)`, the gradient of (strength/2) ||w - anchor||^2.

    Args:
        model: the network to be trained; only its trainable parameters are pulled.
        anchor: tensor name -> where to pull; copied, so it may be the model's own parameters.
        strength: mu of FedProx, lambda of Ditto.
    """
    if strength == 0:
        return lambda parameters: None  # adding 0 would turn a gradient of -0.0 into 0.0
    anchors = [anchor[name].detach().clone() for name, p in model.named_parameters() if p.requires_grad]

    def hook(parameters: Sequence[nn.Parameter]) -> None:
        pairs = [(p, a) for p, a in zip(parameters, anchors, strict=True) if p.grad is not None]
        apart = torch._foreach_sub([p.detach() for p, _ in pairs], [a for _, a in pairs])
        torch._foreach_add_([p.grad for p, _ in pairs if p.grad is not None], apart, alpha=strength)

    return hook


def push(model: nn.Module, terms: Mapping[str, Tensor]) -> GradientHook:
    """Return a gradient hook that adds constant tensors, the gradient of the linear term <terms, w> of a loss.

    Args:
        model: the network to be trained.
        terms: name of each trainable parameter -> what to add.
    """
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


def learning_rate(site: Site, model: nn.Module) -> float:
    """Return the learning rate of this round (of the first parameter group)."""
    return float(site.settings.optimizer(model).param_groups[0]["lr"]) * site.settings.lr_factor


def effective_steps(site: Site, model: nn.Module, steps: int, mu: float = 0.0) -> float:
    """Return ||a_k||_1 of FedNova (Wang et al. 2020): how many plain gradient steps the local steps were worth.

    Measured: the way, in learning rates, that the site's optimiser carries a parameter whose loss has the gradient 1.
    Plain SGD gives `steps`, momentum rho the sum of c over the steps with c <- rho c + 1, a proximal term without
    momentum a <- a (1 - eta mu) + 1, Adam `steps` again. Weight decay counts as part of the gradient, so not here.

    Args:
        site: the first parameter group of its optimiser stands for all.
        model: the network that was trained; its gradients are dropped, its parameters stay.
        steps: optimiser updates.
        mu: strength of a proximal term that `pull` added.
    """
    optimizer = site.settings.optimizer(model)
    optimizer.zero_grad()  # a parameter without gradient is not stepped
    probe = nn.Parameter(torch.zeros((), dtype=torch.float64, device=site.device))
    optimizer.add_param_group({**optimizer.param_groups[0], "params": [probe], "lr": 1.0, "weight_decay": 0.0})
    rate = learning_rate(site, model)
    for _ in range(steps):
        probe.grad = 1 + rate * mu * probe.detach()
        optimizer.step()
    return -probe.item()


@contextmanager
def only(model: nn.Module, names: Collection[str], *, still: bool = False) -> Iterator[None]:
    """Let nothing but the named parameters be trained inside the block.

    Args:
        model: the network; its flags are put back when the block ends.
        names: parameter names; one that the bundle froze stays frozen.
        still: put also the buffers of all other layers back at the end, so that they are as frozen as the parameters.
            BatchNorm goes by the batch meanwhile: running statistics that are young, or none yet, can give the features
            of a deep network any scale.
    """
    flags = [(p, p.requires_grad, name in names) for name, p in model.named_parameters()]
    layers = {name.rpartition(".")[0] for name in names}
    others = [b for name, b in model.named_buffers() if still and name.rpartition(".")[0] not in layers]
    kept = [(buffer, buffer.clone()) for buffer in others]
    try:
        for parameter, flag, named in flags:
            parameter.requires_grad_(flag and named)
        yield
    finally:
        for parameter, flag, _ in flags:
            parameter.requires_grad_(flag)
        for buffer, value in kept:
            buffer.copy_(value)


def for_epochs(site: Site, epochs: int) -> Site:
    """Return the same site with another number of local epochs."""
    return replace(site, settings=replace(site.settings, epochs=epochs))


def class_prior(counts: Tensor, strength: float = 1.0) -> Tensor:
    """Return what balanced softmax adds to a site's logits: strength * log(n_c / max n), (K,) float32.

    Cross-entropy of z + log n is -log(n_y e^(z_y) / sum_c n_c e^(z_c)) (Ren et al. 2020); dividing by the largest count
    changes nothing of it and makes equal counts exactly 0. An absent class counts 1e-12, so that its log is finite.

    Args:
        counts: (K,), the site's items of each class.
        strength: gamma; 0 is plain cross-entropy.
    """
    return strength * (counts.double().clamp(min=1e-12) / counts.max()).log().float()
