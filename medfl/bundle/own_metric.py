"""A foreign bundle's own key metric, computed of a whole set of cases as its evaluator computes it of an epoch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from ignite.engine import Engine
from ignite.exceptions import NotComputableError
from monai.data import decollate_batch
from torch import Tensor

from medfl.core.errors import RunError, as_text, root_cause
from medfl.evaluation.metrics import Cases

PREDICTION = "own_pred"
LABEL = "own_label"


@dataclass(frozen=True)
class OwnMetric:
    """An ignite metric over a list of {"pred", "label"}.

    Attributes:
        name: in results.
        metric: attached to an engine of its own.
        postprocessing: dictionary transform over "pred" and "label", or None.
    """

    name: str
    metric: Any
    postprocessing: Callable[[Any], Any] | None

    @cached_property
    def _engine(self) -> Engine:
        engine = Engine(lambda engine, batch: None)
        self.metric.attach(engine, self.name)
        return engine

    def postprocessed(self, prediction: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return what the metric takes of a batch, stacked: "own_pred" and "own_label" (B, ...).

        Raises:
            RunError: the bundle's postprocessing fails.
        """
        batch: Any = decollate_batch({"pred": prediction, "label": target})
        try:
            if self.postprocessing is not None:
                batch = [self.postprocessing(case) for case in batch]

            predictions = torch.stack([torch.as_tensor(case["pred"]) for case in batch])
            labels = torch.stack([torch.as_tensor(case["label"]) for case in batch])
        except Exception as error:
            raise RunError(
                f"the bundle's postprocessing fails: {as_text(root_cause(error))}"
            ) from error

        return {PREDICTION: predictions.cpu(), LABEL: labels.cpu()}

    def of(self, cases: Cases) -> dict[str, float]:
        """Return {name: value}, {} where it is undefined on these cases."""
        if PREDICTION not in cases.values or not len(cases):
            return {}

        columns = zip(cases.values[PREDICTION], cases.values[LABEL], strict=True)
        # what an ignite engine does in an epoch of one iteration
        self._engine.state.output = [{"pred": pred, "label": label} for pred, label in columns]  # type: ignore[assignment]
        self.metric.started(self._engine)
        try:
            self.metric.iteration_completed(self._engine)
            value = self.metric.compute()
        except NotComputableError:
            return {}
        except Exception as error:
            raise RunError(
                f"the bundle's metric {self.name!r} fails: {as_text(root_cause(error))}"
            ) from error

        number = float(torch.as_tensor(value, dtype=torch.float64).nanmean())
        return {} if math.isnan(number) else {self.name: number}
