"""Statistics of a site's images: counts, and of each channel mean, deviation and histogram.

They have the names and places that MONAI FL gives them. The images are those that networks get, after the bundle's
transforms. No number is of a single image, unless a section has only one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medfl.errors import InputError
from medfl.prepared import Shard
from medfl.prototypes import class_counts
from medfl.task import Task

_BATCH = 16
_BINS, _RANGE, _TOTAL = "hist_bins", "hist_range", "total_data"


@dataclass(frozen=True)
class Bins:
    """The bins of a histogram: so many of equal width from `low` to `high`."""

    number: int
    low: float
    high: float

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Bins | None:
        """Read what a host asks for, None if it asks for no histograms.

        Raises:
            InputError: the bins are none.
        """
        number, limits = (extra.get(key) for key in (_BINS, _RANGE))
        if number is None and limits is None:
            return None
        try:
            low, high = map(float, limits or ())
            bins = cls(int(number or 0), low, high)
        except (TypeError, ValueError):
            bins = cls(0, 0, 0)
        if bins.number < 1 or not -float("inf") < bins.low < bins.high < float("inf"):
            raise InputError(
                f"{_BINS} {number}, {_RANGE} {limits}",
                "a whole number of at least 1, and the two ends of the range",
                "give both, or neither for no histogram",
            )
        return bins


@dataclass
class _Sums:
    """What adds up over batches and sections, of each channel (C,) or (C, bins)."""

    numbers: int
    total: NDArray[np.float64]
    square: NDArray[np.float64]
    counts: NDArray[np.int64]

    def add(self, other: _Sums) -> _Sums:
        return _Sums(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def statistics(parts: Mapping[str, Shard], task: Task, bins: Bins | None = None) -> dict[str, Any]:
    """Return the statistics of each part and of all together ("total_data").

    Args:
        parts: name -> items.
        task: tells the classes; for a classification with names of classes there are counts of these.
        bins: of histograms, numbers outside of them left out; None for no histograms.
    """
    sums = {part: _summed(shard, bins) for part, shard in parts.items()}
    whole = None
    for one in sums.values():
        whole = one if whole is None else whole if one is None else whole.add(one)
    told = {part: _told([shard], sums[part], task, bins) for part, shard in parts.items()}
    return {**told, _TOTAL: _told(list(parts.values()), whole, task, bins)}


def _summed(shard: Shard, bins: Bins | None) -> _Sums | None:
    """Return the sums over a shard's images, None where there are none."""
    found: _Sums | None = None
    for x, _ in shard.batches(_BATCH):
        if not isinstance(x, Tensor):
            return None
        rows = x.detach().cpu().to(torch.float64).transpose(0, 1).flatten(1).numpy()
        counts = [_histogram(row, bins) for row in rows]
        one = _Sums(rows.shape[1], rows.sum(1), np.square(rows).sum(1), np.stack(counts))
        found = one if found is None else found.add(one)
    return found


def _histogram(row: NDArray[np.float64], bins: Bins | None) -> NDArray[np.int64]:
    if bins is None:
        return np.zeros(0, np.int64)
    return np.histogram(row, bins.number, (bins.low, bins.high))[0].astype(np.int64)


def _told(shards: Sequence[Shard], sums: _Sums | None, task: Task, bins: Bins | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "data_count": sum(map(len, shards)),
        "fail_count": 0,
        "data_stats": {} if sums is None else _images(sums, bins),
    }
    if task.kind == "classification" and task.classes:
        counts = torch.stack([class_counts(shard, task.num_classes) for shard in shards]).sum(0)
        told["class_counts"] = dict(zip(task.classes, counts.tolist(), strict=True))
    return told


def _images(sums: _Sums, bins: Bins | None) -> dict[str, Any]:
    mean = sums.total / sums.numbers
    deviation = np.sqrt(np.maximum(sums.square / sums.numbers - np.square(mean), 0))
    intensity = {"mean": mean.tolist(), "stdev": deviation.tolist()}
    told: dict[str, Any] = {"image_stats": {"channels": len(mean), "intensity": intensity}}
    if bins is not None:
        edges = np.linspace(bins.low, bins.high, bins.number + 1).tolist()
        told["image_histogram"] = [{"counts": counts, "bin_edges": edges} for counts in sums.counts.tolist()]
    return told
