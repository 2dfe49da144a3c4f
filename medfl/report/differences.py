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
Rows = NDArray[np.int64]


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
        if ends is not None and ends[1] - ends[0] <= _ROUNDING < abs(
            value
        ):  # models may well be the same
            ends = None
            enough = False

        return cls(value, ends, cases, word(ends, higher_is_better) if enough else FEW)


def between_models(ours: RunFiles, theirs: RunFiles, site: str | None = None) -> Difference | None:
    """Return how much higher the key metric of one run's judged models is than another's, on the cases that both have.

    Only the cases of `site` count, None: all. None without predictions of common cases that give the metric.
    """
    if ours.predictions is None or theirs.predictions is None:
        return None

    pairs = _pairs(ours.predictions, theirs.predictions, site)
    scored = np.ones(len(pairs[0]), bool)
    for predictions, rows in zip((ours.predictions, theirs.predictions), pairs, strict=True):
        if ours.key in predictions.scores:
            scored &= ~np.isnan(predictions.scores[ours.key][rows])

    both = [(ours.predictions, pairs[0][scored]), (theirs.predictions, pairs[1][scored])]
    first, second = (p.label[rows] if len(p.label) else rows[:0] for p, rows in both)
    if not scored.any() or not np.array_equal(first, second):
        return None

    draws = _draws(ours, *both[0], "models")
    metric_draws = [_key_metric(ours, predictions, rows, draws) for predictions, rows in both]
    if metric_draws[0] is None or metric_draws[1] is None:
        return None

    enough = _are_enough(ours, *both[0])
    return Difference.of(
        metric_draws[0],
        metric_draws[1],
        int(scored.sum()),
        metrics.higher_is_better(ours.key),
        enough,
    )


def from_other_sites(run: RunFiles, site: str) -> Difference | None:
    """Return how much higher the key metric is on a site's test cases than on those of all other sites."""
    predictions = run.predictions
    if predictions is None:
        return None

    of_site = np.array(predictions.sites) == site
    metric_draws = list[Floats]()
    cases = list[int]()
    enough = True

    for name, members in (("site", of_site), ("others", ~of_site)):
        rows = np.flatnonzero(members)
        if run.key in predictions.scores:
            rows = rows[~np.isnan(predictions.scores[run.key][rows])]

        if len(rows):
            values = _key_metric(run, predictions, rows, _draws(run, predictions, rows, name))
        else:
            values = None

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
        self._sites = run.site_names if run.finished and len(run.site_names) <= _SITES else ()

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
        comparisons = {
            site: between_models(self.run, self.local, site) for site in self._sites if self.local
        }
        return {site: one for site, one in comparisons.items() if one is not None}

    @cached_property
    def pooled(self) -> Difference | None:
        """The same on the test cases of all sites together, each by its own site's Local model."""
        if self.local:
            return between_models(self.run, self.local)

        return None

    @cached_property
    def against_others(self) -> dict[str, Difference]:
        """Site -> how much higher the key metric is there than at the other sites together."""
        sites = self._sites if 1 < len(self._sites) <= _COMPARED else ()
        comparisons = {site: from_other_sites(self.run, site) for site in sites}
        return {site: one for site, one in comparisons.items() if one is not None}

    def everybody(self) -> str:
        """Return what the model reaches on everybody's test images, beside Local models; "" where this is not known."""
        values = {(kind, what): entry.get(self.run.key) for kind, what, entry in self.run.pooled()}
        ours, mean, sd = map(
            values.get, ((self.run.judged, "last"), ("local", "mean"), ("local", "sd"))
        )
        if ours is None or mean is None:
            return ""
        local = number(mean) + (f" ± {number(sd)}" if sd is not None else "")
        return f"{self.run.title(self.run.key).lower()} {number(ours)}; the models that sites train alone: {local}"

    def sentence(self) -> str:
        """Return in how many sites the model is better than Local, "" where this is not known."""
        if not self.against_local:
            return ""

        pooled = self.pooled
        if pooled is None:
            together = ""
        else:
            together = f"; on these {pooled.cases} test cases together: {pooled.word}"

        sites = counted([one.word for one in self.against_local.values()], "site")
        return f"{sites}, each on its own test cases{together}"


def counted(words: Sequence[str], of: str) -> str:
    """Return how often each word is said, as "better at 1 of 4 sites, no clear difference at 3"."""
    total = f" of {len(words)} {of}{'s' if len(words) != 1 else ''}"
    parts = [(one, words.count(one)) for one in (BETTER, WORSE, UNCLEAR, FEW)]
    phrases = [f"{one} at {count}" for one, count in parts if count or one == BETTER]
    return ", ".join([phrases[0] + total, *phrases[1:]])


def _pairs(ours: Predictions, theirs: Predictions, site: str | None) -> tuple[Rows, Rows]:
    """Return the rows of the cases that both have, in the same order."""
    places = {ident: row for row, ident in enumerate(theirs.ids)}
    pairs = [
        (row, places[ident])
        for row, (ident, of) in enumerate(zip(ours.ids, ours.sites, strict=True))
        if ident in places and site in (None, of)
    ]
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T

    return first, second


def _are_enough(run: RunFiles, predictions: Predictions, rows: Rows) -> bool:
    """Return whether an interval of the key metric may be made from these cases."""
    if len(rows) < LEAST or run.key not in _OVER_CLASSES or not len(predictions.label):
        return len(rows) >= LEAST
    return bool(np.unique(predictions.label[rows], return_counts=True)[1].min() >= LEAST_OF_CLASS)


def _draws(run: RunFiles, predictions: Predictions, rows: Rows, name: str) -> Draws:
    """Return how often each draw takes each of these cases; first all of them once."""
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

    return bootstrap.classified(label, predictions.predicted[rows], len(run.classes), draws).get(
        run.key
    )
