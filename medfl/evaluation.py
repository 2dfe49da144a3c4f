"""One evaluation for all methods: a network and a shard in, per-case outcomes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from ignite.engine import Engine
from ignite.exceptions import NotComputableError
from monai.data import decollate_batch
from monai.handlers import IgniteMetricHandler
from torch import Tensor, nn

from medfl.errors import RunError
from medfl.metrics import Cases
from medfl.prepared import Shard


class Evaluator(Protocol):
    """Scores a network on a shard."""

    def __call__(self, network: nn.Module, shard: Shard, device: torch.device) -> Cases:
        """Return one outcome per item, in the shard's order; the network is put in evaluation mode."""


@dataclass(frozen=True)
class ClassEvaluator:
    """Classification: class probabilities, label and cross-entropy per case.

    A network with one output is read as the logit of class 1.

    Attributes:
        batch_size: items a forward pass; fixed, so that no setting can change the last bits of a score.
        ends_in_sigmoid: the network gives probabilities, not logits.
    """

    batch_size: int = 256
    ends_in_sigmoid: bool = False

    @torch.no_grad()
    def __call__(self, network: nn.Module, shard: Shard, device: torch.device) -> Cases:
        """Return "probabilities" (N, K), "label" (N,) and "loss" (N,)."""
        network.eval()
        rows: list[Tensor] = []
        labels: list[Tensor] = []
        for x, y in shard.batches(self.batch_size):
            logits = network(x.to(device)).float().flatten(1)
            logits = logits.logit(1e-6) if self.ends_in_sigmoid else logits
            rows.append(torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits)
            one_hot = y.ndim == 2 and y.shape[1] > 1
            labels.append((y.argmax(1) if one_hot else y.reshape(len(logits))).to(device).long())
        logits = torch.cat(rows) if rows else torch.zeros(0, 2, device=device)
        label = torch.cat(labels) if labels else torch.zeros(0, dtype=torch.int64, device=device)
        values = {
            "probabilities": logits.softmax(1).cpu(),
            "label": label.cpu(),
            "loss": nn.functional.cross_entropy(logits, label, reduction="none").cpu(),
        }
        return Cases(tuple(shard.ids), values)


class CaseEvaluator:
    """Any other task: the bundle's own inferer, postprocessing and key metric, case by case.

    Args:
        name: the metric's name in results.
        metric: an ignite metric over a list of {"image", "label", "pred"}, or (prediction, target) -> loss.
        inferer: (inputs, network) -> prediction, e.g. a sliding window.
        postprocessing: dictionary transform over "image", "label" and "pred", or None.
    """

    def __init__(
        self,
        name: str,
        metric: Any,
        inferer: Callable[..., Any],
        postprocessing: Callable[[Any], Any] | None = None,
    ) -> None:
        """Hang the metric on an engine of its own: MONAI's metrics report details there."""
        self.name, self.inferer, self.postprocessing = name, inferer, postprocessing
        self._engine = Engine(lambda engine, batch: None)
        self._metric = metric
        if hasattr(metric, "attach"):
            metric.attach(self._engine, name)

    @torch.no_grad()
    def __call__(self, network: nn.Module, shard: Shard, device: torch.device) -> Cases:
        """Return the metric's value per case (N,), NaN where it is not defined.

        Raises:
            RunError: inferer, postprocessing or metric fail on a case; names it.
        """
        network.eval()
        ids, scores = shard.ids, []
        for x, y in shard.batches(1):
            x, y = (value.to(device) if isinstance(value, Tensor) else value for value in (x, y))
            try:
                scores.append(self._score(x, y, self.inferer(x, network)))
            except Exception as error:
                raise RunError(
                    f"the bundle's validation fails on item {ids[len(scores)]!r}: {type(error).__name__}: {error}"
                ) from error
        return Cases(tuple(ids), {self.name: torch.tensor(scores, dtype=torch.float64)})

    def _score(self, x: Any, y: Any, prediction: Any) -> float:
        if not hasattr(self._metric, "attach"):
            return float(self._metric(prediction, y))
        cases = decollate_batch({"image": x, "label": y, "pred": prediction})
        self._engine.state.output = [  # type: ignore[assignment]
            self.postprocessing(case) if self.postprocessing else case for case in cases
        ]
        self._metric.started(self._engine)
        self._metric.iteration_completed(self._engine)
        try:
            value = self._metric.compute()
        except NotComputableError:  # nothing in this case to score
            return float("nan")
        metric: Any = self._metric.metric_fn if isinstance(self._metric, IgniteMetricHandler) else None
        details = metric.get_buffer() if metric is not None else None
        if isinstance(details, Tensor) and details.isnan().all():  # MONAI calls the mean of nothing 0
            return float("nan")
        parts = list(value.values()) if isinstance(value, Mapping) else value
        return float(torch.as_tensor(parts, dtype=torch.float64).nanmean())
