"""Multi-label classification: several findings per image, each present, absent or unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from medfl.core import Array, Tensors
from medfl.data import Item, Shard
from medfl.evaluation import Cases, Draws, Rule, Scored, bins_of, findings
from medfl.evaluation.evaluators import LogitEvaluator
from medfl.problem.tasks.kind import (
    Examined,
    Kind,
    Redrawn,
    Row,
    Wanted,
    are_flags,
    cases_of,
    column_names,
    exact,
    finite,
    listed_set,
    macro,
    misfit,
    probabilities_in,
    stacked,
    titles_in,
)
from medfl.storage import Table
from medfl.training.site import LOSSES_OF_FINDINGS


@dataclass(frozen=True)
class Multilabel(Kind):
    """Targets are (B, K) of 1 and 0; NaN, or less than 0, is unknown."""

    name: str = "multilabel"
    key_metric: str = "auroc"
    noun: str = "finding"
    least_names: int = 1
    record_key: str = "target"
    activation: str = "sigmoid"
    decides: bool = True
    chunk: int = 1024
    set_scores: tuple[str, ...] = ("risk",)
    promise: str = "an image's findings that are in its set, of images with any"
    most: float = 1
    allowed: str = "1 (present), 0 (absent), NaN or less than 0 (unknown)"

    def fits(self, prediction: Tensor, target: Tensor, loss: Any, has_class: bool) -> bool:
        """Tell whether targets are 1 or 0 (or unknown) for each output."""
        has_each = prediction.ndim == 2 and prediction.shape == target.shape
        return has_each and (
            isinstance(loss, LOSSES_OF_FINDINGS) or (prediction.shape[1] > 1 and are_flags(target))
        )

    def item(self, item: Item) -> Item:
        """Return a record whose "target" has 1.0, 0.0 or None (unknown) per finding; InputError for more than 1."""
        record = dict(item)
        if "target" in record:
            record["target"] = tuple(
                value if value is not None and value >= 0 else None for value in record["target"]
            )
            self.check([str(item.get("id"))], [record["target"]])

        return record

    def counts(self, shard: Shard, names: Sequence[str]) -> dict[str, int]:
        """Return how many items are known to have each finding."""
        targets = [shard.prepared.items[i].get("target") for i in shard.indices.tolist()]
        if not targets or None in targets:
            return {}

        columns = zip(names, zip(*targets, strict=True), strict=True)
        return {name: column.count(1) for name, column in columns}

    def scored(self, examined: Examined, scores: str) -> Scored:
        """Return the cases known to have a finding, with the score 1 - p of each finding."""
        cases = examined.cases()
        bins = bins_of(1 - finite(cases, "probabilities"))
        has = cases.array("findings") == 1
        return Scored.of(cases.ids, bins, has, np.ones(has.shape))

    def set_row(self, cases: Cases, index: int, names: Sequence[str], rule: Rule) -> Row:
        """Return the findings in the set of a new case."""
        taken = 1 - finite(cases, "probabilities")[index] <= rule.threshold
        row = {"set": listed_set(column_names(names, len(taken)), taken)}
        return {**row, "abstain": int(taken.all())}

    def decided(self, cases: Cases, validation: Cases | None) -> Cases:
        """Return test cases with "decisions" (N, K), by "thresholds" chosen on validation cases, else 0.5."""
        count = cases.values["probabilities"].shape[1]
        if validation is None or not len(validation):
            return self.decided_by(cases, [0.5] * count)

        return self.decided_by(cases, findings.thresholds(*_arrays(validation)).tolist())

    def decided_by(self, cases: Cases, thresholds: Sequence[float]) -> Cases:
        """Return cases with "decisions" (N, K): a probability >= the threshold means that a finding is present."""
        per_item = torch.tensor(thresholds, dtype=torch.float64)
        decisions = (cases.values["probabilities"].double() >= per_item).to(torch.int8)
        values = {"decisions": decisions, "thresholds": per_item.expand(len(decisions), -1)}
        return Cases(cases.ids, {**cases.values, **values})

    def by_name(
        self, scores: Mapping[str, float], cases: Cases, names: Sequence[str]
    ) -> dict[str, dict[str, float | None]]:
        """Return the metrics of each finding, its number of known positives (`positives`), and its threshold.

        `scored` is 1 for a finding included in macro means, else 0.
        """
        probabilities, truth = _arrays(cases)
        scored = findings.scored(truth)
        decisions = _decisions(cases)
        results: dict[str, dict[str, float | None]] = {}
        for k, name in enumerate(column_names(names, truth.shape[1])):
            decision = None if decisions is None else decisions[:, k]
            metrics = findings.of_one(truth[:, k], probabilities[:, k], decision)
            results[name] = {**metrics, "scored": float(scored[k])}
            if "thresholds" in cases.values:
                thresholds = np.unique(cases.array("thresholds")[:, k])
                if len(thresholds) == 1:  # of several models there are several
                    results[name]["threshold"] = float(thresholds[0])

        return results

    def comparable(self, cases_of: Mapping[str, Cases]) -> Mapping[str, Cases]:
        """Mark as unknown the findings that are not scored at every site, if any finding is."""
        columns = findings.common([_arrays(cases)[1] for cases in cases_of.values() if len(cases)])
        if columns is None:
            return cases_of

        left_out = torch.from_numpy(~columns)
        compared = {}
        for site, cases in cases_of.items():
            values = dict(cases.values)
            if len(cases):
                values["findings"] = values["findings"].masked_fill(left_out, -1)
            compared[site] = Cases(cases.ids, values)

        return compared

    def row(self, cases: Cases, index: int, names: Sequence[str], key: str) -> Row:
        """Return for each finding its truth, its decision and its probability."""
        values = cases.values
        titles = column_names(names, values["findings"].shape[1])
        row = {}
        for k, title in enumerate(titles):
            truth = int(values["findings"][index, k])
            row[f"label_{title}"] = "" if truth < 0 else truth

        for k, title in enumerate(titles):
            if "decisions" in values:
                row[f"predicted_{title}"] = int(values["decisions"][index, k])

        for k, title in enumerate(titles):
            row[f"p_{title}"] = exact(float(values["probabilities"][index, k]))

        return row

    def read(self, table: Table, names: Sequence[str]) -> Cases:
        """Return the cases with "probabilities", "findings" and "decisions"."""
        titles = titles_in(table, "label_")
        if not titles:
            return super().read(table, names)

        truth = stacked(table, "label_", titles)
        truth = np.where(np.isnan(truth), -1, truth)
        decisions = stacked(table, "predicted_", titles)
        if not (np.isin(truth, (-1, 0, 1)).all() and np.isin(decisions, (0, 1)).all()):
            raise table.damaged("has a finding that is neither 1 nor 0 nor blank")

        columns: dict[str, Array] = {
            "probabilities": probabilities_in(table, titles),
            "findings": truth.astype(np.int8),
            "decisions": decisions.astype(np.int8),
        }
        return cases_of(table, columns)

    def averaged(self, cases: Cases) -> tuple[int, ...]:
        """Return the findings with enough positive and negative cases."""
        if "findings" not in cases.values:
            return ()

        return tuple(np.flatnonzero(findings.scored(_arrays(cases)[1])).tolist())

    def redrawn(self, cases: Cases, draws: Draws, wanted: Wanted = None) -> Redrawn:
        """Return the metrics of each scored finding, and their means."""
        if "findings" not in cases.values:
            return super().redrawn(cases, draws, wanted)

        by_name = findings.redrawn(*_arrays(cases), _decisions(cases), draws, wanted)
        return Redrawn(macro(by_name), by_name)


def _decisions(cases: Cases) -> Array | None:
    return cases.array("decisions") if "decisions" in cases.values else None


def _arrays(cases: Cases) -> tuple[Array, Array]:
    """Return probabilities and findings (N, K)."""
    return cases.array("probabilities"), cases.array("findings")


@dataclass(frozen=True)
class FindingEvaluator(LogitEvaluator):
    """Several findings an image: "probabilities" (N, K), "findings" (N, K) of 1, 0 and -1 (unknown), "loss" (N,).

    The loss is the mean of the binary cross-entropy over a case's known findings, NaN where none is known.
    """

    def columns(self, output: Tensor, y: Tensor, shard: Shard, position: int) -> tuple[Tensor, ...]:
        """Return logits and targets (B, K)."""
        logits = self.logits(output)

        target = y.to(logits.device).float().flatten(1)
        if target.shape != logits.shape:
            raise misfit(shard, position, target, logits)

        return logits.cpu(), target.cpu()

    def values(self, shard: Shard, *columns: Tensor) -> Tensors:
        """Return probabilities, findings and losses."""
        logits, target = columns
        Multilabel().check(shard.ids, target.tolist())
        for row, index in enumerate(shard.indices.tolist()):
            if index in shard.shown:  # findings that its site does not annotate are not scored
                target[row] = shard.shown[index].others_unknown(target[row : row + 1])[0]

        is_known = target >= 0  # False for NaN
        truth = (target >= 0.5).float()
        losses = nn.functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
        return {
            "probabilities": logits.sigmoid(),
            "findings": torch.where(is_known, truth, -1).to(torch.int8),
            "loss": (losses * is_known).sum(1) / is_known.sum(1),
        }
