"""Conformal calibration from sums: from a histogram of scores, a threshold that guarantees a given coverage.

A case has parts: classes, findings, voxels or numbers. A prediction set includes the parts whose score is at most a
threshold t; its loss L(t) is the share of the truth that it misses, 0 or 1 for a single class. The smallest
threshold with

    (sum_i w_i L_i(t) + 1) / (sum_i w_i + 1) <= 1 - coverage                                                       (1)

misses at most 1 - coverage of the next case, in the mean over cases and calibrations (conformal risk control;
A. Angelopoulos et al. 2022, arXiv:2208.02814), if that case is exchangeable with the calibration cases. With weights
of 1 and losses of 0 and 1 this is split conformal prediction: the score of rank ceil((n + 1) coverage). If some cases
come from another distribution, and the weights were fixed in advance, it misses at most
sum_i w_i 2 d_i / (sum_i w_i + 1) more, with d_i the total variation distance between the distributions of case i and
of the next case (R. Barber et al. 2023, arXiv:2202.13415; for risks A. Farinhas et al. 2024, arXiv:2310.01262).

Thresholds are the upper edges of bins agreed in advance. A score counts as the upper edge of its bin, which raises
the threshold and so preserves the guarantee. Equation (1) needs only this histogram of a site. What a threshold
achieves on other cases is computed from their histograms (`table_of`), so one reply evaluates all thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import betaincinv, expit
from torch import Tensor

from medfl.core import Array, Floats, Integers, RunError
from medfl.core.seeding import derive
from medfl.evaluation.metrics import Cases

EDGES: Floats = np.concatenate([[0.0], expit(np.linspace(-14, 14, 1999)), [1.0]])
"""Upper edges of the agreed bins for scores from 0 to 1: steps of 0.014 in the logit, at most 0.0035."""

SCORES = "scores"
SCALE = "scale"
"""Names beside those of tables in a file of released values: place in `Kind.set_scores`, from 1 on, and of `Rule`."""


@dataclass(frozen=True)
class Rule:
    """How a prediction becomes a set.

    Attributes:
        threshold: largest score that is included, one of `EDGES`.
        scores: kind of score, one of `Kind.set_scores`.
        scale: standard deviation of each number; the score of an error e is e / (e + scale). () for other tasks.
    """

    threshold: float
    scores: str
    scale: tuple[float, ...] = ()


@dataclass(frozen=True, eq=False)
class Scored:
    """Cases whose parts have scores; each case has some true part.

    Attributes:
        ids: N.
        bins: (N, J) index of the edge that a part's score counts as, `bins_of`.
        shares: (N, J) each part's share of the truth of the case; they sum to 1.
        size: (N, J) contribution of each part to the size of a set.
        complete: (N,) index of the edge from which a set contains everything, and so is uninformative.
        empty: (N,) index of the edge below which a set is empty, and so is uninformative; 0 if empty sets count.
        scale: as in `Rule`: sets are intervals.
    """

    ids: tuple[str, ...]
    bins: Integers
    shares: Floats
    size: Floats
    complete: Integers
    empty: Integers
    scale: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        ids: Sequence[str],
        bins: Integers,
        true: Array,
        size: Floats,
        scale: tuple[float, ...] = (),
        *,
        may_be_empty: bool = True,
    ) -> Scored:
        """Return the cases that have some truth; `true` (N, J) is how much of it each part holds.

        Unless sets `may_be_empty`, an empty set is uninformative.
        """
        amount = true.sum(1, dtype=np.float64)
        rows = np.flatnonzero(amount > 0)
        complete = np.where(size > 0, bins, 0).max(1, initial=0)
        if scale:
            # an infinite interval contains everything
            complete[:] = len(EDGES) - 1

        empty = np.zeros_like(complete)
        if not may_be_empty:
            empty = bins.min(1, initial=len(EDGES))

        shares = true / np.where(amount > 0, amount, 1)[:, None]
        return cls(tuple(ids), bins, shares, size, complete, empty, scale).select(rows.tolist())

    def select(self, rows: Sequence[int]) -> Scored:
        """Return the cases at these indices."""
        ids = tuple(self.ids[row] for row in rows)
        places = np.asarray(rows, np.int64)
        arrays = {name: getattr(self, name)[places] for name in _ARRAYS}
        return Scored(ids, **arrays, scale=self.scale)

    def as_cases(self) -> Cases:
        """Return the cases in the form that is passed between a site's processes."""
        values = {
            name: torch.from_numpy(np.ascontiguousarray(getattr(self, name))) for name in _ARRAYS
        }
        scale = torch.tensor(self.scale, dtype=torch.float64).expand(len(self), -1)
        return Cases(self.ids, {**values, "scale": scale})

    @classmethod
    def from_cases(cls, cases: Cases) -> Scored:
        """Invert `as_cases`."""
        arrays = {name: cases.array(name) for name in _ARRAYS}
        scale = cases.values["scale"][:1].flatten().tolist()
        return cls(cases.ids, **arrays, scale=tuple(scale))

    def __len__(self) -> int:
        return len(self.ids)

    def losses(self, place: int) -> Floats:
        """Return the loss of each case for the sets at an edge, (N,) from 0 to 1."""
        return np.asarray((self.shares * (self.bins > place)).sum(1), np.float64)


_ARRAYS = ("bins", "shares", "size", "complete", "empty")


def sums_of(scored: Scored | None, least: int = 0) -> Floats:
    """Return the histogram (B,) of scores that leaves a site. Each case adds 1, so its sum is the number of cases.

    A bin with fewer than `least` cases is merged with its neighbours, starting from the top, until it has that many.
    All of them count at the upper edge of the highest, so the guarantee holds and sets grow; the edge reveals that a
    case is near, as a threshold does. With fewer cases in all, nothing is released.
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
    members = set()
    total = 0.0
    # from the highest bin down, so that few cases are joined with a higher one: sets grow, the promise holds
    for place in np.unique(bins)[::-1].tolist():
        total += histogram[place]
        members.update(rows[bins == place].tolist())
        if len(members) >= least:
            joined[top] = total
            last = top
            top = place - 1
            members = set()
            total = 0.0

    # the remaining cases are too few: they count in the lowest released bin
    joined[last] += total
    return joined


def table_of(scored: Scored, least: int) -> Floats:
    """Return what leaves a site about cases that evaluate thresholds: (3, B), or (1, B) with a minimum count.

    The cumulative sums of the rows up to an edge are the covered share of the cases, the sizes of their sets, and the
    number of uninformative sets. Merged bins, released without the latter two rows, cover at least this much.
    """
    covered = sums_of(scored, least)
    if least:
        return covered[None]

    size = np.zeros_like(covered)
    if scored.scale:
        widths = 2 * np.array(list(map(half_width, EDGES))) * np.mean(scored.scale)
        size = len(scored) * np.diff(widths, prepend=0.0)
    else:
        np.add.at(size, scored.bins.ravel(), scored.size.ravel())

    silent = np.bincount(scored.complete, minlength=len(covered)).astype(np.float64)
    silent[0] += np.count_nonzero(scored.empty)
    np.subtract.at(silent, scored.empty[scored.empty > 0], 1)
    return np.stack([covered, size, silent])


def tables_of(parts: Mapping[str, Scored], least: int = 0) -> dict[str, dict[str, Floats]]:
    """Return what leaves a site of its cases, "validate", "test" and "half" of these: section -> name -> `table_of`."""
    tables: dict[str, dict[str, Floats]] = {}
    for part, scored in parts.items():
        section, name = ("test", part) if part == "half" else (part, "sets")
        tables.setdefault(section, {})[name] = table_of(scored, least)

    return tables


def kept_at(table: Floats, place: int) -> tuple[float, float]:
    """Return the coverage by a table at an edge: lower and upper bound, which differ only if bins are merged."""
    histogram = table[0]
    least = float(histogram[: place + 1].sum())
    above = histogram[place + 1 :]
    # of joined bins the next one may hold cases that belong below the edge
    joined = above[above > 0][:1] * (len(table) == 1)
    return least, least + float(joined.sum())


def read_table(tensor: Tensor) -> Floats:
    """Return a received table; RunError unless it has the form of `table_of`."""
    table = tensor.numpy(force=True)
    fits = table.dtype == np.float64 and table.shape in ((1, len(EDGES)), (3, len(EDGES)))
    if fits and np.isfinite(table).all() and (table[0] >= 0).all() and table[0].sum() <= 2**53:
        # up to each edge: no fewer cases than none, no more than all
        silent = np.cumsum(table[-1])
        if (silent >= -1e-6).all() and (silent <= table[0].sum() + 1e-6).all():
            return np.asarray(table)

    raise RunError("its table of sets is none of a site's scores")


def halves(patients: Sequence[str], seed: int) -> tuple[list[int], list[int]]:
    """Split the indices of cases in two by patient, in an order that depends on the seed alone."""
    ordered = sorted({*patients}, key=lambda patient: derive(seed, "calibrate", patient))
    first = {*ordered[: len(ordered) // 2]}
    parts: tuple[list[int], list[int]] = ([], [])
    for place, patient in enumerate(patients):
        parts[patient not in first].append(place)

    return parts


def needed(coverage: float) -> int:
    """Return the minimum number of cases that (1) needs."""
    return math.ceil(1 / (1 - coverage) - 1e-6) - 1


def place_of(histogram: Floats, coverage: float) -> int | None:
    """Return the index of the lowest edge for which (1) holds, None if there are too few cases for any."""
    cases = histogram.sum()
    lost = cases - np.cumsum(histogram)
    # 1e-9: 1 - 0.9 is not 0.1 to the last bit
    holds = np.flatnonzero((lost + 1) / (cases + 1) <= 1 - coverage + 1e-9)
    return int(holds[0]) if len(holds) else None


def shared(histograms: Mapping[str, Floats], strength: float) -> dict[str, dict[str, Floats]]:
    """Return site -> way -> the histogram from which its threshold is computed.

    Shrunken: a site's own cases have weight 1, and all others w = min(1, strength / their number). With n own cases the
    site's own distribution has the weight n / (n + strength), if the others have at least `strength` cases.
    """
    total = np.sum([*histograms.values()], 0)
    result = {}
    for name, alone in histograms.items():
        rest = total - alone
        # the others together count as this many cases at most
        weight = min(1.0, strength / max(1.0, rest.sum()))
        result[name] = {"alone": alone, "pooled": total, "shrunken": alone + weight * rest}

    return result


def interval(covered: float, cases: int, level: float = 0.95) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a coverage: `covered` out of `cases`.

    If cases are partly covered, `covered` is not an integer and the interval is an approximation: shares vary less than
    0 and 1 with the same mean.
    """
    lost = cases - covered
    tail = (1 - level) / 2
    # the limit is closed if no case, or every case, is covered
    low = betaincinv(max(covered, 1e-12), lost + 1, tail)
    return float(low), float(betaincinv(covered + 1, max(lost, 1e-12), 1 - tail))


def bins_of(scores: Array) -> Integers:
    """Return the index in `EDGES` of the lowest edge that is not below a score."""
    return np.searchsorted(EDGES, scores)


def half_width(threshold: float) -> float:
    """Return the half-width of an interval in standard deviations: a million if the threshold is 1."""
    capped = min(threshold, float(EDGES[-2]))
    return capped / (1 - capped)


def class_scores(probabilities: Array, scores: str) -> Floats:
    """Return the score (N, K) of each class.

    lac: 1 - p, for the smallest sets (M. Sadinle, J. Lei, L. Wasserman 2019). aps: the sum of the probabilities of all
    more probable classes, so that a set takes the most probable ones until they reach the threshold and is never empty
    (Y. Romano, M. Sesia, E. Candès 2020, without their randomisation).
    """
    p = np.asarray(probabilities, np.float64)
    if scores == "lac":
        return np.clip(1 - p, 0, 1)

    order = np.argsort(-p, axis=1, kind="stable")
    ranked = np.take_along_axis(p, order, 1)
    # what the classes ranked before each have together
    before = np.cumsum(ranked, 1) - ranked
    # rounding must not lift the most probable class above 0
    before[:, 0] = 0
    result = np.empty_like(p)
    np.put_along_axis(result, order, np.clip(before, 0, 1), 1)
    return result
