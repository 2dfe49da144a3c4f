"""A site's own statistics, as far as they may leave: counts, and per channel mean, deviation and histogram.

Everything is a table of images, each in one cell (`not recorded` if unknown), so that two rules suffice: counts below a
minimum are suppressed (`suppression.suppress_counts`), or each count is the true one plus a random integer
(`suppression.add_noise`). An intensity histogram gives, for each bin, the mean share of an image's pixels in it; a bin
with fewer images than the minimum is suppressed.

With noise nothing may depend on the data except through the noise. So the tables and their cells are fixed in advance
(`_preset_tables`), empty cells have noise as well, and anything without such cells, like the names of centres, is
omitted; mean and deviation are those of the noisy histogram. An image is in each table of its section once: the epsilon
of everything released is the sum over the tables.
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfl.bundle import case_metadata
from medfl.core import Config, Document, Floats, InputError, printable, terminal
from medfl.partner.scanning import ScannedItem, scan, sections
from medfl.policy.suppression import Entropy, add_noise, geometric, hidden_bins, suppress_counts
from medfl.problem import Problem
from medfl.problem.tasks.regression import scale_of
from medfl.runtimes.monai_fl.data_stats import Bins, Sums, sums, value_range

DOCUMENT_FORM = "medfl site statistics 1"
HIDDEN = "not told"
OTHERS = "others"
UNRECORDED = "not recorded"
_SEXES = {
    "f": "female",
    "female": "female",
    "m": "male",
    "male": "male",
    case_metadata.UNKNOWN: UNRECORDED,
}
# Upper limits of bands, in pixels and in millimetres.
_SIDES = (64, 128, 256, 512, 1024, 2048)
_SPACINGS = (0.5, 1, 1.5, 2.5, 5)
_OUTCOMES = ("present", "absent")
_UNIT = 1000  # a share is counted in thousandths: noise is added to integers


@dataclass(frozen=True)
class StatisticsOptions:
    """The rules by which statistics are released.

    Attributes:
        bins: of intensity histograms.
        min_count: counts below it are suppressed.
        epsilon: of the noise in each table and histogram; None: no noise.
        entropy: of the noise.
    """

    bins: Bins
    min_count: int = 10
    epsilon: float | None = None
    entropy: Entropy = os.urandom


def bins_of(bundle: Problem, number: int, text: str | None) -> Bins:
    """Return bins over the range LOW,HIGH, or over that of network inputs in metadata.json; InputError for neither."""
    ends = text.split(",") if text else value_range(bundle.metadata)
    if not ends:
        raise InputError(
            f"bundle {bundle.name!r} without a value_range",
            "--range LOW,HIGH",
            "add it, as --range 0,1",
        )
    return Bins.of({"hist_bins": number, "hist_range": ends}) or Bins(number, 0, 1)


def gather(
    bundle: Problem, folder: str, options: StatisticsOptions, *, progress: bool = False
) -> Document:
    """Return the releasable statistics of a bundle's data as plain JSON values; tables in `folder` may give age, sex.

    Raises:
        InputError: an item cannot be read; names it.
    """
    summaries = {}
    for section in sections(bundle):
        metadata = case_metadata.read(bundle, section, folder)
        counts = _Counts(bundle, options.bins)
        targets = {str(item["id"]): item.get("target", ()) for item in bundle.items(section)}
        for item in scan(bundle, section, progress=progress):
            counts.add(item, metadata.get(item.id, {}), targets[item.id])

        summaries[section] = counts.released(options)

    total_epsilon = None
    if options.epsilon is not None:
        total_epsilon = options.epsilon * _tables(summaries)

    return {
        "form": DOCUMENT_FORM,
        "bundle": bundle.name,
        "bundle_sha256": bundle.sha256,
        "task": bundle.task,
        "min_count": options.min_count,
        "epsilon": options.epsilon,
        "epsilon_of_one_image": total_epsilon,
        "sections": summaries,
    }


def unread_ages(bundle: Problem, folder: str) -> list[str]:
    """Return a line on ages that are not read, none if all are."""
    ages = list[object]()
    for section in sections(bundle):
        ages += (row.get("age") for row in case_metadata.read(bundle, section, folder).values())

    return case_metadata.unread(ages)


class _Counts:
    """Tables of one section; if the data define the cells, rare ones are released without their names."""

    def __init__(self, bundle: Problem, bins: Bins) -> None:
        self._bundle = bundle
        self._bins = bins
        self._images = 0
        self._preset: dict[str, Counter[str]] = {}

        if bundle.task == "classification":
            self._preset["class"] = Counter(dict.fromkeys(bundle.classes, 0))

        self._bands: dict[str, Sequence[float]] = {}
        self._numbers: dict[str, list[float]] = {}
        if bundle.task == "multilabel":
            for name in bundle.classes:
                self._preset[f"finding {name}"] = Counter(dict.fromkeys(_OUTCOMES, 0))
        elif bundle.task == "regression":
            # the bundle's scale, not the site's: the existing bands reveal nothing about the data
            means, sds = scale_of(bundle.metadata, len(bundle.classes))
            for name, mean, sd in zip(bundle.classes, means.tolist(), sds.tolist(), strict=True):
                ends = [float(f"{mean + sd * step:.4g}") for step in (-2, -1, 0, 1, 2)]

                cells = _bands(ends, "")
                self._bands[name] = ends
                self._numbers[name] = []
                self._preset[f"number {name}"] = Counter(dict.fromkeys(cells, 0))

        self._named_by_data: dict[str, Counter[str]] = {}
        self._sums: Sums | None = None

    def add(
        self,
        item: ScannedItem,
        metadata: Config,
        target: Sequence[float | None] = (),
    ) -> None:
        if item.image is None:
            raise InputError(
                f"{item.section} {item.id}: {item.problem}",
                "every item can be read",
                "medfl site check",
            )

        self._images += 1
        if "class" in self._preset and item.label is not None:
            self._preset["class"][self._bundle.classes[int(item.label)]] += 1
        elif self._bundle.task in ("multilabel", "regression"):
            self._targets(target)
        elif isinstance(item.label, Tensor):
            self._structures(item.label)

        cells = {"longest side": _band(max(item.shape), _SIDES, "px")}
        for name in ("sex", "centre"):
            if name in metadata:
                cells[name] = str(metadata[name])

        if "age" in metadata:
            cells["age"] = case_metadata.band(metadata["age"])
        if item.spacing:
            cells["widest spacing"] = _band(max(item.spacing), _SPACINGS, "mm")

        for name, cell in cells.items():
            self._named_by_data.setdefault(name, Counter())[cell] += 1

        item_sums = sums(item.image[None].float(), self._bins)
        self._sums = item_sums if self._sums is None else self._sums.add(item_sums)

    def _targets(self, target: Sequence[float | None]) -> None:
        """Count known findings, or numbers; an image is in one cell of each table."""
        names = self._bundle.classes
        if len(target) != len(names):
            return

        for name, value in zip(names, target, strict=True):
            if value is None:
                continue

            if name in self._bands:
                self._preset[f"number {name}"][_band(value, self._bands[name], "")] += 1
                self._numbers[name].append(value)
            else:
                self._preset[f"finding {name}"][_OUTCOMES[value != 1]] += 1

    def _structures(self, mask: Tensor) -> None:
        """Count a structure as present or absent: a case may have several."""
        names = self._bundle.structures
        mask = mask.as_subclass(Tensor)
        if mask.shape[0] == 1 and names:
            values = set(torch.unique(mask).tolist())
            present = [index in values for index in range(len(names))]
        else:
            # a channel for each structure
            present = mask.flatten(1).any(1).tolist()
            if len(names) != len(present):
                names = tuple(f"channel {i}" for i in range(len(present)))

        for index, (name, is_present) in enumerate(zip(names, present, strict=True)):
            if index == 0 and name == "background":
                continue

            counts = self._preset.setdefault(f"structure {name}", Counter(present=0, absent=0))
            counts[_OUTCOMES[not is_present]] += 1

    def released(self, options: StatisticsOptions) -> Document:
        images = self._images
        if options.epsilon is not None:
            noisy = add_noise({"all": images}, options.epsilon, options.entropy)
            # noise may take the count below 0
            images = max(0, int(noisy["all"]))

        if images < options.min_count:
            return {"images": None, "tables": {}, "intensity": None}

        numbers = {}
        for name, values in self._numbers.items():
            # with noise only the bands are released: mean and deviation of the numbers have none
            if options.epsilon is None and len(values) >= max(1, options.min_count):
                moments = {"mean": _rounded(np.mean(values)), "sd": _rounded(np.std(values))}
                numbers[name] = moments

        tables = {}
        if options.epsilon is not None:
            for name, counts in self._preset_tables().items():
                tables[name] = _released_counts(counts, options)
        else:
            for name, counts in (self._preset | self._named_by_data).items():
                cells = _released_counts(self._with_unrecorded(counts), options)
                if name not in self._preset:  # the name of a rare cell may identify a patient
                    cells = _without_hidden_names(cells)

                tables[name] = cells

        intensity = self._intensity(options, images)
        released = {"images": images, "tables": tables, "intensity": intensity}
        return released | ({"numbers": numbers} if numbers else {})

    def _with_unrecorded(self, counts: Mapping[str, int]) -> Counter[str]:
        """Add images that are not recorded to a table: their number would follow from the other counts."""
        table = Counter(counts)
        rest = self._images - table.total()
        if rest:
            table[UNRECORDED] = rest

        return table

    def _preset_tables(self) -> dict[str, Counter[str]]:
        """Return the tables whose cells are known in advance, each with all images."""
        tables = {}
        if "class" in self._preset:
            tables["class"] = self._preset["class"]

        for name, cells in self._preset.items():
            if name.startswith(("finding ", "number ")):
                tables[name] = _recount(tuple(cells), cells)

        for name in self._bundle.structures:
            if name != "background":
                cells = self._preset.get(f"structure {name}", Counter())
                tables[f"structure {name}"] = _recount(_OUTCOMES, cells)

        for name, domain in _DOMAINS.items():
            cells = self._named_by_data.get(name, Counter())
            tables[name] = _recount(domain, cells, _SEXES if name == "sex" else {})

        for cells in tables.values():
            if UNRECORDED in cells:
                cells[UNRECORDED] += self._images - cells.total()

        return tables

    def _intensity(self, options: StatisticsOptions, images: int) -> Document | None:
        if (totals := self._sums) is None:
            return None

        channels = []
        for channel, thousandths in enumerate(totals.shares):
            mean = totals.mean[channel]
            deviation = totals.deviation[channel]
            shares = thousandths / _UNIT / images
            # number of images with any contribution to a bin
            hidden = hidden_bins(totals.images[channel].tolist(), options.min_count)

            if options.epsilon is not None:
                # an image adds 1000 thousandths to a histogram, and 1 to a count
                noise = geometric(len(shares), options.epsilon / _UNIT, options.entropy)
                shares = np.maximum((thousandths + np.array(noise)) / _UNIT / images, 0)
                # of the noisy shares: the exact moments would have no noise
                mean, deviation = _moments(shares, options.bins)
                hidden = [False] * len(shares)  # which bins are small must not be visible

            histogram = []
            for is_hidden, share in zip(hidden, shares, strict=True):
                histogram.append(None if is_hidden else round(float(share), 5))

            moments = {"mean": _rounded(mean), "sd": _rounded(deviation)}
            channels.append({**moments, "shares": histogram})

        return {"low": options.bins.low, "high": options.bins.high, "channels": channels}


def _recount(
    domain: Sequence[str], cells: Mapping[str, int], synonyms: Mapping[str, str] | None = None
) -> Counter[str]:
    """Return a table over predefined cells; unknown cells count as `other`, else as `not recorded`."""
    table = Counter(dict.fromkeys((*domain, UNRECORDED), 0))
    rest = "other" if "other" in table else UNRECORDED
    for name, count in cells.items():
        cell = (synonyms or {}).get(name, name)
        table[cell if cell in table else rest] += count

    return table


def _released_counts(
    counts: Mapping[str, int], options: StatisticsOptions
) -> dict[str, int | None]:
    if options.epsilon is None:
        return suppress_counts(counts, options.min_count)[0]

    cells = {}
    for name, count in add_noise(counts, options.epsilon, options.entropy).items():
        cells[name] = int(count) if count >= options.min_count else None

    return cells


def _without_hidden_names(cells: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return a table without the names of suppressed cells."""
    order = sorted(cells, key=lambda name: (_ORDER.get(name, 0), name))
    shown = {name: cells[name] for name in order if cells[name] is not None}
    if len(shown) < len(cells):
        shown[OTHERS] = None

    return shown


def _moments(shares: Floats, bins: Bins) -> tuple[float, float]:
    """Return mean and deviation of a histogram, with each bin at its centre."""
    middles = (np.array(bins.edges[1:]) + np.array(bins.edges[:-1])) / 2
    if shares.sum() <= 0:
        return math.nan, math.nan
    mean = np.average(middles, weights=shares)
    return float(mean), float(np.sqrt(np.average((middles - mean) ** 2, weights=shares)))


def _rounded(value: float | np.floating[Any]) -> float | None:
    if math.isfinite(value):
        return float(f"{value:.4g}")

    return None


def _bands(ends: Sequence[float], unit: str) -> list[str]:
    unit = f" {unit}".rstrip()
    middle = [f"{low:g} to {high:g}{unit}" for low, high in pairwise(ends)]
    return [f"below {ends[0]:g}{unit}", *middle, f"{ends[-1]:g}{unit} and more"]


def _band(value: float, ends: Sequence[float], unit: str) -> str:
    return _bands(ends, unit)[bisect.bisect(ends, value)]


_SIDE_BANDS = _bands(_SIDES, "px")
_SPACING_BANDS = _bands(_SPACINGS, "mm")
# Sorted as text, 1024 would precede 64.
_ORDER = {band: i for bands in (_SIDE_BANDS, _SPACING_BANDS) for i, band in enumerate(bands)}
_DOMAINS: Mapping[str, Sequence[str]] = {
    "age": case_metadata.BANDS,
    "sex": ("female", "male", "other"),
    "longest side": _SIDE_BANDS,
    "widest spacing": _SPACING_BANDS,
}
"""Table -> its cells with noise: using those of the data would reveal which cells occur."""


def _tables(statistics: Config) -> int:
    """Return the number of tables and histograms that an image is in: at most those of one section."""
    # 1 is the number of images
    counts = []
    for part in statistics.values():
        counts.append(1 + len(part["tables"]) + len(_channels(part)))

    return max(counts, default=1)


def _channels(part: Config) -> Sequence[Config]:
    """Return the released statistics of the channels of a section's images."""
    channels: Sequence[Config] = (part["intensity"] or {}).get("channels", ())
    return channels


# Text


def text(document: Config) -> list[str]:
    """Return the releasable statistics as lines of text, and the protection by the rules in plain words."""
    lines = [
        f"statistics of {printable(document['bundle'])}: all that would leave, and nothing else"
    ]
    for section, part in document["sections"].items():
        images = part["images"]
        lines += ["", f"{section}: " + (HIDDEN if images is None else f"{images:,} images")]
        rows = {f"  {name}": _cells_text(cells) for name, cells in part["tables"].items()}
        if rows:
            lines += terminal.definitions(rows)

        for name, moments in part.get("numbers", {}).items():
            lines.append(f"  {printable(name)}  mean {moments['mean']}, sd {moments['sd']}")

        for index, channel in enumerate(_channels(part)):
            bar = "".join(_block(share, channel["shares"]) for share in channel["shares"])
            lines.append(f"  channel {index}  mean {channel['mean']}, sd {channel['sd']}  |{bar}|")

    lines.append("")
    for sentence in covered(document):
        lines += terminal.hanging_indent("", sentence)

    return lines


def _cells_text(cells: Mapping[str, int | None]) -> str:
    entries = []
    hidden = []
    for name, count in cells.items():
        if count is None:
            hidden.append(printable(name))
        else:
            entries.append(f"{printable(name)} {count}")

    if hidden:
        entries.append(f"{HIDDEN}: {', '.join(hidden)}")

    return ", ".join(entries)


def _block(share: float | None, shares: Sequence[float | None]) -> str:
    """Return a share as a bar of up to eight eighths of the largest, "?" for a suppressed one."""
    if share is None:
        return "?"

    most = max(value for value in shares if value is not None) or 1
    return " ▁▂▃▄▅▆▇█"[math.ceil(8 * share / most)]


def covered(document: Config) -> list[str]:
    """Return sentences about what the rules protect, and what they do not."""
    least = document["min_count"]
    epsilon = document["epsilon"]
    notes = []
    if least:
        notes.append(
            f"Counts below {least} are hidden, and others where they would follow from the total."
        )

    if epsilon is None:
        return [*notes, "No noise: somebody who knows all images but one may learn about that one."]

    together = document["epsilon_of_one_image"]
    return [
        f"Each count, of empty cells too, and each histogram has noise with epsilon {epsilon:g} for one image that is "
        f"there or not; an image is in several of them, together epsilon {together:g}.",
        "Not told with noise: centres, and whatever else has cells whose names come from the data.",
        "The noise does not cover a patient with several images; another call adds to it.",
        *notes,
    ]


def encoded(document: Config) -> bytes:
    """Return the contents of the file."""
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
