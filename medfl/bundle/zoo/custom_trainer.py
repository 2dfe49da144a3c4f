"""Trainers with their own iteration: MONAI's GanTrainer and AdversarialTrainer, a bundle's, any iteration_update.

Such a trainer is created as its bundle says, but without its handlers. It runs on a site's batches from a data loader,
and updates its networks with its own optimisers; the bundle's evaluator scores them. A State contains the tensors of
the networks that the optimisers train: a single one's under their own names, else under `g_network`, `d_network`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from ignite.engine import Events
from ignite.exceptions import NotComputableError
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from medfl.bundle.configuration import Configuration
from medfl.bundle.engines import find_evaluator
from medfl.bundle.zoo import compatibility
from medfl.core import Document, InputError, MedflError, RunError, as_text, derive, stream
from medfl.data import Shard
from medfl.data.samples import random_parts
from medfl.training.site import FitReport, Site, check_finite


class CustomTrainer:
    """A trainer and its evaluator, around the networks that they hold.

    Attributes:
        model: the network, or several in a ModuleDict; it refers to this object as `custom_trainer`.

    Raises:
        InputError: an engine cannot be created, or its optimisers train something that is not among its arguments.
    """

    def __init__(self, config: Configuration, trainer: str) -> None:
        evaluator = find_evaluator(config)
        self._evaluator: Any = None
        if evaluator:
            self._trainer, self._evaluator = config.engines(trainer, evaluator)
        else:
            (self._trainer,) = config.engines(trainer)

        attributes = {**vars(self._trainer.state), **vars(self._trainer)}
        optimizers = [value for value in attributes.values() if isinstance(value, Optimizer)]
        # the copies are the initial state of each visit
        self._optimizers = [(optimizer, _copy(optimizer)) for optimizer in optimizers]
        trained = set[int]()
        for optimizer in optimizers:
            trained.update(map(id, _parameters(optimizer)))

        networks = {}

        for key, value in attributes.items():
            if not isinstance(value, nn.Module):
                continue

            # Parts shared with another network are trained there
            new = trained.intersection(map(id, value.parameters()))
            if new:
                networks[key] = value
                trained -= new

        if not networks or trained:
            raise InputError(
                f"{config.file}: id {trainer!r} is a {type(self._trainer).__name__} without what it trains",
                "a trainer with an iteration of its own has networks and their optimisers as attributes",
                "keep them as attributes of the trainer",
            )

        self.model: nn.Module = nn.ModuleDict(networks)
        if len(networks) == 1:
            (self.model,) = networks.values()

        vars(self.model)["custom_trainer"] = self
        loss: Any = attributes.get("loss_function")
        if compatibility.needs_float_labels(loss, self._trainer.state.device):
            config.adapted.add(compatibility.FLOAT_LABELS)
            self._trainer.loss_function = compatibility.with_float_labels(loss)

        self._losses: list[Tensor] = []
        self._trainer.add_event_handler(Events.ITERATION_COMPLETED, self._keep_loss)

    def optimizer(self, lr: float | None) -> Optimizer:
        """Return a new optimiser like the trainer's, at another rate if given; for several, one with all groups."""
        fresh = [_copy(optimizer) for _, optimizer in self._optimizers]
        together: Any = SimpleNamespace(param_groups=_groups(fresh))
        if lr is not None:
            for group in together.param_groups:
                group["lr"] = lr

        return fresh[0] if len(fresh) == 1 else together

    def fit(
        self, site: Site, purpose: str, hook: Callable[..., None] | None, changed: str
    ) -> FitReport:
        """Run the trainer over the site's data for its local epochs; it replaces `medfl.training.fit`.

        Raises:
            InputError: the method changes the loss or the optimiser, or the gradients of several networks.
        """
        if not changed and hook and len(self._optimizers) > 1:
            changed = "the gradients"

        if changed:
            refuse(
                f"method {site.method!r}, which changes {changed},", type(self._trainer).__name__
            )

        for optimizer, first in self._optimizers:
            optimizer.load_state_dict(first.state_dict())

        groups = _groups(optimizer for optimizer, _ in self._optimizers)
        for group, of_site in zip(groups, site.optimizer(self.model).param_groups, strict=True):
            group["lr"] = of_site["lr"]

        self._losses = []
        steps = []
        parameters = [p for p in self.model.parameters() if p.requires_grad]

        def before_step(*_: object) -> None:
            """Count an optimiser's step, and let the hook change the gradients."""
            steps.append(1)
            if hook is not None:
                hook(parameters)

        handles = [
            optimizer.register_step_pre_hook(before_step) for optimizer, _ in self._optimizers
        ]

        self._trainer.amp = site.settings.amp and site.device.type == "cuda"
        try:
            with stream(site.seed, purpose) as generator:
                batches = _Batches(site.train, site.settings.batch_size, generator)
                _run(self._trainer, batches, site.seed, site.settings.epochs)
        except MedflError:
            raise
        except Exception as error:
            where = f"site {site.name!r}, round {site.round}: the {type(self._trainer).__name__} of its bundle fails"
            raise RunError(f"{where}: {as_text(error)}") from error
        finally:
            for handle in handles:
                handle.remove()

        check_finite(self._losses, 0, site)
        mean_loss = torch.stack(self._losses).mean() if self._losses else math.nan
        report = FitReport(len(steps), float(mean_loss))
        site.journal.append(report)
        return report

    def score(self, batch: Any) -> float:
        """Return the evaluator's key metric of a batch, NaN if it has none."""
        name = self._evaluator and self._evaluator.state.key_metric_name
        if not name:
            return math.nan

        with stream(0, "evaluation"), suppress(NotComputableError):
            metric = _run(self._evaluator, [batch], 0).metrics[name]
            return float(torch.as_tensor(metric).double().mean())

        return math.nan

    def _keep_loss(self, engine: Any) -> None:
        output = engine.state.output
        if isinstance(engine.state.output, list):
            output = engine.state.output[0]

        losses_by_name = {}
        for key, value in output.items():
            if str(key).endswith("loss"):
                losses_by_name[str(key)] = value

        # a total where the trainer tells one, else its parts
        parts = [losses_by_name["loss"]] if "loss" in losses_by_name else losses_by_name.values()
        losses = [torch.as_tensor(part).detach().float().mean().cpu() for part in parts]

        if losses:
            self._losses.append(torch.stack(losses).sum())


class _Batches(DataLoader[Any]):
    """A site's batches in the form that a trainer expects."""

    def __init__(self, shard: Shard, size: int, generator: torch.Generator) -> None:
        super().__init__(range(len(shard)), batch_size=size)  # type: ignore[arg-type]
        self._next = partial(shard.batches, size, generator)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (batch for batch, _ in self._next())


def _copy(optimizer: Optimizer) -> Optimizer:
    """Copy an optimiser; the copy has the same parameters."""
    return copy.deepcopy(optimizer, {id(p): p for p in _parameters(optimizer)})


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _groups(optimizers: Iterable[Optimizer]) -> list[Document]:
    groups = []
    for optimizer in optimizers:
        groups += optimizer.param_groups

    return groups


def _run(engine: Any, data: Any, seed: int, epochs: int = 1) -> Any:
    """Run an engine from its start and return its state; transforms with their own random state are seeded."""
    step = engine._process_function
    parts = []
    for value in (step, *getattr(step, "__dict__", {}).values()):
        parts += random_parts(value, set())

    # NumPy's seeds have 32 bits
    for number, part in enumerate(parts):
        part.set_random_state(seed=derive(seed, number) % 2**32)

    engine.data_loader = data
    engine.state.epoch_length = len(data)
    engine.state.max_epochs = epochs
    engine.state.epoch = 0
    engine.state.iteration = 0

    if len(data):
        engine.run()

    return engine.state


def of(network: nn.Module) -> CustomTrainer:
    """Return the one that holds a network."""
    trainer: CustomTrainer = vars(network)["custom_trainer"]
    return trainer


def refuse(change: str, trainer: str, *_: object) -> NoReturn:
    """Refuse a change to a step that belongs to the trainer."""
    raise InputError(
        f"{change} with a {trainer}, which has an iteration of its own",
        "it takes methods that leave its steps alone, or with one optimiser change its gradients only",
        "use fedavg",
    )
