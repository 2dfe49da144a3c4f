"""Differences between models and between sites, with intervals: better or worse only if the interval excludes zero.

There is no interval from fewer than ten cases, nor for a mean over classes if one of them has fewer than five: draws
keep each class's number of cases, so that one or two cases of a class hardly vary. A zero-width interval away from
zero is not used either: it only shows that the draws could not vary.

For two models the same test cases are resampled for both, a thousand times (`medfl.evaluation.bootstrap`); for a site
and the others the cases of each are resampled separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from medfl.core import Floats, Integers, derive, pick, within
from medfl.evaluation import Cases, Draws, Interval, bootstrap, metrics
from medfl.evaluation.bootstrap import LEAST
from medfl.report import cross_site
from medfl.report.formatting import number, signed
from medfl.report.run_files import Predictions, RunFiles

BETTER = "better"
WORSE = "worse"
UNCLEAR = "no clear difference"
FEW = "too few cases"
LEAST_OF_CLASS = 5
"""Minimum cases per class for an interval of a metric that is a mean over classes."""
_ROUNDING = 1e-9  # below it a bound counts as zero
_SITES = 100
_COMPARED = 24
"""Maximum number of sites for differences from Local, and from each other."""
Rows = Integers


def word(ends: Interval | None, higher_is_better: bool) -> str:
    """Return better or worse if an interval of a difference excludes zero, else that it is unclear."""
    if ends is None or ends[0] <= _ROUNDING and ends[1] >= -_ROUNDING:
        return UNCLEAR
    if (ends[0] > 0) == higher_is_better:
        return BETTER

    return WORSE


@dataclass(frozen=True)
class Difference:
    """How much higher a metric is for one than for another.

    Attributes:
        value: the difference on the original cases.
        ends: its interval; None with too few cases, and if all draws are equal but not zero.
        cases: the smaller number of underlying cases.
        word: the verdict.
    """

    value: float
    ends: Interval | None
    cases: int
    word: str

    @classmethod
    def of(
        cls, ours: Floats, theirs: Floats, cases: int, higher_is_better: bool, enough: bool
    ) -> Difference | None:
        """Return ours - theirs of a metric, each (1 + draws,) with the original cases first.

        `cases` is the smaller number of cases; `enough`: they are enough for an interval.
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
    """Return how much higher the key metric of one run's judged models is than another's, on their common cases.

    Only the cases of `site` count, None: all. None without predictions of common cases that define the metric.
    """
    first = ours.predictions
    second = theirs.predictions
    if first is None or second is None:
        return None

    rows, their_rows = _pairs(first, second, site)
    first = first.select(rows)
    second = second.select(their_rows)
    scored = np.flatnonzero(
        first.kind.has(first.cases, ours.key) & second.kind.has(second.cases, ours.key)
    )
    first = first.select(scored)
    second = second.select(scored)
    # runs on different versions of the data must not be compared
    if not len(first) or not _same_reference(first.cases, second.cases):
        return None

    # the same draws for both models: their difference is paired, case by case
    draws = _draws(ours, first, "models")
    our_metric = first.redrawn(draws, [ours.key]).metrics.get(ours.key)
    their_metric = second.redrawn(draws, [ours.key]).metrics.get(ours.key)
    if our_metric is None or their_metric is None:
        return None

    higher = metrics.higher_is_better(ours.key)
    return Difference.of(our_metric, their_metric, len(first), higher, _are_enough(ours, first))


def from_other_sites(run: RunFiles, site: str) -> Difference | None:
    """Return how much higher the key metric is on a site's test cases than on those of all other sites."""
    predictions = run.predictions
    if predictions is None:
        return None

    of_site = np.array(predictions.sites) == site
    parts = []
    for members in (of_site, ~of_site):
        part = predictions.select(np.flatnonzero(members))
        parts.append(part.select(np.flatnonzero(part.kind.has(part.cases, run.key))))

    parts = _comparable(run.key, parts)
    metric_draws = []
    for name, part in zip(("site", "others"), parts, strict=True):
        values = None
        if len(part):
            values = part.redrawn(_draws(run, part, name), [run.key]).metrics.get(run.key)

        if values is None:
            return None

        metric_draws.append(values)

    cases = min(map(len, parts))
    enough = all(_are_enough(run, part) for part in parts)
    higher = metrics.higher_is_better(run.key)
    return Difference.of(metric_draws[0], metric_draws[1], cases, higher, enough)


def _comparable(key: str, parts: Sequence[Predictions]) -> list[Predictions]:
    """Return sets of cases such that a mean over classes covers the same ones in each, [] if that is impossible."""
    kind = parts[0].kind
    cases_of = kind.comparable({str(i): part.cases for i, part in enumerate(parts)})
    compared = [
        Predictions(cases_of[str(i)], part.sites, part.kind) for i, part in enumerate(parts)
    ]

    if key in metrics.OVER_CLASSES and len({kind.averaged(part.cases) for part in compared}) > 1:
        return [part.select(np.zeros(0, np.int64)) for part in compared]

    return compared


class Differences:
    """Verdicts on a finished run's judged model against the models that sites train alone, and on its sites."""

    def __init__(self, run: RunFiles) -> None:
        """Store a run."""
        self.run = run

        if run.finished and len(run.site_names) <= _SITES:
            self._sites = run.site_names
        else:
            self._sites = ()

    @cached_property
    def local(self) -> RunFiles | None:
        """The run of the sites alone, None if there was none."""
        folder = self.run.path / "local"
        if self.run.finished and (folder / "run.json").is_file():
            return RunFiles(folder)

        return None

    @cached_property
    def against_local(self) -> dict[str, Difference]:
        """Site -> how much higher the key metric is than with its own Local model."""
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
        """The same on the test cases of all sites together, each with its own site's Local model."""
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

    def answers(self) -> dict[str, str]:
        """Return a hospital's questions about the model, with the run's answers as far as it has them."""
        answers = {
            "At your own hospital": self._at_own_sites(),
            "At a hospital that sent nothing": "; ".join(self._at_unseen_sites()),
            "On everybody's test images": self._on_all(),
        }
        return {question: answer for question, answer in answers.items() if answer}

    def _at_own_sites(self) -> str:
        """Describe at how many sites the model is better than Local."""
        if not self.against_local:
            return ""

        ours = self.run.site_values(self.run.judged, self.run.key)
        alone = self.run.site_values("local", self.run.key)
        of_both = within(ours, alone)
        text = "each on its own test cases: "
        if of_both:
            mean = number(fmean(of_both.values()))
            mean_alone = number(fmean(pick(alone, of_both).values()))
            text = (
                f"{self._metric} {mean} with {self.run.record['method']}, {mean_alone} alone, "
                f"in the mean of the sites, {text}"
            )

        words = [difference.word for difference in self.against_local.values()]
        text += counted(words, "site")
        if self.pooled is not None:
            text += (
                f"; on these {self.pooled.cases} test cases together: "
                f"{self.pooled.word} ({signed(self.pooled.value)})"
            )

        return text

    def _at_unseen_sites(self) -> Iterator[str]:
        """Yield the model's performance at each site that did not train, beside the models that others train alone."""
        alone = cross_site.read(self.local) if self.local else None
        reached = self.run.site_values(self.run.judged, self.run.key)
        for site in self._sites:
            if self.run.size(site, "train") or site not in reached:
                continue

            cases = self.run.size(site, "test")
            text = f"{self._metric} {number(reached[site])} at {site} ({cases} test cases)"
            values = []
            for cells in (alone.rows if alone else {}).values():
                # excluding a site's own model
                if site in cells and not cells[site].is_own:
                    values.append(cells[site].value)

            if values:
                higher = metrics.higher_is_better(self.run.key)
                best = number((max if higher else min)(values))
                text += f"; models that sites train alone {number(fmean(values))} in the mean, the best {best}"

            yield text

    def _on_all(self) -> str:
        """Return what the model reaches on everybody's test images, beside Local models."""
        values = {}
        for kind, when, entry in self.run.pooled():
            values[(kind, when)] = entry.get(self.run.key)

        ours = values.get((self.run.judged, "last"))
        mean = values.get(("local", "mean"))
        sd = values.get(("local", "sd"))
        if ours is None or mean is None:
            return ""

        local = number(mean)
        if sd is not None:
            local += f" ± {number(sd)}"

        return f"{self._metric} {number(ours)}; models that sites train alone {local}"

    @property
    def _metric(self) -> str:
        return self.run.title(self.run.key)


def counted(words: Sequence[str], of: str) -> str:
    """Return how often each word occurs, e.g. "better at 1 of 4 sites, no clear difference at 3"."""
    plural = "s" * (len(words) != 1)
    phrases = [f"{BETTER} at {words.count(BETTER)} of {len(words)} {of}{plural}"]
    for label in (WORSE, UNCLEAR, FEW):
        if label in words:
            phrases.append(f"{label} at {words.count(label)}")

    return ", ".join(phrases)


def _pairs(ours: Predictions, theirs: Predictions, site: str | None) -> tuple[Rows, Rows]:
    """Return the rows of their common cases, in the same order."""
    # by id: two runs may list the same cases in a different order
    their_row = {ident: row for row, ident in enumerate(theirs.ids)}
    pairs = []
    for row, (ident, case_site) in enumerate(zip(ours.ids, ours.sites, strict=True)):
        if ident in their_row and site in (None, case_site):
            pairs.append((row, their_row[ident]))

    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    return first, second


def _same_reference(ours: Cases, theirs: Cases) -> bool:
    first = ours.reference
    second = theirs.reference
    if first is None or second is None:
        return first is second

    return np.array_equal(first.numpy(), second.numpy(), equal_nan=first.is_floating_point())


def _are_enough(run: RunFiles, predictions: Predictions) -> bool:
    """Return whether an interval of the key metric may be computed from these cases."""
    if len(predictions) < LEAST:
        return False

    # a draw without a class would average over fewer classes
    least = predictions.kind.least(predictions.cases)
    return run.key not in metrics.OVER_CLASSES or least is None or least >= LEAST_OF_CLASS


def _draws(run: RunFiles, predictions: Predictions, name: str) -> Draws:
    """Return how often each draw contains each of these cases, (1 + draws, cases); the first contains all once."""
    drawn = bootstrap.draw(predictions.strata, derive(run.seed, "report", "differences", name))
    return np.insert(drawn, 0, 1, axis=0)
