"""The loss over what a site's masks show: by hand on two voxels, and against plain PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
from monai.losses import DeepSupervisionLoss, DiceCELoss, DiceLoss
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from medfl.core.errors import InputError
from medfl.data.known_labels import AnnotatedClasses, PartialLoss

LIVER = AnnotatedClasses((2,), 3)
"""Background, spleen, liver: the site annotates the liver."""
ODDS = torch.tensor(
    [[[math.log(2.0), 0.0], [0.0, 0.0], [0.0, math.log(6.0)]]]
).double()  # (1, 3, 2)
"""Voxel 0: odds 2 : 1 : 1, voxel 1: odds 1 : 1 : 6."""


def labels(*values: int) -> Tensor:
    return torch.tensor([[values]])


def volume(x: Tensor) -> Tensor:
    """Return (B, C, 2) as (B, C, 2, 1)."""
    return x[..., None]


def test_two_voxels_by_hand() -> None:
    """Background or spleen 3/4 and 2/8, liver 1/4 and 6/8; voxel 0 is annotated as background, voxel 1 as liver.

    Cross-entropy: -(log 3/4 + log 6/8) / 2. Dice of the liver: 1 - 2 * 6/8 / (1/4 + 6/8 + 1) = 1/4; of the rest
    1 - 2 * 3/4 / (3/4 + 2/8 + 1) = 1/4.
    """
    y = labels(0, 2)
    merged = LIVER.marginal_logits(volume(ODDS)).softmax(1)[0, :, :, 0]
    torch.testing.assert_close(merged, torch.tensor([[0.75, 0.25], [0.25, 0.75]]).double())
    assert LIVER.renumbered(y).tolist() == [[[0, 1]]]
    entropy = PartialLoss(lambda z, y: cross_entropy(z, y[:, 0]), LIVER)
    assert entropy(volume(ODDS), volume(y)).item() == pytest.approx(-math.log(0.75))
    dice = DiceLoss(softmax=True, to_onehot_y=True, smooth_nr=0, smooth_dr=0)
    assert PartialLoss(dice, LIVER)(volume(ODDS), volume(y)).item() == pytest.approx(0.25)


def test_the_gradient_leaves_open_which_of_the_unknown_it_is() -> None:
    """At a voxel of background the naive loss pushes the spleen down; marginally both keep their odds, 2 : 1.

    d/dz of -log (p0 + p1) is p - q, q the odds among background and spleen: (1/2 - 2/3, 1/4 - 1/3, 1/4).
    """
    z = volume(ODDS[..., :1]).clone().requires_grad_()
    entropy = PartialLoss(lambda z, y: cross_entropy(z, y[:, 0]), LIVER)
    (gradient,) = torch.autograd.grad(entropy(z, volume(labels(0))), z)
    expected = torch.tensor([1 / 2 - 2 / 3, 1 / 4 - 1 / 3, 1 / 4]).double()
    torch.testing.assert_close(gradient.flatten(), expected)
    naive = PartialLoss(entropy.loss, LIVER, naive=True)
    (pushed,) = torch.autograd.grad(naive(z, volume(labels(0))), z)
    torch.testing.assert_close(pushed.flatten(), torch.tensor([1 / 2 - 1, 1 / 4, 1 / 4]).double())


@pytest.mark.parametrize("known", [LIVER, AnnotatedClasses((1, 3), 5), AnnotatedClasses((4,), 5)])
def test_it_is_the_probability_of_any_of_the_unknown(known: AnnotatedClasses) -> None:
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(2, known.count, 4, 3, generator=generator).double()
    p = z.softmax(1)
    rest = torch.stack([p[:, c] for c in known.unannotated]).sum(0)
    wanted = torch.stack([rest, *(p[:, c] for c in known.classes)], 1)
    torch.testing.assert_close(known.marginal_logits(z).softmax(1), wanted)


def test_whatever_masks_show_of_other_structures_becomes_background() -> None:
    known, y = AnnotatedClasses((1, 3), 5), torch.arange(5, dtype=torch.uint8).reshape(1, 1, 5, 1)
    assert known.renumbered(y).flatten().tolist() == [0, 1, 0, 2, 0]
    assert known.others_as_background(y).flatten().tolist() == [0, 1, 0, 3, 0]
    assert known.renumbered(y).dtype == known.others_as_background(y).dtype == torch.uint8
    channels = one_hot(y[0, 0].long(), 5).permute(2, 0, 1)[None].float()
    assert torch.equal(known.renumbered(channels).argmax(1), known.renumbered(y)[:, 0].long())
    assert torch.equal(
        known.others_as_background(channels).argmax(1), known.others_as_background(y)[:, 0].long()
    )


def test_masks_with_and_without_the_other_structures_have_one_loss() -> None:
    """A simulated site, whose masks show all, trains as a true one, whose masks do not."""
    loss, z = PartialLoss(DiceCELoss(softmax=True, to_onehot_y=True), LIVER), volume(ODDS)
    assert loss(z, volume(labels(1, 2))).item() == loss(z, volume(labels(0, 2))).item()


def test_channels_of_yes_and_no_are_left_out() -> None:
    known = AnnotatedClasses((0, 2), 3, exclusive=False)
    z, y = torch.randn(1, 3, 2, 2), torch.ones(1, 3, 2, 2)
    assert torch.equal(known.marginal_logits(z), z[:, [0, 2]])
    assert torch.equal(known.renumbered(y), y[:, [0, 2]])
    assert known.others_as_background(y).sum((2, 3)).tolist() == [[4, 0, 4]]
    assert known.named(("core", "whole", "enhancing")) == ("core", "enhancing")


def test_every_output_of_deep_supervision_is_merged() -> None:
    plain = DiceCELoss(softmax=True, to_onehot_y=True)
    deep = DeepSupervisionLoss(plain, weights=[1.0, 0.5])
    z, y = torch.randn(1, 3, 4, 4), torch.randint(0, 3, (1, 1, 4, 4)).float()
    small = z[..., ::2, ::2]
    expected = plain(LIVER.marginal_logits(z), LIVER.renumbered(y)) + 0.5 * plain(
        LIVER.marginal_logits(small), LIVER.renumbered(y)[..., 1::2, 1::2]
    )
    torch.testing.assert_close(PartialLoss(deep, LIVER)([z, small], y), expected)


def test_an_output_that_is_not_a_channel_a_structure_is_refused() -> None:
    with pytest.raises(
        InputError, match="with --site-labels it has 3 channels, one for each structure"
    ):
        LIVER.marginal_logits(torch.zeros(1, 2, 4, 4))
