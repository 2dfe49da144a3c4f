"""Statistics of a site's images: counts, and per channel mean, standard deviation and histogram.

Names and places are those of MONAI FL. The images are the network's inputs, after the bundle's transforms. With a
minimum count, no number is released for fewer images: it is None, or the part has no image statistics. Without
one, no number is about a single image, unless a section has only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfl.core import Config, Floats, InputError, Integers, Task, printable
from medfl.data import Shard
from medfl.methods._parts.prototypes import class_counts
from medfl.policy.suppression import hidden_bins, suppress_counts
from medfl.runtimes.registry import Document

OWN_BINS = 32
_BATCH = 16
_BINS = "hist_bins"
_RANGE = "hist_range"
_TOTAL = "total_data"


@dataclass(frozen=True)
class Bins:
    """The bins of a histogram: this many of equal width from `low` to `high`."""

    number: int
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.number} bins from {self.low:g} to {self.high:g}"

    @classmethod
    def of(cls, extra: Config) -> Bins | None:
        """Read a host's request, None if it asks for no histograms.

        Raises:
            InputError: the number of bins is none from 1 to 1000, or the range is not two ascending finite numbers.
        """
        number = extra.get(_BINS)
        limits = extra.get(_RANGE)
        if number is None and limits is None:
            return None

        try:
            low, high = map(float, limits or ())
            bins = cls(int(number or 0), low, high)
        except (TypeError, ValueError, OverflowError):
            bins = cls(0, 0, 0)  # told below

        if not 1 <= bins.number <= 1000 or not float("-inf") < bins.low < bins.high < float("inf"):
            raise InputError(
                f"{_BINS} {printable(number)}, {_RANGE} {printable(limits)}",
                "a whole number from 1 to 1000, and the two ends of the range",
                "give both, or neither for no histogram",
            )

        return bins

    @classmethod
    def own(cls, metadata: Config) -> Bins | None:
        """Return a bundle's bins from its metadata.json, over the range of the network's inputs; None: none."""
        limits = value_range(metadata)
        if limits is None:
            return None

        return cls.of({_BINS: OWN_BINS, _RANGE: limits})

    @property
    def edges(self) -> list[float]:
        """The edges of the bins, one more than there are bins."""
        edges: list[float] = np.linspace(self.low, self.high, self.number + 1).tolist()
        return edges

    def count(self, row: Floats) -> Integers:
        """Return how many numbers of a row are in each bin; numbers outside are ignored."""
        return np.histogram(row, self.number, (self.low, self.high))[0].astype(np.int64)


def value_range(metadata: Config) -> Any:
    """Return the range of a network's inputs from metadata.json, None if it is not given."""
    inputs = metadata.get("network_data_format", {}).get("inputs", {})
    for entry in inputs.values():
        if isinstance(entry, Mapping):
            return entry.get("value_range")

    return None


@dataclass
class Sums:
    """Sums that add over images and sections, per channel (C,) or (C, bins).

    Attributes:
        numbers: pixels or voxels of one channel.
        total, square: sums of their values and of the squares.
        counts: of the histogram.
        images: number of images with a value in a bin.
        shares: sums over images of the share of their values in a bin, in thousandths rounded down: an image adds at
            most 1000 to a row.
    """

    numbers: int
    total: Floats
    square: Floats
    counts: Integers
    images: Integers
    shares: Integers

    def add(self, addend: Sums) -> Sums:
        """Return the sums of both."""
        pairs = zip(vars(self).values(), vars(addend).values(), strict=True)
        return Sums(*(a + b for a, b in pairs))

    @property
    def mean(self) -> list[float]:
        """Mean per channel."""
        values: list[float] = (self.total / self.numbers).tolist()
        return values

    @property
    def deviation(self) -> list[float]:
        """Population standard deviation per channel."""
        mean = self.total / self.numbers
        # rounding may make the variance of a constant channel negative
        variance = np.maximum(self.square / self.numbers - np.square(mean), 0)
        deviations: list[float] = np.sqrt(variance).tolist()
        return deviations


def sums(x: Tensor, bins: Bins | None) -> Sums:
    """Return the sums over a batch of images (B, C, ...)."""
    # (B, C, ...) -> (C, values of all images)
    rows = x.detach().cpu().to(torch.float64).transpose(0, 1).flatten(1).numpy()
    counts = present = shares = np.zeros((len(rows), 0), np.int64)
    if bins is not None:
        pixels = rows.shape[1] // len(x)
        # (C, B, bins)
        histograms = np.apply_along_axis(bins.count, 2, rows.reshape(len(rows), len(x), pixels))
        counts = histograms.sum(1)
        present = (histograms > 0).sum(1)
        # thousandths of each image's pixels, in whole numbers: their sums are exact
        shares = (1000 * histograms // pixels).sum(1)

    return Sums(rows.shape[1], rows.sum(1), np.square(rows).sum(1), counts, present, shares)


def statistics(
    parts: Mapping[str, Shard], task: Task, bins: Bins | None = None, least: int = 0
) -> Document:
    """Return the statistics of each part and of all together ("total_data").

    Args:
        parts: name -> items.
        task: determines the classes; for a classification with class names, they are counted.
        bins: of histograms, values outside are ignored; None for no histograms.
        least: counts below it are None, and enough others that they cannot be computed from sums.
    """
    sums_of_parts = {part: _summed(shard, bins) for part, shard in parts.items()}
    total = _total(sums_of_parts.values())
    statistics_of_parts = {}
    for part, shard in parts.items():
        statistics_of_parts[part] = _statistics([shard], sums_of_parts[part], task, bins)

    statistics_of_parts[_TOTAL] = _statistics(list(parts.values()), total, task, bins)

    if least > 0:
        _suppress(statistics_of_parts, sums_of_parts, least)

    return statistics_of_parts


def _summed(shard: Shard, bins: Bins | None) -> Sums | None:
    """Return the sums over a shard's images, None without images."""
    of_batches = []
    for x, _ in shard.batches(_BATCH):
        # several images per item have no common channels
        if not isinstance(x, Tensor):
            return None
        of_batches.append(sums(x, bins))

    return _total(of_batches)


def _total(addends: Iterable[Sums | None]) -> Sums | None:
    """Return the sum of the existing addends, in order; None without any."""
    present = [*filter(None, addends)]
    return reduce(Sums.add, present) if present else None


def _statistics(
    shards: Sequence[Shard], total: Sums | None, task: Task, bins: Bins | None
) -> Document:
    result: Document = {
        "data_count": sum(map(len, shards)),
        "fail_count": 0,
        "data_stats": {},
    }
    if total is not None:
        result["data_stats"] = _images(total, bins)

    if task.kind == "classification" and task.classes:
        counts = torch.stack([class_counts(shard, task.num_classes) for shard in shards]).sum(0)
        result["class_counts"] = dict(zip(task.classes, counts.tolist(), strict=True))

    return result


def _images(total: Sums, bins: Bins | None) -> Document:
    intensity = {"mean": total.mean, "stdev": total.deviation}
    result: Document = {"image_stats": {"channels": len(total.total), "intensity": intensity}}
    if bins is not None:
        result["image_histogram"] = [
            {"counts": counts, "bin_edges": bins.edges} for counts in total.counts.tolist()
        ]

    return result


def _suppress(result: Document, sums_of_parts: Mapping[str, Sums | None], least: int) -> None:
    """Remove what covers fewer than `least` images from the parts, and from the total what would reveal it."""
    parts = [result[part] for part in sums_of_parts]
    for part, part_sums in zip(parts, sums_of_parts.values(), strict=True):
        if "class_counts" in part:
            part["class_counts"], _ = suppress_counts(part["class_counts"], least)

        if part["data_count"] < least:
            part["data_count"] = None
            part["data_stats"] = {}

        for channel, histogram in enumerate(part["data_stats"].get("image_histogram", [])):
            assert part_sums is not None
            hidden = hidden_bins(part_sums.images[channel].tolist(), least)
            histogram["counts"] = _without(histogram["counts"], hidden)

    # the total minus one part is the other part
    total = result[_TOTAL]
    if any(part["data_count"] is None for part in parts):
        total["data_count"] = None
        total["data_stats"] = {}

    for name in total.get("class_counts", {}):
        if any(part["class_counts"][name] is None for part in parts):
            total["class_counts"][name] = None

    for channel, histogram in enumerate(total["data_stats"].get("image_histogram", [])):
        columns = [part["data_stats"]["image_histogram"][channel]["counts"] for part in parts]
        hidden = [None in column for column in zip(*columns, strict=True)]
        histogram["counts"] = _without(histogram["counts"], hidden)


def _without(counts: Sequence[int], hidden: Sequence[bool]) -> list[int | None]:
    """Return a histogram with None in its suppressed bins."""
    return [None if hide else count for hide, count in zip(hidden, counts, strict=True)]
