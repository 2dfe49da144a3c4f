"""Robust aggregation: a bad site among good ones, faulty or malicious, moves the result little or not at all.

For n replies of d numbers: how many bad sites each rule tolerates, its time, and its cost when all are good.

    mean        FedAvg's own. Tolerates no bad site: one that sends x1000 moves it arbitrarily far. Time n d.
    clip:C      FedAvg's mean, by sample counts, of changes clipped to L2 norm C: a longer one is scaled to
                w + C (w_k - w) / |w_k - w| (norm bounding as in Sun et al., 2019, "Can you really backdoor federated
                learning?"). `auto`: C is the median of the round's norms. One bad site moves the result by at most
                its share of C, in any direction. Time 2 n d. Slows sites whose changes are long.
    median      Coordinate-wise median (Yin et al., 2018, Alg. 1, option I). Tolerates fewer than n/2 bad sites.
                Time n log n d. Its variance is up to pi/2 of the mean's, and what only a minority of sites knows, such
                as a class that few have, is lost.
    trimmed:B   Coordinate-wise trimmed mean (ibid., option II): without the floor(B n) largest and smallest, B below
                1/2. Tolerates floor(B n) bad sites. Time n log n d. Loses less than the median, the less the smaller B.
    krum:F      Krum (Blanchard et al., 2017): the one reply with the smallest sum of squared distances to its n - F - 2
                nearest. Tolerates F bad sites of n >= 2F + 3. Time n^2 d. A round gains only one site's training: with
                heterogeneous sites, and with noise, the slowest to learn.
    multikrum:F The mean of the n - F - 2 replies with the smallest of these sums (ibid., section 4; m as in Damaskinos
                et al., 2019). Tolerates as many. Time n^2 d. Loses the F + 2 most distant replies.

They take ten to some tens of times as long as the mean, more with more replies: `benchmarks/aggregation_cost.py`.

All but `mean` and `clip` ignore sample counts, which a site could invent: all replies have equal weight. Distances and
norms are over all floating tensors, including BatchNorm's statistics, since these move a network as well. Integers,
which count batches, take the median, or the value of the chosen replies; for `mean` and `clip` the maximum.

Departure: Yin et al. aggregate gradients of one step; here it is weights after local training, as in FedAvg.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medfl.core import (
    Message,
    Messages,
    Metrics,
    Run,
    RunError,
    Tensors,
    Weights,
    pick,
    setting_values,
)
from medfl.methods.base import sample_shares, sent, slices, uniform_shares, weighted_mean

_BLOCK = 2**22  # numbers of all replies together that are processed at a time


@dataclass(frozen=True)
class Aggregation:
    """How the server combines several sets of weights into one.

    Attributes:
        kind: one of `setting_values.AGGREGATIONS`.
        fraction: for `trimmed`, the share of the replies dropped at each end.
        bad: for `krum` and `multikrum`, the maximum number of bad sites.
        bound: for `clip`, the largest norm of a change; None: the median of the round's.
    """

    kind: str = "mean"
    fraction: float = 0.0
    bad: int = 0
    bound: float | None = None

    @classmethod
    def parse(cls, text: str) -> Aggregation:
        """Parse a value of `--aggregation`.

        Raises:
            InputError: it is not a valid value.
        """
        return cls(*setting_values.aggregation(text))

    def __str__(self) -> str:
        """Return what `parse` reads."""
        if self.kind == "trimmed":
            return f"trimmed:{self.fraction!r}"

        if self.kind == "clip":
            if self.bound is None:
                return "clip:auto"

            return f"clip:{self.bound!r}"

        if self.least > 1:
            return f"{self.kind}:{self.bad}"

        return self.kind

    @property
    def described(self) -> str:
        """The rule, and how replies are weighted."""
        if self.counts_samples:
            return f"{self}, replies count by their images, no change is longer than the bound"

        return f"{self}, every reply counts the same, whatever its number of images"

    @property
    def is_mean(self) -> bool:
        """Whether it is FedAvg's own."""
        return self.kind == "mean"

    @property
    def counts_samples(self) -> bool:
        """Whether replies are weighted by their number of items, which must then be true."""
        return self.kind in ("mean", "clip")

    @property
    def least(self) -> int:
        """Minimum number of replies: 2F + 3 for Krum."""
        if self.kind in ("krum", "multikrum"):
            return 2 * self.bad + 3

        return 1

    def combined(self, replies: Messages, before: Weights) -> Tensors:
        """Return weights combined from the replies' and the previous ones; the order of replies does not matter.

        A block of coordinates of all replies is read at a time, so that replies on disk need not fit in memory.

        Raises:
            RunError: there are fewer replies than the minimum.
        """
        if len(replies) < self.least:
            raise RunError(
                f"--aggregation {self} with {len(replies)} replies: it needs at least {self.least}; the last good "
                "round is kept"
            )
        if self.kind == "clip":
            return self._clipped(replies, before)

        parts = sent(replies, "weights")
        if self.least > 1:
            chosen = pick(replies, self._nearest(sorted(replies), parts))
            return weighted_mean(chosen, "weights", uniform_shares(chosen))

        count = len(parts)
        # 0.29 * 100 is 28.999…
        cut = math.floor(self.fraction * count + 1e-9)
        if self.kind == "median":
            cut = (count - 1) // 2

        return {name: _middle(parts, name, cut) for name in parts[0]}

    def observed(self, replies: Messages, before: Weights) -> Metrics:
        """Return the bound of `clip` in a round, and for each site the norm of its change and its share of the mean."""
        if self.kind != "clip":
            return {}
        norms = change_norms(replies, before)
        metrics = {"clip": self._limit(norms)}
        return metrics | _under("norm", norms) | _under("share", sample_shares(replies))

    def _limit(self, norms: Mapping[str, float]) -> float:
        if self.bound is None:
            return statistics.median(norms.values())

        return self.bound

    def _clipped(self, replies: Messages, before: Weights) -> Tensors:
        """Return the mean of the clipped changes: the share that a site loses goes to the previous weights.

        Integers, which enter no norm, take their median if a site's moved by more than the bound.
        """
        norms = change_norms(replies, before)
        limit = self._limit(norms)
        shares = dict(sample_shares(replies))
        for name, norm in norms.items():
            if norm > limit:
                shares[name] *= limit / norm

        parts = sent(replies, "weights")
        if any(norm > limit for norm in norms.values()):
            # w + s (w_k - w) is (1 - s) w + s w_k: the previous weights act as one more reply
            names = next(iter(replies.values()))["weights"]
            rest = Message({"weights": pick(before, names)})
            # "" sorts before all names, and no site has it
            shares[""] = 1 - math.fsum(shares.values())
            replies = {**replies, "": rest}

        mean = weighted_mean(replies, "weights", shares)
        for name, tensor in mean.items():
            if tensor.is_floating_point():
                continue
            moved = [(part[name].double() - before[name].double()).norm() for part in parts]

            # a mean of integers takes the largest, which one site could move at will
            if any(float(norm) > limit for norm in moved):
                mean[name] = _middle(parts, name, 0)

        return mean

    def _nearest(self, names: Sequence[str], parts: Sequence[Weights]) -> list[str]:
        """Return the sites that Krum chooses; of equal ones the first by name."""
        distances = _distances(parts)
        good = len(names) - self.bad - 2
        near = distances.sort(1).values[:, 1 : good + 1]  # without the 0 to itself
        order = near.sum(1).sort(stable=True).indices.tolist()
        count = 1 if self.kind == "krum" else good
        return [names[i] for i in order[:count]]


def change_norms(replies: Messages, before: Weights) -> Metrics:
    """Return the L2 norm of each reply's change of the weights, over their floating tensors, in float64."""
    norms = {}
    for site in sorted(replies):
        squares = []
        weights = replies[site]["weights"]
        for name, old in before.items():
            if old.is_floating_point():
                blocks = _blocks([weights], name, old)
                old_blocks = _blocks([{name: old}], name, old)
                for (_, rows), (_, old_rows) in zip(blocks, old_blocks, strict=True):
                    squares.append(float((rows[0] - old_rows[0]).square().sum()))

        # the exact sum of the rounded squares: independent of the order of the blocks
        norms[site] = math.sqrt(math.fsum(squares))

    return norms


def _middle(parts: Sequence[Weights], name: str, cut: int) -> Tensor:
    """Return the mean of each coordinate's values without the `cut` largest and smallest; for integers the median.

    Cutting all but one or two values gives the median.
    """
    like = parts[0][name]
    out = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
    for start, rows in _blocks(parts, name, like):
        ordered = rows.T.contiguous().sort(1).values
        # the mean of integers may not be an integer
        if like.is_floating_point():
            values = ordered[:, cut : len(parts) - cut].mean(1)
        else:
            values = ordered[:, (len(parts) - 1) // 2]

        out[start : start + len(values)] = values.to(like.dtype)

    return out.reshape(like.shape)


def _distances(parts: Sequence[Weights]) -> Tensor:
    """Return the squared distances (n, n) float64 between the floating tensors of the replies."""
    distances = torch.zeros(len(parts), len(parts), dtype=torch.float64)
    for name, like in parts[0].items():
        if not like.is_floating_point():
            continue
        for _, rows in _blocks(parts, name, like):
            # the upper triangle: (n, n, coordinates) at once would not fit
            for i in range(len(parts) - 1):
                distances[i, i + 1 :] += (rows[i + 1 :] - rows[i]).square().sum(1).cpu()

    return distances + distances.T


def _blocks(parts: Sequence[Weights], name: str, like: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first coordinate, the replies' values (n, coordinates)) in float64, integers in int64."""
    # float64, so that a sum of squares of float32 loses no significant digits
    size = max(1, _BLOCK // len(parts))
    wide = torch.float64 if like.is_floating_point() else torch.int64
    reads = [slices(weights, name) for weights in parts]
    for start in range(0, like.numel(), size):
        stop = min(start + size, like.numel())
        yield start, torch.stack([read(start, stop).to(wide) for read in reads])


def with_effective_counts(replies: Messages, run: Run) -> Messages:
    """Return replies weighted as the run says: by their items, equally, or by items with a cap on a site's share."""
    if run.site_weights != "uniform" and run.max_share is None:
        return replies

    counts = sample_counts(pick(replies, sorted(replies)))
    if run.site_weights == "uniform":
        counts = dict.fromkeys(counts, 1.0)
    else:
        counts = cap_counts(counts, run.max_share or 1)

    effective = dict(replies)
    for name, count in counts.items():
        reply = replies[name]
        effective[name] = Message(reply.tensors, {**reply.scalars, "samples": count})

    return effective


def sample_counts(replies: Messages) -> Metrics:
    """Return the numbers of items of the replies that give one."""
    counts = {}
    for name, reply in replies.items():
        if "samples" in reply.scalars:
            counts[name] = reply.scalars["samples"]

    return counts


def cap_counts(counts: Mapping[str, float], most: float) -> Metrics:
    """Return numbers of items capped to `most` of their sum; those below the cap are unchanged.

    All become equal if there are too few of them to satisfy the cap.
    """
    rising = sorted(counts.values())
    # so many of the largest are reduced to one number
    for cut in range(min(len(rising), math.ceil(1 / most))):
        # the limit L for which L = most * (sum of the others + cut * L)
        limit = most * math.fsum(rising[: len(rising) - cut]) / (1 - cut * most)
        if rising[-cut - 1] <= limit:
            return {name: min(count, limit) for name, count in counts.items()}
    return dict.fromkeys(counts, 1.0)


def shares_under_cap(replies: Messages, run: Run) -> Metrics:
    """Return each site's share of the mean, and its share without the cap, for runs with a cap on shares."""
    if run.max_share is None or len(sample_counts(replies)) < len(replies):
        return {}

    capped = sample_shares(with_effective_counts(replies, run))
    return _under("said", sample_shares(replies)) | _under("share", capped)


def _under(kind: str, values: Mapping[str, float]) -> Metrics:
    return {f"{kind}/{site}": value for site, value in values.items()}
