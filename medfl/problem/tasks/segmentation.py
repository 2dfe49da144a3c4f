"""Segmentation: a class for each pixel or voxel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from medfl.evaluation.mask_metrics import by_structure
from medfl.evaluation.metrics import Cases
from medfl.problem.tasks.kind import Kind


@dataclass(frozen=True)
class Segmentation(Kind):
    """A class for each pixel or voxel."""

    name: str = "segmentation"
    key_metric: str = "dice"
    noun: str = "structure"
    least_names: int = 2
    activation: str = "softmax"

    def fits(self, prediction: Tensor, target: Tensor, loss: Any, has_class: bool) -> bool:
        """Tell whether targets are maps."""
        return prediction.ndim != 2 and target.ndim >= 4

    def by_name(
        self, scores: Mapping[str, float], cases: Cases, names: Sequence[str]
    ) -> dict[str, dict[str, float | None]]:
        """Return the metrics of each structure; `scores` are of as many cases as these."""
        return by_structure(scores, cases.values, names, len(cases))
