"""Metrics of numbers predicted for each case; some targets may be unknown (NaN)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from medfl.core import Array, Floats, Metrics
from medfl.evaluation.bootstrap import Draws

_ROUNDING = 1e-12
"""Relative difference between sums of squares below which it is only rounding error."""


def of_one(target: Array, prediction: Array) -> Metrics:
    """Return MAE, RMSE, R² and Pearson's r of (N,) numbers, as scikit-learn and SciPy define them.

    Cases whose target is NaN are ignored; R² and r are left out if all targets, or all predictions, are equal.
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
    # rounding can make the mean of equal numbers differ from them
    if target.min() < target.max():
        metrics["r2"] = float(1 - (error**2).sum() / (spread**2).sum())
        predicted_spread = prediction - prediction.mean()
        scale = np.sqrt((spread**2).sum() * (predicted_spread**2).sum())
        if prediction.min() < prediction.max() and scale > 0:
            metrics["pearson"] = float((spread * predicted_spread).sum() / scale)

    return metrics


def summary(prediction: Array, target: Array) -> Metrics:
    """Return the metrics of (N, D) predictions; with several numbers per case, the mean of each number's metric.

    A metric that one of the numbers lacks is left out.
    """
    return mean_of([of_one(target[:, d], prediction[:, d]) for d in range(target.shape[1])])


def mean_of(rows: Sequence[Metrics]) -> Metrics:
    """Return the means of the metrics over the numbers, without metrics that one number lacks."""
    means = {}
    for name in rows[0] if rows else ():
        if all(name in row for row in rows):
            means[name] = float(np.mean([row[name] for row in rows]))

    return means


def of_sums(
    count: float, absolute: float, e: float, squared: float, y: float, yy: float, xy: float
) -> Metrics:
    """Return the metrics of `of_one` from sums over the cases: of |e|, e, e², y, y² and xy, with e = x - y.

    R² and r are left out if all targets, or all predictions, are equal within rounding error.
    """
    if not count:
        return {}

    metrics = {"mae": absolute / count, "rmse": math.sqrt(max(0.0, squared) / count)}
    x = e + y
    xx = squared + 2 * xy - yy
    spread_y = yy - y * y / count
    spread_x = xx - x * x / count
    together = xy - x * y / count
    if count > 1 and spread_y > _ROUNDING * yy:
        metrics["r2"] = 1 - squared / spread_y
        if spread_x > _ROUNDING * (squared + 2 * abs(xy) + yy):
            metrics["pearson"] = max(-1.0, min(1.0, together / math.sqrt(spread_x * spread_y)))

    return metrics


def redrawn(prediction: Array, target: Array, draws: Draws) -> dict[str, Floats]:
    """Return the metrics of `of_one` of each number in each draw (draws, D), NaN if a draw lacks one."""
    names = ("mae", "rmse", "r2", "pearson")
    values = {name: np.full((len(draws), target.shape[1]), np.nan) for name in names}
    for d in range(target.shape[1]):
        is_known = ~np.isnan(target[:, d])
        if not is_known.any():
            continue

        times = draws[:, is_known].astype(np.float64)
        error = prediction[is_known, d] - target[is_known, d]
        # centred on the mean of all cases, so that squares lose no digits
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
