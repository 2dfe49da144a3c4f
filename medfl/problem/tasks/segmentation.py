"""Segmentation: a class for each pixel or voxel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfl.core import slug
from medfl.evaluation import Cases, MaskEvaluator, Scored, bins_of
from medfl.evaluation.conformal import EDGES
from medfl.evaluation.mask_metrics import KINDS, by_structure
from medfl.evaluation.metrics import LARGEST
from medfl.problem.described import LARGEST_COMPONENT
from medfl.problem.tasks.kind import Examined, Kind, no_sets

_UNDEFINED = torch.tensor(torch.nan)


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
        results = by_structure(scores, cases.values, names, len(cases))
        for name, metrics in results.items():
            decision = cases.values.get(f"kept_{slug(name)}")
            if decision is None or not len(decision):
                continue

            # several models have several decisions; NaN is none
            if (decision == decision[0]).all():
                before, after = decision[0].tolist()
                metrics[LARGEST_COMPONENT] = float(after > before)
                metrics |= {"validation_dice": before, "validation_dice_largest": after}

        return results

    def decided(self, cases: Cases, validation: Cases | None) -> Cases:
        """Return cases scored by the largest component of the structures whose validation Dice it raises.

        "kept_<structure>" (N, 2) is the validation Dice without and with it, NaN if no validation case has the
        structure. The rule is that of nnU-Net (Isensee et al., Nature Methods 18:203, 2021).
        """
        first = f"{LARGEST}dice_"
        names = [name.removeprefix(first) for name in cases.values if name.startswith(first)]
        if not names:
            return cases

        validated: Mapping[str, Tensor] = getattr(validation, "values", {})
        values = {}
        for metric, value in cases.values.items():
            if not metric.startswith(LARGEST):
                values[metric] = value

        gains = [cases.values[f"{LARGEST}pixel_accuracy_{name}"] for name in names]
        structures = torch.stack(gains).isfinite().sum(0)  # of each case
        for name, gain in zip(names, gains, strict=True):
            columns = [validated.get(f"{kind}{name}", _UNDEFINED) for kind in ("dice_", first)]
            pair = [column.double().nanmean() for column in columns]
            values[f"kept_{name}"] = torch.stack(pair).expand(len(cases), 2)
            if not pair[1] > pair[0]:
                continue

            values["pixel_accuracy"] = values["pixel_accuracy"] + gain.nan_to_num()
            for metric in KINDS:
                column = f"{metric}_{name}"
                if column in values:
                    change = (cases.values[LARGEST + column] - values[column]).nan_to_num()
                    values[column] = cases.values[LARGEST + column]
                    if metric in values:
                        values[metric] = values[metric] + change / structures

        return Cases(cases.ids, values)

    def scored(self, examined: Examined, scores: str) -> Scored:
        """Return the cases with a structure; their parts are bins of the background probability."""
        if not isinstance(examined.evaluator, MaskEvaluator):
            raise no_sets(
                "masks by its own postprocessing, without `scores: medfl` in federated.yaml"
            )

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
