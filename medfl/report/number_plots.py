"""Predicted numbers beside true ones: scatter, Bland-Altman plot, and the cases with the largest errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfl.core.documents import Names
from medfl.evaluation import numbers as number_metrics
from medfl.report import charts, formatting
from medfl.report.run_files import Predictions

Candidates = tuple[list[str], NDArray[np.float64], NDArray[np.int64], list[Sequence[str]]]
"""Heads of a table, and of each row its badness, its case and its cells, column by column."""


def numbers(predictions: Predictions, names: Names) -> list[dict[str, Any]]:
    """Return for each number of a case its name, its charts and its limits of agreement, [] for other tasks.

    Of a number that no case has there is none.
    """
    values = predictions.cases.values
    if "target" not in values:
        return []

    shown = []
    for d, name in enumerate(names):
        target = values["target"][:, d].numpy()
        prediction = values["prediction"][:, d].numpy()
        is_known = ~np.isnan(target)
        if not is_known.any():
            continue

        target = target[is_known]
        prediction = prediction[is_known]
        levels = number_metrics.agreement(prediction, target)
        pair = f"{name}, predicted and true"
        beside = f"{name}, predicted - true"
        shown.append(
            {
                "name": name,
                "cases": len(target),
                "levels": levels,
                "limits": bool(np.isfinite(levels).all()),
                "scatter_title": f"{name}: predicted against true",
                "scatter": charts.agreement(
                    pair, target, prediction, (f"true {name}", f"predicted {name}"), ()
                ),
                "agreement_title": f"{name}: agreement (Bland-Altman)",
                "agreement": charts.agreement(
                    beside,
                    (prediction + target) / 2,
                    prediction - target,
                    (f"mean of true and predicted {name}", "predicted - true"),
                    levels,
                ),
            }
        )

    return shown


def errors(predictions: Predictions, names: Names) -> Candidates | None:
    """Return the known numbers of the cases with their errors, None for other tasks."""
    values = predictions.cases.values
    if "target" not in values:
        return None

    target = values["target"].numpy()
    prediction = values["prediction"].numpy()
    case, number = np.nonzero(~np.isnan(target))
    true = target[case, number]
    predicted = prediction[case, number]
    cells: list[Names] = [
        [names[d] for d in number.tolist()],
        [formatting.number(value) for value in true],
        [formatting.number(value) for value in predicted],
        [formatting.signed(value) for value in predicted - true],
    ]
    return ["Number", "True", "Predicted", "Error"], np.abs(predicted - true), case, cells
