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
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon

from medfl.core import tables, terminal
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
    shares: NDArray[np.float64] | None

    @property
    def estimated(self) -> NDArray[np.float64]:
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

    def as_dict(self) -> dict[str, Any]:
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
            classes = f"{total - hidden} of {total}" if total else "-"
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
    documents = [_document(path) for path in paths]
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


def _document(path: Path) -> Mapping[str, Any]:
    try:
        text = decode_text(read_bytes(path, _MAX_BYTES))
        document: Mapping[str, Any] = read_plain(text, is_json=True, nodes=1_000_000, depth=8)
        is_ours = isinstance(document, dict) and document.get("form") == DOCUMENT_FORM
        if not is_ours or not isinstance(document.get("bundle"), str):
            raise Refused(f"it is no {DOCUMENT_FORM!r} of a bundle")
    except Refused as error:
        raise InputError(
            f"{printable(path)}: {error}", "a file of medfl site stats", "ask the site for one"
        ) from error

    return document


def _site(document: Mapping[str, Any], path: Path) -> SiteStatistics:
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


def _distances(rows: Sequence[NDArray[np.float64]]) -> list[float]:
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
    classes = federation.classes
    channels = 0
    for site in sites:
        if site.shares is not None:
            channels = min(_CHANNELS, max(channels, len(site.shares)))

    high = max(1.6, 0.36 * min(len(sites), 60))
    columns = max(4.0, 0.85 * len(classes))
    # inches; the histograms lie in a second row
    size = (columns + 5.4, high + 1.7 + (3.1 if channels else 0))
    figure = Figure(figsize=size, dpi=130, facecolor="white", layout="constrained")
    figure.suptitle(
        f"{shorten(federation.bundle, 40)}: {len(sites)} sites",
        x=0.01,
        ha="left",
        size=13,
        weight="bold",
        color=INK,
    )
    heights = (high + 1.0, 2.8) if channels else (1.0,)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)

    if classes:
        upper = grid[0].subgridspec(1, 2, width_ratios=(columns, 3.0))
        _draw_classes(figure.add_subplot(upper[0]), federation)
        _draw_sizes(figure.add_subplot(upper[1]), federation)
    else:
        _draw_sizes(figure.add_subplot(grid[0]), federation, named=True)

    if channels:
        lower = grid[1].subgridspec(1, channels)
        for channel in range(channels):
            _draw_intensities(figure.add_subplot(lower[channel]), federation, channel, channels)

    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        allowed = "a file that can be drawn to, as FILE.png"
        raise InputError(
            f"--out {printable(path)} ({error})", allowed, "check its ending and folder"
        ) from error


def _sites(axes: Axes, federation: FederationStatistics) -> list[str]:
    """Make bare axes with a row a site, and return the rows' names."""
    names = [shorten(site.name, 24) for site in federation.sites]
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=INK, labelsize=8.5)
    axes.set_yticks(range(len(names)), names, size=9)
    return names


def _draw_classes(axes: Axes, federation: FederationStatistics) -> None:
    """Draw a heat map of each site's class shares, with counts; what a site does not tell is hatched."""
    from matplotlib.patches import Rectangle

    names = _sites(axes, federation)
    axes.set_title(
        "Training images of each class; colour: share of the site's", loc="left", size=10, color=INK
    )
    counts = np.stack([site.estimated for site in federation.sites])
    totals = counts.sum(1, keepdims=True)
    shares = np.divide(counts, totals, out=np.full_like(counts, math.nan), where=totals > 0)
    axes.imshow(np.nan_to_num(shares), cmap="Blues", vmin=0, vmax=1, aspect="auto")
    distances = federation.class_distances()

    for y, site in enumerate(federation.sites):
        for x, count in enumerate(site.classes.values()):
            if count is None:
                corner = (x - 0.5, y - 0.5)
                hatch: dict[str, Any] = {"fill": False, "hatch": "////", "edgecolor": "#b8bec8"}
                axes.add_patch(Rectangle(corner, 1, 1, lw=0, **hatch))
                text = "?"
                color = INK
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
            else:
                text = f"{count:,}"
                color = "white" if shares[y, x] > 0.55 else INK
                box = None

            if len(federation.sites) <= _ROOM:
                axes.text(x, y, text, ha="center", va="center", size=8, color=color, bbox=box)

        if len(federation.sites) <= _ROOM and math.isfinite(distances[y]):
            label = f"{distances[y]:.2f}"
            axes.annotate(label, (1, y), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                          va="center", size=8, color=SOFT, annotation_clip=False)  # fmt: skip

    axes.annotate(
        "JS",
        (1, 1),
        (6, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        size=8,
        color=SOFT,
    )
    slant: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    labels = [shorten(name, 24) for name in federation.classes]
    axes.set_xticks(range(len(labels)), labels, size=9, **slant)
    # the lines of the minor grid separate the cells
    axes.set_xticks(np.arange(len(labels) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(names) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="minor", length=0)


def _draw_sizes(axes: Axes, federation: FederationStatistics, *, named: bool = False) -> None:
    """Draw how many images each site has in each section."""
    names = _sites(axes, federation)
    start = np.zeros(len(federation.sites))
    for name in federation.sites[0].images:
        part = np.array([site.images.get(name) or 0 for site in federation.sites], np.float64)
        axes.barh(
            range(len(federation.sites)),
            part,
            left=start,
            height=0.62,
            color=TINTS[name],
            label=TITLES[name],
        )
        start += part

    for y, site in enumerate(federation.sites):
        if any(count is None for count in site.images.values()):
            axes.annotate(
                "+ ?",
                (start[y], y),
                (4, 0),
                textcoords="offset points",
                va="center",
                size=8,
                color=SOFT,
            )

    if not named:
        axes.set_yticks([])

    axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, max(1.0, float(start.max()) * 1.12)))
    axes.set_title("Images; ?: not told", loc="left", size=10, color=INK)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.08),
        ncols=3,
        frameon=False,
        fontsize=8,
        handlelength=1,
    )
    axes.grid(axis="x", color=BAND)
    axes.set_axisbelow(True)


def _draw_intensities(
    axes: Axes, federation: FederationStatistics, channel: int, channels: int
) -> None:
    """Overlay the sites' histograms of one channel; a gap is a bin that is not told."""
    import matplotlib as mpl

    with_names = channel == channels - 1 and len(federation.sites) <= _ROOM
    colours = mpl.colormaps["viridis"](np.linspace(0, 0.8, len(federation.sites)))
    for site, colour in zip(federation.sites, colours, strict=True):
        if site.shares is None or len(site.shares) <= channel:
            continue

        row = site.shares[channel]
        edges = np.linspace(site.low, site.high, len(row) + 1)
        label = shorten(site.name, 20) if with_names else None
        axes.stairs(row, edges, baseline=None, color=colour, linewidth=1.4, alpha=0.9, label=label)

    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, labelcolor=SOFT, labelsize=8)
    axes.grid(axis="y", color=BAND)
    axes.set_axisbelow(True)
    axes.set_ylim(bottom=0)
    title = "Intensities as networks get them" + (f", channel {channel}" if channels > 1 else "")
    axes.set_title(title if channel == 0 else f"channel {channel}", loc="left", size=10, color=INK)

    if channel == 0:
        axes.set_ylabel("share of an image", color=SOFT, size=8)

    if with_names:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
