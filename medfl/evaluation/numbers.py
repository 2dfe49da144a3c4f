"""Metrics of numbers predicted for each case, of which some may be unknown (NaN)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def of_one(target: Array, prediction: Array) -> dict[str, float]:
    """Return MAE, RMSE, R² and Pearson's r of (N,) numbers, as scikit-learn and SciPy define them.

    Of cases whose target is not NaN; R² and r are left out where all targets, or all predictions, are equal.
    """
    is_known = ~np.isnan(target)
    target = target[is_known].astype(np.float64)
    prediction = prediction[is_known].astype(np.float64)
    if not len(target):
        return {}

    error = prediction - target
    metrics = {
        "mae": float(np.abs(error).mean()),
        "rmse": float(np.sqrt((error**2).mean())),
    }
    spread = target - target.mean()
    if len(target) > 1 and spread.any():
        metrics["r2"] = float(1 - (error**2).sum() / (spread**2).sum())
        predicted_spread = prediction - prediction.mean()
        scale = np.sqrt((spread**2).sum() * (predicted_spread**2).sum())
        if scale > 0:
            metrics["pearson"] = float((spread * predicted_spread).sum() / scale)

    return metrics


def summary(prediction: Array, target: Array) -> dict[str, float]:
    """Return the metrics of (N, D) predictions; of several numbers a case, the mean of each number's metric.

    A metric that one of the numbers lacks is left out.
    """
    rows = [of_one(target[:, d], prediction[:, d]) for d in range(target.shape[1])]
    means = {}
    for name in rows[0]:
        if all(name in row for row in rows):
            means[name] = float(np.mean([row[name] for row in rows]))

    return means


def agreement(prediction: Array, target: Array) -> tuple[float, float, float]:
    """Return the bias and the 95 % limits of agreement of (N,) numbers: mean ± 1.96 standard deviations of the errors.

    J. M. Bland, D. G. Altman: Statistical methods for assessing agreement between two methods of clinical measurement
    (1986).
    """
    is_known = ~np.isnan(target)
    error = prediction[is_known].astype(np.float64) - target[is_known]
    bias = float(error.mean())
    sd = float(error.std(ddof=1)) if len(error) > 1 else float("nan")
    return bias, bias - 1.96 * sd, bias + 1.96 * sd
