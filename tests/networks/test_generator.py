"""The generator, its augmentation and its losses; numbers in brackets are the checks of the method's card."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from medfl.core.errors import InputError
from medfl.networks import build
from medfl.networks.generator import (
    NORMALISATIONS,
    Augmentation,
    Generator,
    _Distances,
    diversity_loss,
    statistics_gap,
)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=draws(seed), dtype=dtype)


# The network


@pytest.mark.parametrize(("dimension", "parameters"), [(512, 4_758_211), (768, 6_855_363)])
def test_sizes(dimension: int, parameters: int) -> None:
    """Check 14; the file sent is 19,036,980 bytes of tensors with 512 dimensions."""
    with torch.device("meta"):
        network = Generator(dimension, 3, 128, 128)
    assert sum(p.numel() for p in network.parameters()) == parameters
    buffers = dict(network.named_buffers())
    assert sum(b.numel() for b in buffers.values()) == 1029
    assert sum(b.numel() for b in buffers.values() if b.is_floating_point()) == 1024
    if dimension == 512:
        assert (
            sum(t.numel() * t.element_size() for t in network.state_dict().values()) == 19_036_980
        )
    assert network.linear.out_features == 128 * 8 * 8


def test_images_are_between_0_and_1_and_of_the_size_asked_for() -> None:
    """Check 14."""
    for channels, height, width in ((3, 128, 128), (1, 32, 48)):
        images = Generator(12, channels, height, width)(normal(2, 12, dtype=torch.float32))
        assert images.shape == (2, channels, height, width)
        assert 0 < images.min() <= images.max() < 1


def test_layers_in_their_order() -> None:
    """Four doublings, each convolution followed by BatchNorm and LeakyReLU of slope 0.2, a sigmoid at the end."""
    network = Generator(12, 3, 32, 32).eval()
    body = [type(layer).__name__ for layer in network.body]
    block = ["Conv2d", "BatchNorm2d", "LeakyReLU"]
    assert body == [*block, *4 * ["Upsample", *block], "Conv2d", "Sigmoid"]
    z = normal(2, 12, dtype=torch.float32)
    x = network.linear(z).view(2, 128, 2, 2)
    for layer in network.body[:-1]:
        x = torch.where(x > 0, x, 0.2 * x) if isinstance(layer, nn.LeakyReLU) else layer(x)
    torch.testing.assert_close(network(z), x.sigmoid())


@pytest.mark.parametrize(("size", "advice"), [(28, 32), (8, 16), (200, 192)])
def test_a_side_that_is_no_multiple_of_16_is_refused(size: int, advice: int) -> None:
    text = (
        f"images of {size} x {size} pixels; .* multiples of 16; "
        f"take --config image_size={advice}, or .*generator=false"
    )
    with pytest.raises(InputError, match=text):
        Generator(12, 3, size, size)


# Augmentation


def test_one_crop_for_the_batch_or_one_for_each_image() -> None:
    images = normal(1, 3, 16, 16).expand(6, 3, 16, 16)
    whole = Augmentation((0.0,), (1.0,))(images, draws())
    assert all(torch.equal(image, whole[0]) for image in whole)
    single = Augmentation((0.0,), (1.0,), per_image=True)(images, draws())
    assert len({tuple(image.flatten().tolist()) for image in single}) == 6
    assert torch.equal(whole, Augmentation((0.0,), (1.0,))(images, draws()))


def test_crops_are_shifts_by_up_to_4_and_flips_of_both_axes() -> None:
    """Each pixel holds its own number, so where it went can be read off."""
    image = torch.arange(1.0, 257).reshape(1, 1, 16, 16)
    seen = set()
    for seed in range(400):
        moved = Augmentation((0.0,), (1.0,))(image, draws(seed))[0, 0]
        assert moved.shape == (16, 16)
        centre = int(moved[8, 8]) - 1
        row, column = divmod(centre, 16)
        seen.add((row, column))
        down, right = int(moved[9, 8] - moved[8, 8]) // 16, int(moved[8, 9] - moved[8, 8])
        assert {abs(down), abs(right)} == {1}
        padding = 256 - int((moved > 0).sum())
        shift = (row - 8 if down > 0 else row - 7), (column - 8 if right > 0 else column - 7)
        assert padding == 256 - (16 - abs(shift[0])) * (16 - abs(shift[1])), (
            "what is cut off is filled with 0"
        )
        assert max(map(abs, shift)) <= 4
    assert {row for row, _ in seen} == {column for _, column in seen} == set(range(3, 13))


def test_padding_is_black_and_normalisation_comes_last() -> None:
    mean, std = NORMALISATIONS["imagenet"]
    images = torch.ones(1, 3, 16, 16)
    moved = Augmentation(mean, std)(images, draws(1))
    values = {
        tuple(round(v, 4) for v in moved[0, :, i, j].tolist()) for i in range(16) for j in range(16)
    }
    black, white = (
        tuple(round((v - m) / s, 4) for m, s in zip(mean, std, strict=True)) for v in (0, 1)
    )
    assert values == {black, white}
    grey = Augmentation(*NORMALISATIONS["half"])(torch.ones(2, 1, 16, 16), draws(1))
    assert set(grey.unique().tolist()) == {-1.0, 1.0}


def test_the_augmentation_passes_gradients() -> None:
    images = normal(2, 3, 16, 16).requires_grad_()
    Augmentation(*NORMALISATIONS["none"])(images, draws()).sum().backward()
    assert set(images.grad.unique().tolist()) <= {0.0, 1.0}
    assert images.grad.sum() >= 2 * 3 * 12 * 12


# L_div


def test_the_diversity_loss_by_hand() -> None:
    """Two images of class 0 differ by 3 in one pixel and by 1 in another, their conditions by 2: 1 / (4/2 + 1e-5).

    Three images of class 1: L1 distances 1, 2, 3 over conditions' 1, 1, 2, so the mean of 1/(1 + eps), 1/(2 + eps) and
    1/(1.5 + eps). One image of class 2 adds 0. The sum is divided by K = 4; pairs of different classes never count.
    """
    images = torch.zeros(6, 1, 2, 2, dtype=torch.float64)
    images[1, 0, 0] = torch.tensor([3.0, -1.0])
    images[2:5, 0, 1, 1] = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    images[5] = 7
    z = torch.zeros(6, 2, dtype=torch.float64)
    z[1], z[3, 0], z[4] = 1, 1, 1
    eps = 1e-5
    wanted = 1 / (2 + eps) + (1 / (1 + eps) + 1 / (1.5 + eps) + 1 / (2 + eps)) / 3
    labels = torch.tensor([0, 0, 1, 1, 1, 2])
    assert diversity_loss(images, z, labels, 4).item() == pytest.approx(wanted / 4, rel=1e-12)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    again = diversity_loss(images[order], z[order], labels[order], 4)
    assert again.item() == pytest.approx(wanted / 4, rel=1e-12)


def test_the_diversity_loss_scales() -> None:
    """Check 12."""
    images, z = normal(12, 3, 8, 8), normal(12, 16, seed=1)
    labels = torch.arange(12) % 3
    base = diversity_loss(images, z, labels, 3)
    assert diversity_loss(2 * images, z, labels, 3).item() == pytest.approx(
        base.item() / 2, rel=1e-4
    )
    assert diversity_loss(images, 2 * z, labels, 3).item() == pytest.approx(
        base.item() * 2, rel=1e-4
    )
    big = 1e6  # epsilon no longer counts
    one, half = (diversity_loss(f * big * images, z, labels, 3).item() for f in (1, 2))
    assert half == pytest.approx(one / 2, rel=1e-6)
    conditions = normal(12, 3, 8, 8, seed=1)
    same = diversity_loss(conditions, conditions.flatten(1), labels, 3)
    assert same.item() == pytest.approx(1 / (1 + 1e-5), rel=1e-9)
    assert round(same.item(), 5) == 0.99999
    flat = diversity_loss(images[:1].expand_as(images), z, labels, 3)
    assert flat.item() == pytest.approx(1e5, rel=1e-9)
    assert diversity_loss(images[:3], z[:3], torch.arange(3), 3).item() == 0


def test_the_l1_norms_are_sums() -> None:
    """Check 12: means instead would inflate the loss by 3 S^2 / D, 96 for S = 128 and D = 512."""
    images, z, labels = (
        normal(4, 3, 16, 16),
        normal(4, 8, seed=1),
        torch.zeros(4, dtype=torch.int64),
    )
    apart = (images[:, None] - images[None]).abs()
    ratio = apart.mean((2, 3, 4)) / (z[:, None] - z[None]).abs().mean(2)
    pairs = torch.triu_indices(4, 4, 1)
    averaged = (1 / ratio[pairs[0], pairs[1]]).mean()
    factor = 3 * 16**2 / 8
    assert (averaged / diversity_loss(images, z, labels, 1)).item() == pytest.approx(
        factor, rel=1e-4
    )
    assert 3 * 128**2 / 512 == 96


def test_the_distances_are_those_of_pdist() -> None:
    """Value and gradient, with rows that are alike in some places; and the gradient by finite differences."""
    x = normal(7, 30)
    x[3, :10] = x[5, :10]
    weights, gradients = normal(21, 1, seed=2)[:, 0], []
    for function in (_Distances.apply, lambda rows: nn.functional.pdist(rows, 1)):
        own = x.clone().requires_grad_()
        found = function(own)
        (found * weights).sum().backward()
        gradients.append((found.detach(), own.grad))
    torch.testing.assert_close(gradients[0], gradients[1])
    assert torch.autograd.gradcheck(_Distances.apply, normal(4, 5).requires_grad_())
    assert _Distances.apply(x[:1]).shape == (0,)


def test_the_diversity_loss_moves_images_apart() -> None:
    images = (0.5 + 0.01 * normal(4, 1, 4, 4)).requires_grad_()
    z, labels = normal(4, 8, seed=1), torch.zeros(4, dtype=torch.int64)
    loss = diversity_loss(images, z, labels, 1)
    loss.backward()
    assert diversity_loss((images - 1e-9 * images.grad).detach(), z, labels, 1) < loss


# L_dis


def test_20_layers_of_a_resnet18_and_nothing_where_statistics_agree() -> None:
    """Check 13; shortcut layers included, statistics are the biased ones of the layers' inputs."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        network = build("resnet18", 3, 5)
    x = normal(4, 3, 32, 32, dtype=torch.float32)
    layers = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    network.eval()
    with torch.no_grad():
        with statistics_gap(network) as gaps:
            network(x)
        assert len(gaps) == 20
        assert float(torch.stack(gaps).sum()) > 30, "not a small term at first"

        def settle(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            variance, mean = torch.var_mean(inputs[0], (0, 2, 3), correction=0)
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)

        handles = [layer.register_forward_pre_hook(settle) for layer in layers]
        network(x)
        for handle in handles:
            handle.remove()
        with statistics_gap(network) as gaps:
            network(x)
        assert float(torch.stack(gaps).sum()) < 1e-3
        before = len(gaps)
        network(x)
    assert len(gaps) == before, "the hooks are gone when the block ends"


def test_the_gap_by_hand() -> None:
    """Input channel 0 is (1, 3), channel 1 is (0, 8): means (2, 4), biased variances (1, 16).

    Running means (2, 1) and variances (1, 12): ||(0, 3)|| + ||(0, 4)|| = 7; with unbiased variances (2, 32) it were
    3 + ||(1, 20)||. Running means (-1, 0) and variances (1, 16): ||(3, 4)|| = 5, a norm, not a mean.
    """
    layer = nn.BatchNorm2d(2).double().eval()
    x = torch.tensor([[[[1.0, 3.0]], [[0.0, 8.0]]]], dtype=torch.float64)
    for mean, variance, wanted in (((2, 1), (1, 12), 7), ((-1, 0), (1, 16), 5)):
        layer.running_mean.copy_(torch.tensor(mean))
        layer.running_var.copy_(torch.tensor(variance))
        with statistics_gap(nn.Sequential(layer)) as gaps:
            layer(x)
        assert [float(gap) for gap in gaps] == pytest.approx([wanted], abs=1e-12)


def test_the_gap_passes_gradients_to_the_images_only() -> None:
    layer = nn.BatchNorm2d(3).eval()
    x = normal(2, 3, 4, 4, dtype=torch.float32).requires_grad_()
    with statistics_gap(layer) as gaps:
        layer(x)
    gaps[0].backward()
    assert x.grad.abs().sum() > 0
    assert not layer.running_mean.requires_grad
    assert layer.weight.grad is None
