"""Regression: one or several numbers per image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medfl.core import InputError, Tensors
from medfl.data import Item, Shard
from medfl.evaluation import Cases, Draws, Rule, Scored, VectorEvaluator, bins_of, numbers
from medfl.evaluation.conformal import half_width
from medfl.problem.described import Config, tensor_described
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
    macro,
    misfit,
    stacked,
    titles_in,
)
from medfl.storage import Table

_LOSSES = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)
_LONGEST_UNIT = 20


@dataclass(frozen=True)
class Regression(Kind):
    """Targets are numbers, one for each output; NaN is unknown."""

    name: str = "regression"
    key_metric: str = "mae"
    noun: str = "number"
    record_key: str = "target"
    chunk: int = 1024
    set_scores: tuple[str, ...] = ("residual",)
    promise: str = "an image's known numbers that are in their interval"
    allowed: str = "a finite number, NaN where it is unknown"

    def fits(self, prediction: Tensor, target: Tensor, loss: Any, has_class: bool) -> bool:
        """Tell whether there is a number for each output, and a loss on numbers or targets beyond 0 and 1."""
        if prediction.ndim > 2 or target.numel() != prediction.numel():
            return False

        is_number = target.is_floating_point() and not has_class and not are_flags(target)
        return isinstance(loss, _LOSSES) or is_number

    def item(self, item: Item) -> Item:
        """Return a record whose "target" has the numbers, also where they are whole; InputError for infinite ones."""
        record = dict(item)
        if "label" in record:
            record["target"] = (float(record.pop("label")),)

        self.check([str(item.get("id"))], [record.get("target") or ()])
        return record

    def scored(self, examined: Examined, scores: str) -> Scored:
        """Return the cases with a known number, with e / (e + sd) of the absolute error e of each."""
        cases = examined.cases()
        prediction = finite(cases, "prediction")
        target = cases.array("target")
        sd = scale_of(examined.metadata, prediction.shape[1])[1].numpy()
        # of what is not known any error will do: `is_known` leaves it out
        error = np.abs(prediction - np.nan_to_num(target))
        bins = bins_of(error / (error + sd))
        is_known = ~np.isnan(target)
        return Scored.of(cases.ids, bins, is_known, np.zeros(bins.shape), tuple(sd.tolist()))

    def set_row(self, cases: Cases, index: int, names: Sequence[str], rule: Rule) -> Row:
        """Return the bounds of a new case's interval, or of each of several numbers."""
        prediction = finite(cases, "prediction")[index]
        row: Row = {}
        for value, sd, name in zip(
            prediction, rule.scale, column_names(names, len(prediction)), strict=True
        ):
            ending = f"_{name}" * (len(prediction) > 1)
            half = half_width(rule.threshold) * sd
            row[f"lower{ending}"] = float(value - half)
            row[f"upper{ending}"] = float(value + half)

        return {**row, "abstain": int(rule.threshold == 1)}  # the interval is the whole line

    def by_name(
        self, scores: Mapping[str, float], cases: Cases, names: Sequence[str]
    ) -> dict[str, dict[str, float | None]]:
        """Return the metrics of each number where a case has several, and how many cases have it."""
        target = cases.array("target")
        prediction = cases.array("prediction")
        count = target.shape[1]
        if count == 1:
            return {}

        results: dict[str, dict[str, float | None]] = {}
        for d, name in enumerate(column_names(names, count)):
            metrics = numbers.of_one(target[:, d], prediction[:, d])
            # NaN differs from itself
            results[name] = {**metrics, "cases": float((target[:, d] == target[:, d]).sum())}

        return results

    def units(self, metadata: Config) -> dict[str, str]:
        """Return the unit of the errors, if all numbers have the same."""
        units = tensor_described(metadata, "outputs", "pred").get("unit")
        if not isinstance(units, list):
            units = [units]

        unit = units[0] if units else None
        if not isinstance(unit, str) or units.count(unit) < len(units) or not unit.strip():
            return {}
        # untrusted text of a bundle, shown in tables and pages
        if not unit.isprintable() or len(unit) > _LONGEST_UNIT:
            return {}

        return {"mae": unit, "rmse": unit}

    def row(self, cases: Cases, index: int, names: Sequence[str], key: str) -> Row:
        """Return the true and the predicted numbers."""
        values = cases.values
        row: Row = {}
        for d, title in enumerate(column_names(names, values["target"].shape[1])):
            row[f"target_{title}"] = exact(float(values["target"][index, d]))
            row[f"predicted_{title}"] = exact(float(values["prediction"][index, d]))

        return row

    def read(self, table: Table, names: Sequence[str]) -> Cases:
        """Return the cases with "target" and "prediction"."""
        titles = titles_in(table, "target_")
        if not titles:
            return super().read(table, names)

        prediction = stacked(table, "predicted_", titles)
        if not np.isfinite(prediction).all():
            raise table.damaged("has a prediction that is not finite")

        target = stacked(table, "target_", titles)
        return cases_of(table, {"target": target, "prediction": prediction})

    def has(self, cases: Cases, metric: str) -> NDArray[np.bool_]:
        """Return which cases have a known number."""
        if "target" not in cases.values:
            return super().has(cases, metric)

        return np.asarray(~np.isnan(cases.array("target")).all(1))

    def redrawn(self, cases: Cases, draws: Draws, wanted: Wanted = None) -> Redrawn:
        """Return the metrics of each number and, for several numbers, their means."""
        if "target" not in cases.values:
            return super().redrawn(cases, draws, wanted)

        by_name = numbers.redrawn(
            cases.array("prediction"),
            cases.array("target"),
            draws,
        )
        # a metric that one of the numbers lacks has no mean
        metrics_of = {}
        for name, values in by_name.items():
            if not np.isnan(values).all(0).any():
                metrics_of[name] = values

        return Redrawn(macro(metrics_of), by_name)


def scale_of(metadata: Config, outputs: int) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (D,) that convert a network's outputs to numbers in their unit.

    Read from the output `pred` in metadata.json, as `"mean": [127.3], "sd": [41.2]`; 0 and 1 if not given:
    number = mean + sd * output. The data's targets are standardised in the same way.

    Raises:
        InputError: they are not numbers, or not one per output.
    """
    described = tensor_described(metadata, "outputs", "pred")
    values = []
    for key, default in (("mean", 0.0), ("sd", 1.0)):
        value = described.get(key, [default] * outputs)
        listed = value if isinstance(value, list) else [value]
        if len(listed) != outputs or not all(isinstance(v, int | float) and v == v for v in listed):
            raise InputError(
                f"metadata.json: outputs#pred#{key} {value!r:.60}",
                f"a list of {outputs} numbers, one for each output",
                "correct it, or leave mean and sd out",
            )
        values.append(torch.tensor(listed, dtype=torch.float64))

    return values[0], values[1]


@dataclass(frozen=True)
class NumberEvaluator(VectorEvaluator):
    """Numbers an image: "prediction" and "target" (N, D) float64 in their unit, NaN where unknown, and "loss" (N,).

    Attributes:
        loss: (output (1, D), target) -> loss; NaN of a case without a known number.
        metadata: of the bundle, for `scale_of`.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    metadata: Config

    def columns(self, output: Tensor, y: Tensor, shard: Shard, position: int) -> tuple[Tensor, ...]:
        """Return output and target (B, D), and losses (B,)."""
        target = y.to(output.device).float()
        if target.numel() != output.numel():
            raise misfit(shard, position, target, output)

        # case by case: a loss is the mean over its batch
        losses = []
        for i in range(len(target)):
            losses.append(self.loss(output[i : i + 1], target[i : i + 1]).cpu())

        predictions = output.reshape(len(output), -1).cpu().double()
        return predictions, target.reshape(len(target), -1).cpu().double(), torch.stack(losses)

    def values(self, shard: Shard, *columns: Tensor) -> Tensors:
        """Return predictions and targets in their unit, and losses."""
        prediction, target, losses = columns
        Regression().check(shard.ids, target.tolist())
        mean, sd = scale_of(self.metadata, prediction.shape[1])
        return {
            "prediction": mean + sd * prediction,
            "target": mean + sd * target,
            "loss": losses.masked_fill(target.isnan().all(1), torch.nan),
        }
