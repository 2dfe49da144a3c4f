"""Robust aggregation: a bad site among good ones, by fault or by intent, moves the result little or not at all.

n replies, d numbers in each; what each stands, how long it takes, and what it loses when nobody is bad.

    mean        FedAvg's own. Stands no bad site: one that sends x1000 moves it as far as it likes. Time n d.
    median      Coordinate-wise median (Yin et al., 2018, Alg. 1, option I). Stands fewer than n/2 bad sites. Time
                n log n d. Its variance is up to pi/2 of the mean's, and what only a minority of sites knows, as a class
                that few have, is lost.
    trimmed:B   Coordinate-wise trimmed mean (ibid., option II): without the floor(B n) largest and smallest, B below
                1/2. Stands floor(B n) bad sites. Time n log n d. Loses less than the median, the less the smaller B.
    krum:F      Krum (Blanchard et al., 2017): the one reply with the smallest sum of squared distances to its n - F - 2
                nearest. Stands F bad sites of n >= 2F + 3. Time n^2 d. One site's training is all that a round gains:
                on sites that differ, and with noise, the slowest to learn.
    multikrum:F The mean of the n - F - 2 replies with the smallest of these sums (ibid., section 4; m as in Damaskinos
                et al., 2019). Stands as many. Time n^2 d. Loses the F + 2 that are furthest out.

In time they cost the mean ten to some tens of times over, more with more replies: `benchmarks/aggregation_cost.py`.

All but `mean` ignore sample counts, which a site could make up: every reply counts the same. Distances are over all
floating tensors. Integers, which count batches, take the middle value, or that of the chosen replies.

Departure: Yin et al. aggregate gradients of one step, here it is weights after local training, as in FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medfl.core import forms
from medfl.core.errors import RunError
from medfl.core.message import Message, Weights
from medfl.methods._parts.aggregation import slices, uniform_shares, weighted_mean

_BLOCK = 2**22  # numbers of all replies together that are looked at at a time


@dataclass(frozen=True)
class Aggregation:
    """How the server makes one set of weights of several.

    Attributes:
        kind: one of `forms.AGGREGATIONS`.
        fraction: of `trimmed`, the share of the replies that is dropped at each end.
        bad: of `krum` and `multikrum`, how many bad sites there may be.
    """

    kind: str = "mean"
    fraction: float = 0.0
    bad: int = 0

    @classmethod
    def parse(cls, text: str) -> Aggregation:
        """Read what `--aggregation` takes.

        Raises:
            InputError: it is something else.
        """
        return cls(*forms.aggregation(text))

    def __str__(self) -> str:
        """Return what `parse` reads."""
        if self.kind == "trimmed":
            return f"trimmed:{self.fraction!r}"
        return f"{self.kind}:{self.bad}" if self.least > 1 else self.kind

    @property
    def is_mean(self) -> bool:
        """Whether it is FedAvg's own."""
        return self.kind == "mean"

    @property
    def least(self) -> int:
        """Replies that it needs: 2F + 3 for Krum."""
        return 2 * self.bad + 3 if self.kind in ("krum", "multikrum") else 1

    def combined(self, replies: Mapping[str, Message], group: str) -> dict[str, Tensor]:
        """Return one tensor group made of the replies'; their order is of no matter.

        A block of coordinates of all replies is read at a time, so that those that lie on disk need not fit in memory.

        Raises:
            RunError: there are fewer replies than it needs.
        """
        if len(replies) < self.least:
            raise RunError(
                f"--aggregation {self} with {len(replies)} replies: it needs at least {self.least}; the last good "
                "round is kept"
            )
        parts = [replies[name].tensors[group] for name in sorted(replies)]
        if self.least > 1:
            chosen = {name: replies[name] for name in self._nearest(sorted(replies), parts)}
            return weighted_mean(chosen, group, uniform_shares(chosen))
        count = len(parts)
        cut = (count - 1) // 2 if self.kind == "median" else math.floor(self.fraction * count + 1e-9)  # 0.29 * 100
        return {name: _middle(parts, name, cut) for name in parts[0]}

    def _nearest(self, names: Sequence[str], parts: Sequence[Weights]) -> list[str]:
        """Return the sites that Krum chooses; of equal ones the first by name."""
        distances = _distances(parts)
        near = distances.sort(1).values[:, 1 : len(names) - self.bad - 1]  # without the 0 to itself
        order = near.sum(1).sort(stable=True).indices.tolist()
        return [names[i] for i in order[: 1 if self.kind == "krum" else len(names) - self.bad - 2]]


def _middle(parts: Sequence[Weights], name: str, cut: int) -> Tensor:
    """Return the mean of each coordinate's values without the `cut` largest and smallest; of integers the middle one.

    Half of the values but one or two dropped at each end is the median.
    """
    like = parts[0][name]
    out = torch.empty(like.numel(), dtype=like.dtype, device=like.device)
    for start, rows in _blocks(parts, name, like):
        ordered = rows.T.contiguous().sort(1).values
        if like.is_floating_point():
            values = ordered[:, cut : len(parts) - cut].mean(1)
        else:
            values = ordered[:, (len(parts) - 1) // 2]
        out[start : start + len(values)] = values.to(like.dtype)
    return out.reshape(like.shape)


def _distances(parts: Sequence[Weights]) -> Tensor:
    """Return the squared distances (n, n) float64 between the floating tensors of the replies."""
    found = torch.zeros(len(parts), len(parts), dtype=torch.float64)
    for name, like in parts[0].items():
        if not like.is_floating_point():
            continue
        for _, rows in _blocks(parts, name, like):
            for i in range(len(parts) - 1):
                found[i, i + 1 :] += (rows[i + 1 :] - rows[i]).square().sum(1).cpu()
    return found + found.T


def _blocks(parts: Sequence[Weights], name: str, like: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (first coordinate, the replies' values (n, coordinates)) in float64, of integers in int64."""
    size, wide = max(1, _BLOCK // len(parts)), torch.float64 if like.is_floating_point() else torch.int64
    reads = [slices(weights, name) for weights in parts]
    for start in range(0, like.numel(), size):
        stop = min(start + size, like.numel())
        yield start, torch.stack([read(start, stop).to(wide) for read in reads])
