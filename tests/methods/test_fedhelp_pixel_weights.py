"""Pixel weights of masks: class balance, and the gap between two objects, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from medfl.methods.fedhelp.pixel_weights import CAP, Border, beta, class_balance


def disc() -> Tensor:
    """A disc of radius 20 in 101 x 101 pixels: 1,257 of them."""
    axis = torch.arange(101) - 50
    return (axis[:, None] ** 2 + axis[None] ** 2 <= 400).long()


def squares() -> Tensor:
    """Two squares of 20 x 20 pixels, four columns apart."""
    mask = torch.zeros(40, 60, dtype=torch.int64)
    mask[10:30, 5:25] = mask[10:30, 29:49] = 1
    return mask


def test_one_disc_has_two_weights_of_mean_one() -> None:
    """N / (2 N_c): 10201 / (2 * 8944) = 0.570271 outside, 10201 / (2 * 1257) = 4.057677 inside (card, check 11)."""
    mask = disc()[None]
    weights = beta(mask, class_balance(mask, 2), Border())
    assert int(mask.sum()) == 1257
    found = [round(float(value), 6) for value in weights.unique()]
    assert found == [0.570271, 4.057677]
    assert float(weights.double().mean()) == pytest.approx(1, abs=1e-6)


def test_one_disc_with_equal_distances_has_a_rim() -> None:
    """10 exp(-(1 + 1)^2 / 50) = 9.231163 on the first pixel outside, 10 exp(-100 / 50) = 1.353353 at distance 5."""
    border = Border(single="d2_equals_d1")(disc()[None])[0]
    assert float(border.max()) == pytest.approx(9.231163, abs=1e-6)
    assert float(border[50, 50 + 25]) == pytest.approx(1.353353, abs=1e-6)
    assert not border[disc() > 0].any()


def test_the_gap_between_two_squares() -> None:
    """In the gap d_1 + d_2 = 5 in all four columns: 10 exp(-25 / 50) = 6.065307."""
    border = Border()(squares()[None])[0]
    torch.testing.assert_close(border[20, 25:29], torch.full((4,), 10 * math.exp(-0.5)))
    assert float(border[20, 25]) == pytest.approx(6.065307, abs=1e-6)
    assert not border[squares() > 0].any()
    assert Border(inside=True)(squares()[None])[0][20, 24] == pytest.approx(
        10 * math.exp(-((0 + 5) ** 2) / 50)
    )


def test_two_objects_in_a_volume_and_corners_that_do_not_join() -> None:
    volume = torch.zeros(1, 8, 8, 8, dtype=torch.int64)
    volume[0, 1, 1, 1] = volume[0, 1, 1, 4] = 1
    assert float(Border()(volume)[0, 1, 1, 2]) == pytest.approx(10 * math.exp(-(9 / 50)))
    corner = torch.tensor([[[1, 0], [0, 1]]])
    assert float(Border()(corner)[0, 0, 1]) == pytest.approx(10 * math.exp(-4 / 50))


def test_an_empty_and_a_full_mask_are_finite() -> None:
    masks = torch.stack([torch.zeros(6, 6), torch.ones(6, 6)]).long()
    for mask in masks:
        weights = beta(mask[None], class_balance(mask[None], 2), Border(single="d2_equals_d1"))
        assert weights.isfinite().all()
        torch.testing.assert_close(
            weights, torch.full((1, 6, 6), 0.5)
        )  # N / (2 N): the absent class has no pixel
    assert class_balance(masks[:1], 2).tolist() == [0.5, 0]


def test_rare_classes_are_capped() -> None:
    mask = torch.zeros(100, dtype=torch.int64)
    mask[0] = 1
    assert class_balance([mask], 2).tolist() == pytest.approx([100 / (2 * 99), CAP])


def test_borders_are_computed_once_for_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    border, calls = Border(), []
    computed = Border._computed
    monkeypatch.setattr(
        Border, "_computed", lambda self, mask: calls.append(1) or computed(self, mask)
    )
    first = border(squares()[None])
    again = border(torch.stack([squares(), squares()]))
    assert len(calls) == 1
    assert torch.equal(again[1], first[0])
    assert not Border(beta_0=0)(squares()[None]).any()
