"""What the test predictions say: confusion, ROC, calibration, intervals, and the cases that went most wrong."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medfl.core.seeding import derive
from medfl.evaluation import bootstrap, calibration, metrics, roc
from medfl.evaluation.bootstrap import Interval
from medfl.report import charts, words
from medfl.report.pictures import WORST
from medfl.report.run_folder import Predictions, RunFolder

_SITES, _CLASSES = 12, 12  # of confusion matrices of single sites: more would not be read
_FEW = 5  # cases of a class, below which its part of an interval says nothing


class Outcomes:
    """The predictions of a run's judged models for the test cases, in numbers for the page.

    Args:
        folder: the run; its predictions are there and not none.
    """

    def __init__(self, folder: RunFolder) -> None:
        """Take the run."""
        assert folder.predictions is not None
        self.folder, self.found = folder, folder.predictions
        self.classes: list[str] = list(folder.run.get("classes") or ())

    @property
    def classified(self) -> bool:
        """Whether the cases have classes."""
        return bool(len(self.found.label))

    @cached_property
    def _times(self) -> NDArray[np.int32]:
        strata = self.found.label if self.classified else np.zeros(len(self.found.ids), np.int64)
        return bootstrap.draw(strata, derive(int(self.folder.run.get("seed") or 0), "report", "intervals"))

    @cached_property
    def _areas(self) -> NDArray[np.float64]:
        assert self.found.probabilities is not None
        return bootstrap.areas(self.found.label, self.found.probabilities, self._times)

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Metric -> its interval over draws of the test cases."""
        found = self.found
        if not self.classified:
            return bootstrap.means(found.scores, self._times)
        ends = bootstrap.classification(found.label, found.predicted, None, len(self.classes), self._times)
        if found.probabilities is not None:
            area = bootstrap.interval(_mean(self._areas))
            ends |= {"auroc": area} if area else {}
        return ends

    def method(self) -> str:
        """Say how the intervals are made."""
        cases = f"{len(self.found.ids)} test cases"
        if not self.classified:
            drawn, few = f"the {cases} drawn again with replacement", []
        else:
            drawn = f"the {cases} drawn again with replacement within each reference class, so that every draw has each"
            sizes = np.bincount(self.found.label, minlength=len(self.classes))
            few = [name for name, n in zip(self.classes, sizes, strict=True) if 0 < n < _FEW]
        text = (
            f"Intervals are {100 * bootstrap.LEVEL:g} % percentile bootstrap intervals of the judged model after the "
            f"last round: {bootstrap.DRAWS} draws, {drawn}. They say how much hangs on these test cases, not on the "
            "training; where a patient has several images, the true ones are wider."
        )
        if any(words.interval(ends) == "–" for ends in self.intervals.values()):
            text += " A dash: all draws give the same, which is no interval."
        return text + (f" Too narrow, for want of cases, as regards {', '.join(few)}." if few else "")

    def confusion(self) -> dict[str, Any] | None:
        """Return the pooled confusion matrix."""
        return self._matrix(np.ones(len(self.found.label), bool)) if self.classified else None

    def confusions(self) -> list[tuple[str, dict[str, Any]]]:
        """Return each site's confusion matrix, none for one site, or for more sites or classes than can be read."""
        sites = [site for site in self.folder.site_names if site in set(self.found.sites)]
        if not self.classified or not 1 < len(sites) <= _SITES or len(self.classes) > _CLASSES:
            return []
        owner = np.array(self.found.sites)
        return [(site, self._matrix(owner == site)) for site in sites]

    def _matrix(self, which: NDArray[np.bool_]) -> dict[str, Any]:
        counts = metrics.confusion(self.found.label[which], self.found.predicted[which], len(self.classes))
        rows, columns, hits = counts.sum(1), counts.sum(0), np.diag(counts)
        return {
            "rows": counts.tolist(),
            "shares": (counts / np.maximum(rows, 1)[:, None]).tolist(),
            "reference": rows.tolist(),
            "cases": int(counts.sum()),
            "recall": [float(h / n) if n else None for h, n in zip(hits, rows, strict=True)],
            "precision": [float(h / n) if n else None for h, n in zip(hits, columns, strict=True)],
        }

    @cached_property
    def curves(self) -> list[roc.Curve]:
        """The ROC curves, one against the rest."""
        found = self.found
        return roc.curves(found.label, found.probabilities) if found.probabilities is not None else []

    def roc(self) -> dict[str, Any] | None:
        """Return the ROC curves: the drawing, and a row for each class with its area; None without probabilities."""
        if not self.curves:
            return None
        many = len(self.curves) > charts.TONES
        tones = ["local" if many else f"tone-{i}" for i in range(len(self.curves))]
        rows = [
            {
                "tone": tone,
                "name": self.classes[curve.index],
                "area": curve.area,
                "ends": bootstrap.interval(self._areas[:, curve.index]),
                "positives": curve.positives,
            }
            for tone, curve in zip(tones, self.curves, strict=True)
        ]
        each = [(curve.false, curve.true) for curve in self.curves]
        drawn, grey = ({}, each) if many else (dict(zip(tones, each, strict=True)), [])
        mean, thick = None, None
        if len(self.curves) > 1:
            thick = roc.macro(self.curves)
            area = float(np.mean([curve.area for curve in self.curves]))
            mean = {"area": area, "ends": bootstrap.interval(_mean(self._areas))}
        title = "ROC curves, one class against the others" if mean else f"ROC curve of {rows[0]['name']}"
        return {"title": title, "svg": charts.roc(title, drawn, grey, thick), "rows": rows, "mean": mean}

    @cached_property
    def _confident(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]] | None:
        """Confidence and rightness of each case."""
        if self.found.probabilities is None or not self.classified:
            return None
        return self.found.probabilities.max(1), self.found.predicted == self.found.label

    def calibration(self) -> dict[str, Any] | None:
        """Return the reliability curve with its drawing, None without probabilities."""
        if self._confident is None:
            return None
        confidence, right = self._confident
        found = calibration.reliability(confidence, right)
        eces, accuracy = calibration.redrawn(found, confidence, right, self._times)
        pairs = zip(accuracy.T, found.accuracy, strict=True)
        ends = [bootstrap.interval(column) or (value, value) for column, value in pairs]
        title = "Reliability of the predicted class"
        svg = charts.reliability(title, found.confidence, found.accuracy, found.count.tolist(), np.array(ends).T)
        return {
            "title": title,
            "svg": svg,
            "ece": found.ece,
            "ends": bootstrap.interval(eces),
            "bins": found.bins,
            "filled": len(found.count),
            "confidence": float(confidence.mean()),
            "accuracy": float(right.mean()),
            "cases": len(right),
        }

    def worst(self) -> list[dict[str, Any]]:
        """Return the cases with the least probability for their reference class, the worst first."""
        found = self.found
        if found.probabilities is None or not self.classified:
            return []
        own = found.probabilities[np.arange(len(found.label)), found.label]
        order = sorted(range(len(own)), key=lambda i: (own[i], found.ids[i]))[:WORST]
        return [
            {
                "id": found.ids[i],
                "site": found.sites[i],
                "label": self.classes[found.label[i]],
                "predicted": self.classes[found.predicted[i]],
                "confidence": float(found.probabilities[i, found.predicted[i]]),
                "own": float(own[i]),
            }
            for i in order
        ]


def outcomes(folder: RunFolder) -> Outcomes | None:
    """Return what a run's predictions say, None where it left none."""
    found: Predictions | None = folder.predictions
    return Outcomes(folder) if found is not None and len(found.ids) else None


def _mean(areas: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean area of each draw over the classes that have one."""
    usable = areas[:, ~np.isnan(areas).all(0)]
    return usable.mean(1) if usable.size else np.full(len(areas), np.nan)
