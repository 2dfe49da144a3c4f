"""The pictures of a run as PNG files that say themselves what they show, in words, for who reads or cannot see them.

K classes with their names; features are (N, d) float arrays with class indices (N,).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from medfl.data.partition.table import shorten
from medfl.report.style import INK, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]
Labels = np.ndarray[Any, np.dtype[np.int64]]

TOP = 50
"""Eigenvalues that FedMR's Table 7 counts."""
WORST = 12
"""Test images that a run keeps of those that its judged model gets most wrong."""
_WORST = re.compile(r"worst-\d+")
_SIDE = 256  # pixels of the longer side of such an image, at most
_BEFORE, _BEHIND = ("text-embeddings",), ("features-pca", "features-tsne", "spectrum")
_GRID = re.compile(r"generated-\d+")
_GRIDS = 4  # grids of generated images that a report shows
_WIDTH, _DPI = 4.8, 200  # inches and dots: twice what a column of the report is wide
_LETTER = 0.085  # inches a letter takes
_ENTRY = 28  # letters of a legend's entry; two fit beside each other
_SETTINGS: dict[Any, Any] = {"text.parse_math": False, "font.size": 10, "axes.edgecolor": SOFT, "axes.labelcolor": INK}
_FEWEST, _FEWEST_OF_A_CLASS = 30, 10  # test items without which a map or a spectrum would say nothing


@dataclass(frozen=True)
class Picture:
    """A picture with its words, which are kept inside the PNG file.

    Attributes:
        name: file name without its ending.
        png: the file.
        title: what it shows, in one line.
        caption: how to read it.
        mark: tells one content from another, where the picture is drawn only if that has changed.
    """

    name: str
    png: bytes
    title: str
    caption: str
    mark: str = ""

    @classmethod
    def read(cls, path: Path) -> Picture:
        """Read a picture that was written by `medfl`.

        Raises:
            OSError: it cannot be read, or is no PNG.
        """
        png = path.read_bytes()
        try:
            with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
                image.load()
                words = dict(getattr(image, "text", {}))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # by the kind of damage
            raise OSError(f"{path.name} is no whole PNG file") from error
        title = str(words.get("Title", path.stem))
        return cls(path.stem, png, title, str(words.get("Description", "")), str(words.get("Mark", "")))

    @property
    def pixels(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The picture as (H, W, 3)."""
        with Image.open(io.BytesIO(self.png)) as image:
            return np.asarray(image.convert("RGB"))

    @property
    def kind(self) -> str:
        """The name without a round."""
        return "generated" if _GRID.fullmatch(self.name) else self.name


def grids(folder: Path) -> list[tuple[int, Path]]:
    """Return round and file of each grid of generated images in a run folder, by round."""
    paths = [path for path in (folder / "pictures").glob("generated-*.png") if _GRID.fullmatch(path.stem)]
    return sorted((int(path.stem[10:]), path) for path in paths)


def shown(folder: Path) -> tuple[list[Picture], int]:
    """Read the pictures of a run folder that its report shows, in that order.

    Returns:
        The pictures, and how many grids of generated images there are beside the few among them.

    Raises:
        OSError: a picture cannot be read.
    """
    made = [path for _, path in grids(folder)]
    few = [made[i * (len(made) - 1) // (_GRIDS - 1)] for i in range(_GRIDS)] if len(made) > _GRIDS else made
    before, behind = ([folder / "pictures" / f"{name}.png" for name in names] for names in (_BEFORE, _BEHIND))
    paths = [*before, *few, *behind]
    return [Picture.read(path) for path in paths if path.is_file()], len(made) - len(few)


def worst(folder: Path) -> list[Picture]:
    """Read the images of the worst classified test cases of a run folder, the worst first.

    Raises:
        OSError: one cannot be read.
    """
    paths = sorted(path for path in (folder / "pictures").glob("worst-*.png") if _WORST.fullmatch(path.stem))
    return [Picture.read(path) for path in paths]


# Single images


def single(name: str, image: Floats, title: str, caption: str, mark: str = "") -> Picture:
    """Keep one image as it is, with its words; a large one is made smaller.

    Args:
        name: file name without its ending.
        image: (H, W) or (H, W, 3) in 0 to 1.
        title: what it shows.
        caption: more of it.
        mark: kept with the picture.
    """
    words, file = PngInfo(), io.BytesIO()
    for key, text in (("Title", title), ("Description", caption), ("Mark", mark)):
        words.add_itxt(key, text)
    shown = Image.fromarray((255 * np.nan_to_num(image).clip(0, 1)).round().astype(np.uint8))
    shown.thumbnail((_SIDE, _SIDE))
    shown.save(file, format="png", pnginfo=words)
    return Picture(name, file.getvalue(), title, caption, mark)


# Generated images


def generated(images: Floats, classes: Sequence[str], round_: int, mark: str = "") -> Picture:
    """Draw generated images as a grid with one row a class.

    Args:
        images: (K * columns, C, H, W) in 0 to 1, class by class.
        classes: K names.
        round_: after which round the images were made.
        mark: kept with the picture.
    """
    rows, (count, _, height, width) = len(classes), images.shape
    columns, gap = count // rows, max(1, width // 16)
    shades = np.moveaxis(images, 1, 3) if images.shape[1] == 3 else images.mean(1)[..., None].repeat(3, 3)
    mosaic = np.ones((rows * (height + gap) - gap, columns * (width + gap) - gap, 3))
    for index, image in enumerate(shades):
        top, left = (index // columns) * (height + gap), (index % columns) * (width + gap)
        mosaic[top : top + height, left : left + width] = image.clip(0, 1)
    names = [shorten(name, 22) for name in classes]
    wide = _WIDTH - 0.25 - _LETTER * max(map(len, names))

    def draw(figure: Figure, axes: Axes) -> None:
        axes.imshow(mosaic)
        axes.set_yticks([row * (height + gap) + height / 2 for row in range(rows)], names)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    return _picture(
        f"generated-{round_:04d}",
        f"Generated images after round {round_}",
        "Each row is a class. The conditions are the same in every round, so pictures of different rounds compare.",
        draw,
        wide * len(mosaic) / mosaic.shape[1] + 0.4,
        mark,
    )


# Text embeddings


def similarities(means: Floats, classes: Sequence[str]) -> Picture:
    """Draw the cosines between the classes' mean text embeddings (K, D) as a heat map."""
    unit = means / np.linalg.norm(means, axis=1, keepdims=True)
    cosine = unit @ unit.T
    low = min(float(cosine.min()), 1 - 1e-3)
    names = [shorten(name, 20) for name in classes]
    longest = _LETTER * max(map(len, names))
    size = min(0.9, (_WIDTH - 0.4 - longest) / len(classes))
    slanted = longest > size

    def draw(figure: Figure, axes: Axes) -> None:
        axes.imshow(cosine, cmap="Blues", vmin=low, vmax=1)
        style: dict[str, Any] = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
        axes.set_xticks(range(len(names)), names, **style)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        style = {"ha": "center", "va": "center", "size": min(10, 25 * size)}
        for (row, column), value in np.ndenumerate(cosine if size > 0.2 else []):
            axes.text(column, row, f"{value:.2f}", color="white" if value - low > 0.6 * (1 - low) else INK, **style)

    return _picture(
        "text-embeddings",
        "Cosine between the classes' text embeddings",
        f"Of the mean over each class's prompts, from {low:.2f} (light) to 1 (dark). Near 1, the language model hardly "
        "tells two classes apart.",
        draw,
        size * len(classes) + (0.75 * longest if slanted else 0.2) + 0.5,
    )


# Features


def maps(
    real: Floats, labels: Labels, synthetic: Floats, made: Labels, classes: Sequence[str], seed: int, round_: int
) -> list[Picture]:
    """Draw features of test items, and of generated images among them, in two dimensions: by PCA and by t-SNE.

    Args:
        real: (N, d).
        labels: (N,).
        synthetic: (M, d), M may be 0.
        made: (M,) labels of the generated images.
        classes: names.
        seed: of t-SNE.
        round_: after which round.

    Returns:
        No picture for fewer than 30 test items, or features that are all the same or not finite.
    """
    both = np.concatenate([real, synthetic]).astype(np.float64)
    if len(real) < _FEWEST or not np.isfinite(both).all() or np.ptp(real, axis=0).max() < 1e-12:
        return []
    from sklearn.decomposition import PCA  # here: it imports for a second
    from sklearn.manifold import TSNE

    both = np.pad(both, ((0, 0), (0, max(0, 2 - both.shape[1]))))
    pca = PCA(min(TOP, len(real), both.shape[1]), svd_solver="full").fit(both[: len(real)])
    reduced = pca.transform(both)
    tsne = TSNE(perplexity=min(30, (len(both) - 1) / 3), init="pca", random_state=seed % 2**32)
    first, second = pca.explained_variance_ratio_[:2]
    shares = (f"component 1, {first:.0%} of the variance", f"component 2, {second:.0%} of the variance")
    among = f" and {len(synthetic)} generated images (triangles)" if len(synthetic) else ""
    what = f"What enters the head of the global model for {len(real)} test items (dots){among}."

    def cloud(points: Floats, axes_are: tuple[str, str] = ("", "")) -> Callable[[Figure, Axes], None]:
        def draw(figure: Figure, axes: Axes) -> None:
            _scatter(axes, points[: len(real)], labels, len(classes), marker="o", s=16, alpha=0.65, linewidths=0)
            _scatter(axes, points[len(real) :], made, len(classes), marker="^", s=34, edgecolors=INK, linewidths=0.7)
            axes.set(xticks=[], yticks=[], xlabel=axes_are[0], ylabel=axes_are[1])
            present = [c for c in range(len(classes)) if c in labels or c in made]
            _legend(figure, [(colours(len(classes))[c], classes[c]) for c in present], bool(len(synthetic)))

        return draw

    return [
        _picture(
            "features-pca",
            f"Features after round {round_}, principal components",
            f"{what} The components are those of the test items; each axis has its own scale.",
            cloud(reduced, shares),
            _WIDTH,
        ),
        _picture(
            "features-tsne",
            f"Features after round {round_}, t-SNE",
            f"{what} Neighbours stay neighbours; distances between groups and their sizes mean nothing.",
            cloud(tsne.fit_transform(reduced)),
            _WIDTH,
        ),
    ]


def _scatter(axes: Axes, points: Floats, labels: Labels, count: int, **style: Any) -> None:
    for label, colour in enumerate(colours(count)):
        own = points[labels == label]
        if len(own):
            axes.scatter(own[:, 0], own[:, 1], color=colour, **{"edgecolors": "none", **style})


# Spectrum


def eigenvalues(features: Floats) -> Floats:
    """Return the TOP largest eigenvalues, falling, of FedMR's M of one class: its standardised features' covariance.

    The standard deviation has the divisor n - 1, and 1e-8 is added to the variance, as in FedMR; the trace is the
    number of features that vary.

    Args:
        features: (n, d) of one class, n > 1.
    """
    centred = features.astype(np.float64) - features.mean(0, dtype=np.float64)
    scaled = centred / np.sqrt(centred.var(0, ddof=1) + 1e-8)
    values: Floats = np.linalg.svd(scaled, compute_uv=False) ** 2 / (len(features) - 1)
    return np.pad(values, (0, max(0, features.shape[1] - len(values))))[:TOP]


def imbalance(values: Floats) -> float:
    """Return 1/128 sum_i (lambda_i - their mean)^2 of the largest eigenvalues (FedMR, Table 7)."""
    return float(((values - values.mean()) ** 2).sum() / 128)


def spectrum(features: Floats, labels: Labels, classes: Sequence[str], round_: int) -> Picture | None:
    """Draw the largest eigenvalues of each class's feature covariance; classes of fewer than 10 items are left out.

    Returns:
        None without any such class, or for features that are all the same or not finite.
    """
    counts = np.bincount(labels, minlength=len(classes))
    if counts.max() < _FEWEST_OF_A_CLASS or not np.isfinite(features).all():
        return None
    found = {c: eigenvalues(features[labels == c]) for c in range(len(classes)) if counts[c] >= _FEWEST_OF_A_CLASS}
    if not any(values.any() for values in found.values()):
        return None
    from matplotlib.ticker import LogLocator, MaxNLocator

    lines = {c: values[values > 1e-6 * max(1.0, values[0])] for c, values in found.items()}
    shown = {len(values) for values in lines.values()}  # a class of n items has n - 1 at most
    most = f"The {max(shown)}" if len(shown) == 1 else f"Up to {max(shown)} of the"

    def draw(figure: Figure, axes: Axes) -> None:
        tones = colours(len(classes))
        for c, values in lines.items():
            axes.semilogy(range(1, len(values) + 1), values, color=tones[c], linewidth=1.5, marker=".", markersize=4)
        axes.set(xlabel="number of the eigenvalue", ylabel="eigenvalue", xlim=(0, max(map(len, lines.values())) + 1))
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.minorticks_off()
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        texts = {c: f": {imbalance(values):.3g} ({counts[c]})" for c, values in found.items()}
        entries = [(tones[c], shorten(classes[c], _ENTRY - len(texts[c])) + texts[c]) for c in found]
        _legend(figure, entries, title="variance of the eigenvalues as in FedMR's Table 7 (items)")

    return _picture(
        "spectrum",
        f"Spectrum of each class's features after round {round_}",
        f"{most} largest eigenvalues of the covariance of each class's standardised features (test items), and in "
        "the legend their variance as in FedMR's Table 7, 1/128 of the sum of squared differences from their mean: "
        "high if features have collapsed to few directions. It depends on the number of items; compare runs on the "
        "same ones.",
        draw,
        _WIDTH,
    )


# Prototypes


def distances(values: Mapping[str, Sequence[tuple[int, float]]]) -> Picture | None:
    """Draw the distances between class means and prototypes over the rounds; None without two rounds of any.

    Args:
        values: name -> (round, value) pairs.
    """
    drawn = {name: pairs for name, pairs in values.items() if len(pairs) > 1}
    if not drawn:
        return None
    from matplotlib.ticker import MaxNLocator

    def draw(figure: Figure, axes: Axes) -> None:
        tones = colours(len(drawn))
        for colour, pairs in zip(tones, drawn.values(), strict=True):
            axes.plot(*zip(*pairs, strict=True), color=colour, linewidth=1.6, marker="o" if len(pairs) <= 12 else "")
        axes.set(xlabel="round", ylabel="distance", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        _legend(figure, list(zip(tones, drawn, strict=True)))

    return _picture(
        "prototypes",
        "Distance of the sites' class means to the prototypes",
        "Mean Euclidean distance in feature space between the class means that the sites sent in a round and the "
        "server's prototypes after it: of the same class, of other classes that the site has, and of classes that it "
        "has not. Features that keep room for missing classes stay away from their prototypes.",
        draw,
        4.2,
    )


# Drawing


def _picture(
    name: str, title: str, caption: str, draw: Callable[[Figure, Axes], None], height: float, mark: str = ""
) -> Picture:
    """Let `draw` fill a figure of this height in inches with one axes, below its title."""

    def fill(figure: Figure) -> None:
        figure.set_layout_engine("compressed")
        figure.suptitle(title, size=11, weight="bold", color=INK)
        axes = figure.subplots()
        axes.tick_params(labelcolor=INK, color=SOFT)
        draw(figure, axes)

    return render(name, title, caption, (_WIDTH, height), fill, mark=mark)


def render(
    name: str,
    title: str,
    caption: str,
    size: tuple[float, float],
    fill: Callable[[Figure], None],
    *,
    dpi: int = _DPI,
    mark: str = "",
) -> Picture:
    """Let `fill` draw on a figure of this size in inches, and write it with its words."""
    import matplotlib as mpl  # here: importing it takes longer than most verbs of the command line
    from matplotlib.figure import Figure

    words = {"Title": title, "Description": caption, "Mark": mark, "Software": None}
    file = io.BytesIO()
    with mpl.rc_context(_SETTINGS):
        figure = Figure(figsize=size, dpi=dpi, facecolor="white")  # not pyplot's
        fill(figure)
        figure.savefig(file, format="png", metadata={key: word for key, word in words.items() if word != ""})
    return Picture(name, file.getvalue(), title, caption, mark)


def colours(count: int) -> list[Any]:
    """Return as many colours that can be told apart."""
    import matplotlib as mpl

    if count <= 10:
        return [mpl.colormaps["tab10"](index) for index in range(count)]
    return [mpl.colormaps["turbo"](index / (count - 1)) for index in range(count)]


_COLUMNS, _ROOM = 2, 6  # of a legend: its columns, and the rows that a figure has room for


def _legend(figure: Figure, entries: Sequence[tuple[Any, str]], synthetic: bool = False, title: str = "") -> None:
    """Put a legend below: the classes' colours and, where both are there, the shapes of real and generated items."""
    from matplotlib.lines import Line2D

    def handle(colour: Any, marker: str, text: str) -> Line2D:
        return Line2D([], [], linestyle="", marker=marker, color=colour, label=text, markersize=7)

    handles = [handle(colour, "o", shorten(text, _ENTRY)) for colour, text in entries]
    if synthetic:
        handles += [handle(SOFT, "o", "test items"), handle(SOFT, "^", "generated")]
    more = max(0, (len(handles) + 1) // _COLUMNS - _ROOM)
    figure.set_figheight(figure.get_figheight() + 0.2 * more)  # else a long legend leaves no room for the axes
    figure.legend(
        handles=handles, loc="outside lower center", ncols=_COLUMNS, frameon=False, fontsize=9, labelcolor=INK,
        title=title or None, title_fontproperties={"size": 9}, columnspacing=1.2, handletextpad=0.2,
    )  # fmt: skip
