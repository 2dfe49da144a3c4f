"""ConDistFL by hand on two voxels, and where it is FedAvg."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from monai.losses import DiceCELoss
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.core.message import Message
from medfl.data.known_labels import AnnotatedClasses, PartialLoss
from medfl.methods import load
from medfl.methods.condistfl import conditional
from medfl.networks import build
from medfl.training import Site
from tests.support.toy import Data, Toy, bits, sgd, simulate

SPLEEN_UNKNOWN = AnnotatedClasses((2,), 3)
"""Background, spleen, liver: the site annotates the liver."""


def odds(*voxels: tuple[float, ...]) -> Tensor:
    """Return logits (1, 3, N, 1) whose softmax has these odds."""
    return torch.tensor(voxels).double().log().T[None, :, :, None]


def mask(*values: int) -> Tensor:
    return torch.tensor(values)[None, None, :, None]


def test_two_voxels_by_hand() -> None:
    """Given that it is no liver, background : spleen is 1 : 1 and 3 : 1 of the network, 1 : 3 and 1 : 1 of the model.

    Background: 2 (1/2 1/4 + 3/4 1/2) / (5/4 + 3/4) = 1/2; spleen: 2 (1/2 3/4 + 1/4 1/2) / (3/4 + 5/4) = 1/2. The
    liver's odds say nothing.
    """
    student, teacher = odds((1, 1, 7), (3, 1, 0.1)), odds((1, 3, 2), (1, 1, 0.5))
    assert conditional(student, teacher, mask(0, 0), SPLEEN_UNKNOWN, 1.0).item() == pytest.approx(
        0.5, abs=1e-4
    )


def test_what_is_annotated_or_predicted_as_such_does_not_count() -> None:
    """Voxel 1 is liver by the mask, or by the model: with voxel 0 alone both Dice are 1/2 * 2, 2 (1/8) / (3/4) = 1/3,
    and 2 (3/8) / (5/4) = 3/5.
    """
    student, teacher = odds((1, 1, 7), (3, 1, 0.1)), odds((1, 3, 2), (1, 1, 0.5))
    expected = 1 - (1 / 3 + 3 / 5) / 2
    by_mask = conditional(student, teacher, mask(0, 2), SPLEEN_UNKNOWN, 1.0)
    by_model = conditional(student, odds((1, 3, 2), (1, 1, 9)), mask(0, 0), SPLEEN_UNKNOWN, 1.0)
    assert by_mask.item() == pytest.approx(expected, abs=1e-4)
    assert by_model.item() == pytest.approx(expected, abs=1e-4)
    nothing = conditional(student, teacher, mask(2, 2), SPLEEN_UNKNOWN, 1.0)
    assert nothing.item() == 1.0  # a constant, without a gradient


def test_the_temperature_divides_the_logits() -> None:
    """At tau 2 odds of 1 : 9 are 1 : 3."""
    hot = conditional(odds((1, 9, 1)), odds((1, 9, 1)), mask(0), SPLEEN_UNKNOWN, 2.0)
    cold = conditional(odds((1, 3, 1)), odds((1, 3, 1)), mask(0), SPLEEN_UNKNOWN, 1.0)
    assert hot.item() == pytest.approx(cold.item())
    dice = [2 * p * p / (2 * p) for p in (1 / 4, 3 / 4)]
    assert hot.item() == pytest.approx(1 - sum(dice) / 2, abs=1e-4)


def test_the_received_model_gets_no_gradient_and_the_annotated_none_of_it() -> None:
    student, teacher = odds((1, 2, 7)).requires_grad_(), odds((1, 3, 2)).requires_grad_()
    conditional(student, teacher, mask(0), SPLEEN_UNKNOWN, 1.0).backward()
    assert teacher.grad is None
    assert student.grad is not None
    background, spleen, liver = student.grad.flatten().tolist()
    assert liver == 0
    assert background == pytest.approx(-spleen)
    assert spleen < 0, "towards the received model's 1 : 3"


def masks_in_channels(y: Tensor) -> Tensor:
    return nn.functional.one_hot(y[:, 0], 3).permute(0, 3, 1, 2).float()


def test_masks_may_be_channels() -> None:
    student, teacher, y = odds((1, 1, 7), (3, 1, 1)), odds((1, 3, 2), (1, 1, 0.5)), mask(0, 2)
    expected = conditional(student, teacher, y, SPLEEN_UNKNOWN, 2.0)
    assert (
        conditional(student, teacher, masks_in_channels(y), SPLEEN_UNKNOWN, 2.0).item()
        == expected.item()
    )
    assert conditional(student, teacher, y[:, 0], SPLEEN_UNKNOWN, 2.0).item() == expected.item()


def test_the_weight_grows_in_equal_steps() -> None:
    method = load("condistfl", lam_first=0.1, lam_last=0.9, rounds=5)
    assert [round(method._weight(r), 3) for r in (1, 2, 3, 5, 9)] == [0.1, 0.3, 0.5, 0.9, 0.9]
    assert load("condistfl", lam_first=0.1, lam_last=0.9, rounds=1)._weight(1) == 0.1


# As a method


def squares() -> Data:
    """Two sites; each shows two structures and annotates one."""
    generator = torch.Generator().manual_seed(0)
    data = {}
    for name, value in (("a", 1), ("b", 2)):
        full = torch.zeros(4, 1, 16, 16, dtype=torch.int64)
        full[:, :, 2:7, 2:7], full[:, :, 8:14, 8:14] = 1, 2
        data[name] = (
            full + 0.3 * torch.randn(full.shape, generator=generator),
            torch.where(full == value, full, 0),
        )
    return data


class Partial(Toy):
    """Sites whose masks show one of two structures."""

    def site(self, name: str, round_: int = 1) -> Site:
        known = AnnotatedClasses((1,) if name == "a" else (2,), 3)
        return replace(super().site(name, round_), known=known, loss=PartialLoss(self.loss, known))


def toy(kind: type[Toy]) -> Toy:
    return kind(
        squares(),
        lambda: build("unet8", 1, 3, 2),
        DiceCELoss(to_onehot_y=True, softmax=True),
        sgd(0.05),
        batch_size=2,
    )


def test_without_weight_or_with_all_annotated_it_is_fedavg_bit_for_bit() -> None:
    fedavg = {
        kind: bits(simulate(load("fedavg"), toy(kind), 2).server["weights"])
        for kind in (Toy, Partial)
    }
    assert bits(simulate(load("condistfl", rounds=2), toy(Toy), 2).server["weights"]) == fedavg[Toy]
    off = load("condistfl", lam_first=0.0, lam_last=0.0)
    assert bits(simulate(off, toy(Partial), 2).server["weights"]) == fedavg[Partial]
    on = bits(simulate(load("condistfl", rounds=2), toy(Partial), 2).server["weights"])
    assert on != fedavg[Partial]


def test_the_code_s_defaults() -> None:
    method = load("condistfl")
    assert (method.tau, method.lam_first, method.lam_last, method.rounds) == (2.0, 0.01, 1.0, 120)


def test_masks_in_channels_that_nobody_marked_stay_masks_of_one_channel() -> None:
    """Two images of masks in channels: only where the liver's channel is set, in its own image, nothing counts."""
    student, teacher = (
        torch.cat([odds(a), odds(b)])
        for a, b in (((1, 1, 7), (3, 1, 0.1)), ((1, 3, 2), (1, 1, 0.5)))
    )
    y = torch.cat([mask(0), mask(2)])
    alone = conditional(student[:1], teacher[:1], y[:1], SPLEEN_UNKNOWN, 1.0)
    both = conditional(student, teacher, masks_in_channels(y), SPLEEN_UNKNOWN, 1.0)
    assert both.item() == pytest.approx(alone.item(), abs=1e-6)


class Deep(nn.Module):
    """A network with deep supervision: the first of its outputs is the whole one, the second says the contrary."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        z = self.conv(x)
        return [z, -z]


def test_a_step_descends_the_loss_plus_the_weighted_distillation_of_the_first_output() -> None:
    """w - 0.1 grad(L + lam C): with L the mean square of the first output, by autograd."""
    data = {name: (x[:2], y[:2]) for name, (x, y) in squares().items()}
    made = Partial(data, Deep, lambda out, y: out[0].square().mean(), sgd(0.1), batch_size=2)
    with made.networks.scope():
        site = replace(made.site("a"), loss=lambda out, y: out[0].square().mean())
        method = load("condistfl", lam_first=0.8, lam_last=0.8)
        _, reply = method.local_update(site, {}, Message({"weights": made.initial}))
    network, (x, y) = Deep(), data["a"]
    network.load_state_dict(made.initial)
    received = Deep()
    received.load_state_dict(made.initial)
    z, t = network(x)[0], received(x)[0].detach()
    assert site.known is not None
    loss = z.square().mean() + 0.8 * conditional(z, t, y, site.known, 2.0)
    slopes = torch.autograd.grad(loss, list(network.parameters()))
    for (name, parameter), slope in zip(network.named_parameters(), slopes, strict=True):
        torch.testing.assert_close(
            reply["weights"][name], (parameter - 0.1 * slope).detach(), rtol=0, atol=1e-6
        )


def test_the_received_model_stays_as_it_was() -> None:
    made = toy(Partial)
    site, weights = made.site("a", 1), made.initial
    before = {name: tensor.clone() for name, tensor in weights.items()}
    load("condistfl").local_update(site, {}, Message({"weights": weights}))
    assert all(torch.equal(before[name], weights[name]) for name in before)


def test_channels_of_yes_and_no_are_refused() -> None:
    site = replace(toy(Partial).site("a"), known=AnnotatedClasses((1,), 3, exclusive=False))
    with pytest.raises(
        InputError, match="condistfl at site 'a', whose network says yes or no in each channel"
    ):
        load("condistfl").check(site)
