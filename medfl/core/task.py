"""Task: what server and sites know of the problem before training: its kind, its classes and their text embeddings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from medfl.core.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

TASKS = ("classification", "segmentation", "other")


def _no_embeddings(plm: str) -> Tensor:
    raise InputError(f"text embeddings {plm!r}", "this bundle ships none", "see medfl concepts")


@dataclass(frozen=True)
class Task:
    """A bundle's problem.

    Attributes:
        kind: classification, segmentation or other.
        classes: class names in label order, () where there are none.
        embeddings: language model's name -> unit-norm prompt embeddings (K, M, D); InputError where there are none.
    """

    kind: str = "classification"
    classes: tuple[str, ...] = ()
    embeddings: Callable[[str], Tensor] = field(default=_no_embeddings, compare=False)

    @property
    def num_classes(self) -> int:
        """Number of classes, K."""
        return len(self.classes)
