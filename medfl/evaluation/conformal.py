"""Conformal calibration by sums: from a histogram of scores, a threshold that keeps a promised coverage.

A case has parts: classes, findings, voxels or numbers. A set takes in the parts whose score is at most a threshold t,
and loses L(t), the share of what is true of the case that it leaves out; of a single class that is 0 or 1. The smallest
threshold with

    (sum_i w_i L_i(t) + 1) / (sum_i w_i + 1) <= 1 - coverage                                                       (1)

loses 1 - coverage of the next case at most, in the mean over cases and calibrations (conformal risk control;
A. Angelopoulos et al. 2022, arXiv:2208.02814), where it is exchangeable with the calibration cases. With weights of 1
and losses of 0 and 1 this is split conformal prediction: the score of rank ceil((n + 1) coverage). Where some cases are
drawn from elsewhere, and the weights were fixed beforehand, it loses at most sum_i w_i 2 d_i / (sum_i w_i + 1) more,
d_i the total variation between what case i and the next one are drawn from (R. Barber et al. 2023, arXiv:2202.13415; of
risks A. Farinhas et al. 2024, arXiv:2310.01262).

Thresholds are the upper edges of bins that are agreed beforehand. A score counts as the upper edge of its bin, which
raises the threshold and so keeps the promise. Of a site, (1) takes its number of cases and this histogram, no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, expit

from medfl.core.arrays import Array, Floats, Integers
from medfl.core.setting_values import WAYS

PROBABILITIES: Floats = np.concatenate([[0.0], expit(np.linspace(-14, 14, 1999)), [1.0]])
"""Edges for scores from 0 to 1: steps of 0.014 in the logit, at most 0.0035."""
NUMBERS: Floats = np.concatenate([[0.0], np.geomspace(1e-4, 1e8, 2000)])
"""Edges for errors in standard deviations of the predicted number: steps of 1.4 %."""


@dataclass(frozen=True)
class Rule:
    """What makes a set of a prediction.

    Attributes:
        threshold: largest score that is taken in.
        scores: what scores are, of `Kind.set_scores`.
        scale: standard deviation of each number, in whose unit scores are; () for other tasks.
    """

    threshold: float
    scores: str
    scale: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Scored:
    """Cases whose parts have scores; each has something that is true of it.

    Attributes:
        ids: N.
        bins: (N, J) place of the lowest edge that is not below a part's score.
        wanted: (N, J) share of what is true of the case, with the sum 1.
        size: (N, J) what a part adds to the size of a set.
        everything: (N,) size that a set has at most, or from which on it says nothing.
        width: of a set, for a threshold of 1; added to its size.
        scale: as of `Rule`.
    """

    ids: tuple[str, ...]
    bins: Integers
    wanted: Floats
    size: Floats
    everything: Floats
    width: float = 0.0
    scale: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, ids: Sequence[str], bins: Integers, true: Array, size: Floats, everything: Array,
        width: float = 0.0, scale: tuple[float, ...] = (),
    ) -> Scored:  # fmt: skip
        """Return the cases of which something is true, `true` (N, J) says how much of it is each part."""
        amount = true.sum(1, dtype=np.float64)
        rows = np.flatnonzero(amount > 0)
        wanted = true[rows] / amount[rows, None]
        kept = tuple(ids[row] for row in rows.tolist())
        return cls(kept, bins[rows], wanted, size[rows], everything[rows], width, scale)

    def __len__(self) -> int:
        return len(self.ids)

    def losses(self, place: int) -> Floats:
        """Return what the set at an edge leaves out of each case, (N,) from 0 to 1."""
        return np.asarray((self.wanted * (self.bins > place)).sum(1), np.float64)

    def sizes(self, place: int, edges: Floats) -> Floats:
        """Return the size of each case's set, (N,)."""
        taken = (self.size * (self.bins <= place)).sum(1)
        return np.asarray(taken + self.width * edges[place], np.float64)


@dataclass(frozen=True, eq=False)
class Sums:
    """What leaves a site: its number of cases and their scores' histogram (B + 1,), those above all edges last."""

    cases: float
    histogram: Floats

    @classmethod
    def of(cls, scored: Scored | None, edges: Floats, least: int = 0) -> Sums:
        """Return a site's sums, without a bin to which fewer than `least` cases add; of fewer in all nothing.

        Bins are joined from the top, and count at the upper edge of the highest, so that the promise holds and sets are
        larger. That a bin ends here tells that a case is near, as a threshold does.
        """
        histogram = np.zeros(len(edges) + 1)
        if scored is None or len(scored) < max(least, 1):
            return cls(0, histogram)

        bins = scored.bins.ravel()
        np.add.at(histogram, bins, scored.wanted.ravel())
        if least:
            rows, columns = np.nonzero(scored.wanted)
            histogram = _joined(histogram, rows, scored.bins[rows, columns], least)

        return cls(len(scored), histogram)

    def plus(self, other: Sums, weight: float = 1.0) -> Sums:
        """Return the sums with those of others, whose cases have this weight."""
        cases = self.cases + weight * other.cases
        return Sums(cases, self.histogram + weight * other.histogram)


def _joined(histogram: Floats, rows: Integers, bins: Integers, least: int) -> Floats:
    """Join neighbouring bins, from the top, until each has entries of `least` cases (`rows`, `bins`: of an entry)."""
    order = np.argsort(bins, kind="stable")
    places, starts = np.unique(bins[order], return_index=True)
    rows_of = np.split(rows[order], starts[1:])
    result = np.zeros_like(histogram)
    # the highest edge, which only errors beyond all bounds exceed
    top = max(len(histogram) - 2, int(places[-1]))
    last = top
    members: set[int] = set()
    total = 0.0

    for place, cases in zip(places[::-1].tolist(), rows_of[::-1], strict=True):
        total += histogram[place]
        members.update(cases.tolist())
        if len(members) >= least:
            result[top] = total
            last = top
            top = place - 1
            members = set()
            total = 0.0

    # too few are left below: they count as the lowest bin that is told
    result[last] += total
    return result


def needed(coverage: float) -> int:
    """Return how many cases (1) takes."""
    return math.ceil(1 / (1 - coverage) - 1e-6) - 1


def place_of(sums: Sums, coverage: float) -> int | None:
    """Return the place of the lowest edge for which (1) holds, None where the cases are too few for any."""
    lost = sums.cases - np.cumsum(sums.histogram[:-1])
    holds = np.flatnonzero((lost + 1) / (sums.cases + 1) <= 1 - coverage + 1e-9)
    return int(holds[0]) if len(holds) else None


def shared(sums: Mapping[str, Sums], strength: float) -> dict[str, dict[str, Sums]]:
    """Return site -> way -> the sums that its threshold is of.

    Shrunken: its own cases count 1, and those of all others w = min(1, strength / their number). Of n own cases
    its own distribution has the weight n / (n + strength), where the others have at least so many.
    """
    result = {}
    for name, own in sums.items():
        others = Sums(0.0, np.zeros_like(own.histogram))
        for other, theirs in sums.items():
            if other != name:
                others = others.plus(theirs)

        weight = min(1.0, strength / others.cases) if others.cases else 0.0
        ways = (own, own.plus(others), own.plus(others, weight))
        result[name] = dict(zip(WAYS, ways, strict=True))

    return result


def interval(kept: float, cases: int, level: float = 0.95) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a coverage: `kept` of so many cases.

    Where cases are kept in part, `kept` is no whole number and the interval an approximation: shares vary less than
    0 and 1 of the same mean.
    """
    tail = (1 - level) / 2
    low = 0.0
    high = 1.0
    if kept > 0:
        low = float(betaincinv(kept, cases - kept + 1, tail))
    if kept < cases:
        high = float(betaincinv(kept + 1, cases - kept, 1 - tail))

    return low, high


def class_scores(probabilities: Array, scores: str) -> Floats:
    """Return the score (N, K) of each class.

    lac: 1 - p, for the smallest sets (M. Sadinle, J. Lei, L. Wasserman 2019). aps: the sum of the probabilities of all
    more probable classes, so that a set has the most probable ones until they reach the threshold, and never none
    (Y. Romano, M. Sesia, E. Candès 2020, without their random number).
    """
    p = np.asarray(probabilities, np.float64)
    if scores == "lac":
        return np.clip(1 - p, 0, 1)

    order = np.argsort(-p, axis=1, kind="stable")
    ranked = np.take_along_axis(p, order, 1)
    before = np.cumsum(ranked, 1) - ranked
    before[:, 0] = 0
    result = np.empty_like(p)
    np.put_along_axis(result, order, np.clip(before, 0, 1), 1)
    return result
