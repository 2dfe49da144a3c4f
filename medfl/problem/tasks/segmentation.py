"""Segmentation: a class for each pixel or voxel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from medfl.evaluation.conformal import EDGES, Scored, bins_of
from medfl.evaluation.evaluators import MaskEvaluator
from medfl.evaluation.mask_metrics import by_structure
from medfl.evaluation.metrics import Cases
from medfl.problem.tasks.kind import Examined, Kind, no_sets


@dataclass(frozen=True)
class Segmentation(Kind):
    """A class for each pixel or voxel."""

    name: str = "segmentation"
    key_metric: str = "dice"
    noun: str = "structure"
    least_names: int = 2
    activation: str = "softmax"
    set_scores: tuple[str, ...] = ("risk",)
    promise: str = "a case's true volume that is in its mask, of cases with any"

    def fits(self, prediction: Tensor, target: Tensor, loss: Any, has_class: bool) -> bool:
        """Tell whether targets are masks."""
        return prediction.ndim != 2 and target.ndim >= 4

    def by_name(
        self, scores: Mapping[str, float], cases: Cases, names: Sequence[str]
    ) -> dict[str, dict[str, float | None]]:
        """Return the metrics of each structure; `scores` cover the same cases."""
        return by_structure(scores, cases.values, names, len(cases))

    def scored(self, examined: Examined, scores: str) -> Scored:
        """Return the cases with a structure; their parts are bins of the background probability."""
        if not isinstance(examined.evaluator, MaskEvaluator):
            raise no_sets("masks by the bundle's own postprocessing")

        places = len(EDGES)
        true = np.zeros((len(examined.shard), places))
        volume = np.zeros((len(examined.shard), places))
        outputs = examined.evaluator.backgrounds(examined.network, examined.shard, examined.device)
        for row, (background, is_true) in enumerate(outputs):
            bins = bins_of(background.numpy())
            true[row] = np.bincount(bins[is_true.numpy()], minlength=places)
            volume[row] = np.bincount(bins.ravel(), minlength=places)

        size = volume / np.maximum(true.sum(1, keepdims=True), 1)
        bins = np.broadcast_to(np.arange(places), true.shape)
        return Scored.of(tuple(examined.shard.ids), bins, true, size)
