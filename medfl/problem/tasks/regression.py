"""Regression: one number an image, or several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.data.prepared import Item, Shard
from medfl.evaluation import numbers
from medfl.evaluation.bootstrap import Draws
from medfl.evaluation.conformal import EDGES, Rule, Scored, bins_of, half_width
from medfl.evaluation.metrics import Cases
from medfl.problem.described import Config, tensor_described
from medfl.problem.tasks.kind import (
    Examined,
    Kind,
    OwnValues,
    Redrawn,
    Row,
    Wanted,
    are_flags,
    cases_of,
    column_names,
    exact,
    finite,
    joined,
    macro,
    misfit,
    stacked,
    starting,
)
from medfl.storage.run_reader import Table

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

    def fits(self, prediction: Tensor, target: Tensor, loss: Any, has_class: bool) -> bool:
        """Tell whether there is a number for each output, and a loss of numbers or none that is a yes or no."""
        if prediction.ndim > 2 or target.numel() != prediction.numel():
            return False
        if isinstance(loss, _LOSSES):
            return True

        return target.is_floating_point() and not has_class and not are_flags(target)

    def items(self, items: Sequence[Item]) -> list[Item]:
        """Return records whose "target" has the numbers, also where they are whole."""
        records: list[Item] = []
        for item in items:
            record = dict(item)
            if "label" in record:
                record["target"] = (float(record.pop("label")),)
            records.append(record)

        return records

    def scored(self, examined: Examined, scores: str) -> Scored:
        """Return the cases with a known number, with e / (e + sd) of the absolute error e of each."""
        cases = examined.cases()
        prediction = finite(cases, "prediction")
        target = cases.values["target"].numpy(force=True)
        sd = scale_of(examined.metadata, prediction.shape[1])[1].numpy()
        error = np.abs(prediction - np.nan_to_num(target))
        bins = bins_of(error / (error + sd))
        is_known = ~np.isnan(target)
        return Scored.of(cases.ids, bins, is_known, np.zeros(bins.shape), tuple(sd.tolist()))

    def abstains(self, scored: Scored, place: int) -> NDArray[np.bool_]:
        """Tell that all intervals are endless, or none."""
        return np.full(len(scored), EDGES[place] == 1)

    def set_row(self, cases: Cases, index: int, names: Sequence[str], rule: Rule) -> Row:
        """Return the ends of a new case's interval, of several numbers each."""
        prediction = finite(cases, "prediction")[index]
        row: Row = {}
        for value, sd, name in zip(
            prediction, rule.scale, column_names(names, len(prediction)), strict=True
        ):
            ending = f"_{name}" * (len(prediction) > 1)
            half = half_width(rule.threshold) * sd
            row[f"lower{ending}"] = float(value - half)
            row[f"upper{ending}"] = float(value + half)

        return {**row, "abstain": int(rule.threshold == 1)}

    def by_name(
        self, scores: Mapping[str, float], cases: Cases, names: Sequence[str]
    ) -> dict[str, dict[str, float | None]]:
        """Return the metrics of each number where a case has several, and how many cases have it."""
        target = cases.values["target"].numpy(force=True)
        prediction = cases.values["prediction"].numpy(force=True)
        count = target.shape[1]
        if count == 1:
            return {}

        results: dict[str, dict[str, float | None]] = {}
        for d, name in enumerate(column_names(names, count)):
            metrics = numbers.of_one(target[:, d], prediction[:, d])
            results[name] = {**metrics, "cases": float((target[:, d] == target[:, d]).sum())}

        return results

    def units(self, metadata: Config) -> dict[str, str]:
        """Return the unit of the errors, where all numbers have the same."""
        units = tensor_described(metadata, "outputs", "pred").get("unit")
        if not isinstance(units, list):
            units = [units]

        unit = units[0] if units else None
        if not isinstance(unit, str) or units.count(unit) < len(units):
            return {}
        # any bundle's text, on its way to tables and pages
        if not unit.strip() or not unit.isprintable() or len(unit) > _LONGEST_UNIT:
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
        titles = [name.removeprefix("target_") for name in starting(table, "target_")]
        if not titles:
            return super().read(table, names)

        prediction = stacked(table, [f"predicted_{title}" for title in titles])
        if not np.isfinite(prediction).all():
            raise table.damaged("has a prediction that is not finite")

        target = stacked(table, [f"target_{title}" for title in titles])
        return cases_of(table, {"target": target, "prediction": prediction})

    def has(self, cases: Cases, metric: str) -> NDArray[np.bool_]:
        """Return which cases have a number that is known."""
        if "target" not in cases.values:
            return super().has(cases, metric)

        is_known: NDArray[np.bool_] = ~np.isnan(cases.values["target"].numpy(force=True)).all(1)
        return is_known

    def redrawn(self, cases: Cases, draws: Draws, wanted: Wanted = None) -> Redrawn:
        """Return the metrics of each number, and of several their means."""
        if "target" not in cases.values:
            return super().redrawn(cases, draws, wanted)

        by_name = numbers.redrawn(
            cases.values["prediction"].numpy(force=True),
            cases.values["target"].numpy(force=True),
            draws,
        )
        # a metric that one of the numbers lacks has no mean
        metrics_of = {
            name: values for name, values in by_name.items() if not np.isnan(values).all(0).any()
        }
        return Redrawn(macro(metrics_of), by_name)


def scale_of(metadata: Config, outputs: int) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (D,) by which a network's outputs are numbers in their unit.

    What metadata.json says of the output `pred`, as `"mean": [127.3], "sd": [41.2]`; 0 and 1 where it says nothing:
    number = mean + sd * output. The data's targets are standardised in the same way.

    Raises:
        InputError: they are no numbers, or not as many as outputs.
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
class NumberEvaluator:
    """Numbers an image: predicted and true ones in their unit, and the loss.

    Attributes:
        loss: (output (1, D), target) -> loss.
        metadata: of the bundle, for `scale_of`.
        batch_size: items of a forward pass; fixed, so that no setting changes the last bits of a score.
        metric_inputs: (output, target) of a batch -> further values that the bundle's own metric takes, or None.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    metadata: Config
    batch_size: int = 256
    metric_inputs: OwnValues | None = None

    @torch.no_grad()
    def __call__(
        self,
        network: nn.Module,
        shard: Shard,
        device: torch.device,
        *,
        surface_metrics: Sequence[str] = (),
    ) -> Cases:
        """Return "prediction" and "target" (N, D) float64, NaN where unknown, and "loss" (N,), NaN without a known one.

        Raises:
            InputError: the targets are not one for each output; an item is named.
        """
        network.eval()
        predictions: list[Tensor] = []
        targets: list[Tensor] = []
        losses: list[Tensor] = []
        metric_values: list[dict[str, Tensor]] = []
        for x, y in shard.batches(self.batch_size):
            output = network(x.to(device)).float()
            target = y.to(device).float()
            if target.numel() != output.numel():
                raise misfit(shard, len(losses), target, output)

            for i in range(len(target)):
                losses.append(self.loss(output[i : i + 1], target[i : i + 1]).cpu())

            predictions.append(output.reshape(len(output), -1).cpu().double())
            targets.append(target.reshape(len(target), -1).cpu().double())
            if self.metric_inputs is not None:
                metric_values.append(self.metric_inputs(output, y))

        if not predictions:
            return Cases((), {})

        prediction = torch.cat(predictions)
        target = torch.cat(targets)
        mean, sd = scale_of(self.metadata, prediction.shape[1])
        values = {
            "prediction": mean + sd * prediction,
            "target": mean + sd * target,
            "loss": torch.stack(losses).masked_fill(target.isnan().all(1), torch.nan),
        }
        return Cases(tuple(shard.ids), values | joined(metric_values))
