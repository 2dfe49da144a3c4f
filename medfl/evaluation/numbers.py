"""Metrics of numbers predicted for each case, of which some may be unknown (NaN)."""

from __future__ import annotations

import numpy as np

from medfl.core.arrays import Array, Floats
from medfl.core.documents import Metrics
from medfl.evaluation.bootstrap import Draws


def of_one(target: Array, prediction: Array) -> Metrics:
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


def summary(prediction: Array, target: Array) -> Metrics:
    """Return the metrics of (N, D) predictions; of several numbers a case, the mean of each number's metric.

    A metric that one of the numbers lacks is left out.
    """
    rows = [of_one(target[:, d], prediction[:, d]) for d in range(target.shape[1])]
    means = {}
    for name in rows[0]:
        if all(name in row for row in rows):
            means[name] = float(np.mean([row[name] for row in rows]))

    return means


def redrawn(prediction: Array, target: Array, draws: Draws) -> dict[str, Floats]:
    """Return the metrics of `of_one` of each number in each draw (draws, D), NaN where a draw lacks one."""
    names = ("mae", "rmse", "r2", "pearson")
    values = {name: np.full((len(draws), target.shape[1]), np.nan) for name in names}
    for d in range(target.shape[1]):
        is_known = ~np.isnan(target[:, d])
        if not is_known.any():
            continue

        times = draws[:, is_known].astype(np.float64)
        error = prediction[is_known, d] - target[is_known, d]
        # around the mean of all cases, so that squares lose no digits
        x = target[is_known, d] - target[is_known, d].mean()
        y = prediction[is_known, d] - prediction[is_known, d].mean()
        with np.errstate(invalid="ignore", divide="ignore"):
            cases = times.sum(1)
            squared = times @ error**2
            spread_x = times @ x**2 - (times @ x) ** 2 / cases
            spread_y = times @ y**2 - (times @ y) ** 2 / cases
            together = times @ (x * y) - (times @ x) * (times @ y) / cases
            values["mae"][:, d] = times @ np.abs(error) / cases
            values["rmse"][:, d] = np.sqrt(squared / cases)
            values["r2"][:, d] = np.where(spread_x > 0, 1 - squared / spread_x, np.nan)
            product = np.maximum(spread_x * spread_y, 0)
            values["pearson"][:, d] = np.where(product > 0, together / np.sqrt(product), np.nan)

    return values


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
