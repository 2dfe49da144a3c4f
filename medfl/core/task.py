"""Task: what server and sites know about the problem before training: its kind, classes and text embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from medfl.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

TASKS = ("classification", "multilabel", "regression", "segmentation", "other")
"""The kinds of `medfl.problem.tasks`."""
OF_VECTORS = TASKS[:3]
"""Kinds whose network outputs a vector per image."""
OF_TARGETS = TASKS[1:3]
"""Of these, the kinds whose target is a vector too."""
SECTIONS = ("train", "validate", "test")
"""The parts into which a data set is divided."""


def _no_embeddings(plm: str) -> Tensor:
    raise InputError(f"text embeddings {plm!r}", "this bundle ships none", "see medfl concepts")


Constants = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation, a number each or one per channel: x = (u - mean) / sd, u from 0 to 1."""


def _no_intensities() -> Constants:
    raise InputError(
        "images without transforms",
        "how their intensities were scaled is read from these",
        "say it: normalise=MEAN/SD",
    )


@dataclass(frozen=True)
class Task:
    """A bundle's problem.

    Attributes:
        kind: one of `TASKS`.
        classes: class names in label order, names of findings or of numbers; () if there are none.
        intensities: mean and standard deviation that convert pictures of 0..1 to network inputs, a number each or one
            per channel; InputError if they cannot be read.
        embeddings: language model's name -> unit-norm prompt embeddings (K, M, D); InputError if there are none.
    """

    kind: str = "classification"
    classes: tuple[str, ...] = ()
    embeddings: Callable[[str], Tensor] = field(default=_no_embeddings, compare=False)
    intensities: Callable[[], Constants] = field(default=_no_intensities, compare=False)

    @property
    def num_classes(self) -> int:
        """Number of classes, K."""
        return len(self.classes)
