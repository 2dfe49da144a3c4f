"""Problems found by reading each item: unreadable files, labels, sizes, spacing, intensities, duplicates, leakage."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from medfl.core import Floats, listed, not_among, printable
from medfl.data import NO_LABEL
from medfl.datasets.readers.checking import targets_told
from medfl.datasets.readers.label_columns import outcomes
from medfl.datasets.readers.volumes import changes_told
from medfl.partner.scanning import ScannedItem, sections
from medfl.problem import Problem, tensor_described
from medfl.problem.tasks.regression import scale_of
from medfl.runtimes.site_channels import names


class Finding(NamedTuple):
    """A line of a check: its topic, its level (ok, warning, FAILED), the finding and advice."""

    topic: str
    level: str
    text: str
    advice: str = ""


_MAX_UNREADABLE = 20
"""Maximum number of unreadable items listed individually."""
_MAX_NAMES = 5
_FAR = 5.0
"""Distance in interquartile ranges beyond which an item is named."""
_MAX_VALUES = 256
"""Maximum number of distinct mask values counted: an image given instead of a mask may have thousands."""


class _Image(NamedTuple):
    """The retained facts on an image: its name in messages, section and file, and its informative values.

    `values` are minimum, mean and maximum, () if one is not finite; `empty` are the constant channels.
    """

    name: str
    section: str
    shape: tuple[int, ...]
    spacing: tuple[float, ...]
    changes: str
    values: tuple[float, ...]
    empty: list[bool]
    content: str


class Findings:
    """Collects the problems of a bundle's items, one item at a time; images are not kept."""

    def __init__(self, bundle: Problem) -> None:
        self._bundle = bundle
        self.unreadable: list[str] = []
        self.bytes: Counter[str] = Counter()
        self._images: list[_Image] = []
        self._labels: Counter[int] = Counter()
        self._masks: Counter[float] = Counter()
        self._masked = 0
        self._in_channels = False

    def add(self, item: ScannedItem) -> None:
        """Add an item."""
        if item.image is None:
            self.unreadable.append(item.problem)
            return

        image = item.image
        self.bytes[item.section] += image.nbytes
        if isinstance(item.label, Tensor):
            self.bytes[item.section] += item.label.nbytes

        rows = image.float().flatten(1)
        values: tuple[float, ...] = ()
        # with a NaN or infinity no number of the image can be compared: it has none
        if bool(torch.isfinite(rows).all()):
            values = (float(rows.min()), float(rows.mean()), float(rows.max()))

        self._images.append(
            _Image(
                name=f"{item.section} {item.id}",
                section=item.section,
                shape=item.shape,
                spacing=item.spacing,
                changes=item.changes,
                values=values,
                empty=(rows.amin(1) == rows.amax(1)).tolist(),
                content=item.content,
            )
        )
        self._label(item.label)

    def _label(self, label: object) -> None:
        if isinstance(label, int):
            self._labels[label] += 1
        elif isinstance(label, Tensor) and label.ndim > 1:
            self._masked += 1
            self._in_channels |= len(label) > 1
            for value in torch.unique(label.as_subclass(Tensor))[:_MAX_VALUES].tolist():
                self._masks[float(value)] += 1

    # Findings

    def lines(self) -> Iterator[Finding]:
        """Yield a line for each check."""
        for problem in self.unreadable[:_MAX_UNREADABLE]:
            yield Finding("files", "FAILED", problem, "restore it from a copy, or remove it")

        if count := len(self.unreadable):
            yield Finding(
                "files",
                "FAILED",
                f"{count} of {count + len(self._images)} items cannot be read",
                "see above",
            )
        else:
            yield Finding("files", "ok", f"all {len(self._images)} items can be read")

        if not self._images:
            return

        if broken := [image.name for image in self._images if not image.values]:
            yield Finding(
                "intensity",
                "FAILED",
                f"NaN or infinite values in {named(broken)}",
                "repair or remove them",
            )

        if bare := sum(NO_LABEL in item for item in self._bundle.items("train")):
            yield Finding(
                "labels",
                "warning",
                f"{bare} images have no label",
                "have the run say --unlabelled SITE",
            )

        yield from self._classes()
        yield from self._targets()
        yield from self._structures()
        yield from self._sizes()
        for change in changes_told([image.changes for image in self._images]):
            yield Finding("reading", "ok", change)

        yield from self._intensities()
        yield from self._duplicates()
        yield from self._leakage()

    def _classes(self) -> Iterator[Finding]:
        if self._bundle.task != "classification":
            return

        classes = self._bundle.classes  # raises if a label is not one of them
        absent = []
        texts = []
        for label, name in enumerate(classes):
            texts.append(f"{printable(name)} {self._labels[label]}")
            if not self._labels[label]:
                absent.append(name)

        text = f"all within the {len(classes)} classes: {', '.join(texts)}"
        yield Finding("labels", "ok", text)
        if absent:
            yield Finding(
                "labels",
                "warning",
                f"no image of {named(absent)}",
                "nothing, if this is so at your site",
            )

    def _targets(self) -> Iterator[Finding]:
        """Report the number of items with each finding, and the distribution of each number."""
        bundle = self._bundle
        if bundle.task not in ("multilabel", "regression"):
            return

        items = [item for section in sections(bundle) for item in bundle.items(section)]
        items = [item for item in items if "target" in item]
        names = bundle.classes
        odd = []
        for item in items:
            if len(item["target"]) != len(names):
                odd.append(str(item["id"]))

        if odd:
            text = f"labels that are not one for each of {named(names)}: {named(odd)}"
            yield Finding("labels", "FAILED", text, "correct them, or take another bundle")
        elif items:
            table = np.array([item["target"] for item in items], np.float64)
            for line in targets_told(bundle.task, [*map(printable, names)], table.tolist()):
                yield Finding("labels", "ok", line)

            if bundle.task == "multilabel":
                for line in outcomes([*map(printable, names)], table.tolist()):
                    yield Finding("labels", "warning", line, "nothing, if this is so at your site")
            else:
                yield from self._odd_numbers(table, [str(item["id"]) for item in items])

    def _odd_numbers(self, table: Floats, ids: Sequence[str]) -> Iterator[Finding]:
        """Name numbers (N, K) unlike the site's others, or unlike those known from the bundle."""
        means, sds = scale_of(self._bundle.metadata, table.shape[1])
        is_scaled = "sd" in tensor_described(self._bundle.metadata, "outputs", "pred")
        for k, name in enumerate(self._bundle.classes):
            is_known = ~np.isnan(table[:, k])
            column = table[is_known, k]
            mean = float(means[k])
            middle = float(np.median(column)) if len(column) else mean
            sd = float(sds[k])
            if is_scaled and abs(middle - mean) > _FAR * sd:
                text = f"the median of {printable(name)} is {middle:.4g}, in the bundle it is {mean:.4g} ± {sd:.4g}"
                yield Finding("labels", "warning", text, "see whether it has the same unit")

            if len(column):
                label = f"{printable(name)} "
                yield from _unlike("labels", compress(ids, is_known), column[:, None], label)

    def _structures(self) -> Iterator[Finding]:
        if not self._masked:
            return

        declared = self._bundle.structures
        values = sorted(self._masks)
        are_whole = all(value.is_integer() and value >= 0 for value in values)
        counts_text = ", ".join(f"{value:g} in {self._masks[value]}" for value in values[:10])
        text = f"values of {self._masked} masks: {counts_text}{', ...' if values[10:] else ''}"

        if not are_whole:
            yield Finding(
                "masks",
                "warning",
                f"{text}: not whole numbers of at least 0",
                "see that these are masks",
            )
        elif declared and values[-1] >= len(declared) and len(values) > 1:
            text += f": more than the {len(declared)} declared"
            yield Finding(
                "masks", "FAILED", text, "relabel the masks, or declare more in metadata.json"
            )
        else:
            if declared:
                text += f"; declared: {named(declared, 10)}"

            yield Finding("masks", "ok", text)
            yield from self._unannotated(declared, values)

        if values == [0.0]:
            yield Finding(
                "masks",
                "warning",
                "no mask has anything but background",
                "see that these are the masks",
            )

    def _unannotated(self, declared: Sequence[str], values: Sequence[float]) -> Iterator[Finding]:
        """Name structures missing from all masks while masks show others."""
        here = []
        absent = []
        for index, name in enumerate(declared[1:], 1):  # 0 is the background
            if index in values:
                here.append(name)
            else:
                absent.append(name)

        # a mask with a channel per structure has only the values 0 and 1
        if here and absent and not self._in_channels:
            text = f"masks show {named(here, 10)}; none shows {named(absent, 10)}: absent, or not annotated here"
            shown = ",".join(map(printable, here))
            advice = (
                f"if they are not annotated, say labels: [{shown}] in medfl.yaml, "
                f"or the run --site-labels SITE={shown}"
            )
            yield Finding("labels", "warning", text, advice)

    def _sizes(self) -> Iterator[Finding]:
        shapes = {image.name: image.shape for image in self._images}
        spacings = {image.name: image.spacing for image in self._images if image.spacing}
        for topic, sides_by_name in (("size", shapes), ("spacing", spacings)):
            if not sides_by_name:
                continue

            dimensions = Counter(map(len, sides_by_name.values()))
            # 2D and 3D are not comparable: the fewer are the odd ones
            usual = dimensions.most_common(1)[0][0]
            comparable = {}
            for name, sides in sides_by_name.items():
                if len(sides) == usual:
                    comparable[name] = sides

            rows = np.array(list(comparable.values()), np.float64)
            unit = "voxels"
            if topic == "spacing":
                unit = "mm"
            elif usual == 2:
                unit = "pixels"

            text = " x ".join(map(_span, rows.T))
            yield Finding(topic, "ok", f"{text} {unit} (median, from least to most)")

            if odd := not_among(sides_by_name, comparable):
                yield Finding(
                    topic,
                    "warning",
                    f"other dimensions: {named(odd)}",
                    "see whether they belong here",
                )

            yield from _unlike(topic, comparable, rows)

        by_channels = defaultdict(list)
        for image in self._images:
            by_channels[len(image.empty)].append(image.name)  # a flag for each channel

        if len(by_channels) > 1:
            minority = min(by_channels.values(), key=len)
            text = f"{', '.join(map(str, sorted(by_channels)))} channels; in the minority: {named(minority)}"
            yield Finding("channels", "FAILED", text, "convert the odd ones")
        elif len(channels := names(self._bundle)) > 1:
            yield from self._lacking(channels)

    def _lacking(self, channels: Sequence[str]) -> Iterator[Finding]:
        """Report channels that are constant in every image."""
        columns = zip(*(image.empty for image in self._images if image.values), strict=True)
        lacking = list(compress(channels, map(all, columns)))
        yield Finding(
            "channels",
            "ok",
            f"{len(channels)} in each image: {printable(', '.join(channels), 200)}",
        )
        if lacking:
            there = ",".join(not_among(channels, lacking))
            yield Finding(
                "channels",
                "warning",
                f"nothing in any image of: {printable(', '.join(lacking), 200)}",
                f"tell the operator which are there: --site-channels SITE={printable(there, 200)}",
            )

    def _intensities(self) -> Iterator[Finding]:
        ranges = {image.name: image.values for image in self._images if image.values}
        if not ranges:
            return

        rows = np.array(list(ranges.values()))
        low, mean, high = map(_span, rows.T)
        yield Finding(
            "intensity", "ok", f"least {low}, mean {mean}, most {high}, as networks get them"
        )
        yield from _unlike("intensity", ranges, rows)

        if flat := [image.name for image in self._images if image.values and all(image.empty)]:
            yield Finding(
                "intensity",
                "warning",
                f"of one value all over: {named(flat)}",
                "look at them",
            )

    def _duplicates(self) -> Iterator[Finding]:
        by_content = defaultdict(list)
        for image in self._images:
            # black images are all the same, and no copies
            if image.values and not all(image.empty):
                by_content[image.content].append(image)

        across = []
        within = []
        for copies in by_content.values():
            if len(copies) == 1:
                continue

            text = " = ".join(image.name for image in copies[:3])
            if len({image.section for image in copies}) > 1:
                across.append(text)
            else:
                within.append(text)

        if not across and not within:
            yield Finding("duplicates", "ok", "no two images are the same")

        if across:
            text = f"{len(across)} images are in several sections: {named(across)}"
            advice = "scores on them are too good: remove one of each"
            yield Finding("duplicates", "warning", text, advice)

        if within:
            text = f"{len(within)} images come more than once: {named(within)}"
            yield Finding("duplicates", "warning", text, "remove the copies")

    def _leakage(self) -> Iterator[Finding]:
        """Find patients or lesions with images in several sections."""
        places = defaultdict(set)
        for section in sections(self._bundle):
            for item in self._bundle.items(section):
                if "group" in item:
                    places[item["group"]].add(section)

        if not places:
            return

        if leaking := sum(len(names) > 1 for names in places.values()):
            text = f"{leaking} patients or lesions have images in several sections"
            yield Finding(
                "patients", "warning", text, "scores on them are too good: choose another split"
            )
        else:
            yield Finding(
                "patients", "ok", "no known patient or lesion has images in several sections"
            )


def named(names: Sequence[str], limit: int = _MAX_NAMES) -> str:
    """Return some names for a line, and how many more there are."""
    return listed([printable(name, 160) for name in names], limit)


def _span(column: Floats) -> str:
    low = f"{np.min(column):.4g}"
    middle = f"{np.median(column):.4g}"
    high = f"{np.max(column):.4g}"
    if low == high:
        return middle

    return f"{middle} ({low} to {high})"


def _unlike(topic: str, names: Iterable[str], rows: Floats, label: str = "") -> Iterator[Finding]:
    """Name the rows (N, K) with a number far from the others in its column."""
    low, middle, high = np.percentile(rows, (25, 50, 75), axis=0)
    # if most items are equal, a fifth of the median replaces the interquartile range
    reach = _FAR * np.maximum(high - low, 0.2 * np.abs(middle) + 1e-9)
    is_far = ((rows < low - reach) | (rows > high + reach)).any(1)
    if far := [*compress(names, is_far)]:
        yield Finding(topic, "warning", f"{label}unlike the others: {named(far)}", "look at them")
