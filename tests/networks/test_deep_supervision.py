"""Deep supervision: all but the loss see one output, and the loss is MONAI's over all of them."""

from __future__ import annotations

import copy

import pytest
import torch
from monai.losses import DeepSupervisionLoss, DiceCELoss
from monai.networks.nets.dynunet import DynUNet
from torch import Tensor, nn

from medfl import methods
from medfl.data.known_labels import AnnotatedClasses, PartialLoss
from medfl.networks.heads import entering_head, head, head_name
from medfl.training import Networks
from medfl.training.site import mean_loss
from tests.methods.test_segmentation_contract import (
    SEGMENTING,
    SETTINGS,
    discs,
    public_rings,
    segmenting,
)
from tests.support.sweeps import mostly_slow
from tests.support.toy import Toy, judged, sgd, simulate

WEIGHTS = (2 / 3, 1 / 3)
DICE_CE = DiceCELoss(to_onehot_y=True, softmax=True)


def network(supervised: bool = True) -> DynUNet:
    """As a plan of four levels has it: of three levels that are decoded the two finest are supervised."""
    steps = [1, 2, 2, 2]
    return DynUNet(
        2, 1, 2, [3] * 4, steps, steps[1:], filters=[4, 4, 8, 8], deep_supervision=supervised
    )


def loss_of_levels(outputs: Tensor, target: Tensor) -> Tensor:
    """The loss of a planned bundle."""
    several = outputs.unbind(1) if outputs.ndim > target.ndim else outputs
    value: Tensor = DeepSupervisionLoss(DICE_CE, weights=list(WEIGHTS))(several, target)
    return value


def leased() -> nn.Module:
    pool = Networks(network, 0, torch.device("cpu"))
    return pool.lease(pool.initial)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 1, 16, 16, generator=generator)
    return x, (x.abs() > 1).long()


def test_one_output_of_full_size_is_seen() -> None:
    model = leased()
    plain = network()
    plain.load_state_dict(model.state_dict())
    x, _ = batch()
    for mode in (True, False):
        output = model.train(mode)(x)
        expected = plain.train(mode)(x)
        assert output.shape == (2, 2, 16, 16)
        assert torch.equal(output, expected[:, 0] if mode else expected)


def test_the_loss_is_that_of_all_levels_and_so_is_its_gradient() -> None:
    """Two thirds and one third, nnU-Net's weights 1 and 1/2, of each level's loss; bit for bit as in MONAI."""
    model = leased()
    plain = network()
    plain.load_state_dict(model.state_dict())
    x, y = batch()
    loss = mean_loss(loss_of_levels)(model(x), y)
    loss.backward()
    outputs = plain.train()(x)
    by_hand = sum(w * DICE_CE(outputs[:, i], y) for i, w in enumerate(WEIGHTS))
    torch.testing.assert_close(loss, by_hand)

    loss_of_levels(outputs, y).backward()
    for mine, monais in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.equal(mine.grad, monais.grad)


def test_it_can_be_copied_after_a_step() -> None:
    """MONAI's keeps the outputs of its levels, with their graph, which cannot be copied."""
    model = leased()
    x, y = batch()
    mean_loss(loss_of_levels)(model(x), y).backward()
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))


def test_its_head_makes_the_output_of_full_size() -> None:
    model = leased().eval()
    assert head_name(model) == "output_block.conv.conv"
    with torch.no_grad(), entering_head(model) as seen:
        output = model(batch()[0])
    torch.testing.assert_close(head(model)(seen[-1]), output)


def test_a_site_that_annotates_a_part_is_supervised_at_all_levels() -> None:
    """A class less than all: of each level's output the marginal logits."""
    known = AnnotatedClasses((2,), 3)
    pool = Networks(
        lambda: DynUNet(2, 1, 3, [3] * 4, [1, 2, 2, 2], [2] * 3, deep_supervision=True, filters=[4] * 4),
        0,
        torch.device("cpu"),
    )  # fmt: skip
    model = pool.lease(pool.initial)
    plain = pool._factory()
    plain.load_state_dict(model.state_dict())
    x, y = batch()
    outputs = plain.train()(x)
    marginal = [known.marginal_logits(output) for output in outputs.unbind(1)]
    expected = sum(
        w * DICE_CE(z, known.renumbered(2 * y)) for z, w in zip(marginal, WEIGHTS, strict=True)
    )
    value = PartialLoss(mean_loss(loss_of_levels), known)(model(x), 2 * y)
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("name", mostly_slow(SEGMENTING))
def test_methods_train_it_at_all_levels(name: str) -> None:
    """And move the head of the coarser level; FedLoRA freezes it, as it does all but its head and small matrices."""
    toy = segmenting(
        Toy(discs(2), network, mean_loss(loss_of_levels), sgd(0.05), batch_size=2, public=public_rings(2))
    )  # fmt: skip
    method = methods.load(name, SETTINGS.get(name, {}))
    outcome = simulate(method, toy, 1)
    for site in ["central"] if method.pools_data else toy.names:
        weights = judged(method, toy, outcome, site)
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
        coarser = "deep_supervision_heads.0.conv.conv.weight"
        key = next(key for key in weights if key.endswith(coarser))
        unchanged = torch.equal(weights[key], toy.networks.initial[coarser])
        assert unchanged == (name == "fedlora")
