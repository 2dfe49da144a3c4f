"""Classification: one class an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from medfl.data.prepared import Shard
from medfl.evaluation.metrics import Cases
from medfl.problem.tasks.kind import Kind, Row, column_names, exact


@dataclass(frozen=True)
class Classification(Kind):
    """One class an image."""

    name: str = "classification"
    key_metric: str = "balanced_accuracy"
    least_names: int = 2
    record_key: str = "label"
    chunk: int = 1024

    def fits(self, prediction: Tensor, target: Tensor, loss: Any, has_class: bool) -> bool:
        """Tell whether targets are class indices, or the data list has such."""
        one_index = target.numel() == len(prediction) and not target.is_floating_point()
        return prediction.ndim == 2 and (one_index or has_class)

    def counts(self, shard: Shard, names: Sequence[str]) -> dict[str, int]:
        """Return how many items have each class."""
        labels = shard.labels
        return {name: labels.count(index) for index, name in enumerate(names) if labels}

    def row(self, cases: Cases, index: int, names: Sequence[str], key: str) -> Row:
        """Return the class numbers and the probability of each class."""
        probabilities = cases.values["probabilities"][index].tolist()
        row: Row = {
            "label": int(cases.values["label"][index]),
            "predicted": probabilities.index(max(probabilities)),
        }
        titles = column_names(names, len(probabilities))
        for title, probability in zip(titles, probabilities, strict=True):
            row[f"p_{title}"] = exact(probability)

        return row
