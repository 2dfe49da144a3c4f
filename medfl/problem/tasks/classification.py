"""Classification: one class per image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medfl.core import Integers
from medfl.data import Shard
from medfl.evaluation import Cases, Draws, Rule, Scored, bins_of, bootstrap
from medfl.evaluation.conformal import class_scores
from medfl.problem.tasks.kind import (
    Examined,
    Kind,
    Redrawn,
    Row,
    Wanted,
    cases_of,
    column_names,
    exact,
    finite,
    listed_set,
    macro,
    probabilities_in,
    titles_in,
)
from medfl.storage import Table


@dataclass(frozen=True)
class Classification(Kind):
    """One class per image."""

    name: str = "classification"
    key_metric: str = "balanced_accuracy"
    least_names: int = 2
    record_key: str = "label"
    activation: str = "softmax"
    chunk: int = 1024
    set_scores: tuple[str, ...] = ("lac", "aps")
    promise: str = "images whose set has the true class"

    def fits(self, prediction: Tensor, target: Tensor, loss: Any, has_class: bool) -> bool:
        """Tell whether targets, or the entries of the data list, are class indices."""
        one_index = target.numel() == len(prediction) and not target.is_floating_point()
        return prediction.ndim == 2 and (one_index or has_class)

    def counts(self, shard: Shard, names: Sequence[str]) -> dict[str, int]:
        """Return how many items have each class."""
        labels = shard.labels
        return {name: labels.count(index) for index, name in enumerate(names) if labels}

    def row(self, cases: Cases, index: int, names: Sequence[str], key: str) -> Row:
        """Return the class numbers and the probability of each class."""
        probabilities = cases.values["probabilities"][index].tolist()
        # the first of equals, as argmax has it
        row: Row = {
            "label": int(cases.values["label"][index]),
            "predicted": probabilities.index(max(probabilities)),
        }
        titles = column_names(names, len(probabilities))
        for title, probability in zip(titles, probabilities, strict=True):
            row[f"p_{title}"] = exact(probability)

        return row

    def read(self, table: Table, names: Sequence[str]) -> Cases:
        """Return cases with "label", "predicted" and, where the table has them of all classes, "probabilities"."""
        if table.rows and not (names and {"label", "predicted"} & {*table.columns}):
            return super().read(table, names)

        pairs = []
        for number, row in table.rows:
            try:
                pair = (int(row["label"]), int(row["predicted"]))
            except (KeyError, ValueError):
                raise table.damaged(
                    f"line {number} has no class numbers under label and predicted"
                ) from None

            if not all(0 <= value < len(names) for value in pair):
                raise table.damaged(f"line {number} has a class outside 0 to {len(names) - 1}")

            pairs.append(pair)

        label, predicted = np.array(pairs, np.int64).reshape(-1, 2).T
        columns: dict[str, NDArray[Any]] = {"label": label.copy(), "predicted": predicted.copy()}
        count = len(titles_in(table, "p_"))
        if count and table.rows:
            # in the order of the labels, whatever that of the table is
            columns["probabilities"] = probabilities_in(table, column_names(names, count))

        return cases_of(table, columns)

    def scored(self, examined: Examined, scores: str) -> Scored:
        """Return the cases with a score for each class."""
        cases = examined.cases()
        probabilities = finite(cases, "probabilities")
        count = probabilities.shape[1]
        bins = bins_of(class_scores(probabilities, scores))
        true = np.eye(count)[_label(cases)]
        return Scored.of(cases.ids, bins, true, np.ones(bins.shape), may_be_empty=False)

    def set_row(self, cases: Cases, index: int, names: Sequence[str], rule: Rule) -> Row:
        """Return the classes in the set of a new case."""
        probabilities = finite(cases, "probabilities")[index : index + 1]
        taken = class_scores(probabilities, rule.scores)[0] <= rule.threshold
        row = {"set": listed_set(column_names(names, len(taken)), taken)}
        return {**row, "abstain": int(taken.sum() in (0, len(taken)))}

    def strata(self, cases: Cases) -> Integers:
        """Return the reference classes, so that every draw has each."""
        if not cases.is_classification:
            return super().strata(cases)

        return _label(cases)

    def averaged(self, cases: Cases) -> tuple[int, ...]:
        """Return the classes that the cases have."""
        return tuple(np.unique(_label(cases)).tolist()) if cases.is_classification else ()

    def least(self, cases: Cases) -> int | None:
        """Return the number of cases of the rarest class."""
        if not cases.is_classification:
            return None

        return int(np.unique(_label(cases), return_counts=True)[1].min(initial=len(cases)))

    def redrawn(self, cases: Cases, draws: Draws, wanted: Wanted = None) -> Redrawn:
        """Return accuracy, balanced accuracy, macro F1 and, with probabilities, each class's AUROC and their mean.

        The metrics are those of `medfl.evaluation.metrics`. Areas exist for classes that some but not all cases have.
        """
        if not cases.is_classification:
            return super().redrawn(cases, draws, wanted)

        label = _label(cases)
        probabilities = cases.values.get("probabilities")
        by_name = {}
        if probabilities is not None and (wanted is None or "auroc" in wanted):
            by_name["auroc"] = bootstrap.areas(label, probabilities.numpy(force=True), draws)

        if "predicted" in cases.values:
            predicted = cases.array("predicted")
            classes = 1 + int(max(label.max(), predicted.max())) if len(label) else 1
        else:
            assert probabilities is not None
            predicted = probabilities.argmax(1).numpy(force=True)
            classes = probabilities.shape[1]

        metrics = bootstrap.classified(label, predicted, classes, draws)
        return Redrawn({**metrics, **macro(by_name)}, by_name)


def _label(cases: Cases) -> Integers:
    return cases.array("label")
