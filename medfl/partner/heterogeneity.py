"""One picture of a federation from its sites' statistics (`partner.statistics`): how far they are from each other.

Distances are Jensen-Shannon's (Lin, 1991), the root of the divergence in bits: 0 where a site is as all together, 1
where they have nothing in common. A count that a site does not tell is taken as its equal share of what is left of the
site's images, and is marked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial.distance import jensenshannon

from medfl.core import tables, terminal
from medfl.core.arrays import Floats
from medfl.core.documents import Config, Document
from medfl.core.errors import InputError
from medfl.core.untrusted import Refused, decode_text, printable, read_bytes, read_plain
from medfl.data.partition.table import TITLES, shorten
from medfl.partner.statistics import DOCUMENT_FORM
from medfl.report.style import BAND, INK, SOFT, TINTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_BYTES = 20_000_000  # of a site's file, which is somebody else's
_CHANNELS = 4  # that are drawn
_ROOM = 24  # sites whose names and numbers fit


@dataclass(frozen=True)
class SiteStatistics:
    """The statistics of one site.

    Attributes:
        name: the file's.
        images: section -> how many, None where it is not told.
        classes: class -> how many training images, None where it is not told; empty where there are no classes.
        low, high: range of the histograms.
        shares: (C, bins) of the training images, NaN where it is not told; None without histograms.
    """

    name: str
    images: Mapping[str, int | None]
    classes: Mapping[str, int | None]
    low: float
    high: float
    shares: Floats | None

    @property
    def estimated(self) -> Floats:
        """Training images of each class; hidden counts share the remaining images equally. NaN without a total."""
        total = self.images.get("train")
        if total is None or not self.classes:
            return np.full(len(self.classes), math.nan)

        counts = np.array(list(self.classes.values()), np.float64)  # None becomes NaN
        hidden = np.isnan(counts)
        if hidden.any():
            counts[hidden] = max(0, total - np.nansum(counts)) / hidden.sum()

        return counts


@dataclass(frozen=True)
class FederationStatistics:
    """Statistics of several sites of one bundle."""

    bundle: str
    sites: tuple[SiteStatistics, ...]

    @property
    def classes(self) -> list[str]:
        """The classes, in the bundle's order."""
        return list(self.sites[0].classes)

    def class_distances(self) -> list[float]:
        """Return each site's distance from all together, NaN where it tells no classes."""
        return _distances([site.estimated for site in self.sites])

    def intensity_distances(self) -> list[float]:
        """Return the same of intensities, the mean over channels; bins that a site does not tell count as empty."""
        histograms = [site.shares for site in self.sites if site.shares is not None]
        if len(histograms) < len(self.sites):
            return [math.nan] * len(self.sites)

        weights = [site.images.get("train") or 0 for site in self.sites]
        # all together is the mean over images, not over sites
        rows = [np.nan_to_num(shares) * n for shares, n in zip(histograms, weights, strict=True)]
        matrices = [_distances(list(channel)) for channel in zip(*rows, strict=True)]
        return [float(np.mean(column)) for column in zip(*matrices, strict=True)]

    def as_dict(self) -> Document:
        """Return what is computed, for JSON."""
        sites = []
        for site, of_classes, of_intensities in self._with_distances():
            counts = {"images": dict(site.images), "classes": dict(site.classes)}
            distances = {
                "class_distance": _finite(of_classes),
                "intensity_distance": _finite(of_intensities),
            }
            sites.append({"site": site.name, **counts, **distances})

        return {"bundle": self.bundle, "sites": sites}

    def _with_distances(self) -> Iterator[tuple[SiteStatistics, float, float]]:
        return zip(self.sites, self.class_distances(), self.intensity_distances(), strict=True)

    def table(self, width: int) -> list[str]:
        """Return a row a site."""
        titles = [TITLES[section] for section in self.sites[0].images]
        head = ["site", *titles, "classes told", "classes", "intensities"]
        rows = []
        for site, of_classes, of_intensities in self._with_distances():
            images = ["?" if count is None else str(count) for count in site.images.values()]
            hidden = list(site.classes.values()).count(None)
            total = len(site.classes)
            classes = "-"
            if total:
                classes = f"{total - hidden} of {total}"

            distances = [_number(of_classes), _number(of_intensities)]
            rows.append([printable(site.name, 40), *images, classes, *distances])

        note = "classes, intensities: Jensen-Shannon distance from all sites together, 0 (alike) to 1; ?: not told"

        return [
            *tables.text_table(head, rows, width),
            "",
            *terminal.hanging_indent("", note, width),
        ]


def read(paths: Sequence[Path]) -> FederationStatistics:
    """Read the files that sites have written; InputError if one is another file, or they are of different bundles."""
    documents = list(map(_document, paths))
    sites = tuple(map(_site, documents, paths))
    # a site with too few images tells no histograms, which is no difference
    histograms = next((site for site in sites if site.shares is not None), sites[0])
    for path, document, site in zip(paths, documents, sites, strict=True):
        pairs = [
            ("bundle", document["bundle"], documents[0]["bundle"]),
            ("classes", list(site.classes), list(sites[0].classes)),
            ("sections", list(site.images), list(sites[0].images)),
        ]

        if site.shares is not None and histograms.shares is not None:
            pairs.append(
                ("range of intensities", (site.low, site.high), (histograms.low, histograms.high))
            )
            pairs.append(("form of histograms", site.shares.shape, histograms.shares.shape))

        for label, value, expected in pairs:
            if value != expected:
                raise InputError(
                    f"{printable(path)} has another {label} than the others",
                    "sites of one federation use one bundle, --bins and --range",
                    "ask the site to write it again with those of the others",
                )

    return FederationStatistics(str(documents[0]["bundle"]), sites)


def _document(path: Path) -> Config:
    try:
        text = decode_text(read_bytes(path, _MAX_BYTES))
        document: Config = read_plain(text, is_json=True, nodes=1_000_000, depth=8)
        is_ours = isinstance(document, dict) and document.get("form") == DOCUMENT_FORM
        if not is_ours or not isinstance(document.get("bundle"), str):
            raise Refused(f"it is no {DOCUMENT_FORM!r} of a bundle")
    except Refused as error:
        raise InputError(
            f"{printable(path)}: {error}", "a file of medfl site stats", "ask the site for one"
        ) from error

    return document


def _site(document: Config, path: Path) -> SiteStatistics:
    try:
        parts = {str(name): part for name, part in document["sections"].items() if name in TITLES}
        train = parts["train"]
        images = {name: _count(part["images"]) for name, part in parts.items()}
        classes = {}
        for name, value in train["tables"].get("class", {}).items():
            count = _count(value)
            classes[str(name)] = None if count is None else max(0, count)  # noise may be below 0

        shares = None
        low = math.nan
        high = math.nan
        if (intensity := train["intensity"]) is not None:
            low = float(intensity["low"])
            high = float(intensity["high"])
            if rows := [channel["shares"] for channel in intensity["channels"]]:
                shares = np.array(rows, np.float64)  # None becomes NaN

        if shares is not None and (shares.ndim != 2 or bool(((shares < 0) | (shares > 1)).any())):
            raise ValueError("shares")

        int(document["min_count"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(
            f"{printable(path)} is incomplete or has another form ({printable(error)})",
            "a file that medfl site stats --out wrote", "ask the site to write it again",
        ) from error  # fmt: skip

    return SiteStatistics(path.stem, images, classes, low, high, shares)


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _distances(rows: Sequence[Floats]) -> list[float]:
    """Return each row's distance from the sum of all, NaN for rows that are empty or have NaN."""
    pooled = sum(row for row in rows if row.sum() > 0)
    distances = []
    for row in rows:
        distance = math.nan
        if row.sum() > 0:
            # the last bits may make the divergence of equal rows -1e-17, whose root is NaN
            with np.errstate(invalid="ignore"):
                distance = float(np.nan_to_num(jensenshannon(row, pooled, base=2)))

        distances.append(distance)

    return distances


def _finite(value: float) -> float | None:
    if math.isfinite(value):
        return round(value, 6)

    return None


def _number(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.3f}"

    return "-"


# The picture


def draw(federation: FederationStatistics, path: Path) -> None:
    """Draw class shares, sizes and intensities of the sites; the kind of picture follows the ending of `path`."""
    # here: importing it takes longer than most verbs of the command line
    from matplotlib.figure import Figure

    sites = federation.sites
    most = max((len(site.shares) for site in sites if site.shares is not None), default=0)
    channels = min(_CHANNELS, most)
    # inches; the histograms lie in a second row
    columns = max(4.0, 0.85 * len(federation.classes))
    heights = [max(1.6, 0.36 * min(len(sites), 60)) + 1.0]
    if channels:
        heights.append(2.8)

    size = (columns + 5.4, sum(heights) + 0.7)
    figure = Figure(figsize=size, dpi=130, facecolor="white", layout="constrained")
    title = f"{shorten(federation.bundle, 40)}: {len(sites)} sites"
    figure.suptitle(
        title,
        x=0.01,
        ha="left",
        size=13,
        weight="bold",
        color=INK,
    )
    upper, *lower = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)[:, 0]

    if federation.classes:
        class_axes, size_axes = upper.subplots(1, 2, sharey=True, width_ratios=(columns, 3.0))
        _draw_classes(class_axes, federation)
    else:
        size_axes = upper.subplots()

    _draw_sizes(size_axes, federation)
    for part in lower:
        _draw_intensities(part.subplots(1, channels, squeeze=False)[0], federation)

    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        allowed = "a file that can be drawn to, as FILE.png"
        raise InputError(
            f"--out {printable(path)} ({error})", allowed, "check its ending and folder"
        ) from error


def _site_rows(axes: Axes, federation: FederationStatistics) -> None:
    """Make bare axes with a row a site."""
    names = [shorten(site.name, 24) for site in federation.sites]
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=INK, labelsize=9)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _draw_classes(axes: Axes, federation: FederationStatistics) -> None:
    """Draw a heat map of each site's class shares, with counts; what a site does not tell is hatched."""
    from matplotlib.patches import Rectangle

    title = "Training images of each class; colour: share of the site's"
    axes.set_title(title, loc="left", size=10, color=INK)
    axes.set_title("JS", loc="right", size=8, color=SOFT)
    counts = np.stack([site.estimated for site in federation.sites])
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(np.nan_to_num(shares), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    _site_rows(axes, federation)
    has_room = len(federation.sites) <= _ROOM

    for (y, x), share in np.ndenumerate(shares):
        count = list(federation.sites[y].classes.values())[x]
        corner = (x - 0.5, y - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="white", lw=1.5))
        if count is None:
            axes.add_patch(
                Rectangle(corner, 1, 1, fill=False, edgecolor="#b8bec8", lw=0, hatch="////")
            )

        if has_room:
            text = "?" if count is None else f"{count:,}"
            color = "white" if share > 0.55 else INK
            axes.text(x, y, text, ha="center", va="center", size=8, color=color)

    for y, distance in enumerate(federation.class_distances()):
        if has_room and math.isfinite(distance):
            beside = axes.get_yaxis_transform()
            label = f"{distance:.2f}"
            axes.text(1.01, y, label, transform=beside, va="center", size=8, color=SOFT)

    labels = [shorten(name, 24) for name in federation.classes]
    axes.set_xticks(range(len(labels)), labels, rotation=30, ha="right", rotation_mode="anchor")


def _draw_sizes(axes: Axes, federation: FederationStatistics) -> None:
    """Draw how many images each site has in each section."""
    _site_rows(axes, federation)
    rows = range(len(federation.sites))
    start = np.zeros(len(rows))
    for name in federation.sites[0].images:
        part = np.array([site.images.get(name) or 0 for site in federation.sites], np.float64)
        axes.barh(
            rows,
            part,
            left=start,
            height=0.62,
            color=TINTS[name],
            label=TITLES[name],
        )
        start += part

    for y, site in enumerate(federation.sites):
        if None in site.images.values():
            axes.text(start[y], y, " + ?", va="center", size=8, color=SOFT)

    axes.set_xlim(0, max(1.0, float(start.max()) * 1.12))
    axes.set_title("Images; ?: not told", loc="left", size=10, color=INK)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.08),
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    axes.grid(axis="x", color=BAND)
    axes.set_axisbelow(True)


def _draw_intensities(row: Sequence[Axes], federation: FederationStatistics) -> None:
    """Overlay the sites' histograms of each channel; a gap is a bin that is not told."""
    import matplotlib as mpl

    colours = mpl.colormaps["viridis"](np.linspace(0, 0.8, len(federation.sites)))
    for channel, axes in enumerate(row):
        for site, colour in zip(federation.sites, colours, strict=True):
            if site.shares is not None and channel < len(site.shares):
                shares = site.shares[channel]
                edges = np.linspace(site.low, site.high, len(shares) + 1)
                label = shorten(site.name, 20)
                axes.stairs(
                    shares,
                    edges,
                    baseline=None,
                    color=colour,
                    lw=1.4,
                    label=label,
                )

        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, labelcolor=SOFT, labelsize=8)
        axes.grid(axis="y", color=BAND)
        axes.set_axisbelow(True)
        axes.set_ylim(bottom=0)
        axes.set_title(f"channel {channel}", loc="left", size=10, color=INK)

    row[0].set_title("Intensities as networks get them, channel 0", loc="left", size=10, color=INK)
    row[0].set_ylabel("share of an image", color=SOFT, size=8)
    if len(federation.sites) <= _ROOM:
        row[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
