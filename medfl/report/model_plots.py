"""Pictures of a trained model: generated images, text embeddings, features, their spectrum, prototypes.

K classes with their names; features are (N, d) float arrays with class indices (N,).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from medfl.core import Document, Integers
from medfl.data.partition.table import shorten
from medfl.report.picture import (
    ENTRY,
    LETTER,
    WIDTH,
    Colour,
    Floats,
    Picture,
    add_legend,
    colours,
    grid_name,
    plot,
    slant,
)
from medfl.report.style import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


TOP = 50
"""Number of eigenvalues used in FedMR's Table 7."""
# Minimum number of test items for a meaningful map or spectrum.
_MIN_ITEMS = 30
_MIN_ITEMS_OF_CLASS = 10


def generated_grid(images: Floats, classes: Sequence[str], round_: int, mark: str = "") -> Picture:
    """Draw images generated after a round, (K * columns, C, H, W) in 0 to 1, with one row per class."""
    rows = len(classes)
    count, channels, height, width = images.shape
    columns = count // rows
    gap = max(1, width // 16)

    # other numbers of channels are not colours
    if channels != 3:
        images = images.mean(1, keepdims=True).repeat(3, 1)

    shades = np.moveaxis(images, 1, 3)
    # white shows between the images
    mosaic = np.ones((rows * (height + gap) - gap, columns * (width + gap) - gap, 3))
    for index, image in enumerate(shades):
        top = (index // columns) * (height + gap)
        left = (index % columns) * (width + gap)
        mosaic[top : top + height, left : left + width] = image.clip(0, 1)

    names = [shorten(name, 22) for name in classes]
    wide = WIDTH - 0.25 - LETTER * max(map(len, names))

    def draw(figure: Figure, axes: Axes) -> None:
        axes.imshow(mosaic)
        axes.set_yticks([row * (height + gap) + height / 2 for row in range(rows)], names)
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)

    return plot(
        grid_name(round_),
        f"Generated images after round {round_}",
        "Each row is a class. The conditions are the same in every round, so pictures of different rounds compare.",
        draw,
        wide * len(mosaic) / mosaic.shape[1] + 0.4,
        mark,
    )


def text_similarities(means: Floats, classes: Sequence[str]) -> Picture:
    """Draw the cosines between the classes' mean text embeddings (K, D) as a heat map."""
    unit = means / np.linalg.norm(means, axis=1, keepdims=True)
    cosine = unit @ unit.T
    low = min(float(cosine.min()), 1 - 1e-3)  # a colour scale needs two different ends
    names = [shorten(name, 20) for name in classes]
    longest = LETTER * max(map(len, names))
    size = min(0.9, (WIDTH - 0.4 - longest) / len(classes))
    slanted = longest > size

    def draw(figure: Figure, axes: Axes) -> None:
        axes.imshow(cosine, cmap="Blues", vmin=low, vmax=1)
        axes.set_xticks(range(len(names)), names, **(slant(45) if slanted else {}))
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        style: Document = {"ha": "center", "va": "center", "size": min(10, 25 * size)}

        if size <= 0.2:  # room for numbers
            return

        for (row, column), value in np.ndenumerate(cosine):
            color = "white" if value - low > 0.6 * (1 - low) else INK
            axes.text(column, row, f"{value:.2f}", color=color, **style)

    return plot(
        "text-embeddings",
        "Cosine between the classes' text embeddings",
        f"Of the mean over each class's prompts, from {low:.2f} (light) to 1 (dark). Near 1, the language model hardly "
        "tells two classes apart.",
        draw,
        size * len(classes) + (0.75 * longest if slanted else 0.2) + 0.5,
    )


def feature_scatters(
    real: Floats,
    labels: Integers,
    synthetic: Floats,
    synthetic_labels: Integers,
    classes: Sequence[str],
    seed: int,
    round_: int,
) -> list[Picture]:
    """Draw the features of test items (N, d) and of generated images (M, d) in two dimensions, by PCA and by t-SNE.

    M may be 0. There is no picture for fewer than 30 test items, or features that are constant or not finite.
    """
    both = np.concatenate([real, synthetic]).astype(np.float64)
    if len(real) < _MIN_ITEMS or not np.isfinite(both).all() or np.ptp(real, axis=0).max() < 1e-12:
        return []

    from sklearn.decomposition import PCA  # imported here because it takes a second
    from sklearn.manifold import TSNE

    # a head with a single input still gives a map; PCA is fitted to the test items only
    both = np.pad(both, ((0, 0), (0, max(0, 2 - both.shape[1]))))
    # "full": the randomised solver uses random numbers
    pca = PCA(min(TOP, len(real), both.shape[1]), svd_solver="full").fit(both[: len(real)])
    reduced = pca.transform(both)
    # with few points a perplexity of 30 would make all of them neighbours
    tsne = TSNE(perplexity=min(30, (len(both) - 1) / 3), init="pca", random_state=seed % 2**32)
    first, second = pca.explained_variance_ratio_[:2]
    shares = (
        f"component 1, {first:.0%} of the variance",
        f"component 2, {second:.0%} of the variance",
    )

    generated = ""
    if len(synthetic):
        generated = f" and {len(synthetic)} generated images (triangles)"

    caption = (
        f"What enters the head of the global model for {len(real)} test items (dots){generated}."
    )

    def cloud(
        points: Floats, axis_labels: tuple[str, str] = ("", "")
    ) -> Callable[[Figure, Axes], None]:
        def draw(figure: Figure, axes: Axes) -> None:
            tones = colours(len(classes))
            dots = {"marker": "o", "s": 16, "alpha": 0.65, "linewidths": 0}
            triangles = {"marker": "^", "s": 34, "edgecolors": INK, "linewidths": 0.7}
            _scatter(axes, points[: len(real)], labels, tones, **dots)
            _scatter(axes, points[len(real) :], synthetic_labels, tones, **triangles)
            axes.set(xticks=[], yticks=[], xlabel=axis_labels[0], ylabel=axis_labels[1])
            axes.spines[:].set_visible(True)
            present = np.unique(np.concatenate([labels, synthetic_labels]))
            entries = [(tones[label], classes[label]) for label in present]
            add_legend(figure, entries, bool(len(synthetic)))

        return draw

    return [
        plot(
            "features-pca",
            f"Features after round {round_}, principal components",
            f"{caption} The components are those of the test items; each axis has its own scale.",
            cloud(reduced, shares),
            WIDTH,
        ),
        plot(
            "features-tsne",
            f"Features after round {round_}, t-SNE",
            f"{caption} Neighbours stay neighbours; distances between groups and their sizes mean nothing.",
            cloud(tsne.fit_transform(reduced)),
            WIDTH,
        ),
    ]


def _scatter(
    axes: Axes, points: Floats, labels: Integers, tones: Sequence[Colour], **style: Any
) -> None:
    for label, colour in enumerate(tones):
        of_class = points[labels == label]
        if len(of_class):
            axes.scatter(
                of_class[:, 0], of_class[:, 1], color=colour, **{"edgecolors": "none", **style}
            )


def eigenvalues(features: Floats) -> Floats:
    """Return the TOP largest eigenvalues, descending, of FedMR's M of one class: its standardised features' covariance.

    Features are (n, d), n > 1. The standard deviation has the divisor n - 1, and 1e-8 is added to the variance, as in
    FedMR; the trace is the number of features that vary.
    """
    centred = features.astype(np.float64) - features.mean(0, dtype=np.float64)
    scaled = centred / np.sqrt(centred.var(0, ddof=1) + 1e-8)
    # the squared singular values of the features are the eigenvalues of their covariance
    values = np.linalg.svd(scaled, compute_uv=False) ** 2 / (len(features) - 1)
    return np.pad(values, (0, max(0, features.shape[1] - len(values))))[:TOP]


def imbalance(values: Floats) -> float:
    """Return 1/128 sum_i (lambda_i - their mean)^2 of the largest eigenvalues (FedMR, Table 7)."""
    return float(((values - values.mean()) ** 2).sum() / 128)


def spectrum(
    features: Floats, labels: Integers, classes: Sequence[str], round_: int
) -> Picture | None:
    """Draw the largest eigenvalues of each class's feature covariance, without classes of fewer than 10 items.

    Returns:
        None without any such class, or for features that are constant or not finite.
    """
    counts = np.bincount(labels, minlength=len(classes))
    if counts.max() < _MIN_ITEMS_OF_CLASS or not np.isfinite(features).all():
        return None

    usable = np.flatnonzero(counts >= _MIN_ITEMS_OF_CLASS).tolist()
    by_class = {c: eigenvalues(features[labels == c]) for c in usable}
    if not any(values.any() for values in by_class.values()):
        return None

    from matplotlib.ticker import LogLocator, MaxNLocator

    # values that are zero up to rounding have no place on a logarithmic axis
    lines = {}
    for c, values in by_class.items():
        lines[c] = values[values > 1e-6 * max(1.0, values[0])]

    lengths = list(map(len, lines.values()))  # at most n - 1 for a class of n items
    most = f"The {max(lengths)}"
    if min(lengths) < max(lengths):
        most = f"Up to {max(lengths)} of the"

    def draw(figure: Figure, axes: Axes) -> None:
        tones = colours(len(classes))
        for c, values in lines.items():
            axes.semilogy(
                range(1, len(values) + 1),
                values,
                color=tones[c],
                linewidth=1.5,
                marker=".",
                markersize=4,
            )

        axes.set(
            xlabel="number of the eigenvalue",
            ylabel="eigenvalue",
            xlim=(0, max(lengths) + 1),
        )
        low, high = axes.get_ylim()
        # below two and a half decades the powers of ten alone would be too few marks
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axes.minorticks_off()
        axes.grid(axis="y")
        entries = []
        for c, values in by_class.items():
            text = f": {imbalance(values):.3g} ({counts[c]})"
            entries.append((tones[c], shorten(classes[c], ENTRY - len(text)) + text))

        add_legend(
            figure, entries, title="variance of the eigenvalues as in FedMR's Table 7 (items)"
        )

    return plot(
        "spectrum",
        f"Spectrum of each class's features after round {round_}",
        f"{most} largest eigenvalues of the covariance of each class's standardised features (test items), and in "
        "the legend their variance as in FedMR's Table 7, 1/128 of the sum of squared differences from their mean: "
        "high if features have collapsed to few directions. It depends on the number of items; compare runs on the "
        "same ones.",
        draw,
        WIDTH,
    )


def prototype_distances(values: Mapping[str, Sequence[tuple[int, float]]]) -> Picture | None:
    """Draw the distances (name -> (round, value) pairs) of class means to prototypes; None without two rounds."""
    curves = {name: pairs for name, pairs in values.items() if len(pairs) > 1}
    if not curves:
        return None

    from matplotlib.ticker import MaxNLocator

    def draw(figure: Figure, axes: Axes) -> None:
        tones = colours(len(curves))
        for colour, pairs in zip(tones, curves.values(), strict=True):
            axes.plot(
                *zip(*pairs, strict=True),
                color=colour,
                linewidth=1.6,
                marker="o" if len(pairs) <= 12 else "",
            )

        axes.set(xlabel="round", ylabel="distance", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(axis="y")
        add_legend(figure, list(zip(tones, curves, strict=True)))

    return plot(
        "prototypes",
        "Distance of the sites' class means to the prototypes",
        "Mean Euclidean distance in feature space between the class means that the sites sent in a round and the "
        "server's prototypes after it: of the same class, of other classes that the site has, and of classes that it "
        "has not. Features that keep room for missing classes stay away from their prototypes.",
        draw,
        4.2,
    )
