"""The evaluators of `medfl.Parts`: medfl's evaluator of each task, plus metrics given as functions of a case."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from medfl.core.errors import RunError
from medfl.data.prepared import Shard
from medfl.evaluation.evaluators import CaseEvaluator, Evaluator, MaskEvaluator
from medfl.evaluation.metrics import Cases

Metrics = Mapping[str, Callable[[Any, Any], Any]]


@dataclass(frozen=True)
class OwnVectors:
    """A task with vector outputs, scored by its evaluator; a metric gets these two values of one case.

    Classification: probabilities (1, K) and label (1,); findings: both (1, K); numbers: both (1, D).
    """

    evaluator: Evaluator
    names: tuple[str, str]
    metrics: Metrics

    def __call__(
        self,
        network: nn.Module,
        shard: Shard,
        device: torch.device,
        *,
        surface_metrics: Sequence[str] = (),
    ) -> Cases:
        """Return the evaluator's values, and one (N,) tensor per metric."""
        cases = self.evaluator(network, shard, device, surface_metrics=surface_metrics)
        if not len(cases):
            return cases

        outputs, targets = (torch.split(cases.values[name], 1) for name in self.names)
        return _with(cases, self.metrics, zip(outputs, targets, strict=True))


@dataclass(frozen=True)
class OwnMasks(MaskEvaluator):
    """Segmentation; a metric gets the output (1, K, H, W[, D]) and the target."""

    metrics: Metrics = field(default_factory=dict)

    @torch.no_grad()
    def __call__(
        self,
        network: nn.Module,
        shard: Shard,
        device: torch.device,
        *,
        surface_metrics: Sequence[str] = (),
    ) -> Cases:
        """Return the values of `MaskEvaluator`, and one (N,) tensor per metric."""
        cases = super().__call__(network, shard, device, surface_metrics=surface_metrics)
        return _with(cases, self.metrics, self._outputs(network, shard, device))


class OwnCases(CaseEvaluator):
    """Any other task: the loss, and the given metrics."""

    def __init__(
        self, loss: Callable[[Any, Any], Tensor], inferer: Callable[..., Any], metrics: Metrics
    ) -> None:
        super().__init__("loss", loss, inferer)
        self.metrics = metrics

    @torch.no_grad()
    def __call__(
        self,
        network: nn.Module,
        shard: Shard,
        device: torch.device,
        *,
        surface_metrics: Sequence[str] = (),
    ) -> Cases:
        """Return one (N,) tensor per metric, and one for the loss."""
        cases = super().__call__(network, shard, device, surface_metrics=surface_metrics)
        outputs = self._outputs(network, shard, device)
        return _with(cases, self.metrics, ((output, target) for _, target, output, _ in outputs))


def _with(cases: Cases, metrics: Metrics, outputs: Iterable[tuple[Any, Any]]) -> Cases:
    """Add the values of further metrics to cases; RunError that names metric and item if one fails."""
    if not metrics or not len(cases):
        return cases

    scores: dict[str, list[float]] = {name: [] for name in metrics}
    for ident, (output, target) in zip(cases.ids, outputs, strict=True):
        for name, metric in metrics.items():
            try:
                scores[name].append(_number(metric(output, target)))
            except Exception as error:  # a user's function may raise anything
                raise RunError(
                    f"metric {name!r} fails on item {ident!r}: {type(error).__name__}: {error}"
                ) from error

    values = {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in scores.items()}
    return Cases(cases.ids, {**cases.values, **values})


def _number(value: object) -> float:
    """Return a metric's value as a number: the mean of its values that are not NaN, NaN if there are none."""
    mean = torch.as_tensor(value, dtype=torch.float64).nanmean()
    return float(mean) if mean.isfinite() else math.nan
