"""What pictures show, the words inside them, and the spectrum's number; nothing is drawn that would say nothing."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from medfl.report import model_plots
from medfl.report.picture import Picture, model_pictures

CLASSES = ("normal", "bacterial pneumonia", "viral $x^{ pneumonia_2")


def clouds(count: int = 60, dimension: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three classes of features."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    return (draw.normal(size=(count, dimension)) + 4 * np.eye(3, dimension)[labels]).astype(
        np.float32
    ), labels


# The spectrum's number


def test_eigenvalues_keep_lemma_1() -> None:
    """FedMR's Lemma 1: M is the correlation matrix, so tr M = d and sum (lambda - mean)^2 = ||M||_F^2 - d."""
    draw = np.random.default_rng(0)
    z = draw.normal(size=(40, 16)) @ draw.normal(size=(16, 16))
    values = model_plots.eigenvalues(z)
    assert values.sum() == pytest.approx(16, rel=1e-6)
    assert np.all(np.diff(values) <= 0)
    norm = np.square(np.corrcoef(z.T)).sum()
    assert model_plots.imbalance(values) == pytest.approx((norm - 16) / 128, rel=1e-6)


def test_collapsed_features_have_one_eigenvalue() -> None:
    """Each of 60 features an affine image of one scalar: lambda = (60, 0, ...), of which 50 count.

    Their mean is 60/50, so the number is (60^2 - 50 (60/50)^2) / 128 = 3528 / 128.
    """
    draw = np.random.default_rng(0)
    z = draw.normal(size=(80, 1)) * draw.uniform(1, 3, size=60) + draw.normal(size=60)
    values = model_plots.eigenvalues(z)
    assert values.shape == (50,)
    assert values[0] == pytest.approx(60, rel=1e-6)
    assert values[1:] == pytest.approx(0, abs=1e-9)
    assert model_plots.imbalance(values) == pytest.approx(3528 / 128, rel=1e-6)


def test_uncorrelated_features_have_equal_eigenvalues() -> None:
    """Columns of a Hadamard matrix other than the constant one: M is the identity, whatever scales and shifts."""
    z = hadamard(32)[:, 1:17].astype(float)
    for scaled in (z, z * np.arange(1, 17) + 5):
        values = model_plots.eigenvalues(scaled)
        assert values == pytest.approx(np.ones(16), rel=1e-6)
        assert model_plots.imbalance(values) == pytest.approx(0, abs=1e-9)


def test_with_few_items_the_rest_of_the_eigenvalues_are_zero() -> None:
    values = model_plots.eigenvalues(np.random.default_rng(0).normal(size=(11, 70)))
    assert values.shape == (50,)
    assert (values > 1e-9).sum() == 10
    assert values.sum() == pytest.approx(70, rel=1e-6)


# Words


def test_a_picture_keeps_its_words(tmp_path: Path) -> None:
    made = model_plots.generated_grid(np.zeros((6, 1, 16, 16)), ("a", "b", "c"), 7, "mark")
    (tmp_path / "generated-0007.png").write_bytes(made.png)
    assert Picture.read(tmp_path / "generated-0007.png") == made
    assert (made.name, made.mark) == ("generated-0007", "mark")
    assert "round 7" in made.title
    assert made.pixels.shape[1:] == (960, 3)


@pytest.mark.parametrize("keep", [0, 20, -40])
def test_a_damaged_picture_is_an_os_error(tmp_path: Path, keep: int) -> None:
    png = model_plots.text_similarities(np.eye(3), CLASSES).png
    (tmp_path / "x.png").write_bytes(png[:keep])
    with pytest.raises(OSError, match=r"^x.png is no whole PNG file$"):
        Picture.read(tmp_path / "x.png")


def test_a_report_shows_a_few_rounds_the_last_among_them(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    assert model_pictures(tmp_path) == ([], 0)
    png = model_plots.generated_grid(np.zeros((3, 1, 16, 16)), ("a", "b", "c"), 1).png
    rounds = [5, 10, 15, 20, 25, 30, 10000]
    for name in (
        "spectrum",
        "text-embeddings",
        "features-tsne",
        "other",
        *(f"generated-{r:04d}" for r in rounds),
    ):
        (tmp_path / "pictures" / f"{name}.png").write_bytes(png)
    found, more = model_pictures(tmp_path)
    grids = ["generated-0005", "generated-0015", "generated-0025", "generated-10000"]
    assert [picture.name for picture in found] == [
        "text-embeddings",
        *grids,
        "features-tsne",
        "spectrum",
    ]
    assert more == 3


# What is drawn


def test_rows_of_a_grid_are_classes() -> None:
    """Red images of the first class are above blue ones of the second; each is eight times there."""
    images = np.zeros((16, 3, 16, 16))
    images[:8, 0], images[8:, 2] = 1, 1
    pixels = model_plots.generated_grid(images, ("red", "blue"), 1).pixels.astype(int)
    red, blue = ((pixels == colour).all(2) for colour in ([255, 0, 0], [0, 0, 255]))
    assert red.any(1).nonzero()[0].max() < blue.any(1).nonzero()[0].min()
    for colour in (red, blue):
        row = colour[colour.any(1).nonzero()[0][10]].astype(int)
        assert (np.diff(row) == 1).sum() == 8


def test_grey_and_odd_channels_are_grey() -> None:
    for channels in (1, 4):
        pixels = model_plots.generated_grid(
            np.full((2, channels, 16, 16), 0.5), ("a", "b"), 1
        ).pixels
        assert ((pixels == 127) | (pixels == 128)).all(2).mean() > 0.2


def test_features_are_mapped_twice() -> None:
    real, labels = clouds()
    made, of = clouds(9, seed=1)
    both = model_plots.feature_scatters(real, labels, made, of, CLASSES, 3, 10)
    assert [picture.name for picture in both] == ["features-pca", "features-tsne"]
    for picture in both:
        assert "60 test items (dots) and 9 generated images (triangles)" in picture.caption
        assert "round 10" in picture.title
    again = model_plots.feature_scatters(real, labels, made, of, CLASSES, 3, 10)
    assert again == both
    without = model_plots.feature_scatters(real, labels, made[:0], of[:0], CLASSES, 3, 10)
    assert "generated" not in without[0].caption
    one = model_plots.feature_scatters(real[:, :1], labels, made[:, :1], of, CLASSES, 3, 10)
    assert len(one) == 2


def test_what_would_say_nothing_is_not_drawn() -> None:
    real, labels = clouds()
    none = real[:0], labels[:0]
    assert model_plots.feature_scatters(real[:29], labels[:29], *none, CLASSES, 0, 1) == []
    same, broken = np.ones_like(real), real.copy()
    broken[3, 1] = np.nan
    for values in (same, broken):
        assert model_plots.feature_scatters(values, labels, *none, CLASSES, 0, 1) == []
        assert model_plots.spectrum(values, labels, CLASSES, 1) is None
    assert model_plots.spectrum(real[:27], labels[:27], CLASSES, 1) is None


def test_a_spectrum_leaves_small_classes_out() -> None:
    real, labels = clouds()
    labels[:] = 0
    labels[:9] = 1
    found = model_plots.spectrum(real, labels, CLASSES, 4)
    assert found is not None
    assert "round 4" in found.title
    assert found.caption.startswith("The 12 largest eigenvalues of"), (
        "the features have 12 dimensions"
    )
    alone = model_plots.spectrum(real[9:], labels[9:], CLASSES, 4)
    assert found == alone


@pytest.mark.parametrize("count", [1, 30])
def test_any_number_of_classes(count: int) -> None:
    names = [f"class {i} with a rather long name" for i in range(count)]
    draw = np.random.default_rng(0)
    made = model_plots.text_similarities(draw.normal(size=(count, 7)), names)
    assert made.name == "text-embeddings"
    assert made.pixels.shape[1] == 960
    labels = np.arange(10 * count) % count
    assert model_plots.spectrum(draw.normal(size=(10 * count, 5)), labels, names, 1) is not None


def test_nothing_global_is_drawn_from() -> None:
    real, labels = clouds()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    model_plots.feature_scatters(real, labels, *clouds(6), CLASSES, 0, 1)
    model_plots.spectrum(real, labels, CLASSES, 1)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_many_classes_leave_room_for_the_axes() -> None:
    """62 of them; a figure without room warns, which fails here."""
    draw = np.random.default_rng(0)
    labels = np.arange(620) % 62
    drawn = model_plots.spectrum(
        draw.normal(size=(620, 12)), labels, [f"uppercase letter {i}" for i in range(62)], 3
    )
    assert drawn is not None
    height, width = drawn.pixels.shape[:2]
    assert height > 1.5 * width


def test_distances_need_two_rounds() -> None:
    assert model_plots.prototype_distances({"own class": [(1, 2.0)]}) is None
    drawn = model_plots.prototype_distances(
        {"own class": [(1, 2.0), (4, 1.0)], "classes missing at the site": [(4, 3.0)]}
    )
    assert drawn is not None
    assert (drawn.name, drawn.pixels.ndim) == ("prototypes", 3)
