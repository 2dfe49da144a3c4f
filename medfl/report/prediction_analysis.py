"""The test predictions of a run analysed: confusion, ROC, calibration, intervals, and the worst cases."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from medfl.core.arrays import Floats, Integers
from medfl.core.documents import Document
from medfl.core.seeding import derive
from medfl.evaluation import bootstrap, calibration, metrics, roc
from medfl.evaluation.bootstrap import Interval
from medfl.evaluation.roc import Curve
from medfl.report import charts, formatting
from medfl.report.run_files import RunFiles
from medfl.report.saved_pictures import WORST

# Of the single sites' confusion matrices: more cannot be read.
_MAX_SITES = 12
_MAX_CLASSES = 12


class PredictionAnalysis:
    """The predictions of a run's judged models for the test cases, as numbers for the page."""

    def __init__(self, run: RunFiles) -> None:
        """Take a run with predictions of at least one case."""
        assert run.predictions is not None
        self.run = run
        self.predictions = run.predictions
        self.classes = run.classes

    @property
    def is_classification(self) -> bool:
        """Whether the cases have classes."""
        return bool(len(self.predictions.label))

    @cached_property
    def _draws(self) -> NDArray[np.int32]:
        return bootstrap.draw(self.predictions.strata, derive(self.run.seed, "report", "intervals"))

    @cached_property
    def _areas(self) -> Floats:
        assert self.predictions.probabilities is not None
        return bootstrap.areas(self.predictions.label, self.predictions.probabilities, self._draws)

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Metric -> its interval over draws of the test cases."""
        cases = self.predictions
        if not self.is_classification:
            return bootstrap.means(cases.scores, self._draws)

        ends = bootstrap.classification(
            cases.label, cases.predicted, None, len(self.classes), self._draws
        )
        if cases.probabilities is not None:
            area = bootstrap.mean_area(self._areas) if self._enough else None
            if area is not None:
                ends |= bootstrap.intervals({"auroc": area})

        return ends

    @property
    def _enough(self) -> bool:
        return len(self.predictions.ids) >= bootstrap.LEAST

    @cached_property
    def each(self) -> dict[str, list[float]]:
        """Metric -> its values in rising order, of a metric that too few cases have for an interval."""
        few = {}
        for name, scores in self.predictions.scores.items():
            values = np.sort(scores[~np.isnan(scores)])
            if 0 < len(values) < bootstrap.LEAST:
                few[name] = values.tolist()

        return few

    def cases(self) -> Document | None:
        """Return a table of the test cases where they are too few for an interval, None where they are enough."""
        if self._enough:
            return None

        cases = self.predictions
        if self.is_classification:
            heads = ["Reference", "Predicted", "Confidence"]
            confidences: Iterable[float | None] = [None] * len(cases.ids)
            if self._confidence is not None:
                confidences = self._confidence[0]

            columns = [
                [self.classes[label] for label in cases.label],
                [self.classes[label] for label in cases.predicted],
                _numbers(confidences),
            ]
        else:
            heads = [self.run.title(name) for name in cases.scores]
            columns = list(map(_numbers, cases.scores.values()))

        rows = zip(cases.ids, cases.sites, zip(*columns, strict=True), strict=True)
        return {"heads": heads, "rows": list(rows)}

    def describe_intervals(self) -> str:
        """Return how the intervals are made."""
        draws = f"the {len(self.predictions.ids)} test cases drawn again with replacement"
        few = []
        if self.is_classification:
            draws += " within each reference class, so that every draw has each"
            sizes = np.bincount(self.predictions.label, minlength=len(self.classes))
            for name, size in zip(self.classes, sizes, strict=True):
                if 0 < size < bootstrap.LEAST:
                    few.append(name)

        text = (
            f"Intervals are {100 * bootstrap.LEVEL:g} % percentile bootstrap intervals of the judged model after the "
            f"last round: {bootstrap.DRAWS} draws, {draws}. They say how much hangs on these test cases, not on the "
            "training; where a patient has several images, the true ones are wider."
        )

        if any(formatting.interval(ends) == "–" for ends in self.intervals.values()):
            text += " A dash: all draws give the same, which is no interval."

        if self.each:
            text += (
                f" Where fewer than {bootstrap.LEAST} cases have a metric, "
                "their values stand in place of an interval."
            )

        if few:
            text += f" Too narrow, for want of cases, as regards {', '.join(few)}."

        return text

    def confusion(self) -> Document | None:
        """Return the pooled confusion matrix."""
        if self.is_classification:
            return self._matrix(np.ones(len(self.predictions.label), bool))

        return None

    def confusions(self) -> list[tuple[str, Document]]:
        """Return each site's confusion matrix; none for a single site, or more sites or classes than can be read."""
        sites = [site for site in self.run.site_names if site in set(self.predictions.sites)]
        readable = 1 < len(sites) <= _MAX_SITES and len(self.classes) <= _MAX_CLASSES
        if not self.is_classification or not readable:
            return []

        site_of = np.array(self.predictions.sites)
        return [(site, self._matrix(site_of == site)) for site in sites]

    def _matrix(self, members: NDArray[np.bool_]) -> Document:
        cases = self.predictions
        counts = metrics.confusion(
            cases.label[members], cases.predicted[members], len(self.classes)
        )
        rows = counts.sum(1)
        columns = counts.sum(0)
        hits = np.diag(counts)

        return {
            "rows": counts.tolist(),
            "shares": (counts / np.maximum(rows, 1)[:, None]).tolist(),  # of the reference class
            "reference": rows.tolist(),
            "cases": int(counts.sum()),
            "recall": _shares(hits, rows),
            "precision": _shares(hits, columns),
        }

    @cached_property
    def curves(self) -> list[Curve]:
        """The ROC curves, one against the rest."""
        cases = self.predictions
        if cases.probabilities is not None:
            return roc.curves(cases.label, cases.probabilities)

        return []

    def roc(self) -> Document | None:
        """Return the ROC chart and a row for each class with its area, None without probabilities."""
        if not self.curves:
            return None

        many = len(self.curves) > charts.TONES
        tones = ["local" if many else f"tone-{i}" for i in range(len(self.curves))]
        rows = []
        for tone, curve in zip(tones, self.curves, strict=True):
            row = {"tone": tone, "name": self.classes[curve.index], "area": curve.area}
            interval = self._area_interval(curve)
            rows.append({**row, "ends": interval, "positives": curve.positives})

        rates = [(curve.fpr, curve.tpr) for curve in self.curves]
        mean = None
        mean_curve = None
        title = f"ROC curve of {rows[0]['name']}"
        if len(self.curves) > 1:
            title = "ROC curves, one class against the others"
            mean_curve = roc.macro(self.curves)
            area = float(np.mean([curve.area for curve in self.curves]))
            mean = {"area": area, "ends": self.intervals.get("auroc")}

        if many:  # more curves than colours: thin and grey, with the mean on top
            svg = charts.roc(title, {}, rates, mean_curve)
        else:
            svg = charts.roc(title, dict(zip(tones, rates, strict=True)), mean=mean_curve)

        return {"title": title, "svg": svg, "rows": rows, "mean": mean}

    def _area_interval(self, curve: Curve) -> Interval | None:
        """Return the interval of a class's area, None from too few cases of it or of the others."""
        enough = bootstrap.LEAST <= curve.positives <= len(self.predictions.ids) - bootstrap.LEAST
        if enough:
            return bootstrap.interval(self._areas[:, curve.index])

        return None

    @cached_property
    def _confidence(self) -> tuple[Floats, NDArray[np.bool_]] | None:
        """Confidence of each case, and whether its predicted class is right."""
        cases = self.predictions
        if cases.probabilities is None:
            return None

        return (cases.probabilities.max(1), cases.predicted == cases.label)

    def calibration(self) -> Document | None:
        """Return the reliability chart and its numbers, None without probabilities."""
        if self._confidence is None:
            return None

        confidence, right = self._confidence
        curve = calibration.reliability(confidence, right)
        eces, accuracy = calibration.redrawn(curve, confidence, right, self._draws)
        ends = []
        for draws, value, count in zip(accuracy.T, curve.accuracy, curve.count, strict=True):
            interval = bootstrap.interval(draws) if count >= bootstrap.LEAST else None
            ends.append(interval or (value, value))  # a bin of few cases has no interval

        title = "Reliability of the predicted class"
        svg = charts.reliability(
            title, curve.confidence, curve.accuracy, curve.count.tolist(), np.array(ends).T
        )

        return {
            "title": title,
            "svg": svg,
            "ece": curve.ece,
            "ends": bootstrap.interval(eces) if self._enough else None,
            "bins": curve.bins,
            "filled": len(curve.count),
            "confidence": float(confidence.mean()),
            "accuracy": float(right.mean()),
            "cases": len(right),
        }

    def worst(self) -> list[Document]:
        """Return the cases with the least probability for their reference class, the worst first."""
        cases = self.predictions
        if cases.probabilities is None:
            return []

        of_reference = cases.probabilities[np.arange(len(cases.label)), cases.label]
        order = sorted(range(len(of_reference)), key=lambda i: (of_reference[i], cases.ids[i]))
        rows = []
        for i in order[:WORST]:
            row = {
                "id": cases.ids[i],
                "site": cases.sites[i],
                "label": self.classes[cases.label[i]],
                "predicted": self.classes[cases.predicted[i]],
                "confidence": float(cases.probabilities[i, cases.predicted[i]]),
                "own": float(of_reference[i]),
            }
            rows.append(row)

        return rows


def _numbers(values: Iterable[float | None]) -> list[str]:
    return list(map(formatting.number, values))


def _shares(hits: Integers, totals: Integers) -> list[float | None]:
    """Return hits / totals of each class, None for a class without cases."""
    return [float(hit / n) if n else None for hit, n in zip(hits, totals, strict=True)]


def analyse_predictions(run: RunFiles) -> PredictionAnalysis | None:
    """Return the analysis of a run's predictions, None where it left none."""
    if run.predictions is not None and len(run.predictions.ids):
        return PredictionAnalysis(run)

    return None
