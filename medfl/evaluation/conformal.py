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
raises the threshold and so keeps the promise. Of a site, (1) takes this histogram, no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv, expit

from medfl.core.arrays import Array, Floats, Integers

EDGES: Floats = np.concatenate([[0.0], expit(np.linspace(-14, 14, 1999)), [1.0]])
"""Upper edges of the agreed bins, of scores from 0 to 1: steps of 0.014 in the logit, at most 0.0035."""


@dataclass(frozen=True)
class Rule:
    """What makes a set of a prediction.

    Attributes:
        threshold: largest score that is taken in, of `EDGES`.
        scores: what scores are, of `Kind.set_scores`.
        scale: standard deviation of each number; the score of an error e is e / (e + scale). () for other tasks.
    """

    threshold: float
    scores: str
    scale: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Scored:
    """Cases whose parts have scores; each has something that is true of it.

    Attributes:
        ids: N.
        bins: (N, J) place of the edge that a part's score counts as, `bins_of`.
        shares: (N, J) share of what is true of the case, with the sum 1.
        size: (N, J) what a part adds to the size of a set.
        scale: as of `Rule`: sets are intervals.
    """

    ids: tuple[str, ...]
    bins: Integers
    shares: Floats
    size: Floats
    scale: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        ids: Sequence[str],
        bins: Integers,
        true: Array,
        size: Floats,
        scale: tuple[float, ...] = (),
    ) -> Scored:
        """Return the cases of which something is true, `true` (N, J) says how much of it is each part."""
        amount = true.sum(1, dtype=np.float64)
        rows = np.flatnonzero(amount > 0)
        shares = true[rows] / amount[rows, None]
        kept_ids = tuple(ids[row] for row in rows.tolist())
        return cls(kept_ids, bins[rows], shares, size[rows], scale)

    def __len__(self) -> int:
        return len(self.ids)

    def losses(self, place: int) -> Floats:
        """Return what the set at an edge leaves out of each case, (N,) from 0 to 1."""
        return np.asarray((self.shares * (self.bins > place)).sum(1), np.float64)

    def sizes(self, place: int) -> Floats:
        """Return the size of each case's set, (N,): of intervals their mean width."""
        if self.scale:
            return np.full(len(self), 2 * half_width(EDGES[place]) * np.mean(self.scale))

        return np.asarray((self.size * (self.bins <= place)).sum(1), np.float64)


def sums_of(scored: Scored | None, least: int = 0) -> Floats:
    """Return what leaves a site: the histogram (B,) of its scores. Each case adds 1, so its sum is the number of cases.

    A bin to which fewer than `least` cases add is joined with its neighbours, from the top, until there are as many.
    All count at the upper edge of the highest, so that the promise holds and sets are larger; the edge tells that a
    case is near, as a threshold does. Nothing is told of fewer cases in all.
    """
    histogram = np.zeros(len(EDGES))
    if scored is None or len(scored) < least:
        return histogram

    np.add.at(histogram, scored.bins.ravel(), scored.shares.ravel())
    if least == 0:
        return histogram

    rows, columns = np.nonzero(scored.shares)
    bins = scored.bins[rows, columns]
    joined = np.zeros_like(histogram)
    top = len(histogram) - 1
    last = top
    members: set[int] = set()
    total = 0.0
    for place in np.unique(bins)[::-1].tolist():
        total += histogram[place]
        members.update(rows[bins == place].tolist())
        if len(members) >= least:
            joined[top] = total
            last = top
            top = place - 1
            members = set()
            total = 0.0

    # too few are left below: they count as the lowest bin that is told
    joined[last] += total
    return joined


def needed(coverage: float) -> int:
    """Return how many cases (1) takes."""
    return math.ceil(1 / (1 - coverage) - 1e-6) - 1


def place_of(histogram: Floats, coverage: float) -> int | None:
    """Return the place of the lowest edge for which (1) holds, None where the cases are too few for any."""
    cases = histogram.sum()
    lost = cases - np.cumsum(histogram)
    holds = np.flatnonzero((lost + 1) / (cases + 1) <= 1 - coverage + 1e-9)
    return int(holds[0]) if len(holds) else None


def shared(histograms: Mapping[str, Floats], strength: float) -> dict[str, dict[str, Floats]]:
    """Return site -> way -> the histogram that its threshold is of.

    Shrunken: its own cases count 1, and those of all others w = min(1, strength / their number). Of n own cases
    its own distribution has the weight n / (n + strength), where the others have at least so many.
    """
    total = np.sum([*histograms.values()], 0)
    result = {}
    for name, alone in histograms.items():
        rest = total - alone
        weight = min(1.0, strength / max(1.0, rest.sum()))
        result[name] = {"alone": alone, "pooled": total, "shrunken": alone + weight * rest}

    return result


def interval(covered: float, cases: int, level: float = 0.95) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a coverage: `covered` of so many cases.

    Where cases are covered in part, `covered` is no whole number and the interval an approximation: shares vary less
    than 0 and 1 of the same mean.
    """
    lost = cases - covered
    tail = (1 - level) / 2
    # none covered, or all, is the limit
    low = betaincinv(max(covered, 1e-12), lost + 1, tail)
    return float(low), float(betaincinv(covered + 1, max(lost, 1e-12), 1 - tail))


def bins_of(scores: Array) -> Integers:
    """Return the place in `EDGES` of the lowest edge that is not below a score."""
    return np.searchsorted(EDGES, scores)


def half_width(threshold: float) -> float:
    """Return half of an interval, in standard deviations: a million where the threshold is 1."""
    capped = min(threshold, float(EDGES[-2]))
    return capped / (1 - capped)


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
