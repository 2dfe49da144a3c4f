"""A federation's parts given in Python, without a bundle: `medfl.run(medfl.Parts(network=..., data=...), "fedprox")`.

The objects are the caller's own and run with the caller's rights: nothing is inspected. A run records a hash of their
settings and source texts. A later process that makes the same parts again can resume the run; parts are never sent to
another process.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from monai.engines.utils import default_prepare_batch
from monai.inferers import SimpleInferer
from torch import Tensor, nn

from medfl.core.errors import InputError, did_you_mean
from medfl.core.names import check_name
from medfl.core.seeding import stream
from medfl.core.task import OF_VECTORS
from medfl.evaluation.evaluators import ClassEvaluator, Evaluator
from medfl.evaluation.metrics import METRICS, OF_CASES
from medfl.problem.described import Config
from medfl.problem.optimizers import OptimizerFactory
from medfl.problem.parts_data import PartSections
from medfl.problem.parts_scores import OwnCases, OwnMasks, OwnVectors
from medfl.problem.problem import LossFunction, Problem
from medfl.problem.sections import check_labels
from medfl.problem.tasks import KINDS, check_task
from medfl.problem.tasks.multilabel import FindingEvaluator
from medfl.problem.tasks.regression import NumberEvaluator
from medfl.storage.files import weights_sha256

PREFIX = "parts:"
"""What a record's `bundle_path` begins with where a run was made of parts."""
# A run folder records parts by name alone, and `resume`, `load` and `export` are given that folder, not the
# parts: whoever makes the same parts again in a new process has them found here.
_GIVEN: dict[str, Parts] = {}
_SIMPLE = (str, int, float, bool, tuple, type(None))
_LIBRARIES = ("torch", "monai", "builtins", "functools", "torchvision", "ignite")
"""Packages whose functions a hash knows by name; of others it has the source."""


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3)


@dataclass(frozen=True, eq=False)
class Parts:
    """Network, data, loss and optimiser in Python: what `medfl.run` federates in the place of a bundle.

    Attributes:
        network: a function that makes one, whose weights are drawn from the run's seed; or a network, with whose
            weights all sites begin. Inputs are (B, C, H, W[, D]).
        data: site -> {"train": ..., "validate": ..., "test": ...}, each a data set or data loader; or one of them,
            which is split 70/10/20 %, the same way in every run, items of a patient or group together. Without any
            "test" the validation items serve as such. Of loaders the data set, batch size and collate_fn are taken.
        loss: (output, target) -> number or numbers, whose mean is taken; target is (B,) class indices, (B, K) findings
            of 1, 0 and NaN (unknown), (B, D) numbers, or a mask.
        optimizer: parameters -> optimiser, as `functools.partial(torch.optim.SGD, lr=0.1)`; default Adam, lr 0.001.
        scheduler: optimiser -> learning rate schedule, stepped once an epoch over all rounds.
        task: classification, multilabel, regression, segmentation or other.
        classes: names in label order, of findings or of numbers; of a segmentation the mask's values, background first.
        metrics: name -> (output, target) -> number, called for each case, a batch of one; in classification and
            multilabel the outputs are probabilities. Their means over the cases are reported with medfl's own.
        key_metric: which metric chooses the best round; default: balanced accuracy, AUROC, MAE, Dice, or the first of
            `metrics` (else the loss). More is better, unless a word of its name is loss, error, mae, mse, distance ...
        inferer: (inputs, network) -> output of whole images; default `monai.inferers.SimpleInferer()`.
        prepare_batch: as of MONAI's trainers: (batch, device, non_blocking) -> (inputs, target).
        batch_size: images a step; default: the loaders', else 16.
        drawn: the images are drawn by a program; whatever a run says of its scores then says so.
        name: of the runs' folders.

    Raises:
        InputError: parts that cannot be federated.
    """

    network: nn.Module | Callable[[], nn.Module]
    data: Mapping[str, Any]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = _adam
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    task: str = "classification"
    classes: tuple[str, ...] = ()
    metrics: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    key_metric: str = ""
    inferer: Callable[..., Any] = field(default_factory=SimpleInferer)
    prepare_batch: Callable[..., Any] = default_prepare_batch
    batch_size: int | None = None
    drawn: bool = False
    name: str = "parts"

    def __post_init__(self) -> None:
        """Check what needs no data, and remember these parts for runs that were made of them."""
        check_name(self.name, "name of the parts")
        check_task(self.task, "task")
        least = KINDS[self.task].least_names
        if len(self.classes) < least or len(set(self.classes)) < len(self.classes):
            raise InputError(
                f"classes={self.classes!r}",
                f"{least} or more different names",
                "name the classes in order",
            )

        object.__setattr__(self, "classes", tuple(self.classes))
        for name in self.metrics:
            if name in METRICS or name in OF_CASES:
                allowed = "a name that medfl's metrics do not have"
                raise InputError(f"metric {name!r}", allowed, "call it otherwise")

        self._check_metric()
        for part in ("loss", "optimizer", "inferer", "network", "prepare_batch", "scheduler"):
            value = getattr(self, part)
            is_default = part == "scheduler" and value is None
            if not callable(value) and not is_default:
                raise InputError(
                    f"{part}={value!r:.60}", f"{part} can be called", "see medfl.Parts"
                )

        _GIVEN[self.bundle_name] = self

    def _check_metric(self) -> None:
        metric_names = [*self.metrics, "loss"]
        if self.task != "other":
            metric_names += METRICS

        if self.task == "segmentation":
            metric_names += [f"dice_{name}" for name in self.classes]

        if self.key_metric and self.key_metric not in metric_names:
            advice = did_you_mean(self.key_metric, metric_names, "choose one")
            raise InputError(
                f"key_metric={self.key_metric!r}", f"one of {', '.join(metric_names)}", advice
            )

    @cached_property
    def sections(self) -> PartSections:
        """The data, joined over the sites."""
        return PartSections(
            self.data, self.prepare_batch, self.batch_size, KINDS[self.task].record_key
        )

    @cached_property
    def sha256(self) -> str:
        """Hash of settings, source texts and given weights; the data have a checksum of their own."""
        digest = hashlib.sha256()
        for attribute in fields(self):
            if attribute.name not in ("data", "drawn", "name"):
                digest.update(
                    f"{attribute.name}={_stable_text(getattr(self, attribute.name))}\n".encode()
                )

        if isinstance(self.network, nn.Module):
            digest.update(weights_sha256(self.network.state_dict()).encode())

        return digest.hexdigest()

    @property
    def bundle_name(self) -> str:
        """The name of these parts where a bundle's name or folder is expected."""
        return f"{PREFIX}{self.name}-{self.sha256[:16]}"

    def new_network(self) -> nn.Module:
        """Return a new network: a copy of the given one, or the result of the given function."""
        if isinstance(self.network, nn.Module):
            model = copy.deepcopy(self.network)
        else:
            model = self.network()

        if not isinstance(model, nn.Module):
            raise InputError(
                f"network makes a {type(model).__name__}",
                "it makes a torch.nn.Module",
                "return one",
            )
        return model


def _stable_text(value: Any) -> str:
    """Describe a part in a text that is the same in every process: its settings, and the source of user code."""
    if isinstance(value, Mapping):
        return str({key: _stable_text(part) for key, part in value.items()})
    if isinstance(value, nn.Module):
        return f"{value}{[(_plain(module), _source(type(module))) for module in value.modules()]}"
    if hasattr(value, "func"):  # functools.partial
        return f"{_stable_text(value.func)}{_stable_text(list(value.args))}{_stable_text(value.keywords)}"
    if isinstance(value, list | tuple):
        return str([_stable_text(part) for part in value])

    if inspect.isroutine(value) or inspect.isclass(value):
        cells = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
        return f"{_source(value)}{[cell for cell in cells if isinstance(cell, _SIMPLE)]}"

    if isinstance(value, _SIMPLE):
        return repr(value)

    return f"{_source(type(value))}{_plain(value)}"


def _plain(holder: object) -> dict[str, object]:
    """Return the attributes of an object that are numbers and texts."""
    held = getattr(holder, "__dict__", {})
    return {
        key: value
        for key, value in held.items()
        if isinstance(value, _SIMPLE) and key[:1] != "_" and key != "training"
    }


def _source(value: Any) -> str:
    """Return the source of a function or class that is the user's own, its name where there is none."""
    home = str(getattr(value, "__module__", ""))
    if home.partition(".")[0] not in _LIBRARIES:
        try:
            return inspect.getsource(value)
        except (OSError, TypeError):  # typed at a prompt: its bytecode tells it apart
            if code := getattr(value, "__code__", None):
                constants = [
                    constant for constant in code.co_consts if isinstance(constant, _SIMPLE)
                ]
                return f"{code.co_code.hex()}{code.co_names}{constants}"

    return f"{home}.{getattr(value, '__qualname__', '')}"


def given(bundle: str | Path | Parts) -> str:
    """Return the name by which a bundle, or parts, are opened."""
    if isinstance(bundle, Parts):
        return bundle.bundle_name

    return str(bundle)


def is_parts(name: str) -> bool:
    """Tell whether a name stands for parts."""
    return name.startswith(PREFIX)


def known(name: str) -> Parts:
    """Return the parts of this name; InputError if this process has made none, or others."""
    if name not in _GIVEN:
        raise InputError(
            f"a run of {name}, made of parts in Python",
            "medfl.Parts with the same network, loss, optimiser and settings, made in this process",
            "make them first, then open or resume the run",
        )

    return _GIVEN[name]


class PartsProblem(Problem):
    """The problem that `Parts` are."""

    parts: Parts
    sections: PartSections

    def __init__(self, parts: Parts, device: torch.device | str = "cpu") -> None:
        """Take the parts; nothing is made yet."""
        super().__init__(
            parts.name,
            source=parts.bundle_name,
            device=torch.device(device),
            protocol=protocol_of_parts(parts.bundle_name),
            sections=parts.sections,
            sha256=parts.sha256,
        )
        vars(self).update(parts=parts)

    def network(self) -> nn.Module:
        """Build the network anew; two calls share nothing."""
        return self.parts.new_network().to(self.device)

    @cached_property
    def loss_function(self) -> LossFunction:  # type: ignore[override]
        """The given loss."""
        loss = self.parts.loss
        if isinstance(loss, nn.Module):
            return loss.to(self.device)

        return loss

    @cached_property
    def optimizers(self) -> OptimizerFactory:
        """The given optimiser and schedule, made once on a network of their own."""
        with stream(0, "optimizer"):
            network = self.network()
            optimizer = self.parts.optimizer(network.parameters())
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise InputError(
                    f"optimizer returns a {type(optimizer).__name__}",
                    "a torch.optim.Optimizer of the parameters that it gets",
                    "give for example functools.partial(torch.optim.SGD, lr=0.1)",
                )

            scheduler = None
            if self.parts.scheduler is not None:
                # of an optimiser of its own: a schedule ties copies of an optimiser to itself
                scheduler = self.parts.scheduler(self.parts.optimizer(network.parameters()))

        return OptimizerFactory(optimizer, network, scheduler)

    def data_checksum(self) -> str:
        """Hash what can be told of the data."""
        return self.sections.checksum

    def is_drawn(self, folder: str) -> bool:
        """Tell whether the images are drawn by a program: as it is said, or as their folder says."""
        return self.parts.drawn or super().is_drawn(folder)

    @cached_property
    def task(self) -> str:  # type: ignore[override]
        """The given task, after network, loss, data and classes were tried together; InputError if they do not fit."""
        # sites whose networks share layers would train each other's
        first = set(self.network().parameters())
        second = set(self.network().parameters())
        if not first.isdisjoint(second):
            problem = "network returns the same layers at each call"
            raise InputError(problem, "a function that makes new ones", "make them inside it")

        # one output is the logit of the second of two classes
        output = self.trial.prediction
        classes = self.parts.classes
        outputs = int(output.shape[1]) if isinstance(output, Tensor) and output.ndim > 1 else 0
        is_logit = self.parts.task in ("classification", "segmentation")
        fits = outputs == len(classes) or ((outputs, len(classes)) == (1, 2) and is_logit)
        if self.parts.task == "regression":
            fits = not classes or output.numel() == 2 * len(classes)

        if self.parts.task != "other" and not fits:
            problem = f"a network with {outputs} outputs"
            raise InputError(
                problem, f"{len(classes)} classes: {', '.join(classes)}", "give it as many outputs"
            )

        return self.parts.task

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The given names, () for other tasks than those of vectors; InputError for a label of none."""
        if self.parts.task not in OF_VECTORS:
            return ()
        if self.parts.task == "classification":
            check_labels(self.items, len(self.parts.classes), self.name)

        return self.parts.classes

    @property
    def structures(self) -> tuple[str, ...]:  # type: ignore[override]
        """The given names of a mask's values, () for other tasks."""
        if self.parts.task == "segmentation":
            return self.parts.classes

        return ()

    @cached_property
    def key_metric(self) -> str:
        """Name of the metric that selects the best round."""
        of_task = self.kind.key_metric
        if self.parts.task == "other":
            of_task = next(iter(self.parts.metrics), of_task)

        return self.parts.key_metric or of_task

    @cached_property
    def evaluator(self) -> Evaluator:
        """How the networks are scored: by medfl's metrics of the task, and the given ones."""
        parts = self.parts
        sigmoid = isinstance(self.loss_function, nn.BCELoss)
        if parts.task == "classification":
            return OwnVectors(
                ClassEvaluator(ends_in_sigmoid=sigmoid), ("probabilities", "label"), parts.metrics
            )
        if parts.task == "multilabel":
            return OwnVectors(
                FindingEvaluator(ends_in_sigmoid=sigmoid),
                ("probabilities", "findings"),
                parts.metrics,
            )
        if parts.task == "regression":
            return OwnVectors(
                NumberEvaluator(self.loss, {}), ("prediction", "target"), parts.metrics
            )

        if parts.task == "segmentation":
            return OwnMasks(self.loss, parts.classes, parts.inferer, metrics=parts.metrics)

        return OwnCases(self.loss, parts.inferer, parts.metrics)


def protocol_of_parts(name: str) -> Config:
    """Return the protocol of parts: their sites, as they are given."""
    return {"partition": "centre", "task": known(name).task}
