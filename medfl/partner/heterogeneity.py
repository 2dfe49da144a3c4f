"""Heterogeneity of a federation, from its sites' statistics (`partner.statistics`): the distances between them.

Distances are Jensen-Shannon's (Lin, 1991), the root of the divergence in bits: 0 if a site equals the pooled data, 1 if
they have nothing in common. A suppressed count of a site is estimated as an equal share of the site's remaining
images, and is marked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial.distance import jensenshannon

from medfl.core import (
    Config,
    Document,
    Floats,
    InputError,
    Refused,
    decode_text,
    printable,
    read_bytes,
    read_plain,
    refusing,
    tables,
)
from medfl.data.partition.table import TITLES, shorten
from medfl.partner.statistics import DOCUMENT_FORM
from medfl.report import site_chart
from medfl.report.style import BAND, INK, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_BYTES = 20_000_000  # of a site's file, which is untrusted
_CHANNELS = 4  # that are drawn


@dataclass(frozen=True)
class SiteStatistics:
    """The statistics of one site.

    name: the file's.
    images: section -> number of images, None if suppressed.
    classes: class -> number of training images, None if suppressed; empty if there are no classes.
    low, high: range of the histograms.
    shares: (C, bins) of the training images, NaN if suppressed; None without histograms.
    """

    name: str
    images: Mapping[str, int | None]
    classes: Mapping[str, int | None]
    low: float
    high: float
    shares: Floats | None

    @property
    def estimated(self) -> Floats:
        """Training images of each class; suppressed counts share the remaining images equally. NaN without a total."""
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
        """Return each site's distance from the pooled data, NaN if it releases no classes."""
        return _distances([site.estimated for site in self.sites])

    def intensity_distances(self) -> list[float]:
        """Return the same for intensities, averaged over channels; suppressed bins of a site count as empty."""
        histograms = [site.shares for site in self.sites if site.shares is not None]
        if len(histograms) < len(self.sites):
            return [math.nan] * len(self.sites)

        weights = [site.images.get("train") or 0 for site in self.sites]
        # all together is the mean over images, not over sites
        rows = [np.nan_to_num(shares) * n for shares, n in zip(histograms, weights, strict=True)]

        matrices = [_distances(list(channel)) for channel in zip(*rows, strict=True)]
        return [float(np.mean(column)) for column in zip(*matrices, strict=True)]

    def as_dict(self) -> Document:
        """Return the computed values, for JSON."""
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

    def table(self) -> list[str]:
        """Return one row per site."""
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

        return [
            *tables.text_table(head, rows),
            "",
            *tables.wrap(
                "classes, intensities: Jensen-Shannon distance from all sites together, 0 (alike) to 1; ?: not told"
            ),
        ]


def read(paths: Sequence[Path]) -> FederationStatistics:
    """Read files written by sites; InputError if one is of another kind, or they are of different bundles."""
    documents = list(map(_document, paths))
    sites = tuple(map(_site, documents, paths))
    # a site with too few images releases no histograms, which is not a discrepancy
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
            # Noise may make a count negative.
            classes[str(name)] = None if count is None else max(0, count)

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
            "a file that medfl site stats --out wrote",
            "ask the site to write it again",
        ) from error

    return SiteStatistics(path.stem, images, classes, low, high, shares)


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _distances(rows: Sequence[Floats]) -> list[float]:
    """Return each row's distance from the sum of all, NaN for rows that are empty or contain NaN."""
    pooled = sum(row for row in rows if row.sum() > 0)
    distances = []
    for row in rows:
        distance = math.nan
        if row.sum() > 0:
            # rounding may make the divergence of equal rows -1e-17, whose root is NaN
            with np.errstate(invalid="ignore"):
                distance = float(np.nan_to_num(jensenshannon(row, pooled, base=2)))

        distances.append(distance)

    return distances


def _finite(value: float) -> float | None:
    if math.isfinite(value):
        return round(value, 6)

    return None


def _number(value: float) -> str:
    """Return a distance, 0 to 1, as text; "-" for NaN: it is unknown."""
    return f"{value:.3f}".replace("nan", "-")


# The picture


def draw(federation: FederationStatistics, path: Path) -> None:
    """Draw class shares, sizes and intensities of the sites; the extension of `path` selects the image format."""
    sites = federation.sites
    names = [site.name for site in sites]
    most = max((len(site.shares) for site in sites if site.shares is not None), default=0)
    channels = min(_CHANNELS, most)
    # inches; the histograms are in a second row
    heights = [site_chart.height_of(len(sites))]
    if channels:
        heights.append(2.8)

    with site_chart.figure_of(len(sites), len(federation.classes), sum(heights[1:])) as figure:
        figure.suptitle(
            f"{shorten(federation.bundle, 40)}: {len(sites)} sites",
            x=0.01,
            ha="left",
            size=13,
            weight="bold",
            color=INK,
        )
        upper, *lower = figure.subfigures(len(heights), height_ratios=heights, squeeze=False)[:, 0]

        if federation.classes:
            widths = (site_chart.width_of(len(federation.classes)), 3.0)
            class_axes, size_axes = upper.subplots(1, 2, sharey=True, width_ratios=widths)
            estimated = np.stack([site.estimated for site in sites])
            # None becomes NaN
            reported = np.array([list(site.classes.values()) for site in sites], np.float64)
            site_chart.draw_counts(class_axes, names, federation.classes, estimated, reported)
            class_axes.set_title(
                "Training images; colour: share of the site's", loc="left", size=10
            )
            _write_distances(class_axes, federation)
        else:
            size_axes = upper.subplots()

        sizes = {}
        for section in sites[0].images:
            sizes[section] = [site.images.get(section) for site in sites]

        site_chart.draw_sizes(size_axes, names, sizes)
        size_axes.set_title("Images; ?: not told", loc="left", size=10, color=INK)
        for part in lower:
            _draw_intensities(part.subplots(1, channels, squeeze=False)[0], federation)

        with refusing(
            f"--out {printable(path)}",
            "a file that can be drawn to, as FILE.png",
            "check its ending and folder",
        ):
            figure.savefig(path)


def _write_distances(axes: Axes, federation: FederationStatistics) -> None:
    axes.set_title("JS", loc="right", size=8, color=SOFT)
    for y, distance in enumerate(federation.class_distances()):
        if len(federation.sites) <= site_chart.ROOM and math.isfinite(distance):
            beside = axes.get_yaxis_transform()
            axes.text(1.01, y, _number(distance), transform=beside, va="center", size=8, color=SOFT)


def _draw_intensities(row: Sequence[Axes], federation: FederationStatistics) -> None:
    """Overlay the sites' histograms for each channel; a gap is a suppressed bin."""
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
    if len(federation.sites) <= site_chart.ROOM:
        row[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
