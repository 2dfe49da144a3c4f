"""Differences between models and between sites, with intervals: better or worse is said only where zero is outside.

There is no interval from fewer than ten cases, nor of a mean over classes where one of them has fewer than five: draws
keep each class's number of cases, so that one or two cases of a class hardly vary. Nor is there one of no width
beside zero, which says no more than that the draws could not vary.

Of two models the same test cases are drawn again for both, a thousand times (`medfl.evaluation.bootstrap`); of a site
and the others the cases of each apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from medfl.core.arrays import Integers
from medfl.core.seeding import derive
from medfl.evaluation import bootstrap, metrics
from medfl.evaluation.bootstrap import LEAST, Draws, Floats, Interval
from medfl.report.formatting import number
from medfl.report.run_files import RunFiles
from medfl.storage.run_reader import Predictions

BETTER = "better"
WORSE = "worse"
UNCLEAR = "no clear difference"
FEW = "too few cases"
LEAST_OF_CLASS = 5
"""Cases of each class; from fewer there is no interval of a metric that is a mean over classes."""
_OVER_CLASSES = {"auroc", "balanced_accuracy", "f1_macro"}
_ROUNDING = 1e-9  # below it an end is zero
_SITES = 100
_COMPARED = 24
"""Of more sites no differences from Local, and from each other, are computed."""
Rows = Integers


def word(ends: Interval | None, higher_is_better: bool) -> str:
    """Return better or worse where an interval of a difference excludes zero, else that it is not clear."""
    if ends is None or ends[0] <= _ROUNDING and ends[1] >= -_ROUNDING:
        return UNCLEAR
    if (ends[0] > 0) == higher_is_better:
        return BETTER

    return WORSE


@dataclass(frozen=True)
class Difference:
    """How much higher a metric is for one than for another.

    Attributes:
        value: the difference on the cases as they are.
        ends: its interval; None from too few cases, and where all draws are the same but not zero.
        cases: the smaller number of cases that it rests on.
        word: what may be said of it.
    """

    value: float
    ends: Interval | None
    cases: int
    word: str

    @classmethod
    def of(
        cls, ours: Floats, theirs: Floats, cases: int, higher_is_better: bool, enough: bool
    ) -> Difference | None:
        """Return ours - theirs of a metric, each (1 + draws,) with the cases as they are first.

        `cases` is the smaller number of cases, `enough` says whether they are enough for an interval.
        """
        value = float(ours[0] - theirs[0])
        drawn = ours[1:] - theirs[1:]
        if np.isnan(value):
            return None

        ends = bootstrap.interval(drawn) if enough else None
        # all draws are equal: no uncertainty was measured, unless the models are the same
        if ends is not None and ends[1] - ends[0] <= _ROUNDING < abs(value):
            ends = None
            enough = False

        return cls(value, ends, cases, word(ends, higher_is_better) if enough else FEW)


def between_models(ours: RunFiles, theirs: RunFiles, site: str | None = None) -> Difference | None:
    """Return how much higher the key metric of one run's judged models is than another's, on the cases that both have.

    Only the cases of `site` count, None: all. None without predictions of common cases that give the metric.
    """
    first = ours.predictions
    second = theirs.predictions
    if first is None or second is None:
        return None

    rows, their_rows = _pairs(first, second, site)
    scored = _has_key_metric(ours, first, rows) & _has_key_metric(ours, second, their_rows)
    rows = rows[scored]
    their_rows = their_rows[scored]
    # runs on other versions of the data must not be compared
    if not len(rows) or not np.array_equal(_labels(first, rows), _labels(second, their_rows)):
        return None

    draws = _draws(ours, first, rows, "models")
    our_metric = _key_metric(ours, first, rows, draws)
    their_metric = _key_metric(ours, second, their_rows, draws)
    if our_metric is None or their_metric is None:
        return None

    higher = metrics.higher_is_better(ours.key)
    enough = _are_enough(ours, first, rows)
    return Difference.of(our_metric, their_metric, len(rows), higher, enough)


def from_other_sites(run: RunFiles, site: str) -> Difference | None:
    """Return how much higher the key metric is on a site's test cases than on those of all other sites."""
    predictions = run.predictions
    if predictions is None:
        return None

    of_site = np.array(predictions.sites) == site
    metric_draws = []
    cases = []
    enough = True

    for name, members in (("site", of_site), ("others", ~of_site)):
        rows = np.flatnonzero(members)
        rows = rows[_has_key_metric(run, predictions, rows)]
        if not len(rows):
            return None

        values = _key_metric(run, predictions, rows, _draws(run, predictions, rows, name))
        if values is None:
            return None

        metric_draws.append(values)
        cases.append(len(rows))
        enough &= _are_enough(run, predictions, rows)

    return Difference.of(
        metric_draws[0], metric_draws[1], min(cases), metrics.higher_is_better(run.key), enough
    )


class Differences:
    """What may be said of a finished run's judged model against the models that sites train alone, and of its sites."""

    def __init__(self, run: RunFiles) -> None:
        """Take a run."""
        self.run = run

        if run.finished and len(run.site_names) <= _SITES:
            self._sites = run.site_names
        else:
            self._sites = ()

    @cached_property
    def local(self) -> RunFiles | None:
        """The run of the sites alone, None where there was none."""
        folder = self.run.path / "local"
        if self.run.finished and (folder / "run.json").is_file():
            return RunFiles(folder)

        return None

    @cached_property
    def against_local(self) -> dict[str, Difference]:
        """Site -> how much higher the key metric is than that of its own Local model."""
        if self.local is None:
            return {}

        differences = {}
        for site in self._sites:
            difference = between_models(self.run, self.local, site)
            if difference is not None:
                differences[site] = difference

        return differences

    @cached_property
    def pooled(self) -> Difference | None:
        """The same on the test cases of all sites together, each by its own site's Local model."""
        if self.local:
            return between_models(self.run, self.local)

        return None

    @cached_property
    def against_others(self) -> dict[str, Difference]:
        """Site -> how much higher the key metric is there than at the other sites together."""
        differences = {}
        for site in self._sites if 1 < len(self._sites) <= _COMPARED else ():
            difference = from_other_sites(self.run, site)
            if difference is not None:
                differences[site] = difference

        return differences

    def everybody(self) -> str:
        """Return what the model reaches on everybody's test images, beside Local models; "" where this is not known."""
        values = {(kind, when): entry.get(self.run.key) for kind, when, entry in self.run.pooled()}
        ours = values.get((self.run.judged, "last"))
        mean = values.get(("local", "mean"))
        sd = values.get(("local", "sd"))
        if ours is None or mean is None:
            return ""

        local = number(mean)
        if sd is not None:
            local += f" ± {number(sd)}"

        return f"{self.run.title(self.run.key).lower()} {number(ours)}; the models that sites train alone: {local}"

    def sentence(self) -> str:
        """Return in how many sites the model is better than Local, "" where this is not known."""
        if not self.against_local:
            return ""

        words = [difference.word for difference in self.against_local.values()]
        text = f"{counted(words, 'site')}, each on its own test cases"
        if self.pooled is not None:
            text += f"; on these {self.pooled.cases} test cases together: {self.pooled.word}"

        return text


def counted(words: Sequence[str], of: str) -> str:
    """Return how often each word occurs, as "better at 1 of 4 sites, no clear difference at 3"."""
    plural = "s" if len(words) != 1 else ""
    phrases = [f"{BETTER} at {words.count(BETTER)} of {len(words)} {of}{plural}"]
    for label in (WORSE, UNCLEAR, FEW):
        if label in words:
            phrases.append(f"{label} at {words.count(label)}")

    return ", ".join(phrases)


def _pairs(ours: Predictions, theirs: Predictions, site: str | None) -> tuple[Rows, Rows]:
    """Return the rows of the cases that both have, in the same order."""
    their_row = {ident: row for row, ident in enumerate(theirs.ids)}
    pairs = []
    for row, (ident, case_site) in enumerate(zip(ours.ids, ours.sites, strict=True)):
        if ident in their_row and site in (None, case_site):
            pairs.append((row, their_row[ident]))

    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    return first, second


def _has_key_metric(run: RunFiles, predictions: Predictions, rows: Rows) -> NDArray[np.bool_]:
    """Return which of these cases have the key metric, where it is one of single cases; of others all."""
    if run.key in predictions.scores:
        return ~np.isnan(predictions.scores[run.key][rows])

    return np.ones(len(rows), bool)


def _labels(predictions: Predictions, rows: Rows) -> Rows:
    """Return the labels of some cases, nothing without classes."""
    if len(predictions.label):
        return predictions.label[rows]

    return rows[:0]


def _are_enough(run: RunFiles, predictions: Predictions, rows: Rows) -> bool:
    """Return whether an interval of the key metric may be made from these cases."""
    if len(rows) < LEAST:
        return False
    if run.key not in _OVER_CLASSES or not len(predictions.label):
        return True

    return bool(np.unique(predictions.label[rows], return_counts=True)[1].min() >= LEAST_OF_CLASS)


def _draws(run: RunFiles, predictions: Predictions, rows: Rows, name: str) -> Draws:
    """Return how often each draw takes each of these cases, (1 + draws, cases); the first takes all once."""
    drawn = bootstrap.draw(
        predictions.strata[rows], derive(run.seed, "report", "differences", name)
    )
    return np.concatenate([np.ones((1, len(rows)), np.int32), drawn])


def _key_metric(run: RunFiles, predictions: Predictions, rows: Rows, draws: Draws) -> Floats | None:
    """Return the key metric (draws,) of some cases, None where the predictions do not give it."""
    if run.key in predictions.scores:
        return bootstrap.mean(predictions.scores[run.key][rows], draws)
    if not len(predictions.label):
        return None

    label = predictions.label[rows]
    if run.key == "auroc" and predictions.probabilities is not None:
        return bootstrap.mean_area(bootstrap.areas(label, predictions.probabilities[rows], draws))

    values = bootstrap.classified(label, predictions.predicted[rows], len(run.classes), draws)
    return values.get(run.key)
