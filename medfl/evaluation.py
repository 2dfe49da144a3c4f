"""One evaluation for all methods: a network and a shard in, per-case outcomes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from ignite.engine import Engine
from monai.data import decollate_batch
from torch import Tensor, nn

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
    """

    batch_size: int = 256

    @torch.no_grad()
    def __call__(self, network: nn.Module, shard: Shard, device: torch.device) -> Cases:
        """Return "probabilities" (N, K), "label" (N,) and "loss" (N,)."""
        network.eval()
        rows: list[Tensor] = []
        labels: list[Tensor] = []
        for x, y in shard.batches(self.batch_size):
            logits = network(x.to(device)).float().flatten(1)
            rows.append(torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits)
            labels.append(y.to(device).reshape(len(logits)).long())
        logits = torch.cat(rows) if rows else torch.zeros(0, 2, device=device)
        label = torch.cat(labels) if labels else torch.zeros(0, dtype=torch.int64, device=device)
        values = {
            "probabilities": logits.softmax(1).cpu(),
            "label": label.cpu(),
            "loss": nn.functional.cross_entropy(logits, label, reduction="none").cpu(),
        }
        return Cases(tuple(shard.ids), values)


@dataclass(frozen=True)
class CaseEvaluator:
    """Any other task: the bundle's own inferer, postprocessing and key metric, case by case.

    Attributes:
        inferer: (inputs, network) -> prediction, e.g. a sliding window.
        postprocessing: dictionary transform over "pred" and "label", or None.
        metric: the bundle's ignite metric.
        metric_name: its name in results.
    """

    inferer: Callable[..., Any]
    postprocessing: Callable[[Any], Any] | None
    metric: Any
    metric_name: str

    @torch.no_grad()
    def __call__(self, network: nn.Module, shard: Shard, device: torch.device) -> Cases:
        """Return the key metric's value per case (N,)."""
        network.eval()
        if getattr(self.metric, "_engine", self) is None:  # MONAI's handlers report details to the engine they hang on
            self.metric.attach(Engine(lambda engine, batch: None), self.metric_name)
        scores = []
        for x, y in shard.batches(1):
            pred = self.inferer(x.to(device), network)
            target = y.to(device) if isinstance(y, Tensor) else y
            cases = decollate_batch({"image": x, "label": target, "pred": pred})
            outputs = [self.postprocessing(case) for case in cases] if self.postprocessing else cases
            self.metric.reset()
            self.metric.update(self.metric._output_transform(outputs))
            scores.append(float(self.metric.compute()))
        return Cases(tuple(shard.ids), {self.metric_name: torch.tensor(scores, dtype=torch.float64)})
