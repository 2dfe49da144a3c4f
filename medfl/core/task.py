"""Task: what server and sites know of the problem before training: its kind, its classes and their text embeddings."""

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
"""Kinds of which a network gives a vector an image."""
SECTIONS = ("train", "validate", "test")
"""The parts that a data set is divided into."""


def _no_embeddings(plm: str) -> Tensor:
    raise InputError(f"text embeddings {plm!r}", "this bundle ships none", "see medfl concepts")


Constants = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation, of one number or one for each channel: x = (u - mean) / sd, u from 0 to 1."""


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
        kind: of `TASKS`.
        classes: class names in label order, names of findings or of numbers; () where there are none.
        intensities: mean and standard deviation by which pictures of 0..1 become what a network is given, one number
            or one a channel; InputError where they cannot be read.
        embeddings: language model's name -> unit-norm prompt embeddings (K, M, D); InputError where there are none.
    """

    kind: str = "classification"
    classes: tuple[str, ...] = ()
    embeddings: Callable[[str], Tensor] = field(default=_no_embeddings, compare=False)
    intensities: Callable[[], Constants] = field(default=_no_intensities, compare=False)

    @property
    def num_classes(self) -> int:
        """Number of classes, K."""
        return len(self.classes)
