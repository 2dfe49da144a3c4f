"""The kinds of task, one module each: what a target is, and how it is used."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from medfl.core import TASKS, InputError, did_you_mean
from medfl.problem.tasks.classification import Classification
from medfl.problem.tasks.kind import Kind
from medfl.problem.tasks.multilabel import Multilabel
from medfl.problem.tasks.regression import Regression
from medfl.problem.tasks.segmentation import Segmentation

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "classification": Classification(),
        "multilabel": Multilabel(),
        "regression": Regression(),
        "segmentation": Segmentation(),
        "other": Kind("other"),
    }
)


def check_task(name: str, where: str) -> str:
    """Return the name of a kind of task; InputError for an unknown one, with `where` it was given."""
    if name not in KINDS:
        advice = did_you_mean(name, TASKS, "choose one")
        raise InputError(f"{where} {name!r}", f"tasks are {', '.join(TASKS)}", advice)

    return name


def told_by(prediction: Any, target: Any, loss: Any, has_class: bool) -> str:
    """Return the kind of task that a training step on one item implies: the first that fits.

    Args:
        prediction: of the step's batch.
        target: as passed to the loss.
        loss: of the bundle.
        has_class: whether the data list has a class index for each item.
    """
    if isinstance(prediction, Tensor) and isinstance(target, Tensor):
        for name in ("regression", "classification", "multilabel", "segmentation"):
            if KINDS[name].fits(prediction, target, loss, has_class):
                return name

    return "other"
