"""Analysis of a run's test predictions: intervals, confusion, ROC, calibration, and the worst cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from medfl.core import Array, Document, Flags, Floats, Integers, derive
from medfl.evaluation import Draws, Interval, bootstrap, calibration, findings, metrics, roc
from medfl.evaluation.bootstrap import LEAST, LEVEL
from medfl.evaluation.numbers import agreement
from medfl.evaluation.roc import Curve
from medfl.report import charts, formatting
from medfl.report.picture import WORST
from medfl.report.run_files import RunFiles

if TYPE_CHECKING:
    from medfl.problem.tasks.kind import Redrawn

# For the single sites' confusion matrices: more are unreadable.
_MAX_SITES = 12
_MAX_CLASSES = 12


class PredictionAnalysis:
    """The predictions of a run's judged models for the test cases, as numbers for the page."""

    def __init__(self, run: RunFiles) -> None:
        """Store a run with predictions of at least one case."""
        assert run.predictions is not None
        self.run = run
        self.predictions = run.predictions
        self.classes = run.classes

    @property
    def is_classification(self) -> bool:
        """Whether the cases have classes."""
        return self.predictions.cases.is_classification

    def _values(self, name: str) -> Array | None:
        """Return a value of the cases, None where they have none of this name."""
        cases = self.predictions.cases
        return cases.array(name) if name in cases.values else None

    @cached_property
    def _draws(self) -> Draws:
        # with a seed of the run: the same folder gives the same page, byte by byte
        return bootstrap.draw(self.predictions.strata, derive(self.run.seed, "report", "intervals"))

    @cached_property
    def _redrawn(self) -> Redrawn:
        return self.predictions.redrawn(self._draws)

    @cached_property
    def intervals(self) -> dict[str, Interval]:
        """Metric -> its interval over draws of the test cases; `<metric> of <name>` for a single finding or number."""
        ends = self.predictions.kind.intervals(self.predictions.cases, self._redrawn)
        if ends and not self.is_classification:
            for name, columns in self._redrawn.by_name.items():
                titles = (f"{name} of {title}" for title in self.names)
                ends |= bootstrap.intervals(dict(zip(titles, columns.T, strict=True)))

        return ends

    @cached_property
    def names(self) -> list[str]:
        """The names of the findings or numbers of a case, or of its classes."""
        from medfl.problem.tasks.kind import column_names  # imports MONAI, which takes seconds

        for value in ("findings", "target"):
            values = self._values(value)
            if values is not None:
                return column_names(self.classes, values.shape[1])

        return list(self.classes)

    @property
    def _enough(self) -> bool:
        return len(self.predictions.ids) >= LEAST

    @cached_property
    def each(self) -> dict[str, list[float]]:
        """Metric -> its values in ascending order, for metrics that too few cases have for an interval."""
        few = {}
        for name, scores in self._scores.items():
            values = np.sort(scores[~np.isnan(scores)])
            if 0 < len(values) < LEAST:
                few[name] = values.tolist()

        return few

    @property
    def _scores(self) -> dict[str, Floats]:
        """Metric -> its value per case, for tasks whose cases have such values."""
        if self.predictions.cases.reference is not None:
            return {}

        return self.predictions.cases.arrays

    def cases(self) -> Document | None:
        """Return a table of the test cases if they are too few for an interval, None if they are enough."""
        if self._enough:
            return None

        cases = self.predictions
        label = self._values("label")
        if label is not None:
            heads = ["Reference", "Predicted", "Confidence"]
            confidences: Iterable[float | None] = [None] * len(cases.ids)
            if self._confidence is not None:
                confidences = self._confidence[0]

            columns = [
                _named(self.classes, label),
                _named(self.classes, self._predicted),
                _numbers(confidences),
            ]
        elif cases.cases.reference is not None:
            heads = []
            columns = []
            reference = cases.cases.reference.numpy().astype(float)
            truth = reference
            # -1 is an unknown finding, but may be a valid number
            if self._values("findings") is not None:
                truth = np.where(reference == -1, np.nan, reference)

            output = self._values("probabilities")
            if output is None:
                output = cases.cases.array("prediction")

            for index, name in enumerate(self.names):
                heads += [name, "Predicted"]
                columns += [_numbers(truth[:, index]), _numbers(output[:, index])]
        else:
            heads = list(map(self.run.title, self._scores))
            columns = list(map(_numbers, self._scores.values()))

        rows = zip(cases.ids, cases.sites, zip(*columns, strict=True), strict=True)
        return {"heads": heads, "rows": list(rows)}

    @cached_property
    def _predicted(self) -> Integers:
        predicted = self._values("predicted")
        assert predicted is not None
        return predicted

    def describe_intervals(self) -> str:
        """Describe how the intervals are computed."""
        draws = f"the {len(self.predictions.ids)} test cases drawn again with replacement"
        few = []
        label = self._values("label")
        if label is not None:
            draws += " within each reference class, so that every draw has each"
            sizes = np.bincount(label, minlength=len(self.classes))
            for name, size in zip(self.classes, sizes, strict=True):
                if 0 < size < LEAST:
                    few.append(name)

        text = (
            f"Intervals are {100 * LEVEL:g} % percentile bootstrap intervals of the judged model after the "
            f"last round: {len(self._draws)} draws, {draws}. They say how much hangs on these test cases, not on the "
            "training; where a patient has several images, the true ones are wider."
        )

        if any(formatting.interval(ends) == "–" for ends in self.intervals.values()):
            text += " A dash: all draws give the same, which is no interval."

        if self.each:
            text += (
                f" Where fewer than {LEAST} cases have a metric, "
                "their values stand in place of an interval."
            )

        if few:
            text += f" Too narrow, for want of cases, as regards {', '.join(few)}."

        return text

    def confusion(self) -> Document | None:
        """Return the pooled confusion matrix."""
        if self.is_classification:
            return self._matrix(np.ones(len(self.predictions), bool))

        return None

    def confusions(self) -> list[tuple[str, Document]]:
        """Return each site's confusion matrix; none for a single site, or too many sites or classes."""
        sites = [site for site in self.run.site_names if site in set(self.predictions.sites)]
        readable = 1 < len(sites) <= _MAX_SITES and len(self.classes) <= _MAX_CLASSES
        if not self.is_classification or not readable:
            return []

        site_of = np.array(self.predictions.sites)
        return [(site, self._matrix(site_of == site)) for site in sites]

    def _matrix(self, members: Flags) -> Document:
        label = self._values("label")
        assert label is not None
        counts = metrics.confusion(label[members], self._predicted[members], len(self.classes))
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
        """The ROC curves: of each class against the rest, or of each finding among the cases where it is known."""
        probabilities = self._values("probabilities")
        if probabilities is None:
            return []

        label = self._values("label")
        if label is not None:
            return roc.curves(label, probabilities)

        curves = []
        truth = self._values("findings")
        assert truth is not None
        for k in range(truth.shape[1]):
            curves += roc.curve(k, *findings.known(probabilities, truth, k))

        return curves

    def roc(self) -> Document | None:
        """Return the ROC chart and a row for each class with its area, None without probabilities."""
        if not self.curves:
            return None

        many = len(self.curves) > charts.TONES
        tones = ["local" if many else f"tone-{i}" for i in range(len(self.curves))]
        rows = []
        for tone, curve in zip(tones, self.curves, strict=True):
            row = {"tone": tone, "name": self.names[curve.index], "area": curve.area}
            interval = self._area_interval(curve)
            rows.append({**row, "ends": interval, "positives": curve.positives})

        rates = [(curve.fpr, curve.tpr) for curve in self.curves]
        mean = None
        mean_curve = None
        title = f"ROC curve of {rows[0]['name']}"
        if len(self.curves) > 1:
            title = "ROC curves, one class against the others"
            averaged = self.curves
            if not self.is_classification:
                title = "ROC curves of the findings"
                # the mean curve covers the same findings as the mean area
                scored = self.predictions.kind.averaged(self.predictions.cases)
                averaged = [curve for curve in self.curves if curve.index in scored]

            if averaged:
                mean_curve = roc.macro(averaged)
                area = float(np.mean([curve.area for curve in averaged]))
                mean = {"area": area, "ends": self.intervals.get("auroc"), "curve": mean_curve}

        if many:  # more curves than colours: thin and grey, with the mean on top
            svg = charts.roc(title, {}, rates, mean_curve)
        else:
            svg = charts.roc(title, dict(zip(tones, rates, strict=True)), mean=mean_curve)

        return {"title": title, "svg": svg, "rows": rows, "mean": mean}

    def _area_interval(self, curve: Curve) -> Interval | None:
        """Return the interval of a class's area, None with too few cases of it or of the others."""
        # with few positives most draws have the same ones, and the interval is too narrow
        enough = LEAST <= curve.positives <= curve.cases - LEAST
        if enough:
            return bootstrap.interval(self._redrawn.by_name["auroc"][:, curve.index])

        return None

    @cached_property
    def _confidence(
        self,
    ) -> tuple[Floats, Flags, Integers, Integers] | None:
        """Confidence of each prediction, whether it is correct, which case it belongs to, and its class or finding.

        For findings the probability of each known one, and whether the case has it.
        """
        probabilities = self._values("probabilities")
        if probabilities is None:
            return None

        label = self._values("label")
        if label is not None:
            called = self._predicted
            return probabilities.max(1), called == label, np.arange(len(label)), called

        truth = self._values("findings")
        assert truth is not None
        # case by case, so that a draw of cases includes all findings of each
        case, finding = np.nonzero(truth >= 0)
        return probabilities[case, finding], truth[case, finding] == 1, case, finding

    def calibration(self) -> Document | None:
        """Return the reliability chart and its numbers, None without probabilities."""
        if self._confidence is None or not len(self._confidence[0]):
            return None

        confidence, right, case, _ = self._confidence
        curve = calibration.reliability(confidence, right)
        eces, accuracy = calibration.redrawn(curve, confidence, right, case, self._draws)
        ends = []
        for draws, value, count in zip(accuracy.T, curve.accuracy, curve.count, strict=True):
            interval = bootstrap.interval(draws) if count >= LEAST else None
            ends.append(interval or (value, value))  # a bin of few cases has no interval

        title = "Reliability of the predicted class"
        axes = ("confidence", "share of right predictions")
        if not self.is_classification:
            title = "Reliability of the findings' probabilities"
            axes = ("probability", "share with the finding")

        svg = charts.reliability(
            title, curve.confidence, curve.accuracy, curve.count.tolist(), np.array(ends).T, axes
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
            "classes": self.is_classification,
        }

    def worst(self) -> Document | None:
        """Return a table of the worst cases, worst first: None if no case has a probability or a number.

        Worst means the lowest probability of the reference class or of a finding's truth, or the largest error.
        """
        cases = self.predictions
        columns = self._of_reference()
        if columns is None:
            return None

        heads, badness, of_case, cells = columns
        worst = np.flatnonzero(badness >= np.sort(badness)[-WORST:][:1])
        # ties by id, so that the page does not depend on the order of the sites
        order = sorted(worst.tolist(), key=lambda i: (-badness[i], cases.ids[int(of_case[i])]))
        rows = []
        for i in order[:WORST]:
            case = int(of_case[i])
            rows.append((cases.ids[case], cases.sites[case], cells(i)))

        return {"heads": heads, "rows": rows}

    def _of_reference(
        self,
    ) -> tuple[list[str], Floats, Integers, Callable[[int], list[str]]] | None:
        """Return headers, badness and case of each candidate for the worst cases, and what makes its cells."""
        names = self.names
        number = formatting.number
        if self._confidence:
            confidence, right, case, output = self._confidence
            label = self._values("label")
            probabilities = self._values("probabilities")
            if label is not None and probabilities is not None:
                of_label = probabilities[case, label]
                heads = ["Reference", "Predicted", "Confidence", "In the reference"]
                return heads, -of_label, case, lambda i: [
                    names[label[i]], names[output[i]], number(confidence[i]), number(of_label[i])
                ]  # fmt: skip

            badness = np.where(right, 1 - confidence, confidence)
            return ["Finding", "Reference", "Probability"], badness, case, lambda i: [
                names[output[i]], ("absent", "present")[int(right[i])], number(confidence[i])
            ]  # fmt: skip

        target = self._values("target")
        prediction = self._values("prediction")
        if target is None or prediction is None:
            return None

        case, index = np.nonzero(~np.isnan(target))
        true = target[case, index]
        predicted = prediction[case, index]
        error = predicted - true
        return ["Number", "True", "Predicted", "Error"], np.abs(error), case, lambda i: [
            names[index[i]], number(true[i]), number(predicted[i]), formatting.signed(error[i])
        ]  # fmt: skip

    def numbers(self) -> list[Document]:
        """Return for each number of a case its name, its charts and its limits of agreement, [] for other tasks.

        A number that no case has is omitted.
        """
        targets = self._values("target")
        predictions = self._values("prediction")
        if targets is None or predictions is None:
            return []

        shown = []
        for d, name in enumerate(self.names):
            is_known = ~np.isnan(targets[:, d])
            if not is_known.any():
                continue

            target = targets[is_known, d]
            prediction = predictions[is_known, d]
            levels = agreement(prediction, target)
            scatter = charts.agreement(
                f"{name}, predicted and true",
                target,
                prediction,
                (f"true {name}", f"predicted {name}"),
                (),
            )
            # against the mean of both: against the truth alone, chance would look like a trend (Bland and Altman 1986)
            differences = charts.agreement(
                f"{name}, predicted - true",
                (prediction + target) / 2,
                prediction - target,
                (f"mean of true and predicted {name}", "predicted - true"),
                levels,
            )
            shown.append(
                {
                    "name": name,
                    "cases": len(target),
                    "levels": levels,
                    "limits": bool(np.isfinite(levels).all()),
                    "scatter_title": f"{name}: predicted against true",
                    "scatter": scatter,
                    "agreement_title": f"{name}: agreement (Bland-Altman)",
                    "agreement": differences,
                }
            )

        return shown


def _named(names: Sequence[str], index: Integers) -> list[str]:
    """Return the names at these positions."""
    return list(np.array(names)[index])


def _numbers(values: Iterable[float | None]) -> list[str]:
    return list(map(formatting.number, values))


def _shares(hits: Integers, totals: Integers) -> list[float | None]:
    """Return hits / totals of each class, None for a class without cases."""
    shares = []
    for hit, n in zip(hits, totals, strict=True):
        shares.append(float(hit / n) if n else None)
    return shares


def analyse_predictions(run: RunFiles) -> PredictionAnalysis | None:
    """Return the analysis of a run's predictions, None if it left none."""
    if run.predictions is not None and len(run.predictions.ids):
        return PredictionAnalysis(run)

    return None
